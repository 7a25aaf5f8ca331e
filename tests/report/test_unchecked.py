"""A guarantee that rests on a user's own code says so wherever its number stands."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import Float64
from torch import Tensor, nn

import fedstill
from fedstill import Client, Federation, Method, Released, Reply, methods, step
from fedstill.engines.server import guarantee_of
from fedstill.privacy.ledger import Charge
from fedstill.privacy.mechanisms import NoisySum
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import load, state
from fedstill.report import export, guarantees, pareto, tables
from fedstill.report.groups import group


class Sum(Reply):
    total: Released[Float64[Tensor, " columns"]]


class Centred(Method):
    """Rows centred by the client's own mean, so that each row depends on all records."""

    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        for _ in fed.ask(self.send):
            pass
        load(model, state(model))
        return model

    @step
    def send(self, client: Client) -> Sum:
        rows = client.train.images.float()
        return Sum(total=client.release(NoisySum(radius=1.0, noise_multiplier=4.0), rows - rows.mean(0)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedstill.RunRecord:
    data = (torch.randn(80, 3, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 2)
    settings: dict[str, Any] = {"model": "linear", "clients": 2, "mean": (0.0,), "std": (1.0,), "num_classes": 2}
    return fedstill.run(Centred(), data=data, out=tmp_path_factory.mktemp("own") / "run", workers=0, **settings)


WORDS = "if Centred keeps records apart (unchecked)"


def test_the_word_of_a_method_of_ones_own_stands_beside_its_epsilon(run: fedstill.RunRecord, tmp_path: Path) -> None:
    assert run.guarantee.holds and run.guarantee.unchecked == "Centred"
    assert WORDS in guarantees.words(run.guarantee) and WORDS in repr(run)
    assert any("nobody checked" in sentence for sentence in guarantees.explained(run.guarantee, sent=True))
    assert WORDS in tables.cells(group([run])[0])[0][-2]
    fedstill.write_report([run], tmp_path / "report.html")
    export.write_tables([run], tmp_path, latex=True, markdown=True)
    fedstill.publish(run, tmp_path / "handed")
    for name in ("report.html", "table.tex", "table.csv", "runs.csv", "handed/README.md"):
        assert WORDS in (tmp_path / name).read_text(), name
    assert "Centred keeps records apart" in (tmp_path / "table.md").read_text().replace("\\", "")
    assert '"unchecked": "Centred"' in (tmp_path / "table.json").read_text()


@pytest.fixture(scope="module")
def own_net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("net") / "own_net.py"
    place.write_text("def net(shape, classes):\n    raise NotImplementedError\n")
    return place


@pytest.mark.parametrize(
    ("model", "models", "mechanism", "word"),
    [
        ("convnet:width=4", (), "SecondMoments", None),
        ("OWN", (), "SecondMoments", "own_net.py:net"),
        ("convnet", ("convnet", "OWN"), "DPSGD", "own_net.py:net"),
        ("OWN", (), "ClippedUpdate", None),  # its unit is the client, whose whole update is clipped
    ],
)
def test_the_word_of_a_model_of_ones_own_stands_beside_the_epsilon_of_rows(
    model: str, models: tuple[str, ...], mechanism: str, word: str | None, own_net: Path
) -> None:
    model, *others = (f"{own_net}:net" if name == "OWN" else name for name in (model, *models))
    event = Gaussian(noise_multiplier=4.0)
    facts: dict[str, Any] = {"exchange": 0, "step": "s", "index": 0, "theorem": "", "unit": "record"}
    charge = Charge(mechanism=mechanism, event=event, **facts)
    method = methods.find("fedcgs")()
    shown = SimpleNamespace(method=method, model=model, models=tuple(others), delta=1e-5, budget=None)
    spec: Any = SimpleNamespace(**vars(shown), simulated_noise=False, sums=None)
    found = guarantee_of([], {0: [charge]}, spec)
    assert found.holds and found.unchecked == word and found.pairs is None


def test_it_stands_beside_an_epsilon_among_costs(run: fedstill.RunRecord, tmp_path: Path) -> None:
    other = replace(run, label="other", config={**run.config, "method": {**run.config["method"], "name": "other"}})
    found = pareto.pictures([run, other])
    export.write_fronts(found, tmp_path, export.told([run, other]))
    for name in ("pareto.csv", "pareto.md"):
        text = (tmp_path / name).read_text()
        assert text.count(WORDS) == 2, name
        assert "The privacy noise is simulated" in text, name
    assert WORDS in pareto.cells(found[0])[0][3]


def test_a_method_of_fedstill_needs_no_word() -> None:
    found = fedstill.run("ldp-fedavg", data="digits", model="linear", clients=2, limit=100, rounds=1, workers=0)
    assert (
        found.guarantee.holds and not found.guarantee.unchecked and "unchecked" not in guarantees.words(found.guarantee)
    )
