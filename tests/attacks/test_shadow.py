"""The attack network on posteriors: finds what is there, and nothing where nothing is."""

import pytest
import torch
from torch import nn

from fedstill.attacks.shadow import ShadowAttack
from fedstill.base.seeds import stream
from fedstill.train.sgd import Adam

QUICK = Adam(lr=0.001, weight_decay=1e-7, batch_size=10, epochs=10)


def said(n: int, margin: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of models that are surer of their members, by ``margin``."""
    rng = stream(0, name)
    member = torch.arange(n) % 2 == 0
    logits = torch.randn(n, 10, generator=rng)
    label = torch.randint(10, (n, 1), generator=rng)
    return logits.scatter_add(1, label, 1 + margin * member[:, None]), member


@pytest.mark.parametrize("top", [None, 3])
def test_members_whose_models_are_sure_of_them_are_found(top: int | None) -> None:
    attack = ShadowAttack(top=top, training=QUICK)
    model = attack.fit(*said(1000, 5.0, "shadow"), stream(0, "attack"))
    judged = attack.rates(model, *said(1000, 5.0, "target"))
    assert judged["members"]["support"] == judged["others"]["support"] == 500
    assert min(judged[kind]["f1"] for kind in judged) > 0.85
    blind = attack.rates(model, *said(1000, 0.0, "target"))
    right = sum(kind["recall"] for kind in blind.values()) / 2
    assert abs(right - 0.5) < 0.08  # five standard deviations of a coin's 1000 throws


def test_the_order_of_classes_is_nothing_to_the_largest_three() -> None:
    attack = ShadowAttack(top=3, training=QUICK)
    logits, member = said(200, 5.0, "shadow")
    model = attack.fit(logits, member, stream(0, "attack"))
    assert attack.rates(model, logits, member) == attack.rates(model, logits.flip(1), member)


def test_few_classes_have_fewer_than_three() -> None:
    attack = ShadowAttack(top=3, training=QUICK)
    logits, member = said(50, 5.0, "shadow")
    model = attack.fit(logits[:, :2], member, stream(0, "attack"))
    assert model[0].in_features == 2


class Always(nn.Module):
    """Guesses by the first entry: a member from one half on."""

    def __init__(self) -> None:
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([0.5 - x[:, 0], x[:, 0] - 0.5], 1)


def test_rates_worked_out_by_hand() -> None:
    logits = torch.tensor([[5.0, 0.0], [5.0, 0.0], [5.0, 0.0], [0.0, 5.0]])  # guesses: member three times
    member = torch.tensor([True, True, False, False])
    judged = ShadowAttack().rates(Always(), logits, member)
    assert judged["members"] == pytest.approx({"precision": 2 / 3, "recall": 1, "f1": 0.8, "support": 2})
    assert judged["others"] == pytest.approx({"precision": 1, "recall": 0.5, "f1": 2 / 3, "support": 2})


def test_what_never_is_guessed_has_no_precision() -> None:
    logits = torch.tensor([[5.0, 0.0], [5.0, 0.0]])
    judged = ShadowAttack().rates(Always(), logits, torch.tensor([True, True]))
    assert judged["others"] == {"precision": 0, "recall": 0, "f1": 0, "support": 0}


def test_a_stream_gives_one_network_and_the_published_settings_stand() -> None:
    logits, member = said(50, 5.0, "shadow")
    first, again, other = (
        ShadowAttack(training=QUICK).fit(logits, member, stream(seed, "attack"))[0].weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (128, 10)
    assert ShadowAttack().training == Adam(lr=0.001, weight_decay=1e-7, batch_size=10, epochs=50)
