"""The boundary: steps and their requests, parts that stay at clients, and which members a method's author sees."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from fedstill import methods
from fedstill.data.sources import DataSet
from fedstill.engines.client import RequestResults
from fedstill.protocol import (
    Client,
    Method,
    Reply,
    Settings,
    State,
    Step,
    client_steps,
    load_own,
    own_part,
    public_images,
    returns_run_model,
    shared_part,
    step,
    wire,
)

HOOKS = {
    "first_draw",
    "for_number",
    "opened",
    "personal",
    "needs_public",
    "images_only",
    "numeric",
    "protects",
    "claims",
    "mixed",
    "first_reply",
    "server",
    "own",
    "personal_model",
    "rebuild",
    "rebuilds",
}


@dataclass(frozen=True)
class Map:
    weights: State
    mean: Float32[Tensor, " features"]
    radius: float


class Sum(Reply):
    total: float


class Whole(Method):
    """Sends a dataclass."""

    def server(self, fed: Any) -> Any:
        model = fed.new_model()
        values = small.state(model)
        replies = fed.ask(self.add, scale=2.0, map=Map(values, torch.arange(3.0), 0.5))
        assert [reply.total for reply in replies] == [2.0 * (3.0 + 0.5)] * 4
        return model

    @step
    def add(self, client: Client, scale: float, map: Map) -> Sum:
        assert isinstance(map, Map)
        assert client.new_model(map.weights).state_dict().keys() == map.weights.keys()
        return Sum(total=scale * (float(map.mean.sum()) + map.radius))


class Apart(Method):
    """Sends the same fields one by one."""

    @step
    def add(
        self, client: Client, scale: float, weights: State, mean: Float32[Tensor, " features"], radius: float
    ) -> Sum:
        raise NotImplementedError


def test_a_dataclass_crosses_as_its_fields(digits: DataSet, tmp_path: Path) -> None:
    small.run(Whole(), digits, tmp_path)
    facts = small.spec_of(Whole(), digits.train).facts
    value = Map(small.state(small.spec_of(Whole(), digits.train).new_model()), torch.ones(2), 1.5)
    fields = {"scale": 3.0, "weights": value.weights, "mean": value.mean, "radius": value.radius}
    payload = Whole.add.payload({"map": value, "scale": 3.0})
    assert payload.keys() == fields.keys()
    as_one = wire.encode(payload, Whole.add.request, facts, {})
    assert as_one == wire.encode(fields, Apart.add.request, facts, {})
    back = Whole.add.arguments(wire.decode(as_one, Whole.add.request, facts)[0])
    assert back.keys() == {"scale", "map"}
    assert (back["scale"], back["map"].radius) == (3.0, 1.5)
    assert torch.equal(back["map"].mean, value.mean)
    assert back["map"].weights.keys() == value.weights.keys()


def test_a_dataclass_whose_field_another_argument_has_is_a_mistake() -> None:
    def twice(self: Any, client: Client, mean: float, map: Map) -> Sum:
        return Sum(total=0.0)

    with pytest.raises(AssertionError, match="step twice has two fields of one name in 'map'"):
        _ = Step(twice).request


def test_an_argument_of_another_name_is_refused(digits: DataSet, tmp_path: Path) -> None:
    class Wrong(Whole):
        def server(self, fed: Any) -> Any:
            fed.ask(self.add, scale=2.0, maps=Map({}, torch.ones(1), 0.5))

    with pytest.raises(ValueError, match="field 'weights' is missing"):
        small.run(Wrong(), digits, tmp_path)


def test_a_result_is_computed_once_for_a_request_and_the_last_request_s_are_kept() -> None:
    cache: dict[tuple[bytes, str], Any] = {}
    calls: list[str] = []

    def result(request: bytes, name: str) -> str:
        def compute() -> str:
            calls.append(name)
            return f"{request!r} {name}"

        return RequestResults(cache, request).once(name, compute)

    for _ in range(3):
        assert result(b"one", "a") == "b'one' a"
        assert result(b"one", "b") == "b'one' b"
    assert calls == ["a", "b"]
    assert result(b"two", "a") == "b'two' a"
    assert len(cache) == 1
    assert result(b"one", "b") == "b'one' b"
    assert calls == ["a", "b", "a", "b"]


class Common(Method):
    """Computes a value once for all clients of a request."""

    def server(self, fed: Any) -> Any:
        for number in range(2):
            replies = fed.ask(self.look, number=number)
            # the first client's number, since it alone computed it; per request
            assert [reply.total for reply in replies] == [10.0 * number + replies.clients[0]] * 4
        return fed.new_model()

    @step
    def look(self, client: Client, number: int) -> Sum:
        return Sum(total=client.once("x", lambda: 10.0 * number + client.id))


def test_clients_of_one_process_share_what_a_step_computes_once(digits: DataSet, tmp_path: Path) -> None:
    small.run(Common(), digits, tmp_path)


def test_the_state_is_the_shared_and_the_own_part(digits: DataSet) -> None:
    method = methods.find("fedrep")()
    spec = small.spec_of(method, digits.train)
    model, other = spec.new_model(), spec.new_model(draw=1)
    shared, own = shared_part(method, model), own_part(method, model)
    assert own.keys() == method.own(model) and not own.keys() & shared.keys()
    assert [name for name in small.state(model) if name in shared] == list(shared)
    load_own(method, other, own | {"unknown": torch.ones(1)})
    assert all(torch.equal(small.state(other)[name], value) for name, value in own.items())
    assert not all(torch.equal(small.state(other)[name], value) for name, value in shared.items())


def test_a_method_s_author_sees_these_members() -> None:
    assert {name for name in vars(Method) if not name.startswith("_")} - {"model_config"} == HOOKS
    assert client_steps(Whole).keys() == {"add"}


@pytest.mark.parametrize("name", methods.TABLE)
def test_a_method_s_loop_and_steps_are_its_own(name: str) -> None:
    kind = methods.find(name)
    assert "server" in vars(kind)
    for base in kind.__mro__[1:]:
        if not base.__module__.startswith("fedstill") or base in (Method, Settings):
            continue
        functions = {key for key, value in vars(base).items() if callable(value) and not key.startswith("_")}
        assert not functions - {"model_post_init", "rebuild", "for_number"}, base  # no loop, no step
        assert not issubclass(base, Method)
    assert client_steps(kind).items() <= vars(kind).items()


def test_methods_with_a_model_of_their_own_rebuild_it() -> None:
    assert {name for name in methods.TABLE if not returns_run_model(methods.find(name))} == {
        "fedavg-p",
        "fedd-p",
        "fedauxfdp",
        "fedaux-f",
        "afl",
        "deepafl",
        "fedcgs",
        "gh-ofl",
        "fedpft",
        "fedcof",
        "sim-pe",
        "safle",
        "fens",
        "fafi",
    }


def test_too_few_public_images_are_refused(digits: DataSet) -> None:
    assert public_images(digits.train[:2], "x").images is not None
    for public, count in ((None, 0), (digits.train[:1], 1)):
        with pytest.raises(ValueError, match=f"^x needs public images, 2 at least, and has {count}; name some"):
            public_images(public, "x")


def test_a_network_that_is_made_again_is_declared() -> None:
    """Whether clients can evaluate the result hangs on the declaration, so that none can be forgotten."""
    with pytest.raises(TypeError, match="Mine has a method rebuild, but rebuilds is False; set it to True"):

        class Mine(Whole):
            def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
                return network

    class Mix:
        def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
            return network

    with pytest.raises(TypeError, match="Both has a method rebuild, but rebuilds is False; set it to True"):

        class Both(Mix, Whole):  # type: ignore[misc]
            pass
