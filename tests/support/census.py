"""A method that releases counts, for the tests of the boundary; importable in worker processes."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from fedstill.privacy.mechanisms import Histogram
from fedstill.protocol import Client, Federation, Method, Released, Reply, map_released, step


class Counts(Reply):
    counts: Released[Float64[Tensor, " classes"]]
    shares: Released[Float64[Tensor, " classes"]]


class Census(Method):
    """Asks for noisy counts; what can go wrong is a setting."""

    noise: float = 2.0
    """Noise multiplier."""
    wrong: str = ""
    """What every client does wrong."""
    times: int = 1
    """How often clients are asked."""
    adaptive: bool = False
    """Whether the noise depends on earlier answers."""

    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        for _ in range(self.times):
            replies = fed.ask(self.count)
            total = sum(reply.counts.value for reply in replies)
            with torch.no_grad():
                next(model.parameters()).view(-1)[:10] += torch.as_tensor(total).float()
        return model

    @step
    def count(self, client: Client) -> Counts:
        counts = client.release(
            Histogram(client.train.num_classes, self.noise), client.train.labels, adaptive=self.adaptive
        )
        if self.wrong == "raise":
            raise ArithmeticError("the abacus broke")
        if self.wrong == "raw":
            return Counts(counts=client.train.class_counts().double(), shares=counts)  # type: ignore[arg-type]
        if self.wrong == "nan":
            counts = counts.map(lambda c: c * math.nan)
        return Counts(counts=counts, shares=map_released(lambda a, b: a / b.sum(), counts, counts))
