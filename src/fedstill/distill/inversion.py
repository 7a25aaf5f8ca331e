"""Images fitted to the clients' networks pixel by pixel: the images of Fed-ADI, a baseline of DENSE.

Yin et al., "Dreaming to distill: data-free knowledge transfer via DeepInversion", CVPR 2020 (arXiv:1912.08795), with an
ensemble as teacher; the adaptive version (equation 8) favours images on which the student disagrees. Constants are from
the authors' code (NVlabs/DeepInversion, ``cifar10``).
"""

import torch
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.distill.ensemble import Temperature
from fedstill.distill.pool import adam_step, to_bytes
from fedstill.distill.teachers import Teachers
from fedstill.evaluation import mode_of
from fedstill.train.sgd import adam_of


def total_variation(x: Float[Tensor, "n c h w"]) -> Float[Tensor, ""]:
    """Sum of the L2 norms of the batch's differences of neighbouring pixels: right, down and along both diagonals."""
    across = x[:, :, :, :-1] - x[:, :, :, 1:]
    down = x[:, :, :-1, :] - x[:, :, 1:, :]
    falling = x[:, :, :-1, :-1] - x[:, :, 1:, 1:]
    rising = x[:, :, 1:, :-1] - x[:, :, :-1, 1:]
    total: Tensor = across.norm() + down.norm() + falling.norm() + rising.norm()
    return total


def competition(
    teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"], temperature: float = 3.0
) -> Float[Tensor, ""]:
    """``1 - JS(P, Q)``, P and Q the softmax of teachers' and student's logits over T (equation 8).

    ``JS = (KL(P || M) + KL(Q || M)) / 2`` in nats with ``M = (P + Q) / 2``, averaged over images; at most log 2.
    """
    p, q = (log_softmax(logits / temperature, 1) for logits in (teacher, student))
    middle = torch.logaddexp(p, q) - torch.log(p.new_tensor(2.0))
    parts = [kl_div(middle, log, reduction="batchmean", log_target=True) for log in (p, q)]
    return 1 - (parts[0] + parts[1]) / 2


def reversed_competition(
    teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"], temperature: float = 3.0
) -> Float[Tensor, ""]:
    """`competition` as in the authors' code: ``1 - clip((KL(M || P) + KL(M || Q)) / 2, 0, 1)``.

    All three distributions are clamped to [0.01, 0.99] and not normalised again.
    """
    p, q = ((logits / temperature).softmax(1) for logits in (teacher, student))
    middle = ((p + q) / 2).clamp(0.01, 0.99)
    parts = [kl_div(law.clamp(0.01, 0.99).log(), middle, reduction="batchmean") for law in (p, q)]
    return 1 - ((parts[0] + parts[1]) / 2).clamp(0, 1)


class Inversion(Settings):
    """Settings of the fit of a batch of images."""

    batch_size: PositiveInt = 256
    """Images of a batch."""
    steps: PositiveInt = 2000
    """Steps of Adam on the pixels."""
    lr: PositiveFloat = 0.1
    """Learning rate of Adam, in units of the data set's standard deviation."""
    jitter: NonNegativeInt = 2
    """Largest random shift of the batch, in pixels, in both directions at every step."""
    ce: NonNegativeFloat = 1.0
    """Weight of the teachers' cross-entropy for the labels drawn."""
    tv: NonNegativeFloat = 2.5e-5
    """Weight of the total variation."""
    bn: NonNegativeFloat = 100.0
    """Weight of L_BN, which is 0 for networks without batch norms."""
    adaptive: NonNegativeFloat = 0.01
    """Weight of the competition with the student; 0 is DeepInversion without it."""
    temperature: Temperature = 3.0
    """T of the competition."""
    reversed_js: bool = False
    """Take the competition of the authors' code, whose divergences have their arguments exchanged."""

    @classmethod
    def published(cls) -> "Inversion":
        """The authors' code for CIFAR-10 with its usual weight of the competition."""
        return cls(reversed_js=True)

    def missing(self, teachers: Teachers) -> str | None:
        """A warning if the main term, L_BN, is absent for some teachers, else None."""
        without = teachers.batch_norms.count(0)
        if not self.bn or not without:
            return None
        return (
            f"{without} of {len(teachers)} networks have no batch normalisation, so DeepInversion's main term is 0 for "
            "them; only cross-entropy and smoothness remain"
        )

    def loss(
        self,
        teachers: Teachers,
        student: nn.Module,
        x: Float[Tensor, "n c h w"],
        labels: Int64[Tensor, " n"],
    ) -> Float[Tensor, ""]:
        """``ce CE(D(x), y) + tv TV(x) + bn L_BN(x) + adaptive (1 - JS)`` of normalised images."""
        outputs = teachers.outputs(x)
        total = self.ce * cross_entropy(outputs.mean, labels) + self.tv * total_variation(x) + self.bn * outputs.bn
        if self.adaptive:
            compete = reversed_competition if self.reversed_js else competition
            with mode_of(student, training=False):
                total = total + self.adaptive * compete(outputs.mean, student(x), self.temperature)
        return total

    def epoch(
        self, teachers: Teachers, student: nn.Module, like: Records, rng: torch.Generator
    ) -> tuple[Records, Float[Tensor, "n classes"]]:
        """Fit one batch of images, from noise; pixels stay in [0, 1].

        Args:
            teachers: the clients' networks.
            student: the current student; runs in eval mode, gets no gradients.
            like: a record set with the images' shape, classes, normalisation and device.
            rng: a CPU generator; draws labels (uniform over the classes), first images (N(0, 1) after normalisation)
                and jitter.

        Returns:
            ``batch_size`` images rounded to 8 bits, ordered by their labels, and the teachers' mean logits for exactly
            these images.

        Raises:
            Diverged: the images are not finite.
        """
        n, device = self.batch_size, like.images.device
        labels = torch.randint(like.num_classes, (n,), generator=rng).sort().values.to(device)
        x = torch.randn(n, *like.shape, generator=rng).to(device)
        corners = torch.stack([torch.zeros(like.shape), torch.ones(like.shape)]).to(device)
        black, white = like.normalisation.apply(corners)
        x = x.clamp_(black, white).requires_grad_()
        adam = adam_of([x], self.lr, beta1=0.9)
        for _ in range(self.steps):
            rolls = torch.randint(-self.jitter, self.jitter + 1, (2,), generator=rng).tolist()
            adam_step(adam, self.loss(teachers, student, x.roll(rolls, (2, 3)), labels))
            with torch.no_grad():
                x.clamp_(black, white)
        pixels = (x.detach() - black) / (white - black)
        images = Records(to_bytes(pixels, self.lr), labels, like.num_classes, like.normalisation)
        return images, teachers.predict(images)
