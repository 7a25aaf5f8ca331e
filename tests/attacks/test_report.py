"""The results of a membership attack in words: the stronger attack first, tables in place of codes."""

from typing import Any

import torch

from fedstill.attacks import results
from fedstill.cli.output import terminal
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.methods.fedavg import FedAvg


def example() -> dict[str, Any]:
    def form(auc: float, tpr: float) -> dict[str, Any]:
        rate = {"tpr": tpr, "low": 0.0, "high": 0.5, "bound": None, "refuted": None}
        return {
            "auc": auc,
            "auc_low": auc - 0.1,
            "auc_high": auc + 0.1,
            "rates": [{"fpr": fpr, **rate} for fpr in (0.001, 0.01)],
        }

    rates = {"precision": 0.57, "recall": 0.97, "f1": 0.72, "support": 41}
    none = {"holds": False, "unit": None, "adjacency": None, "epsilon": None, "delta": None, "adversary": None}
    return {
        "client": 1,
        "records": 80,
        "members": 39,
        "shadows": 4,
        "guarantee": {**none, "accountant": None, "reason": "field x is released unprotected", "simulated": False},
        "likelihood_ratio": {"online": form(0.523, 0.02), "offline": form(0.675, 0.08)},
        "posteriors": {name: {"others": rates, "members": rates} for name in ("whole", "three_largest")},
    }


def test_the_headline_is_the_stronger_attack() -> None:
    found = results.finding(example())
    assert (
        "rate 8.0 %" in found
        and "(offline form)" in found
        and "AUC 0.675 (95 % interval 0.575 to 0.775; offline form" in found
    )
    mixed = example()
    mixed["likelihood_ratio"]["online"]["rates"][-1]["tpr"] = 0.2
    assert "20.0 %" in results.finding(mixed) and "AUC 0.675 (" in results.finding(mixed)


def test_the_page_has_a_table_of_networks_and_ticks_at_decades(tmp_path: Any) -> None:
    curves = {
        form: (torch.linspace(0, 1, 9).double(), torch.linspace(0, 1, 9).double()) for form in ("online", "offline")
    }
    text = results.page(Job(Experiment(data="digits"), FedAvg(), tmp_path), example(), curves)
    assert "0.57/0.97" not in text and ">non-member<" in text and "three largest classes" in text
    assert "<svg" in text and "guessing: TPR" in text and text.count('fill="currentColor"') >= 1
    plot = results.figure_of(example(), curves)
    assert all(axis.ticks is not None and axis.ticks[-1] == (1.0, "1") for axis in (plot.x, *plot.y))
    for part in results.show(example()):
        terminal().print(part)
