"""The public settings of a run: one class, whose JSON real sites know."""

import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from small import spec_of

from fedstill import methods, schema
from fedstill.base.records import Normalisation, Records
from fedstill.data.sources import DataSet
from fedstill.engines.run_spec import RunSpec

RUN = "0123456789abcdef" * 2
FIRST = (
    f'{{"version":1,"run":"{RUN}","method":"fedavg","settings":{{"rounds":2,"local":{{"lr":0.01,"momentum":0.9,'
    '"weight_decay":0.0,"batch_size":64,"epochs":1,"max_steps":null,"milestones":[],"decay":0.1},"participation":1.0,'
    '"weighting":"records"},"model":"lenet5","shape":[1,8,8],"class_names":["cat","dög"],"mean":[0.25],"std":[0.5],'
    '"seed":0,"max_bytes":536870912,"delta":0.00001,"budget":null,"simulated_noise":true,"models":[],"public":null}'
)


def two_classes() -> Records:
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    return Records(images, torch.zeros(1, dtype=torch.int64), 2, Normalisation((0.25,), (0.5,)))


def test_the_text_that_real_sites_hash_is_what_it_was_in_version_1() -> None:
    """Sites name a run's state folder by a hash of this text; where it changes, they start anew."""
    facts: dict[str, Any] = {"name": "fedavg", "run": RUN, "class_names": ("cat", "dög"), "model": "lenet5"}
    spec = RunSpec.of(methods.find("fedavg")(rounds=2, local={"epochs": 1}), two_classes(), **facts)
    assert spec.text() == FIRST
    more = {"seed": 3, "max_bytes": 10**6, "delta": 1e-6, "budget": 2.0, "simulated_noise": False}
    second = spec.replace(**more, models=("lenet5", "cnn"), public="noise=64").text()
    assert second == FIRST.replace(
        '"seed":0,"max_bytes":536870912,"delta":0.00001,"budget":null,"simulated_noise":true,"models":[],"public":null',
        '"seed":3,"max_bytes":1000000,"delta":1e-6,"budget":2.0,"simulated_noise":false,"models":["lenet5","cnn"],'
        '"public":"noise=64"',
    )
    assert RunSpec.read(second).text() == second


def test_a_spec_survives_the_wire(digits: DataSet) -> None:
    spec = spec_of(
        methods.find("fedavg-p")(space={"dims": 8}), digits.train, name="fedavg-p", budget=2.0, public="noise"
    )
    read = RunSpec.read(spec.text())
    assert read.method == spec.method
    assert read.replace(settings=spec.method) == spec
    assert read.facts == spec.facts
    assert (read.num_classes, read.normalisation) == (10, digits.train.normalisation)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_replaced_fact_is_checked_and_everything_that_follows_from_it_is_new(digits: DataSet) -> None:
    spec = spec_of(methods.find("fedavg")(), digits.train)
    assert spec.facts.max_bytes == spec.max_bytes
    other = spec.replace(max_bytes=30_000, class_names=("a", "b"))
    assert (other.facts.max_bytes, other.facts.sizes["classes"]) == (30_000, 2)
    assert (spec.facts.max_bytes, spec.facts.sizes["classes"]) == (1 << 29, 10)
    for wrong in ({"delta": 2.0}, {"budget": 0.0}, {"run": "x"}, {"temperature": 1.0}, {"settings": 3}):
        with pytest.raises(ValidationError):
            spec.replace(**wrong)


def test_a_method_is_looked_up_only_when_it_is_used(digits: DataSet) -> None:
    text = spec_of(methods.find("fedavg")(), digits.train, name="no_such_package:Method").text()
    read = RunSpec.read(text)
    assert read.name == "no_such_package:Method"
    with pytest.raises(schema.Refused, match="can't be set up"):
        _ = read.method


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=300), data=st.binary(max_size=300))
def test_garbage_is_refused_in_a_sentence(text: str, data: bytes, digits: DataSet) -> None:
    with pytest.raises(schema.Refused, match="the run's spec is invalid"):
        RunSpec.read(text)
    good = json.loads(spec_of(methods.find("fedavg")(), digits.train, name="fedavg").text())
    for key in good:
        broken = {**good, key: data.hex() + "~"}
        try:
            _ = RunSpec.read(json.dumps(broken)).method
        except schema.Refused:
            pass


def test_the_text_of_a_spec_is_bounded() -> None:
    with pytest.raises(schema.Refused, match="the limit is 600,000"):
        RunSpec.read(" " * 700_000)
    with pytest.raises(schema.Refused):
        RunSpec.read("[" * 90_000)
