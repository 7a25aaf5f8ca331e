"""What a run says before its first request."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill import Experiment, FedAvg, Job, methods, run
from fedstill.experiment import checks
from fedstill.experiment.estimate import estimate
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import share_out
from fedstill.models import build

TASK = Experiment(data="digits", limit=60, clients=2, workers=0)


def _said(caplog: pytest.LogCaptureFixture, *models: str, **facts: Any) -> list[str]:
    checks.warn_once.cache_clear()
    caplog.clear()
    task = share_out(TASK, None)
    for model in models:
        experiment = TASK.model_copy(update={"model": model, **facts})
        with caplog.at_level(logging.WARNING, "fedstill"):
            checks.warn_of_depth(spec_of(Job(experiment, FedAvg(), "unused"), task))
    return caplog.messages


def test_a_network_too_deep_for_its_images_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    said = _said(caplog, "convnet:width=4", "convnet:width=4")
    assert said == [
        "the last block of model convnet:width=4 normalises 2 x 2 positions or fewer, which leaves little of images of "
        "8 x 8 pixels: expect a low accuracy, or take a block less (depth=2) or larger images (--size)"
    ]
    assert _said(caplog, "linear", models=("linear", "convnet:width=4"))[0].startswith(
        "the last block of model convnet"
    )


@pytest.mark.parametrize("model", ["convnet:width=4,depth=2", "convnet:width=4,norm=none", "convnet:norm=batch", "mlp"])
def test_other_networks_are_not(model: str, caplog: pytest.LogCaptureFixture) -> None:
    assert _said(caplog, model) == []


@pytest.mark.parametrize(
    ("shape", "depth", "positions"),
    [((1, 28, 28), 3, 64), ((3, 32, 32), 3, 64), ((1, 8, 8), 3, 4), ((1, 8, 8), 2, 16), ((3, 12, 9), 3, 6)],
)
def test_positions_of_the_last_block(shape: tuple[int, int, int], depth: int, positions: int) -> None:
    assert build(f"convnet:width=4,depth={depth}", shape, 3).positions == positions


def test_a_run_and_a_dry_run_say_it(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(TASK.model_copy(update={"model": "convnet:width=4"}), FedAvg(rounds=1), f"{tmp_path}/run")
    for start in (estimate, run):
        checks.warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedstill"):
            start(job)  # type: ignore[operator]
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", [name for name in methods.TABLE if methods.find(name).needs_public])
def test_a_method_that_needs_public_records_is_refused_before_anything_is_done(name: str) -> None:
    kind = methods.find(name)
    experiment = TASK.model_copy(update={"local_test": 0.2 if kind.personal else 0.0})
    with pytest.raises(ValueError, match=f"^{name} needs public .*--public, as --public (noise|held=1000)$"):
        checks.check_job(Job(experiment, kind(), "unused"))
    checks.check_job(Job(experiment.model_copy(update={"public": "held=9"}), kind(), "unused"))


def test_a_run_without_a_record_to_evaluate_on_is_refused_before_it_asks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--validation is 0.002, which leaves no validation record of so few"):
        run(Job(TASK.model_copy(update={"validation": 0.002}), FedAvg(rounds=1), tmp_path / "run"))
    images = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
    np.savez(tmp_path / "two.npz", x_train=images, y_train=[0, 1])
    with pytest.raises(ValueError, match="two.npz' has no test record; add some"):
        run(Job(TASK.model_copy(update={"data": str(tmp_path / "two.npz"), "limit": None}), FedAvg(), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
