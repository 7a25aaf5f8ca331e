"""``fedstill privacy plan``: the noise of each mechanism at a budget, before any release."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill import methods, seeds
from fedstill.privacy import accounting
from fedstill.privacy.logistic import LogisticHead
from fedstill.protocol import Method, client_steps
from fedstill.schema import Below, Field
from fedstill.settings import Settings
from fedstill.train.private import PrivateSGD


class Plan(Settings):
    """Noise of each mechanism at a budget."""

    epsilon: PositiveFloat = 1.0
    """Budget of a client, as epsilon."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Delta of the budget."""
    records: PositiveInt = 2500
    """Number of records of a client."""
    classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Number of classes."""
    clients: PositiveInt = 10
    """Number of clients whose heads the server averages."""
    penalty: PositiveFloat = 5.0
    """Regularisation of the class heads (Lambda)."""
    dims: Annotated[int, Ge(2), Le(4096)] = 128
    """Number of features."""
    steps: PositiveInt = 200
    """Number of a client's DP-SGD steps in all rounds."""
    sampling: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of the client's records in a DP-SGD step."""


def plan(settings: Plan) -> Iterator[Table | Text]:
    """The noise of each mechanism at this budget, and its effect on the accuracy of a reference task."""
    noise = accounting.gaussian_noise(settings.epsilon, settings.delta)
    classic = accounting.published_noise(settings.epsilon, settings.delta)
    kept_share = 1 / (1 + (settings.classes - 1) * math.exp(-settings.epsilon))
    yield Text(
        f"epsilon {settings.epsilon:g}, delta {settings.delta:g}, one record added or removed: Gaussian noise of "
        f"{noise:.4g} x the sensitivity (classic formula: {classic:.4g})"
    )
    table = Table(
        *("release", "sensitivity", "noise", "beside one client's signal", "methods"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    per_class = settings.records / settings.classes
    head = math.sqrt(2) / settings.penalty
    by_step = accounting.dp_sgd_noise(settings.epsilon, settings.delta, settings.sampling, settings.steps)
    gradients = f"sums of {settings.records * settings.sampling:.4g} gradients of at most 1"
    rows = (
        (
            "class head, a logit",
            f"sqrt(2)/{settings.penalty:g} = {head:.3g}",
            head * noise,
            "logits of 1 to 10",
            _releasing("classes coefficients"),
        ),
        ("score head (Lambda 25), a logit", "1/25", noise / 25, "logits of 1 to 10", _releasing("coefficients")),
        (
            "class sums, a coordinate",
            "1",
            noise,
            f"sums of {per_class:.4g} rows of length 1",
            _releasing("classes dims"),
        ),
        (f"each of {settings.steps} DP-SGD steps", "1", by_step, gradients, _training_privately()),
    )
    for *row, std, signal, names in rows:
        table.add_row(*row, f"{std:.3g}", signal, names)
    labels = _names(lambda method: any(f.is_released and Below("classes") in f.marks for f in _fields(method)))
    right = f"{100 * kept_share:.3g} % stay"
    table.add_row("labels (randomised response)", "-", right, "label-DP only, features public", labels)
    yield table
    clean, noisy = reference(settings, noise)
    yield Text(
        f"Reference task (a mixture of {settings.classes} Gaussians in {settings.dims} dimensions, {settings.clients} "
        f"clients with {settings.records} records each, mean of their heads): {100 * clean:.1f} % without noise, "
        f"{100 * noisy:.1f} % with it. Real data differ; try --epsilon None and a value in a simulation first."
    )


def _names(chosen: Callable[[type[Method]], bool]) -> str:
    return ", ".join(name for name in methods.TABLE if chosen(methods.find(name)))


def _fields(method: type[Method]) -> list[Field]:
    return [f for step in client_steps(method).values() for f in step.reply.schema]


def _releasing(dims: str) -> str:
    """The methods whose clients release a tensor of these dimensions."""
    return _names(
        lambda method: any(f.is_released and f.is_tensor and f.annotation.dim_str == dims for f in _fields(method))
    )


def _training_privately() -> str:
    return _names(lambda method: any(info.annotation is PrivateSGD for info in method.model_fields.values()))


def reference(settings: Plan, noise_multiplier: float) -> tuple[float, float]:
    """Accuracies of averaged heads on a synthetic task, without and with noise; at most three clients are computed.

    Records are ``m_y + e`` with random class means m of length 2.5 and standard normal e, clipped to the radius
    ``sqrt(dims)``. The mean over ``clients`` heads has ``1 / clients`` of the noise's variance.
    """
    rng = seeds.stream(0, "reference task")
    means = torch.randn(settings.classes, settings.dims, generator=rng, dtype=torch.float64)
    means *= 2.5 / means.norm(dim=1, keepdim=True)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(settings.classes, (n,), generator=rng)
        return means[labels] + torch.randn(n, settings.dims, generator=rng, dtype=torch.float64), labels

    radius = math.sqrt(settings.dims)
    exact = LogisticHead(num_classes=settings.classes, penalty=settings.penalty, radius=radius, noise_multiplier=0.0)
    heads = [exact(draw(min(settings.records, 10_000)), seeds.Simulated(rng)) for _ in range(min(settings.clients, 3))]
    head = torch.stack(heads).mean(0)
    x, labels = draw(5000)
    std = noise_multiplier * exact.sensitivity / math.sqrt(settings.clients)
    noisy = [head + std * torch.randn(head.shape, generator=rng, dtype=torch.float64) for _ in range(5)]
    return _accuracy(exact, [head], x, labels), _accuracy(exact, noisy, x, labels)


def _accuracy(head: LogisticHead, released: Sequence[torch.Tensor], x: torch.Tensor, labels: torch.Tensor) -> float:
    rows = head.extended(x)
    return sum(float(((rows @ beta.T).argmax(1) == labels).double().mean()) for beta in released) / len(released)
