import dataclasses
import json
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float32, UInt8
from pydantic import PositiveInt
from torch import Tensor

from fedstill import schema
from fedstill.protocol import wire
from fedstill.schema import Labels, Parameters, Public, Refused, State

MODEL = {"conv.weight": torch.randn(2, 1, 3, 3), "steps": torch.tensor(3), "half": torch.ones(2, dtype=torch.float16)}
FACTS = schema.Facts(
    sizes={"channels": 1, "height": 2, "width": 2, "classes": 3},
    templates={"state": schema.template(MODEL), "parameters": schema.template({"w": torch.zeros(2)})},
    max_bytes=100_000,
)
FIELDS = schema.schema_of(
    {
        "images": UInt8[Tensor, "n channels height width"],
        "labels": Labels,
        "weights": State,
        "count": PositiveInt,
        "name": str,
    }
)


def good() -> dict[str, Any]:
    return {
        "images": torch.arange(16, dtype=torch.uint8).reshape(4, 1, 2, 2),
        "labels": torch.tensor([0, 1, 2, 2], dtype=torch.uint8),
        "weights": dict(MODEL),
        "count": 7,
        "name": "a 'quoted' näme",
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(left == right)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "bool", "uint16"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
@settings(deadline=None)
def test_one_s_own_message_is_read_where_it_lies(kinds: list[tuple[str, list[int]]]) -> None:
    tensors = {f"t{i}": torch.randn(shape).mul(3).to(getattr(torch, dtype)) for i, (dtype, shape) in enumerate(kinds)}
    data = wire.pack(tensors, {"step": "s"})
    own = bytearray(data)
    found, header = wire.unpack(own)
    assert header == {"step": "s"}
    assert same(found, wire.unpack(data)[0])
    for value in found.values():
        value.zero_()
    if all(dtype != "uint16" for dtype, _ in kinds):  # whose messages are copied
        assert same(wire.unpack(bytes(own))[0], {name: torch.zeros_like(value) for name, value in tensors.items()})


def test_what_goes_in_comes_out_and_equal_values_make_equal_bytes() -> None:
    data = wire.encode(good(), FIELDS, FACTS, {"step": "s"})
    values, envelope = wire.decode(data, FIELDS, FACTS)
    assert same(values, good())
    assert envelope == {"step": "s"} | {}
    assert wire.encode(values, FIELDS, FACTS, {"step": "s"}) == data
    shuffled = dict(reversed(good().items()))
    shuffled["weights"] = dict(reversed(MODEL.items()))
    assert wire.encode(shuffled, FIELDS, FACTS, {"step": "s"}) == data


def test_tensors_of_any_layout_travel() -> None:
    turned = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    leaf = torch.nn.Parameter(torch.randn(3))
    tensors, _ = wire.unpack(wire.pack({"turned": turned, "leaf": leaf, "empty": torch.empty(0, 3)}, {}))
    assert torch.equal(tensors["turned"], turned)
    assert torch.equal(tensors["leaf"], leaf.detach())
    assert tensors["empty"].shape == (0, 3)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"images": good()["images"].float()}, "field 'images' is float32; declared is uint8"),
    "number of axes": ({"images": good()["images"][0]}, "declared is (n, channels, height, width)"),
    "a size of the run": ({"images": torch.zeros(4, 3, 2, 2, dtype=torch.uint8)}, "channels=3; it must be 1"),
    "sizes disagree": ({"labels": torch.zeros(3, dtype=torch.uint8)}, "n=3; it must be 4"),
    "label too high": ({"labels": torch.full((4,), 3, dtype=torch.uint8)}, "value 3; allowed is 0 to 2"),
    "label below 0": ({"labels": torch.full((4,), -1)}, "value -1; allowed is 0 to 2"),
    "state lacks": ({"weights": {"steps": torch.tensor(3)}}, "lacks 'conv.weight'"),
    "state has more": ({"weights": {**MODEL, "x": torch.zeros(1)}}, "has 'x', which the model does not have"),
    "state's shape": ({"weights": {**MODEL, "steps": torch.zeros(1)}}, "the model has torch.int64[]"),
    "NaN": ({"weights": {**MODEL, "half": torch.full((2,), torch.nan, dtype=torch.float16)}}, "not finite"),
    "infinity": ({"weights": {**MODEL, "conv.weight": torch.full((2, 1, 3, 3), -torch.inf)}}, "not finite"),
    "zero count": ({"count": 0}, "field 'count' is 0"),
    "count as text": ({"count": "7"}, "field 'count' is '7'"),
    "count as truth": ({"count": True}, "field 'count' is True"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_message_that_is_not_as_declared_is_refused_on_both_sides(case: str) -> None:
    changed, reason = BAD[case]
    with pytest.raises(Refused, match=r".+") as refused:
        wire.encode(good() | changed, FIELDS, FACTS, {})
    assert reason in str(refused.value)
    # the same content written by someone who does not check
    values = good() | changed
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
    tensors |= {f"weights/{k}": v for k, v in values["weights"].items()}
    data = wire.pack(tensors, {"fields": {k: values[k] for k in ("count", "name")}})
    with pytest.raises(Refused) as refused:
        wire.decode(data, FIELDS, FACTS)
    assert reason in str(refused.value)


def test_too_many_rows_for_this_exchange_are_refused() -> None:
    data = wire.encode(good(), FIELDS, FACTS, {})
    wire.decode(data, FIELDS, FACTS, at_most={"n": 4})
    with pytest.raises(Refused, match="n=4; at most 3 were asked for"):
        wire.decode(data, FIELDS, FACTS, at_most={"n": 3})


def test_missing_and_extra_fields_are_refused() -> None:
    tensors, header = wire.unpack(wire.encode(good(), FIELDS, FACTS, {}))
    with pytest.raises(Refused, match="'extra' is not declared"):
        wire.decode(wire.pack({**tensors, "extra": torch.zeros(1)}, header), FIELDS, FACTS)
    with pytest.raises(Refused, match="'more' is not declared"):
        wire.decode(wire.pack(tensors, {"fields": {**header["fields"], "more": 1}}), FIELDS, FACTS)
    with pytest.raises(Refused, match="'count' is missing"):
        wire.decode(wire.pack(tensors, {"fields": {"name": ""}}), FIELDS, FACTS)
    with pytest.raises(Refused, match="'images' is missing"):
        wire.decode(wire.pack({k: v for k, v in tensors.items() if k != "images"}, header), FIELDS, FACTS)
    with pytest.raises(Refused, match="no object called 'fields'"):
        wire.decode(wire.pack(tensors, {}), FIELDS, FACTS)


@pytest.mark.parametrize("text", [lambda name: name, lambda name: "".join(f"\\u{ord(c):04x}" for c in name)])
def test_tens_of_thousands_of_tensors_are_refused_before_any_is_read(
    text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, header = wire.unpack(wire.encode(good(), FIELDS, FACTS, {}))
    data = wire.pack({**tensors, **{f"weights/{i}": torch.zeros(0) for i in range(1500)}}, header)
    size = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + size].decode().replace("data_offsets", text("data_offsets")).encode()
    facts = dataclasses.replace(FACTS, max_bytes=10**7)
    monkeypatch.setattr("safetensors.torch.load", lambda _: pytest.fail("the tensors were read"))
    with pytest.raises(Refused, match="more than 8 tensors and 1000 other entries"):
        wire.decode(len(head).to_bytes(8, "little") + head + data[8 + size :], FIELDS, facts)
    monkeypatch.setattr(wire, "_MOST", 100)
    with pytest.raises(Refused, match="more than 100 tensors and 1000 other entries"):
        wire.unpack(data)
    assert len(wire.unpack(bytearray(data))[0]) > 1500  # our own, as checkpoints


def test_a_message_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(Refused, match=r"200000 bytes; the limit is 100000 \(--max-message-mb\)"):
        wire.decode(bytes(200_000), FIELDS, FACTS)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_in_the_header_too(text: str) -> None:
    fields = schema.schema_of({"rate": float})
    data = wire.pack({}, {"fields": {"rate": 123.0}}).replace(b"123.0", text.encode().ljust(5)[:9])
    size = int.from_bytes(data[:8], "little") + len(text.encode().ljust(5)[:9]) - 5
    with pytest.raises(Refused):
        wire.decode(size.to_bytes(8, "little") + data[8:], fields, FACTS)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = wire.encode(good(), FIELDS, FACTS, {})
    kind = data.draw(st.sampled_from(["cut", "flip", "noise", "lengthen"]))
    if kind == "cut":
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "lengthen":
        broken = whole + data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "noise":
        broken = data.draw(st.binary(max_size=300))
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        broken = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    try:
        values, _ = wire.decode(broken, FIELDS, FACTS)
    except Refused:
        return
    assert kind == "flip"  # a flipped pixel is still a pixel; everything else must not pass
    schema.check(values, FIELDS, FACTS)


def test_reasons_stay_short_and_printable_whatever_the_message_holds() -> None:
    tensors = {"\x1b[31m" + "x" * 5000: torch.zeros(1)}
    with pytest.raises(Refused) as refused:
        wire.decode(wire.pack(tensors, {"fields": {}}), (), FACTS)
    assert len(str(refused.value)) < 200
    assert str(refused.value).isprintable()


def test_deeply_nested_headers_are_refused() -> None:
    text = json.dumps({"__metadata__": {"fedstill": "[" * 100_000}}).encode()
    with pytest.raises(Refused):
        wire.decode(len(text).to_bytes(8, "little") + text, (), schema.Facts())


def test_public_marks_a_field_and_changes_nothing_else() -> None:
    fields = schema.schema_of({"x": Annotated[Float32[Tensor, " n"], Public()], "k": Annotated[PositiveInt, Public()]})
    assert all(f.protection == "public" for f in fields)
    values = {"x": torch.ones(3), "k": 2}
    assert same(wire.decode(wire.encode(values, fields, FACTS, {}), fields, FACTS)[0], values)
    with pytest.raises(Refused):
        wire.encode({"x": torch.ones(3), "k": 0}, fields, FACTS, {})


def test_parameters_and_state_have_templates_of_their_own() -> None:
    fields = schema.schema_of({"p": Parameters})
    wire.encode({"p": {"w": torch.zeros(2)}}, fields, FACTS, {})
    with pytest.raises(Refused, match="which the model does not have|lacks"):
        wire.encode({"p": MODEL}, fields, FACTS, {})


@pytest.mark.parametrize(("classes", "dtype"), [(2, torch.uint8), (256, torch.uint8), (257, torch.int32)])
def test_labels_take_the_fewest_bytes(classes: int, dtype: torch.dtype) -> None:
    labels = torch.tensor([0, classes - 1])
    packed = schema.compact(labels, classes)
    assert packed.dtype == dtype
    assert torch.equal(packed.long(), labels)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_unsigned_types_are_checked_like_others(dtype: torch.dtype) -> None:
    fields = schema.schema_of({"labels": Labels})
    wire.decode(wire.pack({"labels": torch.tensor([0, 2]).to(dtype)}, {"fields": {}}), fields, FACTS)
    for wrong in (3, 2**16 - 1):
        with pytest.raises(Refused, match="allowed is 0 to 2"):
            wire.decode(wire.pack({"labels": torch.tensor([0, wrong]).to(dtype)}, {"fields": {}}), fields, FACTS)


def test_a_label_that_wraps_is_refused() -> None:
    data = wire.pack({"labels": torch.tensor([-1]).view(torch.uint64)}, {"fields": {}})
    with pytest.raises(Refused, match="value -1; allowed is 0 to 2"):
        wire.decode(data, schema.schema_of({"labels": Labels}), FACTS)


def test_a_header_is_read_up_to_a_limit_only() -> None:
    text = json.dumps({"__metadata__": {"fedstill": "[" + "[]," * wire.MAX_HEADER + "[]]"}}).encode()
    with pytest.raises(Refused, match=f"at most {wire.MAX_HEADER} are read"):
        wire.unpack(len(text).to_bytes(8, "little") + text)


def test_a_name_that_stands_twice_is_refused() -> None:
    data = wire.pack({}, {"fields": {"a": 1, "b": 2}}).replace(b'b\\"', b'a\\"')
    with pytest.raises(Refused, match="a name stands twice"):
        wire.unpack(data)


@pytest.mark.parametrize("count", [0, -1, 2**40, 10**30])
def test_counts_are_small_enough_to_calculate_with(count: int) -> None:
    fields = schema.schema_of({"n": schema.Count})
    with pytest.raises(Refused, match="field 'n' is"):
        wire.decode(wire.pack({}, {"fields": {"n": count}}), fields, FACTS)
