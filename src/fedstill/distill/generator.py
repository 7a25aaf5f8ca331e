"""Images from a generator that the clients' networks teach, without any data: DENSE's first stage.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022 (arXiv:2112.12371), Algorithm 1, lines of the
data generation stage, and the authors' code (zj-jayzhang/DENSE), which does something else: `Generation.published`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, cross_entropy, kl_div, log_softmax

from fedstill.distill.teachers import Teachers
from fedstill.protocol import Settings
from fedstill.records import Records
from fedstill.seeds import isolated
from fedstill.train import augment
from fedstill.train.local import Augment, Diverged, draw_seed, mode_of

View = Literal["none", "crop", "crop_flip"]
"""How images are changed before the networks see them: not, shifted, or shifted and flipped left to right."""
VIEWS: Mapping[View, Augment | None] = {"none": None, "crop": augment.crop, "crop_flip": augment.crop_flip}
"""What does that."""


_PARITIES = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""Whether a pixel's row and column are odd."""


class Generator(nn.Module):
    """From normal latents to pixels in [0, 1]: a linear layer and three 3x3 convolutions between two doublings.

    Linear to 2 ngf channels of H/4 x W/4, batch norm, nearest x2, convolution 2 ngf, batch norm, LeakyReLU 0.2,
    nearest x2, convolution ngf, batch norm, LeakyReLU 0.2, convolution c, sigmoid. 2,328,899 parameters for nz 256, ngf
    64 and 3x32x32. Weights start as N(0, 0.02), those of batch norms as N(1, 0.02), biases as 0 (DENSE's
    ``reset_model``). It stays in train mode: batch norms use the batch's statistics.

    Args:
        shape: channels, height and width of an image; both sides multiples of 4.
        nz: length of a latent vector.
        ngf: channels before the last convolution.

    Raises:
        ValueError: a side of the image is no multiple of 4.
    """

    def __init__(self, shape: tuple[int, int, int], nz: int = 256, ngf: int = 64) -> None:
        super().__init__()
        channels, quarter = shape[0], quarter_of(shape)
        self.linear = nn.Linear(nz, 2 * ngf * math.prod(quarter))
        self.body = nn.Sequential(
            nn.Unflatten(1, (2 * ngf, *quarter)),
            nn.BatchNorm2d(2 * ngf),
            UpsampledConv(2 * ngf, 2 * ngf),
            nn.BatchNorm2d(2 * ngf),
            nn.LeakyReLU(0.2),
            UpsampledConv(2 * ngf, ngf),
            nn.BatchNorm2d(ngf),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ngf, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, z: Float[Tensor, "n nz"]) -> Float[Tensor, "n c h w"]:
        """Pixels in [0, 1]."""
        pixels: Tensor = self.body(self.linear(z))
        return pixels


class UpsampledConv(nn.Conv2d):
    """Nearest x2, then a 3x3 convolution that pads with 0, as four 2x2 convolutions before the doubling.

    Of the three rows that a filter sees there, two are the same row here, so their weights add up; which two depends on
    whether the row of the output is even. That is 16 products in place of 36 for a pixel; forward and backward take 0.5
    to 0.6 of the time on a CPU. Equal to rounding.
    """

    _halves: Tensor  # [parity of the output's row, row before the doubling, row of the filter]

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        """``inputs`` and ``outputs`` are numbers of channels."""
        super().__init__(inputs, outputs, 3, bias=bias)
        halves = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
        self.register_buffer("_halves", halves, persistent=False)

    def forward(self, x: Float[Tensor, "n inputs h w"]) -> Float[Tensor, "n outputs 2*h 2*w"]:
        """The image of twice the size."""
        n, _, h, w = x.shape
        outputs, inputs = self.weight.shape[:2]
        filters = torch.einsum("par,qbs,ocrs->pqocab", self._halves, self._halves, self.weight)
        filters = filters.reshape(4 * outputs, inputs, 2, 2)
        bias = None if self.bias is None else self.bias.repeat(4)
        every = conv2d(x, filters, bias, padding=1).view(n, 2, 2, outputs, h + 1, w + 1)
        found: Tensor = _Interleaved.apply(every, h, w)  # type: ignore[no-untyped-call]
        return found


class _Interleaved(torch.autograd.Function):
    """``out[.., 2 i + p, 2 j + q] = every[:, p, q, :, i + p, j + q]``: each pixel of the doubled image from its filter.

    As slices and stacks it is right too, but their gradients fill a tensor of zeros for every slice.
    """

    @staticmethod
    def forward(ctx: Any, every: Tensor, h: int, w: int) -> Tensor:
        ctx.sizes = every.shape, h, w
        out = every.new_empty(every.shape[0], every.shape[3], h, 2, w, 2)
        for p, q in _PARITIES:
            out[:, :, :, p, :, q] = every[:, p, q, :, p : p + h, q : q + w]
        return out.flatten(4).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, h, w = ctx.sizes
        found = gradient.new_zeros(shape)
        parts = gradient.reshape(*gradient.shape[:2], h, 2, w, 2)
        for p, q in _PARITIES:
            found[:, p, q, :, p : p + h, q : q + w] = parts[:, :, :, p, :, q]
        return found, None, None


def quarter_of(shape: tuple[int, int, int]) -> tuple[int, int]:
    """A quarter of height and width, where generators begin.

    Raises:
        ValueError: a side of the image is no multiple of 4.
    """
    _, height, width = shape
    if height % 4 or width % 4:
        raise ValueError(f"the generator can't make images of {height}x{width} pixels, only multiples of 4 a side")
    return height // 4, width // 4


def divergence_loss(teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``L_div = -mean_i omega_i KL(softmax(D_i) || softmax(f_S,i))`` of logits (DENSE, equation 4).

    omega is 1 where the student's largest logit is another class's than the teachers', else 0. Gradients flow through
    both.
    """
    disagree = teacher.argmax(1) != student.argmax(1)
    divergence = kl_div(log_softmax(student, 1), log_softmax(teacher, 1), reduction="none", log_target=True).sum(1)
    return -(divergence * disagree).mean()


class Generation(Settings):
    """How one epoch's synthetic images are made."""

    batch_size: PositiveInt = 128
    """Images of an epoch."""
    steps: PositiveInt = 30
    """Steps of Adam on the generator in an epoch (T_G)."""
    lr: PositiveFloat = 1e-3
    """Its learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Its decay of the mean gradient, in [0, 1); that of the squares is 0.999."""
    nz: PositiveInt = 256
    """Length of a latent vector."""
    ngf: PositiveInt = 64
    """Channels of the generator's last layers."""
    ce: NonNegativeFloat = 1.0
    """Weight of the teachers' cross-entropy for the labels drawn."""
    bn: NonNegativeFloat = 1.0
    """Weight of L_BN (lambda_1), the distance from the statistics of the teachers' batch norms."""
    div: NonNegativeFloat = 0.5
    """Weight of L_div (lambda_2), which seeks images that student and teachers call differently."""
    view: View = "none"
    """What the losses see of an image."""
    fresh: bool = False
    """Whether every epoch starts a new generator and fits its latents too (the authors' code), or goes on training
    the one there is on latents as drawn (Algorithm 1)."""
    keep_lowest: bool = False
    """Whether the images are those of the step with the lowest loss, or those after the last step."""

    @classmethod
    def published(cls) -> "Generation":
        """What the authors' code does with the settings of its README; its L_BN is 0 whatever its weight."""
        return cls(batch_size=256, bn=0.0, div=1.0, view="crop_flip", fresh=True, keep_lowest=True)

    def start(self, like: Records, rng: torch.Generator) -> "Synthesis":
        """The stage before its first epoch.

        Args:
            like: carries shape, classes, normalisation and device.
            rng: a CPU generator; draws the generator's first weights.

        Raises:
            ValueError: the sides of an image are no multiples of 4.
        """
        return Synthesis(self, like, rng)

    def loss(
        self,
        teachers: Teachers,
        student: nn.Module,
        x: Float[Tensor, "n c h w"],
        labels: Int64[Tensor, " n"],
    ) -> Float[Tensor, ""]:
        """``L_gen = ce L_CE + bn L_BN + div L_div`` of normalised images; differentiable in ``x``."""
        look = teachers.look(x) if self.bn else None
        mean = teachers(x) if look is None else look.mean
        total = self.ce * cross_entropy(mean, labels)
        if look is not None:
            total = total + self.bn * look.bn
        if self.div:
            with mode_of(student, training=False):
                total = total + self.div * divergence_loss(mean, student(x))
        return total


class Synthesis:
    """DENSE's data generation stage: a generator and its Adam.

    Attributes:
        tensors: all that lasts from epoch to epoch; changing them in place (`fedstill.protocol.load`) resumes a run.
            Empty where every epoch starts a new generator.
    """

    def __init__(self, settings: Generation, like: Records, rng: torch.Generator) -> None:
        """See `Generation.start`."""
        self._settings, self._like = settings, like
        self._generator = self._new(rng)
        self._adam = adam_of(self._generator.parameters(), settings.lr, settings.beta1)
        self.tensors = {} if settings.fresh else lasting(self._generator, self._adam)

    def epoch(
        self, teachers: Teachers, student: nn.Module, rng: torch.Generator
    ) -> tuple[Records, Float[Tensor, "n classes"]]:
        """Train the generator for ``steps`` steps on one batch of latents and labels.

        Args:
            teachers: the clients' networks.
            student: the network they are to teach, as it is now; looked at in eval mode, gets no gradients.
            rng: a CPU generator; draws latents, labels (uniform over the classes), views and, where every epoch has
                one, the new generator.

        Returns:
            ``batch_size`` images rounded to 8 bits with the labels drawn, ordered by them, and the teachers' mean
            logits for exactly these images.

        Raises:
            Diverged: the images are not finite.
        """
        settings, like = self._settings, self._like
        device, n = like.images.device, settings.batch_size
        generator, adam = self._generator, self._adam
        z = torch.randn(n, settings.nz, generator=rng).to(device)  # sample a batch of noises and labels
        labels = torch.randint(like.num_classes, (n,), generator=rng).sort().values.to(device)
        if settings.fresh:
            generator = self._new(rng)
            adam = adam_of([*generator.parameters(), z.requires_grad_()], settings.lr, settings.beta1)
        lowest, best = float("inf"), torch.empty(0)
        for _ in range(settings.steps):
            pixels = generator(z)  # x^ = G(z)
            x = like.normalisation.apply(viewed(pixels, settings.view, rng))
            loss = settings.loss(teachers, student, x, labels)
            if settings.keep_lowest and float(loss.detach()) < lowest:
                lowest, best = float(loss.detach()), pixels.detach()
            descend(adam, loss)  # theta_G <- theta_G - eta_G grad L_gen
        if not settings.keep_lowest:
            with torch.no_grad():
                best = generator(z)
        images = Records(to_bytes(best, settings.lr), labels, like.num_classes, like.normalisation)
        return images, teachers.judge(images)

    def _new(self, rng: torch.Generator) -> Generator:
        with isolated(draw_seed(rng)):
            return Generator(self._like.shape, self._settings.nz, self._settings.ngf).to(self._like.images.device)


def viewed(pixels: Float[Tensor, "n c h w"], view: View, rng: torch.Generator) -> Float[Tensor, "n c h w"]:
    """The augmented pixels, zero (black) where an image was shifted away; differentiable."""
    change = VIEWS[view]
    return pixels if change is None else change(pixels, rng)


def to_bytes(pixels: Float[Tensor, "n c h w"], lr: float) -> Tensor:
    """Pixels in [0, 1] rounded to 8 bits.

    Raises:
        Diverged: they are not finite; ``lr`` is what to blame.
    """
    if not pixels.numel() or not torch.isfinite(pixels).all():
        raise Diverged(
            f"making images with lr={lr:g} left pixels or a loss that are not finite; use a smaller learning rate, for "
            f"example {lr / 10:g}"
        )
    return (pixels.detach() * 255).round().to(torch.uint8)


def adam_of(weights: Iterable[Tensor], lr: float, beta1: float) -> torch.optim.Adam:
    """Adam with its moments in place from the start, so that a checkpoint finds them; beta_2 is 0.999."""
    adam = torch.optim.Adam(list(weights), lr=lr, betas=(beta1, 0.999))
    for weight in adam.param_groups[0]["params"]:
        moments = {name: torch.zeros_like(weight, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.zeros(()), **moments}
    return adam


def descend(adam: torch.optim.Adam, loss: Float[Tensor, ""]) -> None:
    """One step of ``adam`` down the gradient of ``loss`` by its own weights; no other tensor gets a gradient."""
    weights = adam.param_groups[0]["params"]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    adam.step()
    adam.zero_grad()


def lasting(generator: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """The live tensors of both by name, detached: writing into them changes generator and Adam."""
    tensors = {f"generator.{name}": value.detach() for name, value in generator.state_dict().items()}
    for i, weight in enumerate(adam.param_groups[0]["params"]):
        tensors.update({f"adam.{i}.{name}": value for name, value in adam.state[weight].items()})
    return tensors
