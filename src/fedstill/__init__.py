"""fedstill: federated learning by distillation.

The names below are loaded when they are first used, so that ``import fedstill`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.data.sources import DataSet as DataSet
    from fedstill.data.sources import load as load_data
    from fedstill.experiment.config import Experiment as Experiment
    from fedstill.experiment.run import Job as Job
    from fedstill.experiment.run import run as run
    from fedstill.methods.fedavg import FedAvg as FedAvg
    from fedstill.methods.fedgm import FedGM as FedGM
    from fedstill.methods.fednova import FedNova as FedNova
    from fedstill.methods.fedprox import FedProx as FedProx
    from fedstill.methods.real import Real as Real
    from fedstill.methods.scaffold import Scaffold as Scaffold
    from fedstill.protocol import Client as Client
    from fedstill.protocol import Federation as Federation
    from fedstill.protocol import Method as Method
    from fedstill.protocol import Reply as Reply
    from fedstill.protocol import step as step

__version__ = "0.1.0"

_PLACES = {
    "Client": "fedstill.protocol:Client",
    "DataSet": "fedstill.data.sources:DataSet",
    "Experiment": "fedstill.experiment.config:Experiment",
    "FedAvg": "fedstill.methods.fedavg:FedAvg",
    "FedGM": "fedstill.methods.fedgm:FedGM",
    "FedNova": "fedstill.methods.fednova:FedNova",
    "FedProx": "fedstill.methods.fedprox:FedProx",
    "Federation": "fedstill.protocol:Federation",
    "Job": "fedstill.experiment.run:Job",
    "Method": "fedstill.protocol:Method",
    "Real": "fedstill.methods.real:Real",
    "Reply": "fedstill.protocol:Reply",
    "Scaffold": "fedstill.methods.scaffold:Scaffold",
    "load_data": "fedstill.data.sources:load",
    "run": "fedstill.experiment.run:run",
    "step": "fedstill.protocol:step",
}

__all__ = [
    "Client",
    "DataSet",
    "Experiment",
    "FedAvg",
    "FedGM",
    "FedNova",
    "FedProx",
    "Federation",
    "Job",
    "Method",
    "Real",
    "Reply",
    "Scaffold",
    "load_data",
    "run",
    "step",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedstill' has no attribute '{name}'")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
