"""Cost of the sums of AFL, FedCGS and GH-OFL: a client's against one BLAS syrk on the same rows, and the server's.

CPU seconds throughout, so that other processes count little. The server decodes one encoded reply again and again, as
it reads replies from its journal.

Usage: python benchmarks/moment_sums.py              # without the server: --clients
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
import torch
from moments import summed
from scipy.linalg.blas import dsyrk
from typing_extensions import override

from fedstill import schema
from fedstill.base.processes import keep_memory
from fedstill.base.seeds import Simulated, stream
from fedstill.methods.afl import AFL
from fedstill.methods.parts.feature_sums import add_up
from fedstill.methods.parts.moments import Sums
from fedstill.privacy.logistic import extend
from fedstill.privacy.second_moments import SecondMoments, entries
from fedstill.protocol import Released, wire

CLASSES = 10


def client(records: int, dims: int, repeats: int) -> dict[str, Any]:
    """The mechanism on features in batches of 2,000, and syrk on all rows at once, in turns; the ratio of the minima.

    Other processes make a turn slower, never faster, and memory is kept as in a client's process.
    """
    rng = stream(0, "rows")
    features, labels = torch.randn(records, dims, generator=rng), torch.randint(CLASSES, (records,), generator=rng)
    mechanism = SecondMoments(num_classes=CLASSES, dims=dims, radius=1.0, noise_multiplier=0.0)
    rows = extend(features, 1.0, 0.1).numpy()
    ours, bare = [], []
    for _ in range(max(repeats, 60 * 512**2 // dims**2) + 1):
        began = time.process_time()
        mechanism(zip(features.split(2000), labels.split(2000), strict=True), Simulated(rng))
        ours.append(time.process_time() - began)
        began = time.process_time()
        dsyrk(1.0, rows.T)
        bare.append(time.process_time() - began)
    ours, bare = ours[1:], bare[1:]  # the first loads libraries
    ratio = min(ours) / min(bare)
    return {"records": records, "dims": dims, "ours": ours, "syrk": bare, "ratio": ratio}


class Repeated(Sequence[Sums]):
    """One reply of a file, as often as there are clients; read and decoded each time."""

    def __init__(self, file: Path, clients: int) -> None:
        self._file, self._clients = file, clients
        self._facts = schema.Facts({"classes": CLASSES})

    def __len__(self) -> int:
        return self._clients

    @override
    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._clients:
            raise IndexError(index)
        values, _ = wire.decode(self._file.read_bytes(), AFL.sum_up.reply.schema, self._facts)
        return Sums.from_payload(values)


def server(clients: int, dims: int, epsilon: float | None) -> dict[str, Any]:
    """Adding up the replies and solving for the head."""
    rng, width = stream(0, "reply"), dims + 1
    second, first = torch.zeros(1, entries(width)), torch.rand(CLASSES, width, generator=rng)
    where = torch.arange(width)
    second[0, where * width - where * (where - 1) // 2] = torch.rand(width, generator=rng) + 1  # the diagonal
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reply"
        values = Sums(second=Released(second), first=Released(first)).payload()
        file.write_bytes(wire.encode(values, AFL.sum_up.reply.schema, schema.Facts({"classes": CLASSES}), {}))
        size = file.stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        method = AFL(epsilon=epsilon)
        began = time.process_time()
        total = add_up(summed(Repeated(file, clients)), method, 1e-5, torch.device("cpu"))
        added = time.process_time() - began
        method.head(total)
        seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"clients": clients, "dims": dims, "epsilon": epsilon, "reply_bytes": size, "adding": added}
    return {**facts, "solving": seconds - added, "peak_mb": peak / 1024, "before_mb": before / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, default=4096)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 1000])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "moment_sums.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    servers = [server(clients, args.dims, None) for clients in args.clients]
    servers += [server(count, args.dims, 1.0) for count in args.clients[:1]]
    clients = [client(records, dims, args.repeats) for records, dims in ((20_000, 512), (10_000, 2048))]
    for row in (*servers, *clients):
        print({key: value for key, value in row.items() if key not in ("ours", "syrk")})
    record.keep(args.out, [*servers, *clients])


if __name__ == "__main__":
    main()
