"""The settings of a run besides the method's, checked on construction, and the YAML file that holds both."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, field_validator

from fedstill import methods
from fedstill.protocol import Method
from fedstill.settings import Settings

Fraction = Annotated[float, Ge(0), Lt(1)]


class Experiment(Settings):
    """The task of a run, and the resources it may use."""

    data: str = "mnist"
    """A known name (see `fedstill data list`), a folder, a .npz file or a Hugging Face id."""
    partition: str = "iid"
    """The partition: iid, dirichlet:A, dirichlet-capped:A, classes:C, shards:S, balanced-dirichlet:A or by:COLUMN."""
    clients: PositiveInt = 10
    """Number of clients."""
    model: str = "convnet"
    """The model with its options, as convnet:width=32, or package.module:function of your own."""
    models: tuple[str, ...] = ()
    """Models of the clients, in turn, where a method takes clients that differ; --model is then the server's own."""
    seed: NonNegativeInt = 0
    """Seed of the partition and of every random stream."""
    limit: PositiveInt | None = None
    """Use this many of the training records only, drawn at random: for a quick try."""
    validation: Fraction = 0.0
    """Share of the training records to evaluate on in place of the test set, for tuning; clients don't hold them."""
    local_test: Fraction = 0.0
    """Share of each client's records that it keeps as test records, on which models are then evaluated."""
    public: str | None = None
    """Public records: a data set as for --data, followed by :unlabeled to drop the labels; or noise; or held=N."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """The delta of all epsilons, well below 1 / records of a client."""
    budget: PositiveFloat | None = None
    """The largest epsilon of all releases of a client; a release beyond it is refused. No limit by default."""
    noise: Literal["simulated", "entropy"] = "simulated"
    """Privacy noise from the run's seed (repeatable, protects nobody) or from the operating system's entropy."""
    engine: Literal["inprocess", "flower"] = "inprocess"
    """The clients run in this process and its workers, or in Flower's simulation on Ray (GPUs, many machines)."""
    workers: NonNegativeInt | None = None
    """Processes that run the clients: one a core by default; 0 runs them inside the server's process."""
    cpus_per_client: PositiveFloat = 1.0
    """With --engine flower: cores that Ray reserves for a client's step."""
    gpus_per_client: NonNegativeFloat = 0.0
    """With --engine flower: GPUs, or the share of one, that Ray reserves for a step (with --device cuda)."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Threads a client's step may use; another number may change the last bits of a result."""
    device: str = "cpu"
    """Device of models and data: cpu, or cuda (which needs --workers 0)."""
    min_clients: PositiveInt | None = None
    """Fewest usable replies to go on with; by default every client must reply."""
    timeout: PositiveFloat | None = None
    """Seconds that a client may take for one step; no limit by default."""
    evaluate_every: PositiveInt = 1
    """Evaluate the model every so many rounds, and after the last."""
    keep_replies: bool = False
    """Keep the replies of finished rounds too; those of the last round are always kept."""
    max_message_mb: PositiveInt = 512
    """The largest message accepted, in 10^6 bytes."""

    @field_validator("device")
    @classmethod
    def _usable(cls, device: str) -> str:
        try:
            if torch.device(device).type == "meta":
                raise RuntimeError("it computes nothing")
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            why = str(error).split("\n")[0].rstrip(".")
            raise ValueError(f"this device cannot be used here ({why}); try cpu") from error
        return device

    @property
    def num_workers(self) -> int:
        """Number of worker processes to start."""
        if self.workers is not None:
            return self.workers
        return 0 if self.device.startswith("cuda") else min(_cores(), self.clients)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Settings that do not change a result, so that a resumed run may have other values.
FREE = frozenset(
    {
        "engine",
        "workers",
        "cpus_per_client",
        "gpus_per_client",
        "min_clients",
        "timeout",
        "evaluate_every",
        "keep_replies",
        "max_message_mb",
    }
)


def describe(experiment: Experiment, method_name: str, method: Method, label: str, command: str) -> dict[str, Any]:
    """The run folder's ``config.json``."""
    return {
        "experiment": experiment.model_dump(mode="json"),
        "method": {"name": method_name, **method.model_dump(mode="json")},
        "label": label,
        "command": command,
    }


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first setting in which two ``config.json`` describe different results, in words, or None."""
    defaults = {"experiment": flat(Experiment().model_dump(mode="json"))}  # for what older versions did not know
    for part in ("experiment", "method"):
        left, right = (flat(side[part]) if isinstance(side[part], dict) else {} for side in (old, new))
        left = defaults.get(part, {}) | left
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key) and not (part == "experiment" and key in FREE):
                return f"{key} = {left.get(key)}, not {right.get(key)}"
    return None


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested settings, by dotted name."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def sentence(error: ValidationError, *, flags: str = "") -> str:
    """A validation error as one sentence with the value and the limit; ``flags`` precedes the setting's name."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    name = flags + name.replace("_", "-") if flags else name
    why = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting here"
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # of settings that don't fit together
        return f"{name}: {why}" if first["loc"] else why
    return f"{name} is {first['input']!r}; {why}"


def read_yaml(path: Path) -> tuple[Experiment, str, Method]:
    """An experiment file: ``method: NAME``, the fields of `Experiment`, and ``NAME: {hyperparameters}``.

    Raises:
        ValueError: with one sentence when the file is missing, is no YAML, or holds a bad setting.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {path}; give a YAML file that describes a run, or a method's name"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("method"), str):
        raise ValueError(f"{path} must hold settings by name, among them 'method: NAME' ({', '.join(methods.TABLE)})")
    name = content.pop("method")
    hyperparameters = content.pop(name, None) or {}
    try:
        if not isinstance(hyperparameters, dict):
            raise ValueError(f"'{name}' must hold hyperparameters by name")
        return Experiment(**content), name, methods.find(name)(**hyperparameters)
    except ValidationError as error:
        raise ValueError(f"{path}: {sentence(error)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
