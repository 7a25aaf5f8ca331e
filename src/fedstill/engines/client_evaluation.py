"""Evaluation of models by clients that have their own test records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from jaxtyping import Int64
from torch import Tensor

from fedstill.engines.column_scale import PrivateScale, scale_step
from fedstill.evaluation import Cells, Numbers, cells_of, confusion
from fedstill.protocol import Client, Method, Reply, Shared, Step, client_steps
from fedstill.schema import Below


class ConfusionReply(Reply):
    """Confusion matrix of a client's test records: counts by true (rows) and predicted class."""

    confusion: Annotated[Int64[Tensor, "classes classes"], Below(2**40)]


def judge(self: Method, client: Client, shared: Shared) -> ConfusionReply:
    """Evaluate the client's model on its own test records."""
    model = self.personal_model(client, shared)
    return ConfusionReply(confusion=confusion(model, client.test).cpu())


EVALUATE = Step(judge)  # its name crosses to the sites, and stands in their policies


def steps_of(method: Method, scale: PrivateScale | None = None) -> dict[str, Step[Any]]:
    """The method's steps, the engines' evaluation step, and that which measures a scale, if the run has one."""
    engines: list[Step[Any]] = [EVALUATE, *([] if scale is None else [scale_step(scale)])]
    own = client_steps(type(method))
    for step in engines:
        assert step.name not in own, f"{type(method).__name__} has a step '{step.name}', which is the engines'"
    return {**own, **{step.name: step for step in engines}}


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        confusion: counts of test records by true and predicted class, int64 ``(C, C)``; the sum over clients.
        cells: the confusion matrix of each client that has test records (`cells_of`); None if the server evaluated.
        numbers: the true and predicted numbers of a task whose target is one; there is one class then.
        unpredicted: test records whose outputs are no finite numbers; 0 where clients evaluate, who do not say.
    """

    confusion: Int64[Tensor, "classes classes"]
    cells: Mapping[int, Cells] | None = None
    numbers: Numbers | None = None
    unpredicted: int = 0

    @classmethod
    def of_clients(cls, tables: Iterable[tuple[int, Int64[Tensor, "classes classes"]]], num_classes: int) -> Self:
        """The result from clients and their confusion matrices."""
        total = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        cells: dict[int, Cells] = {}
        for client, table in tables:
            total += table
            if found := cells_of(table):
                cells[client] = found
        return cls(total, cells)

    def described(self) -> dict[str, Any]:
        """The result as JSON, for `read`."""
        return {"confusion": self.confusion.tolist(), "cells": self.cells}

    @classmethod
    def read(cls, json: Mapping[str, Any]) -> Self:
        """The inverse of `described`."""
        cells = None if json["cells"] is None else {int(client): cells for client, cells in json["cells"].items()}
        return cls(torch.tensor(json["confusion"], dtype=torch.int64), cells)

    @property
    def clients(self) -> dict[int, float] | None:
        """Accuracy in [0, 1] of each client that has test records; None if the server evaluated."""
        return None if self.cells is None else {client: _share(cells) for client, cells in self.cells.items()}

    @property
    def accuracy(self) -> float | None:
        """Accuracy in [0, 1] on the server's test records, or the mean of the clients' accuracies; None of numbers.

        Raises:
            ValueError: no client has test records.
        """
        if self.numbers is not None:
            return None
        if self.clients is None:
            return _share(cells_of(self.confusion))
        if not self.clients:
            raise ValueError("no client has a test record; raise --local-test, or lower --clients")
        return sum(self.clients.values()) / len(self.clients)

    def facts(self) -> dict[str, Any]:
        """What ``summary.json`` has of it."""
        facts = {"accuracy": self.accuracy, "predicted_classes": self.predicted_classes}
        return facts | {"unpredicted": self.unpredicted}

    @property
    def predicted_classes(self) -> int | None:
        """Number of classes that the model predicted; None of numbers. With 1 it says the same of every record."""
        return None if self.numbers is not None else int((self.confusion.sum(0) > 0).sum())

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the accuracy over clients; None for fewer than two."""
        if self.clients is None or len(self.clients) < 2:
            return None
        return float(torch.tensor(list(self.clients.values()), dtype=torch.float64).std())


def _share(cells: Cells) -> float:
    return sum(count for true, predicted, count in cells if true == predicted) / sum(count for *_, count in cells)
