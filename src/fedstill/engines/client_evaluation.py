"""Evaluation by the clients, in runs whose clients have test records of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Int64
from torch import Tensor

from fedstill.evaluate import confusion
from fedstill.protocol import Client, Method, Reply, Shared, Step, client_steps
from fedstill.schema import Below


class Judged(Reply):
    """Numbers of a client's test records by true (rows) and predicted class."""

    confusion: Annotated[Int64[Tensor, "classes classes"], Below(2**40)]


def judge(self: Method, client: Client, shared: Shared) -> Judged:
    """Evaluate the client's model on its own test records."""
    model = self.personal_model(client, shared)
    return Judged(confusion=confusion(model, client.test, client.test.num_classes).cpu())


JUDGE = Step(judge)


def steps_of(method: Method) -> dict[str, Step[Any]]:
    """The method's steps, and the evaluation step that engines add."""
    own = client_steps(type(method))
    assert JUDGE.name not in own, f"{type(method).__name__} has a step '{JUDGE.name}', which is the engines' own"
    return {**own, JUDGE.name: JUDGE}


@dataclass(frozen=True)
class Judgement:
    """The result of an evaluation.

    Attributes:
        confusion: numbers of test records by true and predicted class, int64 ``(C, C)``; the sum over clients.
        clients: accuracy in [0, 1] of each client that has test records; None for the server's test records.
    """

    confusion: Int64[Tensor, "classes classes"]
    clients: Mapping[int, float] | None = None

    @classmethod
    def of_clients(cls, tables: Mapping[int, Int64[Tensor, "classes classes"]], num_classes: int) -> "Judgement":
        """The result from the clients' tables."""
        total = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        for table in tables.values():
            total += table
        return cls(total, {client: _share(table) for client, table in tables.items() if int(table.sum())})

    def described(self) -> dict[str, Any]:
        """As JSON, for `read`."""
        return {"confusion": self.confusion.tolist(), "clients": self.clients}

    @classmethod
    def read(cls, json: Mapping[str, Any]) -> "Judgement":
        """The inverse of `described`."""
        clients = None if json["clients"] is None else {int(c): float(share) for c, share in json["clients"].items()}
        return cls(torch.tensor(json["confusion"], dtype=torch.int64), clients)

    @property
    def accuracy(self) -> float:
        """Accuracy in [0, 1] on the server's records, or the mean over clients of theirs.

        Raises:
            ValueError: no client has test records.
        """
        if self.clients is None:
            return _share(self.confusion)
        if not self.clients:
            raise ValueError("no client has a test record; keep more back with --local-test, or have fewer clients")
        return sum(self.clients.values()) / len(self.clients)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the accuracy over clients; None for fewer than two."""
        if self.clients is None or len(self.clients) < 2:
            return None
        return float(torch.tensor(list(self.clients.values()), dtype=torch.float64).std())


def _share(table: Tensor) -> float:
    return int(table.diag().sum()) / int(table.sum())
