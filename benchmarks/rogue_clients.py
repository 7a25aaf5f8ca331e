"""What one rogue client of four can do to the model, against the same run without it; the server is the deployment's.

FedAvg of two rounds on digits. The nodes answer through the code of a deployment's client app and of a site, the server
through `SiteTransport` with a roster and a limit of records, `ServerFederation` and the journal; only Flower's network
is a list of messages in this process. ``without``: the weights are to the bit those of the run in which client 2 gives
no reply. ``whole``: those of the run in which client 2 is honest. ``other``: neither; the attack has an effect.

Usage: python benchmarks/rogue_clients.py
"""

import collections
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import record
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from garbage import KINDS
from small import federation, site, spec_of, weights

from fedstill.data import sources
from fedstill.engines.flower import apps
from fedstill.engines.flower.messages import content, take_bytes
from fedstill.engines.server import ServerFederation
from fedstill.evaluation import evaluate
from fedstill.methods.fedavg import FedAvg
from fedstill.protocol import wire
from fedstill.sites.server.serve import LimitedRecords
from fedstill.train.sgd import SGD

CLIENTS, ROGUE, STRANGER = 4, 2, 9
NODES = {client: 100 + client for client in range(CLIENTS)}
MOST = 400
"""Largest number of records that the roster allows a client; each has 359 or 360."""
TIMEOUT = 5.0
Change = Callable[[bytes], bytes | None]
"""A rogue's reply, given the honest one; None for no reply."""


class Network:
    """Flower's grid in one process; ``behaves`` changes the answers of the rogue's node.

    Args:
        answer: reply of a client to a request.
        change: changes the rogue's reply.
        claims: client number that the rogue's node claims; others claim their own.
        stranger: whether a node outside of the roster claims to be the rogue's client, before the client does.
        twice: whether the rogue's node sends a second reply, of twice the weights.
        after: seconds after which the rogue's replies arrive.
    """

    def __init__(
        self,
        answer: Callable[[int, bytes], bytes],
        change: Change = lambda reply: reply,
        *,
        claims: int = ROGUE,
        stranger: bool = False,
        twice: bool = False,
        after: float = 0.0,
    ) -> None:
        self._answer, self._change, self._claims, self._twice = answer, change, claims, twice
        self._nodes = ([STRANGER] if stranger else []) + [NODES[ROGUE]] + list(NODES.values())
        self._after, self._pushed = after, dict[str, float]()
        self._replies = dict[str, list[Message]]()
        self._number = 0
        self.own = 0.0  # seconds of CPU to make bombs

    def get_node_ids(self) -> list[int]:
        """As Flower's grid."""
        return list(dict.fromkeys(self._nodes))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """As Flower's grid."""
        names = []
        for message in messages:
            self._number += 1
            message.metadata.__dict__["_message_id"] = name = str(self._number)
            names.append(name)
            self._replies[name] = list(self._node(message))
            late = message.metadata.dst_node_id == NODES[ROGUE] and message.metadata.message_type.endswith(apps.ASK)
            self._pushed[name] = time.monotonic() + self._after * late
        return names

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
        """As Flower's grid."""
        for name in [name for name in ids if time.monotonic() >= self._pushed[name]]:
            for reply in self._replies.pop(name, []):
                reply.metadata.__dict__["_message_id"] = f"r{name}"
                yield reply

    def _node(self, message: Message) -> Iterator[Message]:
        node = message.metadata.dst_node_id
        rogue = node in (NODES[ROGUE], STRANGER)
        number = self._claims if rogue else node - 100
        app = apps.client_app(lambda *_: number, lambda own, run, client, spec, request: self._answer(client, request))
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        reply = app(message=message, context=context)
        asked = message.metadata.message_type == f"query.{apps.ASK}"
        if not (rogue and asked):
            yield reply
            return
        began = time.process_time()
        spoilt = self._change(take_bytes(reply))
        self.own += time.process_time() - began
        if spoilt is None:
            return
        yield Message(content(spoilt), reply_to=message)
        if self._twice:
            yield Message(content(longer(2.0)(spoilt)), reply_to=message)


def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Change:
    """A change of a reply's tensors and header."""

    def apply(reply: bytes) -> bytes:
        tensors, header = wire.unpack(reply)
        change(tensors, header)
        return wire.pack(tensors, header)

    return apply


def longer(factor: float) -> Change:
    """Weights times a factor."""

    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if value.is_floating_point():
                tensors[name] = value * factor

    return changed(change)


def claims(number: int) -> Change:
    return changed(lambda tensors, header: header["fields"].update(num_records=number))


def filled(value: float) -> Change:
    return changed(lambda tensors, header: next(iter(tensors.values())).fill_(value))


def many_tensors(reply: bytes) -> bytes:
    return changed(lambda tensors, _: tensors.update({f"weights/{i}": torch.zeros(0) for i in range(50_000)}))(reply)


def fits(kind: Change, reply: bytes) -> bool:
    """Whether a reply has what this kind of garbage spoils."""
    try:
        return kind(reply) != reply
    except (KeyError, ValueError, StopIteration):
        return False


ATTACKS: dict[str, dict[str, Any]] = {
    "impersonation: a key outside of the roster claims to be client 2 first": {"stranger": True},
    "impersonation: client 2's key claims to be client 1": {"claims": 1},
    "impersonation: client 2's key claims to be client 7": {"claims": 7},
    "double vote: two replies to one request": {"twice": True},
    "double vote: the reply of client 1 again": {"copies": 1},
    "weights: claims 2^63 - 1 records": {"change": claims(2**63 - 1)},
    "weights: claims 2^40 records": {"change": claims(2**40)},
    f"weights: claims {MOST + 1} records": {"change": claims(MOST + 1)},
    f"weights: claims {MOST} records, the limit": {"change": claims(MOST)},
    "weights: claims -1 records": {"change": claims(-1)},
    "poison: NaN": {"change": filled(float("nan"))},
    "poison: infinity": {"change": filled(float("inf"))},
    "poison: weights times 1e30": {"change": longer(1e30)},
    "poison: weights times 1e5": {"change": longer(1e5)},
    "poison: weights times 100, below the limit": {"change": longer(100.0)},
    "poison: weights times -1": {"change": longer(-1.0)},
    "bomb: 600 MB": {"change": lambda reply: bytes(600 * 10**6)},
    "bomb: 50,000 tensors": {"change": many_tensors},
    "late: no reply": {"change": lambda reply: None},
    "slow: 1 s, within the time": {"after": 1.0},
    f"slow: {TIMEOUT + 1:g} s, after the time": {"after": TIMEOUT + 1},
}


def one(data: sources.DataSet, folder: Path, **attack: Any) -> tuple[bytes, float, list[str], float]:
    """Weights, accuracy, reasons of refusal and seconds of CPU of a run."""
    method = FedAvg(rounds=2, local=SGD(lr=0.05, batch_size=64))
    spec = spec_of(method, data.train)
    sites = site(method, data.train, folder, CLIENTS)()
    if (other := attack.pop("copies", None)) is not None:
        last: dict[str, bytes] = {}

        def answer(client: int, request: bytes) -> bytes:
            last["reply"] = sites.answer(other if client == ROGUE else client, request)
            return last["reply"]

    else:
        answer = sites.answer
    network: Any = Network(answer, **attack)
    transport = apps.SiteTransport(network, spec.text(), CLIENTS, wait=0.3, timeout=TIMEOUT, nodes=NODES)
    limited = LimitedRecords(transport, dict.fromkeys(range(CLIENTS), MOST))
    fed: ServerFederation = federation(method, limited, data, folder / "run", spec=spec, min_clients=3)
    began = time.process_time()
    model = method.server(fed)
    told = [refusal.reason for refusal in fed.journal.refusals() if refusal.client == ROGUE]
    return weights(model), evaluate(model, data.test), told, time.process_time() - began - network.own


def main() -> None:
    torch.set_num_threads(1)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    data = sources.load("digits")
    table = []
    with tempfile.TemporaryDirectory() as place:
        honest = list[bytes]()
        whole, accuracy, _, _ = one(data, Path(place) / "whole", change=lambda reply: honest.append(reply) or reply)
        spoilt = {name: kind for name, kind in KINDS.items() if fits(kind, honest[0])}
        attacks = ATTACKS | {f"garbage: {name}": {"change": kind} for name, kind in spoilt.items()}
        without, accuracy_without, _, _ = one(data, Path(place) / "without", change=lambda reply: None)
        assert whole != without
        print(f"whole: accuracy {accuracy:.4f}; without client {ROGUE}: {accuracy_without:.4f}")
        for number, (name, attack) in enumerate(attacks.items()):
            found, now, told, seconds = one(data, Path(place) / str(number), **attack)
            effect = {whole: "whole", without: "without"}.get(found, "other")
            table.append({"attack": name, "weights": effect, "accuracy": now, "cpu_seconds": seconds, "told": told[:1]})
            print(f"{name:75} {effect:8} {now:.4f} {seconds:5.1f} s  {told[:1]}", flush=True)
    counts = collections.Counter(row["weights"] for row in table)
    print(f"{len(table)} attacks: {dict(counts)}")
    facts = {"accuracy_whole": accuracy, "accuracy_without": accuracy_without, "counts": counts}
    record.keep(Path(__file__).parent / "results" / "rogue-clients.json", table, **facts)


if __name__ == "__main__":
    main()
