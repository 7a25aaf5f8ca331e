"""Networks of vectors: a linear classifier and a multilayer perceptron. Images are flattened."""

import math
from typing import Annotated

from annotated_types import Ge, Lt
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn


class Linear(nn.Module):
    """Multinomial logistic regression: one linear layer.

    Args:
        shape: shape of a record.
        num_classes: number of outputs.
    """

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(math.prod(shape), num_classes)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


class MLP(nn.Module):
    """Linear layers with ReLU between them; the features are the last hidden layer.

    Args:
        shape: shape of a record.
        num_classes: number of outputs.
        hidden: units of each hidden layer.
        layers: number of hidden layers.
        dropout: probability with which a hidden unit is dropped in training.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        *,
        hidden: PositiveInt = 256,
        layers: PositiveInt = 2,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
    ) -> None:
        super().__init__()
        widths = [math.prod(shape), *[hidden] * layers]
        body: list[nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            body += [nn.Linear(inputs, outputs), nn.ReLU()]
            if dropout:
                body.append(nn.Dropout(dropout))
        self.body = nn.Sequential(*body)
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.classifier(self.body(x.flatten(1)))
        return logits
