"""Named tensors of a model: reading them, and copying them into another model."""

from collections.abc import Mapping

from torch import Tensor, nn


def state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state (parameters and buffers) by name, detached."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's trainable parameters by name, detached."""
    return {name: value.detach() for name, value in model.named_parameters()}


def load(target: nn.Module | dict[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the tensors of the same names in ``target``, rounding values to integers where needed."""
    targets = target.state_dict() if isinstance(target, nn.Module) else target
    for name, value in source.items():
        into = targets[name]
        into.copy_(value.round() if value.is_floating_point() and not into.is_floating_point() else value)
