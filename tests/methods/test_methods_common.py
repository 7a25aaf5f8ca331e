"""Every method gets these tests from one line in ``SMALL``."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small import MODEL, run, weights

from fedstill import methods
from fedstill.data.sources import DataSet
from fedstill.engines.server import ServerFederation
from fedstill.experiment.config import Experiment
from fedstill.protocol import Method, Settings

LOCAL = {"lr": 0.05, "batch_size": 32}
TRAINING = {"epochs": 3}
SMALL: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2, "local": LOCAL},
    "fedprox": {"rounds": 2, "local": LOCAL},
    "fednova": {"rounds": 2, "local": LOCAL},
    "scaffold": {"rounds": 2, "local": LOCAL},
    "real": {"ipc": 2, "training": TRAINING},
    "fedgm": {"ipc": 2, "training": TRAINING, "matching": {"nets": 3, "batch_size": 16}},
}
DOCS = Path(__file__).parents[2] / "docs" / "methods"


def make(name: str) -> Method:
    return methods.get(name)(**SMALL[name])


@pytest.fixture(scope="module")
def whole(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, ServerFederation]]:
    """One undisturbed run of each method."""
    results = {}
    for name in SMALL:
        model, federation = run(make(name), digits, tmp_path_factory.mktemp(name))
        results[name] = weights(model), federation
    return results


def test_every_method_is_tested() -> None:
    assert SMALL.keys() == methods.TABLE.keys()


every = pytest.mark.parametrize("name", SMALL)


@every
def test_it_says_what_it_is_and_what_differs_from_the_paper(name: str) -> None:
    module = __import__(type(make(name)).__module__, fromlist=["x"])
    assert "Differs from the paper" in (module.__doc__ or "")
    assert (make(name).__doc__ or "").strip()
    page = (DOCS / f"{name}.md").read_text()
    assert f"fedstill run {name}" in page


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
    with pytest.raises(ValueError, match="frozen"):
        method.rounds = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="[Ee]xtra"):
        type(method)(nonsense=1)
    assert type(method)(**method.model_dump(mode="json")) == method
    assert pickle.loads(pickle.dumps(method)) == method


@every
def test_the_same_seed_gives_the_same_bytes_with_two_workers_and_shuffled_replies(
    name: str, digits: DataSet, whole: dict[str, tuple[bytes, ServerFederation]], tmp_path: Path
) -> None:
    model, federation = run(make(name), digits, tmp_path, workers=2, shuffle=True)
    expected, first = whole[name]
    assert weights(model) == expected
    assert federation.journal.bytes_up == first.journal.bytes_up
    assert federation.journal.bytes_down == first.journal.bytes_down


@every
def test_another_seed_differs(
    name: str, digits: DataSet, whole: dict[str, tuple[bytes, ServerFederation]], tmp_path: Path
) -> None:
    model, _ = run(make(name), digits, tmp_path, seed=1)
    assert weights(model) != whole[name][0]


@every
def test_it_resumes_from_any_reply(
    name: str, digits: DataSet, whole: dict[str, tuple[bytes, ServerFederation]], tmp_path: Path
) -> None:
    class Crash(BaseException):
        pass

    class Dies(ServerFederation):
        left = 3

        def _judge(self, *args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Crash
            return super()._judge(*args)

    from small import agreement, site

    from fedstill.engines.inprocess import Inline

    inline = Inline(site(make(name), digits.train, tmp_path)())
    dying = Dies(agreement(make(name), digits.train), inline, num_clients=4, folder=tmp_path, test=digits.test)
    with pytest.raises(Crash):
        make(name).server(dying)
    model, _ = run(make(name), digits, tmp_path)
    assert weights(model) == whole[name][0]


@every
def test_the_global_generator_neither_matters_nor_moves(
    name: str, digits: DataSet, whole: dict[str, tuple[bytes, ServerFederation]], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model, _ = run(make(name), digits, tmp_path)
    assert weights(model) == whole[name][0]
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_a_client_that_fails_is_left_out(name: str, digits: DataSet, tmp_path: Path) -> None:
    from small import agreement, site

    from fedstill.engines.inprocess import Inline

    class Broken(Inline):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                yield arrival._replace(reply=arrival.reply[:-1]) if arrival.client == 1 else arrival

    fed = ServerFederation(
        agreement(make(name), digits.train),
        Broken(site(make(name), digits.train, tmp_path)()),
        num_clients=4,
        folder=tmp_path,
        test=digits.test,
        min_clients=3,
    )
    model = make(name).server(fed)
    assert {refusal.client for refusal in fed.journal.refusals()} == {1}
    assert all(torch.isfinite(p).all() for p in model.parameters())


@every
def test_the_guarantee_is_none_and_names_a_field(name: str, whole: dict[str, tuple[bytes, ServerFederation]]) -> None:
    found = whole[name][1].guarantee()
    assert not found.holds
    assert found.epsilon is None
    assert "released unprotected" in found.reason


@every
def test_models_of_the_users_own_work(name: str, digits: DataSet, tmp_path: Path) -> None:
    import small

    before = small.MODEL
    small.MODEL = "own_model:mlp"
    try:
        model, _ = run(make(name), digits, tmp_path)
    finally:
        small.MODEL = before
    assert type(model).__name__ == "Sequential"
    assert MODEL == before
