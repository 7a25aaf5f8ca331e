"""Reading of uploads: a curious server looks at the replies to the first request of a finished run.

It infers the classes that a client holds, from labels or from the change of the last layer; compares the images that a
client sent with the client's records; and draws images of the classes from the finished model. The declared types of a
reply's fields (`fedstill.schema`) decide what is read: `Labels`, images ``"n channels height width"``, and the named
tensors of a model (`State`, `Parameters`, ...), which a mark `Difference` declares to be a change of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from typing_extensions import override

from fedstill import files, wire
from fedstill.attacks import images, labels
from fedstill.attacks.attack import Attack
from fedstill.attacks.inversion import ModelInversion, closest_psnr
from fedstill.data import sources
from fedstill.engines.run_spec import RunSpec
from fedstill.experiment import extend
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import Task, share_out
from fedstill.journal import Journal
from fedstill.protocol import client_steps, returns_run_model
from fedstill.records import Examples, Records
from fedstill.runs.folder import RunFolder
from fedstill.schema import Below, Difference, Field, Schema
from fedstill.seeds import stream
from fedstill.train.sgd import SGD
from fedstill.weights import state

_REFERENCE = 5_000
"""Records that no client holds, of those the run was judged on, that the attacker knows."""


class Uploads(Attack):
    """Read a finished run's uploads as a curious server would."""

    least_share: float = 0.01
    """Share of a client's records from which a class counts as found."""
    inversion: ModelInversion = ModelInversion()
    """Drawing of images of the classes from the finished model."""
    judge: SGD = SGD(lr=0.05, epochs=5)
    """Training, on records of no client, of the network that says whether images are recognisable."""

    @override
    def attack(self, folder: Path, console: Console, command: str) -> Iterator[RenderableType]:
        with console.status("reading uploads") as status:
            found = uploads(folder, self, progress=lambda what: status.update(f"reading uploads: {what}"))
        yield from show(found)
        yield f"numbers: {RunFolder(folder).attack / 'uploads.json'}"


class _Reply(NamedTuple):
    """A client's reply; ``labels``, ``images`` and ``tensors`` are the names of the fields declared as such."""

    client: int
    schema: Schema
    values: dict[str, Any]

    def field(self, declared: Callable[[Field], bool]) -> Field | None:
        """The first field of a kind."""
        return next((f for f in self.schema if declared(f)), None)

    @property
    def labels(self) -> Tensor | None:
        f = self.field(lambda f: Below("classes") in f.marks)
        return None if f is None else self.values[f.name].long()

    @property
    def images(self) -> Tensor | None:
        f = self.field(lambda f: f.is_tensor and f.annotation.dim_str.split()[1:] == ["channels", "height", "width"])
        return None if f is None else self.values[f.name]


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
    spec = spec_of(job, task)
    replies = list(_replies(folder, spec))
    known = task.test[torch.randperm(len(task.test), generator=stream(job.experiment.seed, "attack"))[:_REFERENCE]]
    found: dict[str, Any] = {"records_known": len(known), "labels": [], "images": []}
    judge: nn.Module | None = None
    for reply in replies:
        client = reply.client
        progress(f"client {client}")
        own = task.train[torch.from_numpy(task.parts[client][0])]
        shares, source = _shares(reply, spec)
        if shares is not None:
            leak = labels.leak(shares, own.class_counts(), settings.least_share)
            found["labels"].append({"client": client, "from": source, "shares": shares.tolist(), **asdict(leak)})
        sent = _images(reply, task)
        if sent is not None and len(sent):
            if judge is None:
                judge = spec.new_model()
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
    found["inversion"] = _inverted(folder, settings, spec, task)
    files.write_json(RunFolder(folder).attack / "uploads.json", found)
    return found


def _replies(folder: Path, spec: RunSpec) -> Iterator[_Reply]:
    journal, steps = Journal(RunFolder(folder).journal), client_steps(type(spec.method))
    kept = [place for place in journal.folder.glob("000000-*") if any(place.glob("*.reply"))]
    if not kept:
        raise ValueError(
            f"{folder} has kept no replies to its first question; run it again with --keep-replies, or with one round"
        )
    name = kept[0].name.partition("-")[2]
    schema = steps[name].reply.schema
    for client in journal.replies_to(0, name)[0]:
        values, _ = wire.decode(journal.read_reply(0, name, client), schema, spec.facts)
        yield _Reply(client, schema, values)


def _shares(reply: _Reply, spec: RunSpec) -> tuple[Tensor | None, str]:
    """Estimated shares of the classes, and the field they are read from; None where no field tells."""
    classes = spec.num_classes
    if (tags := reply.labels) is not None:
        if not len(tags):
            return None, ""
        return torch.bincount(tags, minlength=classes).double() / len(tags), "labels"
    start = spec.new_model(architecture=spec.architecture(reply.client))
    names = {name for name, _ in start.named_parameters()}
    f = reply.field(lambda f: f.like is not None and names <= reply.values[f.name].keys())
    if f is None:
        return None, ""
    value = reply.values[f.name]
    change = {k: -v for k, v in value.items()} if Difference() in f.marks else labels.descent(state(start), value)
    try:
        return labels.shares_of_update(labels.last_layer(change, classes).drift), "the last layer"
    except ValueError:
        return None, ""


def _images(reply: _Reply, task: Task) -> Records | None:
    images, tags, like = reply.images, reply.labels, task.train
    if images is None or tags is None:
        return None
    if images.is_floating_point():
        return Examples(images, tags).rounded(like.num_classes, like.normalisation)
    return Records(images, tags, like.num_classes, like.normalisation)


def _inverted(folder: Path, settings: Uploads, spec: RunSpec, task: Task) -> dict[str, Any] | None:
    """Closeness of images drawn from the model to records; None for a model that was put together at the server."""
    tensors, header = RunFolder(folder).read_model(lambda tensors, header: (tensors, header))
    if not returns_run_model(type(spec.method)) or header.get("model") != spec.model:
        return None
    model = spec.new_model(tensors)
    classes = torch.arange(task.train.num_classes)
    made = settings.inversion.invert(model, classes, task.train, stream(spec.seed, "attack", "inversion"))
    held = torch.cat([torch.from_numpy(own) for own, _ in task.parts])
    members, others = images.alike(task.train[held], task.test, stream(spec.seed, "attack", "as many"))
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
