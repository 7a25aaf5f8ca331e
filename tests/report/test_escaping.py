"""Whatever a stranger named is text in every page that a person opens; that of a report is in ``test_report.py``."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report_pages import Outline, write_run

from fedstill.attacks import results
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.methods.fedavg import FedAvg
from fedstill.report import data_page, live_page, markup
from fedstill.report.record import read_run
from fedstill.sites.site import evidence

EVIL = "<script>alert('x')</script><img src=x onerror=y>\"&"


def check(page: str) -> None:
    """The page has the name as text, and no element or attribute of it."""
    assert "<script>alert" not in page and "<img src=x" not in page
    outline = Outline(page)
    assert not [a for _, attributes in outline.tags for a in attributes if a.startswith("on")]
    assert EVIL in outline.words + "".join(outline.drawn)


def test_markup_escapes_what_no_template_has_made() -> None:
    for text in (markup.part("paragraph", EVIL), markup.joined(EVIL, markup.part("heading", "a", 2))):
        assert "<script>" not in text and "<img" not in text
    assert "<p>a</p>" in markup.part("section", "b", markup.part("paragraph", "a"), 2, "")


def test_the_page_of_an_attack(tmp_path: Path) -> None:
    rate = {"tpr": 0.5, "low": 0.0, "high": 0.5, "bound": None, "refuted": None, "fpr": 0.01}
    names = ("unit", "adjacency", "epsilon", "delta", "adversary", "accountant")
    found: dict[str, Any] = {
        "client": 1,
        "records": 80,
        "members": 39,
        "shadows": 4,
        "guarantee": {"holds": False, **dict.fromkeys(names), "reason": EVIL, "simulated": False},
        "likelihood_ratio": {EVIL: {"auc": 0.5, "auc_low": 0.4, "auc_high": 0.6, "rates": [rate]}},
    }
    curves = {EVIL: (torch.linspace(0, 1, 9), torch.linspace(0, 1, 9))}
    check(results.page(Job(Experiment(data="digits"), FedAvg(), tmp_path, label=EVIL), found, curves))


def test_the_page_of_a_data_set(tmp_path: Path) -> None:
    data_page.write_counts(tmp_path / "a.html", EVIL, np.ones((2, 2), int), (EVIL, "b"))
    check((tmp_path / "a.html").read_text())


def test_the_evidence_of_a_site() -> None:
    run = {"run": EVIL, "method": EVIL, "model": EVIL, "first": EVIL, "last": EVIL, "fields": {EVIL: EVIL}}
    run |= {"settings": EVIL, "spent": {EVIL: {"epsilon": 1.0, "share": 0.5}}, "asked": 1}
    run |= dict.fromkeys(evidence.log.OUTCOMES, 0)
    found = {
        "site": EVIL,
        "made": EVIL,
        "fedstill": EVIL,
        "policy": {"methods": [EVIL], "unprotected": False},
        "check": {"is_whole": True, "problems": [EVIL], "notes": [EVIL]},
        "budget": {"epsilon": 1.0, "delta": 1e-5, "spent": {}, "releases": 0},
        "runs": [run],
        "charges": [dict.fromkeys(("number", "time", "run", "step", "mechanism", "unit", "cost", "theorem"), EVIL)],
        "log": [{"n": 1, "time": EVIL, "what": EVIL, "run": EVIL, "step": EVIL, "detail": EVIL}],
    }
    check(evidence.page(found))


def test_a_run_in_a_notebook_and_the_live_page(tmp_path: Path) -> None:
    check(read_run(write_run(tmp_path / "a", label=EVIL, partition=EVIL))._repr_html_())
    for name, _ in live_page._FILES.values():  # its script writes texts only
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", markup.asset(name))
