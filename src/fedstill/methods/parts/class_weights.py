"""Class weights: a client's cross-entropy, in which a record of a rare class counts more.

``balanced`` weighs a class by ``n / (C n_c)``, as scikit-learn does, for the client's own n records, of which n_c are
of class c, and the C classes that it has. Numbers by name are public, and the same at every client.

With weights of either kind the methods that clip a client's whole update (LDP-FedAvg, DP-FedAvg) promise what they do
without: whatever the training is, the clipped update is no longer than S. Where each record's gradient is clipped
(DP-SGD), ``balanced`` would let one record change the gradients of all others, so those methods don't have it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.base.lookup import suggestion
from fedstill.protocol import Client, Settings
from fedstill.train.sgd import Loss, usual_loss

BALANCED = "balanced"


class ClassWeighted(Settings):
    """A method whose clients train by cross-entropy, which may weigh classes."""

    class_weights: str | None = None
    """Weights of the classes in the clients' cross-entropy: balanced (each client by its own counts: n / (C n_c)), or
    numbers by name, as sick:3,well:1 (1 for a class that is not named; a mapping in Python). None are the default."""

    @field_validator("class_weights", mode="before")
    @classmethod
    def _of_mapping(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if other := next((name for name in given if "," in str(name)), None):
            raise ValueError(f"the class {other!r} has a comma, which parts the names of classes; rename it")
        return ",".join(f"{name}:{number}" for name, number in given.items())

    @field_validator("class_weights")
    @classmethod
    def _possible(cls, text: str | None) -> str | None:
        if text not in (None, BALANCED):
            named_weights(text)
        return text

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> Any:
        """The settings without weights that nobody gave: sites of an older version know none, and names of runs stay.

        A site that does not know weights refuses a run that has some.
        """
        plain: dict[str, Any] = handler(self)
        return {key: value for key, value in plain.items() if key != "class_weights" or value is not None}


def check_names(weights: str | None, class_names: Sequence[str]) -> None:
    """Refuse weights of a class that the task does not have.

    Raises:
        ValueError: there is one.
    """
    if weights in (None, BALANCED):
        return
    for name in named_weights(weights):
        if name not in class_names:
            near = suggestion(name, class_names) or f"; the classes are {', '.join(class_names[:10])}"
            raise ValueError(f"class_weights has {name!r}, which is no class of the task{near}")


def client_loss(weights: str | None, client: Client) -> Loss:
    """The loss of a client's training: `fedstill.train.sgd.usual_loss`, or cross-entropy with weights."""
    if weights is None:
        return usual_loss
    if weights == BALANCED:
        return weighted(balanced(client.train.class_counts()))
    given = named_weights(weights)
    return weighted(torch.tensor([given.get(name, 1.0) for name in client.class_names]))


def named_weights(text: str | None) -> dict[str, float]:
    """The weights in ``NAME:NUMBER,NAME:NUMBER``.

    Raises:
        ValueError: it has another form, a name twice, or a number that is not positive.
    """
    found: dict[str, float] = {}
    for pair in (text or "").split(","):
        name, colon, number = pair.rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not colon or not (0 < value < 1e6) or name in found:
            raise ValueError("it must be balanced, or positive numbers by name of a class, as sick:3,well:1")
        found[name] = value
    return found


def balanced(counts: Tensor) -> Tensor:
    """``n / (C n_c)`` for each class of a client, ``(classes,)``; 1 for a class that it lacks, which no loss has."""
    present = counts > 0
    shares = counts.sum() / (present.sum().clamp_min(1) * counts.clamp_min(1))
    return torch.where(present, shares, 1.0).float()


def weighted(weights: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The mean over a batch of each record's cross-entropy times its class's weight, ``(classes,)``; a `Loss`."""

    def loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        each = cross_entropy(output, y, reduction="none")
        return (each * weights.to(output)[y]).mean()

    return loss
