"""Settings of every method that run in about a second, shared by the common tests and the tests of the documents."""

from collections.abc import Iterator
from typing import Any

LOCAL = {"lr": 0.05, "batch_size": 32, "epochs": 1}
TRAINING = {"epochs": 3}
DATAFREE = {"local": {**LOCAL, "epochs": 2}, "epochs": 2, "student": LOCAL}
PRIVATE_ROUNDS = {"rounds": 2, "participation": 1.0, "local": {"steps": 2, "supposed_records": 400, "lr": 0.05}}
HEADS = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}}
SMALL: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2, "local": LOCAL},
    "fedprox": {"rounds": 2, "local": LOCAL},
    "fednova": {"rounds": 2, "local": LOCAL},
    "scaffold": {"rounds": 2, "local": LOCAL},
    "fedavg-robust": {"rounds": 2, "local": LOCAL, "rule": "median"},
    "fedavg-ft": {"rounds": 2, "local": LOCAL, "tuning": LOCAL},
    "fedrep": {"rounds": 2, "head": LOCAL, "body": LOCAL},
    "fedproto": {"rounds": 2, "local": LOCAL},
    "fedmd": {"rounds": 2, "transfer": {"epochs": 1}, "local": {"epochs": 1}, "images": 40, "revisit": {"epochs": 1}},
    "real": {"ipc": 2, "training": TRAINING},
    "fedgm": {"ipc": 2, "training": TRAINING, "matching": {"nets": 3, "batch_size": 16}},
    "feddm": {"ipc": 1, "rounds": 2, "training": {"epochs": 2}, "matching": {"steps": 3, "batch_size": 16}},
    "fedd3": {"images": 4, "training": {"epochs": 2}, "kip": {"steps": 3, "batch_size": 20}},
    "fedrd": {
        "dpc": 1,
        "rounds": 2,
        "training": {"epochs": 2},
        "projection": {"epochs": 1},
        "matching": {"steps": 3, "batch_size": 16, "batch_statistics": True, "logits": False},
    },
    "fedrd-records": {
        "dpc": 1,
        "nets": 2,
        "fitting": {"steps": 5},
        "training": {"epochs": 2},
        "projection": {"epochs": 1},
    },
    "feddf": {"local": LOCAL, "distillation": {"epochs": 2}},
    "dense": {**DATAFREE, "generation": {"steps": 3, "batch_size": 16, "ngf": 8, "nz": 16}},
    "co-boosting": {**DATAFREE, "generation": {"steps": 3, "batch_size": 16, "ngf": 8, "nz": 16}},
    "fed-dafl": {**DATAFREE, "generation": {"steps": 3, "batch_size": 16, "nz": 16}},
    "fed-adi": {**DATAFREE, "inversion": {"steps": 3, "batch_size": 16}},
    "fedcvae": {"local": {"epochs": 1}, "images": 60, "training": {"epochs": 2}},
    "fafi": {"local": LOCAL},
    "fedlpa": {"local": LOCAL},
    "fedsd2c": {
        "local": LOCAL,
        "ipc": 2,
        "coding": {"width": 8, "training": {"epochs": 2}},
        "core": {"crops": 2, "pool": 20},
        "fitting": {"steps": 2},
        "training": {"epochs": 3},
    },
    "fens": {"local": LOCAL, "rounds": 2},
    "fedgm-labels": {
        "ipc": 1,
        "training": TRAINING,
        "matching": {"nets": 2, "batch_size": 8},
        "denoising": {"epochs": 2},
    },
    "ldp-fedavg": {"rounds": 2, "local": LOCAL},
    "dp-fedavg": {"rounds": 2, "local": LOCAL},
    "dp-fl": PRIVATE_ROUNDS,
    "adap-dp-fl": PRIVATE_ROUNDS,
    "fedkd": PRIVATE_ROUNDS,
    "fedkadp": PRIVATE_ROUNDS,
    "fedgm-records": {"ipc": 1, "nets": 2, "fitting": {"steps": 10}, "training": TRAINING},
    "afl": {**HEADS},
    "deepafl": {**HEADS, "rounds": 3, "width": 12, "expanded": 10},
    "fedcgs": {**HEADS},
    "fedcgs-p": {**HEADS, "local": LOCAL},
    "gh-ofl": {**HEADS, "classifier": "qda"},
    "fedpft": {**HEADS, "training": {"epochs": 3}},
    "fedcof": {**HEADS},
    "sim-pe": {**HEADS, "rounds": 2, "candidates": 20, "neighbours": 3, "images": 20, "training": TRAINING},
    "safle": {**HEADS, "buckets": {"thresholds": 2, "group": 2}},
    "fedavg-p": {**HEADS},
    "fedd-p": {**HEADS, "distillation": {"epochs": 2}},
    "fedauxfdp": {**HEADS, "distillation": {"epochs": 2}},
    "fedaux-f": {**HEADS, "distillation": {"epochs": 2}, "local": {"epochs": 2}},
    "fedaux": {**HEADS, "distillation": {"epochs": 1}, "local": {"epochs": 1}, "rounds": 2},
}
"""A new method gets one line here."""


def flags(name: str, prefix: str = "") -> list[str]:
    """The settings as flags of the command line; in a comparison each begins with ``prefix``, as ``"fedavg."``."""

    def words(settings: dict[str, Any], path: str) -> Iterator[str]:
        for key, value in settings.items():
            place = path + key.replace("_", "-")
            if isinstance(value, dict):
                yield from words(value, f"{place}.")
            else:
                yield from (f"--{place}", str(value))

    return list(words(SMALL[name], prefix))


ALL = {"rounds": 2, "participation": 1.0, "local": {"steps": 2, "batch_size": 64, "supposed_records": 64, "lr": 0.05}}
"""Every record in every batch, so that all that one record may do happens in every step."""
PRIVATE: dict[str, dict[str, Any]] = {
    **{name: ALL for name in ("dp-fl", "adap-dp-fl", "fedkd", "fedkadp")},
    **{
        name: SMALL[name]
        for name in (
            "fedavg-p",
            "fedd-p",
            "fedauxfdp",
            "fedgm-records",
            "fedrd-records",
            "afl",
            "deepafl",
            "fedcgs",
            "fedcgs-p",
            "gh-ofl",
            "safle",
            "sim-pe",
        )
    },
    "fedpft": {**SMALL["fedpft"], "epsilon": 1.0, "mixture": {"components": 1, "covariance": "full"}},
    "fedcof": {**SMALL["fedcof"], "epsilon": 1.0},
    "ldp-fedavg": {**SMALL["ldp-fedavg"], "local": {"lr": 0.05, "batch_size": 16, "epochs": 1}},
    "dp-fedavg": {**SMALL["dp-fedavg"], "local": {"lr": 0.05, "batch_size": 16, "epochs": 1}},
}
FACTS: dict[str, dict[str, Any]] = {"fedrd-records": {"model": "projected:width=8"}}
