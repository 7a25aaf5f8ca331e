"""Differentiable siamese augmentation."""

import pytest
import torch

from fedstill.seeds import stream
from fedstill.train.augment import DSA, FULL_STRATEGY, Transform

OPERATIONS = FULL_STRATEGY.split("_")


def images(n: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, 12, 10, generator=stream(seed, "images"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_draw_does_the_same_to_every_batch(operation: str) -> None:
    transform = DSA(operation).draw(stream(0))
    x = images()
    whole = transform(x)
    assert whole.shape == x.shape
    assert torch.equal(transform(x[2:4]), whole[2:4])
    assert torch.equal(transform(x), whole)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "flip"])
def test_images_get_parameters_of_their_own_when_asked(operation: str) -> None:
    x = images(1).expand(8, -1, -1, -1)
    apart, together = DSA(operation).draw(stream(0), n=8)(x), DSA(operation).draw(stream(0))(x)
    assert len({image.numpy().tobytes() for image in apart}) > 1
    assert len({image.numpy().tobytes() for image in together}) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_flow_to_the_images(operation: str) -> None:
    transform = DSA(operation).draw(stream(3))
    x = images(2).double().requires_grad_()
    torch.autograd.gradcheck(lambda x: transform(x).square().sum(), [x], nondet_tol=0)


def test_draws_come_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    dsa = DSA()
    assert dsa.draw(stream(0)).operation == dsa.draw(stream(0)).operation
    assert torch.equal(dsa.draw(stream(0)).uniforms, dsa.draw(stream(0)).uniforms)
    assert torch.equal(torch.get_rng_state(), before)
    rng = stream(0)
    drawn = {dsa.draw(rng).operation for _ in range(200)}
    assert drawn == set(OPERATIONS)  # one of six missing in 200 draws: 6 * (5/6)^200 < 1e-14


def shift(u: float, size: int) -> torch.Tensor:
    return Transform("crop", torch.tensor([[u, u, 0.0]]))(torch.ones(1, 1, size, size))


def test_cropping_shifts_by_up_to_an_eighth_and_fills_with_zeros() -> None:
    assert shift(0.0, 32).sum() == shift(0.999, 32).sum() == 28 * 28
    assert shift(0.5, 32).sum() == 32 * 32


def test_cutout_blanks_a_square_of_half_the_side() -> None:
    x = Transform("cutout", torch.tensor([[0.5, 0.5, 0.0]]))(torch.ones(1, 1, 32, 32))
    assert (x == 0).sum() == 16 * 16


def test_colour_at_its_middle_changes_nothing_and_brightness_shifts() -> None:
    x = images()
    middle = Transform("color", torch.tensor([[0.5, 0.5, 0.5]]))(x)
    assert torch.allclose(middle, x, atol=1e-6)
    brighter = Transform("color", torch.tensor([[0.9, 0.5, 0.5]]))(x)
    assert torch.allclose(brighter - x, torch.full_like(x, 0.4), atol=1e-6)


def test_flip_and_rotation_and_scale_at_known_values() -> None:
    x = images()
    assert torch.equal(Transform("flip", torch.tensor([[0.4, 0, 0]]))(x), x.flip(3))
    assert torch.equal(Transform("flip", torch.tensor([[0.6, 0, 0]]))(x), x)
    assert torch.allclose(Transform("rotate", torch.tensor([[0.5, 0, 0]]))(x), x, atol=1e-5)
    one = (1 - 1 / 1.2) / (1.2 - 1 / 1.2)
    assert torch.allclose(Transform("scale", torch.tensor([[one, one, 0]]))(x), x, atol=1e-4)


def test_none_changes_nothing_and_unknown_names_are_refused() -> None:
    assert torch.equal(DSA("none").draw(stream(0))(images()), images())
    with pytest.raises(ValueError, match="names the unknown operation 'blur'"):
        DSA("color_blur")
    with pytest.raises(ValueError, match="drawn for 3 images but got 6"):
        DSA("crop").draw(stream(0), n=3)(images())
