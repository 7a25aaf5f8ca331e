"""A small convolutional autoencoder, whose latents are a quarter of the image's sides."""

from jaxtyping import Float
from torch import Tensor, nn, ones
from torch.nn.functional import pad

_BLOCK = 4
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
        self.grid = (latents, -(-self._height // _BLOCK), -(-self._width // _BLOCK))
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
        right, below = -pixels.shape[3] % _BLOCK, -pixels.shape[2] % _BLOCK
        z: Tensor = self.encoder(pad(pixels, (0, right, 0, below), mode="replicate")) / self.deviation
        return z

    def decode(self, z: Float[Tensor, "n latents rows columns"]) -> Float[Tensor, "n c h w"]:
        """Images of latents; black is 0 and white 1, which pixels may exceed a little."""
        pixels: Tensor = self.decoder(z * self.deviation)
        return pixels[:, :, : self._height, : self._width]

    def forward(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The decoded latents of images."""
        return self.decode(self.encode(pixels))
