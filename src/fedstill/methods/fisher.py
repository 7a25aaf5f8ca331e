"""FisherMix, a head of GH-OFL: trained on samples of Gaussians in the subspace that separates the classes."""

from typing import Annotated

import torch
from annotated_types import Le
from jaxtyping import Float64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill.methods.gaussian import Classes
from fedstill.records import Examples
from fedstill.seeds import isolated
from fedstill.settings import Settings
from fedstill.train.adam import Adam


class FisherMix(Settings):
    """Settings of the head that is trained on samples."""

    energy: Annotated[PositiveFloat, Le(1)] = 0.99
    """Share of the variance between classes, relative to that within, that the subspace keeps."""
    samples: PositiveInt = 5000
    """Samples of each class."""
    temperature: PositiveFloat = 0.85
    """Factor of the samples' standard deviations."""
    training: Adam = Adam(weight_decay=5e-4, batch_size=1024, epochs=60)
    """Training of the head on the samples."""

    def subspace(self, classes: Classes, factor: Float64[Tensor, "d d"]) -> Float64[Tensor, "d k"]:
        """Fisher's directions V: eigenvectors of the covariance between classes relative to that within.

        ``factor`` is F with ``F F^T`` the inverse of the covariance within classes; ``V^T Sigma V`` is the identity.
        """
        weights = (classes.counts * classes.present / classes.size)[:, None]
        centred = classes.means - (weights * classes.means).sum(0)
        _, values, directions = torch.linalg.svd(weights.sqrt() * centred @ factor, full_matrices=False)
        shares = values.square().cumsum(0) / values.square().sum().clamp_min(1e-300)
        kept = min(int((shares < self.energy).sum()) + 1, len(values))
        subspace: Tensor = factor @ directions[:kept].T
        return subspace

    def head(
        self, classes: Classes, factor: Float64[Tensor, "d d"], samples: torch.Generator, training: torch.Generator
    ) -> Float64[Tensor, "classes d+1"]:
        """The linear head on rows that is trained on samples in the subspace; absent classes have none."""
        subspace = self.subspace(classes, factor)
        present = torch.nonzero(classes.present).flatten()
        centres = (classes.means @ subspace)[present].repeat_interleave(self.samples, 0).cpu()
        x = centres + self.temperature * torch.randn(centres.shape, dtype=torch.float64, generator=samples)
        with isolated(0):  # the start is 0
            head = nn.Linear(subspace.shape[1], len(classes.means))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        labels = present.cpu().repeat_interleave(self.samples)
        self.training.fit(head, Examples(x.float(), labels), training)
        weights = head.weight.detach().double().to(subspace) @ subspace.T
        return torch.cat([weights, head.bias.detach().double().to(subspace)[:, None] / classes.bias], 1)
