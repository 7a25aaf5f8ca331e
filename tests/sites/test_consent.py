"""The proposal to a site's operator names everything that a run asks for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from real_sites import make_site

from fedstill import methods
from fedstill.base.records import Normalisation, Records
from fedstill.data.sources import DataSet
from fedstill.engines.run_spec import RunSpec
from fedstill.sites.site.decisions import proposal, words


def lines_for(tmp_path: Path, digits: DataSet, names: tuple[str, ...], **settings: Any) -> list[str]:
    site = make_site(tmp_path, digits, methods=["dp-fl"], budget=100.0)
    method = methods.find("dp-fl")(**settings)
    vectors = Records(torch.zeros(20, 5), torch.arange(20) % len(names), len(names), Normalisation((0.0,), (1.0,)))
    spec = RunSpec.of(method, vectors, name="dp-fl", run="f" * 32, model="mlp", class_names=names)
    return words(proposal(site, {"run": "r", "time": "now", "step": "update", "spec": spec.text()}))


@pytest.mark.parametrize(("classes", "end"), [(3, "3 classes: c0, c1, c2"), (12, "c9 and 2 more")])
def test_classes_that_are_not_named_are_counted(tmp_path: Path, digits: DataSet, classes: int, end: str) -> None:
    text = lines_for(tmp_path, digits, tuple(f"c{i}" for i in range(classes)))
    (line,) = (line for line in text if "model:" in line)
    assert "vectors of 5 numbers" in line and line.endswith(end)


def test_each_changed_setting_has_a_line_however_many_there_are(tmp_path: Path, digits: DataSet) -> None:
    local = {"lr": 0.125, "steps": 3, "clip": 7.5, "batch_size": 17, "supposed_records": 1234}
    text = lines_for(tmp_path, digits, ("a", "b"), noise_multiplier=2.5, local=local)
    start = text.index("  settings:") + 1
    shown = dict(line.strip().split(" = ") for line in text[start : text.index("  step update:") - 1])
    assert shown == {"noise_multiplier": "2.5", **{f"local.{name}": str(value) for name, value in local.items()}}
