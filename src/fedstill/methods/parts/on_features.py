"""Public features, and networks of a public extractor, a map and a linear head: for heads and for sums of features."""

from collections.abc import Mapping

from torch import Tensor, nn

from fedstill.distill.public_map import PublicFeatures, PublicMap
from fedstill.models.heads import HeadModel
from fedstill.protocol import Federation, Records, load
from fedstill.train.extractor import Extractor


def public_features(fed: Federation, public: Records, extractor: Extractor, space: PublicMap) -> PublicFeatures:
    """The run's feature map, estimated from public images alone."""
    model = fed.new_model()
    space.check_size(model, public, fed.max_bytes)
    progress = fed.progress("pretraining")
    load(model, extractor.obtain(model, public, fed.rng("extractor"), progress=progress))
    return space.fit(model, public, fed.rng("public map"))


def head_model(fed: Federation, features: PublicFeatures, head: Tensor, *, bias: float, clip: bool) -> HeadModel:
    """The run's extractor, map and ``head`` as one network."""
    trunk = fed.new_model()
    load(trunk, features.weights)
    return _on_extractor(trunk, features, head.to(fed.device), bias, clip).to(fed.device)


def rebuild_model(network: nn.Module, weights: Mapping[str, Tensor], *, bias: float, clip: bool) -> HeadModel:
    """The network of `head_model` from its state; ``network`` becomes its extractor (see `Method.rebuild`)."""
    trunk = {name.removeprefix("trunk."): value for name, value in weights.items() if name.startswith("trunk.")}
    load(network, trunk)
    features = PublicFeatures(trunk, weights["mean"], weights["projection"], float(weights["radius"]))
    return _on_extractor(network, features, weights["head"], bias, clip)


def _on_extractor(trunk: nn.Module, features: PublicFeatures, head: Tensor, bias: float, clip: bool) -> HeadModel:
    return HeadModel(trunk, features.mean, features.projection, features.radius, head, bias=bias, clip=clip)
