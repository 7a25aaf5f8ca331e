"""Private values leave through ``client.release`` only: charged, capped, repeated never, and told truthfully."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import small
import torch
from census import Census
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float64
from small import run, world
from torch import Tensor

from fedstill import schema
from fedstill.engines.reply_checks import listed
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Arrival, Inline
from fedstill.protocol import Public, Released, Reply, wire


def test_what_was_released_makes_the_guarantee(digits: Any, tmp_path: Path) -> None:
    _, fed = run(Census(), digits, tmp_path)
    found = fed.guarantee()
    assert found.holds
    assert found.unit == "record"
    # an independent computation: delta of a Gaussian of mu = 1/2 at that epsilon is 1e-5
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    mu, eps = 0.5, float(found.epsilon or 0)
    delta = phi(torch.tensor(mu / 2 - eps / mu).double()) - math.exp(eps) * phi(
        torch.tensor(-mu / 2 - eps / mu).double()
    )
    assert float(delta) == pytest.approx(1e-5, rel=0.02)
    assert "sensitivity" in found.reason
    twice = run(Census(times=2), digits, tmp_path / "2")[1].guarantee()
    assert float(twice.epsilon or 0) > 1.3 * eps


@pytest.mark.slow
def test_the_engines_agree_and_a_resumed_run_is_charged_once(digits: Any, tmp_path: Path) -> None:
    model, fed = run(Census(), digits, tmp_path / "one")
    other, _ = small.run(Census(), digits, tmp_path / "two", workers=2, shuffle=True)
    assert small.weights(model) == small.weights(other)
    for reply in (tmp_path / "one" / "journal").glob("*/00002.reply"):
        reply.unlink()  # as if the server had died before it was written
    again, fed2 = run(Census(), digits, tmp_path / "one")
    assert small.weights(again) == small.weights(model)
    assert fed2.guarantee() == fed.guarantee()
    assert {client: len(entries) for client, entries in fed2.journal.releases().items()} == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_raw_value_in_a_released_field_never_leaves(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies, match="'counts' is declared released, but its value is not from client.release"):
        run(Census(wrong="raw"), digits, tmp_path)


@pytest.mark.parametrize("wrong", ["raise", "nan"])
def test_what_was_charged_is_told_even_when_the_reply_fails(wrong: str, digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies):
        run(Census(wrong=wrong), digits, tmp_path)
    again = world(Census(), digits, tmp_path).federation
    assert sum(map(len, again.journal.releases().values())) == 4


def test_a_budget_stops_the_release_that_would_exceed_it(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies, match=r"above the budget of 2 at delta 1e-05.*nothing was released"):
        run(Census(times=2), digits, tmp_path, budget=2.0)
    assert not list((tmp_path / "journal").glob("000001-*/*.reply"))
    with pytest.raises(TooFewReplies, match="budget"):
        run(Census(noise=0.0), digits, tmp_path / "none", budget=100.0)


def test_adaptive_noise_is_stated_at_the_budget(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies, match="needs a --budget"):
        run(Census(adaptive=True), digits, tmp_path)
    _, fed = run(Census(adaptive=True), digits, tmp_path / "budget", budget=5.0)
    assert fed.guarantee().epsilon == 5.0
    assert "filter" in str(fed.guarantee().accountant)


def test_no_noise_no_guarantee(digits: Any, tmp_path: Path) -> None:
    _, fed = run(Census(noise=0.0), digits, tmp_path)
    assert not fed.guarantee().holds
    assert "carries no noise" in fed.guarantee().reason


def test_real_noise_is_drawn_once_and_given_again(digits: Any, tmp_path: Path) -> None:
    here = world(Census(), digits, tmp_path, simulated_noise=False)
    request = wire.encode({}, Census.count.request, here.spec.facts, {"step": "count", "exchange": 0})
    first = here.site.answer(1, request)
    assert here.site.answer(1, request) == first
    other = world(Census(), digits, tmp_path / "other", simulated_noise=False)
    assert other.site.answer(1, request) != first
    simulated = world(Census(), digits, tmp_path / "other", simulated_noise=True)
    assert simulated.site.answer(2, request) == simulated.site.answer(2, request)


def test_a_reply_without_its_list_of_releases_is_refused(digits: Any, tmp_path: Path) -> None:
    class Mute(Inline):
        def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
            for arrival in super().exchange(request, clients, sent):
                tensors, header = wire.unpack(arrival.reply)
                header.pop("spent")
                yield arrival._replace(reply=wire.pack(tensors, header))

    with pytest.raises(TooFewReplies, match="lists no release"):
        Census().server(world(Census(), digits, tmp_path, transport=Mute).federation)


@pytest.mark.parametrize("spoil", ["nothing", "list", "reply", "empty"])
def test_releases_in_a_reply_that_a_transport_refuses_are_counted(spoil: str, digits: Any, tmp_path: Path) -> None:
    class Refusing(Inline):
        def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
            for arrival in super().exchange(request, clients, sent):
                if arrival.client == 2:
                    tensors, header = wire.unpack(arrival.reply)
                    listless = wire.pack(tensors, {**header, "spent": [{"unit": 1}]})
                    reply = {"nothing": arrival.reply, "list": listless, "reply": b"no message", "empty": b""}[spoil]
                    yield arrival._replace(reply=reply, failure="it claims 9 records")
                else:
                    yield arrival

    fed = world(Census(), digits, tmp_path, transport=Refusing, min_clients=3).federation
    Census().server(fed)
    assert [(refusal.client, refusal.reason) for refusal in fed.journal.refusals()] == [(2, "it claims 9 records")]
    counted = {client for client, entries in fed.journal.releases().items() if entries}
    assert counted == ({0, 1, 2, 3} if spoil == "nothing" else {0, 1, 3})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_other_list_of_releases_is_refused(spent: Any) -> None:
    if spent == []:
        return
    with pytest.raises(schema.Refused, match="its list of releases"):
        listed({"spent": spent}, "count", 0)


def test_forged_epsilons_are_refused(digits: Any, tmp_path: Path) -> None:
    _, fed = run(Census(), digits, tmp_path)
    entry = fed.journal.releases()[0][0].model_dump(mode="json")
    assert listed({"spent": [entry]}, "count", 0)
    for change in (
        {"epsilon": 0.1},
        {"event": {"kind": "gaussian", "noise_multiplier": math.inf}},
        {"event": {"kind": "gaussian", "noise_multiplier": -1}},
        {"event": {"kind": "pure", "epsilon": 0}},
        {"unit": "nothing"},
        {"step": "other"},
        {"exchange": 3},
    ):
        with pytest.raises(schema.Refused, match="its list of releases"):
            listed({"spent": [entry | change]}, "count", 0)


def test_public_and_released_fields_in_one_reply(digits: Any, tmp_path: Path) -> None:
    class Both(Reply):
        counts: Released[Float64[Tensor, " classes"]]
        version: Annotated[int, Public()]

        noisy: Annotated[Released[Float64[Tensor, " classes"]], Public()]  # noise is what holds

    assert [f.protection for f in Both.schema] == ["released", "public", "released"]
    assert (
        Both.from_payload({"counts": torch.ones(10), "version": 1, "noisy": torch.ones(10)}).payload()["version"] == 1
    )
