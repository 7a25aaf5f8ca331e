"""FedLPA: clients send models with Kronecker-factored posteriors of their layers, and the server multiplies these.

Liu, Liu, Ye, Shen, Li, Jiang, Li, "FedLPA: one-shot federated learning with layer-wise posterior aggregation", NeurIPS
2024 (arXiv:2310.00339).

Differs from the paper (docs/methods/fedlpa.md has the whole list):

* likelihood, scales and damping are those of the authors' code (lebronlambert/FedLPA_NeurIPS2024);
* the layers' equations are solved to the end; the code takes 10,000 steps of gradient descent, too few for large
  layers, and reports the better of two solutions on the test set;
* factors are measured in eval mode, on each record once.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Float32
from pydantic import PositiveFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.posteriors import (
    Layer,
    LayerPosterior,
    damped,
    fisher_factors,
    layers,
    packed,
    product_mean,
    unpacked,
)
from fedstill.distill.teachers import Teachers
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.parts.model_uploads import ensemble_accuracies
from fedstill.protocol import Client, Count, Federation, Method, Reply, State, load, state, step
from fedstill.train.sgd import SGD

log = logging.getLogger("fedstill")
_ENOUGH = 1e-6
"""Largest share of an equation's right side that its exact solution leaves, beyond which a warning says so."""


class Posterior(Reply):
    """A client's model, and the factors of its layers' Fisher information without damping."""

    weights: State
    factors: Float32[Tensor, " numbers"]
    num_records: Count


class FedLPA(Method):
    """One upload of models with posteriors, whose product's mean is the result."""

    local: SGD = SGD(epochs=200, weight_decay=1e-5)
    """A client's training."""
    damping: PositiveFloat = 1e-3
    """Precision of the prior (lambda), whose square root is added to each factor's diagonal."""
    solution: Literal["exact", "expectation"] = "exact"
    """The mean of the clients' posteriors: exactly, or with the mean factors in place of each client's."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        known = layers(model, fed.like.shape)
        numbers = self._numbers(fed, model, known)
        for round in fed.rounds(1, model):
            networks, mean, posteriors = list[nn.Module](), fed.new_model(), list[list[LayerPosterior]]()
            sizes = list[int]()
            for reply in fed.ask(self.train, exactly={"numbers": numbers}):
                networks.append(fed.new_model())
                load(networks[-1], reply.weights)
                sizes.append(reply.num_records)
                posteriors.append(self.posteriors(reply, known))
            load(mean, weighted_mean(zip(sizes, map(state, networks), strict=True)))
            load(model, state(mean))  # what has no posterior
            left = 0.0
            for layer, clients in zip(known, zip(*posteriors, strict=True), strict=True):
                solved = product_mean(clients, exact=self.solution == "exact")
                load(model, layer.named(solved.mean))
                left = max(left, solved.residual)
            if self.solution == "exact" and left > _ENOUGH:
                log.warning("an equation is solved up to %.1e of its right side; a larger damping helps", left)
            others = ensemble_accuracies(fed, Teachers(networks, average="probabilities"), mean)
            round.log(accuracy=fed.evaluate(model), residual=left, **others)
        return model

    def _numbers(self, fed: Federation, model: nn.Module, known: Sequence[Layer]) -> int:
        """Entries of all factors; refuse a model without, or uploads that are too large, before a client works."""
        if not known:
            raise ValueError(
                f"{type(model).__name__} has 0 linear layers or plain convolutions that run once, whose posteriors "
                "fedlpa multiplies; use another --model, for example lenet, or fedavg"
            )
        numbers = sum(layer.numbers for layer in known)
        size = 4 * (numbers + sum(value.numel() for value in state(model).values()))
        if size > fed.max_bytes:
            raise ValueError(
                f"each client would send {size / 1e6:.0f} MB, a model and the factors of its {len(known)} layers, but "
                f"the limit is {fed.max_bytes / 1e6:.0f} MB; use a smaller --model or a larger --max-message-mb"
            )
        return numbers

    def posteriors(self, reply: Posterior, known: Sequence[Layer]) -> list[LayerPosterior]:
        """A client's posterior of each layer, with the prior's precision."""
        return [
            LayerPosterior(reply.num_records, layer.matrix(reply.weights), *(damped(f, self.damping) for f in pair))
            for layer, pair in zip(known, unpacked(reply.factors, known), strict=True)
        ]

    @step
    def train(self, client: Client) -> Posterior:
        """Train from the start that all clients share; then measure each layer's A_k and B_k."""
        model = client.new_model()
        self.local.fit(model, client.train, client.rng("batches"))
        factors = packed(fisher_factors(model, client.train, layers(model, client.train.shape)))
        return Posterior(weights=state(model), factors=factors.float(), num_records=len(client.train))

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return type(self), self.local
