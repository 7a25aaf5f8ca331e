"""``fedstill attack RUN uploads``: what a curious server reads off the messages of a finished run.

Which classes a client holds, from labels in clear, or else from how its training moved the last layer; whether the
images it sent are nearer to its own records than to others; and what the finished model shows of a class. Everything is
about the replies to the run's first question, whose start everybody knows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from fedstill import files, wire
from fedstill.attacks import images, labels
from fedstill.attacks.inversion import ModelInversion, closest_psnr
from fedstill.data import sources
from fedstill.distill.synthetic import Synthetic
from fedstill.engines.agreement import Agreement
from fedstill.experiment import extend
from fedstill.experiment.run import MODEL, agreement_of
from fedstill.experiment.task import Task, share_out
from fedstill.journal import Journal
from fedstill.protocol import client_steps, returns_run_model
from fedstill.records import Records
from fedstill.seeds import stream
from fedstill.settings import Settings
from fedstill.train.sgd import SGD
from fedstill.weights import state

_REFERENCE = 5_000
"""Records that no client holds, of those the run was judged on, that the attacker knows."""


class Uploads(Settings):
    """Read a finished run's uploads as a curious server would."""

    least_share: float = 0.01
    """Share of a client's records from which a class counts as found."""
    inversion: ModelInversion = ModelInversion()
    """How images of the classes are drawn from the finished model."""
    judge: SGD = SGD(lr=0.05, epochs=5)
    """How the network is trained, on records of no client, that says whether images are recognisable."""


class _Reply(NamedTuple):
    client: int
    values: dict[str, Any]


def uploads(
    folder: Path,
    settings: Uploads,
    *,
    data: sources.DataSet | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack the uploads of a finished run, and write what was found to its ``attack/uploads.json``.

    Args:
        folder: the run's.
        settings: how.
        data: the data set, if the run was given one.
        progress: is told what is done next.

    Raises:
        ValueError: there is no finished run with replies that are kept; one sentence.
    """
    job = extend.read_simulated(folder, "")
    task = share_out(job.experiment, data)
    agreement = agreement_of(job, task)
    replies = list(_replies(folder, agreement))
    known = task.test[torch.randperm(len(task.test), generator=stream(job.experiment.seed, "attack"))[:_REFERENCE]]
    found: dict[str, Any] = {"records_known": len(known), "labels": [], "images": []}
    judge: nn.Module | None = None
    for client, values in replies:
        progress(f"client {client}")
        own = task.train[torch.from_numpy(task.parts[client][0])]
        shares, source = _shares(values, agreement, client)
        if shares is not None:
            leak = labels.leak(shares, own.class_counts(), settings.least_share)
            found["labels"].append({"client": client, "from": source, "shares": shares.tolist(), **asdict(leak)})
        sent = _images(values, task)
        if sent is not None and len(sent):
            if judge is None:
                judge = agreement.new_model()
                settings.judge.fit(judge, known, stream(job.experiment.seed, "attack", "judge"))
            rng = stream(job.experiment.seed, "attack", "alike", client)
            near = images.compare(sent, *images.alike(own, known, rng))
            found["images"].append(
                {
                    "client": client,
                    "images": len(sent),
                    "nearer": asdict(near.nearer),
                    "votes": near.votes,
                    "recognised": asdict(images.recognised(judge, sent)),
                }
            )
    progress("the finished model")
    found["inversion"] = _inverted(folder, settings, agreement, task)
    files.write_json(folder / "attack" / "uploads.json", found)
    return found


def _replies(folder: Path, agreement: Agreement) -> Iterator[_Reply]:
    journal, steps = Journal(folder / "journal"), client_steps(type(agreement.method))
    kept = [place for place in (folder / "journal").glob("000000-*") if any(place.glob("*.reply"))]
    if not kept:
        raise ValueError(
            f"{folder} has kept no replies to its first question; run it again with --keep-replies, or with one round"
        )
    name = kept[0].name.partition("-")[2]
    for client in journal.answered(0, name)[0]:
        values, _ = wire.decode(journal.read_reply(0, name, client), steps[name].reply.schema, agreement.facts)
        yield _Reply(client, values)


def _shares(values: Mapping[str, Any], agreement: Agreement, client: int) -> tuple[Tensor | None, str]:
    """Estimated shares of the classes, and from what; None where a reply says nothing about them."""
    classes = agreement.num_classes
    if "labels" in values:
        if not len(values["labels"]):
            return None, ""
        return torch.bincount(values["labels"].long(), minlength=classes).double() / len(values["labels"]), "labels"
    start = agreement.new_model(architecture=agreement.architecture(client))
    for name, value in values.items():
        if isinstance(value, dict) and {key for key, _ in start.named_parameters()} <= value.keys():
            change = labels.descent(state(start), value) if name == "weights" else {k: -v for k, v in value.items()}
            try:
                drift = labels.last_layer(change, classes).drift
            except ValueError:
                return None, ""
            return labels.shares_of_update(drift), "the last layer"
    return None, ""


def _images(values: Mapping[str, Any], task: Task) -> Records | None:
    like = task.train
    if "images" in values:
        return Records(values["images"], values["labels"].long(), like.num_classes, like.normalisation)
    if "values" in values and "labels" in values and values["values"].shape[1:] == like.images.shape[1:]:
        return Synthetic(values["values"], values["labels"].long()).rounded(like.num_classes, like.normalisation)
    return None


def _inverted(folder: Path, settings: Uploads, agreement: Agreement, task: Task) -> dict[str, Any] | None:
    """What the finished model shows of the classes; None for a model that was put together at the server."""
    tensors, header = wire.unpack((folder / MODEL).read_bytes())
    if not returns_run_model(type(agreement.method)) or header.get("model") != agreement.model:
        return None
    model = agreement.new_model(tensors)
    classes = torch.arange(task.train.num_classes)
    made = settings.inversion.invert(model, classes, task.train, stream(agreement.seed, "attack", "inversion"))
    held = torch.cat([torch.from_numpy(own) for own, _ in task.parts])
    members, others = images.alike(task.train[held], task.test, stream(agreement.seed, "attack", "as many"))
    return {
        name: float(closest_psnr(made, records).mean()) for name, records in (("training", members), ("test", others))
    }


def show(found: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    if found["labels"]:
        table = Table("client", "read off", "classes right, %", "L1 of shares", "of equal shares", box=SIMPLE_HEAD)
        for line in found["labels"]:
            right = f"{100 * line['held_accuracy']:.0f}"
            table.add_row(
                str(line["client"]), line["from"], right, f"{line['distance']:.2f}", f"{line['uniform_distance']:.2f}"
            )
        yield table
    if found["images"]:
        table = Table("client", "images", "nearer to its own, %", "95 % interval", "recognised, %", box=SIMPLE_HEAD)
        for line in found["images"]:
            near = line["nearer"]
            table.add_row(
                str(line["client"]),
                str(line["images"]),
                f"{100 * near['value']:.0f}",
                f"{100 * near['low']:.0f} to {100 * near['high']:.0f}",
                f"{100 * line['recognised']['value']:.0f}",
            )
        yield table
        yield Text("Half of the images nearer to a client's own records than to as many others: no leak.")
    if not found["labels"] and not found["images"]:
        yield Text("The replies hold neither labels, nor images, nor a model's last layer.")
    if inverted := found["inversion"]:
        yield Text(
            f"Images drawn from the model: {inverted['training']:.1f} dB to the nearest training record, "
            f"{inverted['test']:.1f} dB to the nearest test record."
        )
