"""Masked sums of real sites: whom a site trusts, what it charges, and what it does as a helper."""

import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_sites
import tomli_w
import torch
import yaml

from fedstill import schema
from fedstill.data.sources import DataSet
from fedstill.engines import helper_calls
from fedstill.engines.masked_sums import MaskedReply
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment.run import run
from fedstill.privacy.accounting import gaussian_epsilon, release_noise
from fedstill.protocol import wire
from fedstill.runs.folder import RunFolder
from fedstill.sites import seals
from fedstill.sites.server import roster, serve
from fedstill.sites.site import answer, evidence, setup, site_journal, site_sums
from fedstill.sites.site import policy as site_policy
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sums.helpers import Helper
from fedstill.sums.masks import SumRefused

CLIENTS = 3
SUMS = "masked:helpers=4,records=10000"


class House:
    """Three sites with records, who are helpers too, and a trustee without any."""

    def __init__(self, folder: Path, digits: DataSet, **policy: Any) -> None:
        self.folder, self.roster = folder, folder / "roster.toml"
        self.absent: set[int] = set()
        self.change: Callable[[int, bytes, bytes], bytes] = lambda client, request, reply: reply
        parts = np.array_split(np.arange(len(digits.train)), CLIENTS)
        self.places = [folder / f"site-{client}" for client in range(CLIENTS + 1)]
        for client, place in enumerate(self.places):
            place.mkdir()
            settings: dict[str, Any] = {"client": client, "state": "state", "helper": True}
            if client < CLIENTS:
                real_sites.write_data(place / "data.npz", digits.train[torch.from_numpy(parts[client])])
                settings |= {"data": "data.npz", "methods": ["afl"], "budget": 8.0}
            setup.site(place, settings)
        prints = [site_sums.prints(self.policy(client)) for client in range(CLIENTS + 1)]
        self.partners = [own["partner"] for own in prints]
        for client in range(CLIENTS):
            self.edit(client, helpers=[own["helper"] for own in prints], **policy)
        entries = []
        for client, place in enumerate(self.places):
            keys = site_sums.keys_of(self.policy(client).state)
            line = certificate_line(place, client, keys.public)
            entries.append(roster.Member(client=client, key=line, node=100 + client, sums=keys.public, helper=True))
        roster.write(self.roster, roster.Roster(site=tuple(entries)))

    def policy(self, client: int) -> SitePolicy:
        return SitePolicy.read(self.places[client] / "policy.toml")

    def edit(self, client: int, **settings: Any) -> None:

        place = self.places[client] / "policy.toml"
        changed = {**tomllib.loads(place.read_text()), **settings}
        place.write_text(tomli_w.dumps({name: value for name, value in changed.items() if value is not None}))

    def settings(self, name: str = "run", **content: Any) -> dict[str, Any]:
        file = self.folder / f"{name}.yaml"
        task = {"method": "afl", "data": "digits", "clients": CLIENTS, "model": "scattering", "noise": "entropy"}
        afl = {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 16}}
        file.write_text(yaml.safe_dump({**task, "sums": SUMS, "public": "noise=64", "afl": afl, **content}))
        return {"file": str(file), "out": str(self.folder / name), "roster": str(self.roster), "wait": 0.0}

    def serve(self, name: str = "run", **content: Any) -> dict[str, Any]:
        serve.serve(partial(Net, self), self.settings(name, **content))
        summary: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text())
        return summary


def certificate_line(place: Path, client: int, sums: str) -> str:
    from fedstill.sites.certificates import read_public, site_key, sums_of

    text = site_key(place / "site.key", client, sums).read_text()
    assert sums_of(text) == sums
    return read_public(text)


class Net(Transport):
    """The way of a server to the sites of a house, each of which signs its replies."""

    def __init__(self, house: House, spec: str, clients: int, *, nodes: Mapping[int, int], **_: Any) -> None:
        self._house, self._spec = house, spec
        assert all(node == 100 + client for client, node in nodes.items() if client < clients)

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for client in clients:
            sent(client)
            if client in self._house.absent:
                yield Arrival(client, b"", "no site replies for it")
                continue
            house = self._house
            reply = house.change(client, request, answer.answer(house.policy(client), self._spec, request))
            key = house.places[client] / "site.key"
            receipt = site_journal.receipt(house.policy(client).state)
            signature = seals.sign_reply(key, self._spec, request, reply, receipt)
            yield Arrival(client, reply, signature=signature, receipt=receipt)


@pytest.fixture
def house(tmp_path: Path, digits: DataSet) -> House:
    return House(tmp_path, digits)


def test_real_sites_get_a_masked_sum_opened_by_their_peers_and_a_trustee(house: House) -> None:
    summary = house.serve()
    assert summary["sums"][0]["clients"] == CLIENTS
    guarantee = summary["guarantee"]
    assert guarantee["adders"] == 2, "one of three may work with the server"
    assert guarantee["epsilon"] == pytest.approx(1.0, abs=0.01)
    assert guarantee["alone_epsilon"] > 1.3
    for client in range(CLIENTS):
        policy = house.policy(client)
        (charge,) = read_charges(policy.state)
        spent = evidence.budget(policy, SiteJournal(policy.state).standing())["spent"]["record"]["epsilon"]
        assert charge.entry.counts_alone
        assert spent == pytest.approx(guarantee["alone_epsilon"], rel=0.01), "its own share is what the site charges"
    calls = [line["detail"] for line in answer.log.read(house.policy(CLIENTS).state) if line["what"] == "answered"]
    assert calls == [f"as a helper: {kind}" for kind in ("check", "agree", "open")]
    assert house.serve() == summary, "nothing is asked again"


def test_the_total_is_that_of_open_sums_to_the_bit(house: House, digits: DataSet) -> None:
    """Whole numbers are added without noise, by masks at real sites and in the open at simulated ones."""
    for client in range(CLIENTS):
        house.edit(client, unprotected=True, budget=None)
    masked = house.serve("masked", afl={"epsilon": None, "extractor": {"pretrain": "none"}, "space": {"dims": 16}})
    open_ = house.serve(
        "open",
        sums="open",
        afl={"epsilon": None, "extractor": {"pretrain": "none"}, "space": {"dims": 16}, "steps": 256},
    )
    assert masked["accuracy"] == open_["accuracy"]
    models = [(house.folder / name / "model.safetensors").read_bytes() for name in ("masked", "open")]
    assert models[0] == models[1]


def test_one_helper_may_be_absent_and_two_stop_the_run_until_they_are_back(house: House) -> None:
    house.absent = {3}
    assert house.serve("one")["sums"][0]["clients"] == CLIENTS

    def mute(client: int, request: bytes, reply: bytes) -> bytes:
        call = helper_calls.MARK in wire.envelope(request)
        return wire.pack({}, {"error": "the site gives no reply"}) if call and client in (0, 3) else reply

    house.change, house.absent = mute, set()
    with pytest.raises(SumRefused, match=r"2 of 4 helpers answer and 3 are needed \(helpers 0 .*, 3 .* start again"):
        house.serve("two")
    before = [len(read_charges(house.policy(client).state)) for client in range(CLIENTS)]
    house.change = lambda client, request, reply: reply
    assert house.serve("two")["sums"][0]["clients"] == CLIENTS
    assert [len(read_charges(house.policy(client).state)) for client in range(CLIENTS)] == before, "nobody pays twice"


def test_a_site_takes_part_only_with_helpers_that_its_own_operator_named(house: House) -> None:
    house.edit(1, helpers=site_prints(house)[:3])
    with pytest.raises(RuntimeError, match="2 of 3 clients .* client 1: refused by the site: helper 3 of the run"):
        house.serve()
    assert read_charges(house.policy(1).state) == []
    house.edit(1, helpers=[])
    with pytest.raises(RuntimeError, match="which the site's policy does not name; ask that site's operator"):
        house.serve("none")


def test_two_keys_of_one_fingerprint_are_one_helper(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "-".join(["abcd"] * 5)
    for client in range(CLIENTS):
        house.edit(client, helpers=[one])
    monkeypatch.setattr(site_sums, "fingerprint", lambda signer, box: one)  # in place of 2^40 tries
    with pytest.raises(RuntimeError, match="two helpers of the run's masked sums have the fingerprint abcd-"):
        house.serve()


def test_a_site_may_ask_that_two_helpers_can_be_traitors(house: House) -> None:
    house.edit(1, traitors=2)
    with pytest.raises(RuntimeError, match="client 1: .* the run's masked sums hold against 1 helpers"):
        house.serve()
    house.serve("two", sums="masked:helpers=4,traitors=2,records=10000")
    assert len(read_charges(house.policy(1).state)) == 1


def site_prints(house: House) -> list[str]:
    return [site_sums.prints(house.policy(client))["helper"] for client in range(CLIENTS + 1)]


def test_a_server_that_gives_a_site_another_key_is_refused(house: House) -> None:
    """The server takes an upload under a key of its own, to open it with helpers it does not control."""
    own = roster.load(house.roster)
    strange = Helper(house.folder / "strange", 0, lambda _: None).keys.public
    members = [m.model_copy(update={"sums": strange, "helper": False}) if m.client == 0 else m for m in own.site]
    roster.write(house.roster, roster.Roster(site=tuple(members)))
    with pytest.raises(RuntimeError, match="client 0: refused by the site: the run has another key for this site's"):
        house.serve(sums="masked:helpers=3,records=10000")


def test_a_budget_of_the_total_counts_on_partners_alone(tmp_path: Path, digits: DataSet) -> None:
    house = House(tmp_path, digits, sum_budget="total")
    with pytest.raises(RuntimeError, match="counts on 2 honest clients, but 2 of its 3 are no partners .* have 1 that"):
        house.serve("strangers")
    for client in range(CLIENTS):
        house.edit(client, partners=[house.partners[other] for other in range(CLIENTS) if other != client])
    summary = house.serve("partners")
    (charge,) = read_charges(house.policy(0).state)
    found = SiteJournal(house.policy(0).state).standing()
    spent = evidence.budget(house.policy(0), found)["spent"]["record"]["epsilon"]
    assert not charge.entry.counts_alone
    assert spent == pytest.approx(summary["guarantee"]["epsilon"], rel=0.01)
    house.edit(0, partners=[house.partners[1]])
    with pytest.raises(RuntimeError, match="counts on 3 honest clients, but 1 of its 3 are no partners .* have 2 that"):
        house.serve("all", sums=f"{SUMS},colluding=0")


def test_a_site_that_is_no_helper_of_its_policy_answers_as_none(house: House) -> None:
    house.edit(2, helper=False)
    house.edit(3, helper=False)
    with pytest.raises(SumRefused, match="does not make it a helper of masked sums"):
        house.serve()


def test_a_helper_signs_no_second_set_however_it_is_asked(house: House) -> None:
    """A server keeps a client back at the second asking, and asks each helper by itself."""
    seen: list[tuple[RunSpec, dict[int, bytes]]] = []
    texts: list[str] = []

    class Spying(Net):
        def __init__(self, house: House, spec: str, clients: int, **options: Any) -> None:
            super().__init__(house, spec, clients, **options)
            texts.append(spec)

        def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
            for arrival in super().exchange(request, clients, sent):
                if helper_calls.MARK in wire.envelope(request):
                    seen.append((RunSpec.read(texts[0]), {0: request}))
                yield arrival

    serve.serve(partial(Spying, house), house.settings(sums=f"{SUMS},least=2,colluding=0", min_clients=2))
    spec, sums = seen[0][0], seen[0][0].sums
    assert sums is not None
    agreed = next(r[0] for _, r in seen if wire.envelope(r[0])[helper_calls.MARK] == "agree")
    make = lambda *size: sums.terms(spec.digest, *size)  # noqa: E731
    terms, call = helper_calls.decode(agreed, wire.envelope(agreed), make)
    assert len(call.uploads) == CLIENTS
    fewer = helper_calls.encode("agree", terms, call.uploads[:2])
    for client in range(CLIENTS + 1):
        reply = answer.answer(house.policy(client), texts[0], fewer)
        assert "has signed another set of clients" in wire.envelope(reply)["refused"]
        again = answer.answer(house.policy(client), texts[0], agreed)
        assert "signature" in wire.envelope(again), "the same set is signed as often as it is asked"
    early = helper_calls.encode("open", terms, call.uploads, {0: b"x" * 64})
    assert "must" in wire.envelope(answer.answer(house.policy(0), texts[0], early))["refused"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, h: (t, {**h, "helper": "tell"}), "it can check, agree and open"),
        (lambda t, h: (t, {**h, "exchange": -1}), "exchange is -1"),
        (lambda t, h: (t, {**h, "length": True}), "length is True"),
        (lambda t, h: (t, {**h, "step": 7}), "step is 7"),
        (lambda t, h: ({n: v for n, v in t.items() if n != "clients"}, h), "whole numbers from 0"),
        (lambda t, h: ({**t, "keys": t["keys"][:, :8].contiguous()}, h), "keys of a helper's question"),
        (lambda t, h: ({**t, "boxes": t["boxes"][:1]}, h), "boxes of a helper's question"),
        (lambda t, h: ({**t, "clients": -t["clients"] - 1}, h), "whole numbers from 0"),
    ],
)
def test_a_malformed_question_to_a_helper_is_refused(house: House, change: Any, reason: str) -> None:
    asked: list[bytes] = []

    def note(client: int, request: bytes, reply: bytes) -> bytes:
        if helper_calls.MARK in wire.envelope(request):
            asked.append(request)
        return reply

    house.change = note
    texts: list[str] = []

    def connect(spec: str, clients: int, **options: Any) -> Net:
        texts.append(spec)
        return Net(house, spec, clients, **options)

    serve.serve(connect, house.settings())
    tensors, header = wire.unpack(asked[0])
    bad = wire.pack(*change(tensors, header))
    assert reason in wire.envelope(answer.answer(house.policy(0), texts[0], bad))["error"]


def test_a_helper_that_lost_its_journal_signs_nothing(house: House) -> None:
    (house.policy(0).state / "sums" / "signed.jsonl").unlink()
    (house.policy(1).state / "sums" / "signed.jsonl").unlink()
    with pytest.raises(RuntimeError, match="client 0: the site gives no reply"):
        house.serve()
    assert "it lacks signed.jsonl" in str(answer.log.read(house.policy(0).state)[-1]["detail"])


def test_a_helper_with_an_older_copy_of_what_it_signed_signs_nothing(house: House) -> None:
    """It would sign a second set for a request; the site's journal has the number of sets."""
    place = house.policy(0).state / "sums" / "signed.jsonl"
    empty = place.read_bytes()
    house.serve("first")
    after_one = place.read_bytes()
    house.serve("second", seed=1)
    standing = SiteJournal(house.policy(0).state).standing()
    assert list(standing.at.signed.values()) == [2] == list(standing.checkpoint(time.time()).signed.values())
    for number, older in enumerate((empty, after_one)):
        for client in (0, 1):
            (house.policy(client).state / "sums" / "signed.jsonl").write_bytes(older)
        with pytest.raises(SumRefused, match="2 of 4 helpers answer and 3 are needed"):
            house.serve(f"again-{number}", seed=2 + number)
        detail = str(answer.log.read(house.policy(0).state)[-1]["detail"])
        assert f"is an older copy: it has {number} of the 2 sets that were signed with its key; remove" in detail


def test_masked_uploads_tell_a_reader_of_the_log_nothing(house: House) -> None:
    house.serve()
    (line,) = [one for one in answer.log.read(house.policy(0).state) if one.get("fields")]
    assert line["fields"] == {f.name: f.protection for f in MaskedReply.schema}


def test_sums_need_a_roster_with_enough_helpers(house: House) -> None:
    settings = house.settings("few", sums="masked:helpers=5")
    with pytest.raises(ValueError, match="with 5 helpers, but the roster names 4; say helpers=4, or change who helps"):
        serve.serve(partial(Net, house), settings)
    with pytest.raises(ValueError, match="needs a roster, which names helpers and keys"):
        serve.serve(partial(Net, house), {**settings, "roster": "", "nodes": "0:100,1:101,2:102"})
    members = [m.model_copy(update={"sums": None}) if m.client == 1 else m for m in roster.load(house.roster).site]
    roster.write(house.roster, roster.Roster(site=tuple(members)))
    with pytest.raises(ValueError, match="has no key for masked sums of client 1; accept the line in its site.key.pub"):
        serve.serve(partial(Net, house), settings)


def test_a_site_without_records_is_a_helper_and_nothing_else(house: House) -> None:
    policy = house.policy(CLIENTS)
    assert list(setup.read_settings(policy.model_dump()).methods) == []
    found = evidence.status(policy)
    assert found["health"]["is_well"] and found["health"]["data"].startswith("none")
    with pytest.raises(schema.Refused, match="the site has no records; it is a helper of masked sums"):
        policy.check_run(RunSpec.read(text_of(house)), "sum_up")


def text_of(house: House) -> str:
    house.serve("for-its-text")
    text = RunFolder(house.folder / "for-its-text").read_config().spec
    assert text is not None
    return text


def test_masked_sums_of_real_sites_need_parties(tmp_path: Path) -> None:
    from fedstill.experiment import config
    from fedstill.experiment.job import Job

    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"method": "afl", "data": "digits", "clients": 3, "sums": "masked", "public": "noise=9"})
    )
    experiment, name, method = config.read_yaml(file)
    job = Job(experiment, method, tmp_path / "run", name=name, command="")
    with pytest.raises(ValueError, match="--sums masked needs helpers, which the server's roster names"):
        run(job, sites=lambda spec: pytest.fail("asked"))


TABLE = """
target = "died"
classes = ["no", "yes"]
[columns.age]
kind = "number"
range = [0, 110]
[columns.smoker]
kind = "boolean"
"""


def test_sites_measure_the_scale_of_their_columns_if_their_policies_allow_it_and_charge_both(house: House) -> None:
    """The scale is the first masked sum, and the method's is the second; a site without the permission is not asked."""
    rng = np.random.default_rng(0)
    (house.folder / "schema.toml").write_text(TABLE)
    for client, place in enumerate([*house.places[:CLIENTS], house.folder]):
        y = rng.integers(0, 2, 600)
        rows = [f"{60 + 4 * y[i] + 4 * rng.normal():.1f},{i % 2},{'yes' if y[i] else 'no'}" for i in range(600)]
        (place / "t.csv").write_text("\n".join(["age,smoker,died", *rows]))
        if client < CLIENTS:
            house.edit(client, data="t.csv", schema_file=str(house.folder / "schema.toml"), measured_scale=client > 0)
    task = {
        "data": str(house.folder / "t.csv"),
        "schema_file": str(house.folder / "schema.toml"),
        "model": "linear",
        "scale": "private:2",
        "afl": {"epsilon": 1.0},
    }
    with pytest.raises(RuntimeError, match="client 0: refused by the site: .* no run measure a scale"):
        house.serve("refused", **task)
    assert not read_charges(house.policy(0).state)
    house.edit(0, measured_scale=True, methods=["afl.sum_up"])
    assert any("measured_scale" in text for text in site_policy.words(house.policy(0)))
    summary = house.serve("scaled", **task)
    charges = [charge.entry for charge in read_charges(house.policy(0).state)]
    assert [entry.step for entry in charges] == ["measure_scale", "sum_up"]
    assert all(entry.counts_alone for entry in charges) and len(summary["sums"]) == 2
    guarantee = summary["guarantee"]
    multiplier = sum(release_noise(epsilon, 1e-5) ** -2 for epsilon in (1.0, 2.0)) ** -0.5
    assert guarantee["epsilon"] == pytest.approx(gaussian_epsilon(multiplier, 1e-5), rel=1e-6)
    found = SiteJournal(house.policy(0).state).standing()
    spent = evidence.budget(house.policy(0), found)["spent"]["record"]["epsilon"]
    assert spent == pytest.approx(guarantee["alone_epsilon"], rel=0.01)
    scale = json.loads((house.folder / "scaled" / "scale.json").read_text())
    assert scale["mean"] == [pytest.approx(62 / 55 - 1, abs=0.05)] and len(scale["std"]) == 1
    assert summary["accuracy"] > 0.55 and house.serve("scaled", **task) == summary
