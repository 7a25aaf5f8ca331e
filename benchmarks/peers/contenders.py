"""FedAvg of the same network on the same records, by fedstill and by its peers, each by its own documented way.

Each function takes records ``(n, 1, 28, 28)`` in [0, 1] with their classes, parts of equal size, one for each client,
and test records; it runs so many rounds of one local epoch (SGD, batches of `BATCH`, rate `RATE`), and returns the
accuracy of the last global model on the test records.
"""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.seeds import isolated

BATCH, RATE, MODEL = 32, 0.05, "dense-mnist"


class Work(NamedTuple):
    """Records of all clients.

    Attributes:
        x: ``(n, 1, 28, 28)`` in [0, 1]; client c of k has those from ``c n / k`` on.
        y: their classes.
        clients: number of clients.
        test_x: test records.
        test_y: their classes.
        folder: an empty folder for files.
    """

    x: Tensor
    y: Tensor
    clients: int
    test_x: Tensor
    test_y: Tensor
    folder: Path

    @property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The records of each client."""
        return list(zip(self.x.chunk(self.clients), self.y.chunk(self.clients), strict=True))

    def accuracy(self, model: nn.Module) -> float:
        """Share of test records that a model classifies rightly."""
        model.eval()
        with torch.no_grad():
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


def network() -> nn.Module:
    """The network, always with the same weights."""
    with isolated(0):
        return models.build(MODEL, (1, 28, 28), 10)


def fedstill(work: Work, rounds: int) -> float:
    """`fedstill.run`, in one process."""
    import fedstill
    from fedstill.data.own import from_torch

    where = np.repeat(np.arange(work.clients), len(work.x) // work.clients)
    data = from_torch((work.x, work.y), (work.test_x, work.test_y), columns={"site": where.tolist()})
    record = fedstill.run(
        "fedavg",
        data=data,
        partition="by:site",
        clients=work.clients,
        model=MODEL,
        rounds=rounds,
        workers=0,
        evaluate_every=rounds,
        out=str(work.folder / f"run-{rounds}"),
        local={"epochs": 1, "batch_size": BATCH, "lr": RATE, "momentum": 0.0},
    )
    return float(record.accuracy or 0.0)


def flower(work: Work, rounds: int) -> float:
    """`flwr.simulation.run_simulation`, with the strategy FedAvg of the Message API."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, found = ClientApp(), ServerApp(), list[float]()
    parts = work.parts

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = parts[int(context.node_config["partition-id"])]
        fit(model, x, y)
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        )
        return Message(content=content, reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = network()
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        found.append(work.accuracy(model))

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=backend)
    return found[0]


def fit(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One epoch in plain PyTorch, as Flower's tutorials have it."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for images, labels in data:
        optimiser.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimiser.step()


def plain(work: Work, rounds: int) -> float:
    """The loop that anybody would write: nothing is checked, counted, sent or stored."""
    model = network()
    for _ in range(rounds):
        total: dict[str, Tensor] = {}
        for x, y in work.parts:
            own = network()
            own.load_state_dict(model.state_dict())
            fit(own, x, y)
            for name, value in own.state_dict().items():
                total[name] = total.get(name, 0) + value / work.clients
        model.load_state_dict(total)
    return work.accuracy(model)


def fluke(work: Work, rounds: int) -> float:
    """`fluke.algorithms.fedavg.FedAVG`, as in its tutorial."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter
    from fluke.data.datasets import DataContainer
    from fluke.evaluation import ClassificationEval

    environment = FlukeENV()
    environment.set_evaluator(ClassificationEval(eval_every=rounds, n_classes=10))
    environment.set_eval_cfg(post_fit=False, pre_fit=False, server=True, locals=False)
    container = DataContainer(work.x, work.y, work.test_x, work.test_y, num_classes=10)
    splitter = DataSplitter(dataset=container, distribution="iid")
    client = DDict(
        batch_size=BATCH,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=RATE, momentum=0.0, weight_decay=0.0),
        scheduler=DDict(name="StepLR", gamma=1, step_size=1),
    )
    settings = DDict(client=client, server=DDict(weighted=True), model=network())
    algorithm = FedAVG(n_clients=work.clients, data_splitter=splitter, hyper_params=settings)
    algorithm.run(n_rounds=rounds, eligible_perc=1.0)
    return work.accuracy(algorithm.server.model)


def pfl(work: Work, rounds: int) -> float:
    """pfl-research's `FederatedAveraging` on its `SimulatedBackend`."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.net.train(not eval)
            return cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
            self.net.eval()
            return {"right": Weighted(float((self.net(x).argmax(1) == y).sum()), len(x))}

    parts = work.parts
    made = lambda user: PyTorchTensorDataset(tensors=parts[user], eval_kwargs={"eval": True})  # noqa: E731
    users = FederatedDataset(made, get_user_sampler("minimize_reuse", list(range(work.clients))))
    net = Net()
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
    )
    return work.accuracy(net.net)


CONTENDERS: dict[str, tuple[Any, ...]] = {
    "plain loop": (plain, ""),
    "fedstill": (fedstill, "fedstill"),
    "Flower": (flower, "flwr", "ray"),
    "fluke": (fluke, "fluke-fl", "torchvision"),
    "pfl-research": (pfl, "pfl"),
}
"""The contenders, the package that each needs, and modules that it imports without saying so."""
warnings.simplefilter("ignore")
