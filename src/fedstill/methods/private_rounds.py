"""What methods share whose clients train by DP-SGD, round after round, as far as their budgets go.

The loop of DP-FL, Adap DP-FL, FedKD with DP and FedKADP (Jiang et al. 2024, Algorithm 2, with two changes: a round is
not begun that a client's budget would not cover, and budgets are the clients' own, since nothing in what the server
sees hides who was asked).
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.evaluate import outputs
from fedstill.methods.averaging import Participation, sample
from fedstill.privacy import accounting
from fedstill.privacy.events import Gaussian
from fedstill.privacy.fedkadp_claim import published_epsilon
from fedstill.protocol import Federation, Method, load, parameters
from fedstill.train.feedback import Course
from fedstill.train.private import PrivateSGD


class PrivateRounds(Method):
    """FedAvg by clients that protect every record."""

    looks: ClassVar[bool] = False
    """Whether `adapt` wants to know loss and accuracy on public records."""
    rounds: PositiveInt = 100
    """Communication rounds at most (T)."""
    participation: Participation = 0.1
    """Share of the clients asked in each round, drawn anew each time (s)."""
    local: PrivateSGD = PrivateSGD()
    """A client's training in one round."""
    noise_multiplier: NonNegativeFloat = 5.0
    """Standard deviation of a step's noise by the clipping length, at first (sigma_0); 0 guarantees nothing."""

    def server(self, fed: Federation) -> nn.Module:
        """The server's loop; it ends early when no client's budget covers another round."""
        model = fed.new_model()  # w_0
        if self.adaptive and fed.budget is None:
            raise ValueError(
                f"{type(self).__name__} chooses noise by what was released before, which only a budget can bound; give "
                "what a client's releases may cost, as --budget 2"
            )
        course = Course(self.rounds)
        noises = torch.full((self.rounds,), torch.nan, dtype=torch.float64)
        asked = torch.zeros(self.rounds, len(fed.clients), dtype=torch.bool)
        controls = self.controls()
        self._look(fed, model, course, 0, change=0.0)
        for round in fed.rounds(self.rounds, model, course.tensors, controls, {"noise": noises, "asked": asked}):
            now, noise = round.number - 1, float(controls["noise"])
            able = [k for k, client in enumerate(fed.clients) if self.affords(fed, noises, asked[:, k], noise)]
            if not able or self.over(fed, noises, asked, now):
                if not now:
                    raise ValueError(
                        f"a budget of {fed.budget} does not cover one round with noise multiplier {noise:g}; raise "
                        "--budget or --noise-multiplier"
                    )
                break
            chosen = sample(fed, self.participation, round, [fed.clients[k] for k in able])  # S_t
            noises[now] = noise
            asked[now, [k for k in able if fed.clients[k] in chosen]] = True
            before = {name: value.clone() for name, value in parameters(model).items()}
            load(model, self.exchange(fed, chosen, model, controls, round.number))
            change = sum(float((w - before[name]).double().square().sum()) for name, w in parameters(model).items())
            self._look(fed, model, course, round.number, change=change**0.5)
            shown = {name: float(value) for name, value in controls.items()}
            shown |= self.adapt(course, round.number, controls)
            round.log(
                accuracy=fed.evaluate(model),
                epsilon=self.spent(fed, noises, asked),
                claimed=self.claimed(fed, noises[: round.number], asked),
                **{name: value for name, value in shown.items() if abs(value) < 1e300},
            )
        return model

    def controls(self) -> dict[str, Tensor]:
        """What the server adapts from round to round, by name."""
        return {"noise": torch.tensor(self.noise_multiplier, dtype=torch.float64)}

    def adapt(self, course: Course, now: int, controls: dict[str, Tensor]) -> dict[str, float]:
        """Set ``controls`` for the round after ``now``, in place; returns more numbers to be logged."""
        return {}

    @property
    def adaptive(self) -> bool:
        """Whether the noise follows what was released before."""
        return False

    @abstractmethod
    def exchange(
        self, fed: Federation, chosen: Sequence[int], model: nn.Module, controls: dict[str, Tensor], now: int
    ) -> dict[str, Tensor]:
        """Ask ``chosen`` and return the next model's parameters."""

    # ----------------------------------------------------------------------------------------------------- the account

    def affords(self, fed: Federation, noises: Tensor, asked: Tensor, noise: float) -> bool:
        """Whether a client's budget covers one more round."""
        if fed.budget is None or noise == 0:
            return fed.budget is None
        events = self.events([*noises[asked].tolist(), noise])
        return accounting.fits(events, fed.budget, fed.delta, "record", adaptive=self.adaptive)

    def over(self, fed: Federation, noises: Tensor, asked: Tensor, done: int) -> bool:
        """Whether to end for another reason, before the round after ``done``."""
        return False

    def spent(self, fed: Federation, noises: Tensor, asked: Tensor) -> float | None:
        """The epsilon of the client who has released most; by the filter where noise is adaptive, None for no bound."""
        if self.noise_multiplier == 0:
            return None
        each = {tuple(sorted(noises[asked[:, k]].tolist())) for k in range(len(fed.clients))}
        if self.adaptive:
            assert fed.budget is not None
            account = accounting.rdp_filter(fed.budget, fed.delta)
            return max(account.epsilon(self.events(used)) for used in each)
        most = max(accounting.epsilon(self.events(used), fed.delta, "record") for used in each)
        return most if math.isfinite(most) else None

    def events(self, noises: Iterable[float]) -> list[Gaussian]:
        """A client's rounds with these noise multipliers, as its ledger has them."""
        steps, sampling = self.local.steps, self.local.sampling
        return [
            Gaussian(noise_multiplier=noise, sampling=sampling, count=steps * many)
            for noise, many in sorted(Counter(noises).items())
        ]

    def claimed(self, fed: Federation, noises: Tensor, asked: Tensor) -> float | None:
        """FedKADP's own account of rounds with these noise multipliers, for comparison; None without noise."""
        if not bool((noises > 0).all()):
            return None
        clients = int(asked[0].sum())
        rate = clients / len(fed.clients)
        return published_epsilon(noises.tolist(), rate=rate, steps=self.local.steps, clients=clients, delta=fed.delta)

    def _look(self, fed: Federation, model: nn.Module, course: Course, number: int, *, change: float) -> None:
        """Note how the model does on public records of the task."""
        if not self.looks:
            return
        if fed.public is None or fed.public.num_classes != fed.num_classes:
            raise ValueError(
                f"{type(self).__name__} follows the model's loss, which must not come from private records; give the "
                "server some of the task's own that are public, as --public held=1000"
            )
        logits = torch.cat(outputs(model, fed.public))
        labels = fed.public.labels.to(logits.device)
        course.note(
            number,
            change=change,
            loss=float(cross_entropy(logits, labels)),
            accuracy=float((logits.argmax(1) == labels).double().mean()),
        )
