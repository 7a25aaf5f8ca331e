"""Masked sums in runs: the open total of the same whole numbers to the bit, on every engine, whoever is missing."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Int64
from safetensors.torch import load_file
from torch import Tensor, nn

import fedstill
from fedstill.engines import masked_sums
from fedstill.engines.client import Site
from fedstill.engines.server import ServerFederation, TooFewReplies
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.privacy.accounting import gaussian_epsilon, release_noise
from fedstill.privacy.integer_sums import IntegerClassSums
from fedstill.protocol import Client, Federation, Method, Released, Reply, Summed, step, wire
from fedstill.report import guarantees
from fedstill.runs.folder import RunFolder
from fedstill.sums.helpers import Helper
from fedstill.sums.masks import SumRefused

TASK = {"data": "digits", "clients": 6, "public": "held=200", "model": "convnet:width=8,depth=1"}


def go(out: Path, sums: str, method: str = "afl", **more: Any) -> fedstill.RunRecord:
    settings = TASK | {"workers": 0, "epsilon": None} | more
    return fedstill.run(method, sums=sums, out=out, **settings)


def weights(record: fedstill.RunRecord) -> bytes:
    return (record.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["afl", "gh-ofl", "deepafl"])
def test_the_masked_model_is_the_open_one_to_the_bit(tmp_path: Path, method: str) -> None:
    rounds = 3 if method == "deepafl" else 1
    few: dict[str, Any] = {"rounds": rounds, "width": 20, "expanded": 24} if rounds > 1 else {}
    opened = go(tmp_path / "open", "open", method, steps=256, **few)
    masked = go(tmp_path / "masked", "masked", method, **few)
    assert weights(opened) == weights(masked)
    assert masked["bytes_up"] < 1.3 / 2 * opened["bytes_up"] + rounds * 6 * 1000  # the open one sends int64
    assert masked["sums"][0]["clients"] == 6 and masked["sums"][0]["bytes_from_a_helper"] > 1000


def test_the_mean_of_masked_heads_is_the_open_one_to_half_a_step(tmp_path: Path) -> None:
    runs = [go(tmp_path / sums, sums, "fedavg-p", head={"penalty": 0.3}) for sums in ("open", "masked")]
    opened, masked = (load_file(record.folder / "model.safetensors") for record in runs)
    gaps = {name: float((masked[name].double() - opened[name].double()).abs().max()) for name in opened}
    entries = max(value.numel() for name, value in opened.items() if gaps[name])
    step = 2**0.5 / 0.3 / (100 * entries**0.5)
    assert 0 < max(gaps.values()) < step / 2 * 1.01
    assert runs[1]["sums"][0]["clients"] == 6 and abs(runs[0]["accuracy"] - runs[1]["accuracy"]) < 0.01


def test_masked_heads_need_noise_once(tmp_path: Path) -> None:
    opened, masked = (go(tmp_path / sums, sums, "fedavg-p", epsilon=0.5) for sums in ("open", "masked"))
    assert masked["accuracy"] > opened["accuracy"] + 0.05
    assert masked.guarantee.adders == 5 and opened.guarantee.adders is None
    assert masked.guarantee.epsilon == pytest.approx(0.5, rel=1e-3)


def test_published_heads_are_not_masked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'published', whose heads are no whole numbers"):
        go(tmp_path / "run", "masked", "fedavg-p", privacy="published", epsilon=1.0)


@pytest.mark.slow
def test_workers_give_the_same_model(tmp_path: Path) -> None:
    """Flower's engine does too, with a private scale before (`test_column_scale`)."""
    assert weights(go(tmp_path / "one", "masked")) == weights(go(tmp_path / "other", "masked", workers=2))


def test_clients_that_do_not_arrive_cost_nothing(tmp_path: Path) -> None:
    facts = {"drop": 0.3, "min_clients": 3, "seed": 1}
    masked = go(tmp_path / "masked", "masked:least=3", **facts)
    opened = go(tmp_path / "open", "open", steps=256, **facts)
    assert 3 <= masked["sums"][0]["clients"] < 6
    assert weights(masked) == weights(opened)


def test_both_epsilons_are_those_of_the_theorem(tmp_path: Path) -> None:
    record = go(tmp_path / "run", "masked:colluding=0.34", epsilon=2.0)
    found = record.guarantee
    assert found.adders == 3  # of 6, 34 % rounded up
    assert found.epsilon == pytest.approx(2.0, rel=1e-3) and found.epsilon <= 2.0
    multiplier = release_noise(2.0, found.delta)
    assert found.alone_epsilon == pytest.approx(gaussian_epsilon(multiplier / 3**0.5, found.delta), rel=0.01)
    assert "up to 1 of 4 helpers and 3 clients of a sum of 6 or more" in str(found.adversary)
    assert f"(alone eps {guarantees.round_up(found.alone_epsilon or 0)})" in guarantees.words(found)
    assert any("3 honest clients together" in sentence for sentence in guarantees.explained(found, sent=True))


@pytest.mark.parametrize(("clients", "least", "colluding"), [(100, 50, 0.1), (6, 3, 0.34), (1000, 700, 0.1), (5, 5, 0)])
def test_a_server_may_choose_a_set_with_all_who_work_with_it(clients: int, least: int, colluding: float) -> None:
    chosen = sorted(range(clients), key=lambda client: client >= colluding * clients)[:least]
    assert masked_sums.adders_of(least, clients, colluding) == sum(client >= colluding * clients for client in chosen)


def test_nothing_of_one_client_is_on_the_server_s_disk(tmp_path: Path) -> None:
    """The reply has no number of the client's sums, and the helpers' keys are gone with the run."""
    record = go(tmp_path / "run", "masked", keep_replies=True)
    assert not (record.folder / "helpers").exists()
    held = sorted(record.folder.glob("journal/**/*"))
    sizes = [file for file in held if file.is_file() and file.stat().st_size > 10_000]
    assert sizes
    for file in sizes:
        if "reply" in file.name or file.suffix in (".reply", ".bin"):
            data = np.frombuffer(file.read_bytes()[-10_000:-1000], np.uint8)
            counts = np.bincount(data, minlength=256)
            assert ((counts - len(data) / 256) ** 2 / (len(data) / 256)).sum() < 255 + 6 * 22.6


class Tampering:
    """The server's way to the clients, on which one reply is changed."""

    @staticmethod
    def of(field: str) -> Any:
        mask = masked_sums.MaskedStep._masked

        def changed(self: Any, method: Any, client: Any, **arguments: Any) -> Any:
            reply = mask(self, method, client, **arguments)
            if client.id != 2:
                return reply
            value = getattr(reply, field)
            raw = value.value if isinstance(value, Released) else value
            raw = raw.clone()
            raw.view(-1)[5] ^= 1
            return replace(reply, **{field: Released(raw) if isinstance(value, Released) else raw})

        return changed


@pytest.mark.parametrize("field", ["masked", "key", "boxes", "signature"])
def test_an_upload_that_was_changed_on_its_way_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(masked_sums.MaskedStep, "_masked", Tampering.of(field))
    record = go(tmp_path / "run", "masked:least=4", min_clients=4)
    (refused,) = record["refused"]
    assert refused["client"] == 2 and "client 2" in refused["reason"]
    assert record["sums"][0]["clients"] == 5


def test_a_run_that_was_killed_at_the_opening_shows_the_helpers_the_same_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"drop": 0.3, "min_clients": 3, "seed": 1}

    def killed(*asked: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as ending:
        ending.setattr(Helper, "open", killed)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "run", "masked:least=3", **facts)
    signed = (tmp_path / "run/helpers/0/signed.jsonl").read_text()
    record = go(tmp_path / "run", "masked:least=3", **facts)
    assert signed.count("\n") == 1 and weights(record) == weights(go(tmp_path / "whole", "masked:least=3", **facts))


@pytest.mark.parametrize(("absent", "works"), [([1], True), ([1, 2], False)])
def test_one_helper_may_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: Sequence[int], works: bool
) -> None:
    agree = Helper.agree

    def answers(self: Helper, *asked: Any) -> bytes:
        if self.number in absent:
            raise ConnectionError("no route")
        return agree(self, *asked)

    monkeypatch.setattr(Helper, "agree", answers)
    if works:
        assert weights(go(tmp_path / "a", "masked")) == weights(go(tmp_path / "b", "open", steps=256))
        return
    with pytest.raises(SumRefused, match=r"2 of 4 helpers answer and 3 are needed \(helpers 1 .*, 2 .* do not\)"):
        go(tmp_path / "a", "masked")
    monkeypatch.setattr(Helper, "agree", agree)
    assert go(tmp_path / "a", "masked").accuracy is not None  # nothing was lost


# Methods that misuse a sum --------------------------------------------------------------------------------------------


class Total(Reply):
    sums: Summed[Int64[Tensor, "classes dims"]]


class Plain(Reply):
    sums: Released[Int64[Tensor, "classes dims"]]


class Sum(Method):
    """A sum, as somebody's own method."""

    def server(self, fed: Federation) -> nn.Module:
        fed.sum(self.total, exactly={"dims": 4})
        return fed.new_model()

    @step
    def total(self, client: Client) -> Total:
        rows = client.train.images.flatten(1)[:, :4]
        mechanism = IntegerClassSums(num_classes=10, radius=1.0, noise_multiplier=2.0, adders=client.adders)
        return Total(sums=client.release(mechanism, (rows, client.train.labels)))


class Leaks(Sum):
    """A share of the noise in a reply that the server sees."""

    def server(self, fed: Federation) -> nn.Module:
        fed.ask(self.seen, exactly={"dims": 4})
        return fed.new_model()

    @step
    def seen(self, client: Client) -> Plain:
        rows = client.train.images.flatten(1)[:, :4]
        mechanism = IntegerClassSums(num_classes=10, radius=1.0, noise_multiplier=2.0, adders=client.adders)
        return Plain(sums=client.release(mechanism, (rows, client.train.labels)))


class Counts(Sum):
    """Noise of more clients than the run has, in open sums."""

    @step
    def total(self, client: Client) -> Total:
        rows = client.train.images.flatten(1)[:, :4]
        mechanism = IntegerClassSums(num_classes=10, radius=1.0, noise_multiplier=2.0, adders=50)
        return Total(sums=client.release(mechanism, (rows, client.train.labels)))


class Reals(Sum):
    """Real numbers in a sum."""

    @step
    def total(self, client: Client) -> Total:
        return Total(sums=Released(torch.ones(10, 4)))


class NoSize(Sum):
    """No size of a dimension."""

    def server(self, fed: Federation) -> nn.Module:
        fed.sum(self.total)
        return fed.new_model()


def own(kind: type[Method], out: Path, sums: str = "masked", **more: Any) -> dict[str, Any]:
    experiment = Experiment(data="digits", clients=5, workers=0, model="linear", sums=sums, **more)
    return run(Job(experiment, kind(), out))


@pytest.mark.parametrize(
    ("kind", "sums", "why"),
    [
        (Leaks, "masked", "the server sees the field 'sums' of the step seen of each client"),
        (Counts, "open", r"counts on the noise of 50 clients, but in this run 1 add theirs; pass adders=client.adders"),
        (Reals, "masked", "field 'sums' of Total is torch.float32; a masked sum takes whole numbers"),
        (NoSize, "masked", r"fed.sum needs the size of 'dims' .* exactly=\{'dims': ...\}"),
        (Sum, "masked:width=2", r"may reach .* but masks of 2 bytes hold 3.28e\+04 at most; use --sums masked:width=4"),
        (Sum, "masked:colluding=0.9", "leaves none whose noise counts"),
    ],
)
def test_a_misuse_is_one_sentence(tmp_path: Path, kind: type[Method], sums: str, why: str) -> None:
    with pytest.raises((TypeError, ValueError, TooFewReplies), match=why):
        own(kind, tmp_path / "run", sums)


def test_a_client_sends_no_share_of_noise_in_sight_whatever_the_server_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerFederation, "_check_seen", lambda self, step: None)
    with pytest.raises(TooFewReplies, match="released with a share of the noise, but its reply is no sum"):
        own(Leaks, tmp_path / "run")


class Two(Sum):
    """Another sum of the same numbers, with hardly any noise."""

    @step
    def other(self, client: Client) -> Total:
        rows = client.train.images.flatten(1)[:, :4]
        mechanism = IntegerClassSums(num_classes=10, radius=1.0, noise_multiplier=0.01, adders=client.adders)
        return Total(sums=client.release(mechanism, (rows, client.train.labels)))


def test_clients_who_were_asked_for_another_sum_are_in_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of the others would not be what the first client's epsilon counts on."""
    answer = Site.answer

    def swapped(self: Site, client: int, request: bytes, *more: Any) -> bytes:
        tensors, header = wire.unpack(request)
        return answer(self, client, wire.pack(tensors, header | {"step": "other"}) if client else request, *more)

    def renamed(self: Site, client: int, request: bytes, *more: Any) -> bytes:
        tensors, header = wire.unpack(swapped(self, client, request, *more))
        return wire.pack(tensors, json.loads(json.dumps(header).replace('"other"', '"total"')))

    monkeypatch.setattr(Site, "answer", renamed)
    with pytest.raises(TooFewReplies, match="the signature of client 1 is not by its key for this sum"):
        own(Two, tmp_path / "run")


def test_ones_own_sum_works_both_ways(tmp_path: Path) -> None:
    assert own(Sum, tmp_path / "open", "open")["guarantee"]["adders"] is None
    assert own(Sum, tmp_path / "masked")["guarantee"]["adders"] == 4


def test_a_reply_with_a_sum_and_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="has the sum 'sums' beside 'count'"):

        class Mixed(Reply):
            sums: Summed[Int64[Tensor, "classes dims"]]
            count: int


@pytest.mark.parametrize(
    ("sums", "why"),
    [
        ("secret", "it must be open, or masked with options"),
        ("open:helpers=3", "it must be open, or masked"),
        ("masked:helpers=1", "helpers is 1"),
        ("masked:helper=4", "helper is not a setting here"),
        ("masked:width=9", "width is 9"),
    ],
)
def test_unknown_sums_are_refused(sums: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Experiment(sums=sums)


def test_contradicting_numbers_of_clients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a masked sum of fewer than 6 clients is not opened"):
        go(tmp_path / "a", "masked", min_clients=4)
    with pytest.raises(ValueError, match="a masked sum has 2 at least"):
        go(tmp_path / "b", "masked", clients=1)


def test_what_opening_costs_is_counted(tmp_path: Path) -> None:
    record = go(tmp_path / "run", "masked")
    (cost,) = record["sums"]
    assert cost["seconds"] >= 0 and cost["bytes_to_a_helper"] > 6 * 500
    assert json.loads((RunFolder(record.folder).sums / "000000.json").read_text()) == [0, 1, 2, 3, 4, 5]


def test_an_estimate_needs_no_helper_and_writes_nothing(tmp_path: Path) -> None:
    from fedstill.experiment.estimate import estimate

    experiment = Experiment(**(TASK | {"sums": "masked", "workers": 0}))
    found = estimate(Job(experiment, "afl", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    record = go(tmp_path / "real", "masked", epsilon=1.0)
    assert found.bytes_up == pytest.approx(record["bytes_up"], rel=0.01)
    assert found.guarantee.adders == record.guarantee.adders


def lines(record: fedstill.RunRecord) -> Iterator[str]:
    yield from (record.folder / "journal/spent.jsonl").read_text().splitlines()


def test_open_runs_list_no_shares(tmp_path: Path) -> None:
    assert not any("adders" in line for line in lines(go(tmp_path / "open", "open", epsilon=1.0)))
    assert all('"adders": 5' in line for line in lines(go(tmp_path / "masked", "masked", epsilon=1.0)))


def test_masked_uploads_are_used_once(tmp_path: Path) -> None:
    """Neither extended, nor repeated with another server, nor taken into another comparison: the keys are gone."""
    from fedstill.experiment.reuse import begin, leave_out, prepare, read_job, repeat

    record = go(tmp_path / "run", "masked:least=5", min_clients=5)
    job = read_job(record.folder, tmp_path / "next", "")
    for use in (begin, repeat, lambda run, job: leave_out(run, 1, job)):
        with pytest.raises(ValueError, match="has masked sums, whose uploads are sealed to that run's helpers"):
            use(record.folder, job)
    prepare(job, [record.folder])
    assert not (tmp_path / "next").exists()


def test_membership_is_inferred_from_a_model_of_a_masked_sum(tmp_path: Path) -> None:
    """Each world of the attack has its own helpers; the total is no privacy by itself, so the attack has something."""
    record = go(tmp_path / "run", "masked", limit=400)
    found = fedstill.attack(record, "membership", shadows=4, client=0)
    assert found
    with pytest.raises(ValueError, match="has masked sums, so nobody has seen a client's upload"):
        fedstill.attack(record, "uploads")


def test_too_few_usable_uploads_fix_no_set_and_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as tampered:
        tampered.setattr(masked_sums.MaskedStep, "_masked", Tampering.of("boxes"))
        with pytest.raises(TooFewReplies, match=r"5 of 6 clients gave a usable reply .* client 2"):
            go(tmp_path / "run", "masked")
    assert not (tmp_path / "run/sums/000000.json").exists()
    assert not any(place.read_text() for place in (tmp_path / "run/helpers").glob("*/signed.jsonl"))
    assert go(tmp_path / "run", "masked")["sums"][0]["clients"] == 6


@pytest.mark.parametrize("method", ["fedavg", "fedgm", "fedpft", "dense"])
def test_a_method_whose_uploads_are_seen_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=r"the server sees the field '.*' of the step .* use --sums open"):
        fedstill.run(method, sums="masked", out=tmp_path / "run", workers=0, **TASK)
