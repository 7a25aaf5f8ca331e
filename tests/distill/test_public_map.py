"""The size of a public map, known before it is computed."""

import logging
import re

import pytest
import torch
from torch import Tensor, nn

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.distill import public_map
from fedstill.distill.public_map import PublicMap
from fedstill.protocol import wire


class Wide(nn.Module):
    """``width`` features of an image, which nobody may compute for more than a glance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.seen = 0
        self.classifier = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x.flatten(1)[:, :1] * torch.arange(1.0, self.width + 1) + x.flatten(1).sum(1, keepdim=True).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x.flatten(1)[:, :4])


def public(n: int) -> Records:
    images = torch.randint(0, 256, (n, 1, 4, 4), generator=stream(0), dtype=torch.uint8)
    return Records(images, torch.zeros(n, dtype=torch.int64), 1, Normalisation((0.5,), (0.3,)))


@pytest.mark.parametrize(
    ("count", "settings"), [(20, {}), (40, {"dims": 7}), (40, {"records": 9}), (20, {"whiten": False})]
)
def test_the_limit_is_that_of_the_message(count: int, settings: dict[str, int]) -> None:
    space, model = PublicMap(**settings), Wide(100)  # type: ignore[arg-type]
    features = space.fit(model, public(count), stream(0))
    tensors = {**features.weights, "mean": features.mean, "projection": features.projection}
    values = sum(value.nbytes for value in tensors.values())
    assert values < len(wire.pack(tensors, {})) < values + 1000  # names and shapes
    space.check_size(model, public(count), values)
    with pytest.raises(ValueError, match="each client has to receive 0 MB: the model and a map of 100 features"):
        space.check_size(model, public(count), values - 1)


def test_a_map_that_fits_no_message_is_refused_before_the_work() -> None:
    model = Wide(762_048)
    with pytest.raises(ValueError, match="has to receive 613 MB: .* but the limit is 512 MB; use --space.dims") as why:
        PublicMap().check_size(model, public(200), 512 * 10**6)
    assert model.seen == 1 and "\n" not in str(why.value)
    fitting = re.search(r"--space.dims (\d+)", str(why.value))
    assert fitting
    PublicMap(dims=int(fitting[1])).check_size(model, public(200), 512 * 10**6)
    with pytest.raises(ValueError):
        PublicMap(dims=int(fitting[1]) + 1).check_size(model, public(200), 512 * 10**6)


def test_a_large_map_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING):
        PublicMap().check_size(Wide(1000), public(20), 512 * 10**6)
        assert not caplog.text
        monkeypatch.setattr(public_map, "_LARGE", 10**4)
        PublicMap().check_size(Wide(1000), public(20), 512 * 10**6)
    assert "each client has to receive 0 MB: the model and a map of 1000 features; a --model with" in caplog.text


def test_more_directions_than_there_are_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for dims, said in ((7, False), (512, False), (13, True)):  # 512 is the default
        assert PublicMap(dims=dims).fit(Wide(12), public(20), stream(0)).projection.shape[1] == min(dims, 12)
        assert ("--space.dims is 13, but 20 public records with 12 features have 12" in caplog.text) == said
