"""A network's state as one vector, for messages with networks of another form than the run's model."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill.weights import load, state


def flattened(model: nn.Module) -> Float[Tensor, " values"]:
    """All entries of the model's state as one float32 vector."""
    return torch.cat([value.flatten().float() for value in state(model).values()])


def load_flat(model: nn.Module, values: Float[Tensor, " values"]) -> None:
    """Copy a vector of `flattened` into ``model``; a ValueError if its length is another."""
    own = state(model)
    sizes = [value.numel() for value in own.values()]
    if sum(sizes) != len(values):
        raise ValueError(f"a model of {len(values)} values came; the network here has {sum(sizes)}")
    parts = values.split(sizes)  # type: ignore[no-untyped-call]
    load(model, {name: part.view_as(like) for (name, like), part in zip(own.items(), parts, strict=True)})
