"""Audits through whole runs, in small form: sound methods stay within their claims, planted faults exceed them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
from scipy.stats import binom

from fedstill import methods
from fedstill.audits import scenes, whole_runs
from fedstill.audits.lower_bounds import EXCEEDED, Finding, fitted, from_scores
from fedstill.audits.scenes import SCENES
from fedstill.audits.whole_runs import AuditSettings, audit
from fedstill.base import lookup
from fedstill.base.seeds import numpy_stream
from fedstill.cli import main
from fedstill.privacy import accounting


def found(name: str, place: Path, patch: pytest.MonkeyPatch, **more: Any) -> Finding:
    """A small audit: few records and clients."""
    patch.setattr(scenes, "OTHERS", more.pop("others", 512))
    patch.setattr(whole_runs, "_PILOT", more.pop("pilot", 40))
    settings = AuditSettings(**{"clients": 40, "out": place, **more})
    (finding,) = audit([name], settings, lambda *_: None)
    return finding


# --- the bound by a fit


def test_a_fit_is_above_the_truth_as_seldom_as_it_says_and_close_to_it() -> None:
    truth, rng = accounting.gaussian_epsilon(1.0, 1e-5), numpy_stream(0, "fits")
    bounds = [fitted(rng.normal(size=300), rng.normal(size=300) + 1, delta=1e-5, confidence=0.9) for _ in range(1000)]
    above = sum(bound > truth for bound in bounds)
    assert binom.cdf(above, 1000, 0.07) > 1e-6 and binom.sf(above - 1, 1000, 0.1) > 1e-6
    assert sum(bound > 0.8 * truth for bound in bounds) > 600
    assert fitted(rng.normal(size=300), rng.normal(size=300) - 1, delta=1e-5) == 0


def test_a_fit_of_eight_clients_is_above_the_truth_as_seldom_as_it_says_too() -> None:
    """With a quantile of the normal distribution it was in 4.3 % of the draws."""
    truth, rng = accounting.gaussian_epsilon(1 / 3, 1e-5), numpy_stream(0, "few")
    bounds = [fitted(*rng.normal(size=(2, 4)) + [[0], [3]], delta=1e-5, confidence=0.975) for _ in range(3000)]
    assert binom.sf(sum(bound > truth for bound in bounds) - 1, 3000, 0.025) > 1e-3


def test_scores_in_a_list_are_judged_as_scores_drawn_one_by_one() -> None:
    rng = numpy_stream(1, "scores")
    out, seen = rng.normal(size=500), rng.normal(size=500) + 2
    result = from_scores(out, seen, delta=1e-5)
    assert 0 < result.epsilon < result.gaussian <= accounting.gaussian_epsilon(0.5, 1e-5)
    with pytest.raises(ValueError, match="there are 1 scores without the record and 500 with it; give 2 or more"):
        from_scores(out[:1], seen, delta=1e-5)


# --- sound methods


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_canaries_reach_the_sensitivity_and_do_not_exceed_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "OTHERS", 512)  # with 2,048, heads reach 0.98
    made = scenes.scene(name, 4.0)
    if not made.labels:
        most = max(whole_runs.quiet(made, choice)[2] for choice in range(len(made.choices)))
        assert 0.9 < most < EXCEEDED


def test_every_private_method_has_a_scene() -> None:
    private = {name for name in methods.TABLE if getattr(methods.find(name), "protects", None)}
    bare = {"fedaux", "fedaux-f"}  # these send models or class heads without protection as well
    asked = {"fedpft", "fedcof"}  # these protect with an epsilon, which they have not by default
    assert (private - bare) | asked == set(SCENES)


@pytest.mark.slow
def test_a_sound_method_is_not_refuted_and_the_audit_is_not_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = found("afl", tmp_path, monkeypatch, pilot=200, clients=200)
    assert not finding.refuted and finding.fit is not None
    assert 0.6 * finding.claim < finding.fit <= finding.claim, finding


@pytest.mark.slow
def test_an_audit_resumes_and_refuses_scores_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found("fedgm-records", tmp_path / "whole", monkeypatch, clients=24)
    monkeypatch.setattr(whole_runs, "_BATCH", 8)
    found("fedgm-records", tmp_path / "parts", monkeypatch, clients=16)
    place = tmp_path / "parts" / "fedgm-records-4.jsonl"
    text = place.read_text()
    place.write_text(text[: len(text) - 100])  # the second run's line is torn
    parts = found("fedgm-records", tmp_path / "parts", monkeypatch, clients=24)
    assert parts.clients == whole.clients == 24 and len(place.read_text().splitlines()) == 5
    with pytest.raises(ValueError, match="scores of another audit"):
        found("fedgm-records", tmp_path / "parts", monkeypatch, seed=1)


def test_an_extension_after_a_look_is_another_chance_to_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = found("fedgm-records", tmp_path, monkeypatch, clients=8)
    again = found("fedgm-records", tmp_path, monkeypatch, clients=8)
    assert first.risk == again.risk == pytest.approx(0.05) and first.looks == again.looks == 1
    more = found("fedgm-records", tmp_path, monkeypatch, clients=16)
    assert more.risk == pytest.approx(0.1) and more.looks == 2
    surer = found("fedgm-records", tmp_path, monkeypatch, clients=16, confidence=0.99)
    assert surer.risk == pytest.approx(0.1) and surer.looks == 2  # the same scores, judged more strictly


def test_scores_of_former_code_are_those_of_another_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repaired method would stay refuted, and a broken one sound."""
    source = tmp_path / "own_sums.py"
    source.write_text("from fedstill import AFL\n\n\nclass Own(AFL):\n    pass\n")
    name = f"{source}:Own"
    found(name, tmp_path / "out", monkeypatch, pilot=4, clients=8)
    found(name, tmp_path / "out", monkeypatch, pilot=4, clients=10)
    source.write_text(source.read_text() + "\n\nNOISE = 0.5\n")
    lookup.source_digests.cache_clear()  # as another process
    with pytest.raises(ValueError, match="scores of another audit"):
        found(name, tmp_path / "out", monkeypatch, pilot=4, clients=10)


@pytest.mark.slow
def test_the_command_prints_findings_and_fails_for_a_refuted_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(whole_runs, "_PILOT", 20)
    words = ["audit", "afl", "--clients", "8", "--out", str(tmp_path / "sound")]
    main([*words, "--json"])
    (row,) = json.loads(capsys.readouterr().out)["findings"]
    assert row["verdict"] == "not refuted" and row["clients"] == 8 and row["reach"] == pytest.approx(1, abs=1e-6)
    main(words)  # from the scores that are there
    said = capsys.readouterr().out
    assert "not refuted" in said and "hold with probability 0.95." in said
    main([*words[:3], "10", *words[4:]])
    said = capsys.readouterr().out
    assert "afl: extended after a look, judged 2 times" in said and "hold with probability 0.9." in said
    faults.half_the_noise(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        main([*words[:-1], str(tmp_path / "broken")])
    assert stop.value.code == 1 and "REFUTED" in capsys.readouterr().out


# --- planted faults


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "half the noise": ("fedgm-records", faults.half_the_noise, {"clients": 200}),
    "half the noise of heads": ("fedavg-p", faults.half_the_noise, {"clients": 100}),
    "noise for half the sensitivity": ("ldp-fedavg", faults.half_the_sensitivity, {}),
    "noise for half the sensitivity of heads": ("fedd-p", faults.half_the_sensitivity, {}),
    "the same noise for two releases": ("fedauxfdp", faults.shared_noise, {"pilot": 150}),
    "heads centred by the private mean": ("fedavg-p", faults.heads_centred, {}),
    "sums centred by the private mean": ("fedgm-records", faults.centred, {}),
    "clipping by the longest row": ("afl", faults.longest_row, {}),
    "a second release unaccounted": ("fedgm-records", faults.released_twice, {}),
    "class counts beside": ("fedgm-records", faults.counts_beside, {}),
    "a prior from private labels": ("fedgm-labels", faults.private_prior, {"epsilon": (0.2,), "clients": 240}),
    "a head's sensitivity without its root of two": ("fedavg-p", faults.without_the_root_of_two, {}),
    "a tenth of Lambda": ("fedavg-p", faults.a_tenth_of_lambda, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refuted(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, more = FAULTS[fault]
    plant(monkeypatch)
    finding = found(name, tmp_path, monkeypatch, **more)
    assert finding.refuted, finding
    assert math.isfinite(finding.largest)


DIFFERENCES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None] | None, str]] = {
    "features in train mode": ("afl", faults.train_mode, "a row depends on other records"),
    "a count called public": ("faults:Counts", None, "replies differ beside their releases"),
    "a loss called public": ("faults:Losses", None, "replies differ beside their releases"),
    "a private number in a released field": ("faults:Hidden", None, "replies differ beside their releases"),
    "a clip from raw records": ("faults:RawClip", None, "differ"),
    "half the noise of DP-SGD": ("dp-fl", faults.half_the_noise_of_training, "moves a release by 2 times"),
    "a rate from the number of records": ("faults:RawRate", None, "differ"),
    "a charge after the release": ("ldp-fedavg", faults.charged_late, "a release began before it was charged"),
    "a solver that stops early": ("fedavg-p", faults.stopped_early, "a head's solver stopped before its tolerance"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", DIFFERENCES)
def test_what_leaves_beside_releases_is_refuted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, sentence = DIFFERENCES[fault]
    monkeypatch.setattr(scenes, "OTHERS", 32)
    monkeypatch.setattr(scenes, "climb", lambda score, images, steps: images)
    made = scenes.scene(name, 4.0)
    if plant is not None:
        assert made.difference(0) == ""
        plant(monkeypatch)
    assert sentence in made.difference(0)
    finding = Finding("m", "record", 4.0, 1e-5, 0.0, None, None, 1, 8, 0.05, 1)
    assert not finding.refuted and replace(finding, difference=sentence).refuted
