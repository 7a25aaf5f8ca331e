"""The public names of fedstill, each with its type: the one list of them, and the table of methods.

A method's name on the command line is that of its module, with hyphens. `fedstill.__getattr__` imports a name when it
is first used.
"""

# ruff: noqa: I001 - methods stand in the order in which `fedstill methods` lists them

from fedstill.data.own import from_torch as from_torch
from fedstill.data.sources import DataSet as DataSet
from fedstill.data.sources import load_data as load_data
from fedstill.engines.transport import Watcher as Watcher
from fedstill.engines.server import TooFewReplies as TooFewReplies
from fedstill.base.errors import FedstillError as FedstillError
from fedstill.base.errors import InputError as InputError
from fedstill.experiment.config import Experiment as Experiment
from fedstill.experiment.job import Job as Job
from fedstill.experiment.trained import Trained as Trained
from fedstill.experiment.trained import load_model as load_model
from fedstill.protocol.sides import Round as Round
from fedstill.runs.journal import Refusal as Refusal
from fedstill.judged import Evaluation as Evaluation
from fedstill.judged import evaluate as evaluate
from fedstill.predictions import Predictions as Predictions
from fedstill.predictions import predict as predict
from fedstill.library import compare as compare
from fedstill.library import run as run
from fedstill.studies import attack as attack
from fedstill.studies import audit as audit
from fedstill.studies import plan as plan
from fedstill.studies import publish as publish
from fedstill.studies import sweep as sweep
from fedstill.studies import to_pandas as to_pandas
from fedstill.privacy.guarantee import Guarantee as Guarantee
from fedstill.privacy.releases import Released as Released
from fedstill.protocol import Client as Client
from fedstill.protocol import Federation as Federation
from fedstill.protocol import Method as Method
from fedstill.protocol import Reply as Reply
from fedstill.protocol import step as step
from fedstill.base.records import Examples as Examples
from fedstill.base.records import Normalisation as Normalisation
from fedstill.base.records import Records as Records
from fedstill.report.page import write_report as write_report
from fedstill.report.record import RunRecord as RunRecord
from fedstill.report.record import find_runs as find_runs
from fedstill.report.record import read_run as read_run

from fedstill.methods.fedavg import FedAvg as FedAvg
from fedstill.methods.fedprox import FedProx as FedProx
from fedstill.methods.fednova import FedNova as FedNova
from fedstill.methods.scaffold import Scaffold as Scaffold
from fedstill.methods.fedavg_robust import FedAvgRobust as FedAvgRobust
from fedstill.methods.fedavg_ft import FedAvgFT as FedAvgFT
from fedstill.methods.fedrep import FedRep as FedRep
from fedstill.methods.fedproto import FedProto as FedProto
from fedstill.methods.fedmd import FedMD as FedMD
from fedstill.methods.real import Real as Real
from fedstill.methods.fedgm import FedGM as FedGM
from fedstill.methods.fedgm_records import FedGMRecords as FedGMRecords
from fedstill.methods.feddm import FedDM as FedDM
from fedstill.methods.fedd3 import FedD3 as FedD3
from fedstill.methods.fedrd import FedRD as FedRD
from fedstill.methods.fedrd_records import FedRDRecords as FedRDRecords
from fedstill.methods.feddf import FedDF as FedDF
from fedstill.methods.dense import Dense as Dense
from fedstill.methods.co_boosting import CoBoosting as CoBoosting
from fedstill.methods.fed_dafl import FedDAFL as FedDAFL
from fedstill.methods.fed_adi import FedADI as FedADI
from fedstill.methods.fedcvae import FedCVAE as FedCVAE
from fedstill.methods.fens import FENS as FENS
from fedstill.methods.fafi import FAFI as FAFI
from fedstill.methods.fedlpa import FedLPA as FedLPA
from fedstill.methods.fedsd2c import FedSD2C as FedSD2C
from fedstill.methods.afl import AFL as AFL
from fedstill.methods.deepafl import DeepAFL as DeepAFL
from fedstill.methods.fedcgs import FedCGS as FedCGS
from fedstill.methods.fedcgs_p import FedCGSP as FedCGSP
from fedstill.methods.fedcof import FedCOF as FedCOF
from fedstill.methods.gh_ofl import GHOFL as GHOFL
from fedstill.methods.fedpft import FedPFT as FedPFT
from fedstill.methods.safle import SAFLe as SAFLe
from fedstill.methods.sim_pe import SimPE as SimPE
from fedstill.methods.fedavg_p import FedAvgP as FedAvgP
from fedstill.methods.fedd_p import FedDP as FedDP
from fedstill.methods.fedauxfdp import FedAUXfdp as FedAUXfdp
from fedstill.methods.fedaux_f import FedAUXF as FedAUXF
from fedstill.methods.fedaux import FedAUX as FedAUX
from fedstill.methods.fedgm_labels import FedGMLabels as FedGMLabels
from fedstill.methods.ldp_fedavg import LDPFedAvg as LDPFedAvg
from fedstill.methods.dp_fedavg import DPFedAvg as DPFedAvg
from fedstill.methods.dp_fl import DPFL as DPFL
from fedstill.methods.adap_dp_fl import AdapDPFL as AdapDPFL
from fedstill.methods.fedkd import FedKD as FedKD
from fedstill.methods.fedkadp import FedKADP as FedKADP

__version__: str
_PLACES: dict[str, str]
