"""Named tensors of a model: read them, copy them into another."""

from collections.abc import Mapping

from torch import Tensor, nn


def state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, buffers included, detached."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's trainable parameters by name, detached."""
    return {name: value.detach() for name, value in model.named_parameters()}


def load(target: nn.Module | dict[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into ``target`` in place, rounding to the types ``target`` has.

    The names must be those of ``target`` or, for a module, of its state.
    """
    held = target.state_dict() if isinstance(target, nn.Module) else target
    for name, value in source.items():
        into = held[name]
        into.copy_(value.round() if value.is_floating_point() and not into.is_floating_point() else value)
