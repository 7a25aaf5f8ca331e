"""Gradient canaries: an attack on DP-SGD by the weights' change along each record's own gradient."""

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
    """Canaries ``x``, ``y``; the score is ``<g_i, w_0 - w>``, ``g_i`` the gradient of canary i at the start ``w_0``.

    Strongest for gradients that are orthogonal to each other and to other records', of one length.

    Args:
        release: from records to the trained parameters by name, with fresh noise each time, as `DPSGD` has it.
        model: the start of each release.
        x: inputs of the canaries.
        y: their labels.
        loss: what is minimised.
    """

    def score(trained: dict[str, Tensor]) -> Tensor:
        return along(model, {name: model.get_parameter(name) - w for name, w in trained.items()}, x, y, loss)

    return Canaries(len(x), lambda included: release(Examples(x[included], y[included])), score)


def along(
    model: nn.Module, direction: dict[str, Tensor], x: Float[Tensor, "m ..."], y: Tensor, loss: PerRecordLoss
) -> Float[Tensor, " m"]:
    """``<g_i, direction>`` for each record.

    The gradient of ``sum_i v_i loss_i`` is linear in v, so its product with the direction has these derivatives.
    """
    v = torch.ones(len(x), requires_grad=True)
    weights = {name: model.get_parameter(name).detach().requires_grad_() for name in direction}
    losses = loss(functional_call(model, weights, (x,)), x, y)
    gradients = torch.autograd.grad(losses, list(weights.values()), v, create_graph=True)
    product = torch.stack([(g * d.detach()).sum() for g, d in zip(gradients, direction.values(), strict=True)]).sum()
    (found,) = torch.autograd.grad(product, v)
    return found
