"""Distances of an image's patches to centroids of public patches: features that take a minute on a CPU to learn.

Coates, Ng, Lee, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011: normalised and
whitened patches, k-means, the triangle activation, and sums over the quarters of the image.
"""

import warnings
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedstill.base.records import Records
from fedstill.base.seeds import draw_seed

_CONTRAST = 0.01
"""Constant added to a patch's variance before it is scaled to 1: flat patches stay small."""
_RIDGE = 0.1
"""Constant added to the variances of normalised patches before whitening."""
_SAMPLES = 100
"""Public patches for each centroid."""
_TOGETHER = 8
"""Images whose patches are normalised at a time: few, for the CPU's cache."""
_PASSES = 20
"""Largest number of passes of k-means over the patches."""


class Patches(nn.Module):
    """Triangle activations of an image's patches, summed over a grid of cells, and a linear classifier.

    An image has the feature ``sum_p max(0, mean_j |z_p - c_j| - |z_p - c_k|)`` for centroid k and each cell, where z_p
    are the whitened patches p of the cell. Centroids are random until `learn`.

    Args:
        shape: channels, height and width of an image.
        num_classes: number of outputs.
        centroids: number of centroids.
        side: height and width of a patch in pixels.
        stride: distance of neighbouring patches in pixels.
        cells: number of cells in each direction; 2 for the quarters.

    Raises:
        ValueError: an image has fewer rows or columns of patches than cells.
    """

    centre: Tensor
    whitening: Tensor
    centroids: Tensor
    cells: Tensor

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        *,
        centroids: Annotated[int, Ge(2)] = 1024,
        side: Annotated[int, Ge(2)] = 6,
        stride: Annotated[int, Ge(1)] = 1,
        cells: Annotated[int, Ge(1)] = 2,
    ) -> None:
        super().__init__()
        channels, *sides = shape
        places = [(length - side) // stride + 1 for length in sides]
        if min(places) < cells:
            raise ValueError(
                f"patches can't use images of {sides[0]}x{sides[1]} pixels: with side={side} and stride={stride} they "
                f"have {max(0, places[0])}x{max(0, places[1])} patches, and cells={cells} needs at least "
                f"{cells}x{cells}; choose a smaller side or stride"
            )
        self.side, self.stride = side, stride
        values = channels * side**2
        self.register_buffer("centre", torch.zeros(values))
        self.register_buffer("whitening", torch.eye(values))
        self.register_buffer("centroids", torch.randn(centroids, values))
        self.register_buffer("cells", _grid(places[0], places[1], cells), persistent=False)
        self.classifier = nn.Linear(cells**2 * centroids, num_classes)

    def extra_repr(self) -> str:
        """The options, for the key of cached weights."""
        return f"side={self.side}, stride={self.stride}, cells={len(self.cells)}"

    def learn(self, public: Records, rng: torch.Generator) -> None:
        """Estimate the whitening and the centroids from patches of public images; change them in place."""
        patches = _normalised(self.draw_patches(public, rng)).double()
        centre = patches.mean(0)
        values, directions = torch.linalg.eigh((patches - centre).T @ (patches - centre) / len(patches))
        whitening = directions * (values.clamp_min(0) + _RIDGE).rsqrt() @ directions.T
        self.centre.copy_(centre)
        self.whitening.copy_(whitening)
        self.centroids.copy_(_means(((patches - centre) @ whitening).float(), len(self.centroids), draw_seed(rng)))

    def draw_patches(self, public: Records, rng: torch.Generator) -> Float[Tensor, "m values"]:
        """Random patches of the images, a hundred for each centroid."""
        count, sides = _SAMPLES * len(self.centroids), public.shape[1:]
        images = torch.randint(len(public), (count,), generator=rng)
        y, x = (torch.randint(length - self.side + 1, (count,), generator=rng) for length in sides)
        patches = []
        for start in range(0, count, 1000):
            some = slice(start, start + 1000)
            pixels = public.inputs(images[some].to(public.images.device)).cpu()
            windows = pixels.unfold(2, self.side, 1).unfold(3, self.side, 1)
            patches.append(windows[torch.arange(len(pixels)), :, y[some], x[some]].flatten(1))
        return torch.cat(patches)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """The sums of activations. Each image is computed alone: its features depend on no other image of the batch."""
        weights = self.whitening @ self.centroids.T
        lengths = (self.centroids**2).sum(1)
        if torch.compiler.is_compiling():  # an exported program takes any number of images
            active = self._active(self._patches(x), weights, lengths).view(x.shape[0], -1, self.centroids.shape[0])
            sums: Tensor = (self.cells @ active).flatten(1)
            return sums
        if not len(x):
            return x.new_zeros(0, self.classifier.in_features)
        rows = []
        for some in torch.split(x, _TOGETHER):
            for patches in torch.split(self._patches(some), self.cells.shape[1]):
                own = patches.clone()  # in memory of its own, since matrix products may look at the alignment
                rows.append((self.cells @ self._active(own, weights, lengths)).flatten())
        return torch.stack(rows)

    def _patches(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n*places values"]:
        """The normalised and centred patches of all images; the bits of an image's do not depend on the others."""
        columns = unfold(x, self.side, stride=self.stride)
        return _normalised(columns.transpose(1, 2).flatten(0, 1).contiguous()) - self.centre

    def _active(
        self, patches: Float[Tensor, "m values"], weights: Tensor, lengths: Tensor
    ) -> Float[Tensor, "m centroids"]:
        """The activations of patches."""
        own = (patches @ self.whitening).square().sum(1, keepdim=True)
        distances = torch.addmm(lengths, patches, weights, alpha=-2).add_(own).clamp_min_(0).sqrt_()
        return (distances.mean(1, keepdim=True) - distances).clamp_min_(0)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _normalised(patches: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
    """Patches of mean 0 and variance about 1."""
    centred = patches - patches.mean(1, keepdim=True)
    return centred * (centred.square().mean(1, keepdim=True) + _CONTRAST).rsqrt()


def _grid(rows: int, columns: int, cells: int) -> Float[Tensor, "cells^2 places"]:
    """One row a cell: 1 for the places in it, row by row, else 0."""
    y, x = (torch.arange(n) * cells // n for n in (rows, columns))
    places = (y[:, None] * cells + x).flatten()
    return (places == torch.arange(cells**2)[:, None]).float()


def _means(rows: Float[Tensor, "m p"], count: int, seed: int) -> Float[Tensor, "k p"]:
    """The centroids of ``count`` clusters of the rows by Lloyd's algorithm, from random rows as a start.

    It has one thread, since several would add up in an order of their own.
    """
    from sklearn.cluster import KMeans  # imported here because it is slow to load
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    kmeans = KMeans(count, init="random", n_init=1, max_iter=_PASSES, random_state=seed % 2**32)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different patches than centroids
        return torch.from_numpy(kmeans.fit(rows.numpy()).cluster_centers_)
