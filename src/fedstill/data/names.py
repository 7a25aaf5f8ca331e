"""Data sets known by name, with their place on the Hugging Face hub and their usual normalisation."""

import re
from dataclasses import dataclass

from fedstill.base.records import Normalisation


@dataclass(frozen=True)
class Known:
    """Facts about a data set known by name.

    Attributes:
        hub: Hugging Face id; None for data that come with an installed package.
        config: configuration of the hub's repository, if it has several.
        image: column of the images on the hub.
        label: column of the classes on the hub.
        test: split on the hub that is the test set.
        normalisation: per-channel mean and standard deviation; None computes them from the train split.
        class_names: class names, for files that have none.
        content: `fedstill.data.published.content` of the published records, by which records are known to be these;
            empty if nobody computed it, so that they count as somebody's own data.
    """

    hub: str | None
    config: str | None = None
    image: str = "image"
    label: str = "label"
    test: str = "test"
    normalisation: Normalisation | None = None
    class_names: tuple[str, ...] = ()
    content: str = ""


_TEN_DIGITS = tuple("0123456789")

# Values of DatasetCondensation's utils.py, which FedDM, DREAM and FedGM use too.
_CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

KNOWN: dict[str, Known] = {
    "digits": Known(
        hub=None,
        normalisation=Normalisation((0.3056523391693256,), (0.3760556917068352,)),
        class_names=_TEN_DIGITS,
        content="e2eaafebc4871d86ff026614f5f7ebe256100ba22133da9a6a020b182a2f0dd2",
    ),
    "mnist": Known(
        hub="ylecun/mnist",
        normalisation=Normalisation((0.1307,), (0.3081,)),
        class_names=_TEN_DIGITS,
        content="be2fb4cf6eb8c44ea65dfaa2a70a88fea90e934a4c3b18bba7aacc63bfb3c109",
    ),
    "fashion_mnist": Known(
        hub="zalando-datasets/fashion_mnist",
        normalisation=Normalisation((0.2861,), (0.3530,)),
        class_names=(
            "T-shirt / top", "Trouser", "Pullover", "Dress", "Coat",
            "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
        ),
        content="f5df4d1fa8e994f51f93627875336f4d71ae8854ddf96d3732359e793ae7b035",
    ),
    "cifar10": Known(
        hub="uoft-cs/cifar10",
        image="img",
        normalisation=_CIFAR10,
        class_names=(
            "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
        ),
        content="477af87be407ab59f8d1afbf86b24500a1906fe643ba2e49e9c47961fb8dfd1e",
    ),
    "cifar100": Known(
        hub="uoft-cs/cifar100",
        image="img",
        label="fine_label",
        normalisation=Normalisation((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
    # 73,257 train records: the split "extra" is not used.
    "svhn": Known(
        hub="ufldl-stanford/svhn",
        config="cropped_digits",
        normalisation=Normalisation((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        class_names=_TEN_DIGITS,
    ),
    # CIFAR-10's values, as FedAUX uses them for STL-10.
    "stl10": Known(
        hub="tanganke/stl10",
        normalisation=_CIFAR10,
        class_names=("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
    ),
    # ImageNet's values; the hub's test set is its split "valid", since the original test labels are secret.
    "tiny_imagenet": Known(hub="zh-plus/tiny-imagenet", test="valid", normalisation=_IMAGENET),
}  # fmt: skip
"""Name -> data set; a new one is one entry here (docs/data.md)."""
_PERSONS, _ID = "patient|subject|person|participant|individual|speaker|writer|user", "[ _-]?(id|no|nr|num|number|code)?"
PERSON = re.compile(rf"({_PERSONS}){_ID}|pid|mrn", re.IGNORECASE)
"""Names of columns that tell whose a record is."""
UNIT = re.compile(rf"({_PERSONS}|lesion|eye|animal|farm|case){_ID}|pid|mrn", re.IGNORECASE)
"""Names of columns that tell whose, or of what, a record is."""
