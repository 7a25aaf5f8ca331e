"""Pydantic models of a run folder's JSON files."""

import re
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedstill.journal import Refusal
from fedstill.privacy.guarantee import Guarantee

Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A JSON object; undeclared fields are allowed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")


class Config(Part):
    """``config.json``.

    Attributes:
        experiment: the task's settings.
        method: the method's settings, with its ``name``.
        label: the run's name in tables.
        command: the command line that repeats the run.
        code: SHA-256 of the source file of each method and model of the user's own, by its name, and of files beside it
            that it imports, by path.
        version: the version of fedstill.
        fingerprint: the digest of the data set.
        public_fingerprint: the digest of the data set of the public records; absent for noise and for held records.
        spec: the run's spec as real sites get it (`fedstill.engines.run_spec.RunSpec.text`).
        run: the run's random number; absent in early versions.
        extends: the finished run that this run extends.
        answers: the finished run whose replies this run uses.
    """

    experiment: dict[str, Any]
    method: dict[str, Any]
    label: str
    command: str | None = None
    code: dict[str, str] | None = None
    version: str | None = None
    fingerprint: str | None = None
    public_fingerprint: str | None = None
    spec: str | None = None
    run: str | None = None
    extends: str | None = None
    answers: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """The digests of the records, the run's number and its spec, which a run on this run's replies takes over."""
        names = {"fingerprint", "public_fingerprint", "run", "spec"}
        return self.model_dump(include=names, exclude_none=True)

    @property
    def content(self) -> dict[str, Any]:
        """The content of the file, as JSON."""
        return self.model_dump(exclude_unset=True)


def _check_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Time = Annotated[str, AfterValidator(_check_time)]
"""A time in ISO 8601."""


def _of_any_version(guarantee: object) -> object:
    """Add the fields that early versions lack."""
    if not isinstance(guarantee, dict):
        return guarantee
    reason = str(guarantee.get("reason"))
    counted = re.search(r"nothing protects (\d+) of the clients' ", reason)
    missing: dict[str, Any] = {f.name: None for f in fields(Guarantee)} | {
        "reason": "",
        "exposed": int(counted[1]) if counted else None,
        "simulated": "noise came from the run's seed" in reason,
    }
    return missing | guarantee


class Summary(Part):
    """``summary.json``: the results of a finished run; bytes are sums over all clients, except ``..._per_client``."""

    method: str
    label: str
    data: str
    partition: str
    clients: Annotated[int, Field(ge=1)]
    rounds: Count
    seed: int
    accuracy: Share | None
    bytes_up: Count
    bytes_down: Count
    bytes_up_per_client: Amount
    bytes_down_per_client: Amount
    seconds: Amount
    model: str | None = None
    num_parameters: Count | None = None
    judged_on: str = "test records"
    guarantee: Annotated[Guarantee, BeforeValidator(_of_any_version)]
    refused: tuple[Refusal, ...] = ()
    version: str | None = None
    finished: Time | None = None


class Environment(Part):
    """A line of ``environment.jsonl``: the environment of a start (`fedstill.runs.environment`)."""

    started: Time


class ClientResult(Part):
    """An entry of ``clients.json``: a client's results and bytes; the accuracy is on its own test records."""

    client: Count
    accuracy: Share | None = None
    records: Count | None = None
    test_records: Count | None = None
    bytes_up: Count = 0
    bytes_down: Count = 0
    refused: Count = 0


class ClientResults(Part):
    """``clients.json``."""

    clients: tuple[ClientResult, ...]


class Metric(Part):
    """A line of ``metrics.jsonl``: the numbers of a round; bytes are sums over all clients and rounds so far."""

    round: Count
    accuracy: Share | None = None
    bytes_up: Count | None = None
    bytes_down: Count | None = None
    seconds: Amount | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, line: Any) -> Any:
        """Name the spread over clients as it is named now; runs of 0.1 may call it ``spread``."""
        if isinstance(line, dict) and {"accuracy", "spread"} <= {*line} and "spread_over_clients" not in line:
            return {"spread_over_clients" if name == "spread" else name: value for name, value in line.items()}
        return line


class Partition(Part):
    """``partition.json``: the names of the C classes, and records by client and class, ``(K, C)``.

    After the partition by:COLUMN, ``values`` has the column with its values at each client.
    """

    class_names: tuple[str, ...]
    counts: tuple[tuple[Count, ...], ...]
    values: dict[str, tuple[tuple[str, ...], ...]] = {}


class Evaluation(Part):
    """``evaluation.json``: test records by true and predicted class, ``(C, C)``."""

    confusion: tuple[tuple[Count, ...], ...]
