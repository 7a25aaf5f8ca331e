"""``fedstill privacy plan``: the noise and the accuracy of each budget, before any release."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedstill import methods
from fedstill.base import seeds
from fedstill.base.settings import Settings
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import Task, client_data, share_out
from fedstill.methods.fedavg_p import FedAvgP
from fedstill.methods.parts.moments import MomentSums
from fedstill.methods.parts.private_heads import HeadTraining, Penalty
from fedstill.privacy import accounting
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.logistic import LogisticHead, logits
from fedstill.privacy.second_moments import SecondMoments, entries
from fedstill.protocol import Method, client_steps, load, public_images
from fedstill.report import guarantees
from fedstill.report.record import human_bytes
from fedstill.schema import Field
from fedstill.train.extractor import Extractor
from fedstill.train.feedback import PrivateSGD

Labelled = tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]]

DRAWS = 5
"""Number of draws of the noise whose accuracies are averaged."""


def exact_head(
    num_classes: int, radius: float, epsilon: float | None, delta: float, penalty: float | None = None
) -> LogisticHead:
    """The mechanism of a client of fedavg-p; ``penalty`` is that of `HeadTraining`."""
    noise = release_noise(epsilon, delta)
    return LogisticHead(
        num_classes=num_classes,
        penalty=HeadTraining(penalty=penalty).weight(noise),
        radius=radius,
        noise_multiplier=noise,
    )


def mean_accuracy(
    head: LogisticHead, clients: Sequence[Labelled], num_clients: int, test: Labelled, rng: torch.Generator
) -> float:
    """Accuracy of the mean of heads with noise, over several draws of it.

    Args:
        head: the mechanism of every client.
        clients: features and classes of each client whose head is computed.
        num_clients: number of heads whose noise is in the mean: it has ``1 / num_clients`` of a head's variance.
        test: features and classes to evaluate on.
        rng: source of the noise.
    """
    solve = replace(head, noise_multiplier=0.0)
    mean = torch.stack([solve(client, seeds.Simulated(rng)) for client in clients]).mean(0)
    std = head.noise_multiplier * head.sensitivity / math.sqrt(num_clients)
    right = 0.0
    for _ in range(DRAWS):
        noisy = mean + std * torch.randn(mean.shape, generator=rng, dtype=mean.dtype)
        predicted = logits(noisy, test[0], head.radius, head.bias).argmax(1)
        right += float((predicted == test[1]).double().mean()) / DRAWS
    return right


def accuracies(
    experiment: Experiment,
    task: Task,
    epsilons: Sequence[float | None],
    extractor: Extractor,
    penalty: float | None = None,
) -> list[float]:
    """Accuracy of fedavg-p on the test records of ``task``, for each epsilon (None: without noise).

    ``extractor`` is the source of the features, ``penalty`` that of `HeadTraining`.

    Raises:
        ValueError: there is no such model, or its features do not fit the public records; one sentence.
    """
    method = FedAvgP(extractor=extractor)
    spec = spec_of(Job(experiment, method, Path()), task)
    clients, model = client_data(experiment, task), spec.new_model()
    public = public_images(clients.public(), "fedavg-p")
    method.space.check_size(model, public, spec.max_bytes)
    load(model, extractor.obtain(model, public, seeds.stream(spec.seed, "server", "extractor")))
    features = method.space.fit(model, public, seeds.stream(spec.seed, "server", "public map"))
    own = []
    for client in range(len(task.parts)):
        records = clients.records(client)[0]
        own.append((features.rows(model, records), records.labels))
    test = features.rows(model, task.test), task.test.labels
    found = []
    for epsilon in epsilons:
        head = exact_head(spec.num_classes, features.radius, epsilon, spec.delta, penalty)
        rng = seeds.stream(spec.seed, "simulated heads", str(epsilon))
        found.append(mean_accuracy(head, own, len(own), test, rng))
    return found


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
    penalty: Penalty | None = None
    """Regularisation of the class heads (Lambda); by default as in fedavg-p, so that a logit's noise is 1."""
    dims: Annotated[int, Ge(2), Le(4096)] = 128
    """Number of features of the reference task."""
    steps: PositiveInt = 200
    """Number of a client's DP-SGD steps in all rounds."""
    sampling: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of the client's records in a DP-SGD step."""


class _Release(NamedTuple):
    """The noise of one kind of release; ``more`` are further facts for a program."""

    name: str
    words: str
    sensitivity: float | None
    sensitivity_words: str
    noise: float | None
    hides: str
    methods: list[str]
    more: dict[str, int] = {}


def plan(settings: Plan) -> tuple[dict[str, Any], Iterator[Table | Text]]:
    """A row for each epsilon: its noise, the success of an attacker, and the accuracy of fedavg-p.

    Returns:
        The facts as JSON, and what a terminal shows of them. ``budgets`` has a dictionary for each ``epsilon`` (None:
        without noise) with ``noise_multiplier``, and ``attacker_right``, ``labels_kept`` and ``accuracy`` in [0, 1].
        With one epsilon alone, ``releases`` has the ``sensitivity`` of each kind of release, the standard deviation of
        its ``noise`` (None for labels), and the ``methods``.

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
    budgets = [_budget(settings, *each, classes) for each in zip(epsilons, found, strict=True)]
    alone = len(settings.epsilon) == 1
    releases = _releases(settings, settings.epsilon[0], records / classes, records) if alone else []
    facts = {
        **settings.model_dump(include={"data", "partition", "model", "clients", "delta"}),
        "records": records,
        "classes": classes,
        "unit": "record",
        "budgets": budgets,
        **({"releases": [_facts(release) for release in releases]} if alone else {}),
    }
    return facts, _shown(settings, facts, releases)


def _shown(settings: Plan, facts: Mapping[str, Any], releases: Sequence[_Release]) -> Iterator[Table | Text]:
    yield Text(
        f"{settings.clients} clients with {facts['records']} records of {facts['classes']} classes each"
        + (" on average" if settings.data else "")
        + f", delta {settings.delta:g}, one record added or removed"
    )
    yield _epsilons(facts["budgets"])
    yield Text(_meaning(settings))
    if releases:
        yield _table(releases)


def _budget(settings: Plan, epsilon: float | None, accuracy: float, classes: int) -> dict[str, Any]:
    """A row of the table; shares are in [0, 1]."""
    noise, right, kept = 0.0, 1.0, 1.0
    if epsilon is not None:
        noise = accounting.gaussian_noise(epsilon, settings.delta)
        right = round(guarantees.right_at_most(epsilon, settings.delta) / 100, 3)
        kept = 1 / (1 + (classes - 1) * math.exp(-min(epsilon, 700.0)))
    shares = {"attacker_right": right, "labels_kept": kept, "accuracy": accuracy}
    return {"epsilon": epsilon, "noise_multiplier": noise, **shares}


def _epsilons(budgets: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("epsilon", "noise, x sensitivity", "attacker right, %", "labels kept, %", "accuracy, %"):
        table.add_column(heading, justify="right")
    for row in budgets:
        table.add_row(
            "none" if row["epsilon"] is None else f"{row['epsilon']:g}",
            f"{row['noise_multiplier']:.4g}",
            f"{100 * row['attacker_right']:g}",
            f"{100 * row['labels_kept']:.3g}",
            f"{100 * row['accuracy']:.1f}",
        )
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


def _releases(settings: Plan, epsilon: float, per_class: float, records: int) -> list[_Release]:
    """The noise of each kind of release at one epsilon, and the methods with such releases."""
    noise = accounting.gaussian_noise(epsilon, settings.delta)
    penalty = HeadTraining(penalty=settings.penalty).weight(noise)
    head = math.sqrt(2) / penalty
    by_step = accounting.dp_sgd_noise(epsilon, settings.delta, settings.sampling, settings.steps)
    gradients = f"sums of {records * settings.sampling:.4g} gradients of at most 1"
    numbers = entries(settings.dims + 1) + round(records / per_class) * (settings.dims + 1)
    sums = f"sums of {per_class:.4g} rows of length 1"
    of_products = SecondMoments(
        num_classes=settings.classes, dims=settings.dims, radius=1.0, noise_multiplier=noise, share=MomentSums().share
    ).sensitivity
    of_pairs = f"{of_products:.3g}, off the diagonal /sqrt(2)"
    size = {"numbers": numbers, "bytes": 4 * numbers}
    labels = _names(lambda method: method.protects == "label")
    return [
        _Release("class_head", f"class head, a logit (Lambda {penalty:.3g})", head,
                 f"sqrt(2)/{penalty:.3g} = {head:.3g}", head * noise, "logits of 1 to 10",
                 _releasing("classes coefficients")),
        _Release("score_head", "score head (Lambda 25), a logit", 1 / 25, "1/25", noise / 25, "logits of 1 to 10",
                 _releasing("coefficients")),
        _Release("class_sums", "class sums, a coordinate", 1.0, "1", noise, sums, _releasing("classes dims")),
        _Release("sums_of_products",
                 f"sums of products, an entry off the diagonal ({numbers:,} numbers, {human_bytes(4 * numbers)}; by "
                 "class, more)",
                 of_products, of_pairs, noise * of_products / math.sqrt(2),
                 f"sums of {records} products of at most 1/2", _releasing("groups entries"), size),
        _Release("dp_sgd_step", f"each of {settings.steps} DP-SGD steps", 1.0, "1", by_step, gradients,
                 _training_privately()),
        _Release("labels", "labels (randomised response)", None, "-", None, "label-DP only, features public", labels),
    ]  # fmt: skip


def _facts(release: _Release) -> dict[str, Any]:
    facts = {"sensitivity": release.sensitivity, "noise": release.noise, "methods": release.methods}
    return {"release": release.name, **facts, **release.more}


def _table(releases: Sequence[_Release]) -> Table:
    headings = ("release", "sensitivity", "noise", "size of what it hides", "methods")
    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for each in releases:
        noise = "see above" if each.noise is None else f"{each.noise:.3g}"
        table.add_row(each.words, each.sensitivity_words, noise, each.hides, ", ".join(each.methods))
    return table


def _names(chosen: Callable[[type[Method]], bool]) -> list[str]:
    return [name for name in methods.TABLE if chosen(methods.find(name))]


def _fields(method: type[Method]) -> list[Field]:
    return [f for step in client_steps(method).values() for f in step.reply.schema]


def _releasing(dims: str) -> list[str]:
    """The methods whose clients release a tensor of these dimensions."""
    return _names(
        lambda method: any(f.is_released and f.is_tensor and f.annotation.dim_str == dims for f in _fields(method))
    )


def _training_privately() -> list[str]:
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
