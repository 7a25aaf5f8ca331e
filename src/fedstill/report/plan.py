"""``fedstill privacy plan``: the noise and the accuracy of each budget, before any release."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill import methods, seeds
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import share_out
from fedstill.methods.heads import HeadTraining
from fedstill.methods.moments import MomentSums
from fedstill.privacy import accounting
from fedstill.privacy.second_moments import SecondMoments, entries
from fedstill.protocol import Method, client_steps
from fedstill.report import guarantees
from fedstill.report.simulated_heads import DRAWS, accuracies, exact_head, mean_accuracy
from fedstill.report.words import human_bytes
from fedstill.schema import Field
from fedstill.settings import Settings
from fedstill.train.extractor import Extractor
from fedstill.train.private import PrivateSGD

_VALIDATION = 0.2
"""Share of the train records of a simulation on which it is evaluated."""


class Plan(Settings):
    """The noise of each epsilon, and the accuracy to expect."""

    epsilon: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    """Budgets of a client, as epsilons; with one alone, also the noise of every kind of release."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Delta of the budgets."""
    records: PositiveInt = 2500
    """Number of records of a client; with --data, the mean of the clients."""
    classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Number of classes; with --data, theirs."""
    clients: PositiveInt = 10
    """Number of clients whose heads the server averages."""
    data: str | None = None
    """Records to simulate fedavg-p on, as for fedstill run; a synthetic reference task by default."""
    partition: str = "iid"
    """Partition of --data among the clients."""
    model: str = "scattering"
    """Model whose features --data gets."""
    public: str = "noise=500"
    """Public records for --data."""
    extractor: Extractor = Extractor(pretrain="none")
    """Weights of --model for --data."""
    limit: PositiveInt | None = None
    """Number of records of --data to use, drawn at random; all by default."""
    seed: NonNegativeInt = 0
    """Seed of the simulation on --data."""
    penalty: PositiveFloat | None = None
    """Regularisation of the class heads (Lambda); by default as in fedavg-p, so that a logit's noise is 1."""
    dims: Annotated[int, Ge(2), Le(4096)] = 128
    """Number of features of the reference task."""
    steps: PositiveInt = 200
    """Number of a client's DP-SGD steps in all rounds."""
    sampling: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of the client's records in a DP-SGD step."""


def plan(settings: Plan) -> Iterator[Table | Text]:
    """A row for each epsilon: its noise, the success of an attacker, and the accuracy of fedavg-p.

    Raises:
        ValueError: the data cannot be read or partitioned in this way; one sentence.
    """
    if not settings.epsilon:
        raise ValueError("--epsilon is empty; give one or more, as --epsilon 0.5 1 2")
    epsilons = (*sorted(set(settings.epsilon)), None)
    if settings.data is None:
        found = [reference(settings, epsilon) for epsilon in epsilons]
        records, classes = settings.records, settings.classes
    else:
        experiment = Experiment(
            data=settings.data,
            partition=settings.partition,
            clients=settings.clients,
            model=settings.model,
            public=settings.public,
            limit=settings.limit,
            seed=settings.seed,
            delta=settings.delta,
            validation=_VALIDATION,
        )
        task = share_out(experiment, None)
        records, classes = int(task.counts().sum()) // settings.clients, len(task.class_names)
        found = accuracies(experiment, task, epsilons, settings.extractor, settings.penalty)
    yield Text(
        f"{settings.clients} clients with {records} records of {classes} classes each"
        + (" on average" if settings.data else "")
        + f", delta {settings.delta:g}, one record added or removed"
    )
    yield _epsilons(settings, epsilons, found, classes)
    yield Text(_meaning(settings))
    if len(settings.epsilon) == 1:
        yield _releases(settings, settings.epsilon[0], records / classes, records)


def _epsilons(settings: Plan, epsilons: Sequence[float | None], found: Sequence[float], classes: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("epsilon", "noise, x sensitivity", "attacker right, %", "labels kept, %", "accuracy, %"):
        table.add_column(heading, justify="right")
    for epsilon, accuracy in zip(epsilons, found, strict=True):
        if epsilon is None:
            table.add_row("none", "0", "100", "100", f"{100 * accuracy:.1f}")
            continue
        noise = accounting.gaussian_noise(epsilon, settings.delta)
        right = guarantees.right_at_most(epsilon, settings.delta)
        kept = 100 / (1 + (classes - 1) * math.exp(-min(epsilon, 700.0)))
        table.add_row(f"{epsilon:g}", f"{noise:.4g}", f"{right:g}", f"{kept:.3g}", f"{100 * accuracy:.1f}")
    return table


def _meaning(settings: Plan) -> str:
    """The columns in words, and what was simulated."""
    lines = [
        "attacker right: share of right guesses, at most, of an attacker who knows all other records and guesses "
        "whether a record was used; random guesses are right 50 % of the time.",
        "labels kept: share that randomised response leaves as they are; label-DP only, with public features.",
    ]
    if settings.data is None:
        lines.append(
            f"accuracy: mean of the clients' heads (fedavg-p) on a synthetic mixture of {settings.classes} Gaussians "
            f"in {settings.dims} dimensions. Real data differ: --data simulates on yours."
        )
    else:
        lines.append(
            f"accuracy: simulated fedavg-p on {settings.data}, {settings.partition}, features of {settings.model}, "
            f"mean of {DRAWS} draws of noise. A part of the train records ({100 * _VALIDATION:g} %) is left out to "
            "evaluate on; the test set is not used. This is a simulation on these records with noise from a seed: it "
            "charges no ledger, and its numbers have no privacy guarantee. Do not publish them if the records are "
            "private."
        )
    return "\n".join(lines)


def _releases(settings: Plan, epsilon: float, per_class: float, records: int) -> Table:
    """The noise of each kind of release at one epsilon, and the methods with such releases."""
    noise = accounting.gaussian_noise(epsilon, settings.delta)
    table = Table(
        *("release", "sensitivity", "noise", "size of what it hides", "methods"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    penalty = HeadTraining(penalty=settings.penalty).weight(noise)
    head = math.sqrt(2) / penalty
    by_step = accounting.dp_sgd_noise(epsilon, settings.delta, settings.sampling, settings.steps)
    gradients = f"sums of {records * settings.sampling:.4g} gradients of at most 1"
    numbers = entries(settings.dims + 1) + round(records / per_class) * (settings.dims + 1)
    sums = f"sums of {per_class:.4g} rows of length 1"
    of_products = SecondMoments(
        num_classes=settings.classes, dims=settings.dims, radius=1.0, noise_multiplier=noise, share=MomentSums().share
    ).sensitivity
    rows = (
        (f"class head, a logit (Lambda {penalty:.3g})", f"sqrt(2)/{penalty:.3g} = {head:.3g}", head * noise,
         "logits of 1 to 10", _releasing("classes coefficients")),
        ("score head (Lambda 25), a logit", "1/25", noise / 25, "logits of 1 to 10", _releasing("coefficients")),
        ("class sums, a coordinate", "1", noise, sums, _releasing("classes dims")),
        (f"sums of products, an entry ({numbers:,} numbers, {human_bytes(4 * numbers)}; by class, more)",
         f"{of_products:.3g}", noise * of_products / math.sqrt(2), f"sums of {records} products of at most 1/2",
         _releasing("groups entries")),
        (f"each of {settings.steps} DP-SGD steps", "1", by_step, gradients, _training_privately()),
    )  # fmt: skip
    for *row, std, signal, names in rows:
        table.add_row(*row, f"{std:.3g}", signal, names)
    labels = _names(lambda method: method.protects == "label")
    table.add_row("labels (randomised response)", "-", "see above", "label-DP only, features public", labels)
    return table


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


def reference(settings: Plan, epsilon: float | None) -> float:
    """Accuracy of averaged heads on a synthetic task at this epsilon (None: without noise).

    Records are ``m_y + e`` with random class means m of length 2.5 and standard normal e, clipped to the radius
    ``sqrt(dims)``. At most three clients are computed; the noise is that of all.
    """
    rng = seeds.stream(0, "reference task")
    means = torch.randn(settings.classes, settings.dims, generator=rng, dtype=torch.float64)
    means *= 2.5 / means.norm(dim=1, keepdim=True)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(settings.classes, (n,), generator=rng)
        return means[labels] + torch.randn(n, settings.dims, generator=rng, dtype=torch.float64), labels

    head = exact_head(settings.classes, math.sqrt(settings.dims), epsilon, settings.delta, settings.penalty)
    clients = [draw(min(settings.records, 10_000)) for _ in range(min(settings.clients, 3))]
    return mean_accuracy(head, clients, settings.clients, draw(5000), rng)
