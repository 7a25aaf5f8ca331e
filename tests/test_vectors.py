"""``tests/vectors``: fedstill and an independent computation on the good cases, and refusals of the bad ones."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import exact
import mpmath
import noise_cases
import pytest
import vector_files
import wire_cases
from pydantic import TypeAdapter, ValidationError
from safetensors import torch as st

from fedstill.privacy import accounting, lattice
from fedstill.privacy.releases import Event
from fedstill.protocol import wire
from fedstill.schema import Refused

FOLDER = Path(__file__).parent / "vectors"
EVENTS: TypeAdapter[list[Event]] = TypeAdapter(list[Event])
ROUNDED_UP = 1e-8
"""Largest relative excess of an epsilon, of loss distributions in 1e-4 steps rounded to the safe side (found: 5e-9)."""


def content(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    assert found["format"] == 1
    return found


WIRE, NOISE, GUARANTEES = (content(name) for name in ("wire.json", "noise.json", "guarantees.json"))


def named(cases: list[dict[str, Any]], good: bool | None = None) -> list[Any]:
    return [pytest.param(c, id=c.get("why", c["name"])) for c in cases if good is None or c["good"] == good]


def test_the_files_are_what_the_program_writes_today() -> None:
    """But for epsilons, of which the last digits may differ between versions of mpmath."""
    made = vector_files.contents()
    assert made["wire.json"] == WIRE
    assert made["noise.json"]["lattice"] == json.loads(json.dumps(NOISE["lattice"]))
    assert [c["name"] for c in made["guarantees.json"]["cases"]] == [c["name"] for c in GUARANTEES["cases"]]


@pytest.mark.parametrize("case", named(WIRE["cases"], good=True))
def test_a_good_message_is_read_and_written_byte_for_byte(case: dict[str, Any]) -> None:
    data, fields = bytes.fromhex(case["message"]), wire_cases.FIELDS[case["kind"]]
    values, envelope = wire.decode(data, fields, wire_cases.FACTS, at_most=wire_cases.AT_MOST)
    assert wire_cases.plain(values) == case["values"] and envelope == case["envelope"]
    assert wire.encode(values, fields, wire_cases.FACTS, envelope) == data


@pytest.mark.parametrize("case", named(WIRE["cases"], good=True))
def test_the_values_are_those_of_the_public_format(case: dict[str, Any]) -> None:
    """Safetensors' own reader, and JSON, see the same: another implementation needs nothing of fedstill's."""
    data = bytes.fromhex(case["message"])
    tensors = {name: wire_cases.plain(value) for name, value in st.load(data).items()}
    own = json.loads(wire_cases.parts(data)[0]["__metadata__"]["fedstill"])
    flat: dict[str, Any] = {}
    for name, value in case["values"].items():
        if name == "weights":
            flat |= {f"{name}/{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    assert {**tensors, **own["fields"]} == flat
    assert {key: own[key] for key in ("step", "exchange")} == case["envelope"]


@pytest.mark.parametrize("case", named(WIRE["cases"], good=False))
def test_a_bad_message_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        fields = wire_cases.FIELDS[case["kind"]]
        wire.decode(bytes.fromhex(case["message"]), fields, wire_cases.FACTS, at_most=wire_cases.AT_MOST)
    assert "\n" not in str(caught.value)


def quantile(first: int, second: int) -> float:
    """The standard normal value of two words (`base.seeds.Entropy.gaussian`), with mpmath's inverse of the law."""
    top = first >> 11
    exponent = (top.bit_length() if top else 0) - 54
    lower = (mpmath.mpf(1) + mpmath.mpf(second >> 12) / 2**52) * mpmath.mpf(2) ** (exponent - 1)
    value = mpmath.sqrt(2) * mpmath.erfinv(2 * lower - 1)
    return float(value * (1 if second & 1 else -1))


def on_its_grid(case: dict[str, Any]) -> bool:
    """Whether exact rational arithmetic, from the case's words alone, releases the same."""
    std, values = float.fromhex(case["std"]), [float.fromhex(x) for x in case["exact"]]
    grid = Fraction(2) ** (math.frexp(std)[1] - 11)
    for i, value in enumerate(values):
        words = (noise_cases.word(case["name"], i), noise_cases.word(case["name"], i + len(values)))
        bounded = max(min(Fraction(value), grid * 2**51), -grid * 2**51)
        cells = round((bounded + Fraction(std) * Fraction(quantile(*words))) / grid)
        if Fraction(float.fromhex(case["released"][i])) != cells * grid:
            return False
    return True


@pytest.mark.parametrize("case", named(NOISE["grid"]))
def test_noise_lies_on_its_grid(case: dict[str, Any]) -> None:
    assert on_its_grid(case) == case["good"]
    values = [float.fromhex(x) for x in case["exact"]]
    released = noise_cases.added(case["name"], float.fromhex(case["std"]), values)
    assert ([x.hex() for x in released] == case["released"]) == case["good"]


def drawn(name: str, variance: float, wanted: int) -> list[int]:
    """Discrete Gaussians by the rule of `privacy.lattice`, in 60 digits from the first comparison to the last."""
    source, found = (noise_cases.word(name, i) for i in range(10**6)), []
    block = max(0, math.frexp(math.sqrt(variance))[1] - 1)
    size = 1 << block
    with mpmath.workdps(60):
        last = math.ceil(math.sqrt(2 * 89 * variance) / size)
        weights = [mpmath.exp(-(mpmath.mpf(size * q) ** 2) / (2 * mpmath.mpf(variance))) for q in range(last + 1)]
        total, so_far = mpmath.fsum(weights), [mpmath.fsum(weights[: q + 1]) for q in range(last + 1)]
        while len(found) < wanted:
            many = wanted - len(found) + (wanted - len(found)) // 2 + 64
            words = [next(source) for _ in range(3 * many)]
            for first, second, third in zip(*(words[k * many : (k + 1) * many] for k in range(3)), strict=True):
                q = sum(mpmath.mpf(first) / 2**64 >= each / total for each in so_far)
                r, negative = second % size, second >> 63
                stays = mpmath.mpf(third) / 2**64 < mpmath.exp(
                    -mpmath.mpf(r * (2 * size * q + r)) / (2 * mpmath.mpf(variance))
                )
                value = size * q + r
                if stays and not (negative and value == 0):
                    found.append(-value if negative else value)
    return found[:wanted]


@pytest.mark.parametrize("case", named(NOISE["lattice"], good=True))
def test_discrete_noise_is_its_words_by_the_rule(case: dict[str, Any]) -> None:
    many = len(case["values"])
    assert noise_cases.discrete(case["name"], case["variance"], many) == case["values"]
    assert drawn(case["name"], case["variance"], many) == case["values"]


@pytest.mark.parametrize("case", named(NOISE["lattice"], good=False))
def test_discrete_noise_out_of_its_range_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="variance of discrete noise"):
        lattice.discrete_gaussian((2,), float(case["variance"]), noise_cases.Words("bad"))


@pytest.mark.parametrize("case", named(GUARANTEES["cases"], good=True))
def test_a_composed_guarantee_is_the_exact_one_rounded_up(case: dict[str, Any]) -> None:
    found = accounting.epsilon(EVENTS.validate_python(case["events"]), case["delta"], case["unit"])
    if case["epsilon"] is None:
        assert found == math.inf
        return
    least = float(exact.epsilon(case["events"], case["delta"], case["unit"]))
    assert case["epsilon"] == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert found >= least * (1 - 1e-9)
    pure = [e["epsilon"] for e in case["events"] if e["kind"] == "pure"]
    alone = sum(pure) if len(pure) == len(case["events"]) == 1 else 0.0  # stated with delta 0
    assert found <= max(least * (1 + ROUNDED_UP), alone)


def refused(case: dict[str, Any]) -> bool:
    try:
        accounting.epsilon(EVENTS.validate_python(case["events"]), case["delta"], case["unit"])
    except (ValidationError, ValueError):
        return True
    return False


@pytest.mark.parametrize("case", named(GUARANTEES["cases"], good=False))
def test_releases_that_cannot_be_are_refused(case: dict[str, Any]) -> None:
    assert refused(case)


@pytest.mark.parametrize("case", named(GUARANTEES["filter"]))
def test_a_filter_admits_up_to_its_bound(case: dict[str, Any]) -> None:
    events = EVENTS.validate_python(case["events"])
    assert accounting.admits(events, events[0], case["epsilon"], case["delta"]) == case["admitted"]


def test_the_independent_computations_tell_what_is_wrong() -> None:
    """Noise that is larger by 1e-8, and numbers that are one cell away."""
    case = next(c for c in GUARANTEES["cases"] if c["name"] == "one Gaussian")
    wrong = float(exact.epsilon([{**case["events"][0], "noise_multiplier": 1 + 1e-8}], case["delta"], "record"))
    assert wrong != pytest.approx(case["epsilon"], rel=1e-9)
    grid = next(c for c in NOISE["grid"] if c["good"])
    moved = [(float.fromhex(x) + 2.0**-10).hex() for x in grid["released"]]
    assert not on_its_grid({**grid, "released": moved})
