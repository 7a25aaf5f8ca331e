"""Images fitted to class sums of features: distribution matching to a single noisy release.

Harder, Adamczewski, Park 2021 (DP-MERF, arXiv:2002.11603) release the mean embedding of a labelled data set once and
fit a generator to it at no further privacy cost. Here the embedding is that of random networks, as in distribution
matching (Zhao, Bilen 2023, arXiv:2110.04181), and pixels are fitted. With uniform predictions, a class's mean features
are the gradient of its loss by the last layer, so this is gradient matching at that layer.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import models
from fedstill.base.records import Examples, Records
from fedstill.base.settings import Settings
from fedstill.evaluation import mode_of
from fedstill.privacy import rowwise
from fedstill.train.augment import DSA, Strategy


def embed(nets: Sequence[nn.Module], records: Records) -> Float[Tensor, "n d"]:
    """Unit features of all networks, concatenated and divided by the root of the number of networks.

    A row's bits depend on its own record alone (see `fedstill.privacy.rowwise`).
    """
    return rowwise.features(_embedded, nets, records)


def _embedded(nets: Sequence[nn.Module], x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
    rows: Tensor = torch.cat([unit_features(net, x) for net in nets], 1) / len(nets) ** 0.5
    return rows


def unit_features(net: nn.Module, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
    """The network's features in eval mode, scaled to length 1; differentiable in ``x``."""
    with mode_of(net, training=False):
        rows = models.features(net, x)
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return scaled


class ImageFitting(Settings):
    """Settings of the fit of images to a release."""

    steps: PositiveInt = 1500
    """Steps of Adam on the pixels."""
    lr: PositiveFloat = 0.03
    """Learning rate of Adam; pixels lie in [0, 1]."""
    nets_per_step: PositiveInt = 2
    """Number of networks in one step."""
    augment: Strategy = "none"
    """Operations of DSA on the fitted images, joined by "_", from color, crop, cutout, flip, scale, rotate; or
    "none"."""

    def fit(
        self,
        nets: Sequence[nn.Module],
        means: Float[Tensor, "classes d"],
        ipc: int,
        like: Records,
        rng: torch.Generator,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Records:
        """Fit ``ipc`` images of every class, so that their mean embedding is near the class's row of ``means``.

        Args:
            nets: the networks of the release.
            means: target of the mean embedding (`embed`) of each class's images.
            ipc: number of images of a class.
            like: a record set with the images' shape, classes and normalisation.
            rng: draws the first pixels, ``0.5 + N(0, 1) / 4``, and the networks of each step.
            on_step: called with the numbers of steps done and of all steps.
        """
        start = torch.randn(len(means) * ipc, *like.shape, generator=rng) / 4 + 0.5
        pixels = start.clamp_(0, 1).to(means.device)
        augment = DSA(self.augment)

        def inputs() -> Tensor:
            return augment.draw(rng)(like.normalisation.apply(pixels))

        self._descend(nets, means, pixels, inputs, rng, on_step, bounds=(0.0, 1.0))
        images = (pixels.detach() * 255).round().to(torch.uint8)
        return Records(images, _labels(means, ipc), like.num_classes, like.normalisation)

    def fit_values(
        self,
        nets: Sequence[nn.Module],
        means: Float[Tensor, "classes d"],
        start: Float[Tensor, "n c h w"],
        rng: torch.Generator,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Examples:
        """Fit unbounded values as `fit` does pixels. Embeddings are of unit length, so each row keeps its first length.

        ``start`` has the first values, the same number for every class, ordered by class.
        """
        values, lengths = start.clone(), start.flatten(1).norm(dim=1)[:, None, None, None]

        def scaled() -> Tensor:
            rows: Tensor = values * (lengths / values.flatten(1).norm(dim=1)[:, None, None, None].clamp_min(1e-12))
            return rows

        self._descend(nets, means, values, scaled, rng, on_step)
        return Examples(scaled().detach(), _labels(means, len(start) // len(means)))

    def _descend(
        self,
        nets: Sequence[nn.Module],
        means: Tensor,
        values: Tensor,
        inputs: Callable[[], Tensor],
        rng: torch.Generator,
        on_step: Callable[[int, int], None] | None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Change ``values`` in place, so that the class means of ``inputs()``'s embedding approach ``means``."""
        classes = len(means)
        adam = torch.optim.Adam([values.requires_grad_()], lr=self.lr)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.steps)
        targets = means.float().chunk(len(nets), 1)
        for step in range(self.steps):
            chosen = torch.randperm(len(nets), generator=rng)[: self.nets_per_step].tolist()
            x = inputs()
            embedded = [unit_features(nets[i], x).view(classes, len(x) // classes, -1).mean(1) for i in chosen]
            goals = [targets[i] * len(nets) ** 0.5 for i in chosen]
            loss = sum(((e - goal) ** 2).sum() for e, goal in zip(embedded, goals, strict=True))
            (values.grad,) = torch.autograd.grad(torch.as_tensor(loss), values)
            adam.step()
            rate.step()
            if bounds is not None:
                with torch.no_grad():
                    values.clamp_(*bounds)
            if on_step is not None and ((step + 1) % 20 == 0 or step + 1 == self.steps):
                on_step(step + 1, self.steps)


def _labels(means: Tensor, each: int) -> Tensor:
    return torch.arange(len(means), device=means.device).repeat_interleave(each)
