"""STL-10's unlabelled images as an .npz file for ``--public``, at 32 x 32 pixels.

The archive ``stl10_binary.tar.gz`` (2.6 GB) is at https://ai.stanford.edu/~acoates/stl10/; unpacked, its file
``unlabeled_X.bin`` has 100,000 images of 3 x 96 x 96 bytes, each channel column by column. A test makes a small one.

Usage: python reproduce/fedauxfdp/stl10.py stl10_binary/unlabeled_X.bin stl10.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

IMAGE = (3, 96, 96)


def main(source: Path, target: Path) -> None:
    """Convert a file, a thousand images at a time."""
    size, rest = divmod(source.stat().st_size, int(np.prod(IMAGE)))
    if rest or not size:
        sys.exit(f"{source} is no file of images of 3 x 96 x 96 bytes: its size is {source.stat().st_size:,} bytes")
    columns = np.memmap(source, np.uint8, "r", shape=(size, *IMAGE))
    images = np.empty((size, 32, 32, 3), np.uint8)
    for start in range(0, size, 1000):
        rows = torch.from_numpy(columns[start : start + 1000].swapaxes(2, 3).astype(np.float32))
        small = interpolate(rows, size=(32, 32), mode="bilinear", antialias=True).round().clamp(0, 255)
        images[start : start + 1000] = small.permute(0, 2, 3, 1).numpy()
    np.savez(target, x_train=images, y_train=np.zeros(size, np.int64))
    print(f"{target}: {size:,} images of 32 x 32 pixels")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
