"""Flower's SecAgg+ as its own workflow runs it, beside fedstill's masked sum of the same numbers, in one process.

    python benchmarks/secagg_workflow.py --clients 10 100 --numbers 10000 1000000

`SecAggPlusWorkflow` at the server and `secaggplus_mod` at each client, with Flower's defaults (22 bits of a number,
sums modulo 2^32; all clients share with all, 101 of them at most, two thirds open), exchange their four messages by
calls in place of sockets. Seconds of the server are those in which no client works; bytes are those of the messages'
content. The mean that comes out is compared with that of the clients' numbers. fedstill's figures are those of
`sum_costs.ours`, measured in the same run. ``results/secagg_workflow.json``.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import record
import sum_costs
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.supercore.task_identity import TaskIdentity

RESULTS = Path(__file__).parent / "results/secagg_workflow.json"
_SHARES = 101


def _bytes(value: Any) -> int:
    """Bytes of the keys, ciphertexts, shares and numbers in a message's content; numbers of 8 bytes."""
    if isinstance(value, RecordDict):
        arrays = sum(record.count_bytes() for record in value.array_records.values())
        return arrays + sum(_bytes([*record.values()]) for record in value.config_records.values())
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 8


class Clients:
    """All clients, as the workflow's way to them: their contexts, and the seconds and bytes of their messages."""

    def __init__(self, vectors: list[np.ndarray]) -> None:
        self._vectors = dict(enumerate(vectors, 1))
        empty = {"node_config": {}, "run_config": {}}
        self._contexts = {node: Context(run_id=1, node_id=node, state=RecordDict(), **empty) for node in self._vectors}
        self.seconds, self.bytes, self.messages = 0.0, 0, 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The replies of the clients to one round of messages."""
        del timeout
        began, replies = time.perf_counter(), []
        for message in messages:
            message.metadata.__dict__ |= {"_message_id": f"{self.messages}"}
            message.content = deepcopy(message.content)  # as the wire does: clients change what they read
            node, self.messages = message.metadata.dst_node_id, self.messages + 1
            replies.append(secaggplus_mod(message, self._contexts[node], self._fit))
            self.bytes += _bytes(replies[-1].content)
        self.seconds += time.perf_counter() - began
        return replies

    def _fit(self, message: Message, context: Context) -> Message:
        numbers = ndarrays_to_parameters([self._vectors[context.node_id]])
        result = FitRes(Status(Code.OK, ""), numbers, 1, {})
        return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)


def workflow(clients: int, length: int) -> dict[str, float]:
    """One sum of SecAgg+: seconds of the server and of a client, bytes of a client's four replies, and the error."""
    vectors = [np.random.default_rng(i).uniform(-1, 1, length).astype(np.float32) for i in range(clients)]
    grid, out = Clients(vectors), list[np.ndarray]()

    def aggregate(_: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        assert not failures and len(results) == clients
        out.extend(parameters_to_ndarrays(results[0][1].parameters))
        return None, {}

    nothing = ndarrays_to_parameters([])
    nodes = [(SimpleNamespace(node_id=node), FitIns(nothing, {})) for node in range(1, clients + 1)]
    strategy = SimpleNamespace(configure_fit=lambda *_: nodes, aggregate_fit=aggregate)
    manager = SimpleNamespace(num_available=lambda: clients)
    state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({"current_round": 1})})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(nothing, keep_input=False)
    own = Context(run_id=1, node_id=0, node_config={}, state=state, run_config={})
    context = LegacyContext(own, strategy=cast(Any, strategy), client_manager=cast(Any, manager))
    shares = 1.0 if clients <= _SHARES else _SHARES
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    run = cast(Callable[..., None], SecAggPlusWorkflow(shares, 2 / 3, max_weight=1.0))
    seconds, _ = sum_costs.timed(lambda: run(grid, context))
    return {
        "server_seconds": seconds - grid.seconds,
        "client_seconds": grid.seconds / clients,
        "client_bytes": grid.bytes / clients,
        "messages": grid.messages / clients,
        "largest_error": float(np.abs(out[0] - np.mean(vectors, axis=0)).max()),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/sums.md: seconds of the server, a client and a helper, and bytes of a client."""
    lines = []
    for row in rows:
        theirs, ours = row["secagg_plus"], row["masked"]
        cells = [f"{row['clients']} clients", f"10^{len(str(row['numbers'])) - 1}"]
        for kind in ("server", "client"):
            cells += [f"{theirs[f'{kind}_seconds']:.3g} s", f"{ours[f'{kind}_seconds']:.2g} s"]
        cells += [
            f"{ours['helper_seconds']:.2g} s",
            *(f"{one['client_bytes'] / 1e3:,.0f} kB" for one in (theirs, ours)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100])
    parser.add_argument("--numbers", nargs="+", type=int, default=[10**4, 10**6])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    rows = []
    for length in chosen.numbers:
        for clients in chosen.clients:
            row: dict[str, Any] = {"clients": clients, "numbers": length}
            for name, measure in (("masked", sum_costs.ours), ("secagg_plus", workflow)):
                row[name] = {key: float(f"{value:.3g}") for key, value in measure(clients, length).items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    record.keep(chosen.out, rows)


if __name__ == "__main__":
    main()
