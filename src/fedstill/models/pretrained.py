"""Public backbones by name: pretrained ones of ``transformers``, scattering, and your own."""

from torch import Tensor, nn

from fedstill import lookup, seeds
from fedstill.models.build import build, features
from fedstill.models.frozen import Backbone, digest
from fedstill.models.preprocessing import Preprocessing
from fedstill.weights import state

_SCATTERING = "scattering"


def load(name: str, shape: tuple[int, ...], *, download: bool = True) -> Backbone:
    """The backbone ``name``.

    Args:
        name: ``hf:owner/name`` or ``hf:./folder`` for a model of ``transformers``, ``scattering`` with its options, or
            ``package.module:function`` for your own, a function without arguments that returns a module, which maps
            pixels in [0, 1] ``(n, c, h, w)`` to ``(n, d)``.
        shape: channels, height and width of an image; empty for texts.
        download: whether a model that is not on this machine may be downloaded.

    Raises:
        ValueError: there is no such backbone, or it can't be loaded; one sentence.
    """
    if name.startswith("hf:"):
        from fedstill.models.hub import from_transformers  # takes seconds to import

        return from_transformers(name, download=download)
    kind, _, rest = name.partition(":")
    if kind == _SCATTERING:
        if len(shape) != 3:
            raise ValueError(no_images(name, shape))
        with seeds.isolated(0):
            net = build(name, shape, 2).eval()
        facts = {"spec": name, "shape": shape}
        return Backbone(name, digest({}, facts), net, features, Preprocessing(mean=(0.5,), std=(0.25,)))
    if not rest.isidentifier():
        raise ValueError(
            f"there is no backbone {name!r}; name a model of transformers as hf:owner/name or hf:./folder, "
            f"{_SCATTERING}, patches, or your own function as package.module:function"
        )
    return _own(name)


def _own(name: str) -> Backbone:
    try:
        with seeds.isolated(0):
            net = lookup.import_own(name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the backbone {name!r} can't be made ({error}); name a function without arguments that returns a module"
        ) from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"the backbone {name!r} is a {type(net).__name__}; the function must return a torch.nn.Module")
    return Backbone(name, digest(state(net), {"name": name}), net.eval().requires_grad_(False), _call, Preprocessing())


def _call(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = net(x)
    return result.flatten(1)


def no_images(name: str, shape: tuple[int, ...]) -> str:
    """The sentence for a backbone of images and records of this shape, which are vectors or texts."""
    what, remedy = ("vectors already", "leave --features out") if shape else ("texts", "take an encoder of texts")
    return f"the backbone {name!r} takes images, but the records are {what}; {remedy}"
