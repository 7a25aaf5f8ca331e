"""The files of sample images in a run's folder."""

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill import files, locks

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images, uint8 ``(n, c, h, w)``, and labels, int64 ``(n,)``."""


def read(file: Path, damaged: Callable[[Path, object], files.Damaged]) -> Images:
    """The images and labels of a file; raises the error that ``damaged`` makes of the file and the problem."""
    try:
        # a pickle in a copied folder would run its author's code
        with locks.LITERALS, file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            if sum(part.file_size for part in arrays.zip.infolist()) > 1 << 28:  # a few kilobytes can be gigabytes
                raise ValueError("it unpacks to more than 256 MiB")
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(file, error) from error
    if images.dtype != np.uint8 or images.ndim != 4:
        raise damaged(file, "images must be uint8 of shape (n, c, h, w)")
    if images.shape[1] not in (1, 3) or not min(images.shape[2:]):
        raise damaged(file, "images must have 1 or 3 channels")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or (labels.astype(np.int64) >> 31).any():
        raise damaged(file, "every image needs one label, a whole number of 0 or more")
    return images, labels.astype(np.int64)
