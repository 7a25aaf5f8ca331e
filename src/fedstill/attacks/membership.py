"""Membership inference: repeat a finished run with and without records of a client, and infer which it had.

::

    RUN/attack/client-00002/
      world-000/            the target run, in which the victim has each of its records with probability 1/2
      world-001/ ...        shadow runs in pairs, whose victims have complementary halves of the records
      scores.npz            phi and membership by world and record, and the attack's scores for the target
      attack.json           results by the attack's name
      attack.html           the results as a page

A world is a run. All worlds have the run's seed, so they have the same random start, server draws, other clients'
records and other clients' draws. The attacker knows all of these, like the adversary of differential privacy. Only
privacy noise differs (``noise=entropy``), since the attacker could subtract noise drawn from the seed. If a run asked
its clients once, the other clients' replies do not depend on the victim: a world reuses them, and asks the victim only.

The attack is on the run's model, or on the victim's own model if clients have parts of their own.
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
from fedstill.experiment import extend, progress
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.experiment.task import Task, share_out
from fedstill.privacy.guarantee import Guarantee
from fedstill.protocol import Method, load_own
from fedstill.records import Records
from fedstill.runs.folder import RunFolder

FPRS = (0.001, 0.01)
"""False positive rates at which true positive rates are reported."""
_FEWEST = 20
"""Minimum number of the victim's records."""
_ROWS = 5_000
"""Maximum number of posteriors to train an attack network on."""
_NEVER = 10**9
_OUTPUTS = "outputs.safetensors"

Watch = Callable[[str], AbstractContextManager[Watcher]]
"""Opens a watcher, given the name of a world."""


class Membership(Attack):
    """Membership inference: repeat a run with and without a client's records, and infer from the model which it had."""

    client: NonNegativeInt | None = None
    """The attacked client; by default the client with the most records."""
    shadows: int = 16
    """Number of shadow runs besides the attacked run; even, as each record is in half of them. 64 are better."""
    flip: bool = False
    """Whether to average scores over a record and its mirror image, for runs trained on both."""

    @field_validator("shadows")
    @classmethod
    def _in_pairs(cls, shadows: int) -> int:
        if shadows < 4 or shadows % 2:
            raise ValueError("it must be an even number of 4 or more, as each record is in half of these runs")
        return shadows

    @override
    def attack(self, folder: Path, console: Console, command: str) -> Iterator[RenderableType]:
        results = membership(folder, self, watch=lambda world: progress.watch(console, world), command=command)
        yield from show(results)
        yield f"report: {place_of(folder, results['client']) / 'attack.html'}"


class _Victim(NamedTuple):
    """``own`` are all its records; ``member[w]`` is True for the records it has in world w."""

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
    """Attack a finished run, or resume an interrupted attack.

    Args:
        folder: the run's folder; results are written to its ``attack/client-V``.
        settings: the settings of the attack.
        data: the data set, if the run was given one.
        watch: shows the progress of the worlds.
        command: the command line, for the record.

    Returns:
        The entry "membership" of ``attack.json``.

    Raises:
        ValueError: there is no finished run, or it cannot be repeated; one sentence.
    """
    job, attacked = extend.read_simulated(folder, command), RunFolder(folder)
    task = share_out(job.experiment, data)
    if task.fingerprint != attacked.read_config().fingerprint:
        raise ValueError(f"{job.experiment.data} has changed since {folder} ran; repeat the run in another folder")
    victim = _victim(job, task, settings)
    place = place_of(folder, victim.client)
    once = _asked_once(attacked)
    logits_of_worlds = []
    for world in range(len(victim.member)):
        with watch(f"world {world + 1} of {len(victim.member)}") as watcher:
            logits_of_worlds.append(_world(folder, place, job, task, victim, world, once, watcher))
    guarantee = attacked.read_summary().guarantee
    ratios = _ratios(logits_of_worlds, victim, settings, place / "scores.npz")
    results = {
        "client": victim.client,
        "records": len(victim.own),
        "members": int(victim.member[0].sum()),
        "shadows": settings.shadows,
        "flip": settings.flip,
        "guarantee": asdict(guarantee),
        "likelihood_ratio": {form: _accuracy(ratio, victim.member[0], guarantee) for form, ratio in ratios.items()},
        "posteriors": {
            name: _shadow_attack(ShadowAttack(top=top), logits_of_worlds, victim.member, job.experiment.seed)
            for name, top in (("whole", None), ("three largest", 3))
        },
    }
    earlier = attacked.read_json(place / "attack.json") if (place / "attack.json").exists() else {}
    files.write_json(place / "attack.json", {**earlier, "membership": results})
    curves = {form: lira.roc(ratio, victim.member[0]) for form, ratio in ratios.items()}
    files.write_bytes(place / "attack.html", page(job, results, curves).encode())
    return results


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
        raise ValueError(f"client {client} has {sizes[client]} records; an attack needs {_FEWEST} at least")
    indices = torch.from_numpy(task.parts[client][0])
    member = membership_design(job.experiment.seed, client, len(indices), settings.shadows)
    return _Victim(client, task.train[indices], indices, member)


def membership_design(seed: int, client: int, n: int, shadows: int) -> Bool[Tensor, "worlds n"]:
    """Membership of ``n`` records: random for the target, then pairs of a random half and its complement.

    Each record is in exactly half of the shadow runs; a larger number of runs does not change the first ones.
    """

    def coins(*name: str | int) -> Tensor:
        return torch.rand(n, generator=seeds.stream(seed, "attack", client, *name)) < 0.5

    pairs = [coins("shadow", pair) for pair in range(shadows // 2)]
    return torch.stack([coins("target"), *(side for half in pairs for side in (half, ~half))])


# --- the worlds


def _world(
    folder: Path, place: Path, job: Job, task: Task, victim: _Victim, number: int, once: bool, watcher: Watcher
) -> Float32[Tensor, "2 n classes"]:
    """Logits of a world's model on the victim's records and on their mirror images."""
    out = place / f"world-{number:03d}"
    changes: dict[str, Any] = {"noise": "entropy", "evaluate_every": _NEVER}
    if once:
        changes |= {"engine": "inprocess", "workers": 0}  # only the victim computes
    label = f"{job.label}, world {number} of client {victim.client}"
    again = job.replace(experiment=job.experiment.model_copy(update=changes), out=out, label=label)
    if once and not again.out.exists():  # as a run interrupted when only the victim's reply was missing
        described = again.description()
        extend.lay_out(folder, again.out, {**described, "answers": str(folder)}, without=victim.client)
    indices = victim.indices[victim.member[number]].numpy()
    parts = [(indices, test) if c == victim.client else (own, test) for c, (own, test) in enumerate(task.parts)]
    on_model = partial(_store_outputs, out, job.method, victim)
    run(again, task=task._replace(parts=parts), watcher=watcher, on_model=on_model)
    logits = wire.unpack(files.read_checked(out / _OUTPUTS, f"delete {out} and attack again"))[0]["logits"]
    if logits.shape != (2, len(victim.own), victim.own.num_classes) or not torch.isfinite(logits).all():
        raise files.Damaged(f"{out / _OUTPUTS} does not fit these records; delete {out} and attack again")
    return logits


def _store_outputs(out: Path, method: Method, victim: _Victim, model: nn.Module) -> None:
    """Write the outputs of the model, with the victim's own parts, for its records."""
    if method.own(model):
        model = deepcopy(model)
        load_own(method, model, last_state(RunFolder(out).clients, victim.client))
    flip = 3 if not victim.own.are_vectors else ()  # vectors have no mirror image
    views = outputs(model, victim.own), outputs(model, victim.own, of=lambda x: model(x.flip(flip)))
    logits = torch.stack([torch.cat(view).float().cpu() for view in views])
    files.write_checked(out / _OUTPUTS, wire.pack({"logits": logits}, {}))


def _asked_once(run: RunFolder) -> bool:
    return run.exchanges == {0} and run.read_config().version == fedstill.__version__


# --- results


def _ratios(logits_of_worlds: list[Tensor], victim: _Victim, settings: Membership, place: Path) -> dict[str, Tensor]:
    views = slice(None) if settings.flip else slice(1)
    scores = torch.stack([lira.phi(logits[views], victim.own.labels).mean(0) for logits in logits_of_worlds])
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


def _accuracy(ratio: Float64[Tensor, " n"], member: Bool[Tensor, " n"], guarantee: Guarantee) -> dict[str, Any]:
    limit = allowed(guarantee)
    rates = []
    for fpr in FPRS:
        rate = lira.tpr_at(fpr, ratio, member)
        most = None if limit is None else limit(fpr)
        refuted = None if limit is None else rate.low > limit(rate.fpr_high)
        rates.append({**rate._asdict(), "bound": most, "refuted": refuted})
    return {"auc": lira.auc(ratio, member), "rates": rates}


def _shadow_attack(attack: ShadowAttack, logits_of_worlds: list[Tensor], member: Tensor, seed: int) -> dict[str, Any]:
    each = min(math.ceil(_ROWS / (len(logits_of_worlds) - 1)), member.shape[1])
    rng = seeds.stream(seed, "attack", "posteriors", attack.top or 0)
    chosen = [torch.randperm(member.shape[1], generator=rng)[:each] for _ in logits_of_worlds[1:]]
    rows = torch.cat([logits[0, index] for logits, index in zip(logits_of_worlds[1:], chosen, strict=True)])
    present = torch.cat([mask[index] for mask, index in zip(member[1:], chosen, strict=True)])
    return attack.rates(attack.fit(rows, present, rng), logits_of_worlds[0][0], member[0])
