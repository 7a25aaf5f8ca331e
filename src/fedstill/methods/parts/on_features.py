"""Public features, and networks of a public extractor, a map and a linear head: for heads and for sums of features."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from fedstill.distill.public_map import PublicFeatures, PublicMap
from fedstill.models.heads import HeadModel
from fedstill.protocol import Federation, Settings, load, public_images
from fedstill.train.extractor import Extractor


class OnFeatures(Settings):
    """Settings of public features; the final network is the run's extractor, a map and a linear head."""

    needs_public: ClassVar[str] = "images"
    rebuilds: ClassVar[bool] = True
    extractor: Extractor = Extractor()
    """Source of the features."""
    space: PublicMap = PublicMap()
    """Map of the features to the heads' inputs; fewer directions mean fewer bytes and less noise."""

    @property
    def constant(self) -> float:
        """Value of the constant feature, whose coefficients are the bias."""
        raise NotImplementedError

    @property
    def clips(self) -> bool:
        """Whether rows are clipped to the public radius."""
        return True

    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """The network of `head_model` from its state; ``network`` becomes its extractor (see `Method.rebuild`)."""
        trunk = {name.removeprefix("trunk."): value for name, value in weights.items() if name.startswith("trunk.")}
        load(network, trunk)
        features = PublicFeatures(trunk, weights["mean"], weights["projection"], float(weights["radius"]))
        return _on_extractor(network, features, weights["head"], self)


def public_features(fed: Federation, settings: OnFeatures, method: str) -> PublicFeatures:
    """The run's feature map, estimated from public images alone; ``method`` is the method's name, for errors."""
    model, public = fed.new_model(), public_images(fed.public, method)
    settings.space.check_size(model, public, fed.max_bytes)
    progress = fed.progress("pretraining")
    load(model, settings.extractor.obtain(model, public, fed.rng("extractor"), progress=progress))
    return settings.space.fit(model, public, fed.rng("public map"))


def head_model(fed: Federation, features: PublicFeatures, head: Tensor, settings: OnFeatures) -> HeadModel:
    """The run's extractor, map and ``head`` as one network."""
    trunk = fed.new_model()
    load(trunk, features.weights)
    return _on_extractor(trunk, features, head.float().to(fed.device), settings).to(fed.device)


def _on_extractor(trunk: nn.Module, features: PublicFeatures, head: Tensor, settings: OnFeatures) -> HeadModel:
    bias, clip = settings.constant, settings.clips
    return HeadModel(trunk, features.mean, features.projection, features.radius, head, bias=bias, clip=clip)
