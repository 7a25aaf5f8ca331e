"""Evaluation: batches, and the reuse of the last confusion table."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from fedstill.evaluation import LastConfusion, confusion


class Counting(nn.Module):
    """A linear classifier that notes the sizes of its batches."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(torch.Size(shape).numel(), num_classes)
        self.register_buffer("shift", torch.zeros(num_classes), persistent=False)
        self.sizes: list[int] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        logits: Tensor = self.linear(x.flatten(1)) + self.shift
        return logits


@pytest.fixture
def model(digits: Any) -> Counting:
    return Counting(digits.test.shape, digits.test.num_classes)


def test_batches_do_not_depend_on_the_number_of_classes(digits: Any, model: Counting) -> None:
    table = LastConfusion(digits.test)(model)
    assert int(table.sum()) == sum(model.sizes) == len(digits.test) > 256
    assert set(model.sizes[:-1]) == {256}


def test_the_same_model_is_evaluated_once(digits: Any, model: Counting) -> None:
    last = LastConfusion(digits.test)
    table, seen = last(model).clone(), len(model.sizes)
    last(model).zero_()  # a caller's change stays the caller's
    assert torch.equal(last(model), table) and len(model.sizes) == seen


@pytest.mark.parametrize("change", ["weight", "data", "buffer", "layer", "copy"])
def test_a_change_is_evaluated_anew(change: str, digits: Any, model: Counting) -> None:
    last = LastConfusion(digits.test)
    before = last(model)
    if change == "copy":
        model = copy.deepcopy(model)
        model.linear.forward = lambda x: x.new_zeros(len(x), 10)  # type: ignore[method-assign]
    elif change == "layer":
        model.linear.add_module("later", nn.Identity())
        model.linear.forward = lambda x: x.new_zeros(len(x), 10)  # type: ignore[method-assign]
    elif change == "data":  # moves no version counter
        model.linear.weight.data.neg_()
    else:
        with torch.no_grad():
            (model.linear.bias if change == "weight" else model.get_buffer("shift"))[3] += 1e6
    after = last(model)
    assert torch.equal(after, confusion(model, digits.test)) and not torch.equal(after, before)
