"""What the server and every client know before the first message."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedstill import models, schema, seeds
from fedstill.protocol import Method, shared_part
from fedstill.records import Normalisation
from fedstill.weights import load, parameters, state


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
        models: the clients' own models, in turn, where they differ from ``model``.
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
    models: tuple[str, ...] = ()

    def architecture(self, client: int) -> str:
        """The client's own model."""
        return self.models[client % len(self.models)] if self.models else self.model

    def new_model(
        self,
        weights: Mapping[str, Tensor] | None = None,
        *,
        draw: int = 0,
        architecture: str | None = None,
        device: torch.device | str = "cpu",
    ) -> nn.Module:
        """The model in its ``draw``-th random start, or with ``weights``; in train mode."""
        name = self.model if architecture is None else architecture
        assert name in (self.model, *self.models), f"{name} is none of the run's models"
        with seeds.isolated(seeds.derive(self.seed, "model", draw)):
            model = models.build(name, self.shape, self.num_classes)
        if weights is not None:
            load(model, weights)
        return model.to(device).train()

    @cached_property
    def facts(self) -> schema.Facts:
        """What the wire checks every message against."""
        model = self.new_model()
        channels, height, width = self.shape
        templates = {
            "state": schema.template(state(model)),
            "parameters": schema.template(parameters(model)),
            "shared": schema.template(shared_part(self.method, model)),
        }
        templates[f"state of {self.model}"] = templates["state"]
        for name in {*self.models} - {self.model}:
            templates[f"state of {name}"] = schema.template(state(self.new_model(architecture=name)))
        return schema.Facts(
            sizes={"channels": channels, "height": height, "width": width, "classes": self.num_classes},
            templates=templates,
            max_bytes=self.max_bytes,
        )
