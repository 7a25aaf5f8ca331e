"""What the server and every client know before the first message."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedstill import models, schema, seeds
from fedstill.protocol import Method, load, parameters, state
from fedstill.records import Normalisation


@dataclass(frozen=True)
class Agreement:
    """The public set-up of a run.

    Attributes:
        method: the method with its hyperparameters.
        model: the model's name and options, as `fedstill.models.build` takes it.
        shape: channels, height and width of an image.
        num_classes: classes of the task.
        normalisation: of the task's images.
        seed: of every random stream that is not privacy noise.
        max_bytes: the largest message that either side accepts.
        delta: where epsilons are stated.
        budget: the largest epsilon that a client's releases may come to; None for no limit.
        simulated_noise: whether privacy noise is drawn from the seed; the operating system's entropy otherwise.
    """

    method: Method
    model: str
    shape: tuple[int, int, int]
    num_classes: int
    normalisation: Normalisation
    seed: int
    max_bytes: int = 1 << 29
    delta: float = 1e-5
    budget: float | None = None
    simulated_noise: bool = True

    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The model in its ``draw``-th random start, or with ``weights``; in train mode."""
        with seeds.isolated(seeds.derive(self.seed, "model", draw)):
            model = models.build(self.model, self.shape, self.num_classes)
        if weights is not None:
            load(model, weights)
        return model.to(device).train()

    @cached_property
    def facts(self) -> schema.Facts:
        """What the wire checks every message against."""
        model = self.new_model()
        channels, height, width = self.shape
        return schema.Facts(
            sizes={"channels": channels, "height": height, "width": width, "classes": self.num_classes},
            templates={"state": schema.template(state(model)), "parameters": schema.template(parameters(model))},
            max_bytes=self.max_bytes,
        )
