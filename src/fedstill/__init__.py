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
    from fedstill.experiment.trained import load_model as load_model
    from fedstill.methods.adap_dp_fl import AdapDPFL as AdapDPFL
    from fedstill.methods.dense import Dense as Dense
    from fedstill.methods.dense_published import DensePublished as DensePublished
    from fedstill.methods.dp_fl import DPFL as DPFL
    from fedstill.methods.fed_adi import FedADI as FedADI
    from fedstill.methods.fed_dafl import FedDAFL as FedDAFL
    from fedstill.methods.fedaux import FedAUX as FedAUX
    from fedstill.methods.fedaux_f import FedAUXF as FedAUXF
    from fedstill.methods.fedauxfdp import FedAUXfdp as FedAUXfdp
    from fedstill.methods.fedavg import FedAvg as FedAvg
    from fedstill.methods.fedavg_ft import FedAvgFT as FedAvgFT
    from fedstill.methods.fedavg_p import FedAvgP as FedAvgP
    from fedstill.methods.fedd3 import FedD3 as FedD3
    from fedstill.methods.fedd_p import FedDP as FedDP
    from fedstill.methods.feddf import FedDF as FedDF
    from fedstill.methods.feddm import FedDM as FedDM
    from fedstill.methods.fedgm import FedGM as FedGM
    from fedstill.methods.fedgm_labels import FedGMLabels as FedGMLabels
    from fedstill.methods.fedgm_records import FedGMRecords as FedGMRecords
    from fedstill.methods.fedkadp import FedKADP as FedKADP
    from fedstill.methods.fedkd import FedKD as FedKD
    from fedstill.methods.fednova import FedNova as FedNova
    from fedstill.methods.fedprox import FedProx as FedProx
    from fedstill.methods.fedrd import FedRD as FedRD
    from fedstill.methods.fedrd_records import FedRDRecords as FedRDRecords
    from fedstill.methods.fedrep import FedRep as FedRep
    from fedstill.methods.ldp_fedavg import LDPFedAvg as LDPFedAvg
    from fedstill.methods.real import Real as Real
    from fedstill.methods.scaffold import Scaffold as Scaffold
    from fedstill.privacy.released import Released as Released
    from fedstill.protocol import Client as Client
    from fedstill.protocol import Federation as Federation
    from fedstill.protocol import Method as Method
    from fedstill.protocol import Reply as Reply
    from fedstill.protocol import step as step
    from fedstill.report.record import RunRecord as RunRecord
    from fedstill.report.record import find_runs as find_runs
    from fedstill.report.record import read_run as read_run

__version__ = "0.1.0"

_PLACES = {
    "AdapDPFL": "fedstill.methods.adap_dp_fl:AdapDPFL",
    "Client": "fedstill.protocol:Client",
    "DPFL": "fedstill.methods.dp_fl:DPFL",
    "DataSet": "fedstill.data.sources:DataSet",
    "Dense": "fedstill.methods.dense:Dense",
    "DensePublished": "fedstill.methods.dense_published:DensePublished",
    "Experiment": "fedstill.experiment.config:Experiment",
    "FedADI": "fedstill.methods.fed_adi:FedADI",
    "FedAUX": "fedstill.methods.fedaux:FedAUX",
    "FedAUXF": "fedstill.methods.fedaux_f:FedAUXF",
    "FedAUXfdp": "fedstill.methods.fedauxfdp:FedAUXfdp",
    "FedAvg": "fedstill.methods.fedavg:FedAvg",
    "FedAvgFT": "fedstill.methods.fedavg_ft:FedAvgFT",
    "FedAvgP": "fedstill.methods.fedavg_p:FedAvgP",
    "FedD3": "fedstill.methods.fedd3:FedD3",
    "FedDAFL": "fedstill.methods.fed_dafl:FedDAFL",
    "FedDF": "fedstill.methods.feddf:FedDF",
    "FedDM": "fedstill.methods.feddm:FedDM",
    "FedDP": "fedstill.methods.fedd_p:FedDP",
    "FedGM": "fedstill.methods.fedgm:FedGM",
    "FedGMLabels": "fedstill.methods.fedgm_labels:FedGMLabels",
    "FedGMRecords": "fedstill.methods.fedgm_records:FedGMRecords",
    "FedKADP": "fedstill.methods.fedkadp:FedKADP",
    "FedKD": "fedstill.methods.fedkd:FedKD",
    "FedNova": "fedstill.methods.fednova:FedNova",
    "FedProx": "fedstill.methods.fedprox:FedProx",
    "FedRD": "fedstill.methods.fedrd:FedRD",
    "FedRDRecords": "fedstill.methods.fedrd_records:FedRDRecords",
    "FedRep": "fedstill.methods.fedrep:FedRep",
    "Federation": "fedstill.protocol:Federation",
    "Job": "fedstill.experiment.run:Job",
    "LDPFedAvg": "fedstill.methods.ldp_fedavg:LDPFedAvg",
    "Method": "fedstill.protocol:Method",
    "Real": "fedstill.methods.real:Real",
    "Released": "fedstill.privacy.released:Released",
    "Reply": "fedstill.protocol:Reply",
    "RunRecord": "fedstill.report.record:RunRecord",
    "Scaffold": "fedstill.methods.scaffold:Scaffold",
    "find_runs": "fedstill.report.record:find_runs",
    "load_data": "fedstill.data.sources:load",
    "load_model": "fedstill.experiment.trained:load_model",
    "read_run": "fedstill.report.record:read_run",
    "run": "fedstill.experiment.run:run",
    "step": "fedstill.protocol:step",
}

__all__ = [
    "AdapDPFL",
    "Client",
    "DPFL",
    "DataSet",
    "Dense",
    "DensePublished",
    "Experiment",
    "FedADI",
    "FedAUX",
    "FedAUXF",
    "FedAUXfdp",
    "FedAvg",
    "FedAvgFT",
    "FedAvgP",
    "FedD3",
    "FedDAFL",
    "FedDF",
    "FedDM",
    "FedDP",
    "FedGM",
    "FedGMLabels",
    "FedGMRecords",
    "FedKADP",
    "FedKD",
    "FedNova",
    "FedProx",
    "FedRD",
    "FedRDRecords",
    "FedRep",
    "Federation",
    "Job",
    "LDPFedAvg",
    "Method",
    "Real",
    "Released",
    "Reply",
    "RunRecord",
    "Scaffold",
    "find_runs",
    "load_data",
    "load_model",
    "read_run",
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
