"""Every method gets these tests from one line in ``SMALL``."""

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small
import torch
from doubles import Killed, Mortal
from method_settings import SMALL
from small import Addressed, SeveralSites, Shuffled, federation, noise_images, site, weights, world
from torch import nn

from fedstill import methods
from fedstill.base.records import Records
from fedstill.data.sources import DataSet
from fedstill.engines import server
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Inline, Workers
from fedstill.experiment.config import Experiment
from fedstill.protocol import Method, Settings, returns_run_model, state, wire

PRIVATE = {
    "fedgm-labels": "label",
    "ldp-fedavg": "client",
    "dp-fedavg": "client",
    "dp-fl": "record",
    "adap-dp-fl": "record",
    "fedkd": "record",
    "fedkadp": "record",
    "fedgm-records": "record",
    "fedrd-records": "record",
    "afl": "record",
    "deepafl": "record",
    "fedcgs": "record",
    "fedcgs-p": "record",
    "gh-ofl": "record",
    "safle": "record",
    "sim-pe": "record",
    "fedavg-p": "record",
    "fedd-p": "record",
    "fedauxfdp": "record",
}
"""The methods that guarantee something by default, and what they protect."""
LASTING = (
    "real fedgm feddm fedd3 fedrd fedrd-records feddf dense co-boosting fed-dafl fed-adi fedgm-records "
    "fedd-p fedcvae fedauxfdp fedaux-f fedsd2c sim-pe"
).split()
"""The methods whose server trains for many epochs at a time."""
DOCS = Path(__file__).parents[2] / "docs" / "methods"


def make(name: str, **changes: Any) -> Method:
    return methods.find(name)(**SMALL[name], **changes)


def run(method: Method, data: DataSet, folder: Path, **options: Any) -> tuple[nn.Module, ServerFederation]:
    """A run with public images, for the methods that need some."""
    return small.run(method, data, folder, public=noise_images(data), **options)


def run_on(device: str, name: str, data: DataSet, folder: Path) -> tuple[nn.Module, ServerFederation]:
    """`run` with everybody's models on a device."""
    method, public = make(name), noise_images(data)
    inline = Inline(partial(site(method, data.train, folder, public=public), device=device)())
    fed = federation(method, inline, data, folder, public=public(), device=device)
    return method.server(fed), fed


class Whole(NamedTuple):
    """An undisturbed run."""

    weights: bytes
    fed: ServerFederation
    model: nn.Module


class OnDemand(dict[str, Whole]):
    """Undisturbed runs by method, each made when it is first wanted."""

    def __init__(self, make_run: Callable[[str], Whole]) -> None:
        super().__init__()
        self._make_run = make_run

    def __missing__(self, name: str) -> Whole:
        self[name] = self._make_run(name)
        return self[name]


@pytest.fixture(scope="module")
def whole(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """One undisturbed run of each method."""

    def undisturbed(name: str) -> Whole:
        model, fed = run(make(name), digits, tmp_path_factory.mktemp(name))
        return Whole(weights(model), fed, model)

    return OnDemand(undisturbed)


def test_every_method_is_tested() -> None:
    assert SMALL.keys() == methods.TABLE.keys()


every = pytest.mark.parametrize("name", SMALL, scope="module")  # all tests of a method follow each other


@every
def test_it_says_what_it_is_and_what_differs_from_the_paper(name: str) -> None:
    module = __import__(type(make(name)).__module__, fromlist=["x"])
    assert "Differs from the paper" in (module.__doc__ or "")
    assert (make(name).__doc__ or "").strip()
    page = (DOCS / f"{name}.md").read_text()
    assert f"fedstill run {name}" in page


@every
def test_its_facts_are_true(name: str, digits: DataSet, tmp_path: Path, whole: dict[str, Whole]) -> None:
    """Those of `fedstill methods`: what the guarantee protects, which public records it needs, how often it asks."""
    kind = methods.find(name)
    assert kind.protects == PRIVATE.get(name, "")
    if "rounds" not in kind.model_fields:
        assert whole[name].fed.num_rounds == 1

    class Asked(Inline):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            raise Killed

    def begin(folder: Path, public: Callable[[], Records] | None) -> None:
        fed = world(make(name), digits, folder, public=public, transport=Asked).federation
        make(name).server(fed)

    def unlabelled() -> Records:
        images = noise_images(digits)()
        return Records(images.images, torch.zeros(len(images), dtype=torch.int64), 1, images.normalisation)

    for folder, public, refused in (
        ("without", None, kind.needs_public != ""),
        ("unlabelled", unlabelled, kind.needs_public == "labelled"),
    ):
        with pytest.raises(ValueError, match="public") if refused else pytest.raises(Killed):
            begin(tmp_path / folder, public)


@every
def test_every_setting_has_a_help_text_and_none_clashes_with_the_experiment(name: str) -> None:
    def undocumented(kind: type[Settings]) -> list[str]:
        missing = []
        for field, info in kind.model_fields.items():
            if not info.description:
                missing.append(f"{kind.__name__}.{field}")
            if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
                missing += undocumented(info.annotation)
        return missing

    assert undocumented(type(make(name))) == []
    assert not set(type(make(name)).model_fields) & set(Experiment.model_fields)


@every
def test_settings_are_frozen_checked_and_survive_json_and_pickle(name: str) -> None:
    method = make(name)
    with pytest.raises(AttributeError, match="is frozen, so self.rounds can't be set; keep what a client needs"):
        method.rounds = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="[Ee]xtra"):
        type(method)(nonsense=1)
    assert type(method)(**method.model_dump(mode="json")) == method
    assert pickle.loads(pickle.dumps(method)) == method


@pytest.fixture(scope="module")
def workers(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two processes for all methods."""
    public = noise_images(digits)
    sites = {name: site(make(name), digits.train, tmp_path_factory.mktemp("clients"), public=public) for name in SMALL}
    pool = Workers(partial(SeveralSites, sites), 2)
    yield pool
    pool.close()


def replies(fed: ServerFederation) -> dict[str, bytes]:
    """The replies that the journal still has, by file."""
    folder = fed.journal.folder
    return {str(f.relative_to(folder)): f.read_bytes()[32:] for f in sorted(folder.rglob("*.reply"))}


def gives_the_same_bytes(name: str, transport: Any, digits: DataSet, undisturbed: Whole, folder: Path) -> None:
    fed = federation(make(name), transport, digits, folder, public=noise_images(digits)())
    model = make(name).server(fed)
    assert weights(model) == undisturbed.weights
    assert replies(fed) == replies(undisturbed.fed)  # all there is to compare where clients keep their models
    for count in ("bytes_up", "bytes_down", "bytes_judging"):
        assert getattr(fed.journal, count) == getattr(undisturbed.fed.journal, count)


@pytest.mark.slow
@every
def test_the_same_seed_gives_the_same_bytes_with_two_workers_and_shuffled_replies(
    name: str, digits: DataSet, whole: dict[str, Whole], workers: Workers, tmp_path: Path
) -> None:
    gives_the_same_bytes(name, Shuffled(Addressed(workers, name)), digits, whole[name], tmp_path)


@pytest.fixture(scope="module")
def simulated(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Flower's simulation, for all methods."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
    from fedstill.engines.flower.simulation import Simulation

    public = noise_images(digits)
    sites = {name: site(make(name), digits.train, tmp_path_factory.mktemp("clients"), public=public) for name in SMALL}
    with Simulation(partial(SeveralSites, sites), 4, workers=2) as transport:  # type: ignore[arg-type]
        yield transport


@every
def test_a_run_that_was_killed_after_its_last_round_ends_with_the_same_bytes(
    name: str, digits: DataSet, whole: dict[str, Whole], tmp_path: Path
) -> None:
    shutil.copytree(whole[name].fed.journal.folder.parent, tmp_path / "run")
    model, fed = run(make(name), digits, tmp_path / "run")
    assert weights(model) == whole[name].weights
    for count in ("bytes_up", "bytes_down", "bytes_judging"):
        assert getattr(fed.journal, count) == getattr(whole[name].fed.journal, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)  # one after the other, as Flower keeps a core busy as long as it runs
def test_flower_s_simulation_gives_the_same_bytes(
    name: str, digits: DataSet, whole: dict[str, Whole], simulated: Any, tmp_path: Path
) -> None:
    gives_the_same_bytes(name, Addressed(simulated, name), digits, whole[name], tmp_path)


@every
def test_the_model_comes_back_from_its_state(name: str, digits: DataSet, whole: dict[str, Whole]) -> None:
    before, fed = whole[name].model.eval(), whole[name].fed
    network = fed.new_model(draw=1)
    method = make(name)
    rebuild = method.rebuild if method.rebuilds else partial(Method.rebuild, method)
    after = rebuild(network, state(before)).eval()
    x = digits.test.inputs(slice(20))
    assert torch.equal(after(x), before(x))
    assert (after is network) == returns_run_model(type(make(name)))


@pytest.mark.slow
@every
def test_another_seed_differs(name: str, digits: DataSet, whole: dict[str, Whole], tmp_path: Path) -> None:
    model, _ = run(make(name), digits, tmp_path, seed=1)
    assert weights(model) != whole[name].weights


@pytest.mark.slow
@every
def test_it_resumes_from_any_reply_whatever_the_global_generator(
    name: str, digits: DataSet, whole: dict[str, Whole], tmp_path: Path
) -> None:
    def mortal(here: Any) -> Mortal:
        return Mortal(Inline(here), 3)

    dying = world(make(name), digits, tmp_path, public=noise_images(digits), transport=mortal).federation
    with untouched_generator(7), pytest.raises(Killed):
        make(name).server(dying)
    with untouched_generator(8):
        model, _ = run(make(name), digits, tmp_path)
    assert weights(model) == whole[name].weights


@contextmanager
def untouched_generator(seed: int) -> Iterator[None]:
    """PyTorch's global generator with a seed of its own, which must neither matter nor move."""
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", LASTING, scope="module")
def test_a_server_killed_behind_an_epoch_goes_on_with_the_next(
    name: str,
    digits: DataSet,
    whole: dict[str, Whole],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbered = ServerFederation.epochs

    def mortal(self: ServerFederation, number: int, *keep: Any) -> Iterator[int]:
        for epoch in numbered(self, number, *keep):
            if epoch == 2:
                raise Killed
            yield epoch

    monkeypatch.setattr(server, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(ServerFederation, "epochs", mortal)
    with pytest.raises(Killed):
        run(make(name), digits, tmp_path)
    done: list[int] = []

    def counted(self: ServerFederation, number: int, *keep: Any) -> Iterator[int]:
        for epoch in numbered(self, number, *keep):
            done.append(epoch)
            yield epoch

    monkeypatch.setattr(ServerFederation, "epochs", counted)
    model, _ = run(make(name), digits, tmp_path)
    assert done[0] == 2
    assert weights(model) == whole[name].weights


@pytest.mark.slow
@every
def test_a_client_that_fails_is_left_out(name: str, digits: DataSet, tmp_path: Path) -> None:
    class Broken(Inline):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                yield arrival._replace(reply=arrival.reply[:-1]) if arrival.client == 1 else arrival

    public = noise_images(digits)
    fed = world(make(name), digits, tmp_path, public=public, transport=Broken, min_clients=3).federation
    model = make(name).server(fed)
    assert {refusal.client for refusal in fed.journal.refusals()} == {1}
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in SMALL if name not in PRIVATE], scope="module")
def test_the_guarantee_is_none_and_names_a_field(name: str, whole: dict[str, Whole]) -> None:
    found = whole[name].fed.guarantee()
    assert not found.holds
    assert found.epsilon is None
    assert "released unprotected" in found.reason


TARGETED = [name for name in PRIVATE if "epsilon" in methods.find(name).model_fields]
targeted = pytest.mark.parametrize("name", TARGETED, scope="module")


@targeted
def test_the_guarantee_is_the_epsilon_that_was_asked_for(name: str, whole: dict[str, Whole]) -> None:
    found = whole[name].fed.guarantee()
    assert found.holds
    assert found.unit == PRIVATE[name]
    asked = float(make(name).epsilon)  # type: ignore[attr-defined]
    assert found.epsilon == pytest.approx(asked, rel=1e-3)
    assert float(found.epsilon or 0) <= asked  # so a budget of just that much lets the run through
    assert found.delta == (0.0 if found.unit == "label" else 1e-5)
    assert "simulation" in found.reason


@pytest.mark.slow
@targeted
def test_other_epsilons_and_deltas_are_met_within_a_budget_of_just_that_much(
    name: str, digits: DataSet, tmp_path: Path
) -> None:
    method = make(name, epsilon=3.0)
    fed = world(method, digits, tmp_path, public=noise_images(digits), delta=1e-6, budget=3.0).federation
    method.server(fed)
    assert fed.guarantee().epsilon == pytest.approx(3.0, rel=1e-3)
    assert fed.guarantee().delta == (0.0 if PRIVATE[name] == "label" else 1e-6)


@pytest.mark.slow
@targeted
def test_without_an_epsilon_there_is_no_guarantee(name: str, digits: DataSet, tmp_path: Path) -> None:
    _, fed = run(make(name, epsilon=None), digits, tmp_path)
    found = fed.guarantee()
    assert not found.holds
    assert found.epsilon is None
    assert "released unprotected" not in found.reason  # it is the noise that lacks, not the release


def test_fedrd_wants_its_own_network(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "MODELS", {})
    with pytest.raises(ValueError, match="fedrd needs a network in two parts, not a ConvNet; take --model projected"):
        _ = small.spec_of(make("fedrd"), digits.train).facts


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if methods.find(name).__name__ not in small.MODELS])
def test_models_of_the_users_own_work(name: str, digits: DataSet, tmp_path: Path) -> None:
    model, _ = run(make(name), digits, tmp_path, model="own_model:mlp")
    network = getattr(model, "networks", [getattr(model, "trunk", model)])[0]
    assert type(network).__name__ == "Sequential"


@pytest.mark.parametrize("name", ["fedavg-p", "fedauxfdp", "fedaux-f", "fedaux", "fedgm-records"], scope="module")
def test_a_reply_of_another_width_is_refused_and_the_others_are_used(
    name: str, digits: DataSet, tmp_path: Path
) -> None:
    class Narrow(Inline):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                if arrival.client == 1:
                    tensors, header = wire.unpack(arrival.reply)
                    cut = {k: v[..., :-1] if k in ("head", "score", "sums") else v for k, v in tensors.items()}
                    arrival = arrival._replace(reply=wire.pack(cut, header))
                yield arrival

    public = noise_images(digits)
    fed = world(make(name), digits, tmp_path, public=public, transport=Narrow, min_clients=3).federation
    make(name).server(fed)
    assert {(refusal.client, "must be" in refusal.reason) for refusal in fed.journal.refusals()} == {(1, True)}


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@on_cuda
@every
def test_every_method_runs_on_a_gpu(name: str, digits: DataSet, tmp_path: Path) -> None:
    model, fed = run_on("cuda", name, digits, tmp_path)
    assert not fed.journal.refusals()
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert all(torch.isfinite(value).all() for value in state(model).values())
    assert 0 <= fed.last(model).accuracy <= 1


@pytest.mark.gpu
@on_cuda
def test_a_run_on_a_gpu_is_that_of_the_cpu_but_for_rounding(digits: DataSet, tmp_path: Path) -> None:
    there, here = (state(run_on(device, "fedavg", digits, tmp_path / device)[0]) for device in ("cuda", "cpu"))
    # 24 steps of 0.05 with convolutions in TF32, which keeps 10 bits: 1e-3 of each gradient, whose weights move by 0.1
    assert all(torch.allclose(value.cpu(), here[key], rtol=0, atol=5e-3) for key, value in there.items())
