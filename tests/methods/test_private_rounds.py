import json
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import noise_images
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from fedstill.data.sources import DataSet
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Inline
from fedstill.methods import find
from fedstill.methods.adap_dp_fl import AdapDPFL
from fedstill.methods.fedkadp import FedKADP, taught_loss
from fedstill.methods.fedkd import mutual_loss
from fedstill.methods.parts.private_rounds import PrivateRounds, claimed, replace_weights
from fedstill.privacy import accounting
from fedstill.privacy.dp_sgd import BatchClippedSGD
from fedstill.privacy.ledger import covers, total_epsilon
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import parameters
from fedstill.train.feedback import PublicLoss

LOCAL = {"steps": 2, "supposed_records": 400, "lr": 0.05}
NAMES = ("dp-fl", "adap-dp-fl", "fedkd", "fedkadp")
ADAPTIVE = ("adap-dp-fl", "fedkadp")
LOUD: dict[str, Any] = {
    "adap-dp-fl": {"patience": 1, "decay": 0.5, "noise_multiplier": 2.0, "local": {**LOCAL, "clip": 5.0}},
    "fedkadp": {"feedback": {"noise_from": 0.0, "decay": 0.9}},
}
"""Settings with which the noise falls within three rounds."""


def make(name: str, **changes: Any) -> Any:
    method = find(name)(**{"rounds": 3, "participation": 1.0, "local": LOCAL, **changes})
    assert isinstance(method, PrivateRounds)
    return method


def run(
    method: Any, data: DataSet, folder: Path, *, budget: float | None, clients: int = 4, **options: Any
) -> tuple[nn.Module, ServerFederation, list[dict[str, float]]]:
    fed = small.world(method, data, folder, clients, noise_images(data), budget=budget, **options).federation
    model = method.server(fed)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return model, fed, lines


def spent_by(fed: ServerFederation) -> dict[int, list[Any]]:
    return {client: [entry.event for entry in entries] for client, entries in fed.journal.releases().items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_log_states_the_largest_epsilon_of_a_client(name: str, digits: DataSet, tmp_path: Path) -> None:
    method = make(name, participation=0.5, rounds=4)
    _, fed, lines = run(method, digits, tmp_path, budget=None if name in ("dp-fl", "fedkd") else 20.0)
    events = spent_by(fed)
    assert {entry.adaptive for each in fed.journal.releases().values() for entry in each} == {name in ADAPTIVE}
    if name in ADAPTIVE:
        account = accounting.rdp_filter(20.0, 1e-5)
        worst = max(account.epsilon(each) for each in events.values())
    else:
        worst = max(accounting.epsilon(each, 1e-5, "record") for each in events.values())
        assert fed.guarantee().epsilon == pytest.approx(lines[-1]["epsilon"], rel=1e-6)
    assert lines[-1]["epsilon"] == pytest.approx(worst, rel=1e-6)
    assert lines[-1]["claimed"] > 0
    assert [line["noise"] for line in lines][0] == 5.0
    sampled = {event.sampling for each in events.values() for event in each}
    assert sampled == {32 / 400}
    assert sum(len(each) for each in events.values()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_asked_beyond_the_budget_and_the_run_ends(name: str, digits: DataSet, tmp_path: Path) -> None:
    method = make(name, rounds=50, participation=0.5)
    event = Gaussian(noise_multiplier=5.0, sampling=32 / 400, count=2)
    if name in ADAPTIVE:
        budget = 1.0
        assert accounting.rdp_filter(budget, 1e-5).allows([event] * 3)
        method = make(name, rounds=200, participation=1.0, noise_multiplier=2.0)
    else:
        budget = accounting.epsilon([event] * 3, 1e-5, "record") * 1.0001  # three rounds, not four
    _, fed, lines = run(method, digits, tmp_path, budget=budget)
    assert fed.journal.refusals() == []  # no site had to refuse
    assert len(lines) < method.rounds
    for entries in fed.journal.releases().values():
        assert total_epsilon(entries, 1e-5, budget) <= budget
        assert not covers(entries, entries[-1], budget, 1e-5)  # and none is left over
    if name not in ADAPTIVE:
        assert {len(events) for events in spent_by(fed).values()} == {3}
    assert lines[-1]["epsilon"] <= budget
    assert fed.done == lines[-1]["round"] < fed.num_rounds  # what a summary says
    assert fed.guarantee().holds


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_with_what_it_had_spent(
    name: str, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make(name, rounds=4, participation=0.5, **LOUD.get(name, {}))
    whole, _, lines = run(method, digits, tmp_path / "whole", budget=20.0)
    assert (lines[2]["noise"] < lines[0]["noise"]) == (name in ADAPTIVE)
    ask, asked = ServerFederation.ask, []

    def killed(self: ServerFederation, *words: Any, **payload: Any) -> Any:
        asked.append(words)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(self, *words, **payload)

    with monkeypatch.context() as patch:
        patch.setattr(ServerFederation, "ask", killed)
        with pytest.raises(KeyboardInterrupt):
            run(method, digits, tmp_path / "run", budget=20.0)
    model, _, again = run(method, digits, tmp_path / "run", budget=20.0)
    assert small.weights(model) == small.weights(whole)
    strip = [{k: v for k, v in line.items() if k != "seconds"} for line in again]
    assert strip == [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_noise_follows_the_feedback(digits: DataSet, tmp_path: Path) -> None:
    feedback = {"noise_from": 0.0, "decay": 0.9, "temperature_from": 0.0, "steepness": 10.0}
    _, fed, lines = run(make("fedkadp", feedback=feedback), digits, tmp_path, budget=50.0)
    assert [line["noise"] for line in lines] == pytest.approx([5.0, 4.5, 4.05])
    assert [line["temperature"] for line in lines] == pytest.approx([2.0, 3.0, 3.0])
    assert [e.noise_multiplier for e in spent_by(fed)[0]] == pytest.approx([5.0, 4.5, 4.05])
    assert fed.guarantee().epsilon == 50.0  # what the filter keeps


def test_adap_dp_fl_lowers_noise_after_three_falls(digits: DataSet, tmp_path: Path) -> None:
    method = make("adap-dp-fl", patience=1, decay=0.5, noise_multiplier=4.0, least_noise=1.5)
    seen, noise = PublicLoss(5), [4.0]
    for number, loss in enumerate([3.0, 2.0, 2.5, 2.0]):
        seen.record(number, loss=loss)
        if number:
            noise.append(method.next_noise(noise[-1], seen["loss"][number - 1 : number + 1]))
    assert noise == [4.0, 2.0, 2.0, 1.5]  # the last would be 1, which is below the least


def test_the_paper_s_account_ends_a_run_as_printed_and_guarantees_nothing(digits: DataSet, tmp_path: Path) -> None:
    method = make(
        "fedkadp", privacy="published", rounds=6, feedback={"noise_from": 0.0, "decay": 0.5, "least_noise": 0.1}
    )
    _, fed, lines = run(method, digits, tmp_path, budget=None)
    planned = claimed(fed, method, [5.0] * 6)
    assert planned is not None
    assert len(lines) < 6
    assert lines[-1]["claimed"] > planned >= lines[-2]["claimed"]  # one round too late
    assert fed.done == len(lines)
    assert "epsilon" not in lines[-1]
    guarantee = fed.guarantee()
    assert not guarantee.holds
    assert "the batch's gradient is clipped" in guarantee.reason


@pytest.mark.parametrize("name", ["adap-dp-fl", "fedkadp"])
def test_noise_that_follows_releases_needs_a_budget_and_public_records(
    name: str, digits: DataSet, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--budget 2"):
        run(make(name), digits, tmp_path / "a", budget=None)
    fed = small.federation(make(name), Inline(small.site(make(name), digits.train, tmp_path)()), digits, tmp_path / "b")
    fed.budget = 5.0
    with pytest.raises(ValueError, match="--public held=1000"):
        make(name).server(fed)


@pytest.mark.slow
def test_a_budget_that_covers_no_round_is_said_so(digits: DataSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not cover one round with noise multiplier 0.5"):
        run(make("dp-fl", noise_multiplier=0.5), digits, tmp_path, budget=0.01)


def test_no_noise_fits_no_budget(digits: DataSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not cover one round with noise multiplier 0"):
        run(make("dp-fl", noise_multiplier=0.0), digits, tmp_path, budget=1.0)


def test_no_budget_covers_rounds_as_printed_and_nobody_is_asked(digits: DataSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"budget of 5.0 does not cover one round .* batch's gradient .* out --budget"):
        run(make("fedkadp", privacy="published"), digits, tmp_path, budget=5.0)
    assert not list((tmp_path / "journal").glob("0*"))


def test_the_event_that_a_server_asks_about_is_that_of_the_release() -> None:
    local, model = make("dp-fl").local, nn.Linear(3, 2)
    for noise in (0.0, 5.0):
        assert local.event(noise) == local.mechanism(model, noise).event
    assert FedKADP(privacy="published").event(5.0) == BatchClippedSGD(local.mechanism(model, 5.0)).event


def test_without_noise_there_is_no_guarantee(digits: DataSet, tmp_path: Path) -> None:
    _, fed, lines = run(make("dp-fl", noise_multiplier=0.0), digits, tmp_path, budget=None)
    assert not fed.guarantee().holds
    assert "epsilon" not in lines[0]


def test_fedkadp_s_loss_is_cross_entropy_and_divergence_from_the_teacher() -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(5, 3)
    x, y, output = torch.randn(4, 5), torch.tensor([0, 2, 1, 1]), torch.randn(4, 3)
    found = taught_loss(output, x, y, teacher=teacher, temperature=2.5)
    said = (teacher(x) / 2.5).softmax(1).detach()
    for i in range(4):
        soft = kl_div((output[i] / 2.5).log_softmax(0), said[i], reduction="sum")  # KL(p || q), the teacher first
        assert float(found[i]) == pytest.approx(float(cross_entropy(output[i], y[i]) + 2.5**2 * soft), rel=1e-5)


def test_fedkd_s_loss_divides_the_divergences_by_what_is_still_wrong() -> None:
    torch.manual_seed(1)
    both, y = torch.randn(4, 2, 3), torch.tensor([0, 2, 1, 1])
    found = mutual_loss(both, torch.empty(4, 1), y)
    for i in range(4):
        s, t = both[i].softmax(1)
        hard = cross_entropy(both[i], y[i].repeat(2), reduction="sum")
        soft = (s * (s / t).log()).mean() + (t * (t / s).log()).mean()
        assert float(found[i]) == pytest.approx(float(hard + soft / hard), rel=1e-5)


@pytest.mark.slow
def test_fedkd_keeps_the_mentor_and_sends_less_without_noise(digits: DataSet, tmp_path: Path) -> None:
    method = make("fedkd", noise_multiplier=0.0, local={**LOCAL, "steps": 20, "clip": 100.0}, energy_first=0.5)
    _, fed, _ = run(method, digits, tmp_path, budget=None)
    reply = fed.journal.bytes_up / fed.journal.bytes_down
    assert reply < 0.9
    assert list((tmp_path / "clients").glob("00000/*.state"))
    noisy, fed2, _ = run(make("fedkd"), digits, tmp_path / "noisy", budget=None)
    assert fed2.journal.bytes_up / fed2.journal.bytes_down > 0.9  # noise has no thin directions
    assert isinstance(noisy, nn.Module)


def test_an_update_of_fedkd_that_does_not_fit_counts_as_none(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.methods import fedkd

    method = make("fedkd", rounds=1)
    expand, seen = fedkd.expand, []

    def first_fails(given: Any, like: Any) -> Any:
        seen.append(given)
        return None if len(seen) == 1 else expand(given, like)

    monkeypatch.setattr(fedkd, "expand", first_fails)
    model, _, _ = run(method, digits, tmp_path, budget=None)
    assert len(seen) == 4
    assert all(torch.isfinite(w).all() for w in parameters(model).values())
    monkeypatch.setattr(fedkd, "expand", lambda *_: None)
    with pytest.raises(ValueError, match="no client's update"):
        run(method, digits, tmp_path / "none", budget=None)


@pytest.mark.parametrize("threshold", ["debiased", "published"])
def test_noise_is_taken_off_the_length_of_a_gradient(threshold: str) -> None:
    method = AdapDPFL(local={"steps": 20, "lr": 0.005}, threshold=threshold)  # type: ignore[arg-type]
    torch.manual_seed(0)
    before = {"w": torch.randn(200_000, dtype=torch.float64)}
    gradient = torch.zeros(200_000, dtype=torch.float64)
    gradient[0] = 4.0
    noise = 5.0 * 1.0 / 32 / 20**0.5 * torch.randn(200_000, dtype=torch.float64)
    after = {"w": before["w"] - 0.005 * 20 * (gradient + noise)}
    found = method.next_clip(before, after, noise=5.0, clip=1.0)
    if threshold == "published":
        assert found > 15
    else:
        assert found == pytest.approx(4.0, abs=0.4)


@pytest.mark.parametrize("name", ["adap-dp-fl", "fedkadp"])
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_a_client_that_sends_huge_weights_ends_nobody_s_run(
    name: str, size: float, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.privacy.dp_sgd import DPSGD

    monkeypatch.setattr(
        DPSGD, "__call__", lambda self, *_: {n: torch.full_like(p, size) for n, p in self.model.named_parameters()}
    )
    _, _, lines = run(make(name, rounds=2, noise_multiplier=5.0), digits, tmp_path, budget=20.0)
    assert len(lines) == 2
    assert all(1.0 <= line["noise"] <= 5.0 for line in lines)


def test_what_is_not_a_number_lowers_no_noise() -> None:
    assert FedKADP().feedback.noise(5.0, float("nan")) == 5.0
    assert FedKADP(feedback={"steepness": 1e4}).feedback.temperature(0.0) == 2.0  # type: ignore[arg-type]


def test_an_adaptation_that_fails_says_nothing(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.base.errors import Diverged
    from fedstill.methods.fedrd_records import FedRDRecords

    failed = []

    def diverge(*_: Any) -> None:
        failed.append(True)
        raise Diverged("the records did this")

    method = FedRDRecords(dpc=1, nets=2, fitting={"steps": 2}, training={"epochs": 1})  # type: ignore[arg-type]
    monkeypatch.setattr("fedstill.methods.fedrd_records.train_projection", diverge)
    _, fed = small.run(method, digits, tmp_path)
    assert len(failed) == 4
    assert fed.journal.refusals() == []
    assert fed.guarantee().holds


def test_the_distance_between_two_rounds_models_is_that_of_their_weights() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    moved = {"weight": torch.full((2, 3), 1.5), "bias": torch.tensor([2.0, 4.0])}
    assert replace_weights(model, moved) == pytest.approx((6 * 0.25 + 4.0) ** 0.5)
    assert torch.equal(model.bias, moved["bias"])
