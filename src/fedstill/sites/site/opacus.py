"""``fedstill privacy import``: the history of an Opacus accountant, added up by this library's accountant.

The history is a list of (noise multiplier, sample rate, steps) of Gaussian noise on Poisson samples, where neighbours
differ by one record that is added or removed: this library's event `Gaussian`. A site that trained on its records with
Opacus can charge it to its ledger, whose budget is then smaller by it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Lt
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill.base.settings import Settings
from fedstill.base.weights import plain
from fedstill.privacy import accounting
from fedstill.privacy.ledger import BudgetExceeded, Charge
from fedstill.privacy.releases import Gaussian
from fedstill.report import guarantees
from fedstill.sites import units
from fedstill.sites.site import log
from fedstill.sites.site.charges import Limits, costs_of, open_site_ledger
from fedstill.sites.site.policy import SitePolicy

_CHECKPOINT = "privacy_accountant_state_dict"
"""Name of the accountant's state in a checkpoint of Opacus's ``PrivacyEngine``."""
_MECHANISMS = ("rdp", "prv", "gdp")
"""Opacus's accountants; all of them have histories of the same form."""


class Import(Settings):
    """Add up the history of an Opacus accountant by privacy loss distributions, and charge it to a site's ledger."""

    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Delta at which epsilon is stated."""
    policy: Path | None = None
    """A site's policy.toml, to whose ledger the history is charged, once."""

    def run(self, place: Path) -> tuple[dict[str, Any], Iterator[Table | Text]]:
        """The history and its epsilon as JSON, and what a terminal shows of them; charged, if there is a policy.

        Raises:
            ValueError: the file has no history, or the site's ledger can't take it.
        """
        events, name, content = read(place)
        epsilon = accounting.epsilon(events, self.delta, "record")
        charged = None
        if self.policy is not None:
            policy = SitePolicy.read(self.policy)
            units.check_owner(policy.state, f"privacy import {place} --policy {self.policy}")
            _charge(events, name, place.name, content, policy)
            charged = {"ledger": str(policy.state), "entries": len(events), "budget": policy.budget}
        facts = {
            "epsilon": epsilon,
            "delta": self.delta,
            "unit": "record",
            "accountant": name,
            "history": [event.model_dump(mode="json") for event in events],
            "charged": charged,
        }
        return facts, self._shown(events, epsilon, charged)

    def _shown(
        self, events: list[Gaussian], epsilon: float, charged: Mapping[str, Any] | None
    ) -> Iterator[Table | Text]:
        table = Table("noise, x clip", "sample rate", "steps", box=SIMPLE_HEAD)
        for event in events:
            table.add_row(f"{event.noise_multiplier:g}", f"{event.sampling:g}", f"{event.count:,}")
        yield table
        yield Text(
            f"epsilon {guarantees.round_up(epsilon)} at delta {self.delta:g}, composed by privacy loss distributions "
            "(dp-accounting)",
            style="bold",
        )
        yield Text("neighbours: one record is added or removed\nassumes: Poisson samples (Opacus's poisson_sampling)")
        if charged is not None:
            place, budget = charged["ledger"], charged["budget"]
            yield Text(f"charged to {place}: {len(events)} entries; the site's budget is {budget} in all")


def read(place: Path) -> tuple[list[Gaussian], str, bytes]:
    """The events of a history, the name of Opacus's accountant, and the file's content.

    Args:
        place: JSON or what ``torch.save`` made of ``accountant.state_dict()``, of a checkpoint of ``PrivacyEngine``, or
            of the list itself.

    Raises:
        ValueError: the file can't be read or has no such history.
    """
    try:
        content = place.read_bytes()
        found = plain(content) if content.startswith((b"PK", b"\x80")) else json.loads(content)
    except OSError as error:
        raise ValueError(f"{place} can't be read ({error.strerror or error}); check the path") from error
    except ValueError as error:
        raise ValueError(
            f"{place} has no history ({error}); save accountant.state_dict() by torch or json, with plain numbers: "
            "float() and int() of numpy's"
        ) from error
    if isinstance(found, Mapping):
        found = found.get(_CHECKPOINT, found)
    state: Mapping[str, Any] = found if isinstance(found, Mapping) else {"history": found}
    history, name = state.get("history"), state.get("mechanism", "rdp")
    if name not in _MECHANISMS:
        raise ValueError(f"{place} has the mechanism {name!r:.40}; it must be one of {', '.join(_MECHANISMS)}")
    if not isinstance(history, list | tuple) or not history:
        raise ValueError(f"{place} has no history: a list of [noise multiplier, sample rate, steps] with an entry")
    return [_event(place, number, each) for number, each in enumerate(history, start=1)], str(name), content


def _event(place: Path, number: int, each: Any) -> Gaussian:
    try:
        noise, sampling, steps = each
        if isinstance(steps, float) and steps == int(steps):
            steps = int(steps)
        return Gaussian(noise_multiplier=noise, sampling=sampling, count=steps)
    except (TypeError, ValueError, OverflowError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ValueError(
            f"{place}: entry {number} of the history is {each!r:.80}, not [noise multiplier above 0, sample rate in "
            f"(0, 1], steps] ({why})"
        ) from error


def _charge(events: list[Gaussian], name: str, file: str, content: bytes, policy: SitePolicy) -> None:
    """Charge the events of a history; those that a killed import has charged already stay."""
    digest = hashlib.sha256(content).hexdigest()
    run, facts = digest[:32], {"run": digest[:32], "step": log.IMPORTED, "history": digest}
    limits = Limits(policy.delta, policy.budget)
    ledger = open_site_ledger(policy.state, run, limits, lambda new, store: {**facts, **costs_of(new, store, limits)})
    if (already := len(ledger.entries)) >= len(events):
        raise ValueError(f"the ledger of {policy.state} has this history already; it is charged once")
    if policy.budget is not None and not accounting.admits(events, events[0], policy.budget, policy.delta):
        raise ValueError(_too_much(policy))
    # before the first charge, so that a log that can't be written stops them all
    log.write(policy, {**facts, "by": units.user()}, log.IMPORTED, f"{len(events)} entries of {file}")
    try:
        for index, event in list(enumerate(events))[already:]:
            ledger.charge(
                Charge(
                    exchange=0,
                    step=log.IMPORTED,
                    index=index,
                    mechanism=f"Opacus ({name})",
                    unit="record",
                    event=event,
                    theorem="Gaussian mechanism on Poisson samples, as the history of Opacus's accountant states it",
                )
            )
    except BudgetExceeded as error:
        raise ValueError(f"{_too_much(policy)} ({len(ledger.entries)} of {len(events)} entries are charged)") from error


def _too_much(policy: SitePolicy) -> str:
    return (
        f"the history does not fit the budget of {policy.budget} at delta {policy.delta:g} that is left; answer no run "
        "with these records, or raise the budget"
    )
