"""Random views: against Pillow, colorsys and plain formulas; how often, and from which draws."""

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from fedstill.base.seeds import stream
from fedstill.train import augment as changes
from fedstill.train.augment import Views

STILL = Views(scale=(1, 1), ratio=(1, 1), flip=0, jitter=0, gray=0)


def pictures(n: int, channels: int = 3, height: int = 16, width: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, height, width, generator=stream(seed))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_without_any_strength_are_the_images(channels: int) -> None:
    x = pictures(5, channels)
    # the way to HSV and back, in float32
    torch.testing.assert_close(STILL(x, stream(0)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 8), (12, 20)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_keep_shape_and_range_and_differ(channels: int, height: int, width: int) -> None:
    x = pictures(30, channels, height, width)
    rng = stream(1)
    first, second = Views()(x, rng), Views()(x, rng)
    assert first.shape == x.shape and first.dtype == x.dtype
    assert first.isfinite().all() and first.min() >= 0 and first.max() <= 1
    assert ((first - second).abs().amax((1, 2, 3)) > 0.01).all()


def test_a_crop_is_pillows_crop_and_resize() -> None:
    x = pictures(40, 3, 12, 20)
    views = Views(flip=0, jitter=0, gray=0)
    top, left, rows, columns = (v.long() for v in views.crops(40, 12, 20, stream(3)))
    found = views(x, stream(3))
    seen = set()
    for i in range(40):
        crop = x[i, :, top[i] : top[i] + rows[i], left[i] : left[i] + columns[i]]
        assert crop.shape[1:] == (rows[i], columns[i])  # inside the image
        theirs = [np.asarray(Image.fromarray(c.numpy()).resize((20, 12), Image.Resampling.BILINEAR)) for c in crop]
        # Pillow's weights are float64; ours float32.
        np.testing.assert_allclose(found[i].numpy(), np.stack(theirs), atol=1e-5)
        seen.add((int(rows[i]), int(columns[i])))
    assert len(seen) > 20


def test_crops_have_the_shares_and_shapes_asked_for() -> None:
    n, side = 4000, 400  # large, so that whole pixels matter little
    top, left, rows, columns = Views().crops(n, side, side, stream(0))
    share, ratio = rows * columns / side**2, columns / rows
    assert 0.078 < share.min() < 0.085 and 0.97 < share.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.31 < ratio.max() < 1.35
    assert ratio.log().mean().abs() < 0.02  # uniform in the logarithm: standard error 0.166 / sqrt(4000) = 0.003
    # Uniform on [.08, 1] has mean .54; crops that don't fit are redrawn, which takes some of the large ones away.
    assert 0.45 < share.mean() < 0.54
    assert (top >= 0).all() and (top + rows <= side).all() and (left >= 0).all() and (left + columns <= side).all()
    free = rows < side
    place = top[free] / (side - rows[free])
    assert abs(place.mean() - 0.5) < 0.03 and place.min() < 0.01 and place.max() > 0.99


@pytest.mark.parametrize(("height", "width", "crop"), [(8, 40, (8, 11)), (40, 8, (11, 8)), (9, 9, (9, 9))])
def test_where_no_crop_fits_the_largest_of_a_permitted_shape_is_taken_from_the_middle(
    height: int, width: int, crop: tuple[int, int]
) -> None:
    ratio = (3 / 4, 4 / 3) if height != width else (1.0, 1.0)
    top, left, rows, columns = Views(scale=(1, 1), ratio=ratio).crops(3, height, width, stream(0))
    assert (rows == crop[0]).all() and (columns == crop[1]).all()
    assert ((top - (height - crop[0]) / 2).abs() <= 0.5).all() and ((left - (width - crop[1]) / 2).abs() <= 0.5).all()


def test_how_often_views_are_flipped_gray_and_of_other_colours() -> None:
    n = 2000
    x = pictures(1, 3, 4, 4).expand(n, -1, -1, -1)
    still = STILL.model_dump()

    def share(of: Tensor) -> float:
        return float(of.double().mean())

    def like(y: Tensor, other: Tensor) -> Tensor:
        return (y - other).abs().amax((1, 2, 3)) < 1e-4

    # Four standard errors of a share of 2,000: at most 0.045.
    flipped = Views(**{**still, "flip": 0.3})(x, stream(0))
    assert (
        abs(share(like(flipped, x.flip(3))) - 0.3) < 0.045 and share(like(flipped, x) | like(flipped, x.flip(3))) == 1
    )
    gray = Views(**{**still, "gray": 0.2})(x, stream(0))
    luminance = (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand_as(x)
    assert abs(share(like(gray, luminance)) - 0.2) < 0.045 and share(like(gray, x) | like(gray, luminance)) == 1
    jittered = Views(**{**still, "jitter": 0.8})(x, stream(0))
    assert abs(share(~like(jittered, x)) - 0.8) < 0.045


def test_each_change_of_colour_is_its_formula() -> None:
    x = pictures(6, 3, 5, 5)
    change = torch.linspace(-0.4, 0.4, 6)
    luminance = 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    for i in range(6):
        f = 1 + float(change[i])
        expected = {
            changes.brighten: f * x[i],
            changes.contrast: f * x[i] + (1 - f) * luminance[i].mean(),
            changes.saturate: f * x[i] + (1 - f) * luminance[i],
        }
        for operation, value in expected.items():
            torch.testing.assert_close(operation(x, change)[i], value.clamp(0, 1))


def test_hues_turn_as_the_standard_library_turns_them() -> None:
    x = torch.cat([pictures(1, 3, 1, 200), torch.eye(3).view(1, 3, 1, 3), torch.full((1, 3, 1, 4), 0.3)], 3)
    turns = torch.tensor([0.27])
    found = changes.turn(x, turns)[0, :, 0].T
    for before, after in zip(x[0, :, 0].T.tolist(), found.tolist(), strict=True):
        h, s, v = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb((h + 0.27) % 1, s, v), abs=1e-5)  # float32
    assert (found[:200] - x[0, :, 0, :200].T).abs().max() > 0.3


@pytest.mark.parametrize("channels", [1, 2])
def test_images_without_colours_keep_none_of_their_changes(channels: int) -> None:
    x = pictures(8, channels)
    colours = STILL.model_copy(update={"jitter": 1.0, "brightness": 0.0, "contrast": 0.0, "gray": 1.0})
    torch.testing.assert_close(colours(x, stream(0)), x, rtol=0, atol=1e-6)
    light = colours.model_copy(update={"brightness": 0.4})
    assert (light(x, stream(0)) - x).abs().max() > 0.05


def test_the_draw_is_the_generators_and_leaves_the_global_one_alone() -> None:
    before, x = torch.get_rng_state(), pictures(4)
    assert torch.equal(Views()(x, stream(0)), Views()(x, stream(0)))
    assert not torch.equal(Views()(x, stream(0)), Views()(x, stream(1)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "wrong", [{"scale": (0.5, 0.2)}, {"scale": (0, 1)}, {"ratio": (2, 1)}, {"hue": 0.6}, {"flip": 1.5}, {"blur": 1}]
)
def test_impossible_views_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Views.model_validate(wrong)
