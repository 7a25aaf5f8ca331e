"""``fed.able`` and ``fed.spent``: the server's answer about a budget is the one that the client's ledger gives."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from census import Census
from releases import entry
from small import world

from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival, Inline
from fedstill.privacy import accounting
from fedstill.privacy.ledger import BudgetExceeded, open_ledger
from fedstill.privacy.releases import Gaussian, Pure, Unbounded
from fedstill.protocol import wire

EVENT = Gaussian(noise_multiplier=2.0)
DELTA = 1e-5
TWICE, THRICE = (accounting.epsilon([EVENT] * times, DELTA, "record") for times in (2, 3))
FILTERED = accounting.rdp_filter(TWICE, DELTA)


def census(data: Any, folder: Path, method: Census | None = None, kind: type[Inline] = Inline, **facts: Any) -> Any:
    """A server of four clients, of whom each request takes one release with the cost `EVENT`."""
    return world(method or Census(), data, folder, transport=kind, min_clients=0, **facts).federation


def ask(fed: ServerFederation, clients: Sequence[int]) -> list[int]:
    """The clients that replied."""
    return list(fed.ask(fed.spec.method.count, to=clients).clients)  # type: ignore[attr-defined]


def test_without_a_budget_everybody_is_able(digits: Any, tmp_path: Path) -> None:
    fed = census(digits, tmp_path)
    assert fed.spent() == 0.0
    ask(fed, [0, 1])
    assert fed.able(EVENT) == fed.able(Unbounded(reason="no noise")) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="Census chooses its noise from earlier releases.* as --budget 2"):
        fed.able(EVENT, adaptive=True)


def test_a_client_one_event_short_of_its_budget_is_not_asked_and_the_others_never_refuse(
    digits: Any, tmp_path: Path
) -> None:
    fed = census(digits, tmp_path, budget=TWICE * 1.0001)
    assert fed.able(EVENT) == [0, 1, 2, 3]
    for clients in ([0, 1], [0, 2]):
        assert ask(fed, clients) == clients
    assert fed.able(EVENT) == [1, 2, 3]
    assert fed.able(Gaussian(noise_multiplier=1000.0)) == [0, 1, 2, 3]  # which costs client 0 next to nothing
    while able := fed.able(EVENT):
        assert ask(fed, able) == able
    assert fed.journal.refusals() == []
    assert [len(entries) for entries in fed.journal.releases().values()] == [2] * 4
    assert ask(fed, [0, 1, 2, 3]) == []  # asked all the same, each refuses
    assert len(fed.journal.refusals()) == 4
    assert "above the budget" in fed.journal.refusals()[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("budget", [0.5, 1.0, TWICE, 4.0, 8.0])
def test_the_server_says_what_every_ledger_would_answer(
    adaptive: bool, budget: float, digits: Any, tmp_path: Path
) -> None:
    fed = census(digits, tmp_path, Census(adaptive=adaptive), budget=budget)
    for clients in ([3], [2, 3], [1, 2, 3], [1, 2, 3]):
        ask(fed, clients)
    events = [EVENT, Gaussian(noise_multiplier=1.0), Gaussian(noise_multiplier=30.0), Unbounded(reason="no noise")]
    seen = set()
    for event in events:
        able = fed.able(event, adaptive=adaptive)
        for client in range(4):
            copy = tmp_path / "copy.jsonl"
            copy.unlink(missing_ok=True)
            if (own := tmp_path / "clients" / f"{client:05d}" / "ledger.jsonl").exists():
                shutil.copy(own, copy)
            ledger = open_ledger(copy, delta=DELTA, budget=budget)
            try:
                ledger.charge(entry(event, adaptive=adaptive, exchange=9))
            except BudgetExceeded:
                assert client not in able
            else:
                assert client in able
        seen.add(tuple(able))
    assert () in seen and len(seen) > 1


def test_a_filter_decides_where_noise_is_adaptive(digits: Any, tmp_path: Path) -> None:
    assert FILTERED.allows([EVENT]) and not FILTERED.allows([EVENT] * 2)  # a filter has less room than the sum
    fed = census(digits, tmp_path, Census(adaptive=True), budget=TWICE * 1.0001)
    assert ask(fed, [1]) == [1]
    assert fed.able(EVENT, adaptive=True) == [0, 2, 3]
    assert fed.able(EVENT) == [0, 2, 3]  # one adaptive release before is enough
    assert fed.spent() == pytest.approx(FILTERED.epsilon([EVENT]))
    assert fed.spent() > accounting.epsilon([EVENT], DELTA, "record")


def test_a_resumed_run_gets_the_answers_of_its_first_start(digits: Any, tmp_path: Path) -> None:
    def loop(fed: ServerFederation) -> list[Any]:
        answers = []
        for clients in ([0, 1], [0, 2], [2]):
            answers += [fed.able(EVENT), fed.spent()]
            ask(fed, clients)
        return [*answers, fed.able(EVENT), fed.spent()]

    first = loop(census(digits, tmp_path, budget=TWICE * 1.0001))
    assert first[0::2] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [1, 3]]
    assert first[1::2] == [0.0, *[pytest.approx(accounting.epsilon([EVENT] * n, DELTA, "record")) for n in (1, 2, 2)]]
    again = census(digits, tmp_path, budget=TWICE * 1.0001)  # the journal holds the replies to all three
    assert loop(again) == first
    assert sum(map(len, again.journal.releases().values())) == 5


def test_a_release_of_an_interrupted_start_is_named_where_another_has_no_budget(digits: Any, tmp_path: Path) -> None:
    """The remedy that was named, a larger budget, is another run."""
    ledger = open_ledger(tmp_path / "ledger", delta=DELTA, budget=TWICE * 1.0001)
    for index in (0, 1):
        ledger.charge(entry(EVENT, index=index, exchange=5))
    with pytest.raises(BudgetExceeded, match="an interrupted start released for this request already.*--min-clients"):
        ledger.charge(entry(EVENT, index=1, exchange=5))
    with pytest.raises(BudgetExceeded, match=r"\(raise --budget or noise\)"):
        ledger.charge(entry(EVENT, index=0, exchange=6))


def test_what_was_spent_is_the_largest_epsilon_and_no_number_without_noise(digits: Any, tmp_path: Path) -> None:
    fed = census(digits, tmp_path)
    ask(fed, [0, 1])
    ask(fed, [1])
    assert fed.spent() == pytest.approx(TWICE)
    assert fed.spent("label") == 0.0
    assert fed.guarantee().epsilon == fed.spent()
    bare = census(digits, tmp_path / "bare", Census(noise=0.0))
    ask(bare, [0])
    assert bare.spent() is None


class Boasts(Inline):
    """The first client lists releases that cost more than is added up."""

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        for arrival in super().exchange(request, clients, sent):
            tensors, header = wire.unpack(arrival.reply)
            made_up = [{**header["spent"][0], "event": event.model_dump()} for event in (Pure(epsilon=600.0), EVENT)]
            if arrival.client == 0:
                header["spent"] = made_up
            yield arrival._replace(reply=wire.pack(tensors, header))


def test_releases_that_a_client_makes_up_end_nobody_s_run(digits: Any, tmp_path: Path) -> None:
    fed = census(digits, tmp_path, kind=Boasts, budget=TWICE * 1.0001)
    assert ask(fed, [0, 1]) == [0, 1]
    assert fed.able(EVENT) == [1, 2, 3]
    assert fed.spent() is None
