"""The methods: one file each, and this table."""

from importlib import import_module

from fedstill.protocol import Method

TABLE = {
    "fedavg": "fedstill.methods.fedavg:FedAvg",
    "fedprox": "fedstill.methods.fedprox:FedProx",
    "fednova": "fedstill.methods.fednova:FedNova",
    "scaffold": "fedstill.methods.scaffold:Scaffold",
    "fedavg-ft": "fedstill.methods.fedavg_ft:FedAvgFT",
    "fedrep": "fedstill.methods.fedrep:FedRep",
    "real": "fedstill.methods.real:Real",
    "fedgm": "fedstill.methods.fedgm:FedGM",
    "fedgm-records": "fedstill.methods.fedgm_records:FedGMRecords",
    "feddm": "fedstill.methods.feddm:FedDM",
    "fedd3": "fedstill.methods.fedd3:FedD3",
    "fedrd": "fedstill.methods.fedrd:FedRD",
    "fedrd-records": "fedstill.methods.fedrd_records:FedRDRecords",
    "feddf": "fedstill.methods.feddf:FedDF",
    "dense": "fedstill.methods.dense:Dense",
    "dense-published": "fedstill.methods.dense_published:DensePublished",
    "fed-dafl": "fedstill.methods.fed_dafl:FedDAFL",
    "fed-adi": "fedstill.methods.fed_adi:FedADI",
    "fedavg-p": "fedstill.methods.fedavg_p:FedAvgP",
    "fedd-p": "fedstill.methods.fedd_p:FedDP",
    "fedauxfdp": "fedstill.methods.fedauxfdp:FedAUXfdp",
    "fedaux-f": "fedstill.methods.fedaux_f:FedAUXF",
    "fedaux": "fedstill.methods.fedaux:FedAUX",
    "fedgm-labels": "fedstill.methods.fedgm_labels:FedGMLabels",
    "ldp-fedavg": "fedstill.methods.ldp_fedavg:LDPFedAvg",
    "dp-fl": "fedstill.methods.dp_fl:DPFL",
    "adap-dp-fl": "fedstill.methods.adap_dp_fl:AdapDPFL",
    "fedkd": "fedstill.methods.fedkd:FedKD",
    "fedkadp": "fedstill.methods.fedkadp:FedKADP",
}
"""Name on the command line -> class. A new method is one file, one line here, one page in docs/methods/, and
its class's name in `fedstill`."""


def find(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: one of `TABLE`, or ``package.module:Class`` for a method of your own.

    Raises:
        ValueError: when there is no such method.
    """
    target = TABLE.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(f"there is no method '{name}'; choose {', '.join(TABLE)}, or package.module:Class of your own")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"method '{name}' cannot be loaded ({error}); modules are looked for where Python does"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"'{name}' is no method; it must be a class derived from fedstill.protocol.Method")
    return found
