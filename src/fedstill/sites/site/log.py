"""A site's log: lines of its journal about everything that arrives and what became of it, and their check.

`fedstill.sites.site.site_journal` says which lines there are. A killed process may leave a question without an outcome
and a charge without a release; neither is wrong. Wrong is a release that left twice or without a charge, and every
change of a line.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill import schema
from fedstill.base import files
from fedstill.runs.environment import now
from fedstill.sites.site.chain import Line as ChainLine
from fedstill.sites.site.checkpoint import OUTCOMES, Checkpoint, Standing
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sites.site.state_format import check_aside, check_newest

IMPORTED = "imported"
"""Step of the charges for the history of another program."""
_DETAIL = 1000

log = logging.getLogger("fedstill")


def write(policy: SitePolicy, facts: Mapping[str, Any], what: str, detail: str | Exception, **more: Any) -> int | None:
    """Append a line with ``facts`` and ``more``, ``what`` happened and its ``detail``, shortened; return its number.

    After as many messages refused, failed or waiting as the policy allows in a day, others have no line, unless they
    are the outcome of a question that was accepted.

    Raises:
        Damaged: the journal was changed, or a newer fedstill wrote it.
        OSError: the line can't be written.
    """
    text = schema.clean(f"{type(detail).__name__}: {detail}" if isinstance(detail, Exception) else detail, _DETAIL)
    if what in ("refused", "failed", "waiting"):
        number, limit = refusals(policy) + 1, policy.refusals_per_day
        if number > limit and "question" not in facts:
            return None
        if number == limit:
            text += f"; this is refusal {limit:,} of the day, so no other is logged or answered (refusals_per_day)"
    line = {"time": now(), "what": what, **facts, **more, "detail": text}
    log.info("%s", json.dumps(line))
    return SiteJournal(policy.state).append(line)


def refusals(policy: SitePolicy) -> int:
    """Number of messages that were refused, failed or wait since the day began, in UTC."""
    return refused_today(SiteJournal(policy.state).standing().at)


def refused_today(at: Checkpoint) -> int:
    """`refusals` of a journal that stands there."""
    return at.refusals if at.day == _day() else 0


def is_full(policy: SitePolicy) -> bool:
    """Whether the site has refused so many messages today that it logs and answers no other."""
    return refusals(policy) >= policy.refusals_per_day


def _day() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def read(state: Path) -> list[dict[str, Any]]:
    """All lines but checkpoints, after a check of the journal.

    Raises:
        Damaged: the journal was changed, or a newer fedstill wrote it.
    """
    return without_checkpoints(SiteJournal(state).read())


def without_checkpoints(lines: Iterable[ChainLine]) -> list[dict[str, Any]]:
    """The facts of a journal's lines but of checkpoints."""
    facts = (json.loads(line.text) for line in lines)
    return [line for line in facts if line["what"] != "checkpoint"]


Line = Mapping[str, Any]


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
    """Check the journal in a site's folder ``state``; no damage raises an error.

    Raises:
        NewerFormat: a newer fedstill wrote it.
    """
    verdict = Verdict()
    try:
        lines = SiteJournal(state).read()
        check_newest(state)
        check_aside(state)
    except files.NewerFormat:  # which may know more kinds of lines and charges
        raise
    except files.Damaged as error:
        verdict.problems.append(str(error))
        return verdict
    standing = Standing()
    facts = [json.loads(line.text) for line in lines]
    for number, (line, each) in enumerate(zip(lines, facts, strict=True), 1):
        try:
            if each["n"] != number:
                raise ValueError("it has another number")
            if each["what"] == "checkpoint":
                _compare(standing, Checkpoint(**each["at"]))
            standing.add(number, each, line.mac)
        except (ValueError, TypeError, KeyError) as error:
            verdict.problems.append(f"entry {number} of the journal is wrong: {str(error).splitlines()[0]}")
            return verdict
    _check_answers(verdict, facts)
    for number in standing.at.asked:
        verdict.notes.append(f"entry {number} has no outcome: the question is being answered, or was interrupted")
    counts = {what: sum(line["what"] == what for line in facts) for what in ("asked", "answered")}
    verdict.counts |= {"lines": len(lines), "questions": counts["asked"], "answers": counts["answered"]}
    verdict.counts["charges"] = standing.at.charges
    return verdict


def _compare(standing: Standing, said: Checkpoint) -> None:
    """Compare a checkpoint with the lines before it; it may have forgotten runs."""
    own = standing.checkpoint(0.0)
    runs = {run: counts for run, counts in own.runs.items() if run in said.runs}
    if said.model_dump(mode="json") != own.model_copy(update={"runs": runs}).model_dump(mode="json"):
        raise ValueError("the checkpoint says something else than the lines before it")


def unfinished(lines: Sequence[Line]) -> list[Line]:
    """The questions without an outcome: they are being answered, or their process was killed."""
    ended = {line.get("question") for line in lines if line["what"] in OUTCOMES}
    return [line for line in lines if line["what"] == "asked" and line["n"] not in ended]


def _check_answers(verdict: Verdict, lines: Sequence[Line]) -> None:
    """Check that every released reply was charged, and left in one form."""
    charged = {(line["run"], line.get("request")) for line in lines if line["what"] == "charged"}
    of_runs = {line["charge"]: line["run"] for line in lines if line["what"] == "charged"}
    begun = any(line["what"] == "begun" for line in lines)  # charges of an earlier format name no request
    taken_over = {line["run"] for line in lines if line["what"] == "charged" and "request" not in line} if begun else {}
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
        if question not in charged and line["run"] not in taken_over:
            verdict.problems.append(f"the release of entry {line['n']} was not charged")
        for number in line["charges"]:
            payer = payers.setdefault(number, line)
            if payer["reply"] != line["reply"]:
                verdict.problems.append(f"charge {number} paid for two releases (entries {payer['n']}, {line['n']})")
            if of_runs.get(number) != line["run"]:
                verdict.problems.append(f"entry {line['n']} names charge {number}, which is not one of its run")
    verdict.counts["releases"] = released
