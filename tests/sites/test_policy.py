"""What a real site answers and refuses, by its own policy; nothing private leaves and no budget is lost."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from real_sites import RUN, Direct, federation, make_site, spec_of, write_data

from fedstill import methods, models
from fedstill.base import files
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.base.weights import state
from fedstill.data import public
from fedstill.data.features import rows_of
from fedstill.data.sources import DataSet
from fedstill.distill.public_map import PublicFeatures
from fedstill.engines.client import NO_REPLY
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.server import ServerFederation, TooFewReplies
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.methods.fedavg_p import FedAvgP
from fedstill.methods.parts.private_heads import HeadTraining
from fedstill.models import backbones
from fedstill.protocol import wire
from fedstill.schema import Refused
from fedstill.sites.site import answer as answers
from fedstill.sites.site import decisions, setup
from fedstill.sites.site.answer import answer
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal

NAMES = tuple("0123456789")
INSEPARABLE = 61
INDEX = st.integers(0, INSEPARABLE - 1)


@pytest.fixture
def make(digits: DataSet, tmp_path: Path) -> Callable[..., SitePolicy]:
    """Makes a site with half the digits."""

    def site(client: int = 0, records: Records | None = None, **policy: Any) -> SitePolicy:
        return make_site(tmp_path, digits, client, records, **policy)

    return site


def log(site: SitePolicy) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site.state / "journal.jsonl").read_text().splitlines()]


def spent(site: SitePolicy) -> list[str]:
    return [charge.entry.model_dump_json() for charge in read_charges(site.state)]


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", ["fedavg", "fedgm", "fedavg-p"])
def test_real_sites_give_the_weights_and_bytes_of_simulated_clients(
    name: str, digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    fed = federation(name, digits, [make(0), make(1)], tmp_path / "run")
    method = fed.spec.method
    found = method.server(fed)
    expected, simulated = small.run(
        method, digits, tmp_path / "simulated", clients=2, public=small.noise_images(digits)
    )
    assert small.weights(found) == small.weights(expected)
    assert (fed.journal.bytes_up, fed.journal.bytes_down) == (
        simulated.journal.bytes_up,
        simulated.journal.bytes_down,
    )


def test_what_was_answered_is_logged_and_what_was_released_is_spent_for_good(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    site = make(0, methods=["fedavg-p.train_head"], unprotected=False, simulated_noise=False, budget=1.3)
    fed = federation("fedavg-p", digits, [site], tmp_path / "run", simulated_noise=False)
    fed.spec.method.server(fed)
    assert fed.guarantee().epsilon == pytest.approx(1.0, rel=1e-3)
    assert [(line["what"], line.get("method"), line.get("step")) for line in log(site)] == [
        ("asked", "fedavg-p", "train_head"),
        ("accepted", None, None),
        ("charged", "fedavg-p", "train_head"),
        ("answered", "fedavg-p", "train_head"),
    ]
    assert len(spent(site)) == 1
    again = SitePolicy.read(tmp_path / "site-0" / "policy.toml")  # as after a restart
    other = federation("fedavg-p", digits, [again], tmp_path / "other", run="f" * 32, simulated_noise=False)
    with pytest.raises(TooFewReplies, match="budget of 1.3"):
        other.spec.method.server(other)
    assert len(spent(site)) == 1


def test_the_same_question_again_gets_the_same_reply_and_costs_nothing(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    site = make(0, unprotected=False, simulated_noise=False, budget=1.3)
    replies = []
    for folder in ("first", "resumed elsewhere"):
        fed = federation("fedavg-p", digits, [site], tmp_path / folder, simulated_noise=False)
        fed.spec.method.server(fed)
        replies.append(fed.transport.replies[0])  # type: ignore[attr-defined]
    assert replies[0] == replies[1]
    assert len(spent(site)) == 1


def test_classes_are_known_by_name_and_a_site_may_lack_some(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    threes = digits.train[digits.train.labels == 3]
    site = make(0, threes)
    fed = federation("fedgm", digits, [site], tmp_path / "run")
    fed.spec.method.server(fed)
    _, header = wire.unpack(fed.transport.replies[0])  # type: ignore[attr-defined]
    tensors, _ = wire.unpack(fed.transport.replies[0])  # type: ignore[attr-defined]
    assert header["step"] == "distil"
    assert tensors["labels"].tolist() == [3]


# ------------------------------------------------------------------------------------------------------------ refusals


def refused(site: SitePolicy, fed: ServerFederation) -> str:
    """Run; every client must refuse. Returns why, and sees that nothing left and nothing was spent."""
    with pytest.raises(TooFewReplies) as stopped:
        fed.spec.method.server(fed)
    for reply in fed.transport.replies:  # type: ignore[attr-defined]
        tensors, header = wire.unpack(reply)
        assert not tensors
        assert set(header) == {"error"}
        assert header["error"].startswith("refused by the site: ")
    assert spent(site) == []
    line = log(site)[-1]
    assert line["what"] == "refused"
    return f"{stopped.value}"


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "method": ("fedavg", {"methods": ["fedgm"]}, {}, "allows fedgm, not 'fedavg.update'"),
    "step": ("fedgm", {"methods": ["fedgm.other"]}, {}, "allows fedgm.other, not 'fedgm.distil'"),
    "unprotected": ("fedavg", {"unprotected": False}, {}, "no unprotected field, such as 'weights'"),
    "noise": ("fedavg-p", {"simulated_noise": False}, {}, "the server knows the seed"),
    "delta": ("fedavg-p", {"delta": 1e-6}, {}, "the run's delta is 1e-05"),
    "budget": (
        "fedavg-p",
        {"simulated_noise": False, "budget": 0.5},
        {"simulated_noise": False},
        "budget of 0.5",
    ),
    "public data": ("fedavg-p", {}, {"public": "secret"}, "the site has no public data 'secret' (public)"),
    "public data called noise": (
        "fedavg-p",
        {},
        {"public": "noise:secret"},
        "the site has no public data 'noise:secret' (public)",
    ),
    "no budget": ("fedavg-p", {"unprotected": False}, {}, "budget"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_policy_does_not_allow_is_refused_with_a_reason(
    case: str, digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    name, policy, changes, reason = CASES[case]
    site = make(0, **policy)
    assert reason in refused(site, federation(name, digits, [site], tmp_path / "run", **changes))


def test_a_site_whose_public_data_are_others_refuses_before_it_spends(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says what its public records are, of whatever place; a site has its own by that name."""
    specs: list[str] = []
    write_data(tmp_path / "common.npz", digits.test)
    write_data(tmp_path / "shuffled.npz", digits.test[torch.randperm(len(digits.test), generator=stream(0))])
    task = Experiment(
        data="digits", clients=2, model="convnet:width=8,depth=2", public=str(tmp_path / "common.npz"), noise="entropy"
    )
    method = spec_of("fedavg-p", digits).method

    def made(place: str) -> dict[str, Any]:
        (tmp_path / f"sites-{place}").mkdir(exist_ok=True)
        policy = {"methods": ["fedavg-p"], "unprotected": False, "simulated_noise": False, "budget": 1.3}
        policy["public"] = {str(tmp_path / "common.npz"): str(tmp_path / place)}
        sites = [make_site(tmp_path / f"sites-{place}", digits, client, **policy) for client in range(2)]

        def connect(spec: RunSpec) -> Any:
            specs.append(spec.text())
            return nullcontext(Direct(sites, spec))

        return run(Job(task, method, tmp_path / f"run-{place}", name="fedavg-p"), sites=connect)

    assert made("common.npz")["guarantee"]["holds"]
    with pytest.raises(TooFewReplies, match=r"public data '.*' are not the server's") as stopped:
        made("shuffled.npz")
    assert "differ" not in str(stopped.value)  # how, is the site's own business
    places = [tmp_path / f"sites-{name}" / "site-0" / "state" for name in ("common.npz", "shuffled.npz")]
    assert [len(read_charges(state)) for state in places] == [1, 0]
    assert "the labels differ" in (places[1] / "journal.jsonl").read_text()
    at = SiteJournal(places[1]).standing().at
    assert (at.accepted, at.ended) == (1, 1)
    shutil.rmtree(tmp_path / "sites-shuffled.npz")
    monkeypatch.setattr(public, "sample", lambda _: pytest.fail("another decoder would make it another run"))
    with pytest.raises(pytest.fail.Exception):
        made("shuffled.npz")  # by the sites, not by the server
    assert specs[2] == specs[1] != specs[0]


def test_a_lie_about_public_data_is_refused(digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path) -> None:
    stated: dict[str, Any] = {"records": 2, "labels": "0" * 64, "sums": (0.5, 1.0), "total": 2.0}
    spec = spec_of("fedavg-p", digits).replace(public_sample=stated)
    text = json.loads(spec.text())
    changes: list[dict[str, Any]] = [{"records": 3}, {"sums": [0.5]}, {"total": float("nan")}, {"records": 0}]
    for change in [*changes, {"labels": "short"}, {"sums": [0.5, 1e999]}]:
        with pytest.raises(Refused, match="the run's spec is invalid: 'public_sample"):
            RunSpec.read(json.dumps({**text, "public_sample": {**stated, **change}}))
    fed = federation("fedavg-p", digits, [site := make(0)], tmp_path / "run", public_sample=stated)
    assert "describes public data of no data set" in refused(site, fed)  # noise is the same everywhere


def test_a_resumed_run_sends_the_spec_that_it_began_with(digits: DataSet, tmp_path: Path) -> None:
    """Sites name a run's state by its spec: another message limit made them release again, for the same epsilon."""
    private = {"methods": ["fedavg-p"], "unprotected": False, "simulated_noise": False, "budget": 3.0}
    sites = [make_site(tmp_path, digits, client, **private) for client in range(2)]

    class Interrupted(Direct):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                if arrival.client == 1:
                    raise OSError("died before the second reply arrived")
                yield arrival

    def go(way: type[Direct], **more: Any) -> dict[str, Any]:
        task = {"data": "digits", "clients": 2, "model": "convnet:width=8,depth=2", "public": "noise=64", **more}
        method = spec_of("fedavg-p", digits).method
        job = Job(Experiment(**task, noise="entropy"), method, tmp_path / "run", name="fedavg-p")
        return run(job, sites=lambda spec: nullcontext(way(sites, spec)))  # type: ignore[arg-type, return-value]

    with pytest.raises(OSError, match="died"):
        go(Interrupted)
    with pytest.raises(
        ValueError, match=r"begun with max_bytes \(--max-message-mb\) = 512000000, now it is 600000000; the sites"
    ):
        go(Direct, max_message_mb=600)
    assert go(Direct)["guarantee"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert [len(spent(site)) for site in sites] == [1, 1]


@pytest.mark.parametrize("name", ["fedgm-labels", "scaffold"])
def test_records_that_change_during_a_run_end_its_replies(name: str, digits: DataSet, tmp_path: Path) -> None:
    """Two releases of disjoint parts of the records would be of overlapping ones, for the same epsilon."""
    few = {"training": {"epochs": 1}, "matching": {"nets": 1, "batch_size": 8}, "denoising": {"epochs": 1}}
    local = {"lr": 0.05, "momentum": 0.0, "max_steps": 1}
    method = methods.find(name)(**{"fedgm-labels": {"ipc": 1, **few}, "scaffold": {"rounds": 2, "local": local}}[name])
    half = digits.train[:700]
    site = make_site(tmp_path, digits, 0, half, methods=[name], public_images=True)

    class Changing(Direct):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            if self.replies:
                write_data(site.data, half[torch.randperm(700, generator=stream(0))])
            yield from super().exchange(request, clients, sent)

    task = Experiment(data="digits", clients=1, model="convnet:width=8,depth=2", noise="simulated")
    way: list[Direct] = []

    def connect(spec: RunSpec) -> Any:
        way.append(Changing([site], spec))
        return nullcontext(way[0])

    with pytest.raises(TooFewReplies, match="the site gives no reply"):
        run(Job(task, method, tmp_path / "run", name=name), sites=connect)
    assert way[0].replies[1] == NO_REPLY
    assert "the records have changed since the run's first question" in log(site)[-1]["detail"]


def test_a_yes_holds_for_the_approved_spec_and_nothing_is_loaded_before_it(
    digits: DataSet, make: Callable[..., SitePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(0, approval="ask")
    request = wire.pack({}, {"step": "update", "exchange": 0})
    mild, greedy = (spec_of("fedavg", digits, seed=seed).text() for seed in (0, 1))
    monkeypatch.setattr(answers, "_digest", lambda data: "0" * 64)  # as if the server had found a collision

    def reply(text: str) -> str:
        return str(wire.envelope(answer(site, text, request))["error"])

    with monkeypatch.context() as patch:
        patch.setattr(RunSpec, "facts", property(lambda _: pytest.fail("the server's model was built")))
        assert "waits for the approval" in reply(mild)
    (waits,) = decisions.waiting(site)
    decisions.decide(site, waits["run"], yes=True)
    assert "the header has no object called 'fields'" in reply(mild)  # so it was read
    assert "waits for the approval" in reply(greedy)


def test_code_of_others_is_run_only_where_the_policy_says_so(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    site = make(0, methods=["fedavg", "small:Gossip"], own_code=["small:another"])
    text = json.loads(spec_of("fedavg", digits).text())
    request = wire.pack({}, {"step": "update", "exchange": 0})
    for change, reason in (
        ({"method": "small:Gossip", "settings": {}}, "does not allow the code 'small:Gossip' (own_code)"),
        ({"model": "os:getcwd"}, "does not allow the code 'os:getcwd' (own_code)"),
        ({"models": ["small:other"]}, "does not allow the code 'small:other' (own_code)"),
    ):
        step_name = "tell" if "method" in change else "update"
        request = wire.pack({}, {"step": step_name, "exchange": 0})
        assert reason in str(wire.envelope(answer(site, json.dumps({**text, **change}), request))["error"])


def test_code_in_a_file_is_never_run_by_a_site(make: Any, digits: DataSet, tmp_path: Path) -> None:
    """Not even where code of other packages may run: a server could name any file on the site's machine."""
    (tmp_path / "their_net.py").write_text("raise SystemExit('this ran')")
    names = [f"{tmp_path}/their_net.py:net", "their_net.py:net"]
    here = make(own_code=names, methods=["fedavg"])
    for model in names:
        spec = spec_of("fedavg", digits)
        with pytest.raises(Refused, match="names code in a file"):
            here.check_run(spec.replace(model=model), "update")


def test_what_a_step_complains_about_stays_in_the_site_s_log(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.TABLE, "gossip", "small:Gossip")
    site = make(0, methods=["gossip"])
    text = json.dumps({**json.loads(spec_of("fedavg", digits).text()), "method": "gossip", "settings": {}})
    request = wire.encode({}, (), spec_of("fedavg", digits).facts, {"step": "tell", "exchange": 0})
    reply = answer(site, text, request)
    assert reply == NO_REPLY
    assert "the patient's pixels" in log(site)[-1]["detail"]


def test_a_backbone_is_used_only_where_the_policy_lists_it_and_its_weights_are_the_run_s(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site_backbone.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "site_backbone:net"
    backbone = backbones.load(name, (1, 8, 8))
    facts = {"shape": [5], "mean": [0.0], "std": [1.0], "model": "linear", "features": name}
    text = {**json.loads(spec_of("real", digits).text()), **facts, "backbone": backbone.digest}
    other = {**text, "backbone": "0" * 64}
    site = make(0, methods=["real"], features=[name, "site_backbone:none"])
    strict = site.model_copy(update={"features": ()})
    assert b"does not allow the backbone 'site_backbone:net' (features)" in asked(strict, text)
    assert b"has the SHA-256" in asked(site, other, step="select_vectors")
    lacking = {**text, "features": "site_backbone:none"}
    assert b"can't load the backbone 'site_backbone:none' (features)" in asked(site, lacking, step="select_vectors")
    assert log(site)[-1]["what"] == "refused"
    values, _ = wire.unpack(asked(site, text, step="select_vectors"))
    own = np.load(site.data)["x_train"]
    rows = rows_of(backbone, torch.from_numpy(own).reshape(-1, 1, 8, 8))
    (vectors,) = (value for value in values.values() if value.ndim == 2)
    assert vectors.shape[1] == 5 and all((torch.from_numpy(rows) == v).all(1).any() for v in vectors)
    assert asked(site, {**text, "shape": [6]}, step="select_vectors") == NO_REPLY
    assert "the site's vectors are 5, the run's are 6" in log(site)[-1]["detail"]


@pytest.mark.parametrize("what", ["lost", "emptied", "changed", "no key"])
def test_without_an_intact_ledger_nothing_is_released(
    what: str, digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    site = make(0, unprotected=False, simulated_noise=False, budget=5.0)
    fed = federation("fedavg-p", digits, [site], tmp_path / "run", simulated_noise=False)
    fed.spec.method.server(fed)
    file = site.state / "journal.jsonl"
    if what == "lost":
        file.unlink()
    elif what == "emptied":
        file.write_bytes(b"")
    elif what == "changed":
        file.write_bytes(file.read_bytes().replace(b"noise_multiplier", b"noise_multiplieR", 1))
    else:
        (site.state / "journal.key").unlink()
    other = federation("fedavg-p", digits, [site], tmp_path / "other", run="f" * 32, simulated_noise=False)
    with pytest.raises(files.Damaged, match="the site replies to nothing until its newest copy is back"):
        other.spec.method.server(other)
    assert other.transport.replies == []  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------- refusals that depend on the records


def asked(site: SitePolicy, text: dict[str, Any], **envelope: Any) -> bytes:
    """The reply to a question without weights."""
    return answer(site, json.dumps(text), wire.pack({}, {"step": "select", "exchange": 0, "fields": {}, **envelope}))


WITH_REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "classes": ({}, {"class_names": ["0", "1"]}, "the site's class '2' is not a class of the run"),
    "shape": ({}, {"shape": [1, 16, 16]}, "the site's images are 1 x 8 x 8, the run's are 1 x 16 x 16"),
    "few records": ({"min_records": 10_000}, {}, "the site has 719 records; its minimum is 10000 (min_records)"),
    "no data": ({"data": "none.npz"}, {}, "none.npz"),
    "the step": ({}, {"method": "gossip", "settings": {}}, "the patient's pixels"),
}


def test_a_site_resizes_its_pictures_to_the_size_of_its_policy(
    digits: DataSet, make: Callable[..., SitePolicy]
) -> None:
    text = {**json.loads(spec_of("real", digits).text()), "shape": [1, 6, 6]}
    site = make(0, methods=["real"])
    assert asked(site, text) == NO_REPLY
    assert asked(site.model_copy(update={"size": 6}), text) != NO_REPLY


@pytest.mark.parametrize("case", WITH_REASONS)
def test_whatever_depends_on_the_records_is_the_same_reply(
    case: str, digits: DataSet, make: Callable[..., SitePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.TABLE, "gossip", "small:Gossip")
    policy, changes, reason = WITH_REASONS[case]
    site = make(0, **{"methods": ["real", "gossip"], **policy})
    text = {**json.loads(spec_of("real", digits).text()), **changes}
    step = "tell" if case == "the step" else "select"
    # what is wrong with the request itself is said first, whatever the records are
    assert b"step 'x' is not one of" in asked(site, text, step="x")
    assert b"exchange is -1" in asked(site, text, step=step, exchange=-1)
    assert asked(site, text, step=step) == NO_REPLY
    assert reason in log(site)[-1]["detail"]
    assert log(site)[-1]["what"] == "failed"


def test_a_run_that_failed_too_often_is_answered_no_more(digits: DataSet, make: Callable[..., SitePolicy]) -> None:
    site = make(0, methods=["real"], max_failures=2, min_records=10_000)
    text = json.loads(spec_of("real", digits).text())
    for _ in range(4):
        assert asked(site, text) == NO_REPLY
    assert [line["what"] for line in log(site)] == [*["asked", "accepted", "failed"] * 2, *["asked", "failed"] * 2]
    assert "2 questions of the run failed or went beyond the budget" in log(site)[-1]["detail"]
    generous = site.model_copy(update={"min_records": 1})
    assert asked(generous, text) == NO_REPLY  # not even if the data have changed since
    assert asked(generous, {**text, "run": "e" * 32}) != NO_REPLY


def test_a_site_answers_so_many_questions_and_runs(digits: DataSet, make: Callable[..., SitePolicy]) -> None:
    site = make(0, methods=["real"], max_questions=2, runs_per_day=2)
    text = json.loads(spec_of("real", digits).text())
    assert wire.unpack(asked(site, text))[0]
    assert wire.unpack(asked(site, text, exchange=1))[0]
    assert b"the run has asked 2 questions" in asked(site, text, exchange=2)
    assert wire.unpack(asked(site, {**text, "run": "e" * 32}))[0]
    assert b"begun 2 runs in the last day" in asked(site, {**text, "run": "d" * 32})


def without(records: Records, position: int) -> Records:
    return records[torch.arange(len(records)) != position]


@given(
    powers=st.tuples(st.floats(-9, -6) | st.floats(-2, 3), st.floats(-9, 9), st.floats(-9, 9)),
    seed=st.integers(0, 2**31),
    out=INDEX,
)
@example(powers=(-8.5, 0.0, 0.0), seed=9, out=0)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_public_number_makes_one_record_decide_whether_a_site_replies(
    powers: tuple[float, float, float], seed: int, out: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Records that a linear map separates, but for one: the server sees the same outcome with it and without it."""
    penalty, logit_noise, radius = (10.0**power for power in powers)
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (INSEPARABLE, 1, 4, 4), generator=rng, dtype=torch.uint8)
    unlabelled = Records(images, torch.zeros(INSEPARABLE, dtype=torch.int64), 10, Normalisation((0.5,), (0.25,)))
    method = FedAvgP(epsilon=0.01, head=HeadTraining(logit_noise=logit_noise))
    facts = {"run": f"{seed:032x}", "model": "convnet:width=8,depth=1", "public": "noise=9", "simulated_noise": False}
    spec = RunSpec.of(method, unlabelled, name="fedavg-p", **facts)
    model = spec.new_model()
    p = models.feature_width(model, spec.shape)
    features = PublicFeatures(state(model), torch.randn(p, generator=rng), torch.randn(p, 10, generator=rng), radius)
    labels = (features.rows(model, unlabelled) @ torch.randn(10, 10, generator=rng)).argmax(1)
    labels[out] = (labels[out] + 1) % 10
    records = Records(images, labels, 10, unlabelled.normalisation)
    text = json.loads(spec.text())
    if seed % 2:
        text["settings"]["head"]["penalty"] = penalty
    request = wire.encode(
        FedAvgP.train_head.payload({"features": features}),
        FedAvgP.train_head.request,
        spec.facts,
        {"step": "train_head", "exchange": 0},
    )
    outcomes = []
    for own in (records, without(records, out)):
        place = tmp_path_factory.mktemp("site")
        write_data(place / "data.npz", own)
        policy = {"client": 0, "data": "data.npz", "state": "state", "methods": ["fedavg-p"], "budget": 1e4}
        reply = answer(setup.site(place, policy), json.dumps(text), request)
        outcomes.append(wire.envelope(reply).get("error"))
    assert outcomes[0] == outcomes[1]


def test_a_policy_that_is_wrong_is_a_sentence(tmp_path: Path) -> None:
    place = tmp_path / "policy.toml"
    for content, reason in (
        ("client = ", "can't be read as TOML"),
        ('client = -1\ndata = "d"\nstate = "s"\nmethods = []', "is invalid: client is -1; it must be greater than"),
        (
            'client = 1\ndata = "d"\nstate = "s"\nmethods = []\nbudgets = 3',
            "is invalid: budgets is not a setting here; did you mean budget?",
        ),
    ):
        place.write_text(content)
        with pytest.raises(ValueError, match=reason):
            SitePolicy.read(place)
    with pytest.raises(ValueError, match="there is no policy .*none.toml'; make one with fedstill site init"):
        SitePolicy.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("min_records = true", "true is no value of this setting"),
        ("budget = true", "true is no value"),
        ("budget_per_run = true", "true is no value"),
        ("unprotected = 1", "write true or false, without quotes"),
        ('unprotected = "yes"', "write true or false, without quotes"),
        ('simulated_noise = "t"', "write true or false, without quotes"),
        ('schema_file = " "', "' ' is no path"),
        ('device = "cdua"', "'cdua' is no device; write cpu or cuda"),
        (
            'label_column = "a"\n[public]\np = "p.npz"\napproval = "ask"',
            "has 'approval' among its public data, which is a setting of the",
        ),
        ('[public]\np = ""', "'' is no path; leave it out"),
        ('[public]\nsum_budget = "total"', "has 'sum_budget' among its public data"),
    ],
)
def test_a_slip_in_a_policy_changes_nothing_without_a_word(line: str, reason: str, tmp_path: Path) -> None:
    place = tmp_path / "policy.toml"
    place.write_text(f'client = 1\ndata = "d"\nstate = "s"\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(reason)):
        SitePolicy.read(place)


def test_public_data_may_have_the_name_of_a_setting(tmp_path: Path) -> None:
    (tmp_path / "pub").mkdir()
    place = tmp_path / "policy.toml"
    place.write_text('client = 1\ndata = "d"\nstate = "s"\n[public]\npublic = "pub"\ndata = "pub"\n')
    assert SitePolicy.read(place).public == {"public": tmp_path / "pub", "data": tmp_path / "pub"}


@pytest.mark.parametrize("data", ["", "a\\u0000b", "~nobody-has-this-name/x"])
def test_a_path_that_is_none_is_a_sentence(data: str, tmp_path: Path) -> None:
    place = tmp_path / "policy.toml"
    place.write_text(f'client = 1\ndata = "{data}"\nstate = "s"\n')
    with pytest.raises(ValueError, match="is no path; leave it out|can't be found.*; write it in full"):
        SitePolicy.read(place)


def test_images_leave_no_site_under_a_label_budget(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    """Label privacy takes images as public; with these settings a site would send its images bit for bit."""
    allowed = {"methods": ["fedavg-p", "fedgm-labels"], "unprotected": False, "simulated_noise": False, "budget": 1.0}
    settings = {"ipc": 20, "epsilon": 0.5, "relabel": "none", "matching": {"nets": 1, "init": "real", "lr": 1e-9}}
    method = methods.find("fedgm-labels")(**settings)
    facts = {"name": "fedgm-labels", "run": RUN, "public": "noise=64", "simulated_noise": False}
    spec = small.spec_of(method, digits.train, **facts)
    request = wire.encode({}, method.distil_part.request, spec.facts, {"step": "distil_part", "exchange": 0})
    site = make(0, **allowed)
    tensors, header = wire.unpack(answer(site, spec.text(), request))
    assert not tensors and "error" in header and spent(site) == []
    assert "protects labels only" in (site.state / "journal.jsonl").read_text()
    open_site = make(1, **allowed, public_images=True)
    tensors, _ = wire.unpack(answer(open_site, spec.text(), request))
    assert len(tensors["images"]) == 200 and len(spent(open_site)) == 1
    # and there is one budget: what is left of it is not enough for a record-level release of .99
    fed = federation("fedavg-p", digits, [open_site], tmp_path / "run", simulated_noise=False, run="f" * 32)
    with pytest.raises(TooFewReplies):
        fed.spec.method.server(fed)
    assert len(spent(open_site)) == 1
