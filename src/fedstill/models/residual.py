"""Residual networks that are solved layer by layer (DeepAFL): random layers, and maps of few numbers between them."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from fedstill.base.seeds import stream

Activation = Literal["gelu", "relu", "tanh", "sigmoid"]


def random_layer(inputs: int, outputs: int, seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Weights ``(outputs, inputs)`` and biases ``(outputs,)``, uniform within 1 / sqrt(inputs), as of ``nn.Linear``.

    Args:
        inputs: number of inputs.
        outputs: number of outputs.
        seed: seed of all layers.
        number: number of this one.
    """
    rng, most = stream(seed, "random layer", number), inputs**-0.5
    drawn = (2 * torch.rand(outputs, inputs + 1, generator=rng) - 1) * most
    return drawn[:, :-1].contiguous(), drawn[:, -1].contiguous()


class Residual(nn.Module):
    """Rows ``x_0 = tanh(A g u + a)``, ``x_{t+1} = x_t + U_t D_t f_t`` with ``f_t = act(B_t x_t + b_t)``, and a head.

    In each of the T blocks, (x_t, f_t) is shortened to the block's radius before it goes on, as x_T is before the head.
    With one random layer more than maps, its last row is (x_T, f_T), that of the next block.

    Args:
        first: A, ``(d, p)``.
        first_bias: a, ``(d,)``.
        layers: B_t, ``(T, m, d)``, or with one more, for the row of the next block.
        biases: b_t, ``(T, m)``, likewise.
        down: D_t, ``(T, r, m)``.
        up: U_t, ``(T, d, r)``.
        radii: largest lengths of rows, ``(T + 1,)``, positive, the last that of the output.
        head: weights of the logits, ``(classes, d)``, on the first d entries of a row; none for rows.
        middle: what is added to the logits, ``(classes,)``; nothing for classes.
        gain: g, the factor of the inputs.
        activation: act.
    """

    first: Tensor
    first_bias: Tensor
    layers: Tensor
    biases: Tensor
    down: Tensor
    up: Tensor
    radii: Tensor
    head: Tensor | None
    middle: Tensor | None

    def __init__(
        self,
        *,
        first: Tensor,
        first_bias: Tensor,
        layers: Tensor,
        biases: Tensor,
        down: Tensor,
        up: Tensor,
        radii: Tensor,
        head: Tensor | None = None,
        middle: Tensor | None = None,
        gain: float = 1.0,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        tensors = {"first": first, "first_bias": first_bias, "layers": layers, "biases": biases}
        tensors |= {"down": down, "up": up, "radii": radii}
        for name, value in tensors.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("head", None if head is None else head.clone())
        self.register_buffer("middle", None if middle is None else middle.clone())
        self.gain = gain
        self.activation: Activation = activation

    def rows(self, u: Float[Tensor, "n p"]) -> Float[Tensor, "n q"]:
        """The rows (x_T, f_T), or x_T alone where no random layer is left, ``q`` = d + m or d, before shortening."""
        x = functional.linear(u.to(self.first.dtype) * self.gain, self.first, self.first_bias).tanh()
        for t in range(len(self.down)):
            z = self._shortened(torch.cat([x, self._random(x, t)], 1), t)
            x, f = z[:, : x.shape[1]], z[:, x.shape[1] :].contiguous()
            x = x + functional.linear(functional.linear(f, self.down[t]), self.up[t])
        last = len(self.down)
        return torch.cat([x, self._random(x, last)], 1) if len(self.layers) > last else x

    def forward(self, u: Float[Tensor, "n p"]) -> Float[Tensor, "n outputs"]:
        """Logits; without a head, rows of at most the last radius."""
        z: Tensor = self._shortened(self.rows(u), -1)
        if self.head is None:
            return z
        logits: Tensor = functional.linear(z[:, : self.head.shape[1]], self.head, self.middle)
        return logits.float()

    def _random(self, x: Tensor, t: int) -> Tensor:
        return _FUNCTIONS[self.activation](functional.linear(x, self.layers[t], self.biases[t]))

    def _shortened(self, z: Tensor, t: int) -> Tensor:
        length = z.norm(dim=1, keepdim=True)
        short: Tensor = z * (self.radii[t] / length.maximum(self.radii[t]))
        return short


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
