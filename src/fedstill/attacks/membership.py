"""Membership inference: whether a record was a client's, told from a finished run repeated with and without it.

::

    RUN/attack/client-00002/
      world-000/            the target: each of the victim's records is in by a fair coin; a run folder
      world-001/ ...        shadow runs in pairs: of the victim's records one has what the other lacks
      scores.npz            phi and membership by world and record, and what the attack makes of the target
      attack.json           results by the attack's name
      attack.html           the same to look at

All worlds have the run's seed, so the same random start, the same draws at the server, and the same records and draws
at the other clients: the attacker knows all of these, and every record but the victim's, as the one does that
differential privacy is stated against. Privacy noise alone is real (``noise=entropy``): from the seed it would be the
same in all worlds, and no noise to this attacker. Where a run asked its clients once, the others' replies do not depend
on the victim; they are the run's own, noise included, and a world asks the victim alone.

What is attacked is the run's model; where clients keep parts of it to themselves, the victim's own model, as whoever
gets to use it could.
"""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from pydantic import NonNegativeInt, field_validator
from rich.console import Console, RenderableType
from torch import Tensor, nn
from typing_extensions import override

import fedstill
from fedstill import files, seeds, wire
from fedstill.attacks import lira
from fedstill.attacks.attack import Attack
from fedstill.attacks.report import allowed, page, show
from fedstill.attacks.shadow import ShadowAttack
from fedstill.data import sources
from fedstill.engines.client_state import last_state
from fedstill.engines.transport import Watcher
from fedstill.evaluate import outputs
from fedstill.experiment import config, extend, progress
from fedstill.experiment.run import Job, run
from fedstill.experiment.task import Task, share_out
from fedstill.privacy.guarantee import Guarantee
from fedstill.protocol import Method, load_own
from fedstill.records import Records
from fedstill.runs.folder import RunFolder

FPRS = (0.001, 0.01)
"""Rates of false positives at which true ones are reported."""
_FEWEST = 20
"""Records of a victim."""
_ROWS = 5_000
"""Posteriors of shadow models that an attack network learns from, at most."""
_NEVER = 10**9
_SAID = "outputs.safetensors"

Watch = Callable[[str], AbstractContextManager[Watcher]]
"""Opens a watcher for the world of that name."""


class Membership(Attack):
    """Membership inference: repeat a run with and without each of a client's records, and tell from its model."""

    client: NonNegativeInt | None = None
    """The client whose records are in question; by default the one with most records."""
    shadows: int = 16
    """Shadow runs, beside the one that is attacked: even, as each record is in half of them. 64 are better."""
    flip: bool = False
    """Score the mean over a record and its mirror image: for runs that train on both."""

    @field_validator("shadows")
    @classmethod
    def _in_pairs(cls, shadows: int) -> int:
        if shadows < 4 or shadows % 2:
            raise ValueError("it must be an even number of 4 or more, as each record is in half of these runs")
        return shadows

    @override
    def attack(self, folder: Path, console: Console, command: str) -> Iterator[RenderableType]:
        found = membership(folder, self, watch=lambda world: progress.Bars(console, world), command=command)
        yield from show(found)
        yield f"report: {place_of(folder, found['client']) / 'attack.html'}"


class _Victim(NamedTuple):
    """``own`` are all its records, ``member[w]`` says which of them it has in world w."""

    client: int
    own: Records
    indices: Tensor
    member: Bool[Tensor, "worlds n"]


def membership(
    folder: Path,
    settings: Membership,
    *,
    data: sources.DataSet | None = None,
    watch: Watch = lambda _: nullcontext(Watcher()),
    command: str = "",
) -> dict[str, Any]:
    """Attack a finished run; what was done before is not done again.

    Args:
        folder: the run's; everything is written to its ``attack/client-V``.
        settings: whom to attack, and with how much effort.
        data: the data set, if the run was given one.
        watch: shows the progress of the worlds.
        command: the command line, for the record.

    Returns:
        The entry "membership" of ``attack.json``.

    Raises:
        ValueError: there is no finished run, or none that can be repeated so; one sentence.
    """
    job, attacked = extend.read_simulated(folder, command), RunFolder(folder)
    task = share_out(job.experiment, data)
    if task.fingerprint != attacked.read_config().fingerprint:
        raise ValueError(f"{job.experiment.data} is not what it was when {folder} ran; run that again elsewhere")
    victim = _victim(job, task, settings)
    place = place_of(folder, victim.client)
    once = _asked_once(attacked)
    said = []
    for world in range(len(victim.member)):
        with watch(f"world {world + 1} of {len(victim.member)}") as watcher:
            said.append(_world(folder, place, job, task, victim, world, once, watcher))
    guarantee = attacked.read_summary().guarantee
    ratios = _ratios(said, victim, settings, place / "scores.npz")
    found = {
        "client": victim.client,
        "records": len(victim.own),
        "members": int(victim.member[0].sum()),
        "shadows": settings.shadows,
        "flip": settings.flip,
        "guarantee": asdict(guarantee),
        "likelihood_ratio": {form: _judged(ratio, victim.member[0], guarantee) for form, ratio in ratios.items()},
        "posteriors": {
            name: _shadow_attack(ShadowAttack(top=top), said, victim.member, job.experiment.seed)
            for name, top in (("whole", None), ("three largest", 3))
        },
    }
    results = attacked.read_json(place / "attack.json") if (place / "attack.json").exists() else {}
    files.write_json(place / "attack.json", {**results, "membership": found})
    curves = {form: lira.roc(ratio, victim.member[0]) for form, ratio in ratios.items()}
    files.write_bytes(place / "attack.html", page(job, found, curves).encode())
    return found


def place_of(folder: Path, client: int) -> Path:
    """The folder of the attacks on a client of a run."""
    return RunFolder(folder).attack / f"client-{client:05d}"


def _victim(job: Job, task: Task, settings: Membership) -> _Victim:
    sizes, client = [len(own) for own, _ in task.parts], settings.client
    if client is None:
        client = int(np.argmax(sizes))
    if client >= len(sizes):
        raise ValueError(f"--client is {client}; the run has the clients 0 to {len(sizes) - 1}")
    if sizes[client] < _FEWEST:
        raise ValueError(f"client {client} has {sizes[client]} records; an attack needs {_FEWEST} to be judged by")
    indices = torch.from_numpy(task.parts[client][0])
    member = design(job.experiment.seed, client, len(indices), settings.shadows)
    return _Victim(client, task.train[indices], indices, member)


def design(seed: int, client: int, n: int, shadows: int) -> Bool[Tensor, "worlds n"]:
    """Which of ``n`` records each world has: the target by fair coins, then pairs of a fair choice and its complement.

    So each record is in just half of the shadow runs, and more of them later leave the first as they are.
    """

    def coins(*name: str | int) -> Tensor:
        return torch.rand(n, generator=seeds.stream(seed, "attack", client, *name)) < 0.5

    pairs = [coins("shadow", pair) for pair in range(shadows // 2)]
    return torch.stack([coins("target"), *(side for kept in pairs for side in (kept, ~kept))])


# --- the worlds


def _world(
    folder: Path, place: Path, job: Job, task: Task, victim: _Victim, number: int, once: bool, watcher: Watcher
) -> Float32[Tensor, "2 n classes"]:
    """Logits of a world's model on the victim's records and on their mirror images."""
    out = place / f"world-{number:03d}"
    changes: dict[str, Any] = {"noise": "entropy", "evaluate_every": _NEVER}
    if once:
        changes |= {"engine": "inprocess", "workers": 0}  # the victim alone has something to do
    label = f"{job.label}, world {number} of client {victim.client}"
    again = job._replace(experiment=job.experiment.model_copy(update=changes), out=out, label=label)
    if once and not again.out.exists():  # as if it had been killed when all but the victim had answered
        described = config.describe(again.experiment, again.name, again.method, again.label, again.command)
        extend.lay_out(folder, again.out, {**described, "answers": str(folder)}, without=victim.client)
    kept = victim.indices[victim.member[number]].numpy()
    parts = [(kept, test) if c == victim.client else (own, test) for c, (own, test) in enumerate(task.parts)]
    made = partial(_keep, out, job.method, victim)
    run(again, task=task._replace(parts=parts), watcher=watcher, made=made)
    said = wire.unpack(files.read_checked(out / _SAID, f"delete {out} and attack again"))[0]["logits"]
    if said.shape != (2, len(victim.own), victim.own.num_classes) or not torch.isfinite(said).all():
        raise files.Damaged(f"{out / _SAID} is not about these records; delete {out} and attack again")
    return said


def _keep(out: Path, method: Method, victim: _Victim, model: nn.Module) -> None:
    """Ask the model, with the parts that the victim has kept to itself."""
    if method.own(model):
        model = deepcopy(model)
        load_own(method, model, last_state(RunFolder(out).clients, victim.client))
    views = outputs(model, victim.own), outputs(model, victim.own, of=lambda x: model(x.flip(3)))
    logits = torch.stack([torch.cat(view).float().cpu() for view in views])
    files.write_checked(out / _SAID, wire.pack({"logits": logits}, {}))


def _asked_once(run: RunFolder) -> bool:
    return run.exchanges == {0} and run.read_config().version == fedstill.__version__


# --- what they tell


def _ratios(said: list[Tensor], victim: _Victim, settings: Membership, place: Path) -> dict[str, Tensor]:
    views = slice(None) if settings.flip else slice(1)
    scores = torch.stack([lira.phi(logits[views], victim.own.labels).mean(0) for logits in said])
    fitted = lira.fit(scores[1:], victim.member[1:])
    ratios = {"online": lira.online(scores[0], fitted), "offline": lira.offline(scores[0], fitted.absent)}
    with io.BytesIO() as file:
        np.savez(
            file,
            phi=scores.numpy(),
            member=victim.member.numpy(),
            records=victim.indices.numpy(),
            online=ratios["online"].numpy(),
            offline=ratios["offline"].numpy(),
        )
        files.write_bytes(place, file.getvalue())
    return ratios


def _judged(ratio: Float64[Tensor, " n"], member: Bool[Tensor, " n"], guarantee: Guarantee) -> dict[str, Any]:
    limit = allowed(guarantee)
    rates = []
    for fpr in FPRS:
        rate = lira.tpr_at(fpr, ratio, member)
        most = None if limit is None else limit(fpr)
        refuted = None if limit is None else rate.low > limit(rate.fpr_high)
        rates.append({**rate._asdict(), "bound": most, "refuted": refuted})
    return {"auc": lira.auc(ratio, member), "rates": rates}


def _shadow_attack(attack: ShadowAttack, said: list[Tensor], member: Tensor, seed: int) -> dict[str, Any]:
    each = min(math.ceil(_ROWS / (len(said) - 1)), member.shape[1])
    rng = seeds.stream(seed, "attack", "posteriors", attack.top or 0)
    chosen = [torch.randperm(member.shape[1], generator=rng)[:each] for _ in said[1:]]
    rows = torch.cat([logits[0, index] for logits, index in zip(said[1:], chosen, strict=True)])
    present = torch.cat([mask[index] for mask, index in zip(member[1:], chosen, strict=True)])
    return attack.judge(attack.fit(rows, present, rng), said[0][0], member[0])
