"""Multi-formation: stored images and the images that they hold."""

import pytest
import torch
from torch.nn.functional import interpolate

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.distill.pool import check_divides, fold, unfold, unfolded
from fedstill.distill.synthesis import GradientMatching
from fedstill.methods.fedgm_labels import FedGMLabels


def test_each_quarter_is_one_image_row_by_row() -> None:
    image = torch.rand(2, 3, 8, 6, generator=stream(0))
    held = unfold(image, 2)
    quarters = [image[k : k + 1, :, i : i + 4, j : j + 3] for k in (0, 1) for i in (0, 4) for j in (0, 3)]
    for own, quarter in zip(held, quarters, strict=True):
        torch.testing.assert_close(own, interpolate(quarter, size=(8, 6), mode="bilinear", align_corners=False)[0])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_folding_keeps_the_order_and_the_mean_of_each_image(parts: int) -> None:
    flat = torch.rand(2 * parts**2, 3, 1, 1, generator=stream(1)).expand(-1, -1, 8, 8)
    stored = fold(flat, parts)
    assert stored.shape == (2, 3, 8, 8)
    torch.testing.assert_close(unfold(stored, parts), flat)


def test_one_image_is_itself() -> None:
    image = torch.rand(2, 1, 5, 7)
    assert unfold(image, 1) is image
    assert fold(image, 1) is image


def test_records_get_their_label_for_each_image_that_they_hold() -> None:
    images = torch.randint(0, 256, (3, 1, 4, 4), generator=stream(2), dtype=torch.uint8)
    records = Records(images, torch.tensor([2, 0, 1]), 3, Normalisation((0.5,), (0.5,)))
    held = unfolded(records, 2)
    assert held.labels.tolist() == [2] * 4 + [0] * 4 + [1] * 4
    assert torch.equal(held.images, unfold(images.float(), 2).round().to(torch.uint8))
    assert unfolded(records, 1) is records


def test_a_formation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="formation=3 does not divide images of 28x28 pixels; take a divisor"):
        check_divides(3, (1, 28, 28))
    with pytest.raises(ValueError, match="formation is 2, but this method's images hold one each; leave it out"):
        FedGMLabels(matching=GradientMatching(formation=2))
