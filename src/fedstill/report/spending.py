"""``fedstill privacy RUN``: each client's releases in a run, and their costs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill.privacy import guarantee
from fedstill.privacy.ledger import Charge
from fedstill.privacy.releases import UNITS, Pure, Unbounded, Unit
from fedstill.report import guarantees
from fedstill.report.record import RunRecord, read_run
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import Journal, JournalFiles
from fedstill.runs.live import spent_by_unit

_MOST = 12
"""Maximum number of clients in the table, if their releases differ."""


def show(folder: Path) -> Iterator[Table | Text]:
    """The run's guarantee, a table of its releases, and the clients' total epsilons.

    Raises:
        ValueError: ``folder`` is not a finished run.
    """
    record = read_run(folder)
    promised = record.guarantee
    journal = _journal(folder)
    spent = journal.releases()
    yield Text(f"{record.label}, seed {record.summary['seed']}: {guarantees.words(promised)}", style="bold")
    if guarantees.is_finite(promised):
        yield Text(f"neighbours: {promised.adjacency or '-'}\nholds against: {promised.adversary}")
        yield Text(f"composed by: {promised.accountant or '-'}")
    yield Text(f"because: {promised.reason}")
    if not spent:
        yield Text("No client released anything through a privacy mechanism.")
        return
    yield _table(spent, journal.last_message_times())
    yield from _sums(spent, record.config["experiment"], "" if promised.holds else ", of these releases alone")
    yield from map(Text, _beside(record))


def _journal(folder: Path) -> Journal:
    """The journal of a run, whose releases are those that the run's guarantee is of."""
    run = RunFolder(folder)
    journal = Journal(run.journal)
    run.check_results(journal.files.spent)
    return journal


def remarks(records: Sequence[RunRecord]) -> list[str]:
    """What the table of these runs leaves open.

    Noise from a seed, the sum of several runs, exact numbers of private records, and why runs with private releases
    promise nothing.

    Raises:
        ValueError: a file of a run is damaged.
    """
    return list(_remarks(records))


def sums(records: Sequence[RunRecord]) -> list[str]:
    """The sentences of `remarks` on the sum of several runs on the same records."""
    return list(_together(_real(map(_so_far, records))))


def of_model(record: RunRecord) -> list[str]:
    """What the guarantee of one run leaves open for who has its model alone, without the run's folder.

    No sentence has a number of private records, as that of the largest group.
    """
    alone = "Each epsilon is that of one run: whoever sees more made of the same records has learnt from each of them."
    found = [*([alone] if _real([record]) else []), *_of_choice(record)]
    if not hides_numbers(record):
        return [*_group_of(record), *found]
    if (group := record.get("largest_group")) and not record.guarantee.group and record.guarantee.unit != "client":
        found.insert(
            0,
            f"One {group['column']!r} may have several records: for all of them together epsilon is larger, by a "
            "number that is not public (--group-bound states one).",
        )
    return found


def hides_numbers(record: RunRecord) -> bool:
    """Whether exact numbers of the run's training records would say more than its guarantee, which does not count them.

    Published data have no such numbers, and where there is no guarantee they break none.
    """
    return guarantees.is_finite(record.guarantee) and not record.get("known_data")


def _real(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs whose guarantee has real noise."""
    found = [r for r in records if guarantees.is_finite(r.guarantee) and not r.guarantee.simulated]
    return [r for r in found if guarantee.is_spent(r.guarantee)]


def _so_far(record: RunRecord) -> RunRecord:
    """A run; if it is unfinished, with the guarantee of what it has released with real noise, if anything."""
    if record.finished:
        return record
    place = JournalFiles(RunFolder(record.folder).journal).spent
    experiment = record.config["experiment"]
    if experiment.get("noise") != "entropy" or not place.exists():
        return record
    for one in spent_by_unit(RunFolder(record.folder), place, experiment):
        facts = (True, one.unit, None, one.epsilon, one.delta, None, None, "the releases so far")
        return replace(record, guarantee=guarantee.Guarantee(*facts, simulated=False))
    return record


def _remarks(records: Sequence[RunRecord]) -> Iterator[str]:
    records = [_so_far(record) for record in records]
    if any(guarantees.is_simulated(record.guarantee) for record in records):
        yield "The privacy noise is simulated, drawn from the seed; real noise needs --noise entropy."
        if any(guarantee.OF_REAL_NOISE in record.guarantee.reason for record in records):
            yield "With it a task here has no guarantee, as it is drawn from all records (fedstill privacy RUN: why)."
    yield from _together(_real(records))
    yield from dict.fromkeys(words for record in records for words in _beside(record))
    broken = {}
    for record in records:
        if record.finished and not guarantees.is_finite(record.guarantee) and record.label not in broken:
            if Journal(RunFolder(record.folder).journal).releases():
                broken[record.label] = f"{record.label} has no guarantee: {record.guarantee.reason}."
    yield from broken.values()


def _beside(record: RunRecord) -> Iterator[str]:
    """What a run's number leaves open by itself: the largest group, and exact numbers of private records."""
    yield from _group_of(record)
    yield from _of_choice(record)
    if _real([record]) and record.counts is not None and not record.get("known_data"):
        yield (
            "The records of each class at each client and the data's fingerprint are exact, and no guarantee covers "
            "them: do not hand on this page or the run's folder (fedstill publish writes files without them)."
        )


def _of_choice(record: RunRecord) -> Iterator[str]:
    """That the choice among tries, which had the same records, is in no epsilon."""
    if record.tries and guarantees.is_finite(record.guarantee) and guarantee.is_spent(record.guarantee):
        number = len(record.tries["tries"])
        yield f"The epsilon of {record.label} does not count that its settings are the best of {number} tries."


def _group_of(record: RunRecord) -> Iterator[str]:
    if words := _of_person(record):
        yield words


def _of_person(record: RunRecord) -> str:
    """What a guarantee promises to the largest group of records that belong together, as a patient's."""
    group, promised = record.get("largest_group"), record.guarantee
    if group is None or promised.group or not guarantees.is_finite(promised) or not guarantee.is_spent(promised):
        return ""
    assert promised.epsilon is not None
    size = group["clients"] if promised.unit == "client" else group["records"]
    if size < 2:
        return ""
    found = guarantee.of_group(promised.epsilon, promised.delta or 0.0, size)
    held = f"records at up to {size} clients" if promised.unit == "client" else f"up to {size} {promised.unit}s"
    several = f"One {group['column']!r} has {held}: for all of them together"
    if found is None:
        return f"{several} this epsilon promises nothing."
    delta = f" at delta {guarantees.round_up(found[1])}" if found[1] else ""
    return f"{several} epsilon is up to {guarantees.round_up(found[0])}{delta}."


def _together(real: Sequence[RunRecord]) -> Iterator[str]:
    """The sums of the guarantees of runs with real noise on the same records: whoever sees all has learnt from each.

    A guarantee for a client counts for its records, and one for records for their labels.
    """
    for runs in map(_answered_once, _on_the_same_records(real)):
        for unit in (unit for unit in _WIDER if any(run.guarantee.unit == unit for run in runs)):
            counted = [run.guarantee for run in runs if run.guarantee.unit in _WIDER[unit]]
            if len(counted) > 1:
                epsilon = sum(one.epsilon or 0.0 for one in counted)
                delta = sum(one.delta or 0.0 for one in counted)
                of_delta = f" at delta {guarantees.round_up(delta)}" if delta else ""
                per = f" per {unit}" if len({run.guarantee.unit for run in runs}) > 1 else ""
                begun = sum(not run.finished for run in runs)
                so_far = f" ({begun} unfinished, by the releases so far)" if begun else ""
                yield (
                    f"Each epsilon is that of one run. Whoever sees all {len(counted)} runs of these records{so_far} "
                    f"has an epsilon of up to {guarantees.round_up(epsilon)}{of_delta}{per}."
                )


_WIDER: dict[str, tuple[str, ...]] = {
    "label": ("label", "record", "client"), "record": ("record", "client"), "client": ("client",),
}  # fmt: skip
"""Unit -> the units whose guarantees hold for it too."""


def _answered_once(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs without those whose every release another has too: they took its replies, and nothing left again."""
    if len(runs) < 2:  # their journals need not be read
        return list(runs)
    found: list[RunRecord] = []
    known: list[dict[int, bytes]] = []
    for run, replies in sorted(zip(runs, map(_releasing, runs), strict=True), key=lambda pair: -len(pair[1] or ())):
        if replies is not None and any(replies.items() <= others.items() for others in known):
            continue
        found.append(run)
        known += [] if replies is None else [replies]
    return found


def _releasing(run: RunRecord) -> dict[int, bytes] | None:
    """The checksum of each client's reply, if all that the run released is in these replies to its first request.

    None where something was released later, or in a reply that is not there, as of a client that failed.
    """
    journal = Journal(RunFolder(run.folder).journal)
    releases, replies = journal.releases(), journal.files.checksums(0)
    if {one.exchange for entries in releases.values() for one in entries} != {0} or not releases.keys() <= {*replies}:
        return None
    return {client: replies[client] for client in releases}


def _on_the_same_records(real: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The runs that may be on the same records: of one source, one fingerprint before any backbone, or real sites."""
    found: list[tuple[set[object], list[RunRecord]]] = []
    for record in real:
        marks: set[object] = {record.get("records") or record.config.get("fingerprint")}
        if record.counts is None:
            marks = {"the records of real sites"}
        else:
            named = record.config.get("data_path"), record.config["experiment"]["data"]
            marks.update(("data", name) for name in named if name is not None)
        same = [one for one in found if one[0] & marks]
        found = [one for one in found if one not in same]
        found.append((marks.union(*(one[0] for one in same)), [*(run for one in same for run in one[1]), record]))
    return [runs for _, runs in found]


def numbers(folder: Path) -> dict[str, Any]:
    """The facts of `show` as numbers, for a program.

    Returns:
        ``label``, ``method``, ``seed``, ``guarantee`` (the fields of `Guarantee`), ``releases`` (a list: client, step,
        mechanism, unit, the fields of its ``event``, ``theorem``, ``adaptive``, ``part``, number of the request, and
        ``seconds``, the time of the client's reply since the start, or None), ``clients`` (the total ``epsilon`` at
        ``delta`` of each client's releases of one unit, or None where nothing bounds it), and ``remarks``.

    Raises:
        ValueError: as for `show`.
    """
    record = read_run(folder)
    journal = _journal(folder)
    spent, times = journal.releases(), journal.last_message_times()
    experiment = record.config["experiment"]
    releases = [
        {"client": client, **entry.model_dump(mode="json"), "seconds": times.get((entry.exchange, client))}
        for client, entries in spent.items()
        for entry in entries
    ]
    clients = [
        {"client": client, "unit": unit, "epsilon": total if math.isfinite(total) else None, "delta": delta}
        for unit in UNITS
        for client, (total, delta) in _totals(spent, unit, experiment).items()
    ]
    return {
        "label": record.label,
        "method": record.summary["method"],
        "seed": record.summary["seed"],
        "guarantee": guarantees.as_json(record.guarantee),
        "releases": releases,
        "clients": clients,
        "remarks": remarks([record]),
    }


def _totals(
    spent: Mapping[int, Sequence[Charge]], unit: Unit, experiment: Mapping[str, Any]
) -> dict[int, tuple[float, float]]:
    """The total epsilon of each client that released anything of this unit, and its delta (`guarantee.spent_by`)."""
    limits = experiment.get("delta", 1e-5), experiment.get("budget"), experiment.get("group_bound")
    counted = {client: tuple(e for e in entries if e.unit == unit) for client, entries in spent.items()}
    found = {kind: guarantee.spent_by(kind, *limits) for kind in {*counted.values()} - {()}}
    return {client: found[kind] for client, kind in counted.items() if kind}


def _table(spent: dict[int, list[Charge]], times: dict[tuple[int, int], float]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("client", "step", "mechanism", "protects", "cost of each", "times", "at second"):
        justify: Literal["left", "right"] = "right" if heading in ("times", "at second") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "cost of each")
    same = len({tuple(entries) for entries in spent.values()}) == 1
    clients = sorted(spent)
    shown = clients[:1] if same else clients[:_MOST]
    for client in shown:
        kinds: dict[tuple[str, ...], list[Charge]] = {}  # releases that differ in their time only
        for entry in spent[client]:
            kinds.setdefault((entry.step, entry.mechanism, entry.unit, cost_words(entry)), []).append(entry)
        for kind, entries in kinds.items():
            asked = {entry.exchange for entry in entries}
            at = [times[n, c] for n in asked for c in (clients if same else [client]) if (n, c) in times]
            when = "-" if not at else f"{min(at):.0f}" + (f" to {max(at):.0f}" if max(at) - min(at) >= 1 else "")
            table.add_row(f"each of {len(clients)}" if same else str(client), *kind, str(len(entries)), when)
    if len(shown) < len(clients) and not same:
        table.caption = f"and {len(clients) - len(shown)} more clients"
    return table


def _sums(spent: dict[int, list[Charge]], experiment: dict[str, Any], limits: str) -> Iterator[Text]:
    for unit in UNITS:
        if totals := _totals(spent, unit, experiment).values():
            (low, _), (high, delta) = min(totals), max(totals)
            words = _number(high) if low == high else f"{_number(low)} to {_number(high)}"
            twice = ", that of two records (--group-bound)" * (unit == "record" and bool(experiment.get("group_bound")))
            yield Text(f"in total, per {unit} of one client: epsilon {words} at delta {delta:g}{twice}{limits}")


def _number(epsilon: float) -> str:
    return "unbounded" if math.isinf(epsilon) else guarantees.round_up(epsilon)


def cost_words(entry: Charge) -> str:
    """The cost of a release in words."""
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
