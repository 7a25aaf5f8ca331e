"""A check of a site's log and ledger, each for itself and one against the other.

A killed process may leave a question without an outcome, a charge that only the ledger has (it was killed between the
two files), and a charge without a release. None of these is wrong, nor is an imported charge that an early version of
``fedstill privacy import`` did not log. Wrong is a release that left twice or without a
charge, a charge of the log that the ledger lacks, and every change of a line.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill import files
from fedstill.sites import log
from fedstill.sites.ledger import Charge, read_charges

Line = Mapping[str, Any]
OUTCOMES = ("answered", "refused", "failed", "waiting")
"""What may become of a question."""


@dataclass
class Verdict:
    """The result of `verify`.

    Attributes:
        problems: sentences on what is wrong.
        notes: sentences on what killed processes left, which is not wrong.
        counts: numbers of lines, questions, answers, releases and charges.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(state: Path) -> Verdict:
    """Check the log and the ledger in a site's folder ``state``; no damage raises an error.

    Raises:
        NewerFormat: a newer fedstill wrote them.
    """
    verdict = Verdict()
    lines: list[dict[str, Any]] = []
    charges: list[Charge] = []
    try:
        lines = log.read(state)
        charges = read_charges(log.ledger_of(state))
    except files.NewerFormat:  # which may know more kinds of lines and charges
        raise
    except files.Damaged as error:
        verdict.problems.append(str(error))
        return verdict
    _compare(verdict, [line for line in lines if "n" in line], charges)
    asked = sum(line["what"] == "asked" for line in lines)
    answered = sum(line["what"] == "answered" for line in lines)
    verdict.counts |= {"lines": len(lines), "questions": asked, "answers": answered, "charges": len(charges)}
    return verdict


def unfinished(lines: Sequence[Line]) -> list[Line]:
    """The questions without an outcome: they are being answered, or their process was killed."""
    waiting: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line["what"] == "asked":
            waiting[str(line.get("request"))].append(line)
        elif line["what"] in OUTCOMES and waiting[str(line.get("request"))]:
            same = waiting[str(line.get("request"))]
            own = [each for each in same if each.get("process") == line.get("process")]
            same.remove((own or same)[0])
    return sorted((line for each in waiting.values() for line in each), key=lambda line: int(line.get("n", 0)))


def _compare(verdict: Verdict, lines: Sequence[Line], charges: Sequence[Charge]) -> None:
    begun = max((int(line["ledger"]) for line in lines if line["what"] == "begun"), default=0)
    if begun:
        verdict.notes.append(
            f"the chain of the log begins after charge {begun}; earlier charges are in the ledger only"
        )
    if wrong := next((i for i, line in enumerate(lines, start=1) if line["n"] != i), None):
        verdict.problems.append(f"entry {wrong} of the log has another number")
    logged = _logged(verdict, lines, charges)
    unlogged = [charge for charge in charges[begun:] if charge.number not in logged]
    broken = Counter(line.get("run") for line in unfinished(lines))
    requests = {line["request"]: line.get("run") for line in lines if line["what"] == "asked"}
    broken.update(requests.get(line.get("request")) for line in lines if line["what"] == "failed")
    for charge in unlogged:
        words = f"charge {charge.number} of run {charge.run[:8]} is in the ledger and not in the log"
        if charge.entry.step == log.IMPORTED and charge.entry.mechanism.startswith(log.OPACUS):
            verdict.notes.append(f"{words}: it was imported, by an early version or a killed process; it stays charged")
            continue
        broken[charge.run] -= 1
        if broken[charge.run] < 0:
            verdict.problems.append(f"{words}, and no question of the run was interrupted")
        else:
            verdict.notes.append(f"{words}: a question was interrupted between the two; it stays charged")
    _check_answers(verdict, lines, [*charges[:begun], *unlogged])
    for line in unfinished(lines):
        verdict.notes.append(f"entry {line['n']} has no outcome: the question is being answered, or was interrupted")


def _logged(verdict: Verdict, lines: Sequence[Line], charges: Sequence[Charge]) -> dict[int, Line]:
    """The charges of the log by their number in the ledger, which must have each."""
    logged: dict[int, Line] = {}
    for line in lines:
        if line["what"] != "charged":
            continue
        number = int(line["ledger"])
        if number > len(charges):
            verdict.problems.append(f"charge {number} (entry {line['n']} of the log) is lost: the ledger lacks it")
        elif charges[number - 1].mac != line["ledger_mac"] or charges[number - 1].run != line["run"]:
            verdict.problems.append(f"charge {number} (entry {line['n']} of the log) is another one in the ledger")
        elif number in logged:
            verdict.problems.append(f"charge {number} is in the log twice (entries {logged[number]['n']}, {line['n']})")
        logged[number] = line
    return logged


def _check_answers(verdict: Verdict, lines: Sequence[Line], others: Sequence[Charge]) -> None:
    """Check that every released reply was charged, and left in one form; ``others`` are charges the log lacks."""
    charged = {(line["run"], line.get("request")) for line in lines if line["what"] == "charged"}
    exchanges = {(charge.run, charge.entry.exchange) for charge in others}
    replies: dict[tuple[str, str], Line] = {}
    payers: dict[int, Line] = {}
    released = 0
    for line in lines:
        if line["what"] != "answered" or line["simulated_noise"] or "released" not in line["fields"].values():
            continue
        released += 1
        question = (str(line["run"]), str(line["request"]))
        earlier = replies.setdefault(question, line)
        if earlier["reply"] != line["reply"]:
            verdict.problems.append(f"the question of entries {earlier['n']} and {line['n']} got two releases")
        if question not in charged and (line["run"], line["exchange"]) not in exchanges:
            verdict.problems.append(f"the release of entry {line['n']} was not charged")
        for number in line["charges"]:
            payer = payers.setdefault(number, line)
            if payer["reply"] != line["reply"]:
                verdict.problems.append(f"charge {number} paid for two releases (entries {payer['n']}, {line['n']})")
    verdict.counts["releases"] = released
