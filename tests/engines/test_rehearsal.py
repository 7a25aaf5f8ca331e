"""A rehearsal: who computes, who else is asked, and how often each request counts."""

from types import SimpleNamespace
from typing import Any

from releases import entry

from fedstill.experiment.estimate import Clock, Rehearsal
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import wire

SIZES = [500, 0, 90, 110, 20]


class Site:
    """Replies with a release whose noise grows with the client's records."""

    def __init__(self, *, releases: bool = True) -> None:
        self.asked: list[int] = []
        self.spec = SimpleNamespace(simulated_noise=False)
        self._releases = releases

    def answer(self, client: int, request: bytes) -> bytes:
        self.asked.append(client)
        release = entry(Gaussian(noise_multiplier=float(SIZES[client]))).model_dump(mode="json")
        spent = {"spent": [release]} if self._releases else {}
        return wire.pack({}, {"step": "s", "exchange": 0, "fields": {"client": client}, **spent})


def rehearse(site: Any, rounds: int) -> tuple[Rehearsal, list[int]]:
    clock = Clock()
    rehearsal = Rehearsal(site, SIZES, clock)
    request, sent = wire.pack({}, {"step": "s", "exchange": 0}), list[int]()
    with clock.times(rounds):
        arrivals = list(rehearsal.exchange(request, range(5), sent.append))
    assert [wire.envelope(arrival.reply)["fields"]["client"] for arrival in arrivals] == [0, 1, 2, 3, 4]
    return rehearsal, sent


def test_the_average_client_computes_and_the_smallest_is_asked_for_its_noise() -> None:
    site = Site()
    rehearsal, sent = rehearse(site, rounds=7)
    assert site.asked == [3, 4]  # of those with records, whose mean is 180
    assert sent == [0, 1, 2, 3, 4]
    noise = {client: [e.event.noise_multiplier for e in entries] for client, entries in rehearsal.releases.items()}
    assert noise == {3: [110.0] * 7, 4: [20.0] * 7}
    (request,) = rehearsal.requests
    assert (request.times, request.clients, request.evaluates) == (7, 5, False)


def test_without_releases_one_client_is_asked_alone() -> None:
    site = Site(releases=False)
    rehearsal, _ = rehearse(site, rounds=2)
    assert site.asked == [3] and rehearsal.releases == {}


def test_the_clock_counts_a_block_as_often_as_it_is_repeated(monkeypatch: Any) -> None:
    now = 100.0
    monkeypatch.setattr("fedstill.experiment.estimate.time.perf_counter", lambda: now)
    clock = Clock()
    with clock.times(1):
        now += 1.0
        with clock.times(20):
            now += 2.0
            with clock.elsewhere():
                now += 50.0
            with clock.times(3):
                now += 1.0
        now += 4.0
    assert clock.seconds == 1 + 20 * 2 + 60 + 4
