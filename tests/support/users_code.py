"""A user's file, which mypy (and pyright) check in strict mode against the package's types."""

# pyright: strict
from pathlib import Path

import torch
from typing_extensions import override

import fedstill
from fedstill import Client, Federation, FedstillError, InputError, Method, Reply, RunRecord, Watcher, step
from fedstill.protocol import State, load, state


class Update(Reply):
    """One client's weights."""

    weights: State


class Mean(Method):
    """The plain mean of the clients' weights."""

    rounds: int = 2
    """Rounds."""

    def server(self, fed: Federation) -> torch.nn.Module:
        """The averaged model."""
        model = fed.new_model()
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(self.update, weights=state(model))
            load(model, {name: torch.stack([r.weights[name] for r in replies]).mean(0) for name in state(model)})
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        """The weights as they came."""
        return Update(weights=state(client.new_model(weights)))


class Stop(Watcher):
    """Ends a run after its first round."""

    @override
    def logged(self, round: int, rounds: int, values: object) -> None:
        raise KeyboardInterrupt


def first(folder: Path) -> float | None:
    """The accuracy of a short run."""
    try:
        record: RunRecord = fedstill.run(Mean(rounds=1), data="digits", out=folder, track="tensorboard", workers=0)
    except InputError as error:
        raise SystemExit(str(error)) from error
    except FedstillError:
        return None
    accuracy: float | None = record.accuracy
    table = record.to_pandas()
    assert len(table) == len(record.metrics)
    trained = fedstill.load_model(folder)
    labels: torch.Tensor = trained(torch.zeros(1, *trained.shape, dtype=torch.uint8)).argmax(1)
    fedstill.write_report([fedstill.read_run(found) for found in fedstill.find_runs(folder)], folder / "page.html")
    return accuracy if len(labels) else None
