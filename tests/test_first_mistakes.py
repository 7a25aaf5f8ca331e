"""The first mistakes of a method's author: each is one sentence, when the class is made or where it happens."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float32
from torch import Tensor, nn

import fedstill
from fedstill import Client, Federation, Method, Reply, TooFewReplies, step
from fedstill.protocol import State, load, state
from fedstill.schema import Refused

QUICK: dict[str, Any] = {"data": "digits", "model": "linear", "clients": 2, "limit": 100, "workers": 0}


class Update(Reply):
    weights: State


class Numbers(Reply):
    values: Float32[Tensor, " n"]


# What a class declares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Tensor, "is Tensor; declare a tensor with its type and shape, as Float32"),
        (
            dict[str, Tensor],
            r"is dict\[str, torch.Tensor\]; declare a tensor .*, or named tensors of the model, as State",
        ),
        (list[Tensor], r"is list\[torch.Tensor\]; declare a tensor"),
        (Float32[Tensor, " n"] | None, "declare a tensor with its type and shape"),
        (np.ndarray, "is ndarray; declare a tensor"),
        (nn.Module, "is Module, which no message can carry; use a tensor, a number, a text or a list"),
    ],
)
def test_a_reply_that_no_message_can_carry_fails_when_it_is_made(annotation: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"the field 'x' of the reply Mine .*{words}") as refusal:
        type("Mine", (Reply,), {"__annotations__": {"x": annotation}, "__module__": __name__})
    assert "pydantic" not in str(refusal.value) and "\n" not in str(refusal.value)


def made(function: Any) -> type[Method]:
    namespace = {"__module__": __name__, "update": step(function), "server": lambda self, fed: fed.new_model()}
    return type(Method)("Mine", (Method,), namespace)  # type: ignore[no-any-return]


def test_a_step_without_types_fails_when_it_is_made() -> None:
    def bare(self: Any, client: Client):  # type: ignore[no-untyped-def]
        return None

    def untyped(self: Any, client: Client, weights) -> Update:  # type: ignore[no-untyped-def]
        return Update(weights=weights)

    def backwards(client: Client, self: Any) -> Update:
        raise AssertionError

    def number(self: Any, client: Client) -> int:
        return 3

    def tensor(self: Any, client: Client, weights: Tensor) -> Update:
        raise AssertionError

    for function, words in (
        (bare, "the step bare has no return annotation; write def bare"),
        (untyped, "the step untyped has no type for its argument 'weights'"),
        (backwards, r"the step backwards must begin with \(self, client\), not \(client, self\)"),
        (number, "the step number must return a class derived from fedstill.Reply, not <class 'int'>"),
        (tensor, "the field 'weights' of the step Mine.tensor is Tensor; declare a tensor with its type"),
    ):
        with pytest.raises(TypeError, match=words):
            made(function)


# What a step does ----------------------------------------------------------------------------------------------------


class Mine(Method):
    wrong: str = ""

    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        asks: dict[str, Any] = {
            "number": lambda: fed.ask(self.send, 3),
            "state": lambda: fed.ask(self.send, state(model)),
        }
        asks["beyond"] = lambda: fed.ask(self.send, [0, 7])
        asks["no step"] = lambda: fed.ask("send")  # type: ignore[arg-type]
        for _ in asks.get(self.wrong, lambda: fed.ask(self.send))():
            pass
        return model

    @step
    def send(self, client: Client) -> Numbers:
        if self.wrong == "bug":
            return {}["missing"]  # type: ignore[no-any-return]
        if self.wrong == "value":
            raise ValueError("too small; give more")
        if self.wrong == "frozen":
            self.cache = 1  # type: ignore[attr-defined]
        if self.wrong == "other reply":
            return Update(weights={})  # type: ignore[return-value]
        values: Any = torch.zeros(3)
        values = {"numpy": values.numpy(), "grad": values.requires_grad_(), "list": [1.0]}.get(self.wrong, values)
        return Numbers(values=values.detach() if self.wrong == "" else values)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("bug", KeyError, "missing"),
        (
            "frozen",
            AttributeError,
            "Mine is frozen, so self.cache can't be set; keep what a client needs",
        ),
        ("other reply", TypeError, "step send returned a Update; it must return Numbers"),
        ("number", TypeError, r"fed.ask\(self.send, to=...\) has 3, which is no number of a client \(0 to 1\)"),
        ("state", TypeError, "has 'classifier.weight', which is no number .*; give the step's arguments by name"),
        ("beyond", TypeError, "has 7, which is no number of a client"),
        ("no step", TypeError, "fed.ask takes a step of the method, as self.update, not a str"),
    ],
)
def test_a_bug_arrives_as_itself(wrong: str, kind: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        fedstill.run(Mine(wrong=wrong), out=tmp_path / "run", **QUICK)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("numpy", r"field 'values' is a ndarray; it must be a tensor; send torch.from_numpy"),
        ("grad", r"field 'values' requires grad; send its .detach\(\)"),
        ("list", "field 'values' is a list; it must be a tensor"),
        ("value", "too small; give more"),
    ],
)
def test_a_reply_that_does_not_fit_is_the_cause(wrong: str, words: str) -> None:
    with pytest.raises(TooFewReplies, match=words) as failure:
        fedstill.run(Mine(wrong=wrong), **QUICK)
    assert isinstance(failure.value.__cause__, Refused if wrong != "value" else ValueError)
    assert failure.value.__cause__.__traceback__ is not None


def test_one_failure_ends_no_run_that_needs_fewer_clients(tmp_path: Path) -> None:
    class Sometimes(Mine):
        @step
        def send(self, client: Client) -> Numbers:
            if client.id == 1:
                raise KeyError("one of two")
            return Numbers(values=torch.zeros(3))

    run = fedstill.run(Sometimes(), out=tmp_path / "run", min_clients=1, **QUICK)
    assert [refusal.client for refusal in run.refused] == [1]


# Global generators ---------------------------------------------------------------------------------------------------


class Draws(Method):
    def server(self, fed: Federation) -> nn.Module:
        for _ in fed.rounds(2):
            for reply in fed.ask(self.draw):
                print(*reply.values.tolist(), flush=True)
        model = fed.new_model()
        load(model, state(model))
        return model

    @step
    def draw(self, client: Client) -> Numbers:
        drawn = [np.random.random(), random.random(), float(torch.rand(()))]  # noqa: NPY002
        return Numbers(values=torch.tensor(drawn))


def test_a_steps_global_generators_are_seeded_and_restored(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn() -> list[str]:
        fedstill.run(Draws(), **QUICK)
        return capsys.readouterr().out.split()

    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    expected = np.random.random(), random.random()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    first = drawn()
    assert (np.random.random(), random.random()) == expected  # noqa: NPY002
    assert first == drawn() and len(set(first)) == len(first) == 12
