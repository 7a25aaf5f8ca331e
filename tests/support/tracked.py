"""What the trackers' own clients find of a run, for the tests of `fedstill.tracking`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Found(NamedTuple):
    """What a tracker has of one run.

    Attributes:
        rounds: (round, accuracy), in order.
        by_bytes: (bytes so far, accuracy), in order.
        settings: settings as text.
        results: results as text.
        images: names of images.
    """

    rounds: list[tuple[int, float]]
    by_bytes: list[tuple[int, float]]
    settings: dict[str, str]
    results: dict[str, str]
    images: set[str]


def tensorboard(run: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()

    def table(name: str) -> dict[str, str]:
        text = events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()
        rows = [line.strip("| ").split(" | ") for line in text.split("\n")[2:]]
        return {key: str(json.loads(value.strip("`"))) for key, value in rows}

    curves = [[(e.step, e.value) for e in events.Scalars(tag)] for tag in ("accuracy", "by_bytes/accuracy")]
    return Found(*curves, table("settings"), table("results"), {*events.Tags()["images"]})


def mlflow(run: Path) -> Found:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fedstill")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", str(run))
    number = found.info.run_id
    curves = [
        [(m.step, m.value) for m in client.get_metric_history(number, key)] for key in ("accuracy", "by_bytes/accuracy")
    ]
    results = {key.removeprefix("results."): tag for key, tag in found.data.tags.items() if key.startswith("results.")}
    images = {file.path.removesuffix(".png") for file in client.list_artifacts(number, "images")}
    return Found(*curves, found.data.params, results, images)


def wandb(run: Path) -> Found:
    """The last start, which has all rounds, read as ``wandb sync`` reads it."""
    from wandb.proto import wandb_internal_pb2

    (file,) = sorted(Path("wandb").glob("offline-run-*"))[-1].glob("*.wandb")
    rounds, by_bytes, settings, results, images = [], [], {}, {}, set()
    for data in level_log(file.read_bytes()[7:]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            settings |= {item.key: str(json.loads(item.value_json)) for item in record.run.config.update}
        row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        images |= {key.removesuffix("._type") for key in row if key.startswith("images/") and key.endswith("_type")}
        if "accuracy" in row:
            rounds.append((int(row["_step"]), row["accuracy"]))
            by_bytes.append((int(row["transferred"]), row["by_bytes/accuracy"]))
        for item in record.summary.update:
            results[(item.key or ".".join(item.nested_key)).removeprefix("results.")] = str(json.loads(item.value_json))
    return Found(rounds, by_bytes, settings, results, images)


def level_log(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB with parts, whose type says where a record ends."""
    position, parts = 7, b""  # of the file: a header stands before ``data``
    while position - 7 < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        at = position - 7
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""
        position += 7 + length


def trackio(run: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("fedstill")
    assert name.startswith(f"{run} ")
    rows = SQLiteStorage.get_logs("fedstill", name)
    settings = {key: str(value) for key, value in (SQLiteStorage.get_run_config("fedstill", name) or {}).items()}
    numbers = [row for row in rows if "accuracy" in row]
    last = next(row for row in rows if "results/accuracy" in row)
    results = {key.removeprefix("results/"): str(value) for key, value in last.items() if key.startswith("results/")}
    return Found(
        [(row["step"], row["accuracy"]) for row in numbers],
        [(row["transferred"], row["accuracy"]) for row in numbers],
        settings,
        results,
        {key for key in last if key.startswith("images/")},
    )


READERS: dict[str, Any] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb, "trackio": trackio}


def stay_here(folder: Path) -> None:
    """Make every tracker write below ``folder``, and ask no network."""
    os.environ.update(
        {
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "TRACKIO_DIR": str(folder / "trackio"),
        }
    )
