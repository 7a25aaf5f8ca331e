"""Sim-PE: one record is one vote, its noise is that of the epsilon, and what follows the votes is as in the papers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from torch import Tensor, nn

import fedstill
from fedstill.base.records import Records
from fedstill.base.seeds import stream
from fedstill.data.sources import DataSet
from fedstill.distill.public_map import PublicFeatures, PublicMap
from fedstill.methods.sim_pe import SimPE, Votes, choices, elected
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import IntegerClassSums
from fedstill.privacy.sum_ranges import OutOfRange
from fedstill.protocol import Released, Summation

TINY: dict[str, Any] = {
    "rounds": 1,
    "neighbours": 1,
    "extractor": {"pretrain": "none"},
    "space": {"dims": 8},
    "candidates": 12,
    "images": 20,
    "training": {"epochs": 2},
}
STEPS = IntegerClassSums.steps


def few(digits: DataSet) -> DataSet:
    return replace(digits, train=digits.train[:200], test=digits.test[:50])


def mapped(digits: DataSet, dims: int = 8) -> tuple[nn.Module, PublicFeatures, Tensor]:
    """An extractor, its public map and the rows of 40 candidates."""
    net = small.spec_of(SimPE(**TINY), digits.train).new_model()
    public = small.noise_images(digits)()
    features = PublicMap(dims=dims).fit(net, public, stream(0, "map"))
    return net, features, features.rows(net, public[:40])


def votes(digits: DataSet, folder: Path, parts: Any, **settings: Any) -> tuple[Any, Any]:
    """The server of a run, and its clients' votes in the last round."""
    method = SimPE(**{**TINY, **settings})
    fed = small.holding(parts, method, digits, folder, public=small.noise_images(digits))
    method.server(fed)
    return fed, [reply.votes.value for reply in small.kept(fed, SimPE.vote, method.rounds - 1)]


def test_a_record_chooses_the_nearest_candidate_of_its_class(digits: DataSet) -> None:
    net, features, candidates = mapped(digits)
    which = torch.stack([torch.randperm(40, generator=stream(label, "which"))[:9] for label in range(10)])
    records = digits.train[:300]
    found = choices(net, records, features, candidates, which)
    rows = features.rows(net, records).double()
    for row, label, place in zip(rows, records.labels, found, strict=True):
        distances = (candidates[which[label]].double() - row).norm(dim=1)
        assert float(distances[place]) == pytest.approx(float(distances.min()), rel=1e-5)
    assert len(set(found.tolist())) == 9
    again = which[:, [0, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert not (choices(net, records, features, candidates, again) == 1).any()  # of equal ones the first


@pytest.mark.parametrize("number", [2, 16, 40])
def test_a_choice_depends_on_no_other_record(digits: DataSet, number: int) -> None:
    """Between candidates that differ in their last bits, so that rounding decides; a plain product fails of 1,003."""
    net, features, candidates = mapped(digits, dims=32)
    last_bits = torch.randint(-1, 2, (number, candidates.shape[1]), generator=stream(1, "jitter"))
    close, which = candidates[:1] * (1 + 2.0**-23 * last_bits), torch.arange(number).repeat(10, 1)
    for count in (1, 2, 7, 64, 1003):
        records = digits.train[:count]
        whole = choices(net, records, features, close, which)
        for gone in {0, count // 2, count - 1}:
            rest = torch.cat([torch.arange(gone), torch.arange(gone + 1, count)])
            assert torch.equal(choices(net, records[rest], features, close, which), whole[rest])
    assert len(set(whole.tolist())) > number // 3


@pytest.mark.parametrize("gone", [0, 33, 99])
def test_a_record_more_moves_one_number_by_one_vote(digits: DataSet, tmp_path: Path, gone: int) -> None:
    data, nobody = few(digits), np.arange(0)
    rest = np.delete(np.arange(100), gone)
    exact = [
        votes(data, tmp_path / name, [(own, nobody), (np.arange(100, 150), nobody)], epsilon=None)[1][0]
        for name, own in (("more", np.arange(100)), ("less", rest))
    ]
    moved = exact[0] - exact[1]
    label = int(data.train.labels[gone])
    assert int((moved != 0).sum()) == 1 and int(moved[label].sum()) == STEPS
    assert int(exact[0].sum()) == 100 * STEPS
    mechanism = SimPE(**TINY)._mechanism(10, 1e-5, 1)
    assert float(moved.double().norm()) == mechanism.sensitivity == STEPS


def test_votes_add_up_to_those_of_all_records(digits: DataSet, tmp_path: Path) -> None:
    data, nobody = few(digits), np.arange(0)
    parts = [(part, nobody) for part in np.array_split(np.arange(200), 5)]
    fed, several = votes(data, tmp_path / "several", parts, epsilon=None)
    _, (single,) = votes(data, tmp_path / "one", [(np.arange(200), nobody)], epsilon=None)
    assert torch.equal(sum(several), single)
    assert torch.equal(single.sum(1), torch.bincount(data.train.labels, minlength=10) * STEPS)
    assert not fed.guarantee().holds


@pytest.mark.parametrize("rounds", [1, 3])
def test_noise_is_that_of_the_epsilon_over_all_rounds(digits: DataSet, tmp_path: Path, rounds: int) -> None:
    data, nobody = few(digits), np.arange(0)
    parts = [(np.arange(200), nobody)] * 20
    settings = {"candidates": 60, "neighbours": 4, "rounds": rounds}
    fed, noisy = votes(data, tmp_path / "noisy", parts, epsilon=2.0, **settings)
    found = fed.guarantee()
    assert found.holds and found.unit == "record"
    assert found.epsilon == pytest.approx(2.0, rel=1e-3) and found.epsilon <= 2.0
    spread = torch.stack(noisy).double().std(0).square().mean().sqrt() / STEPS  # equal votes, so noise alone
    expected = release_noise(2.0, fed.delta) * math.sqrt(rounds)
    assert float(spread) == pytest.approx(expected, rel=5 / math.sqrt(2 * 600 * 19))  # five deviations
    fed, noisy = votes(data, tmp_path / "quiet", parts, epsilon=None, **settings)
    assert float(torch.stack(noisy).double().std(0).max()) == 0


def test_masked_votes_are_the_open_ones_and_cost_noise_once(tmp_path: Path) -> None:
    task: dict[str, Any] = {"data": "digits", "clients": 6, "public": "held=200", "model": "convnet:width=8,depth=1"}
    task |= {"workers": 0, **TINY, "rounds": 2, "neighbours": 3}
    masked, opened = (
        fedstill.run("sim-pe", sums=s, out=tmp_path / s, epsilon=None, **task) for s in ("masked", "open")
    )
    one, other = ((record.folder / "model.safetensors").read_bytes() for record in (masked, opened))
    assert one == other
    record = fedstill.run("sim-pe", sums="masked", out=tmp_path / "noisy", epsilon=2.0, **task)
    assert record.guarantee.epsilon == pytest.approx(2.0, rel=1e-3) and record.guarantee.epsilon <= 2.0
    assert record.guarantee.adders == 5  # one of six may work with the server


def summed(counts: Tensor, clients: int = 4, adders: int = 4, records: int | None = None) -> Summation[Votes]:
    total = Votes(votes=Released((counts * STEPS).round().to(torch.int64)))
    return Summation(total, range(clients), adders, records)


def test_the_threshold_is_taken_off_and_no_class_is_lost_to_it() -> None:
    counts = torch.tensor([[9.0, 1.0, 20.0], [3.0, 2.0, -4.0], [-1.0, -2.0, -3.0]])
    method, places = SimPE(epsilon=1.0, rounds=1, threshold=2.0), torch.arange(9).view(3, 3)
    std = release_noise(1.0, 1e-5)
    assert 7 < 2 * std < 8
    found = method.weights(summed(counts), places, 1e-5)
    expected = torch.tensor([[9 - 2 * std, 0, 20 - 2 * std], [3.0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)
    wider = method.weights(summed(counts, clients=16, adders=4), places, 1e-5)  # noise of sixteen: twice the deviation
    torch.testing.assert_close(wider[0], torch.tensor([0, 0, 20 - 4 * std]).double(), rtol=1e-5, atol=1e-5)
    plain = SimPE(epsilon=None).weights(summed(counts), places, 1e-5)
    assert torch.equal(plain, counts.clamp_min(0).double())


def test_a_public_record_counts_for_the_class_with_the_most_votes_alone() -> None:
    counts = torch.tensor([[5.0, 1.0, 2.0], [4.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
    places = torch.tensor([[7, 8, 9], [7, 6, 8], [5, 4, 9]])
    own, every = (SimPE(epsilon=None, contrast=c).weights(summed(counts), places, 1e-5) for c in (True, False))
    assert torch.equal(every, counts.double())
    # 7 is the first class's, 8 too, as it has no vote of the second, and 9 as well; the third keeps its only candidate
    assert own.tolist() == [[5, 1, 2], [0, 3, 0], [0, 0, 1]]


def test_a_total_that_no_records_give_is_refused() -> None:
    counts = torch.zeros(3, 4)
    counts[1, 2] = 900
    places = torch.arange(12).view(3, 4)
    SimPE().weights(summed(counts, records=1000), places, 1e-5)
    with pytest.raises(OutOfRange, match="100 votes of 4 clients"):
        SimPE().weights(summed(counts, records=100), places, 1e-5)


def test_candidates_are_drawn_with_their_votes_as_probabilities() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    drawn = elected(weights, 4000, stream(0, "draws"))
    assert drawn[1].eq(-1).all() and not drawn[0].eq(1).any()
    assert float((drawn[0] == 2).double().mean()) == pytest.approx(0.75, abs=5 * math.sqrt(0.75 * 0.25 / 4000))


def test_a_variation_is_one_of_the_nearest_public_records() -> None:
    rows, rng = torch.randn(64, 8, generator=stream(0, "rows")), stream(0, "variations")
    chosen = torch.arange(64).repeat(200, 1)
    found = SimPE(neighbours=5)._varied(rows, chosen, rng)
    order = torch.cdist(rows.double(), rows.double()).argsort(1)[:, :5]
    assert all(set(found[:, i].tolist()) == set(order[i].tolist()) for i in range(64))
    assert torch.equal(SimPE(neighbours=1)._varied(rows, chosen, rng), chosen)


def test_labels_of_public_records_are_not_used(digits: DataSet, tmp_path: Path) -> None:
    data, public = few(digits), small.noise_images(digits)()
    other = replace(public, labels=public.labels.flip(0))
    method, found = SimPE(**{**TINY, "epsilon": None, "rounds": 2, "neighbours": 3}), []
    for name, some in (("one", public), ("other", other)):
        parts = small.equal_parts(data.train, 4)
        fed = small.holding(parts, method, data, tmp_path / name, public=_Given(some))
        found.append(small.weights(method.server(fed)))
    assert found[0] == found[1]


class _Given:
    """Loads these public records."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __call__(self) -> Records:
        return self.records


def test_public_records_of_the_task_are_named_by_the_clients_records(digits: DataSet, tmp_path: Path) -> None:
    """Of unlabelled digits that are held out, nearly all that are elected without noise get their own class."""
    record = fedstill.run(
        "sim-pe", data="digits", clients=5, public="held=300", model="linear", workers=0, out=tmp_path / "run",
        epsilon=None, extractor={"pretrain": "none"},
    )  # fmt: skip
    assert record.accuracy > 0.85


@pytest.mark.parametrize("student", ["head", "network"])
def test_the_student_is_a_head_or_the_whole_network(digits: DataSet, tmp_path: Path, student: str) -> None:
    public = small.noise_images(digits)
    model, fed = small.run(SimPE(**TINY, epsilon=None, student=student), few(digits), tmp_path, public=public)
    start = small.spec_of(SimPE(**TINY), digits.train).new_model().state_dict()
    moved = {name for name, value in model.trunk.state_dict().items() if not torch.equal(value, start[name])}
    assert bool(moved) == (student == "network") and bool((model.head != 0).any())
    rows = PublicFeatures(start, model.mean, model.projection, float(model.radius)).rows(fed.new_model(), digits.test)
    logits = rows @ model.head[:, :-1].T + model.head[:, -1]
    with torch.no_grad():
        assert torch.allclose(model(digits.test.inputs()), logits, atol=1e-4) == (student == "head")
