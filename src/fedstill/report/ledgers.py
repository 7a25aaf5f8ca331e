"""``fedstill privacy``: what each client of a run released, and what a release would cost before anybody makes one."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill import seeds
from fedstill.journal import Journal
from fedstill.privacy import accounting, guarantee
from fedstill.privacy.events import Pure, Unbounded, Unit
from fedstill.privacy.ledger import Entry
from fedstill.privacy.logistic import LogisticHead
from fedstill.report import tables
from fedstill.report.record import read_run
from fedstill.settings import Settings

_MOST = 12
"""Clients that get lines of their own when their ledgers differ."""


def show(folder: Path) -> Iterator[Table | Text]:
    """The ledger of a run: who released what, when, at what cost, composed how.

    Raises:
        ValueError: when ``folder`` holds no run.
    """
    record = read_run(folder)
    found = record.summary["guarantee"]
    journal = Journal(folder / "journal")
    spent = journal.spent()
    yield Text(f"{record.label}, seed {record.summary['seed']}: {tables.guarantee_words(found)}", style="bold")
    if tables.holds(found):
        yield Text(f"neighbours: {found.get('adjacency') or '-'}\nholds against: {found['adversary']}")
        yield Text(f"composed by: {found.get('accountant') or '-'}")
    yield Text(f"because: {found['reason']}")
    if not spent:
        yield Text("No client released anything through a mechanism.")
        return
    yield _table(spent, journal.times())
    yield from _sums(spent, record.config["experiment"])


def _table(spent: dict[int, list[Entry]], times: dict[tuple[int, int], float]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("client", "step", "mechanism", "protects", "cost of each", "times", "at second"):
        justify: Literal["left", "right"] = "right" if heading in ("times", "at second") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "cost of each")
    alike = len({tuple(entries) for entries in spent.values()}) == 1
    clients = sorted(spent)
    shown = clients[:1] if alike else clients[:_MOST]
    for client in shown:
        kinds: dict[tuple[str, ...], list[Entry]] = {}  # of releases that differ in nothing but when they were made
        for entry in spent[client]:
            kinds.setdefault((entry.step, entry.mechanism, entry.unit, cost_words(entry)), []).append(entry)
        for kind, entries in kinds.items():
            asked = {entry.exchange for entry in entries}
            at = [times[n, c] for n in asked for c in (clients if alike else [client]) if (n, c) in times]
            when = "-" if not at else f"{min(at):.0f}" + (f" to {max(at):.0f}" if max(at) - min(at) >= 1 else "")
            table.add_row(f"each of {len(clients)}" if alike else str(client), *kind, str(len(entries)), when)
    if len(shown) < len(clients) and not alike:
        table.caption = f"and {len(clients) - len(shown)} more clients"
    return table


def _sums(spent: dict[int, list[Entry]], experiment: dict[str, Any]) -> Iterator[Text]:
    delta, budget = experiment.get("delta", 1e-5), experiment.get("budget")
    units: tuple[Unit, ...] = ("record", "label")
    for unit in units:
        totals = []
        for entries in spent.values():
            same = [entry for entry in entries if entry.unit == unit]
            if same:
                totals.append(guarantee.of_client(same, delta, budget)[0])
        if totals:
            low, high = min(totals), max(totals)
            words = _number(high) if low == high else f"{_number(low)} to {_number(high)}"
            yield Text(f"together, per {unit} of one client: epsilon {words} at delta {delta:g}")


def _number(epsilon: float) -> str:
    return "unbounded" if math.isinf(epsilon) else tables.round_up(epsilon)


def cost_words(entry: Entry) -> str:
    """The cost of a release in a few words."""
    event = entry.event
    if isinstance(event, Pure):
        return f"epsilon {event.epsilon:g}" + (f", part '{entry.part}'" if entry.part else "")
    if isinstance(event, Unbounded):
        return "no bound"
    words = f"noise {event.noise_multiplier:.4g} sensitivities"
    if event.sampling < 1:
        words += f", {event.count} samples of {event.sampling:.3g}"
    elif event.count > 1:
        words += f", {event.count} times"
    return words + (", adaptive" if entry.adaptive else "")


class Plan(Settings):
    """What a release would cost."""

    epsilon: PositiveFloat = 1.0
    """What a client is ready to spend."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """At which probability more may be lost."""
    records: PositiveInt = 2500
    """Records of a client."""
    classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Classes of the task."""
    clients: PositiveInt = 10
    """Clients whose heads the server averages."""
    penalty: PositiveFloat = 5.0
    """Lambda of the class heads."""
    dims: Annotated[int, Ge(2), Le(4096)] = 128
    """Features that heads see."""
    steps: PositiveInt = 200
    """Steps of DP-SGD that a client makes in all rounds."""
    sampling: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of its records that a step is made on."""


def plan(settings: Plan) -> Iterator[Table | Text]:
    """The noise of every mechanism at this budget, and what it does to accuracy on a reference task."""
    noise = accounting.gaussian_noise(settings.epsilon, settings.delta)
    classic = accounting.published_noise(settings.epsilon, settings.delta)
    keep = 1 / (1 + (settings.classes - 1) * math.exp(-settings.epsilon))
    yield Text(
        f"epsilon {settings.epsilon:g}, delta {settings.delta:g}, one record added or removed: Gaussian noise of "
        f"{noise:.4g} x the sensitivity (the classic formula would take {classic:.4g})"
    )
    table = Table(
        *("release", "sensitivity", "noise", "by one client's signal", "methods"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    per_class = settings.records / settings.classes
    head = math.sqrt(2) / settings.penalty
    heads = "fedauxfdp, fedavg-p, fedd-p"
    by_step = accounting.dp_sgd_noise(settings.epsilon, settings.delta, settings.sampling, settings.steps)
    gradients = f"sums of {settings.records * settings.sampling:.4g} gradients of at most 1"
    rows = (
        ("class head, a logit", f"sqrt(2)/{settings.penalty:g} = {head:.3g}", head * noise, "logits of 1 to 10", heads),
        ("score head (Lambda 25), a logit", "1/25", noise / 25, "logits of 1 to 10", "fedauxfdp"),
        (
            "class sums, a coordinate",
            "1",
            noise,
            f"sums of {per_class:.4g} rows of length 1",
            "fedgm-records, fedrd-records",
        ),
        (f"each of {settings.steps} DP-SGD steps", "1", by_step, gradients, "dp-fl, adap-dp-fl, fedkd, fedkadp"),
    )
    for name, sensitivity, std, signal, methods in rows:
        table.add_row(name, sensitivity, f"{std:.3g}", signal, methods)
    kept = f"keeps {100 * keep:.3g} %"
    table.add_row("labels (randomised response)", "-", kept, "label-DP only, features public", "fedgm-labels")
    yield table
    clean, noisy = reference(settings, noise)
    yield Text(
        f"Reference task (a mixture of {settings.classes} Gaussians in {settings.dims} dimensions, {settings.clients} "
        f"clients with {settings.records} records each, mean of their heads): {100 * clean:.1f} % without noise, "
        f"{100 * noisy:.1f} % with it. Real data differ; try --epsilon None and a value in a simulation first."
    )


def reference(settings: Plan, noise_multiplier: float) -> tuple[float, float]:
    """Accuracies without and with noise of averaged heads on a made-up task; at most three clients are computed.

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
