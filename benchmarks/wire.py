"""Encode and decode a model's state of 100 MB, checks included: GB/s, and the ratio to `torch.save`/`torch.load`.

python benchmarks/wire.py
"""

import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fedstill import schema
from fedstill.base.processes import keep_memory
from fedstill.protocol import wire

BYTES = 100 * 10**6
FIELDS = schema.schema_of({"weights": schema.State})


def timed(work: Callable[[], Any], repeats: int = 15) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    keep_memory()
    state = {f"layer{i}.weight": torch.randn(BYTES // 4 // 20) for i in range(20)}
    facts = schema.Facts(templates={"state": schema.template(state)})

    def ours() -> None:
        values, _ = wire.decode(wire.encode({"weights": state}, FIELDS, facts, {"step": "x"}), FIELDS, facts)
        assert values["weights"].keys() == state.keys()

    def torchs() -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)

    mine, theirs = timed(ours), timed(torchs)
    print(f"encode + decode of {BYTES / 1e6:.0f} MB with all checks: {mine:.3f} s, {BYTES / mine / 1e9:.2f} GB/s")
    print(f"torch.save + torch.load, no checks:                {theirs:.3f} s, {BYTES / theirs / 1e9:.2f} GB/s")
    print(f"ratio {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
