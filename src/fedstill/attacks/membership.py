"""Membership inference: repeat a finished run with and without records of a client, and infer which it had.

::

    RUN/attack/client-00002/
      world-000/            the target run, in which the victim has each of its records with probability 1/2
      world-001/ ...        shadow runs in pairs, whose victims have complementary halves of the records
      scores.npz            phi and membership by world and record, and the attack's scores for the target
      attack.json           results by the attack's name
      attack.html           the results as a page
      rmia.npz, rmia.html   the same of ``--score rmia``, with probabilities in place of phi

A world is a run. All worlds have the run's seed, so they have the same random start, server draws, other clients'
records and other clients' draws. The attacker knows all of these, like the adversary of differential privacy. Only
privacy noise differs (``noise=entropy``), since the attacker could subtract noise drawn from the seed. If a run asked
its clients once, the other clients' replies do not depend on the victim: a world reuses them, and asks the victim only.

The attack is on the run's model or, if clients have models of their own, on the victim's, as it evaluates it.
"""

import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from pydantic import NonNegativeInt, ValidationInfo, field_validator
from rich.console import Console, RenderableType
from torch import Tensor, nn
from typing_extensions import override

import fedstill
from fedstill.attacks import lira, rmia
from fedstill.attacks.attack import Attack
from fedstill.attacks.lira import FPRS
from fedstill.attacks.release_policy import identity
from fedstill.attacks.results import allowed, page, show
from fedstill.attacks.rmia import POPULATION, Rmia
from fedstill.attacks.shadow import ShadowAttack
from fedstill.base import files, seeds
from fedstill.base.records import Records
from fedstill.data import sources
from fedstill.engines.client import Site
from fedstill.engines.transport import Watcher
from fedstill.evaluation import outputs
from fedstill.experiment import progress
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import check_unchanged, lay_out, read_simulated
from fedstill.experiment.run import run, spec_of
from fedstill.experiment.task import Task, client_data, share_out
from fedstill.privacy.guarantee import Guarantee
from fedstill.protocol import shared_part, wire
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import JournalFiles

_log = logging.getLogger("fedstill")
_ROWS = 5_000
"""Maximum number of posteriors to train an attack network on."""


class Victim(NamedTuple):
    """A client that is attacked.

    Attributes:
        client: its number.
        own: all its records.
        indices: their places in the task.
        member: True for the records that it has in world w.
        others: records that nobody has.
        column: the column whose values stay together (``--group``); empty if each record is drawn by itself.
        groups: for each record, the number of its value of ``column``, or of the record itself.
    """

    client: int
    own: Records
    indices: Tensor
    member: Bool[Tensor, "worlds n"]
    others: Records
    column: str
    groups: Int64[Tensor, " n"]

    @property
    def members(self) -> Bool[Tensor, " g"]:
        """Whether the target run has the records of each group: all, or none."""
        found = torch.zeros(int(self.groups.max()) + 1, dtype=torch.bool)
        found[self.groups] = self.member[0]
        return found

    @property
    def largest(self) -> int:
        """The most records of a group."""
        return int(self.groups.bincount().max())

    def mean(self, scores: Float64[Tensor, " n"]) -> Float64[Tensor, " g"]:
        """The mean score of the records of each group."""
        number = int(self.groups.max()) + 1
        sums = torch.zeros(number, dtype=scores.dtype).index_add_(0, self.groups, scores)
        return sums / self.groups.bincount(minlength=number)


class Outputs(NamedTuple):
    """Logits of a world's model on the victim's records and on others, as they are and mirrored."""

    own: Float32[Tensor, "2 n classes"]
    others: Float32[Tensor, "2 m classes"]


def by_lira(worlds: list[Outputs], victim: Victim, flip: bool, place: Path) -> dict[str, Tensor]:
    """LiRA's scores, which are also written to ``place``; with ``flip`` of both views of a record."""
    scores = torch.stack([lira.phi(world.own[_views(flip)], victim.own.labels).mean(0) for world in worlds])
    fitted = lira.fit(scores[1:], victim.member[1:])
    ratios = {"online": lira.online(scores[0], fitted), "offline": lira.offline(scores[0], fitted.absent)}
    _store(place / "scores.npz", victim, {"phi": scores, **ratios})
    return ratios


def by_rmia(
    worlds: list[Outputs], victim: Victim, flip: bool, place: Path, settings: Rmia
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """RMIA's membership score of each record, and the settings with the ``a`` that was tuned on the shadow models."""
    views = _views(flip)
    own = torch.stack([rmia.probability(world.own[views], victim.own.labels) for world in worlds], 1)
    others = torch.stack([rmia.probability(world.others[views], victim.others.labels) for world in worlds], 1)
    chosen = rmia.tuned(settings, own[0], others[0], victim.member)
    each = [rmia.attack(chosen, *view, victim.member) for view in zip(own, others, strict=True)]
    ratios = {form: torch.stack([scores[form] for scores in each]).mean(0) for form in each[0]}
    _store(place / "rmia.npz", victim, {"probability": own.mean(0), **ratios})
    return ratios, chosen.model_dump()


def _views(flip: bool) -> slice:
    return slice(None) if flip else slice(1)


def _store(place: Path, victim: Victim, arrays: dict[str, Tensor]) -> None:
    with io.BytesIO() as file:
        every: dict[str, Any] = {**arrays, "member": victim.member, "records": victim.indices}
        np.savez(file, **{name: value.numpy() for name, value in every.items()})
        files.write_bytes(place, file.getvalue())


def accuracy(
    ratio: Float64[Tensor, " n"], member: Bool[Tensor, " n"], guarantee: Guarantee, size: int = 1
) -> dict[str, Any]:
    """True positive rates of the scores, and whether they refute the guarantee for ``size`` records together."""
    limit = allowed(guarantee, size)
    rates = []
    for fpr in FPRS:
        rate = lira.tpr_at(fpr, ratio, member)
        most = None if limit is None else limit(fpr)
        refuted = None if limit is None else rate.low > limit(rate.fpr_high)
        rates.append({**rate._asdict(), "bound": most, "refuted": refuted})
    low, high = lira.auc_interval(ratio, member)
    return {"auc": lira.auc(ratio, member), "auc_low": low, "auc_high": high, "rates": rates}


def posteriors(attack: ShadowAttack, logits_of_worlds: list[Tensor], member: Tensor, seed: int) -> dict[str, Any]:
    """Rates of an attack network on posteriors."""
    each = min(math.ceil(_ROWS / (len(logits_of_worlds) - 1)), member.shape[1])
    rng = seeds.stream(seed, "attack", "posteriors", attack.top or 0)
    chosen = [torch.randperm(member.shape[1], generator=rng)[:each] for _ in logits_of_worlds[1:]]
    rows = torch.cat([logits[0, index] for logits, index in zip(logits_of_worlds[1:], chosen, strict=True)])
    present = torch.cat([mask[index] for mask, index in zip(member[1:], chosen, strict=True)])
    return attack.rates(attack.fit(rows, present, rng), logits_of_worlds[0][0], member[0])


_FEWEST = 20
"""Minimum number of the victim's records."""
_NEVER = 10**9
_OUTPUTS = "outputs.safetensors"
_PAGES = {"lira": "attack.html", "rmia": "rmia.html"}

Watch = Callable[[str], AbstractContextManager[Watcher]]
"""Opens a watcher, given the name of a world."""


class Membership(Attack):
    """Membership inference: repeat a run with and without a client's records, and infer from the model which it had."""

    client: NonNegativeInt | None = None
    """The attacked client; by default the client with the most records."""
    score: Literal["lira", "rmia"] = "lira"
    """The score of a record: LiRA's likelihood ratio, or RMIA's share of the population, for few shadow runs."""
    shadows: int | None = None
    """Number of shadow runs besides the attacked run, by default 16, or 4 for RMIA. It is even, as each record is in
    half of them; for LiRA, 64 are better."""
    rmia: Rmia = Rmia()
    """Settings of ``--score rmia``."""
    flip: bool = False
    """Whether to average scores over a record and its mirror image, for runs trained on both."""

    @field_validator("shadows")
    @classmethod
    def _in_pairs(cls, shadows: int | None, info: ValidationInfo) -> int | None:
        least = 2 if info.data.get("score") == "rmia" else 4
        if shadows is not None and (shadows < least or shadows % 2):
            raise ValueError(f"it must be an even number of {least} or more, as each record is in half of these runs")
        return shadows

    @property
    def number(self) -> int:
        """Number of shadow runs."""
        return self.shadows or (4 if self.score == "rmia" else 16)

    @override
    def attack(
        self, folder: Path, console: Console, command: str, data: sources.DataSet | None = None
    ) -> tuple[dict[str, Any], Iterable[RenderableType]]:
        results = membership(
            folder,
            self,
            data=data,
            watch=lambda world: progress.watch(console, world, quiet=console.quiet),
            command=command,
        )
        page_of = place_of(folder, results["client"]) / _PAGES[self.score]
        return {**results, "report": str(page_of)}, [*show(results), f"report: {page_of}"]


def membership(
    folder: Path,
    settings: Membership,
    *,
    data: sources.DataSet | None = None,
    watch: Watch = lambda _: nullcontext(Watcher()),
    command: str = "",
) -> dict[str, Any]:
    """Attack a finished run, or resume an interrupted attack.

    Args:
        folder: the run's folder; results are written to its ``attack/client-V``.
        settings: the settings of the attack.
        data: the data set, if the run was given one.
        watch: shows the progress of the worlds.
        command: the command line, for the record.

    Returns:
        The entry "membership" of ``attack.json``, or "membership-rmia".

    Raises:
        ValueError: there is no finished run, it cannot be repeated, or the victim took no part in it or in a world.
    """
    job, attacked = read_simulated(folder, command), RunFolder(folder)
    task = share_out(job.experiment, data)
    check_unchanged(folder, job, task)
    victim = _victim(job, task, settings)
    place = place_of(folder, victim.client)
    _check_took_part(attacked, victim.client)
    worlds = list(_worlds(folder, job, task, victim, watch, settings.score == "rmia"))
    guarantee = attacked.read_summary().guarantee
    facts: dict[str, Any] = {}
    if settings.score == "lira":
        ratios = by_lira(worlds, victim, settings.flip, place)
    else:
        ratios, facts["rmia"] = by_rmia(worlds, victim, settings.flip, place, settings.rmia)
    members, ratios = victim.members, {form: victim.mean(ratio) for form, ratio in ratios.items()}
    results: dict[str, Any] = {
        "run": identity(folder),
        "client": victim.client,
        "records": len(members),
        "members": int(members.sum()),
        **({"group": {"column": victim.column, "largest": victim.largest}} if victim.column else {}),
        "shadows": settings.number,
        "flip": settings.flip,
        **facts,
        "guarantee": asdict(guarantee),
        "likelihood_ratio": {
            form: accuracy(ratio, members, guarantee, victim.largest) for form, ratio in ratios.items()
        },
    }
    if settings.score == "lira":
        logits = [world.own for world in worlds]
        results["posteriors"] = {
            name: posteriors(ShadowAttack(top=top), logits, victim.member, job.experiment.seed)
            for name, top in (("whole", None), ("three_largest", 3))
        }
    name = "membership" if settings.score == "lira" else "membership-rmia"
    earlier = attacked.read_json(place / "attack.json") if (place / "attack.json").exists() else {}
    files.write_json(place / "attack.json", {**earlier, name: results})
    curves = {form: lira.roc(ratio, members) for form, ratio in ratios.items()}
    files.write_bytes(place / _PAGES[settings.score], page(job, results, curves).encode())
    return results


def place_of(folder: Path, client: int) -> Path:
    """The folder of the attacks on a client of a run."""
    return RunFolder(folder).attack / f"client-{client:05d}"


def _victim(job: Job, task: Task, settings: Membership) -> Victim:
    sizes, client = [len(own) for own, _ in task.parts], settings.client
    if client is None:
        client = int(np.argmax(sizes))
    if client >= len(sizes):
        raise ValueError(f"--client is {client}; the run has the clients 0 to {len(sizes) - 1}")
    if sizes[client] < _FEWEST:
        raise ValueError(f"client {client} has {sizes[client]} records; an attack needs {_FEWEST} at least")
    indices = torch.from_numpy(task.parts[client][0])
    column, groups = by_group(task, indices)
    member = membership_design(job.experiment.seed, client, int(groups.max()) + 1, settings.number)[:, groups]
    order = torch.randperm(len(task.test), generator=seeds.stream(job.experiment.seed, "attack", "population"))
    return Victim(client, task.train[indices], indices, member, task.test[order[:POPULATION]], column, groups)


def by_group(task: Task, indices: Tensor) -> tuple[str, Int64[Tensor, " n"]]:
    """The column by whose values the victim's records are in a world or not, and the number of each record's value.

    A picture of a patient whose others are in is no honest non-member. With few values, each record is by itself.
    """
    if task.groups is not None:
        column, values = task.groups
        found, which = np.unique(values[indices.numpy()], return_inverse=True)
        if len(found) >= _FEWEST:
            return column, torch.from_numpy(which)
        _log.warning(
            "client has records of %d values of '%s'; members are drawn by record, as %d values are needed at least",
            len(found),
            column,
            _FEWEST,
        )
    return "", torch.arange(len(indices))


def _check_took_part(run: RunFolder, client: int) -> None:
    """Refuse a run, or a world, whose model does not depend on the victim: it would seem to be safe.

    Raises:
        ValueError: none of the victim's replies was used.
    """
    refused = [refusal for refusal in run.read_summary().refused if refusal.client == client]
    if refused and len(refused) >= len(run.exchanges):
        raise ValueError(
            f"the model of {run} has nothing of client {client}: {refused[0].reason}; attack another client, or "
            "another run"
        )


def membership_design(seed: int, client: int, n: int, shadows: int) -> Bool[Tensor, "worlds n"]:
    """Membership of ``n`` records, or groups: random for the target, then pairs of a random half and its complement.

    Each record is in exactly half of the shadow runs; a larger number of runs does not change the first ones.
    """

    def coins(*name: str | int) -> Tensor:
        return torch.rand(n, generator=seeds.stream(seed, "attack", client, *name)) < 0.5

    pairs = [coins("shadow", pair) for pair in range(shadows // 2)]
    return torch.stack([coins("target"), *(side for half in pairs for side in (half, ~half))])


# --- the worlds


def _worlds(folder: Path, job: Job, task: Task, victim: Victim, watch: Watch, needs_others: bool) -> Iterator[Outputs]:
    """The outputs of every world's model, the attacked one first."""
    place, once = place_of(folder, victim.client), _asked_once(RunFolder(folder))
    for world in range(len(victim.member)):
        with watch(f"world {world + 1} of {len(victim.member)}") as watcher:
            yield _world(folder, place, job, task, victim, world, once, watcher, needs_others)


def _world(
    folder: Path,
    place: Path,
    job: Job,
    task: Task,
    victim: Victim,
    number: int,
    once: bool,
    watcher: Watcher,
    needs_others: bool,
) -> Outputs:
    """The outputs of a world's model."""
    out = place / f"world-{number:03d}"
    changes: dict[str, Any] = {"noise": "entropy", "evaluate_every": _NEVER, "evaluate_uploads": False}
    if once:
        changes |= {"engine": "inprocess", "workers": 0}  # only the victim computes
    label = f"{job.label}, world {number} of client {victim.client}"
    again = job.replace(experiment=job.experiment.model_copy(update=changes), out=out, label=label)
    if once and not again.out.exists():  # as a run interrupted when only the victim's reply was missing
        described = again.description()
        lay_out(folder, again.out, {**described, "answers": str(folder)}, without=victim.client, refusals=True)
    indices = victim.indices[victim.member[number]].numpy()
    parts = [(indices, test) if c == victim.client else (own, test) for c, (own, test) in enumerate(task.parts)]
    task = task._replace(parts=parts)
    run(again, task=task, watcher=watcher, on_model=partial(_store_outputs, again, task, victim))
    _check_took_part(RunFolder(out), victim.client)
    stored = wire.unpack(files.read_checked(out / _OUTPUTS, f"delete {out} and attack again"))[0]
    found = Outputs(stored["logits"], stored.get("population", torch.empty(2, 0, victim.own.num_classes)))
    for logits, records in zip(found, (victim.own, victim.others), strict=True):
        if records is victim.others and not needs_others:
            continue
        if logits.shape != (2, len(records), records.num_classes):
            raise files.Damaged(f"{out / _OUTPUTS} does not fit these records; delete {out} and attack again")
        if not torch.isfinite(logits).all():
            raise ValueError(
                f"the model of {again.label} has outputs that are no finite numbers, so its training diverged and no "
                "score can be computed; attack a run that converges, as with a lower learning rate"
            )
    return found


def _store_outputs(job: Job, task: Task, victim: Victim, model: nn.Module) -> None:
    """Write the outputs for the victim's records of a world's model or, if clients have their own, of the victim's."""
    if job.method.personal or job.method.own(model):
        model = _own_model(job, task, victim.client, model)

    def logits(records: Records) -> Tensor:
        flip = 3 if not records.are_vectors else ()  # vectors have no mirror image
        views = outputs(model, records), outputs(model, records, of=lambda x: model(x.flip(flip)))
        return torch.stack([torch.cat(view).float().cpu() for view in views])

    stored = {"logits": logits(victim.own), "population": logits(victim.others)}
    files.write_checked(job.out / _OUTPUTS, wire.pack(stored, {}))


def _own_model(job: Job, task: Task, client: int, model: nn.Module) -> nn.Module:
    """A client's own model as it evaluates it at the end of a run, whose shared parts are those of ``model``."""
    device, threads, folder = job.experiment.device, job.experiment.threads, RunFolder(job.out)
    spec, data = spec_of(job, task, str(folder.read_config().run)), client_data(job.experiment, task)
    site = Site(spec, data, folder.clients, JournalFiles(folder.journal).newest, device=device, threads=threads)
    return site.personal_model(client, shared_part(job.method, model), 1 + max(folder.exchanges))


def _asked_once(run: RunFolder) -> bool:
    """Whether the replies of the other clients serve a world with other records of the attacked one."""
    if Experiment(**run.read_config().experiment).masked is not None:
        return False  # they are sealed to the helpers of that run
    return run.exchanges == {0} and run.read_config().version == fedstill.__version__
