"""The content of a run's files: what each JSON object has, and the ranges of its values (`fedstill.runs.folder`)."""

from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedstill.privacy.guarantee import Guarantee
from fedstill.runs.journal import Refusal

Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Piece(BaseModel):
    """A JSON object; undeclared fields are allowed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")


class Config(Piece):
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
        table_schema: the content of the table's schema, which is public.
        data_path: the file or folder of somebody's own records, however it was named.
        spec: the run's spec as real sites get it (`fedstill.engines.run_spec.RunSpec.text`).
        run: the run's random number; absent while a run is laid out.
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
    table_schema: dict[str, Any] | None = None
    data_path: str | None = None
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


class Measured(Piece):
    """The measure that a run was asked to report first; no value where its records define none."""

    name: str
    value: float | None


class Summary(Piece):
    """``summary.json``: the results of a finished run; bytes are sums over all clients, except ``..._per_client``."""

    method: str
    label: str
    data: str
    partition: str
    clients: Annotated[int, Field(ge=1)]
    rounds: Count
    seed: int
    accuracy: Share | None
    measure: Measured | None = None
    errors: dict[str, float | None] | None = None
    bytes_up: Count
    bytes_down: Count
    bytes_up_per_client: Amount
    bytes_down_per_client: Amount
    seconds: Amount
    model: str | None = None
    num_parameters: Count | None = None
    judged_on: str = "test records"
    guarantee: Guarantee
    refused: tuple[Refusal, ...] = ()
    version: str | None = None
    finished: Time | None = None
    files: dict[str, str] = {}


Value = int | float | bool | str | list[Any] | dict[str, Any] | None


class Try(Piece):
    """A try of ``--tune`` or a sweep: settings of a method, and the measure on validation records, or why it failed."""

    settings: dict[str, Value]
    value: float | None
    failure: str | None = None


class Tries(Piece):
    """``tries/tries.json``: the tries by which a run's settings were chosen."""

    given: dict[str, Any]
    measure: str
    records: str
    contents: str | None = None
    tries: Annotated[tuple[Try, ...], Field(min_length=1)]
    chosen: dict[str, Value]


class Environment(Piece):
    """A line of ``environment.jsonl``: the environment of a start (`fedstill.runs.environment`)."""

    started: Time


Cells = tuple[tuple[Count, Count, Annotated[int, Field(gt=0, lt=2**53)]], ...]
"""Cells above 0 of a confusion matrix: true class, predicted class and count."""


class ClientResult(Piece):
    """An entry of ``clients.json``: a client's results and bytes.

    Accuracy and cells of the confusion matrix (`fedstill.evaluation.Cells`) are on its own test records.
    """

    client: Count
    accuracy: Share | None = None
    confusion: Cells | None = None
    records: Count | None = None
    test_records: Count | None = None
    bytes_up: Count = 0
    bytes_down: Count = 0
    refused: Count = 0


class ClientResults(Piece):
    """``clients.json``."""

    clients: tuple[ClientResult, ...]


class Metric(Piece):
    """A line of ``metrics.jsonl``: the numbers of a round; bytes are sums over all clients and rounds so far."""

    round: Count
    accuracy: Share | None = None
    bytes_up: Count | None = None
    bytes_down: Count | None = None
    seconds: Amount | None = None


class ColumnScale(Piece):
    """``scale.json``: the scale of a table's columns that a run measured privately.

    Attributes:
        mean: mean of each measured column, in [-1, 1] of its public range.
        std: standard deviation of each.
        records: the records of each class at all clients, with noise, so that a number may be negative.
        clear: whether the number of records is more than its noise; if not, the public range stays.
    """

    mean: tuple[Annotated[float, Field(ge=-1, le=1)], ...]
    std: tuple[Annotated[float, Field(gt=0, le=1)], ...]
    records: tuple[int, ...]
    clear: bool


class Partition(Piece):
    """``partition.json``: the names of the C classes, and records by client and class, ``(K, C)``.

    After the partition by:COLUMN, ``values`` has the column with its values at each client; ``origin`` are sentences on
    where the records are from.
    """

    class_names: tuple[str, ...]
    counts: tuple[tuple[Count, ...], ...]
    values: dict[str, tuple[tuple[str, ...], ...]] = {}
    origin: tuple[str, ...] = ()


class ByValue(Piece):
    """Cells of the confusion matrix of the test records of each value of a column (`fedstill.evaluation.Cells`)."""

    column: str
    cells: dict[str, Cells]


Bounded = tuple[float | None, float | None, float | None]
"""A measure and its 95 % interval."""


class Evaluation(Piece):
    """``evaluation.json``: test records by true and predicted class, ``(C, C)``.

    After the partition by:COLUMN, ``by_value`` has the same of the test records of each value of the column. Of two
    classes, ``of_two`` has the measures of each (`fedstill.measures.Scores`). ``class_names`` are the names of the C
    classes, which a run with real sites has nowhere else.
    """

    confusion: tuple[tuple[Count, ...], ...]
    by_value: ByValue | None = None
    of_two: dict[str, dict[str, Bounded]] | None = None
    class_names: tuple[str, ...] = ()


class Errors(Piece):
    """Errors of predicted numbers, in the target's unit, and R squared, with intervals."""

    records: Count
    rmse: Bounded
    mae: Bounded
    r2: Bounded


class ErrorsByValue(Piece):
    """`Errors` of the test records of each value of a column."""

    column: str
    values: dict[str, Errors]


class PredictedNumbers(Piece):
    """``numbers.json``: errors on the test records, of a task whose target is a number.

    After the partition by:COLUMN, ``by_value`` has those of the test records of each value of the column.
    """

    target: str
    all: Errors
    by_value: ErrorsByValue | None = None
