"""DeepAFL: a residual network solved layer by layer, in closed form, from one sum of each client for each block.

Tang, Huang, Fan, Han, Li, Xu, He, Liu, Song, Zhuang, Liu, "DeepAFL: Deep Analytic Federated Learning", ICLR 2026
(arXiv:2603.00579); its block is the dense one of Zozoulenko, Cass, Gonon, "Random Feature Representation Boosting",
ICML 2025 (arXiv:2501.18283).

Differs from the paper (docs/methods/deepafl.md has the whole list):

* one sum a block, of the products of (x_t, f_t), in place of two, as the residuals' sums follow from it;
* maps cross as factors of rank C, random layers as a seed;
* features are whitened and clipped with public numbers, and so are rows within the network;
* scores have a temperature, as in AFL;
* Gaussian releases by default, one a block, which share epsilon.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Float64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.base.seeds import draw_seed
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.feature_sums import Total, add_up, solve
from fedstill.methods.parts.moments import Embedding, MomentSums, Sums, release_moments, row_model, sizes
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.temperatures import counts_of, of_solution
from fedstill.models.residual import Activation, Residual, random_layer
from fedstill.privacy import rowwise
from fedstill.privacy.logistic import extend
from fedstill.protocol import Client, Federation, Method, load, public_images, step

Solved = dict[str, Tensor]
"""All blocks' D_t and U_t, radii and the last head, by the names of `Residual`."""
_BATCH = 1000
"""Public records whose rows are computed at a time."""


@dataclass(frozen=True)
class Built:
    """The network so far; the arguments of a request.

    Attributes:
        seed: seed of the random layers.
        down: D_0 to D_{t-1}, ``(t, r, m)``.
        up: U_0 to U_{t-1}, ``(t, d, r)``.
        radii: lengths to which rows are clipped, ``(t + 1,)``.
    """

    seed: int
    down: Float[Tensor, "blocks rank expanded"]
    up: Float[Tensor, "blocks units rank"]
    radii: Float[Tensor, " rows"]

    @classmethod
    def after(cls, blocks: int, solved: Solved, seed: int) -> "Built":
        """The network after some of the blocks that are solved."""
        return cls(seed, solved["down"][:blocks], solved["up"][:blocks], solved["radii"][: blocks + 1])


class DeepAFL(MomentSums, Method):
    """A sum for each block; the server solves for a head, and for the block that explains what the head misses."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 6
    """Sums that a client sends (T + 1): one for each residual block, and one for the last head."""
    width: PositiveInt = 256
    """Entries d of the rows x_t that blocks add to (hidden_dim in the authors' code)."""
    expanded: PositiveInt = 256
    """Entries m of the random features f_t within a block (fe in the authors' code)."""
    activation: Activation = "gelu"
    """Activation of the random features."""
    gain: PositiveFloat = 0.5
    """Root mean square of the network's inputs, the entries of rows of public features."""
    ridge: PositiveFloat = 1.0
    """Multiple of the identity added to the sums of products of x_t, for heads (lambda; reg in the authors' code)."""
    block_ridge: PositiveFloat = 0.05
    """Penalty of the squared entries of a block's map (gamma; reg_sand in the authors' code)."""
    noise_ridge: NonNegativeFloat = 0.7
    """More of both, as a multiple of the largest eigenvalue that the noise is expected to have."""
    quantile: Annotated[float, Ge(0), Le(1)] = 1.0
    """Quantile of the public rows' lengths to which rows within the network are clipped."""

    @property
    def blocks(self) -> int:
        """Residual blocks (T)."""
        return self.rounds - 1

    def entries(self, t: int) -> int:
        """Entries of the rows of round t, from 0: of (x_t, f_t), or of x_T after the last block."""
        return self.width + (self.expanded if t < self.blocks else 0)

    @property
    @override
    def releases(self) -> int:
        return self.rounds

    @override
    def server(self, fed: Federation) -> nn.Module:
        features, seed = public_features(fed, self, "deepafl"), draw_seed(fed.rng("random layers"))
        inputs, last = self._public_inputs(fed, features), self.blocks
        known = self.unsolved(fed.num_classes)  # D_t, U_t, radii and the last head W_t
        model = nn.Sequential(row_model(fed, features, self), nn.Identity())
        for round in fed.rounds(self.rounds, known):
            t = round.number - 1
            exactly = sizes(fed, features, self, dims=self.entries(t), fewer="--width, --expanded")
            built = Built.after(t, known, seed)
            # a part of known, which the next line changes in place
            built.radii[t] = self._radius(self.network(inputs.shape[1], built).to(fed.device), inputs)
            sums = fed.sum(self.sum_up, exactly=exactly, features=features, built=built)
            load(known, self.next_block(add_up(sums, self, fed.delta, fed.device), known, t))
            model[1] = self.network(inputs.shape[1], built, known).to(fed.device)
            round.log(accuracy=fed.evaluate(model))
        model[1] = self.network(inputs.shape[1], Built.after(last, known, seed), known).to(fed.device)
        return model

    def next_block(self, total: Total, known: Solved, t: int) -> Solved:
        """The head ``W_t = (sum X^T X + lambda I)^-1 sum X^T Y``, and for t < T the block that explains its residuals.

        The block's map D minimises ``|R - F D W|^2 + gamma |D|^2`` with the residuals ``R = Y - X W``, over all
        clients' records (the authors' sandwiched least squares): ``F^T F D W W^T + gamma D = F^T R W^T``. With the
        singular values ``W = U S V^T``, D is ``A U^T``, of which column j is ``(s_j^2 F^T F + gamma I)^-1 s_j F^T R
        v_j``; ``F^T R = F^T Y - F^T X W`` needs no other sum. Of a number, Y is less its mean.
        """
        d, scale = self.width, math.sqrt(1 - self.bias**2) / float(known["radii"][t])  # of the rows in the sums
        products, mean = total.matrix(), total.middle
        g = products[:-1, :-1] / scale**2
        h = (total.first[:, :-1].T - mean * products[:-1, -1:] / self.bias) / scale
        noise = total.std * math.sqrt(2) / scale**2  # expected largest eigenvalue of q entries' noise, over sqrt(q)
        spread = noise * math.sqrt(d)
        ridge = self.ridge + self.noise_ridge * spread
        w = solve(g[:d, :d], h[:d], ridge, noise=spread)
        found = {"head": w.T, **({"middle": w.new_tensor([mean])} if "middle" in known else {})}
        if t < self.blocks:
            u, s, v = torch.linalg.svd(w, full_matrices=False)
            missed = (h[d:] - g[d:, :d] @ w) @ v.T * s  # F^T R V S
            values, vectors = torch.linalg.eigh(g[d:, d:])
            values = values.clamp_min(0) + self.noise_ridge * noise * math.sqrt(self.expanded)
            a = vectors @ ((vectors.T @ missed) / (values[:, None] * s.square() + self.block_ridge))
            down, up = known["down"].clone(), known["up"].clone()
            down[t], up[t] = a.T, u
            found |= {"down": down, "up": up}
        else:  # the last head, whose residuals nothing explains
            std = total.first_std / scale
            found["head"] = w.T * of_solution(w.T, g, h.T, counts_of(total), ridge, spread, std)
        return found

    def network(self, inputs: int, built: Built, solved: Mapping[str, Tensor] | None = None) -> Residual:
        """The network so far: of rows (x_t, f_t), or x_T after the last block, or of logits if they are solved."""
        dtype = torch.float64 if self.precision == "double" else torch.float32
        layers = torch.empty(min(len(built.down) + 1, self.blocks), self.expanded, self.width)
        biases = layers.new_empty(layers.shape[:2])
        for i in range(len(layers)):
            layers[i], biases[i] = random_layer(self.width, self.expanded, built.seed, i + 1)
        first, first_bias = random_layer(inputs, self.width, built.seed, 0)
        tensors = {"first": first, "first_bias": first_bias, "layers": layers, "biases": biases}
        tensors |= {"down": built.down, "up": built.up, "radii": built.radii}
        tensors |= {name: solved[name] for name in ("head", "middle") if name in solved} if solved else {}
        return self._residual({name: value.to(dtype) for name, value in tensors.items()})

    def _residual(self, tensors: Solved) -> Residual:
        """A network whose inputs, of length sqrt(1 - b^2) at most, are scaled."""
        gain = self.gain * math.sqrt(tensors["first"].shape[1] / (1 - self.bias**2))
        return Residual(**tensors, gain=gain, activation=self.activation)

    def unsolved(self, num_classes: int) -> Solved:
        """Tensors for all that is to be solved, in the type in which it crosses."""
        rank, dtype = min(num_classes, self.width), torch.float64 if self.precision == "double" else torch.float32
        return {
            "down": torch.zeros(self.blocks, rank, self.expanded, dtype=dtype),
            "up": torch.zeros(self.blocks, self.width, rank, dtype=dtype),
            "radii": torch.zeros(self.rounds, dtype=dtype),
            "head": torch.zeros(num_classes, self.width, dtype=dtype),
        } | ({"middle": torch.zeros(1, dtype=dtype)} if num_classes == 1 else {})

    def _public_inputs(self, fed: Federation, features: PublicFeatures) -> Float64[Tensor, "n dims"]:
        public, model = public_images(fed.public, "deepafl"), fed.new_model()
        load(model, features.weights)
        some = torch.randperm(len(public), generator=fed.rng("radii"))[: self.space.records].to(public.labels.device)
        return self._inputs(features.rows(model, public[some]), features)

    def _inputs(self, rows: Float[Tensor, "n dims"], features: PublicFeatures) -> Float64[Tensor, "n dims"]:
        """Rows clipped and scaled as in `row_model`; on the CPU, where a row's bits depend on no other row."""
        return extend(rows.cpu(), features.radius, self.bias)[:, :-1].contiguous()

    def _radius(self, network: Residual, inputs: Float64[Tensor, "n dims"]) -> float:
        """The quantile of the lengths of public rows."""
        device = network.first.device
        with torch.no_grad():
            batches = (inputs[start : start + _BATCH].to(device) for start in range(0, len(inputs), _BATCH))
            lengths = torch.cat([network.rows(some).norm(dim=1) for some in batches])
        return max(float(lengths.double().quantile(self.quantile)), 1e-6)

    @step
    def sum_up(self, client: Client, features: PublicFeatures, built: Built) -> Sums:
        """Release the sums of products of (x_t, f_t), or of x_T after the last block, and their sums by class."""
        network = self.network(features.projection.shape[1], built).to(client.device)
        dims = self.entries(len(built.down))

        def rows(mapped: Float[Tensor, "n dims"]) -> Float[Tensor, "n q"]:
            inputs = self._inputs(mapped, features).to(client.device, network.first.dtype)
            return rowwise.features(hidden_rows, [network], Examples(inputs, inputs[:, 0]))

        return release_moments(client, features, self, embedding=Embedding(dims, float(built.radii[-1]), rows))

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        own = self.rounds, self.width, self.expanded, self.activation, self.gain, self.quantile
        return *super().first_reply, type(self), *own

    @override
    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        parts: dict[str, Solved] = {"0": {}, "1": {}}
        for name, value in weights.items():
            place, _, rest = name.partition(".")
            parts[place][rest] = value
        return nn.Sequential(super().rebuild(network, parts["0"]), self._residual(parts["1"]))


def hidden_rows(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The rows of one network, ``(n, q)``, each with the bits that it has in any other batch."""
    with rowwise.WideLinear():
        rows: Tensor = nets[0](x)
    return rows
