"""A comparison of neighbouring data sets: nothing but releases may depend on the record that differs.

Every release is replaced by the same fake value on both data sets, so that all that leaves must be equal bit by bit.
The exact values that would have been released may differ by the sensitivity that their cost supposes, and no row that
enters them may depend on other records.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedstill.base import seeds
from fedstill.engines.client import SiteClient
from fedstill.privacy import logistic, mechanisms, randomized_response
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.ledger import Charge, Ledger
from fedstill.privacy.logistic import BinaryHead, LogisticHead
from fedstill.privacy.releases import Event, Gaussian

_ROUNDING = 1 + 1e-9
_RESIDUAL = 1.5
"""Multiple of a solver's tolerance that another order of sums may show."""


@dataclass
class Exact:
    """One addition of noise: the exact value, the noise's standard deviation, the cost charged, and its release."""

    value: Tensor
    std: float
    event: Event | None
    release: int


@dataclass
class Heard:
    """Everything that a run on one data set showed.

    Attributes:
        messages: requests and replies.
        releases: exact values, in order.
        charged: costs, in order.
        rows: rows that entered releases, in order.
        clipped: for each release the rows that it clipped, perhaps in parts.
        priors: of randomised labels, the order of classes and the number among which a label stays.
        streams: states of the noise streams that releases began with.
        early: whether a release began before it was charged.
        releasing: whether a release is being computed.
        residual: largest gradient at a head's solution, over the tolerance that its sensitivity includes.
        error: the error that ended the run.
    """

    messages: list[tuple[bytes, bytes]] = field(default_factory=list)
    releases: list[Exact] = field(default_factory=list)
    charged: list[Event] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    clipped: list[list[Tensor]] = field(default_factory=list)
    priors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    streams: list[bytes] = field(default_factory=list)
    early: bool = False
    releasing: bool = False
    residual: float = 0.0
    error: str = ""


@contextmanager
def listening(heard: Heard) -> Iterator[None]:
    """Note what a simulated run releases, and release fake values that depend on nothing in their place."""
    charge, release, start = Ledger.charge, SiteClient.release, seeds.Simulated.__init__

    def spy_release(self: SiteClient, mechanism: Any, rows: Any, **more: Any) -> Any:
        heard.rows.extend(each for each in (rows if isinstance(rows, tuple) else (rows,)) if isinstance(each, Tensor))
        heard.releasing = True
        heard.clipped.append([])
        released = release(self, mechanism, rows, **more)
        heard.releasing = False
        if isinstance(mechanism, LogisticHead | BinaryHead):
            heard.residual = max(heard.residual, _residual(mechanism, rows, heard.releases[-1].value))
        return released

    def spy_start(self: seeds.Simulated, rng: torch.Generator) -> None:
        heard.early |= len(heard.charged) <= len(heard.streams)
        heard.streams.append(rng.get_state().numpy().tobytes())
        start(self, rng)

    def spy_charge(self: Ledger, entry: Charge, *more: Any) -> None:
        charge(self, entry, *more)
        heard.charged.append(entry.event)

    def spied(clipped: Any, *arguments: Any) -> Tensor:
        found: Tensor = clipped(*arguments)
        if heard.releasing:
            heard.clipped[-1].append(found)
        return found

    def fake(self: seeds.Simulated, exact: Tensor, std: float) -> Tensor:
        event = heard.charged[-1] if heard.charged else None
        heard.releases.append(Exact(exact.clone(), std, event, len(heard.charged)))
        rng = seeds.stream(len(heard.releases), "fake")
        return torch.randn(exact.shape, dtype=torch.float64, generator=rng) * std

    def fake_integers(self: Any, exact: Tensor, scale: float, noise: Any) -> Tensor:
        return fake(noise, exact.double(), self.noise_multiplier * scale).round().to(torch.int64)

    with ExitStack() as patches:
        for owner, name, replaced in (
            (Ledger, "charge", spy_charge),
            (SiteClient, "release", spy_release),
            (seeds.Simulated, "__init__", spy_start),
            (seeds.Simulated, "added", fake),
            (IntegerSum, "integers", fake_integers),
            (randomized_response, "_drawn", partial(_fake_labels, heard)),
            (mechanisms, "clipped", partial(spied, mechanisms.clipped)),
            (logistic, "clipped", partial(spied, vars(logistic)["clipped"])),
        ):
            patches.enter_context(mock.patch.object(owner, name, replaced))
        yield


def _fake_labels(heard: Heard, labels: Tensor, order: Tensor, k: Tensor, *more: Any) -> Tensor:
    heard.priors.append((order, k))
    places = torch.arange(len(labels)) % order.shape[1]
    return order.gather(1, places[:, None])[:, 0]


def _residual(head: LogisticHead | BinaryHead, rows: Any, beta: Tensor) -> float:
    """The gradient's length at a head's exact solution ``beta``, over its tolerance."""
    if isinstance(head, LogisticHead):
        x = head.extended(rows[0])
        wrong = (x @ beta.T).softmax(1) - torch.nn.functional.one_hot(rows[1], head.num_classes)
    else:
        x = head.extended(torch.cat([rows, head.negatives.to(rows)]))
        wrong = (x @ beta).sigmoid() - (torch.arange(len(x), device=x.device) < len(rows)).double()
    gradient = torch.einsum("n...,nd->...d", wrong, x) + head.penalty * beta
    return float(gradient.norm()) / head.tolerance


def difference(one: Heard, other: Heard, removed: int | None = None, *, neighbours: bool = True) -> str:
    """A sentence on whatever depends on the record that differs and must not; empty if nothing does.

    Args:
        one: the run with the record.
        other: the run without it, or with another label of it.
        removed: the place of the record that ``other`` lacks; None if a label was replaced.
        neighbours: whether one record differs; releases of records that differ altogether may move by any distance,
            and nothing else may differ either.
    """
    if one.early or other.early:
        return "a release began before it was charged"
    if one.error != other.error or not one.messages or len(one.messages) != len(other.messages):
        return "a run ends differently"
    if len(one.rows) != len(other.rows) or len(one.clipped) != len(other.clipped):
        return "the number of releases depends on records"
    for rows in (*zip(one.rows, other.rows, strict=True), *_clipped(one, other)) if neighbours else ():
        if (moved := _depending(*rows, removed)) is not None:
            return f"a row depends on other records: row {moved} of {len(rows[0]):,} moves with record {removed}"
    for prior, prior2 in zip(one.priors, other.priors, strict=True):
        if removed is None and not all(map(torch.equal, prior, prior2)):
            return "a prior depends on a label"
    for (asked, answered), (asked2, answered2) in zip(one.messages, other.messages, strict=True):
        if asked != asked2:
            return "requests differ"
        if answered != answered2:
            return "replies differ beside their releases"
    if found := _noised(one.releases, other.releases) or (neighbours and _moved(one.releases, other.releases)):
        return found
    if len(set(one.streams)) != len(one.streams):
        return "two releases have the same noise"
    if max(one.residual, other.residual) > _RESIDUAL:
        return "a head's solver stopped before its tolerance"
    return ""


def _clipped(one: Heard, other: Heard) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that releases clipped: those of a release that did so in parts, such as 2,000 at a time, joined."""
    for parts, others in zip(one.clipped, other.clipped, strict=True):
        for shape in dict.fromkeys(part.shape[1:] for part in parts):
            some, rest = ([part for part in each if part.shape[1:] == shape] for each in (parts, others))
            if sum(map(len, some)) == sum(map(len, rest)) + 1:
                yield torch.cat(some), torch.cat(rest)
            elif len(some) == len(rest):
                yield from zip(some, rest, strict=True)


def _depending(rows: Tensor, others: Tensor, removed: int | None) -> int | None:
    """The first row that differs without the record ``removed``; None if none does."""
    if removed is None or len(rows) != len(others) + 1:
        return None
    left = torch.arange(len(rows)) != removed
    differing = ((rows[left] != others) & ~(rows[left].isnan() & others.isnan())).flatten(1 if rows.ndim > 1 else 0)
    places = (differing.any(1) if rows.ndim > 1 else differing).nonzero()
    if not len(places) or not Counter(_each(others)) - Counter(_each(rows)):  # the same rows in another order
        return None
    return int(torch.arange(len(rows))[left][places[0, 0]])


def _each(rows: Tensor) -> Iterator[bytes]:
    return (row.tobytes() for row in rows.detach().cpu().numpy())


def _noised(releases: list[Exact], others: list[Exact]) -> str:
    """A sentence if the number, the shapes, the noise or the costs of releases differ, or one has no cost."""
    if len(releases) != len(others):
        return "the number of releases depends on records"
    for a, b in zip(releases, others, strict=True):
        if (a.std, a.event) != (b.std, b.event) or a.value.shape != b.value.shape:
            return "noise or cost depends on records"
        if not isinstance(a.event, Gaussian):
            return "a release has no cost"
    return ""


def _moved(releases: list[Exact], others: list[Exact]) -> str:
    """A sentence if an exact value moves by more than the sensitivity that its cost supposes."""
    squares: dict[tuple[int, int], list[float]] = {}
    for a, b in zip(releases, others, strict=True):
        assert isinstance(a.event, Gaussian)
        moved, sensitivity = float((a.value - b.value).norm()), a.std / a.event.noise_multiplier
        moved = moved / sensitivity if sensitivity else (math.inf if moved else 0.0)
        if moved > _ROUNDING:
            return f"a record moves a release by {moved:.3g} times its sensitivity"
        squares.setdefault((a.release, a.event.count), []).append(moved**2)
    for (_, count), found in squares.items():
        if len(found) > count and (together := math.sqrt(sum(found) / count)) > _ROUNDING:
            values = f"the {len(found)} noisy values of a release"
            return f"a record moves {values} together by {together:.3g} times its sensitivity"
    return ""
