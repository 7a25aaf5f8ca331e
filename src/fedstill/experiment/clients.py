"""The results of each client, for ``clients.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.experiment.task import Task
from fedstill.journal import EVALUATIONS, Refusal
from fedstill.journal_files import JournalFiles
from fedstill.runs.folder import RunFolder


def results(
    folder: RunFolder, task: Task, clients: int, accuracies: Mapping[int, float] | None, refused: Sequence[Refusal]
) -> list[dict[str, Any]]:
    """A row for each client.

    Args:
        folder: the run's folder, whose journal has the messages.
        task: the task; without parts if real sites have the records.
        clients: number of clients.
        accuracies: accuracy in [0, 1] of the clients that evaluated the final model on their own test records.
        refused: the replies that were not used.
    """
    rows: list[dict[str, Any]] = [
        {
            "client": client,
            "accuracy": None if accuracies is None else accuracies.get(client),
            "records": len(task.parts[client][0]) if task.parts else None,
            "test_records": len(task.parts[client][1]) if task.parts else None,
            "bytes_up": 0,
            "bytes_down": 0,
            "refused": sum(refusal.client == client for refusal in refused),
        }
        for client in range(clients)
    ]
    for message in JournalFiles(folder.journal).messages():
        if message["exchange"] < EVALUATIONS:
            row = rows[message["client"]]
            row["bytes_up"] += message.get("up", 0)
            row["bytes_down"] += message.get("down", 0)
    return rows
