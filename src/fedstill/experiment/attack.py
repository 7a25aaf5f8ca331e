"""``fedstill attack``: was a record a client's? A finished run is repeated in worlds that differ in just that.

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
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from pydantic import NonNegativeInt, field_validator
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import fedstill
from fedstill import files, seeds, wire
from fedstill.attacks import lira
from fedstill.attacks.shadow import ShadowAttack
from fedstill.data import sources
from fedstill.engines.site import last_state
from fedstill.engines.transport import Watcher
from fedstill.experiment import config, extend, html, plots, tables
from fedstill.experiment.run import Job, read_json, run
from fedstill.experiment.task import Task, share_out
from fedstill.journal import JUDGING, Journal
from fedstill.protocol import Method, Settings
from fedstill.records import Records
from fedstill.train.local import outputs

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


class Membership(Settings):
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
    job = extend.read_simulated(folder, command)
    task = share_out(job.experiment, data)
    if task.fingerprint != read_json(folder / "config.json", {"fingerprint"})["fingerprint"]:
        raise ValueError(f"{job.experiment.data} is not what it was when {folder} ran; run that again elsewhere")
    victim = _victim(job, task, settings)
    place = place_of(folder, victim.client)
    once = _asked_once(folder)
    said = []
    for world in range(len(victim.member)):
        with watch(f"world {world + 1} of {len(victim.member)}") as watcher:
            said.append(_world(folder, place, job, task, victim, world, once, watcher))
    guarantee = read_json(folder / "summary.json", {"guarantee"})["guarantee"]
    ratios = _ratios(said, victim, settings, place / "scores.npz")
    found = {
        "client": victim.client,
        "records": len(victim.own),
        "members": int(victim.member[0].sum()),
        "shadows": settings.shadows,
        "flip": settings.flip,
        "guarantee": guarantee,
        "likelihood_ratio": {form: _judged(ratio, victim.member[0], guarantee) for form, ratio in ratios.items()},
        "posteriors": {
            name: _shadow_attack(ShadowAttack(top=top), said, victim.member, job.experiment.seed)
            for name, top in (("whole", None), ("three largest", 3))
        },
    }
    results = read_json(place / "attack.json", set()) if (place / "attack.json").exists() else {}
    files.write_json(place / "attack.json", {**results, "membership": found})
    curves = {form: lira.roc(ratio, victim.member[0]) for form, ratio in ratios.items()}
    files.write_bytes(place / "attack.html", _page(job, found, curves).encode())
    return found


def place_of(folder: Path, client: int) -> Path:
    """Where the attacks on a client of a run are."""
    return folder / "attack" / f"client-{client:05d}"


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
    """What the model of a world says of the victim's records and of their mirror images."""
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
        method.take_back(model, last_state(out / "clients", victim.client))
    views = outputs(model, victim.own), outputs(model, victim.own, of=lambda x: model(x.flip(3)))
    logits = torch.stack([torch.cat(view).float().cpu() for view in views])
    files.write_checked(out / _SAID, wire.pack({"logits": logits}, {}))


def _asked_once(folder: Path) -> bool:
    asked = {exchange for exchange, _ in Journal(folder / "journal").times() if exchange < JUDGING}
    same = read_json(folder / "config.json", {"version"})["version"] == fedstill.__version__
    return asked == {0} and same


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


def _judged(ratio: Float64[Tensor, " n"], member: Bool[Tensor, " n"], guarantee: dict[str, Any]) -> dict[str, Any]:
    limit = _limit(guarantee)
    rates = []
    for fpr in FPRS:
        rate = lira.tpr_at(fpr, ratio, member)
        most = None if limit is None else limit(fpr)
        refuted = None if limit is None else rate.low > limit(rate.fpr_high)
        rates.append({**rate._asdict(), "bound": most, "refuted": refuted})
    return {"auc": lira.auc(ratio, member), "rates": rates}


def _limit(guarantee: dict[str, Any]) -> Callable[[float], float] | None:
    """True positives that the run's guarantee allows, where it is about records."""
    if not guarantee["holds"] or guarantee["unit"] != "record":
        return None
    return partial(lira.bound, epsilon=guarantee["epsilon"], delta=guarantee["delta"])


def _shadow_attack(attack: ShadowAttack, said: list[Tensor], member: Tensor, seed: int) -> dict[str, Any]:
    each = min(math.ceil(_ROWS / (len(said) - 1)), member.shape[1])
    rng = seeds.stream(seed, "attack", "posteriors", attack.top or 0)
    chosen = [torch.randperm(member.shape[1], generator=rng)[:each] for _ in said[1:]]
    rows = torch.cat([logits[0, index] for logits, index in zip(said[1:], chosen, strict=True)])
    present = torch.cat([mask[index] for mask, index in zip(member[1:], chosen, strict=True)])
    return attack.judge(attack.fit(rows, present, rng), said[0][0], member[0])


# --- to look at


def show(found: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    yield Text(_finding(found), style="bold")
    table = Table(*_HEADINGS, box=SIMPLE_HEAD, pad_edge=False)
    for line in _lines(found):
        table.add_row(*line)
    yield table
    yield Text(_verdict(found))
    yield Text(_posteriors(found))


def _finding(found: dict[str, Any]) -> str:
    most = found["likelihood_ratio"]["online"]["rates"][-1]["tpr"]
    return (
        f"{100 * most:.1f} % of the members among client {found['client']}'s {found['records']} records are found "
        f"with {100 * FPRS[-1]:g} % of the others taken for members ({found['shadows']} shadow runs)"
    )


_HEADINGS = ("attack", "FPR, %", "TPR, %", "95 % interval", "allowed, %", "AUC")


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for form, rates in found["likelihood_ratio"].items():
        for rate in rates["rates"]:
            yield (
                form,
                f"{100 * rate['fpr']:g}",
                f"{100 * rate['tpr']:.2f}",
                f"{100 * rate['low']:.2f} to {100 * rate['high']:.2f}",
                "-" if rate["bound"] is None else f"{100 * rate['bound']:.2f}",
                f"{rates['auc']:.3f}",
            )


def _verdict(found: dict[str, Any]) -> str:
    guarantee = found["guarantee"]
    rates = [rate for form in found["likelihood_ratio"].values() for rate in form["rates"]]
    others = found["records"] - found["members"]
    note = f" {100 * FPRS[0]:g} % of {others} others is none." if others * FPRS[0] < 1 else ""
    if rates[0]["bound"] is None:
        why = guarantee["reason"] if not guarantee["holds"] else "the guarantee is about labels, not about records"
        return f"There is no bound to compare with: {why}.{note}"
    promise = tables.guarantee_words(guarantee)
    if any(rate["refuted"] for rate in rates):
        return f"REFUTED: more is found than {promise} allows, beyond the intervals.{note}"
    return f"Not refuted: what is found is within what {promise} allows.{note}"


def _posteriors(found: dict[str, Any]) -> str:
    parts = []
    for name, judged in found["posteriors"].items():
        words = [f"{kind} {r['precision']:.2f}/{r['recall']:.2f}/{r['f1']:.2f}" for kind, r in judged.items()]
        parts.append(f"{name}: {', '.join(words)}")
    return f"An attack network on posteriors (precision/recall/F1): {'; '.join(parts)}"


def _page(job: Job, found: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> str:
    title = f"Membership inference: {job.label} on {job.experiment.data}"
    lines, words = list(_lines(found)), (0,)
    body = "".join(
        (
            f'<h1>{escape(title)}</h1>\n<p class="finding">{escape(_finding(found))}.</p>\n',
            html.section("Likelihood ratios", html.data_table(_HEADINGS, lines, words, caption=_verdict(found))),
            html.section("Found against falsely accused", html.figure(_figure(found, curves), "roc", _CAPTION)),
            html.section("Attack networks", f"<p>{escape(_posteriors(found))}.</p>\n"),
            html.section("Reproduce", f"<pre>{escape(job.command)}</pre>\n"),
        )
    )
    return html.framed(title, body)


_CAPTION = "Up and to the left is worse for the client. Both axes are logarithmic: what counts is who is surely found."


def _figure(found: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> Any:
    figure = plots.axes("false positives, share of the others", "true positives, share of the members")
    low = 0.5 / max(found["members"], found["records"] - found["members"])  # a log axis has no 0
    for colour, (form, rates) in zip(plots.PALETTE, curves.items(), strict=False):
        false, true = (rate.clamp_min(low).tolist() for rate in rates)
        line = {"color": colour, "width": 2, "shape": "hv"}
        figure.add_scatter(x=false, y=true, mode="lines", line=line, name=form)
    xs = np.geomspace(low, 1, 200)
    figure.add_scatter(x=xs, y=xs, mode="lines", line={"color": plots.PALETTE[-1], "dash": "dot"}, name="guessing")
    if limit := _limit(found["guarantee"]):
        line = {"color": plots.PALETTE[2], "dash": "dash"}
        figure.add_scatter(x=xs, y=[limit(x) for x in xs], mode="lines", line=line, name="allowed by the guarantee")
    span = [math.log10(low), 0.02]
    figure.update_xaxes(type="log", range=span)
    figure.update_yaxes(type="log", range=span)
    return figure
