"""Seconds and bytes of masked sums, beside open sums and the arithmetic of Flower's SecAgg+.

    python benchmarks/sum_costs.py          # five minutes of one core, about 3 GB

For N clients and d numbers: a client's noise and masks, one helper, and what the server does with N uploads. Clients
and helpers are timed on up to 20 uploads and multiplied, as their work is one upload after the other; the server adds
all N. SecAgg+ is run by Flower's own functions (`pseudo_rand_gen`, `combine_shares`), without its messages: a client's
private mask and one mask for each of its neighbours (100, or all), and the server's unmasking where nobody, or 30 %,
has gone: one mask for each client that is there and one for each neighbour of those that are not.
``results/sum_costs.json``.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedstill.base.seeds import Entropy
from fedstill.privacy.lattice import discrete_gaussian
from fedstill.sums.helpers import Helper
from fedstill.sums.masks import Terms, mask, unpacked

RESULTS = Path(__file__).parent / "results/sum_costs.json"
SAMPLE = 20
WIDTH = 5


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    before = time.perf_counter()
    found = work()
    return time.perf_counter() - before, found


def ours(clients: int, length: int) -> dict[str, float]:
    """A client, one helper and the server of a masked sum."""
    few = min(clients, SAMPLE if length > 10**4 else clients)
    keys = [Ed25519PrivateKey.generate() for _ in range(few)]
    numbers = np.random.default_rng(0).integers(-(10**6), 10**6, length)
    with TemporaryDirectory() as folder:
        public = [key.public_key().public_bytes_raw() for key in keys]
        helpers = [Helper(Path(folder) / str(i), i, lambda client: public[client]) for i in range(4)]
        boxes, signers = tuple(h.keys.box for h in helpers), tuple(h.keys.signer for h in helpers)
        terms = Terms(bytes(32), 0, boxes, signers, 1, 2, length, WIDTH)

        def client(number: int) -> Any:
            noise = discrete_gaussian((length,), 1e8, Entropy()).numpy()
            return mask(numbers + noise, terms, number, keys[number].sign)

        made, uploads = timed(lambda: [client(number) for number in range(few)])
        sealed = [upload for _, upload in uploads]
        checked, signatures = timed(lambda: {h.number: h.agree(terms, sealed) for h in helpers})
        opened, _ = timed(lambda: helpers[0].open(terms, sealed, signatures))
    total = np.zeros(length, np.uint64)

    def add() -> None:
        for i in range(clients):
            np.add(total, unpacked(uploads[i % few][0], WIDTH), out=total)

    server, _ = timed(add)
    upload = len(uploads[0][0]) + 32 + sum(map(len, sealed[0].boxes)) + 64
    return {
        "client_seconds": made / few,
        "helper_seconds": (checked / 4 + opened) / few * clients,
        "server_seconds": server,
        "client_bytes": upload,
        "helper_bytes_out": 3 * length * WIDTH,
    }


def opened(clients: int, length: int) -> dict[str, float]:
    """A client's noise, and the server's addition of float32 uploads."""
    some = [np.random.default_rng(i).normal(size=length).astype(np.float32) for i in range(min(clients, SAMPLE))]
    noise, _ = timed(lambda: Entropy().gaussian((length,)))
    total = np.zeros(length)

    def add() -> None:
        for i in range(clients):
            np.add(total, some[i % len(some)], out=total)

    server, _ = timed(add)
    return {"client_seconds": noise, "server_seconds": server, "client_bytes": 4 * length}


def secagg(clients: int, length: int) -> dict[str, float]:
    """Masks of SecAgg+ by Flower's functions, each timed on one and multiplied."""
    neighbours = min(100, clients - 1)
    one, _ = timed(lambda: pseudo_rand_gen(bytes(32), 1 << 32, [(length,)]))
    threshold = max(2, 2 * (neighbours + 1) // 3)
    shares = create_shares(bytes(range(32)), threshold, neighbours + 1)
    combined, _ = timed(lambda: combine_shares(shares[:threshold]))
    gone = round(0.3 * clients)
    return {
        "client_seconds": one * (1 + neighbours),
        "server_seconds": clients * (one + combined),
        "server_seconds_30_percent_gone": clients * combined + one * (clients - gone + gone * neighbours),
        "client_bytes": 4 * length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--numbers", nargs="+", type=int, default=[10**4, 10**6, 10**7])
    chosen = parser.parse_args()
    rows = []
    for length in chosen.numbers:
        for clients in chosen.clients:
            row = {"clients": clients, "numbers": length}
            for name, measure in (("masked", ours), ("open", opened), ("secagg_plus", secagg)):
                row[name] = {key: float(f"{value:.3g}") for key, value in measure(clients, length).items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    facts = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "command": "python benchmarks/sum_costs.py",
    }
    RESULTS.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
