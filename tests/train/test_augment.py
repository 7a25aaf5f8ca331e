"""DSA: one draw repeats exactly, each operation does what its formula says, gradients flow."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedstill.base.seeds import stream
from fedstill.train.augment import DSA, FULL_STRATEGY, Transform

NAMES = FULL_STRATEGY.split("_")


def images(n: int = 4, channels: int = 3, size: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(n, channels, size, size, generator=stream(seed), dtype=torch.float64)


def fixed(operation: str, *uniforms: float) -> Transform:
    return Transform(operation, torch.tensor([uniforms + (0.0,) * (3 - len(uniforms))]))


@pytest.mark.parametrize("name", NAMES)
def test_a_drawn_transform_treats_every_image_of_every_batch_alike(name: str) -> None:
    x = images(1)
    for seed in range(5):
        transform = DSA(name).draw(stream(seed))
        alone, among = transform(x), transform(torch.cat([images(3, seed=9), x]))
        torch.testing.assert_close(among[3:], alone, rtol=1e-12, atol=1e-12)
        assert torch.equal(transform(x), alone)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_per_image_are_those_of_single_transforms(name: str) -> None:
    x = images(6)
    transform = DSA(name).draw(stream(0), n=6)
    one_by_one = [Transform(name, transform.uniforms[i : i + 1])(x[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(transform(x), torch.cat(one_by_one), rtol=1e-10, atol=1e-10)
    same = images(1).expand(6, -1, -1, -1)
    assert len({transform(same)[i].sum().item() for i in range(6)}) > 1  # they differ between images
    with pytest.raises(ValueError, match="drawn for 6 images but got 4; draw it with n=4"):
        transform(images(4))


@pytest.mark.parametrize("n", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow(name: str, n: int | None) -> None:
    x = images(3, channels=2, size=8).requires_grad_()
    assert torch.autograd.gradcheck(DSA(name).draw(stream(3), n), x)
    assert torch.autograd.grad(DSA(name).draw(stream(3), n)(x).square().sum(), x)[0].abs().sum() > 0


def test_the_draw_is_the_generators_and_leaves_the_global_one_alone() -> None:
    before, x = torch.get_rng_state(), images()
    first = [DSA()(x, stream(seed)) for seed in range(8)]
    again = [DSA()(x, stream(seed)) for seed in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({float(a.sum()) for a in first}) > 5
    assert torch.equal(before, torch.get_rng_state())


def test_operations_come_up_equally_often_and_take_equally_many_draws() -> None:
    rng, dsa = stream(0), DSA()
    names = [dsa.draw(rng).operation for _ in range(3000)]
    shares = [names.count(name) / len(names) for name in NAMES]
    assert max(abs(share - 1 / 6) for share in shares) < 0.034  # 5 standard deviations of a share of 1/6 in 3000
    positions = set()
    for strategy in ("color", "rotate", "none"):
        rng = stream(1)
        DSA(strategy).draw(rng)
        positions.add(float(torch.rand((), generator=rng)))
    assert len(positions) == 1


def test_color_is_brightness_then_saturation_then_contrast() -> None:
    x, (b, s, c) = images(), (0.9, 0.2, 0.7)
    bright = x + (b - 0.5)
    grey = bright.mean(1, keepdim=True)
    saturated = (bright - grey) * 2 * s + grey
    mean = saturated.mean((1, 2, 3), keepdim=True)
    # the uniforms are float32: 0.9 is off by 2e-8
    torch.testing.assert_close(fixed("color", b, s, c)(x), (saturated - mean) * (c + 0.5) + mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("u", "shift"), [(0.0, -2), (0.5, 0), (0.999999, 2)])
def test_crop_shifts_by_up_to_an_eighth_and_fills_with_zeros(u: float, shift: int) -> None:
    x = images()  # 16 pixels: shifts of -2 to 2
    moved = fixed("crop", u, 0.5)(x)
    expected = torch.zeros_like(x)
    rows = range(max(0, -shift), min(16, 16 - shift))
    for row in rows:
        expected[:, :, row] = x[:, :, row + shift]
    assert torch.equal(moved, expected)


def test_cutout_zeroes_a_square_of_half_the_side() -> None:
    x = torch.ones(1, 1, 16, 16)
    middle = fixed("cutout", 0.5, 0.5)(x)
    assert float((middle == 0).sum()) == 64 and float(middle[0, 0, 4:12, 4:12].sum()) == 0
    corner = fixed("cutout", 0.0, 0.0)(x)
    assert float((corner == 0).sum()) == 16 and float(corner[0, 0, :4, :4].sum()) == 0
    zeros = [float((DSA("cutout").draw(stream(i))(x) == 0).sum()) for i in range(50)]
    assert min(zeros) >= 16 and max(zeros) <= 64 and len(set(zeros)) > 5


def test_flip_mirrors_half_of_the_time() -> None:
    x = images()
    assert torch.equal(fixed("flip", 0.49)(x), x.flip(3)) and torch.equal(fixed("flip", 0.5)(x), x)
    rng, dsa = stream(0), DSA("flip")
    flipped = sum(torch.equal(dsa.draw(rng)(x), x.flip(3)) for _ in range(400))
    assert abs(flipped - 200) < 50  # 5 standard deviations, sqrt(400) / 2 = 10 each


def test_scale_and_rotate_sample_the_affine_grid() -> None:
    x = images()

    def sampled(a: float, b: float, c: float, d: float) -> Tensor:
        theta = torch.tensor([[a, b, 0], [c, d, 0]], dtype=x.dtype).expand(len(x), 2, 3)
        return grid_sample(x, affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    # float32 uniforms again
    torch.testing.assert_close(
        fixed("scale", 0.0, 0.5)(x), sampled(1 / 1.2, 0, 0, (1.2 + 1 / 1.2) / 2), rtol=0, atol=1e-5
    )
    assert not torch.allclose(fixed("scale", 0.0, 0.5)(x), fixed("scale", 0.5, 0.0)(x))
    torch.testing.assert_close(fixed("rotate", 0.5)(x), x, rtol=0, atol=1e-6)
    a = -15 * math.pi / 180
    expected = sampled(math.cos(a), -math.sin(a), math.sin(a), math.cos(a))
    torch.testing.assert_close(fixed("rotate", 0.0)(x), expected, rtol=0, atol=1e-5)


def test_none_changes_nothing_and_unknown_operations_are_refused() -> None:
    assert torch.equal(DSA("none")(images(), stream(0)), images())
    with pytest.raises(ValueError, match="unknown operation 'zoom'; join some of color, crop"):
        DSA("color_zoom")
