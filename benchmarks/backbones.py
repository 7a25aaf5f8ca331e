"""Images per core second of the backbones that pip installs, beside their publishers' networks in plain torch.

Plain torch is the publisher's network in eval mode, in torch's usual order of memory and with the channels last, for
several sizes of batches; it gets normalised inputs. fedstill's vectors begin with images of 8 bits; each vector is
independent of the other records. One thread; processor seconds, the best of some repeats.

Usage: python benchmarks/backbones.py            # --side, --images, --repeats

needs torchvision and efficientnet-lite-pytorch (pip install --no-deps, torchvision of this torch's version) for the
comparison; without them only fedstill's numbers are printed.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import record
import torch

from fedstill.base import processes, weights
from fedstill.data.features import rows_of
from fedstill.models import backbones, mobile

SIZES = (1, 4, 8, 16, 32, 64)


def publishers(name: str) -> torch.nn.Module | None:
    """The publisher's network with its weights, if its code can be imported."""
    try:
        if name == "mobilenet-v2":
            from torchvision.models import mobilenet_v2

            net = mobilenet_v2()
        else:
            from efficientnet_lite_pytorch import EfficientNet

            net = EfficientNet.from_name(name)
    except Exception as error:  # torchvision for another torch raises a RuntimeError
        print(f"{name}: no comparison, as the publisher's code can't be imported ({error})")
        return None
    file = mobile._place(mobile.PUBLISHED[name])
    assert file is not None, "the backbone was loaded from it"
    net.load_state_dict(weights.read(file))
    return net.eval()


def speed(work: Callable[[], Any], images: int, repeats: int) -> float:
    """Images per processor second in the best of ``repeats``, after one that does not count."""
    best = 0.0
    for i in range(repeats + 1):
        began = time.process_time()
        work()
        best = max(best, images / (time.process_time() - began)) if i else 0.0
    return best


def measure(name: str, side: int, images: int, repeats: int) -> dict[str, Any]:
    """Speeds of one backbone on random images of ``side`` pixels."""
    pixels = torch.randint(256, (images, 3, side, side), dtype=torch.uint8)
    backbone = backbones.load(name, (3, side, side))
    row: dict[str, Any] = {"name": name, "side": side}
    row["fedstill, images to vectors"] = speed(lambda: rows_of(backbone, pixels), images, repeats)
    x = torch.cat([backbone.image_input(image) for image in pixels[: max(SIZES)]])
    row["fedstill, network"] = speed(lambda: backbone.net(x[: mobile.BATCH]), mobile.BATCH, 4 * repeats)
    if (net := publishers(name)) is None:
        return row
    for order, memory in (("plain torch", torch.contiguous_format), ("channels last", torch.channels_last)):
        net = net.to(memory_format=memory)
        for size in SIZES:
            work = partial(net, x[:size].contiguous(memory_format=memory))
            row[f"{order}, {size}"] = speed(work, size, 4 * repeats)
    row["ratio to plain torch"] = row["fedstill, network"] / max(row[f"plain torch, {size}"] for size in SIZES)
    row["largest difference"] = float((backbone.net(x) - features(net, x)).abs().max())
    return row


def features(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The publisher's features."""
    return (net.extract_features(x) if hasattr(net, "extract_features") else net.features(x)).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="JSON file of the results")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processes.keep_memory()  # as in a run
    with torch.no_grad():
        table = [measure(name, flags.side, flags.images, flags.repeats) for name in mobile.PUBLISHED]
    for row in table:
        print(
            "\n".join(
                f"{key:28} {value:.4g}" if isinstance(value, float) else f"{key:28} {value}"
                for key, value in row.items()
            )
        )
    if flags.out:
        record.keep(flags.out, table)


if __name__ == "__main__":
    main()
