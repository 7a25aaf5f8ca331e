"""Private heads on public features, and students of them, against the same things computed in plain loops."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
import torch
from doubles import Killed, Mortal, Watched
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from fedstill import methods, models
from fedstill.base.seeds import stream
from fedstill.data.sources import DataSet
from fedstill.distill.ensemble import Distillation
from fedstill.distill.public_map import PublicFeatures, PublicMap, split_public
from fedstill.engines.server import ServerFederation, TooFewReplies
from fedstill.engines.transport import Inline
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.private_heads import PrivateHeads, class_head, mean_head
from fedstill.models.heads import HeadModel
from fedstill.privacy.accounting import gaussian_noise
from fedstill.privacy.logistic import logits
from fedstill.protocol import Method, Records, load, state, wire
from fedstill.train.extractor import Extractor

CLIENTS = 3
DIMS = 8
TINY = {"extractor": {"pretrain": "none"}, "space": {"dims": DIMS}, "head": {"penalty": 5.0}}
DISTILLING = {**TINY, "distillation": {"epochs": 1}}
PUBLIC = ["fedavg-p", "fedd-p", "fedauxfdp", "fedaux-f", "fedaux"]
Array = NDArray[np.float64]


def make(name: str, **changes: Any) -> Method:
    return methods.find(name)(**{**TINY, **({} if name == "fedavg-p" else DISTILLING), **changes})


def set_up(
    method: Method,
    data: Any,
    folder: Path,
    *,
    public: Callable[[], Records] | None = None,
    kind: type[ServerFederation] = Watched,
    **facts: Any,
) -> Any:
    loaded = public or small.noise_images(data)
    return small.world(method, data, folder, CLIENTS, loaded, kind=kind, min_clients=1, **facts).federation


@pytest.fixture(scope="module")
def few(digits: DataSet) -> DataSet:
    """240 digits; each client has all ten classes."""
    return replace(digits, train=digits.train[:240], test=digits.test[:50])


# --- the sound pipeline, in plain code


def plain_features(model: nn.Module, records: Records) -> Array:
    model.eval()
    with torch.no_grad():
        return np.concatenate([models.features(model, x[None]).numpy() for x in records.inputs()]).astype(float)


def plain_map(h: Array, dims: int = DIMS, ridge: float = 0.003) -> tuple[Array, Array, float]:
    """Mean, whitening matrix and radius of public features; from the eigenvectors of their covariance."""
    mean = h.mean(0)
    values, vectors = np.linalg.eigh(np.cov(h.T, bias=True))
    values, vectors = values[::-1][:dims], vectors[:, ::-1][:, :dims]
    projection = vectors / np.sqrt(values + ridge * values[0])
    lengths = sorted(np.linalg.norm(row) for row in (h - mean) @ projection)
    place = 0.02 * (len(lengths) - 1)
    low = int(place)
    return mean, projection, lengths[low] + (place - low) * (lengths[low + 1] - lengths[low])


def plain_clip(rows: Array, radius: float, bias: float = 0.1) -> Array:
    found = []
    for row in rows:
        length = np.linalg.norm(row)
        found.append([*(row * (min(1, radius / length) / radius * math.sqrt(1 - bias**2))), bias])
    return np.array(found)


def regression(x: Array, y: Any, penalty: float) -> Array:
    """scikit-learn's minimiser of the sum of losses and ``penalty / 2 |beta|^2``."""
    solver = LogisticRegression(C=1 / penalty, fit_intercept=False, tol=1e-10, max_iter=10_000)
    return np.asarray(solver.fit(x, np.asarray(y)).coef_)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def parts(data: DataSet) -> list[Records]:
    return [data.train[torch.from_numpy(p)] for p in np.array_split(np.arange(len(data.train)), CLIENTS)]


def test_fedavg_p_is_what_plain_code_computes(few: DataSet, tmp_path: Path) -> None:
    method = make("fedavg-p", epsilon=None)
    fed = set_up(method, few, tmp_path)
    model = method.server(fed)
    h0 = fed.new_model()
    mean, projection, radius = plain_map(plain_features(h0, fed.public))
    heads = []
    for part in parts(few):
        x = plain_clip((plain_features(h0, part) - mean) @ projection, radius)
        heads.append(regression(x, part.labels, 5.0))
    average = sum(heads) / CLIENTS
    expected = plain_clip((plain_features(h0, few.test) - mean) @ projection, radius) @ average.T
    with torch.no_grad():
        ours = model.eval()(few.test.inputs()).numpy()
    # features and heads cross in float32
    assert np.abs(ours - expected).max() < 1e-5
    assert np.ptp(expected, axis=1).min() > 0.05


def test_fedauxfdp_distils_what_plain_code_computes(
    few: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch)
    method = make("fedauxfdp", epsilon=None)
    fed = set_up(method, few, tmp_path)
    method.server(fed)
    ((_, images, targets),) = calls
    h0 = fed.new_model()
    mean, projection, radius = plain_map(plain_features(h0, fed.public))

    def seen(records: Records) -> Array:
        return plain_clip((plain_features(h0, records) - mean) @ projection, radius)

    kept, negatives = (fed.public[part] for part in split_public(fed.public, 0.2))
    above, below = np.zeros((len(kept), 10)), np.zeros((len(kept), 1))
    for part in parts(few):
        own, others = seen(part), seen(negatives)
        beta = regression(own, part.labels, 5.0)
        alpha = regression(np.concatenate([own, others]), [1] * len(own) + [0] * len(others), 25.0)[0]
        for i, x in enumerate(seen(kept)):
            s = 1 / (1 + math.exp(-x @ alpha)) + 1e-8
            above[i] += s * (beta @ x)
            below[i] += s
    assert torch.equal(images.images, kept.images)
    assert np.abs(targets.numpy() - softmax(above / below)).max() < 1e-5


def spy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Tensor], Records, Tensor]]:
    """What every distillation starts from: the student, the images and what is said about them."""
    calls = []
    real = Distillation.distil

    def distil(self: Any, student: nn.Module, images: Records, targets: Tensor, *rest: Any, **named: Any) -> None:
        calls.append(({k: v.clone() for k, v in state(student).items()}, images, targets.clone()))
        real(self, student, images, targets, *rest, **named)

    monkeypatch.setattr(Distillation, "distil", distil)
    return calls


# --- the features


@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_private_goes_into_what_is_sent_down(name: str, few: DataSet, tmp_path: Path) -> None:
    other = replace(few.train, images=255 - few.train.images.flip(0), labels=few.train.labels.roll(1))

    def sent(data: DataSet, folder: str, public: Callable[[], Records] | None = None) -> PublicFeatures:
        class First(Watched):
            def ask(self, step: Any, to: Any = None, *, exactly: Any = None, at_least: int = 0, **payload: Any) -> Any:
                self.down.append(payload)
                raise Killed

        fed = set_up(make(name), data, tmp_path / folder, kind=First, public=public)
        with pytest.raises(Killed):
            make(name).server(fed)
        assert fed.down[0].keys() == {"features"}
        found: PublicFeatures = fed.down[0]["features"]
        return found

    first, second = sent(few, "one"), sent(replace(few, train=other), "two")
    assert first.radius == second.radius
    for field in ("mean", "projection"):
        assert torch.equal(getattr(first, field), getattr(second, field))
    assert small.weights(module_of(first.weights)) == small.weights(module_of(second.weights))
    elsewhere = sent(few, "three", small.noise_images(few, 65))
    assert not torch.equal(first.mean, elsewhere.mean)


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    holder = nn.Module()
    for name, value in tensors.items():
        holder.register_buffer(name.replace(".", "_"), value)
    return holder


def mapped(fed: Any, public_map: PublicMap) -> PublicFeatures:
    return public_features(fed, PrivateHeads(extractor=Extractor(pretrain="none"), space=public_map), "fedavg-p")


@pytest.mark.parametrize("dims", [DIMS, 4])  # by a whole decomposition and by a random projection
def test_whitened_public_rows_have_unit_covariance(few: DataSet, tmp_path: Path, dims: int) -> None:
    fed = set_up(make("fedavg-p"), few, tmp_path, public=small.noise_images(few, 300))
    here = mapped(fed, PublicMap(dims=dims, ridge=1e-9))
    model = fed.new_model()
    load(model, here.weights)
    rows = here.rows(model, fed.public).double()
    assert rows.shape == (300, dims)
    # the map is in float32
    assert rows.mean(0).abs().max() < 1e-4
    assert torch.allclose(rows.T @ rows / 300, torch.eye(dims, dtype=torch.float64), atol=1e-3)
    assert here.radius == pytest.approx(float(rows.norm(dim=1).quantile(0.02)), rel=1e-5)
    as_they_are = mapped(fed, PublicMap(dims=dims, whiten=False))
    assert torch.equal(as_they_are.rows(model, fed.public), models.features(model.eval(), fed.public.inputs()))


def test_there_may_be_fewer_public_images_than_directions(few: DataSet, tmp_path: Path) -> None:
    for count in (2, 9):
        public = small.noise_images(few, count)()
        method = make("fedauxfdp", space={"dims": 512})
        model = method.server(set_up(method, few, tmp_path / f"{count}", public=lambda p=public: p))
        assert all(torch.isfinite(value).all() for value in state(model).values())


def test_equal_public_images_are_refused_before_a_release(few: DataSet, tmp_path: Path) -> None:
    public = small.noise_images(few, 9)()
    public = replace(public, images=torch.full_like(public.images, 7))
    method = make("fedauxfdp")
    with pytest.raises(ValueError, match="all public images have the same features"):
        method.server(set_up(method, few, tmp_path, public=lambda: public))
    assert not list(tmp_path.rglob("ledger.jsonl")) and not list(tmp_path.rglob("*.reply"))


def test_the_model_says_what_the_heads_say(few: DataSet, tmp_path: Path) -> None:
    fed = set_up(make("fedavg-p"), few, tmp_path)
    here = mapped(fed, PublicMap(dims=DIMS, quantile=0.5))
    trunk = fed.new_model().eval()
    rows = here.rows(trunk, few.train)
    assert 0 < int((rows.norm(dim=1) > here.radius).sum()) < len(rows)  # some are clipped, some not
    head = torch.randn(10, DIMS + 1, generator=stream(0))
    for published in (False, True):
        model = HeadModel(trunk, here.mean, here.projection, here.radius, head, bias=0.2, clip=not published)
        said = model(few.train.inputs())
        expected = logits(head, rows, None if published else here.radius, 0.2)
        assert torch.allclose(said.double(), expected, atol=1e-4)  # float32
    average = mean_head(iter([head, head + 2, head + 4]))
    assert torch.allclose(average, head + 2, atol=1e-6) and average.dtype == torch.float32


@pytest.mark.parametrize("name", PUBLIC)
def test_without_public_images_a_sentence_asks_for_some(name: str, few: DataSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} needs public images.*--public noise$") as caught:
        small.run(make(name), few, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_client_without_public_images_says_so(few: DataSet, tmp_path: Path) -> None:
    method = make("fedauxfdp")
    fed = set_up(method, few, tmp_path)
    fed.transport = Inline(small.site(method, few.train, tmp_path, CLIENTS)())
    with pytest.raises(TooFewReplies, match="needs public images"):
        method.server(fed)


# --- public records, split


@pytest.mark.parametrize(("count", "share"), [(2, 0.2), (2, 0.99), (10, 0.2), (64, 0.5), (3, 0.001)])
def test_the_split_is_disjoint_complete_and_everybodys(few: DataSet, count: int, share: float) -> None:
    public = small.noise_images(few, count)()
    torch.manual_seed(1)
    first = split_public(public, share)
    torch.manual_seed(2)
    second = split_public(public, share)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert sorted(torch.cat(first).tolist()) == list(range(count))
    assert min(map(len, first)) >= 1
    assert abs(len(first[1]) - share * count) <= 1


@pytest.mark.parametrize("name", ["fedd-p", "fedauxfdp", "fedaux-f", "fedaux"])
def test_students_see_neither_negatives_nor_private_records(
    name: str, few: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Records] = []
    real = Records.inputs

    def inputs(self: Records, index: Any = slice(None)) -> Tensor:
        read.append(self[index])
        return real(self, index)

    calls = spy(monkeypatch)
    fed = set_up(make(name, **({"rounds": 1} if name == "fedaux" else {})), few, tmp_path)
    fit = Distillation.fit

    def watched(*args: Any, **named: Any) -> None:
        monkeypatch.setattr(Records, "inputs", inputs)
        fit(*args, **named)
        monkeypatch.setattr(Records, "inputs", real)

    monkeypatch.setattr(Distillation, "fit", watched)
    fed.spec.method.server(fed)
    kept, negatives = split_public(fed.public, 0.2)
    assert torch.equal(calls[0][1].images, fed.public[kept].images)

    def bytes_of(images: Tensor) -> set[bytes]:
        return {image.numpy().tobytes() for image in images}

    seen = set().union(*(bytes_of(records.images) for records in read))
    assert seen == bytes_of(fed.public.images[kept])
    assert not seen & bytes_of(fed.public.images[negatives])
    assert not seen & bytes_of(few.train.images)


@pytest.mark.parametrize("name", ["fedd-p", "fedauxfdp", "fedaux-f"])
def test_a_student_starts_from_the_mean_head_or_from_zeros(
    name: str, few: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in ("mean", "fresh"):
        calls = spy(monkeypatch)
        fed = set_up(make(name, student=start, distillation={"epochs": 2}), few, tmp_path / start)
        model = fed.spec.method.server(fed)
        heads = [getattr(r.head, "value", r.head) for r in fed.up[0]]
        mean = sum(heads) / len(heads)
        begun = calls[0][0]["head"]
        assert torch.allclose(begun, mean if start == "mean" else torch.zeros_like(mean), atol=1e-7)
        assert mean.abs().max() > 1e-3
        assert not torch.equal(model.head, begun)  # and it learns, the trunk too
        assert any(
            not torch.equal(value, calls[0][0][key]) for key, value in state(model).items() if key.startswith("trunk.")
        )


# --- FedAUX itself


def fedaux(**changes: Any) -> Method:
    return make("fedaux", **{"rounds": 2, "local": {"epochs": 1}, **changes})


def test_fedaux_averages_models_with_their_buffers_and_weighs_teachers(
    few: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MODEL", "convnet:width=4,depth=2,norm=batch")
    calls = spy(monkeypatch)
    method = fedaux(epsilon=None)
    fed = set_up(method, few, tmp_path)
    method.server(fed)
    assert [len(replies) for replies in fed.up] == [CLIENTS] * 3
    here = fed.down[0]["features"]
    trunk = fed.new_model()
    load(trunk, here.weights)
    kept, _ = split_public(fed.public, 0.2)
    x = plain_clip(here.rows(trunk, fed.public[kept]).double().numpy(), here.radius)
    assert any("running" in key for key in calls[0][0]) and any("num_batches" in key for key in calls[0][0])
    for (student, images, targets), replies in zip(calls, fed.up[1:], strict=True):
        for key, value in student.items():
            mean = sum(r.weights[key].double() for r in replies) / CLIENTS
            assert torch.allclose(value.double(), mean if value.is_floating_point() else mean.round(), atol=1e-6), key
        above, below = np.zeros((len(kept), 10)), np.zeros((len(kept), 1))
        for score, reply in zip(fed.up[0], replies, strict=True):
            s = 1 / (1 + np.exp(-x @ score.score.value.double().numpy()))[:, None] + 1e-8
            load(trunk, reply.weights)
            with torch.no_grad():
                f = trunk.eval()(images.inputs()).double().numpy()
            above, below = above + s * f, below + s
        # logits in float32, by batches of another size
        assert np.abs(targets.numpy() - softmax(above / below)).max() < 1e-4
    down = fed.down[2]["weights"]  # the second round starts from the student, not from the average
    assert any(not torch.equal(value, calls[0][0][key]) for key, value in down.items())


def test_fedaux_resumes_behind_a_finished_round(few: DataSet, tmp_path: Path) -> None:
    def mortal(here: Any) -> Mortal:
        return Mortal(Inline(here), 2 * CLIENTS + 1)  # the scores, round 1 and one reply of round 2

    whole = set_up(fedaux(), few, tmp_path / "whole")
    expected = small.weights(fedaux().server(whole))
    for entropy in (False, True):
        folder = tmp_path / f"broken-{entropy}"
        with pytest.raises(Killed):
            fedaux().server(set_up(fedaux(), few, folder, transport=mortal, simulated_noise=not entropy))
        again = set_up(fedaux(), few, folder, simulated_noise=not entropy)
        model = fedaux().server(again)
        assert len(again.up) == 2  # scores and round 2
        assert {client: len(entries) for client, entries in again.journal.releases().items()} == {0: 1, 1: 1, 2: 1}
        if not entropy:
            assert small.weights(model) == expected
            assert again.guarantee() == whole.guarantee()
            assert again.journal.bytes_up == whole.journal.bytes_up


def test_a_reply_that_claims_another_client_s_number_is_refused(few: DataSet, tmp_path: Path) -> None:
    class Forged:
        def __init__(self, here: Any) -> None:
            self.inner = Inline(here)

        def exchange(self, *args: Any) -> Iterator[Any]:
            for arrival in self.inner.exchange(*args):
                tensors, header = wire.unpack(arrival.reply)
                if arrival.client == 0:
                    header["fields"]["client"] = 1
                yield arrival._replace(reply=wire.pack(tensors, header))

    fed = set_up(fedaux(), few, tmp_path, transport=Forged)
    model = fedaux().server(fed)
    assert all(torch.isfinite(value).all() for value in state(model).values())
    assert {refusal.client for refusal in fed.journal.refusals()} == {0}
    assert all([reply.client for reply in replies] == [1, 2] for replies in fed.up)


# --- what it costs


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_both_heads_share_one_budget(share: float, epsilon: float, few: DataSet, tmp_path: Path) -> None:
    method = make("fedauxfdp", epsilon=epsilon, scores={"share": share})
    fed = set_up(method, few, tmp_path, budget=epsilon)
    method.server(fed)
    found = fed.guarantee()
    assert found.holds and found.unit == "record"
    assert found.epsilon == pytest.approx(epsilon, rel=1e-3)
    events = {entry.mechanism: entry.event for entry in fed.journal.releases()[0]}
    assert events.keys() == {"LogisticHead", "BinaryHead"}
    precision = {name: event.noise_multiplier**-2 for name, event in events.items()}
    assert sum(precision.values()) == pytest.approx(gaussian_noise(epsilon, 1e-5) ** -2, rel=1e-4)
    assert precision["BinaryHead"] == pytest.approx(share * sum(precision.values()), rel=1e-9)


@pytest.mark.parametrize("name", ["fedavg-p", "fedd-p", "fedauxfdp", "fedgm-records"])
def test_a_budget_below_epsilon_refuses(name: str, few: DataSet, tmp_path: Path) -> None:
    method = methods.find("fedgm-records")(nets=1) if name == "fedgm-records" else make(name)
    with pytest.raises(TooFewReplies, match=r"above the budget of 0\.99 .*nothing was released"):
        method.server(set_up(method, few, tmp_path, budget=0.99))


@pytest.mark.slow
def test_scores_alone_have_the_budget_to_themselves(few: DataSet, tmp_path: Path) -> None:
    for name in ("fedaux-f", "fedaux"):
        fed = set_up(make(name, epsilon=2.0), few, tmp_path / name, budget=2.0)
        fed.spec.method.server(fed)
        (entry,) = fed.journal.releases()[1]
        assert entry.mechanism == "BinaryHead"
        assert entry.event.noise_multiplier == pytest.approx(gaussian_noise(2.0, 1e-5), rel=1e-4)
        assert not fed.guarantee().holds


def test_noise_fades_with_epsilon(few: DataSet, tmp_path: Path) -> None:
    def heads(epsilon: float | None) -> Tensor:
        fed = set_up(make("fedavg-p", epsilon=epsilon), few, tmp_path / str(epsilon))
        make("fedavg-p", epsilon=epsilon).server(fed)
        return torch.stack([r.head.value for r in fed.up[0]])

    exact = heads(None)
    for epsilon in (1.0, 1e4):
        noise = heads(epsilon) - exact
        std = gaussian_noise(epsilon, 1e-5) * math.sqrt(2) / 5
        # 270 values: their spread is within 20 % of the truth, 4.6 standard deviations of it
        assert float(noise.std()) == pytest.approx(std, rel=0.2)
    assert (heads(1e4) - exact).abs().max() < 0.01 < exact.abs().max()


def test_by_default_the_penalty_follows_the_noise_and_not_the_data(few: DataSet, tmp_path: Path) -> None:
    def theorem(epsilon: float | None, delta: float, data: DataSet, folder: str, **head: float) -> str:
        method = make("fedauxfdp", epsilon=epsilon, head=head)
        fed = set_up(method, data, tmp_path / folder, delta=delta)
        method.server(fed)
        found: str = next(e.theorem for e in fed.journal.releases()[0] if e.mechanism == "LogisticHead")
        return found

    for epsilon, delta, logit_noise in ((1.0, 1e-5, 1.0), (3.0, 1e-6, 0.5)):
        penalty = math.sqrt(2) * gaussian_noise(epsilon, delta) / math.sqrt(5 / 6) / logit_noise
        expected = f" {penalty:g}"[:5]
        folder = f"{epsilon}"
        assert expected in theorem(epsilon, delta, few, folder, logit_noise=logit_noise)
        fewer = replace(few, train=few.train[:30])
        assert expected in theorem(epsilon, delta, fewer, folder + "fewer", logit_noise=logit_noise)
    assert " 0.3-strongly" in theorem(None, 1e-5, few, "none")


# --- as published


@pytest.mark.parametrize("scaling", ["paper", "repository"])
def test_published_heads_are_scikit_learns_on_rows_by_their_own_longest(
    scaling: str, few: DataSet, tmp_path: Path
) -> None:
    method = make("fedavg-p", epsilon=None, privacy="published", head={"scaling": scaling, "lam": 0.02})
    fed = set_up(method, few, tmp_path)
    model = method.server(fed)
    here, h0 = fed.down[0]["features"], fed.new_model()
    test = here.rows(h0, few.test).double().numpy()
    expected = np.zeros((len(test), 10))
    for part in parts(few):
        rows = here.rows(h0, part).double().numpy()
        longest = max(np.linalg.norm(row) for row in rows)

        def seen(rows: Array, longest: float = longest) -> Array:
            return np.concatenate([rows / longest * math.sqrt(0.99), np.full((len(rows), 1), 0.1)], 1)

        penalty = 0.02 * (len(rows) if scaling == "paper" else 1)
        expected += seen(test) @ regression(seen(rows), part.labels, penalty).T / CLIENTS
    with torch.no_grad():
        ours = model.eval()(few.test.inputs()).numpy()
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["fedavg-p", "fedd-p", "fedauxfdp"])
@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_published_guarantees_nothing_and_says_why(
    name: str, epsilon: float | None, few: DataSet, tmp_path: Path
) -> None:
    method = make(name, privacy="published", epsilon=epsilon)
    fed = set_up(method, few, tmp_path)
    model = method.server(fed)
    found = fed.guarantee()
    assert not found.holds
    assert "PublishedLogisticHead" in found.reason and "own maximum norm" in found.reason
    assert all(torch.isfinite(value).all() for value in state(model).values())
    with pytest.raises(TooFewReplies, match="budget"):
        method.server(set_up(method, few, tmp_path / "budget", budget=100.0))


# --- odd clients


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["sound", "published"])
@pytest.mark.parametrize("name", PUBLIC)
def test_clients_of_one_class_work(name: str, privacy: str, few: DataSet, tmp_path: Path) -> None:
    order = torch.argsort(few.train.labels, stable=True)
    labels = few.train.labels[order]
    kept = torch.cat([order[labels == c][:20] for c in range(CLIENTS)])
    data = replace(few, train=few.train[kept])
    assert all(len(part.labels.unique()) == 1 for part in parts(data))
    method = make(name, epsilon=None, privacy=privacy)
    fed = set_up(method, data, tmp_path)
    model = method.server(fed)
    assert all(torch.isfinite(value).all() for value in state(model).values())
    if name == "fedavg-p" and privacy == "sound":  # each votes for its own class, wherever the image
        assert all(int(r.head.value[:, -1].argmax()) == k for k, r in enumerate(fed.up[0]))
        accuracy = float((model.eval()(data.train.inputs()).argmax(1) == data.train.labels).float().mean())
        assert accuracy > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("model", ["brittle", "blank"])
@pytest.mark.parametrize("name", [*PUBLIC, "fedgm-records"])
def test_a_client_whose_features_are_zero_or_no_numbers_works(
    name: str, model: str, few: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MODEL", f"own_model:{model}")
    images = few.train.images.clone()
    images[:80] = 3  # client 0: flat images
    data = replace(few, train=replace(few.train, images=images))
    features = models.features(small.spec_of(make("fedavg-p"), data.train).new_model(), data.train[:80].inputs())
    assert features.isnan().all() if model == "brittle" else not features.any()
    if name == "fedgm-records":
        method = methods.find(name)(nets=2, ipc=1, fitting={"steps": 3}, training={"epochs": 1})
    else:
        # whoever trains a whole network on flat images has no number to send: FedAUX leaves that client out
        method = make(name)
    fed = set_up(method, data, tmp_path, public=lambda: replace(few.test, num_classes=1))  # none of these is flat
    found = method.server(fed)
    assert all(torch.isfinite(value).all() for value in state(found).values())
    assert len(fed.up[0]) == CLIENTS


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_share_of_a_published_budget_is_a_share_of_epsilon(share: float) -> None:
    settings = PrivateHeads(privacy="published", epsilon=2.0)
    client = SimpleNamespace(train=SimpleNamespace(num_classes=3), delta=1e-5)
    features = SimpleNamespace(radius=1.0)
    head = class_head(client, features, settings, share)
    assert head.epsilon == pytest.approx(2.0 * share)
