"""Autoencoders of images: a plain one, and a class-conditional variational one.

Heinbaugh, Luz-Ricca, Shao, "Data-free one-shot federated learning under very high statistical heterogeneity", ICLR
2023, and the authors' code (ceh-2000/fed_cvae: ``models/VAE.py``, ``encoder.py``, ``decoder.py``).
"""

from jaxtyping import Float
from torch import Tensor, nn, ones
from torch.nn.functional import pad

_PLAIN_BLOCK = 4
"""The two strided convolutions divide a side by this."""


class Autoencoder(nn.Module):
    """Images to maps of latents, and back; `forward` does both.

    The encoder has a 3x3 convolution to ``width`` channels, two strided ones (4x4, stride 2) to twice as many, each
    with ReLU, and a 1x1 convolution to ``latents`` channels, divided by `deviation`; the decoder is its mirror image.
    It has no sigmoid at its end, which could saturate and stop learning. Images are padded at the lower right, by
    repetition, to multiples of 4 a side.

    Attributes:
        deviation: divisor of the latents; that of the latents themselves, over some images, gives them a deviation
            of 1.
        grid: channels, height and width of an image's latents.
    """

    deviation: Tensor

    def __init__(self, shape: tuple[int, int, int], latents: int = 4, width: int = 32) -> None:
        super().__init__()
        channels, self._height, self._width = shape
        self.grid = (latents, -(-self._height // _PLAIN_BLOCK), -(-self._width // _PLAIN_BLOCK))
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, latents, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(latents, 2 * width, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, 1, 1),
        )
        self.register_buffer("deviation", ones(()))

    def encode(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n latents rows columns"]:
        """Latents of images with pixels in [0, 1]."""
        right, below = -pixels.shape[3] % _PLAIN_BLOCK, -pixels.shape[2] % _PLAIN_BLOCK
        z: Tensor = self.encoder(pad(pixels, (0, right, 0, below), mode="replicate")) / self.deviation
        return z

    def decode(self, z: Float[Tensor, "n latents rows columns"]) -> Float[Tensor, "n c h w"]:
        """Images of latents; black is 0 and white 1, which pixels may exceed a little."""
        pixels: Tensor = self.decoder(z * self.deviation)
        return pixels[:, :, : self._height, : self._width]

    def forward(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The decoded latents of images."""
        return self.decode(self.encode(pixels))


_CVAE_BLOCK = 16
"""The four strided convolutions divide a side by this."""
_LEAST = 32
"""Smallest side inside the networks, so that a batch norm has several positions even in a batch of one image."""


class Decoder(nn.Module):
    """Latents and a one-hot class, side by side, to the logits of pixels.

    Linear to 64 channels of a sixteenth of the image's sides, which are rounded up to a multiple of 16, at least 32,
    ReLU, four transposed convolutions (4x4, stride 2) to 64, 32, 32 and c channels, after the first three a batch norm
    (eps 1e-3) and ReLU; the edges are cut off. 120,961 parameters for 10 latents, 10 classes and 1x32x32.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, latents: int) -> None:
        super().__init__()
        self.shape, self.num_classes, self.latents = shape, num_classes, latents
        rows, columns = (_padded(size) // _CVAE_BLOCK for size in shape[1:])
        self.body = nn.Sequential(
            nn.Linear(latents + num_classes, 64 * rows * columns),
            nn.Unflatten(1, (64, rows, columns)),
            nn.ReLU(),
            *_up(64, 64),
            *_up(64, 32),
            *_up(32, 32),
            nn.ConvTranspose2d(32, shape[0], 4, 2, 1),
        )

    def forward(self, z: Float[Tensor, "n latents+classes"]) -> Float[Tensor, "n c h w"]:
        """Logits of pixels; their sigmoid is the image."""
        logits: Tensor = self.body(z)
        top, left = (_edge(size) for size in self.shape[1:])
        return logits[:, :, top : top + self.shape[1], left : left + self.shape[2]]


class CVAE(nn.Module):
    """Encoder and decoder; `forward` encodes.

    The encoder has four convolutions (4x4, stride 2) with 32, 32, 64 and 64 channels, each with a batch norm and ReLU,
    and linear layers to 500 and ``2 latents`` values. Images are padded with black to a multiple of 16, at least 32, a
    side.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, latents: int) -> None:
        super().__init__()
        self.decoder = Decoder(shape, num_classes, latents)
        rows, columns = (_padded(size) // _CVAE_BLOCK for size in shape[1:])
        self.encoder = nn.Sequential(
            *_down(shape[0], 32),
            *_down(32, 32),
            *_down(32, 64),
            *_down(64, 64),
            nn.Flatten(),
            nn.Linear(64 * rows * columns, 500),
            nn.Linear(500, 2 * latents),
        )

    def forward(
        self, pixels: Float[Tensor, "n c h w"]
    ) -> tuple[Float[Tensor, "n latents"], Float[Tensor, "n latents"]]:
        """Mean and log variance of the latents of images with pixels in [0, 1]."""
        (top, left), (height, width) = (_edge(size) for size in pixels.shape[2:]), pixels.shape[2:]
        edges = (left, _padded(width) - width - left, top, _padded(height) - height - top)
        mean, log_variance = self.encoder(pad(pixels, edges)).chunk(2, 1)
        return mean, log_variance


def _padded(size: int) -> int:
    return max(_LEAST, -(-size // _CVAE_BLOCK) * _CVAE_BLOCK)


def _edge(size: int) -> int:
    return (_padded(size) - size) // 2


def _down(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()


def _up(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs, 1e-3), nn.ReLU()
