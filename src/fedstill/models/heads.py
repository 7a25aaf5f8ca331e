"""Heads: the features of a network that they stand on, linear ones, and networks on vectors alone."""

import inspect
import math
from typing import Annotated

import torch
from annotated_types import Ge, Le, Lt
from jaxtyping import Float, Float32, Int64
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.base.settings import Settings
from fedstill.evaluation import mode_of


def features(model: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n d"]:
    """Penultimate features: ``model.features(x)`` if it exists, else the input of the last ``nn.Linear`` to run.

    Differentiable in ``x`` and in the parameters.

    Raises:
        ValueError: the model has no method ``features`` and runs no ``nn.Linear``.
    """
    own = getattr(model, "features", None)
    if inspect.ismethod(own):
        result: Tensor = own(x)
        return result.flatten(1)
    return last_input(model, x)[0]


def last_input(model: nn.Module, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n d"], Tensor]:
    """The input of the last ``nn.Linear`` to run, and the output of the model."""
    last: list[Tensor] = []

    def record(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        last[:] = args[:1]

    hooks = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        output: Tensor = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not last:
        raise ValueError(
            f"{type(model).__name__} has no features: it runs no nn.Linear; give it a method features(x) -> (n, d)"
        )
    return last[0].flatten(1), output


def feature_width(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Number of `features` of a record of this shape; ``model`` does not change."""
    device = next((p.device for p in model.parameters()), None)
    with mode_of(model, training=False), torch.no_grad():
        return features(model, torch.zeros(1, *shape, device=device)).shape[1]


class LinearHead(nn.Linear):
    """A linear head ``(classes, d + 1)`` alone, for rows that already have the constant feature."""

    def __init__(self, head: Float[Tensor, "classes d"]) -> None:
        nn.Module.__init__(self)  # without the random start of a linear layer, which draws from a generator
        self.out_features, self.in_features = head.shape
        self.weight = nn.Parameter(head.detach().clone())
        self.register_parameter("bias", None)


class HeadModel(nn.Module):
    """An extractor, an affine map of its features and a linear head.

    Args:
        trunk: the extractor, which is trained if its parameters require gradients.
        mean: ``(p,)``, subtracted from the extractor's features.
        projection: ``(p, d)``, applied to the centred features.
        radius: length to which rows are clipped.
        head: ``(classes, d + 1)``, the bias last.
        bias: value of the constant feature.
        clip: whether rows are clipped; false for published heads.
    """

    mean: Tensor
    projection: Tensor
    radius: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        mean: Tensor,
        projection: Tensor,
        radius: float,
        head: Tensor,
        *,
        bias: float,
        clip: bool,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.register_buffer("mean", mean.clone())
        self.register_buffer("projection", projection.clone())
        self.head = nn.Parameter(head.clone())
        self.register_buffer("radius", torch.tensor(radius))
        self.bias = bias
        self.clip = clip

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        rows = (features(self.trunk, x) - self.mean) @ self.projection
        if self.clip:
            length = rows.norm(dim=1, keepdim=True).clamp_min(self.radius)
            rows = rows * (math.sqrt(1 - self.bias**2) / length)
        logits: Tensor = rows @ self.head[:, :-1].T + self.bias * self.head[:, -1]
        return logits


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


class Quadratic(nn.Module):
    """Logits ``k_c - |(x - m_c) F_c|^2 / 2``.

    Args:
        centres: m_c, ``(classes, d)``.
        factors: F_c, ``(classes, d, d)``, with ``F_c F_c^T`` the inverse of the class's covariance.
        constants: k_c, ``(classes,)``.
    """

    centres: Tensor
    factors: Tensor
    constants: Tensor

    def __init__(self, centres: Tensor, factors: Tensor, constants: Tensor) -> None:
        super().__init__()
        self.register_buffer("centres", centres.clone())
        self.register_buffer("factors", factors.clone())
        self.register_buffer("constants", constants.clone())

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        lengths = [
            ((x - centre) @ factor).square().sum(1) for centre, factor in zip(self.centres, self.factors, strict=True)
        ]
        return self.constants - torch.stack(lengths, 1) / 2


Thresholds = Float32[Tensor, "dims buckets"]
Order = Int64[Tensor, " bits"]


class Buckets(Settings):
    """Settings of the buckets, and the sparse rows that they make."""

    thresholds: Annotated[int, Ge(1), Le(64)] = 4
    """Thresholds of each feature, each of which gives a bit (L)."""
    group: Annotated[int, Ge(1), Le(12)] = 4
    """Bits of a group, whose 2^group values each have an embedding."""

    def groups(self, dims: int) -> int:
        """Number of groups of ``dims`` features' bits; the last may have fewer than the others."""
        return -(-dims * self.thresholds // self.group)

    def width(self, dims: int) -> int:
        """Number of entries of a sparse row."""
        return int(self.groups(dims) * 2**self.group)

    def quantiles(self, rows: Float[Tensor, "n dims"]) -> Thresholds:
        """The quantiles 1 / (L + 1), ..., L / (L + 1) of each feature of public rows."""
        levels = torch.arange(1, self.thresholds + 1, device=rows.device) / (self.thresholds + 1)
        return rows.float().quantile(levels, dim=0).T.contiguous()

    def values(self, rows: Float[Tensor, "n dims"], cuts: Thresholds, order: Order) -> Int64[Tensor, "n groups"]:
        """The value of each group: its bits ``row_j > cut_jl``, in the given order, as a binary number."""
        bits = (rows[:, :, None] > cuts.to(rows.device)).flatten(1)[:, order.to(rows.device)].long()
        bits = nn.functional.pad(bits, (0, -bits.shape[1] % self.group))
        powers = 2 ** torch.arange(self.group, device=rows.device)
        return (bits.view(bits.shape[0], -1, self.group) * powers).sum(2)

    def sparse(self, rows: Float[Tensor, "n dims"], cuts: Thresholds, order: Order) -> Float[Tensor, "n width"]:
        """A one-hot row for each group, one after another: as many ones as groups."""
        found = nn.functional.one_hot(self.values(rows, cuts, order), 2**self.group)
        return found.flatten(1).to(rows.dtype)


class Bucketed(nn.Module):
    """Logits of rows: for each group the embedding of its value, and their sum.

    Args:
        embeddings: ``(groups, values, classes)``.
        bias: ``(classes,)``.
        thresholds: of each feature, ``(dims, buckets)``.
        order: positions of the bits, ``(dims * buckets,)``.
    """

    embeddings: Tensor
    bias: Tensor
    thresholds: Tensor
    order: Tensor

    def __init__(self, embeddings: Tensor, bias: Tensor, thresholds: Tensor, order: Tensor) -> None:
        super().__init__()
        for name, value in (("embeddings", embeddings), ("bias", bias), ("thresholds", thresholds), ("order", order)):
            self.register_buffer(name, value.clone())

    def forward(self, x: Float[Tensor, "n dims"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        group = (self.embeddings.shape[1] - 1).bit_length()
        settings = Buckets(thresholds=self.thresholds.shape[1], group=group)
        values = settings.values(x, self.thresholds, self.order)
        places = torch.arange(values.shape[1], device=x.device)
        return self.embeddings[places, values].sum(1) + self.bias
