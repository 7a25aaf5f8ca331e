"""Networks by name: ``build("convnet:width=32,depth=3", shape, num_classes)``."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch
from jaxtyping import Float
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from fedstill.base import lookup
from fedstill.base.errors import first_line
from fedstill.models.cnn import ConvNet, DenseCNN1, DenseCNN2, DenseMnistCNN, KadpCifarCNN, KadpMnistCNN, LeNet
from fedstill.models.heads import MLP, Linear, features, last_input
from fedstill.models.patches import Patches
from fedstill.models.projected import Projected
from fedstill.models.resnets import MobileNetV2S, ResNet8, ResNet18, ShuffleNet, WideResNet
from fedstill.models.scattering import Scattering

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "convnet": ConvNet,
    "lenet": LeNet,
    "lenet5": LeNet,
    "dense-cnn1": DenseCNN1,
    "dense-cnn2": DenseCNN2,
    "dense-mnist": DenseMnistCNN,
    "kadp-mnist": KadpMnistCNN,
    "kadp-cifar": KadpCifarCNN,
    "resnet8": ResNet8,
    "resnet18": ResNet18,
    "wrn": WideResNet,
    "mobilenetv2s": MobileNetV2S,
    "shufflenet": ShuffleNet,
    "scattering": Scattering,
    "patches": Patches,
    "projected": Projected,
    "linear": Linear,
    "mlp": MLP,
}
"""Networks by the name that a specification starts with; ``lenet5`` and ``lenet`` are the same.

Each is called as ``Network(shape, num_classes, **options)`` with the channels, height and width of an image, and raises
a ValueError if images are too small for it; `OF_VECTORS` take records of any shape. Numbers of parameters in docstrings
are for 10 classes by default.
"""
OF_VECTORS = ("linear", "mlp")
"""The networks of `MODELS` that take vectors."""


def build(spec: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A new network that maps ``(n, *shape)`` to logits ``(n, num_classes)``.

    Layers draw their first weights from torch's global generator, so callers wrap this in ``seeds.isolated``.

    Args:
        spec: a name from ``MODELS``, with or without options (``"convnet:width=32,norm=batch"``), or
            ``"package.module:function"`` or ``"path/to/file.py:function"`` for your own network, called as
            ``function(shape, num_classes)``.
        shape: channels, height and width of one image, or the length of one vector.
        num_classes: number of outputs.

    Raises:
        ValueError: the name, an option or its value is unknown, the images are too small for the network, records are
            vectors and the network takes images, or your own network can't be imported or has outputs other than
            ``(n, num_classes)``.
    """
    name, _, rest = spec.partition(":")
    if len(shape) == 1 and of_images(spec):
        raise ValueError(
            f"model {name!r} takes images, but the records are vectors of {shape[0]} numbers; choose "
            f"{' or '.join(OF_VECTORS)}, or your own network"
        )
    try:
        if name in MODELS:
            return MODELS[name](shape, num_classes, **_options(name, rest))
        if (builder := own_builder(spec)) is not None:
            return _checked(spec, _called(spec, builder, shape, num_classes), shape, num_classes)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # sizes nobody can allocate, no model at all
        why = first_line(error)
        raise ValueError(
            f"model {spec!r} can't be built for records of {shape}: {type(error).__name__}: {why}"
        ) from error
    near = lookup.suggestion(name, MODELS)
    choice = f"; choose one of {', '.join(MODELS)} or name your own as file.py:function or package.module:function"
    raise ValueError(f"there is no model {spec!r}{near or choice}")


def of_images(spec: str) -> bool:
    """Whether ``spec`` names a network of `MODELS` that takes images only."""
    name = spec.partition(":")[0]
    return name in MODELS and name not in OF_VECTORS


def is_own(spec: str) -> bool:
    """Whether ``spec`` names code outside of fedstill."""
    return spec.partition(":")[0] not in MODELS


def own_builder(spec: str) -> Callable[..., Any] | None:
    """The user's own function that ``spec`` names; None if it names none.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = spec.partition(":")
    named = name.isidentifier() and (lookup.is_file(spec) or all(part.isidentifier() for part in module.split(".")))
    return _imported(module, name) if named and is_own(spec) else None


def same(one: str, other: str) -> bool:
    """Whether two specifications name the same network: options in any order, with or without defaults."""
    if one == other or is_own(one) or is_own(other):
        return one == other
    return _parsed(one) == _parsed(other)


def _parsed(spec: str) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    name, _, rest = spec.partition(":")
    parameters = inspect.signature(MODELS[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return MODELS[name], defaults | _options(name, rest)


class FeaturesAndLogits(nn.Module):
    """A model whose output is the pair of its features and its logits, for a loss that needs both.

    It shares the model's parameters. One pass gives both; your own network with a method ``features`` takes two.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._two_passes = type(model) not in MODELS.values() and inspect.ismethod(getattr(model, "features", None))

    def forward(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n classes"]]:
        """``(features(model, x), model(x))``."""
        if self._two_passes:
            return features(self.model, x), self.model(x)
        return last_input(self.model, x)


def _options(name: str, text: str) -> dict[str, Any]:
    """``"width=32,norm=batch"`` as keyword arguments of the model's constructor, converted to their annotated types."""
    constructor = MODELS[name]
    annotated = constructor.__init__ if inspect.isclass(constructor) else constructor
    types = get_type_hints(annotated, include_extras=True)
    known = [p.name for p in inspect.signature(constructor).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in known or key in options:
            raise ValueError(
                f"model {name!r} can't use {item!r}; write option=value, each at most once, from: "
                f"{', '.join(known) or '(it has no options)'}"
            )
        try:
            options[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"model {name!r} can't use {item!r}: {error.errors()[0]['msg']}") from error
    return options


def _imported(module: str, function: str) -> Callable[..., Any]:
    try:
        builder: Callable[..., Any] = lookup.import_own(f"{module}:{function}")
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model '{module}:{function}' can't be imported ({error}); name a function in a file (nets.py:function), "
            "in a module of the working folder or in an installed package (package.module:function)"
        ) from error
    if not callable(builder):
        raise ValueError(f"model '{module}:{function}' is not a function; it must be callable as f(shape, num_classes)")
    return builder


def _called(spec: str, builder: Callable[..., object], shape: tuple[int, ...], num_classes: int) -> object:
    try:
        return builder(shape, num_classes)
    except Exception as error:  # code of others may raise anything
        raise ValueError(
            f"model {spec!r} can't be built for records of {shape}: it is called as {builder.__name__}({shape}, "
            f"{num_classes}) and raised {error!r}; name a function of (shape, num_classes)"
        ) from error


def _checked(spec: str, model: object, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {spec!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    wanted = f"it must map (n, {', '.join(map(str, shape))}) to (n, {num_classes})"
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(torch.zeros(2, *shape))
    except Exception as error:
        raise ValueError(f"model {spec!r} fails on a batch of zeros ({error}); {wanted}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(output, Tensor) or output.shape != (2, num_classes):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"model {spec!r} gives {got} for 2 records; {wanted}")
    for name, value in model.state_dict().items():
        if value.layout != torch.strided or not value.isfinite().all():
            what = "is sparse" if value.layout != torch.strided else "has a value that is not finite"
            raise ValueError(f"model {spec!r}: {name!r} {what}; weights and buffers must be dense and finite")
    return model
