"""Robust means against independent computations, and against hostile clients that choose what they like."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import trim_mean
from small import kept, run, world
from torch import Tensor, nn
from typing_extensions import override

from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Inline
from fedstill.methods.averaging import mean_weights
from fedstill.methods.fedavg import Update
from fedstill.methods.fedavg_robust import FedAvgRobust
from fedstill.methods.parts import robust
from fedstill.methods.parts.robust import aggregate, fewest, geometric_median, krum, squared_distances
from fedstill.protocol import Client, Federation, Method, State, load, parameters, state, step
from fedstill.train.sgd import SGD

RULES: tuple[Any, ...] = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median")


def replies(rows: Tensor) -> list[Any]:
    """Models of two parameters and a counter; the parameters' numbers are the rows, ``(k, d)`` with an even d."""
    half = rows.shape[1] // 2
    return [
        SimpleNamespace(
            num_records=1,
            weights={
                "a": row[:half].reshape(2, -1),
                "steps": torch.tensor(7 + i),
                "b": row[half:],
            },
        )
        for i, row in enumerate(rows)
    ]


PARAMETERS = {"a", "b"}


def combined(rule: Any, sent: Any, hostile: int) -> dict[str, Tensor]:
    return aggregate(rule, sent, hostile, PARAMETERS)


def flat(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([model["a"].flatten(), model["b"]])


def normal(k: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clients", [5, 6, 9])
def test_median_and_trimmed_mean_are_numpys_and_scipys(clients: int) -> None:
    rows = normal(clients, 20)
    median = combined("median", replies(rows), 1)
    assert np.array_equal(flat(median).numpy(), np.median(rows.numpy(), axis=0))
    assert float(median["steps"]) == np.median(7 + np.arange(clients))
    for hostile in range((clients - 1) // 2 + 1):
        trimmed = flat(combined("trimmed-mean", replies(rows), hostile)).numpy()
        expected = trim_mean(rows.numpy(), (hostile + 1e-9) / clients, axis=0)
        np.testing.assert_allclose(trimmed, expected, rtol=0, atol=1e-14)


def test_distances_are_those_of_all_floating_point_numbers() -> None:
    rows = normal(6, 20) + 1e4  # as far from 0 as to lose digits without centring
    expected = torch.cdist(rows - rows[0], rows - rows[0]).square()
    torch.testing.assert_close(squared_distances(replies(rows), PARAMETERS), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hostile", [0, 1, 2])
def test_krum_is_its_definition(hostile: int) -> None:
    rows = normal(7, 20)
    scores = []
    for i, one in enumerate(rows):
        others = sorted(float((one - other).square().sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: 7 - hostile - 2]))
    order = np.argsort(scores)
    assert torch.equal(flat(combined("krum", replies(rows), hostile)), rows[order[0]])
    several = flat(combined("multi-krum", replies(rows), hostile))
    torch.testing.assert_close(several, rows[order[: 7 - hostile]].mean(0), rtol=0, atol=1e-14)


def test_flowers_strategies_have_the_same_results() -> None:
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    rows = normal(9, 20)
    theirs = [([row.numpy()], 1) for row in rows]

    def same(rule: Any, hostile: int, expected: list[np.ndarray]) -> None:
        found = flat(combined(rule, replies(rows), hostile)).numpy()
        np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-14)

    same("median", 1, flower.aggregate_median(theirs))
    same("trimmed-mean", 2, flower.aggregate_trimmed_avg(theirs, 2 / 9 + 1e-9))
    same("krum", 2, flower.aggregate_krum(theirs, 2, 0))
    same("multi-krum", 2, flower.aggregate_krum(theirs, 2, 7))


@pytest.mark.parametrize("seed", range(3))
def test_geometric_median_is_the_minimum_that_scipy_finds(seed: int) -> None:
    rows = normal(6, 4, seed)
    found = flat(combined("geometric-median", replies(rows), 1))

    def cost(z: np.ndarray) -> float:
        return float(np.linalg.norm(rows.numpy() - z, axis=1).sum())

    best = minimize(cost, rows.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-13})
    assert cost(found.numpy()) <= best.fun + 1e-9
    np.testing.assert_allclose(found.numpy(), best.x, atol=1e-5)


def test_equal_models_are_their_own_mean_by_every_rule() -> None:
    rows = normal(1, 20).expand(6, -1)
    for rule in RULES:
        torch.testing.assert_close(flat(combined(rule, replies(rows), 1)), rows[0], rtol=0, atol=1e-14)
    most = torch.cat([rows[:5], rows[:1] + 100])  # all but one are equal
    for rule in RULES:
        assert float((flat(combined(rule, replies(most), 1)) - rows[0]).abs().max()) < 1e-3


def test_the_result_does_not_depend_on_the_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, reads = replies(normal(5, 20)), list[int]()

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    whole = {rule: combined(rule, Counted(sent), 1) for rule in RULES}
    assert len(reads) == 8  # once by the rules of entries; once for distances and once for the counter by the others
    monkeypatch.setattr(robust, "_NUMBERS", 15)  # three numbers a client
    monkeypatch.setattr(robust, "_CHUNK", 10)  # two
    reads.clear()
    for rule in RULES:
        parted = combined(rule, Counted(sent), 1)
        assert parted.keys() == whole[rule].keys()
        for name, value in parted.items():
            torch.testing.assert_close(value, whole[rule][name], rtol=0, atol=1e-12)
    # a: 3, 3, 3, 1 with the counter's one; b: 3, 3, 3, 1
    assert len(reads) == 2 * 8 + 3 * (8 + 1)


def test_few_numbers_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "_NUMBERS", 5 * 1000)
    monkeypatch.setattr(robust, "_CHUNK", 5 * 100)
    sent = replies(normal(5, 20_000))
    sizes = [rows.numel() for _, rows in robust.parts_of(sent, PARAMETERS)]
    assert max(sizes) <= 500 and sum(sizes) == 5 * 20_000


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 1e2, 1e5]), st.booleans())
def test_hostile_models_do_not_move_the_result_far(hostile: int, seed: int, size: float, together: bool) -> None:
    """Honest models are within a ball of radius 1, whatever the hostile ones are; the plain mean has no such bound."""
    honest = torch.nn.functional.normalize(normal(2 * hostile + 4, 12, seed), dim=1)
    bad = normal(1 if together else hostile, 12, seed + 1).expand(hostile, -1) * size
    sent = replies(torch.cat([bad, honest]))
    for rule in ("median", "trimmed-mean"):
        entries = flat(combined(rule, sent, hostile))
        assert bool(((entries >= honest.amin(0) - 1e-9) & (entries <= honest.amax(0) + 1e-9)).all())
    count, share = len(sent), hostile / len(sent)
    # ||z|| <= 2 (1 - alpha) / (1 - 2 alpha) max ||x_k|| for the geometric median (Lopuhaa and Rousseeuw 1991)
    assert float(flat(combined("geometric-median", sent, hostile)).norm()) <= 2 * (1 - share) / (1 - 2 * share) + 1e-6
    # a chosen model's score is at most an honest one's, n - f - 2 squared distances of at most 2^2, one is to honest
    within = 1 + 2 * (count - hostile - 2) ** 0.5
    for rule in ("krum", "multi-krum"):
        assert float(flat(combined(rule, sent, hostile)).norm()) <= within + 1e-9


def test_one_hostile_client_more_breaks_the_trimmed_mean_and_any_breaks_the_mean() -> None:
    honest = normal(8, 20)
    sent = replies(torch.cat([honest, torch.full((2, 20), 1e6, dtype=torch.float64)]))
    assert float(flat(combined("trimmed-mean", sent, 2)).abs().max()) < 4
    assert float(flat(combined("trimmed-mean", sent, 1)).abs().min()) > 1e4
    assert float(flat(mean_weights(sent, "uniform")).abs().min()) > 1e4


@pytest.mark.parametrize(
    ("rule", "least"),
    [("median", 5), ("trimmed-mean", 5), ("krum", 7), ("multi-krum", 7), ("geometric-median", 5)],
)
def test_the_fewest_replies_are_those_of_the_papers(rule: Any, least: int) -> None:
    assert fewest(rule, 2) == least
    combined(rule, replies(normal(least, 20)), 2)
    with pytest.raises(AssertionError):
        combined(rule, replies(normal(least - 1, 20)), 2)


def on_a_line(*places: float) -> Tensor:
    return torch.tensor(places, dtype=torch.float64)[:, None].expand(-1, 4) / 2  # distances are those of the places


def chosen_place(rule: Any, hostile: int, *places: float) -> float:
    return 2 * float(flat(combined(rule, replies(on_a_line(*places)), hostile))[0])


def test_krum_takes_the_number_of_neighbours_and_the_power_of_its_paper() -> None:
    # seven models, f = 2: three neighbours; 7 has the score 2^2 + 3^2 + 4^2 = 29. With two neighbours, or distances
    # that are not squared, 10 would be chosen, and with four 5
    assert chosen_place("krum", 2, 5, 10, 7, -8, -3, -9, 11) == 7


def test_of_equal_scores_the_first_client_is_taken() -> None:
    rows = torch.zeros(7, 20, dtype=torch.float64)
    sent = replies(rows)
    weights = krum(squared_distances(sent, PARAMETERS), 2, 3)
    assert weights.nonzero().flatten().tolist() == [0, 1, 2]


def test_buffers_admit_no_hostile_client_and_have_their_median() -> None:
    """Honest statistics lie far from each other; a hostile client with their mean is everybody's nearest neighbour."""
    honest = normal(8, 20) / 10
    sent = [
        *replies(torch.full((2, 20), 2.0, dtype=torch.float64)),
        *replies(honest),
    ]
    statistics = 10 * normal(8, 50, 1)
    for client, reply in enumerate(sent):
        reply.weights["running_mean"] = statistics[client - 2] if client >= 2 else statistics.mean(0)
    for rule in ("krum", "multi-krum", "geometric-median"):
        found = combined(rule, sent, 2)
        assert float(flat(found).abs().max()) < 1
        everyone = torch.stack([reply.weights["running_mean"] for reply in sent])
        assert np.array_equal(found["running_mean"].numpy(), np.median(everyone.numpy(), axis=0))
    sent[0].weights["steps"] = torch.tensor(2**62)
    assert all(float(combined(rule, sent, 2)["steps"]) < 100 for rule in RULES)


@pytest.mark.parametrize(("count", "hostile"), [(1001, 500), (401, 200), (21, 10)])
def test_the_geometric_median_is_found_whatever_the_hostile_half_is(count: int, hostile: int) -> None:
    honest = 0.1 * torch.nn.functional.normalize(normal(count - hostile, 8), dim=1)
    rows = torch.cat([torch.full((hostile, 8), 1000.0, dtype=torch.float64), honest])
    weights = geometric_median(squared_distances(replies(rows), PARAMETERS))
    found = weights @ rows
    share = hostile / count
    assert float(found.norm()) <= 0.1 * 2 * (1 - share) / (1 - 2 * share)
    directions = torch.nn.functional.normalize(rows - found, dim=1)  # the gradient of the sum of distances, 0 there
    assert float(directions.sum(0).norm()) < 0.02 * count


def test_weights_add_up_to_one() -> None:
    squared = squared_distances(replies(normal(9, 20)), PARAMETERS)
    for weights in (krum(squared, 2, 7), krum(squared, 2, 1), geometric_median(squared)):
        assert float(weights.sum()) == pytest.approx(1, abs=1e-14) and float(weights.min()) >= 0


class Poisoned(Method):
    """FedAvg, by the mean or a rule, in which the first clients send the opposite of what they learnt, five times."""

    rule: str = "mean"
    hostile: int = 2

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        for round in fed.rounds(4, model):
            sent = fed.ask(self.update, weights=state(model))
            rule: Any = self.rule
            new = (
                mean_weights(sent, "uniform")
                if rule == "mean"
                else aggregate(rule, sent, self.hostile, parameters(model).keys())
            )
            load(model, new)
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Train, or do the opposite."""
        model = client.new_model(weights)
        SGD(lr=0.1, batch_size=32, epochs=2).fit(model, client.train, client.rng("batches"))
        new = state(model)
        if client.id < self.hostile:
            new = {name: weights[name] - 5 * (value - weights[name]) for name, value in new.items()}
        return Update(weights=new, num_records=len(client.train))


@pytest.mark.slow
def test_a_run_learns_in_spite_of_two_hostile_clients(digits: Any, tmp_path: Any) -> None:
    accuracy = {}
    for rule in ("mean", *RULES):
        model, fed = run(Poisoned(rule=rule), digits, tmp_path / rule, clients=8)
        accuracy[rule] = fed.evaluate(model)
    assert accuracy.pop("mean") < 0.4
    assert min(accuracy.values()) > 0.6, accuracy


@pytest.mark.parametrize("rule", RULES)
def test_a_round_of_the_method_is_its_rule(rule: Any, digits: Any, tmp_path: Any) -> None:
    method = FedAvgRobust(rule=rule, hostile=1, rounds=1, local=SGD(lr=0.1, batch_size=32))
    here = world(method, digits, tmp_path, clients=6, model="convnet:width=4,depth=1,norm=batch")
    model = method.server(here.federation)
    sent = kept(here.federation, FedAvgRobust.update)
    assert len(sent) == 6
    expected = here.federation.new_model()
    load(expected, aggregate(rule, sent, 1, parameters(expected).keys()))
    assert all(torch.equal(value, state(expected)[name]) for name, value in state(model).items())
    others = {other: flat_state(aggregate(other, sent, 1, parameters(expected).keys())) for other in RULES}
    others["mean"] = flat_state(mean_weights([Update(weights=r.weights, num_records=1) for r in sent], "uniform"))
    assert not [o for o in others if o != rule and torch.equal(others[o].float(), flat_state(state(model)).float())]


def flat_state(values: Any) -> Tensor:
    return torch.cat([value.double().flatten() for _, value in sorted(values.items())])


def test_a_run_with_too_few_clients_is_refused_before_they_work(digits: Any, tmp_path: Any) -> None:
    here = world(FedAvgRobust(rule="krum", hostile=2), digits, tmp_path / "run")
    sentence = "rule krum with hostile=2 needs 7 replies or more, but 4 clients are asked in a round; lower --hostile"
    with pytest.raises(ValueError, match=sentence):
        FedAvgRobust(rule="krum", hostile=2).server(here.federation)
    assert here.federation.asked_steps == {}


def test_a_round_without_enough_replies_stops_and_is_asked_again(digits: Any, tmp_path: Any) -> None:
    method = FedAvgRobust(rule="median", hostile=1, rounds=2, local=SGD(lr=0.1, batch_size=32))

    class Junk(Inline):
        bad: Any = ()

        @override
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                yield arrival._replace(reply=b"junk") if arrival.client in self.bad else arrival

    def federation(bad: Any) -> Any:
        here = world(method, digits, tmp_path, clients=4, transport=Junk, min_clients=1)
        here.transport.bad = bad
        return here.federation

    with pytest.raises(TooFewReplies, match="2 of 4 clients gave a usable reply to step 'update', the method needs 3"):
        method.server(federation({0, 3}))
    model = method.server(federation({3}))  # a resumed run, with one client less
    assert all(value.isfinite().all() for value in state(model).values())
