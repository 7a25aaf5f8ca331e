"""One client's well-formed but absurd reply ends nobody's run, neither at once nor when the run is resumed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rogue import MAX, Change, counting, none, of, reasons, times

from fedstill.data.sources import DataSet
from fedstill.engines import reply_checks
from fedstill.engines.client_evaluation import ConfusionReply
from fedstill.methods.fedavg import Update

HOSTILE: dict[tuple[str, str], tuple[Change, str]] = {
    ("fedsd2c", "no images"): (none, "at least 1 is needed"),
    ("fedpft", "counts of 0"): (counting(0), "has the value 0; allowed is 1 to"),
    ("fedgm-labels", "counts of -1"): (counting(-1), "has the value -1; allowed is 0 to"),
    ("fedgm-labels", "counts of 2^62"): (counting(2**62), "allowed is 0 to"),
    ("fedcvae", "the largest floats"): (of(MAX), "the limit is 1000 times that"),
    ("fedcvae", "large floats"): (of(1e12), "the limit is 1000 times that"),
    ("fedrd", "the largest floats"): (of(MAX), "the limit is 1000 times that"),
    ("fedmd", "the largest floats"): (of(MAX), "the limit is 1000 times that"),
    ("fedrd-records", "the smallest floats"): (of(-MAX), "of magnitude 3.4e+38; the limit is 1e+18"),
    ("fedauxfdp", "the largest floats"): (of(MAX), "of magnitude 3.4e+38; the limit is 1e+18"),
}


@pytest.mark.parametrize(("name", "kind"), HOSTILE, ids=map(" ".join, HOSTILE))
def test_a_run_goes_on_without_a_client_whose_reply_would_spoil_it(
    name: str, kind: str, digits: DataSet, tmp_path: Path
) -> None:
    change, expected = HOSTILE[name, kind]
    found = reasons(name, change, digits, tmp_path)
    assert found
    assert all(expected in reason for reason in found)
    honest = reasons(name, dict, digits, tmp_path)  # the same folder: a resumed run
    assert honest == found


@pytest.mark.parametrize("change", [counting(0), lambda sent: {**none(sent), "counts": sent["counts"]}])
def test_a_client_without_labels_gives_no_images(change: Change, digits: DataSet, tmp_path: Path) -> None:
    assert reasons("fedgm-labels", change, digits, tmp_path) == set()


@pytest.mark.parametrize(("name", "factor"), [("afl", 1e9), ("fedrd-records", 1e9), ("fedmd", 100.0), ("fedrd", 100.0)])
def test_large_but_possible_numbers_are_used(name: str, factor: float, digits: DataSet, tmp_path: Path) -> None:
    assert reasons(name, times(factor), digits, tmp_path) == set()  # sums grow with a client's records


def test_replies_of_whole_numbers_have_no_sizes() -> None:
    """So the sizes of the last weights are kept over an evaluation, for the sentence on a model that is not finite."""
    replies: Any = SimpleNamespace(clients=[0, 1])
    assert reply_checks.sizes_of(replies, ConfusionReply.schema, {0: 0.0, 1: 0.0}) == {}
    assert reply_checks.sizes_of(replies, Update.schema, {0: 3.0, 1: 0.0}) == {0: 3.0, 1: 0.0}
