"""Attacks of a curious server on the first replies with tensors of a finished run.

They infer a client's classes from counts, labels, sums of features, logits, a linear head or the change of the last
layer, compare a client's synthetic images with its records, and reconstruct images of the classes from the final model.
The declared types of a reply's fields (`fedstill.schema`) select the attack: integers ``"classes"``, `Labels` (with
integers ``"n"``, the records of each), images ``"n channels height width"``, sums of rows ``"classes moments"`` or
``"classes dims"``, logits ``"n classes"`` or ``"images classes"``, heads ``"classes coefficients"``, and the named
tensors of a model (`State`, `Parameters`, ...), marked as `Difference` if they are a change of the model.
"""

from collections.abc import Callable, Iterable, Iterator
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

from fedstill.attacks import images, labels
from fedstill.attacks.attack import Attack
from fedstill.attacks.reconstruction import ModelInversion, closest_psnr
from fedstill.base import files
from fedstill.base.records import Examples, Records
from fedstill.base.seeds import stream
from fedstill.base.weights import state
from fedstill.data import sources
from fedstill.engines.run_spec import RunSpec
from fedstill.experiment.reuse import check_unchanged, read_simulated
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import Task, share_out
from fedstill.protocol import client_steps, returns_run_model, wire
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import Journal
from fedstill.schema import Below, Difference, Field, Schema
from fedstill.train.sgd import SGD

_NUMBERS = "uploads.json"
"""Name of the file of results."""
_REFERENCE = 5_000
"""Maximum number of the run's test records, which the attacker knows."""
_SUMS = ("classes moments", "classes dims")
"""Sums of rows by class, whose last column is the sum of a constant."""
_LOGITS = ("n classes", "images classes")
_HEAD = "classes coefficients"
"""A linear head, whose last column is the bias."""


class Uploads(Attack):
    """Curious server: infer classes and records from a finished run's uploads."""

    least_share: float = 0.01
    """Smallest estimated share of a class that the client is said to have."""
    inversion: ModelInversion = ModelInversion()
    """Reconstruction of images of the classes from the final model."""
    judge: SGD = SGD(lr=0.05, epochs=5)
    """Training of the network that classifies the synthetic images, on records of no client."""

    @override
    def attack(
        self, folder: Path, console: Console, command: str, data: sources.DataSet | None = None
    ) -> tuple[dict[str, Any], Iterable[RenderableType]]:
        with console.status("attacking uploads") as status:
            results = uploads(
                folder, self, data=data, progress=lambda label: status.update(f"attacking uploads: {label}")
            )
        place = RunFolder(folder).attack / _NUMBERS
        return {**results, "numbers": str(place)}, [*show(results), f"numbers: {place}"]


class SeenReply(NamedTuple):
    """A client's reply; ``labels`` and ``images`` are the fields with these declared types, or None."""

    client: int
    schema: Schema
    values: dict[str, Any]

    def field(self, declared: Callable[[Field], bool]) -> Field | None:
        """The first field of this declaration."""
        return next((f for f in self.schema if declared(f)), None)

    def shaped(self, *dims: str) -> Tensor | None:
        """The value of the first field with one of these declared dimensions; None if there is none."""
        f = self.field(lambda f: f.is_tensor and f.annotation.dim_str in dims)
        return None if f is None else self.values[f.name]

    @property
    def labels(self) -> Tensor | None:
        """The field of classes, ``(n,)``, if there is one."""
        f = self.field(lambda f: Below("classes") in f.marks)
        return None if f is None else self.values[f.name].long()

    @property
    def images(self) -> Tensor | None:
        """The field of images, ``(n, channels, height, width)``, if there is one."""
        f = self.field(lambda f: f.is_tensor and f.annotation.dim_str.split()[1:] == ["channels", "height", "width"])
        return None if f is None else self.values[f.name]


def uploads(
    folder: Path,
    settings: Uploads,
    *,
    data: sources.DataSet | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack the uploads of a finished run, and write the results to its ``attack/uploads.json``.

    Args:
        folder: the run's folder.
        settings: the settings of the attack.
        data: the data set, if the run was given one.
        progress: receives a label of each next piece of work.

    Raises:
        ValueError: there is no finished run with stored replies, or its data or code have changed.
    """
    job = read_simulated(folder, "")
    task = share_out(job.experiment, data)
    check_unchanged(folder, job, task)
    if job.experiment.masked is not None:
        raise ValueError(f"{folder} has masked sums, so nobody has seen a client's upload; {_REMEDY}")
    spec = spec_of(job, task)
    replies = list(_replies(folder, spec))
    known = task.test[torch.randperm(len(task.test), generator=stream(job.experiment.seed, "attack"))[:_REFERENCE]]
    results: dict[str, Any] = {"records_known": len(known), "labels": [], "images": [], "left_out": []}
    classifier: nn.Module | None = None
    for reply in replies:
        client = reply.client
        progress(f"client {client}")
        own = task.train[torch.from_numpy(task.parts[client][0])]
        if not images.share_a_class(own, known):
            reason = "no record of a class of the test set" if len(own) else "no records"
            results["left_out"].append({"client": client, "reason": reason})
            continue
        shares, source = shares_of(reply, spec)
        if shares is not None:
            leak = labels.leak(shares, own.class_counts(), settings.least_share)
            results["labels"].append({"client": client, "from": source, "shares": shares.tolist(), **asdict(leak)})
        sent = _images(reply, task, spec)
        if sent is not None and len(sent):
            if classifier is None:
                classifier = spec.new_model()
                settings.judge.fit(classifier, known, stream(job.experiment.seed, "attack", "judge"))
            rng = stream(job.experiment.seed, "attack", "alike", client)
            near = images.compare(sent, *images.matched_samples(own, known, rng))
            results["images"].append(
                {
                    "client": client,
                    "images": len(sent),
                    "nearer": asdict(near.nearer),
                    "votes": near.votes,
                    "recognised": asdict(images.recognised(classifier, sent)),
                }
            )
    progress("the final model")
    results["inversion"] = _inverted(folder, settings, spec, task)
    files.write_json(RunFolder(folder).attack / _NUMBERS, results)
    return results


_REMEDY = "attack its model by membership (fedstill attack RUN membership), or a run with --sums open"


def _replies(folder: Path, spec: RunSpec) -> Iterator[SeenReply]:
    journal, steps = Journal(RunFolder(folder).journal), client_steps(type(spec.method))
    asked, name = 0, journal.files.step(0)
    while name is not None and not any(f.is_tensor or f.like is not None for f in steps[name].reply.schema):
        asked, name = asked + 1, journal.files.step(asked + 1)
    if name is None or not journal.files.replies(asked):
        raise ValueError(
            f"{folder} has no replies to an early request, as only those of the last round are kept; repeat its "
            "command with --keep-replies and another --out, then attack that run"
        )
    schema = steps[name].reply.schema
    for client in journal.replies_to(asked, name)[0]:
        values, _ = wire.decode(journal.read_reply(asked, name, client), schema, spec.facts)
        yield SeenReply(client, schema, values)


def _are_counts(f: Field) -> bool:
    """Whether a field has integers with a limit that is not the number of classes."""
    return f.is_tensor and any(isinstance(mark, Below) and mark != Below("classes") for mark in f.marks)


def shares_of(reply: SeenReply, spec: RunSpec) -> tuple[Tensor | None, str]:
    """Estimated shares of the classes and their source; None if no field shows them."""
    classes = spec.num_classes
    if (f := reply.field(lambda f: _are_counts(f) and f.annotation.dim_str == "classes")) is not None:
        counts = reply.values[f.name].double()
        return counts / counts.sum().clamp_min(1e-12), "the counts"
    if (tags := reply.labels) is not None:
        if not len(tags):
            return None, ""
        counted = reply.field(lambda f: _are_counts(f) and f.annotation.dim_str == "n")
        each = torch.ones(len(tags)) if counted is None else reply.values[counted.name]
        counts = torch.zeros(classes, dtype=torch.float64).index_add(0, tags, each.double().clamp_min(0))
        return (counts / counts.sum(), "labels") if counts.sum() > 0 else (None, "")
    if (sums := reply.shaped(*_SUMS)) is not None:
        counts = sums[:, -1].double().clamp_min(0)
        return counts / counts.sum().clamp_min(1e-12), "the sums"
    if (logits := reply.shaped(*_LOGITS)) is not None:
        return logits.double().softmax(1).mean(0), "the logits"
    if (head := reply.shaped(_HEAD)) is not None:
        return labels.shares_of_update(-head[:, -1].double()), "the head"
    draw = spec.method.first_draw(reply.client)
    start = spec.new_model(architecture=spec.architecture(reply.client), draw=draw)
    names = {name for name, _ in start.named_parameters()}
    f = reply.field(lambda f: f.like is not None and names <= reply.values[f.name].keys())
    if f is None:
        return None, ""
    value = reply.values[f.name]
    change = {k: -v for k, v in value.items()} if Difference() in f.marks else labels.descent(state(start), value)
    try:
        drift = labels.last_layer(change, classes).drift
    except ValueError:
        return None, ""
    return (
        (labels.shares_of_update(drift), "the last layer") if drift.any() else (None, "")
    )  # a bias that is not trained


def _images(reply: SeenReply, task: Task, spec: RunSpec) -> Records | None:
    """The images of a reply as the server uses them; None if it has none."""
    images, tags, like = reply.images, reply.labels, task.train
    if images is None or tags is None:
        return None
    if images.is_floating_point():
        sent = Examples(images, tags).rounded(like.num_classes, like.normalisation)
    else:
        sent = Records(images, tags, like.num_classes, like.normalisation)
    return spec.method.opened(sent)


def _inverted(folder: Path, settings: Uploads, spec: RunSpec, task: Task) -> dict[str, Any] | None:
    """PSNR of images reconstructed from the model; None for vectors and for a model other than ``--model``."""
    tensors, header = RunFolder(folder).read_model(lambda tensors, header: (tensors, header))
    if not returns_run_model(type(spec.method)) or header.get("model") != spec.model or task.train.are_vectors:
        return None
    model = spec.new_model(tensors)
    classes = torch.arange(task.train.num_classes)
    reconstructed = settings.inversion.invert(model, classes, task.train, stream(spec.seed, "attack", "inversion"))
    own = task.train[torch.cat([torch.from_numpy(part) for part, _ in task.parts])]
    if not images.share_a_class(own, task.test):
        return None
    members, others = images.matched_samples(own, task.test, stream(spec.seed, "attack", "as many"))
    return {
        name: float(closest_psnr(reconstructed, records).mean())
        for name, records in (("training", members), ("test", others))
    }


def show(results: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    if results["labels"]:
        table = Table("client", "source", "classes right, %", "L1 of shares", "of equal shares", box=SIMPLE_HEAD)
        for line in results["labels"]:
            right = f"{100 * line['held_accuracy']:.0f}"
            table.add_row(
                str(line["client"]), line["from"], right, f"{line['distance']:.2f}", f"{line['uniform_distance']:.2f}"
            )
        yield table
    if results["images"]:
        table = Table("client", "images", "nearer to its own, %", "95 % interval", "recognised, %", box=SIMPLE_HEAD)
        for line in results["images"]:
            near = line["nearer"]
            table.add_row(
                str(line["client"]),
                str(line["images"]),
                f"{100 * near['value']:.0f}",
                f"{100 * near['low']:.0f} to {100 * near['high']:.0f}",
                f"{100 * line['recognised']['value']:.0f}",
            )
        yield table
        yield Text(
            "Without a leak, 50 % of the images would be nearer to the client's records than to as many other records."
        )
    if not results["labels"] and not results["images"]:
        yield Text(
            "The replies have nothing that this attack reads: no counts, labels, images, sums, logits or last layer."
        )
    for line in results["left_out"]:
        yield Text(f"Client {line['client']} is left out: it has {line['reason']}.")
    if inverted := results["inversion"]:
        yield Text(
            f"Images reconstructed from the model: {inverted['training']:.1f} dB to the nearest training record, "
            f"{inverted['test']:.1f} dB to the nearest test record."
        )
