"""Images fitted to class sums of features: distribution matching when one noisy release is all that is known.

Harder, Adamczewski, Park 2021 (DP-MERF, arXiv:2002.11603) release the mean embedding of a labelled data set once and
fit a generator to it for free; here the embedding is that of random networks, as in distribution matching (Zhao, Bilen
2023, arXiv:2110.04181), and pixels are fitted. With uniform predictions, a class's mean features are the gradient of
its loss by the last layer, so this is gradient matching at that layer.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import models
from fedstill.evaluate import mode_of
from fedstill.records import Examples, Records
from fedstill.settings import Settings
from fedstill.train.augment import DSA, Strategy


def embed(nets: Sequence[nn.Module], records: Records, batch_size: int = 500) -> Float[Tensor, "n d"]:
    """Features of all networks side by side, each network's of length 1, divided by the root of their number."""
    found = []
    for start in range(0, len(records), batch_size):
        x = records.inputs(slice(start, start + batch_size))
        with torch.no_grad():
            found.append(torch.cat([unit(net, x) for net in nets], 1) / len(nets) ** 0.5)
    return torch.cat(found)


def unit(net: nn.Module, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
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
    """Its learning rate; pixels lie in [0, 1]."""
    nets_per_step: PositiveInt = 2
    """Number of the networks in one step."""
    augment: Strategy = "none"
    """DSA operations on the fitted images, which stand for what the embedding averages over; "none" for none."""

    def fit(
        self,
        nets: Sequence[nn.Module],
        means: Float[Tensor, "classes d"],
        ipc: int,
        like: Records,
        rng: torch.Generator,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Records:
        """``ipc`` images of every class whose mean `embed` comes near the row of ``means``.

        Args:
            nets: those of the release.
            means: what a class's images should have as their mean embedding.
            ipc: images of a class.
            like: carries shape, classes and normalisation.
            rng: draws the first pixels, ``0.5 + N(0, 1) / 4``, and which networks are looked at.
            on_step: called with the number of steps done and of all.
        """
        start = torch.randn(len(means) * ipc, *like.shape, generator=rng) / 4 + 0.5
        pixels = start.clamp_(0, 1).to(means.device)
        augment = DSA(self.augment)
        self._descend(
            nets,
            means,
            pixels,
            lambda: augment.draw(rng)(like.normalisation.apply(pixels)),
            rng,
            on_step,
            bounds=(0.0, 1.0),
        )
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
        """As `fit`, with values of any size in place of pixels.

        `embed` looks at directions only, so every row keeps the length it starts with.

        Args:
            nets: those of the release.
            means: see `fit`.
            start: the first values, as many for every class, ordered by classes.
            rng: draws which networks are looked at.
            on_step: see `fit`.
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
        seen: Callable[[], Tensor],
        rng: torch.Generator,
        on_step: Callable[[int, int], None] | None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Change ``values`` in place until the networks see in ``seen()`` what ``means`` says."""
        classes = len(means)
        adam = torch.optim.Adam([values.requires_grad_()], lr=self.lr)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.steps)
        targets = means.float().chunk(len(nets), 1)
        for step in range(self.steps):
            chosen = torch.randperm(len(nets), generator=rng)[: self.nets_per_step].tolist()
            x = seen()
            loss = sum(
                ((unit(nets[i], x).view(classes, len(x) // classes, -1).mean(1) - targets[i] * len(nets) ** 0.5) ** 2)
                .sum()
                for i in chosen
            )  # fmt: skip
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
