"""A site's counts on disk: the questions and failures of each run, and the runs of the last day."""

import time
from pathlib import Path
from typing import TypeVar, cast

from filelock import FileLock

from fedstill import files, schema
from fedstill.errors import FedstillError
from fedstill.sites.policy import SitePolicy

T = TypeVar("T")
DAY = 86_400.0
SPEC = "spec.json"
"""Name of the file with the spec in the folder of a run."""


_OF_RUN = "put its newest copy back; without it the site replies to this run no more, but to others"
_OF_DAY = "put its newest copy back, or delete this file alone: the count of the last day's runs begins anew"


class FailedTooOften(FedstillError, RuntimeError):
    """The run has used up its failures; the site answers it no more."""


class Questions:
    """The questions of one run.

    A question is counted before its step and its outcome after it, so a step that kills its process is a failure too.

    Args:
        policy: the site's policy, which has the limits.
        run: the run's name at this site.
        text: the run's spec, which is stored with the first question.
    """

    def __init__(self, policy: SitePolicy, run: str, text: str) -> None:
        self._policy = policy
        self._run = run
        self._text = text
        self._lines = policy.state / "runs" / run / "questions.jsonl"
        self._runs = policy.state / "runs.jsonl"
        policy.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = FileLock(policy.state / "questions.lock", timeout=60)

    def ask(self) -> None:
        """Count a question.

        Raises:
            Refused: the site answers no more questions of this run, or begins no more runs today.
            FailedTooOften: too many questions of this run have failed.
            Damaged: a file of counts is damaged.
        """
        policy = self._policy
        with self._lock:
            outcomes = _values(self._lines, "what", str, _OF_RUN)
            asked = outcomes.count("asked")
            spec = self._lines.with_name(SPEC)
            if not spec.exists() and (asked or self._run in _values(self._runs, "run", str, _OF_DAY)):
                raise schema.Refused("the site has lost the state of this run; start another run")
            if not asked:
                self._begin()
            if spec.read_bytes() != self._text.encode():
                raise schema.Refused("another run with other settings has this run's name here; start another run")
            if asked >= policy.max_questions:
                raise schema.Refused(f"the run has asked {asked} questions; the site's limit is that (max_questions)")
            if (failed := asked - outcomes.count("ended")) >= policy.max_failures:
                raise FailedTooOften(f"the run has failed {failed} times; the limit is {policy.max_failures}")
            files.append_json(self._lines, {"time": time.time(), "what": "asked"}, flush=True)

    def _begin(self) -> None:
        times = _values(self._runs, "time", float, _OF_DAY)
        now = time.time()
        today = sum(now - DAY < begun <= now for begun in times)  # a clock that was once ahead blocks nothing
        if today >= self._policy.runs_per_day:
            raise schema.Refused(f"the site has begun {today} runs in the last day, its limit (runs_per_day)")
        self._lines.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_bytes(self._lines.with_name(SPEC), self._text.encode())
        files.append_json(self._runs, {"time": time.time(), "run": self._run}, flush=True)

    def end(self) -> None:
        """Count the end of a question that did not fail."""
        with self._lock:
            files.append_json(self._lines, {"time": time.time(), "what": "ended"}, flush=True)


def _values(place: Path, name: str, kind: type[T], remedy: str) -> list[T]:
    values = [line.get(name) for line in files.read_json_lines(place, remedy)]
    if not all(isinstance(value, kind) for value in values):
        raise files.Damaged(f"{place} is damaged (a line has no {name!r}); {remedy}")
    return cast(list[T], values)
