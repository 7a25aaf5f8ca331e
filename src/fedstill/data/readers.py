"""Readers of what people bring: folders, parquet, hub ids, .npz files, objects in memory."""

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedstill.base.errors import first_line
from fedstill.data import image_folder, vectors
from fedstill.data.decode import Fit, Split, from_table, no_classes, numbered, with_all_names
from fedstill.data.names import Known

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


Splits = tuple[Split, Split | None]

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target")
_TEST_SPLITS = ("test", "validation", "valid", "val")


def read_digits() -> Splits:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, 0..16 scaled to 0..255; no test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)
    return Split(pixels[:, None], digits.target.astype(np.int64)), None


def read_folder(path: Path, known: Known | None, fit: Fit | None = None) -> Splits:
    """A folder of parquet files in the hub's layout, of ``datasets``' ``save_to_disk``, or of images."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _read_saved(path, known, fit)
    config = path / known.config if known and known.config else path
    files: dict[str, list[Path]] = {}
    for file in sorted((config if config.is_dir() else path).rglob("*.parquet")):
        if file.name not in image_folder.METADATA:
            files.setdefault(re.split(r"[-.]", file.name)[0], []).append(file)
    if not files:
        tables = image_folder.read(path, _labels(known))
        return _read_tables(tables, tables.__getitem__, str(path), known, path, fit)
    several = {file.parent for of_split in files.values() for file in of_split}

    def one(file: Path) -> "pa.Table":
        table = pq.read_table(file, partitioning=None)
        if len(several) < 2 or image_folder.FOLDER in table.column_names:
            return table
        folder = str(file.parent.relative_to(path))
        return table.append_column(image_folder.FOLDER, pa.array([folder] * table.num_rows, pa.string()))

    def table(split: str) -> "pa.Table":
        try:
            return pa.concat_tables(one(file) for file in files[split])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"the split {split!r} of {str(path)!r} cannot be read ({_reason(error)}); copy its files again"
            ) from error

    return _read_tables(files, table, str(path), known, path, fit)


def read_parquet(path: Path, fit: Fit | None = None) -> Splits:
    """One parquet file, without a test split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(_: str) -> "pa.Table":
        try:
            return pq.read_table(path, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{str(path)!r} cannot be read ({_reason(error)}); copy it again") from error

    return _read_tables(["train"], table, str(path), None, path.parent, fit)


def _read_saved(path: Path, known: Known | None, fit: Fit | None) -> Splits:
    """Splits that ``save_to_disk`` of a ``Dataset`` or a ``DatasetDict`` wrote."""

    def load() -> "Mapping[str, datasets.Dataset]":
        import datasets

        saved = datasets.load_from_disk(str(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}

    return _read_datasets(load, str(path), known, "save it again with datasets' save_to_disk", fit)


def read_hub(hub: str, known: Known | None, name: str, fit: Fit | None = None) -> Splits:
    """A repository on the Hugging Face hub, or its copy in the cache of ``datasets``.

    ``name`` is the folder of a local copy in ``FEDSTILL_DATA``, for the error message.
    """
    advice = (
        "check the id; without a network, run "
        f"'hf download {hub} --repo-type dataset --local-dir {name}' elsewhere and put the folder at "
        f"$FEDSTILL_DATA/{name}"
        + ("" if "FEDSTILL_DATA" in os.environ else " (set FEDSTILL_DATA to a folder of data sets)")
    )

    def load() -> "datasets.DatasetDict":
        import datasets  # imported here because it takes 0.7 s

        with _offline_unless(_is_reachable(hub)):
            return datasets.load_dataset(hub, known.config if known else None)

    return _read_datasets(load, hub, known, advice, fit)


def _is_reachable(hub: str) -> bool:
    """Whether the hub replies at all; `datasets` itself tries for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub, timeout=10)
    except HfHubHTTPError:  # a reply, with a reason that `datasets` reports
        return True
    except Exception:  # its HTTP client differs between versions
        return False
    return True


@contextmanager
def _offline_unless(reachable: bool) -> Iterator[None]:
    """Let `datasets` use nothing but its cache if the hub can't be reached."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not reachable
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _read_datasets(
    load: Callable[[], "Mapping[str, datasets.Dataset]"],
    where: str,
    known: Known | None,
    advice: str,
    fit: Fit | None,
) -> Splits:
    try:
        splits = load()
    except Exception as error:  # `datasets` passes on any error of the network, the hub and the parsers
        raise ValueError(f"{where!r} cannot be loaded ({_reason(error)}); {advice}") from error

    def table(split: str) -> "pa.Table":
        from datasets import Image

        data = splits[split]
        for name, feature in data.features.items():
            if isinstance(feature, Image):
                data = data.cast_column(name, Image(decode=False))
        return data.with_format("arrow")[:]

    return _read_tables(splits, table, where, known, Path(), fit)


def _read_tables(
    names: Iterable[str],
    table: Callable[[str], "pa.Table"],
    where: str,
    known: Known | None,
    folder: Path,
    fit: Fit | None,
) -> Splits:
    """Choose the train and the test split among ``names`` and decode them."""
    names = list(names)
    train = names[0] if len(names) == 1 else "train"
    if train not in names:
        raise ValueError(f"{where!r} has the splits {', '.join(names)}, but 'train' is needed; rename one of them")
    test_splits = ((known.test,) if known else ()) + _TEST_SPLITS
    test = next((name for name in test_splits if name in names and name != train), None)

    def read(split: str) -> Split:
        image = (known.image,) if known else ()
        return from_table(
            table(split),
            f"the split {split!r} of {where!r}",
            image=image + _IMAGE_COLUMNS,
            label=_labels(known),
            folder=folder,
            fit=fit,
        )

    if not test:
        return read(train), None
    return with_all_names(read(train), read(test), where)


def _reason(error: Exception) -> str:
    """The kind of an error of another library, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def _labels(known: Known | None) -> tuple[str, ...]:
    """Possible names of the label column, best first."""
    return ((known.label,) if known else ()) + _LABEL_COLUMNS


_NAMES = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}
"""Names of a split's records and labels: Keras', then MedMNIST's, whose validation records are left out."""
_NO_COLUMNS = {name for pairs in _NAMES.values() for pair in pairs for name in pair} | {"val_images", "val_labels"}


def read_npz(path: Path) -> tuple[Split, Split | None]:
    """``x_train, y_train, x_test, y_test``, or ``train_images, train_labels, ...``: images, or vectors ``(n, d)``.

    Other 1-d arrays as long as the train labels are columns.

    Raises:
        ValueError: the file cannot be read, or an array is missing or does not fit.
    """
    if path.suffix.lower() == ".csv":
        raise ValueError(
            f"{str(path)!r} is a CSV file, which is not read; convert it, as with "
            f"pandas.read_csv({path.name!r}).to_parquet({path.with_suffix('.parquet').name!r})"
        )
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        # never unpickle: a pickle from another machine can run any program
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
        if other := next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None):
            raise ValueError(f"{other} is no array")
    except Exception as error:  # zipfile, zlib and NumPy raise different kinds of errors
        raise ValueError(
            f"{str(path)!r} is not a readable .npz file of plain arrays ({_reason(error)}); write it with "
            "numpy.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from error
    train = _split(arrays, "train", path)
    if train is None:
        raise ValueError(
            f"{str(path)!r} holds the arrays {', '.join(arrays) or 'none'}, but x_train and y_train are needed; "
            "rename them"
        )
    test = _split(arrays, "test", path)
    return (train, None) if test is None else with_all_names(train, test, str(path))


def _split(arrays: dict[str, np.ndarray], split: str, path: Path) -> Split | None:
    """One split, or None without its records."""
    x, y = next((names for names in _NAMES[split] if names[0] in arrays), ("", ""))
    if not x:
        return None
    images, where = arrays[x], f"{x} in {str(path)!r}"
    are_vectors = images.ndim == 2 and images.dtype.kind in "biuf"
    if not are_vectors and (
        images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    ):
        raise ValueError(
            f"{where} is {images.dtype} of shape {images.shape}, but images are uint8 (0..255) of shape (n, h, w) or "
            "(n, h, w, 1 or 3), and vectors are numbers of shape (n, d); convert them"
        )
    if not images.size:
        raise ValueError(f"{where} has the shape {images.shape}: there is no record in it; add records")
    if y not in arrays:
        raise ValueError(f"{str(path)!r} has {x}, but no {y}; add it, with the class of each record ({len(images)})")
    labels, class_names = _classes(arrays[y], len(images), f"{y} in {str(path)!r}")
    columns = {
        name: array
        for name, array in arrays.items()
        if name[:2] not in ("x_", "y_")
        and name not in _NO_COLUMNS
        and array.shape == (len(images),)
        and array.dtype.kind in "iuU"
    }
    rounding = None
    if are_vectors:
        found = vectors.of_array(images, where)
        rounding = vectors.rounding(images, found)
    else:
        found = np.ascontiguousarray(images.reshape(*images.shape[:3], -1).transpose(0, 3, 1, 2))
    return Split(found, labels, class_names, columns, bool(class_names), rounding=rounding)


def _classes(labels: np.ndarray, number: int, where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The class of each record, and the classes' names, sorted, if the labels are names."""
    if labels.shape not in ((number,), (number, 1)):
        raise ValueError(
            f"{where} has the shape {labels.shape}, but there are {number} records; give one label for each, in the "
            "order of the records"
        )
    labels = labels.reshape(-1)
    if labels.dtype.kind == "U":
        return numbered(labels.tolist())
    if labels.dtype.kind not in "iu":
        raise no_classes(f"{where} is {labels.dtype}")
    return labels.astype(np.int64), ()
