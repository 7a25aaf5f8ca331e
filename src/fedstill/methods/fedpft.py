"""FedPFT: one upload of Gaussian mixtures of features, from whose samples the server trains a head.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang, "Parametric Feature Transfer: One-shot Federated Learning with
Foundation Models", 2024 (arXiv:2402.01862), Algorithm 1.

Differs from the paper (docs/methods/fedpft.md has the whole list):

* with ``epsilon``, clients release sums of rows and of their products, which add up to one Gaussian of each class;
  ``privacy="published"`` adds the paper's noise to the means and covariances, and the guarantee says why nothing holds;
* features are whitened and clipped with public numbers;
* the server draws at most a public number of samples from a mixture.
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.base.seeds import isolated
from fedstill.base.settings import Epsilon
from fedstill.distill.mixtures import Fitted, Mixture, coloured
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts import gaussians
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.gaussians import Mixtures, NoisyGaussians, fit_mixtures, release_gaussians
from fedstill.methods.parts.moments import MomentSums, Sums, release_moments, sizes
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.sgd import Adam


class FedPFT(MomentSums, Method):
    """One upload of Gaussian mixtures of features; the server trains a linear head on their samples."""

    protects: ClassVar[str] = ""
    epsilon: Epsilon = None
    """Privacy cost of a client's upload at the run's delta, for one full Gaussian a class; None adds no noise and
    guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """With an epsilon, one release of sums, or the paper's noise on means and covariances, which guarantees nothing."""
    mixture: Mixture = Mixture()
    """A client's mixtures."""
    samples: PositiveInt = 5000
    """Maximum number of samples of a client's mixture; by default as many as the client has records of the class."""
    training: Adam = Adam(lr=1e-3, weight_decay=1e-4, batch_size=256, epochs=50)
    """The server's training of the head."""

    @model_validator(mode="after")
    def _releasable(self) -> "FedPFT":
        if self.epsilon is not None and (self.mixture.components, self.mixture.covariance) != (1, "full"):
            raise ValueError(
                "mixtures have no private form, but one full Gaussian of a class has; set mixture.components to 1 and "
                "mixture.covariance to full, or epsilon to None"
            )
        if self.epsilon is None and self.privacy == "published":
            raise ValueError("privacy is 'published', but epsilon is None, which adds no noise; set epsilon")
        return self

    @property
    @override
    def claims(self) -> str:
        return "record" if self.epsilon is not None and self.privacy == "sound" else ""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedpft")
        radius = features.radius / self.unit(features)
        dims, rng, most = features.projection.shape[1], fed.rng("samples"), {"n": fed.num_classes}
        exactly = {"dims": dims, "entries": self.mixture.entries(dims)}
        if self.epsilon is None:
            exactly["components"] = self.mixture.components
            replies = fed.ask(self.fit, exactly=exactly, at_most=most, features=features)
            examples = self.drawn((each for reply in replies for each in reply.fitted()), rng)
        elif self.privacy == "published":
            noisy = fed.ask(self.add_noise, exactly=exactly, at_most=most, features=features)
            examples = self.drawn((each for reply in noisy for each in reply.fitted(radius)), rng)
        else:
            exactly = sizes(fed, features, self, by_class=True)
            total = add_up(fed.sum(self.sum_up, exactly=exactly, features=features), self, fed.delta, fed.device)
            examples = self.drawn_of(total, radius, rng)
        with isolated(0):  # the start is 0
            head = nn.Linear(features.projection.shape[1], fed.num_classes)
        for start in head.parameters():
            nn.init.zeros_(start)
        self.training.fit(head, examples, fed.rng("training"), checkpoint=fed.epochs)
        weight, bias = head.weight.detach(), head.bias.detach()
        scale = math.sqrt(1 - self.bias**2) / radius  # from a sample to a row of `head_model`
        return head_model(fed, features, torch.cat([weight / scale, bias[:, None] / self.bias], 1), self)

    def unit(self, features: PublicFeatures) -> float:
        """The unit of mixtures and samples: the radius over sqrt(d) for rows that are not whitened.

        Those have any scale, but half precision, the ridge of EM and the learning rate are for numbers of about 1.
        """
        return 1.0 if self.space.whiten else features.radius / math.sqrt(features.projection.shape[1])

    def drawn(self, mixtures: Iterable[tuple[int, int, Fitted]], rng: torch.Generator) -> Examples:
        """As many samples of each class's mixture as there were records, at most ``samples``."""
        rows, labels = [], []
        for label, count, fitted in mixtures:
            rows.append(self.mixture.draw(fitted, min(count, self.samples), rng).float())
            labels.append(torch.full((len(rows[-1]),), label))
        if not rows:
            raise ValueError("the clients sent 0 mixtures; the server needs at least 1 to draw samples from")
        return Examples(torch.cat(rows), torch.cat(labels))

    def drawn_of(self, total: Total, radius: float, rng: torch.Generator) -> Examples:
        """Samples of one Gaussian for each class of all clients' records."""
        classes, scale = gaussians.classes_of(total), math.sqrt(1 - self.bias**2) / radius
        rows, labels = [], []
        for label in classes.present.nonzero().flatten().tolist():
            mean, count = classes.means[label], float(classes.counts[label])
            sigma = total.matrix(label)[:-1, :-1] / count - torch.outer(mean, mean)
            white = torch.randn(min(round(count), self.samples), len(mean), dtype=torch.float64, generator=rng)
            rows.append(((mean.cpu() + coloured(white, sigma.cpu())) / scale).float())
            labels.append(torch.full((len(white),), label))
        return Examples(torch.cat(rows), torch.cat(labels))

    @step
    def fit(self, client: Client, features: PublicFeatures) -> Mixtures:
        """Fit a mixture to the rows of each class by EM."""
        return fit_mixtures(client, features, self.unit(features), self.mixture)

    @step
    def add_noise(self, client: Client, features: PublicFeatures) -> NoisyGaussians:
        """Release the mean and the covariance of each class, with noise in proportion to 1 / n."""
        assert self.epsilon is not None  # the server asks for `fit` otherwise
        return release_gaussians(client, features, self.epsilon)

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> Sums:
        """Release the class sums, the counts and the sums of products of each class."""
        return release_moments(client, features, self, by_class=True)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        if self.epsilon is not None and self.privacy == "published":
            return NoisyGaussians, self.extractor, self.space, self.epsilon
        if self.epsilon is not None:
            return *super().first_reply, "by class"
        return Mixtures, self.extractor, self.space, self.mixture
