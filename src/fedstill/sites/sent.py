"""Copies of what a site sent, so that its operator can see it again.

Releases are stored with the run's state anyway, since a repeated question gets the same reply. Other replies are copied
to ``state/sent`` for the policy's number of days.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedstill import files, schema, wire
from fedstill.sites.policy import SitePolicy

_DAY, _GB = 86_400.0, 10**9
_FIRST = 6
"""Number of values of a tensor in words."""


class Sent(NamedTuple):
    """A reply: its tensors by field, and its other values."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]


def keep(policy: SitePolicy, run: str, request: bytes, reply: bytes) -> None:
    """Copy a reply, unless the run's state has it, and delete copies that are too old or too many."""
    folder = policy.state / "sent"
    if policy.keep_sent_days and len(reply) <= policy.keep_sent_gb * _GB:
        digest = hashlib.sha256(reply).hexdigest()
        if not any(_released(policy.state / "runs" / run, hashlib.sha256(request).hexdigest())):
            files.write_bytes(folder / f"{digest}.reply", reply)
    room = policy.keep_sent_gb * _GB
    oldest = time.time() - policy.keep_sent_days * _DAY
    copies = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in folder.glob("*.reply")), reverse=True)
    for written, size, place in copies:
        room -= size
        if written < oldest or room < 0:
            place.unlink(missing_ok=True)


def read(state: Path, line: Mapping[str, Any]) -> Sent:
    """The reply that a line ``answered`` of the log tells of.

    Raises:
        ValueError: the line tells of no reply, or its copy was deleted or changed; one sentence.
    """
    if line.get("what") != "answered" or "reply" not in line:
        raise ValueError(f"entry {line.get('n')} is '{line.get('what')}': no field of a reply left the site then")
    places = [state / "sent" / f"{line['reply']}.reply"]
    for place in places:
        if place.exists() and hashlib.sha256(data := place.read_bytes()).hexdigest() == line["reply"]:
            return Sent(*wire.unpack(data))
    for place in _released(state / "runs" / str(line["run"]), str(line["request"])):
        data = bytes(files.read_checked(place, "the copy can't be shown"))
        if hashlib.sha256(data).hexdigest() == line["reply"]:
            return Sent(*wire.unpack(data))
    raise ValueError(
        f"the site has no copy of reply {line['reply'][:16]} of entry {line.get('n')} any more; the policy keeps "
        "unprotected replies for a number of days (keep_sent_days, keep_sent_gb)"
    )


def _released(run: Path, request: str) -> list[Path]:
    return sorted(run.glob(f"*/*-{request[:16]}.given"))


def described(reply: Sent) -> dict[str, Any]:
    """A reply in words: the type, the shape and some values of each tensor, and the other values."""
    found = {}
    for name, value in reply.tensors.items():
        wide = value.reshape(-1).to(torch.float64)
        span = f"{float(wide.min()):.6g} to {float(wide.max()):.6g}, mean {float(wide.mean()):.6g}" if len(wide) else ""
        first = ", ".join(f"{number:.6g}" for number in wide[:_FIRST].tolist())
        words = first if len(wide) <= _FIRST else f"{span}: {first}, ..."
        shape = " x ".join(map(str, value.shape)) or "1"
        found[name] = {"type": str(value.dtype).removeprefix("torch."), "shape": shape, "values": words}
    for name, value in reply.header.get("fields", {}).items():
        found[name] = {"type": type(value).__name__, "shape": "", "values": schema.short(value)}
    return {"values": found, "header": {name: value for name, value in reply.header.items() if name != "fields"}}


def write(reply: Sent, folder: Path) -> list[Path]:
    """Write each tensor as ``NAME.npy``, and images ``(n, c, h, w)`` with 1 or 3 channels as ``NAME.png`` too."""
    folder.mkdir(parents=True, exist_ok=True)
    places = []
    for name, value in reply.tensors.items():
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        places.append(folder / f"{plain}.npy")
        array = value.to(torch.float32) if value.dtype == torch.bfloat16 else value
        np.save(places[-1], array.numpy(), allow_pickle=False)
        if value.ndim == 4 and value.shape[1] in (1, 3) and len(value):
            places.append(folder / f"{plain}.png")
            _sheet(value).save(places[-1])
    return places


def _sheet(images: Tensor) -> Image.Image:
    """Images ``(n, c, h, w)`` in rows, from the smallest value (black) to the largest (white)."""
    many, channels, height, width = images.shape
    across = math.ceil(math.sqrt(many))
    low, high = float(images.min()), float(images.max())
    grey = (images.to(torch.float64) - low) * (255 / max(high - low, 1e-12))
    sheet = torch.zeros(-(-many // across) * across, channels, height, width, dtype=torch.uint8)
    sheet[:many] = grey.round().to(torch.uint8)
    rows = sheet.reshape(-1, across, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = rows.reshape(-1, across * width, channels).numpy()
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
