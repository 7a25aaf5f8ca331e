"""The settings of a run except the method's, and the YAML file with both."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    BaseModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import override

from fedstill import methods
from fedstill.base import processes
from fedstill.base.errors import first_line
from fedstill.base.settings import MOST_CLASSES, Settings, sentence
from fedstill.privacy.releases import LEAST_DELTA

if TYPE_CHECKING:  # `fedstill run METHOD --help` imports no torch
    from fedstill.data.places import Reading
    from fedstill.data.table_schema import TableSchema
    from fedstill.protocol import Method


class _Plain(yaml.SafeLoader):
    """YAML without aliases, which can make a short text billions of values, and without a key that stands twice."""

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write its value out")
        return super().compose_node(parent, index)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line} has a list or mapping where a name must stand; write the name")
            if key.value in seen:
                raise yaml.YAMLError(f"'{key.value}' stands again in line {line}; write it once")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, expected: str) -> dict[str, Any]:
    """The mapping in a YAML file, without aliases and keys that stand twice.

    Args:
        path: the file.
        expected: what to give, for the message about a missing file.

    Raises:
        ValueError: the file is missing, is not YAML, or has something else.
    """
    try:
        content = yaml.load(path.read_text("utf-8"), _Plain)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give {expected}") from None
    except (
        OSError,
        ValueError,
        LookupError,
        yaml.YAMLError,
        RecursionError,
    ) as error:  # of wrong dates and !!types too
        raise ValueError(f"{path} cannot be read as YAML: {_why(error)}") from error
    if content is None:
        raise ValueError(f"{path} is empty; write settings into it, one on a line, as data: digits")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of settings, one on a line, as data: digits")
    if other := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"{path} has {other[0]!r} where the name of a setting must stand; correct it")
    return content


def _why(error: Exception) -> str:
    """The reason, with the line and the column if YAML names them."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}; correct it there"


TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]
"""Name of a tracker of a run (`fedstill.tracking`), which is its extra too."""
MeasureName = Literal[
    "accuracy", "balanced-accuracy", "f1", "auc", "average-precision", "sensitivity", "specificity", "precision",
    "brier", "log-loss", "rmse", "mae", "r2",
]  # fmt: skip
"""Name of a measure of `fedstill.measures`, or of predicted numbers (`fedstill.evaluation.Numbers`)."""
_LOWER = ("brier", "log-loss", "rmse", "mae")


def goodness(measure: str, value: float) -> float:
    """A number that is larger for a better value of the measure; of errors smaller ones are better."""
    return -value if measure in _LOWER else value


Fraction = Annotated[float, Ge(0), Lt(1)]


class SumOptions(Settings):
    """Options of ``--sums masked:NAME=VALUE,...``."""

    helpers: Annotated[int, Ge(2), Le(16)] = 4
    """Parties that hold the seeds of masks."""
    traitors: PositiveInt = 1
    """Helpers that may work with the server."""
    colluding: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the clients that may work with the server, whose noise does not count."""
    width: Annotated[int, Ge(2), Le(7)] = 5
    """Bytes of a number."""
    records: Annotated[int, Ge(1), Le(2**40)] = 2**20
    """Most records of all clients together, a public bound."""
    least: Annotated[int, Ge(2)] | None = None
    """Clients below which no sum is opened, all by default; the noise of the honest ones among them counts."""


def sum_options(text: str) -> SumOptions | None:
    """The options in a value of ``--sums``; None for open sums.

    Raises:
        ValueError: it is neither ``open`` nor ``masked`` with known options.
    """
    name, _, rest = text.partition(":")
    if name not in ("open", "masked") or (name == "open" and rest):
        raise ValueError("it must be open, or masked with options as in masked:helpers=4,colluding=0.1")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    try:
        found = SumOptions.model_validate_strings({key: value for key, _, value in pairs})
    except ValidationError as error:
        raise ValueError(sentence(error, kind=SumOptions)) from error
    return found if name == "masked" else None


class Experiment(Settings):
    """The task of a run, and its resources."""

    data: str = "mnist"
    """Data set: a known name (see `fedstill data list`), a folder, a .parquet or .npz file or a Hugging Face id."""
    size: Annotated[int, Ge(1), Le(4096)] | None = None
    """Height and width to which images are resized, and cropped at the centre, when they are read: for pictures of
    different sizes, of 16 bits or with transparent pixels."""
    label_column: str | None = None
    """Column of a table, or of the metadata of images, with the classes; by default label, labels, fine_label or
    target, or the images' folders."""
    schema_file: str | None = None
    """Schema of a table (a TOML file, see `fedstill data schema`): kinds, ranges and categories of its columns, what
    stands for a gap, the target and its classes, so that nothing of them is measured from records."""
    group: str | None = None
    """Column whose values stay on one side of every split (test, --validation, --local-test, --public held), such as
    patients with several records; none to draw records by themselves. By default the column of --partition by:COLUMN
    with more values than clients, or one that is called patient, subject_id, or the like."""
    group_bound: PositiveInt | None = None
    """Most training records of one value of --group, over all clients: further ones are left out, the first in order
    stay. With this public bound a guarantee is stated for a whole group, such as a patient, too."""
    mean: tuple[float, ...] = ()
    """Mean of each channel's pixels in [0, 1], or of each column of vectors, or one number for all; for data without a
    known normalisation, so that none is computed from private records (which would end the guarantee)."""
    std: tuple[PositiveFloat, ...] = ()
    """Standard deviation of each channel or column, or one number for all; 0.25 with a mean of 0.5 suits most
    images."""
    scale: str | None = None
    """Scale of a table's columns that the first request measures with noise, as private:EPSILON: the mean and the
    deviation of each number of --schema-file, within its range (or of each column, within --mean plus and minus
    --std). Its cost is in the guarantee. By default the range is the scale."""
    num_classes: Annotated[int, Ge(1), Le(MOST_CLASSES)] | None = None
    """Number of classes of data whose classes are numbers, so that it is not read off private labels."""
    class_names: tuple[str, ...] = ()
    """Names of all classes in order, of data whose classes are names or folders, so that the list is not read off
    private labels."""
    features: str | None = None
    """Backbone that turns images or texts into vectors at each client: mobilenet-v2, efficientnet-lite0 (--size 128 for
    small images), hf:owner/name or hf:./folder (transformers), timm:NAME, torchvision:NAME, scattering,
    patches:public=SPEC (learnt from public images), or your own as package.module:function."""
    partition: str = "iid"
    """Partition among the clients: iid, quantity:A, dirichlet:A, dirichlet-capped:A, balanced-dirichlet:A, classes:C,
    shards:S or by:COLUMN."""
    clients: PositiveInt = 10
    """Number of clients."""
    model: str = "convnet"
    """Model with its options, as convnet:width=32, or your own as package.module:function; linear with --features, if
    none is named."""
    models: tuple[str, ...] = ()
    """Models of the clients, in turn, for methods that support different ones; --model is then the server's."""
    seed: NonNegativeInt = 0
    """Seed of the partition and of every random stream."""
    limit: PositiveInt | None = None
    """Number of training records to use, drawn at random, for a quick test; all by default."""
    validation: Fraction = 0.0
    """Share of the training records to evaluate on in place of the test set, for tuning; no client has them. With
    --local-test: of each client's, in place of its test records."""
    local_test: Fraction = 0.0
    """Share of each client's records to use as its test records; models are then evaluated on these."""
    measure: MeasureName | None = None
    """Measure that is reported first, ranks methods, and is what --tune and a sweep choose by: accuracy (the default),
    balanced-accuracy, f1, auc, average-precision, brier, log-loss; of two classes, for the last one, sensitivity,
    specificity, precision; of a number rmse (the default), mae, r2."""
    drop: Fraction = 0.0
    """Probability that a simulated client's reply to a request is lost; --min-clients tells how many are enough."""
    slow: Fraction = 0.0
    """Share of the simulated clients that are too slow, so that none of their replies arrives in time."""
    public: str | None = None
    """Public records: a data set as for --data (append :unlabeled to drop labels), noise, or held=N."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Delta of all epsilons; choose it well below 1 / records of a client."""
    budget: PositiveFloat | None = None
    """Maximum epsilon of all releases of a client; releases beyond it are refused. No limit by default."""
    sums: str = "open"
    """Sums of clients' numbers: open (the server sees each upload, and each client adds all of the noise) or masked
    (it learns the total alone, and the noise is added once): masked:least=70,helpers=4,traitors=1,colluding=0.1,
    width=5,records=1000000."""
    noise: Literal["simulated", "entropy"] = "simulated"
    """Source of privacy noise: the run's seed (repeatable, no protection) or the operating system's entropy."""
    engine: Literal["inprocess", "flower"] = "inprocess"
    """Engine of the clients: worker processes, or Flower's simulation on Ray (GPUs, many machines)."""
    workers: NonNegativeInt | None = None
    """Number of worker processes: one per core by default; 0 runs the clients in the server's process."""
    cpus_per_client: PositiveFloat = 1.0
    """Cores that Ray reserves for a client (with --engine flower)."""
    gpus_per_client: NonNegativeFloat = 0.0
    """GPUs, or the share of one, that Ray reserves for a client (with --engine flower --device cuda)."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Number of threads of a client's step; another number may change the last bits of a result."""
    device: str = "cpu"
    """Device of models and data: cpu, or cuda (which needs --workers 0)."""
    min_clients: PositiveInt | None = None
    """Minimum number of usable replies to each request; all clients by default."""
    timeout: PositiveFloat | None = None
    """Time limit of a client's step in seconds, for which clients need processes; no limit by default."""
    evaluate_every: PositiveInt = 1
    """Number of rounds between evaluations; the last round is always evaluated."""
    evaluate_uploads: bool = True
    """Whether to evaluate the clients' models and their ensemble too, where a method has them; this takes an evaluation
    for each client."""
    keep_replies: bool = False
    """Whether to keep the replies of earlier rounds; those of the last round are always kept."""
    max_message_mb: PositiveInt = 512
    """Maximum size of a message, in 10^6 bytes."""

    @model_validator(mode="before")
    @classmethod
    def _linear_on_features(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("features") is not None:
            return {"model": "linear", **given}
        return given

    @model_validator(mode="after")
    def _in_reach_of_noise(self) -> Self:
        if self.noise == "entropy" and self.delta < LEAST_DELTA:
            raise ValueError(
                f"delta is {self.delta:g}, but real noise has tails to {LEAST_DELTA:g} only (--noise entropy); raise "
                "--delta"
            )
        return self

    @field_validator("sums")
    @classmethod
    def _known_sums(cls, text: str) -> str:
        sum_options(text)
        return text

    @field_validator("scale")
    @classmethod
    def _known_scale(cls, text: str | None) -> str | None:
        name, _, epsilon = (text or "private:1").partition(":")
        try:
            known = name == "private" and 0 < float(epsilon) < float("inf")
        except ValueError:
            known = False
        if not known:
            raise ValueError("it must be private:EPSILON with an epsilon above 0, as private:1")
        return text

    @field_validator("schema_file", mode="before")
    @classmethod
    def _as_text(cls, path: object) -> object:
        return os.fspath(path) if isinstance(path, os.PathLike) else path

    @field_validator("device")
    @classmethod
    def _usable(cls, device: str) -> str:
        if device == "cpu":
            return device
        import torch

        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise ValueError("there is no such device; choose cpu or cuda") from error
        try:
            if kind == "meta":
                raise RuntimeError("it computes nothing")
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            why = first_line(error)
            usable = "cpu or cuda" if torch.cuda.is_available() else "cpu"
            raise ValueError(f"this device cannot be used here ({why}); choose {usable}") from error
        return device

    @property
    def reading(self) -> "Reading":
        """How the data set is read."""
        return self.reading_by(self.table_schema)

    def reading_by(self, schema: "TableSchema | None") -> "Reading":
        """How the data set is read with this schema, as with the one that a finished run has kept."""
        from fedstill.data.places import Reading

        return Reading.of_task(
            partition=self.partition,
            label=self.label_column,
            group=self.group,
            clients=self.clients,
            schema=schema,
            size=self.size,
        )

    @cached_property
    def table_schema(self) -> "TableSchema | None":
        """The schema of the table, as it is when it is first asked for; None without one."""
        from fedstill.data.table_schema import TableSchema

        return None if self.schema_file is None else TableSchema.read(self.schema_file)

    @property
    def target_range(self) -> tuple[float, float] | None:
        """Range of the target, if the schema says that it is a number; None for classes."""
        schema = self.table_schema
        return None if schema is None else schema.range

    @property
    def chosen_measure(self) -> MeasureName:
        """The measure by which validation chooses."""
        return self.measure or ("accuracy" if self.target_range is None else "rmse")

    @property
    def scale_epsilon(self) -> float | None:
        """Epsilon of the scale that is measured; None if none is."""
        return None if self.scale is None else float(self.scale.partition(":")[2])

    @property
    def masked(self) -> SumOptions | None:
        """The options of masked sums, with the least number of clients; None for open ones.

        Raises:
            ValueError: there are too few clients, or other settings contradict.
        """
        options = sum_options(self.sums)
        if options is None:
            return None
        least = options.least or self.clients
        if not 2 <= least <= self.clients:
            raise ValueError(
                f"sums is {self.sums!r} with least={least} and {self.clients} clients; a masked sum has 2 at least, as "
                "the sum of one client is that client's upload, and no more than there are"
            )
        if self.min_clients is not None and self.min_clients < least:
            raise ValueError(
                f"min_clients is {self.min_clients}, but a masked sum of fewer than {least} clients is not opened; use "
                f"--sums masked:least={max(self.min_clients, 2)}, whose noise is larger, or raise --min-clients"
            )
        return options.model_copy(update={"least": least})

    @property
    def num_workers(self) -> int:
        """Number of worker processes to start."""
        why = processes.why_no_workers() if self.workers != 0 else ""
        if why and self.workers:
            raise ValueError(f"workers is {self.workers}, but {why}; leave it out or set workers=0")
        if self.workers is not None:
            return self.workers
        return 0 if why or self.device.startswith("cuda") else min(processes.cores(), self.clients)


# settings without influence on what a client or the server computes, which a resumed run may change; a run whose
# requests had fewer usable replies than --min-clients now asks for is refused (`fedstill.runs.journal`)
FREE = frozenset(
    {
        "engine",
        "workers",
        "cpus_per_client",
        "gpus_per_client",
        "min_clients",
        "timeout",
        "evaluate_every",
        "evaluate_uploads",
        "keep_replies",
        "max_message_mb",
    }
)


def describe(experiment: Experiment, method_name: str, method: "Method", label: str, command: str) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "experiment": experiment.model_dump(mode="json"),
        "method": {"name": method_name, **method.model_dump(mode="json")},
        "label": label,
        "command": command,
    }


def digest(
    experiment: Experiment, methods_by_label: "Mapping[str, tuple[str, Method]]", own_code: Mapping[str, str] = {}
) -> str:
    """Six hexadecimal digits of the settings and the user's own code that decide a result, for the name of a folder.

    Only settings that differ from their defaults count, so that a later version with more settings gives the same.
    """
    task = experiment.model_dump(mode="json", exclude=set(FREE), exclude_defaults=True)
    runs = {
        label: [name, method.model_dump(mode="json", exclude_defaults=True)]
        for label, (name, method) in methods_by_label.items()
    }
    content = [task, runs, own_code] if own_code else [task, runs]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]


def difference(old: dict[str, Any], new: dict[str, Any], *, without: Collection[str] = ()) -> str | None:
    """The first setting, except those of the task in ``without``, that makes two ``config.json`` different runs."""
    for part in ("experiment", "method"):
        left, right = (flat(side[part]) if isinstance(side[part], dict) else {} for side in (old, new))
        if right.keys() - left.keys():  # settings that an older minor version lacked
            left = _defaults(part, right) | left
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key) and not (part == "experiment" and key in {*FREE, *without}):
                return f"{key} = {left.get(key)}, not {right.get(key)}"
    changed = changed_code(old.get("code"), new.get("code"))
    return f"another version of the code of {changed}" if changed else None


def changed_code(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str | None:
    """The first place of code of the user's own whose digest is another now."""
    old, new = before or {}, now or {}
    return next((place for place in sorted(old.keys() & new.keys()) if old[place] != new[place]), None)


def _defaults(part: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the settings of a task, or of a method; none for a method that needs some."""
    if part == "experiment":
        return flat(Experiment().model_dump(mode="json"))
    try:
        return flat(methods.find(settings["name"])().model_dump(mode="json"))
    except (ValueError, KeyError):
        return {}


def defaults_of(method: "type[Method]") -> dict[str, Any]:
    """The defaults of a method's settings by dotted name, as in ``config.json``."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in method.model_fields.items()}
    return flat({n: d.model_dump(mode="json") if isinstance(d, BaseModel) else d for n, d in defaults.items()})


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dictionary by dotted name."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def read_yaml(path: Path) -> tuple[Experiment, str, "Method"]:
    """An experiment file: ``method: NAME``, the fields of `Experiment`, and ``NAME: {hyperparameters}``.

    Raises:
        ValueError: the file is missing or is not YAML, or a setting is invalid.
    """
    content = read_mapping(path, "a YAML file or a method's name")
    if "methods" in content:
        raise ValueError(f"{path} has 'methods', as a sweep's file does; try fedstill sweep {path}")
    if not isinstance(content.get("method"), str):
        raise ValueError(f"{path} must be a mapping of settings with 'method: NAME' ({', '.join(methods.TABLE)})")
    name = content.pop("method")
    hyperparameters = content.pop(name, None) or {}
    try:
        if not isinstance(hyperparameters, dict):
            raise ValueError(f"'{name}' must be a mapping of hyperparameters")
        kind = methods.find(name)
        experiment = Experiment(**content)
    except ValidationError as error:
        raise ValueError(f"{path}: {sentence(error, kind=Experiment, owners={name: kind})}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return experiment, name, kind(**hyperparameters)
    except ValidationError as error:
        raise ValueError(f"{path}: {sentence(error, kind=kind)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
