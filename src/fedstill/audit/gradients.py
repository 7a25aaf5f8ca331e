"""Gradient canaries: an attack on DP-SGD that projects the change of the weights onto each canary's gradient."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from fedstill.audit.lower_bounds import Canaries
from fedstill.privacy.per_record import PerRecordLoss
from fedstill.records import Examples, Trainable


def gradient_canaries(
    release: Callable[[Trainable], dict[str, Tensor]],
    model: nn.Module,
    x: Float[Tensor, "m ..."],
    y: Tensor,
    loss: PerRecordLoss,
) -> Canaries[dict[str, Tensor]]:
    """Canaries ``x``, ``y`` with the scores ``<g_i, w_0 - w>``; ``g_i`` is the gradient of canary i at ``w_0``.

    The attack is strongest if the gradients have one length and are orthogonal to each other and to all others.

    Args:
        release: maps records to the trained parameters by name, with fresh noise each time, as `DPSGD` does.
        model: the initial model ``w_0`` of each release.
        x: inputs of the canaries.
        y: labels of the canaries.
        loss: the loss that ``release`` minimises.
    """

    def score(trained: dict[str, Tensor]) -> Tensor:
        change = {name: model.get_parameter(name) - w for name, w in trained.items()}
        return directional_derivatives(model, change, x, y, loss)

    return Canaries(len(x), lambda included: release(Examples(x[included], y[included])), score)


def directional_derivatives(
    model: nn.Module, direction: dict[str, Tensor], x: Float[Tensor, "m ..."], y: Tensor, loss: PerRecordLoss
) -> Float[Tensor, " m"]:
    """``<g_i, direction>`` for each record: the derivatives by v of ``<grad sum_i v_i loss_i, direction>``."""
    v = torch.ones(len(x), requires_grad=True)
    weights = {name: model.get_parameter(name).detach().requires_grad_() for name in direction}
    losses = loss(functional_call(model, weights, (x,)), x, y)
    gradients = torch.autograd.grad(losses, list(weights.values()), v, create_graph=True)
    product = torch.stack([(g * d.detach()).sum() for g, d in zip(gradients, direction.values(), strict=True)]).sum()
    return torch.autograd.grad(product, v)[0]
