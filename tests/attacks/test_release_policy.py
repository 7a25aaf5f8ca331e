"""``fedstill publish --gate``: what slips past a policy, tried one way after another."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.attacks import release_policy
from fedstill.attacks.lira import FPRS
from fedstill.attacks.membership import Membership, membership, place_of
from fedstill.attacks.release_policy import AskedGuarantee, GateClosed, pass_gate
from fedstill.cli import main
from fedstill.privacy.guarantee import Guarantee, no_guarantee
from fedstill.runs.folder import RunFolder

TASK = {"data": "digits", "clients": 2, "limit": 120, "model": "convnet:width=8,depth=2", "workers": 0}
PRIVATE = {"epsilon": 1.0, "clip": 3.0, "local": {"lr": 0.05, "epochs": 1}}
ASKED = '[guarantee]\nepsilon = 2.0\ndelta = 1e-5\nunit = "client"\nsimulated = true\n'
ATTACKED = "[attack]\nfpr = 0.01\ntpr = 0.9\nshadows = 4\n"


def policy(folder: Path, text: str) -> Path:
    place = folder / "release.toml"
    place.write_text(text)
    return place


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gate") / "private"
    fedstill.run("ldp-fedavg", **TASK, **PRIVATE, out=out)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gate") / "bare"
    fedstill.run("fedavg", **TASK, rounds=1, out=out)  # type: ignore[arg-type]
    return out


def refusal(run: Path, place: Path) -> str:
    with pytest.raises(ValueError) as caught:
        pass_gate(run, place)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "asks nothing"),
        ("format = 1\n", "asks nothing"),
        ("[guarantee]\n", "epsilon"),
        ('[guarantee]\nepsilon = 1.0\nunit = "record"\n', "delta"),
        ("[guarantee]\nepsilon = 1.0\ndelta = 1e-5\n", "unit"),
        ("[attack]\n", "fpr"),
        ("[attack]\nfpr = 0.01\n", "tpr"),
        ("[attack]\nfpr = 0.5\ntpr = 0.5\n", "0.001, 0.01"),
        (ASKED + "epsilom = 0.1\n", "epsilom"),
        (ASKED + "[atack]\nfpr = 0.01\n", "atack"),
        (ASKED.replace("2.0", "inf"), "finite"),
        (ASKED.replace("2.0", "nan"), "finite"),
        (ASKED.replace("2.0", "-1.0"), "greater than 0"),
        (ASKED.replace("2.0", "true"), "no truth value"),
        (ASKED.replace("2.0", '"2.0"'), "valid number"),
        (ASKED.replace("1e-5", "1.0"), "less than 1"),
        (ASKED.replace("simulated = true", 'simulated = "no"'), "valid boolean"),
        (ASKED.replace('"client"', '"patient"'), "'record'"),
        (ASKED.replace('"client"', '"group"'), "group names the column"),
        (ASKED + 'group = "patient"\n', "group names the column"),
        ("[guarantee", "can't be read as TOML"),
        ("format = 2\n" + ASKED, "newer"),
    ],
)
def test_a_wrong_policy_or_one_that_asks_nothing_is_refused(
    private: Path, tmp_path: Path, text: str, words: str
) -> None:
    assert words in refusal(private, policy(tmp_path, text))


def test_a_missing_policy_is_refused(private: Path, tmp_path: Path) -> None:
    assert "can't be read" in refusal(private, tmp_path / "none.toml")


def test_a_run_that_meets_it_is_published_and_the_card_says_so(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = policy(tmp_path, ASKED)
    main(["publish", str(private), "--gate", str(place), "--out", str(tmp_path / "out"), "--json"])
    told = json.loads(capsys.readouterr().out)["gate"]
    section = (tmp_path / "out" / "README.md").read_text().partition("## Policy")[2].partition("\nfedstill ")[0]
    assert "epsilon at most 2, delta at most 1e-05, per client" in section and "Found: eps 1.0" in section
    assert len(told) == 1 and told[0].startswith("Asked: epsilon at most 2")
    fedstill.publish(private, tmp_path / "plain")
    assert "## Policy" not in (tmp_path / "plain" / "README.md").read_text()


def test_a_closed_gate_leaves_no_file(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run without noise, from the command line and from Python."""
    place = policy(tmp_path, ASKED)
    with pytest.raises(SystemExit) as ended:
        main(["publish", str(bare), "--gate", str(place), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "the run has no guarantee" in said and "Traceback" not in said
    with pytest.raises(ValueError, match="nothing was published"):
        fedstill.publish(bare, tmp_path / "out", gate=place)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("2.0", "0.9"), "epsilon is 1.0, above 0.9"),
        (("1e-5", "1e-6"), "delta is 1e-5, above 1e-06"),
        (("simulated = true", ""), "noise came from the run's seed"),
        (('unit = "client"', 'unit = "group"\ngroup = "patient"'), "not per patient"),
    ],
)
def test_each_part_of_a_guarantee_that_falls_short_closes_it(
    private: Path, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    assert words in refusal(private, policy(tmp_path, ASKED.replace(*change)))


HELD = Guarantee(True, "record", "", 1.0, 1e-5, "", "", "", False)
RECORD = AskedGuarantee(epsilon=1.0, delta=1e-5, unit="record")
PATIENT = AskedGuarantee(epsilon=3.0, delta=1e-5, unit="group", group="patient")
OF_PATIENT = replace(HELD, group="patient", group_size=3, group_epsilon=3.0, group_delta=1e-5)


@pytest.mark.parametrize(
    ("asked", "found", "words"),
    [
        (RECORD, HELD, None),
        (RECORD, replace(HELD, unit="client"), None),
        (RECORD, replace(HELD, unit="label"), "per label, not per record"),
        (RECORD.model_copy(update={"unit": "client"}), HELD, "per record, not per client"),
        (RECORD.model_copy(update={"unit": "label"}), HELD, "per record, not per label"),
        (RECORD.model_copy(update={"unit": "client"}), replace(HELD, epsilon=0.0), "per record, not per client"),
        (RECORD.model_copy(update={"unit": "client"}), replace(HELD, epsilon=0.0, delta=0.0), None),
        (RECORD, no_guarantee("why", simulated=False), "no guarantee (why)"),
        (RECORD, replace(HELD, epsilon=float("inf")), "no guarantee"),
        (RECORD, replace(HELD, epsilon=1.0 + 1e-9), "above 1"),
        (RECORD, replace(HELD, delta=None), "delta is none"),
        (RECORD, replace(HELD, unchecked="Mine"), "rests on the word of Mine"),
        (RECORD, replace(HELD, unchecked="Mine", pairs=12), None),
        (RECORD.model_copy(update={"unchecked": True}), replace(HELD, unchecked="Mine"), None),
        (RECORD, replace(HELD, exposed=3), "3 records are exposed, above 0"),
        (RECORD.model_copy(update={"exposed": 3}), replace(HELD, exposed=3), None),
        (PATIENT, OF_PATIENT, None),
        (PATIENT, HELD, "not per patient"),
        (PATIENT, replace(HELD, unit="client"), "not per patient"),
        (PATIENT, replace(OF_PATIENT, group="ward"), "not per patient, but per ward"),
        (PATIENT, replace(OF_PATIENT, group_epsilon=None, group_delta=None), "epsilon is none"),
        (PATIENT, replace(OF_PATIENT, group_epsilon=3.1), "above 3"),
        (PATIENT, replace(OF_PATIENT, group_delta=1e-3), "delta is 1e-3"),
        (RECORD.model_copy(update={"alone_epsilon": 5.0}), replace(HELD, adders=4), "alone epsilon is none"),
        (RECORD.model_copy(update={"alone_epsilon": 5.0}), replace(HELD, adders=4, alone_epsilon=6.0), "above 5"),
        (RECORD.model_copy(update={"alone_epsilon": 5.0}), replace(HELD, adders=4, alone_epsilon=5.0), None),
        (RECORD.model_copy(update={"alone_epsilon": 5.0}), HELD, None),
    ],
)
def test_a_guarantee_of_another_kind_does_not_stand_for_what_is_asked(
    asked: AskedGuarantee, found: Guarantee, words: str | None
) -> None:
    missed = list(release_policy.misses(asked, found))
    assert missed == [] if words is None else words in "; ".join(missed)


def stored(folder: Path, client: int = 0, name: str = "membership", **changes: Any) -> Path:
    """An attack as `membership` stores it, of which some parts are changed; 400 records without any leak."""
    results = {
        "run": release_policy.identity(folder), "client": client, "records": 400, "members": 200, "shadows": 16,
        "guarantee": asdict(no_guarantee("", simulated=False)),
        "likelihood_ratio": rates_of(0.1),
    }  # fmt: skip
    place = place_of(folder, client)
    place.mkdir(parents=True, exist_ok=True)
    (place / "attack.json").write_text(json.dumps({name: results | changes}))
    return place / "attack.json"


def rates_of(high: float, refuted: bool | None = None, auc: float = 0.5) -> dict[str, Any]:
    rate = {"tpr": 0.0, "low": 0.0, "high": high, "fpr_high": 0.1, "bound": None, "refuted": refuted}
    return {"online": {"auc": auc, "auc_low": 0.0, "auc_high": 1.0, "rates": [{"fpr": fpr, **rate} for fpr in FPRS]}}


@pytest.fixture
def attacked(bare: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose attack folder a test may fill."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for place in bare.iterdir():
        if place.is_file():
            (copy / place.name).write_bytes(place.read_bytes())
    return copy


def test_an_attack_that_finds_nothing_opens_it(attacked: Path, tmp_path: Path) -> None:
    stored(attacked)
    (text,) = pass_gate(attacked, policy(tmp_path, ATTACKED))
    assert "client 0 (membership): a true positive rate of up to 10.0 %, AUC 0.500, 16 shadow runs" in text


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        (ATTACKED, {"run": "another"}, "of another run or model"),
        (ATTACKED, {"run": None}, "of another run or model"),
        (ATTACKED.replace("shadows = 4", ""), {"shadows": 4}, "has 4 shadow runs; at least 16"),
        (ATTACKED, {"records": 150, "members": 75}, "has 75 non-members"),
        (ATTACKED, {"likelihood_ratio": rates_of(0.95)}, "up to 95.0 %, above 90 %"),
        (ATTACKED, {"likelihood_ratio": rates_of(float("nan"))}, "above 90 %"),
        (ATTACKED + "auc = 0.6\n", {"likelihood_ratio": rates_of(0.1, auc=0.61)}, "AUC of 0.610, above 0.6"),
        (ATTACKED, {"likelihood_ratio": rates_of(0.1, refuted=True)}, "refutes the guarantee"),
        (ATTACKED, {"likelihood_ratio": {}}, "is damaged"),
        (ATTACKED, {"likelihood_ratio": {"online": {"auc": 0.5, "rates": []}}}, "is damaged"),
        (ATTACKED, {"likelihood_ratio": rates_of(None)}, "is damaged"),  # type: ignore[arg-type]
    ],
)
def test_an_attack_that_succeeds_or_proves_nothing_closes_it(
    attacked: Path, tmp_path: Path, asked: str, changes: dict[str, Any], words: str
) -> None:
    stored(attacked, **changes)
    assert words in refusal(attacked, policy(tmp_path, asked))


def test_one_attack_that_succeeds_is_not_hidden_by_others(attacked: Path, tmp_path: Path) -> None:
    stored(attacked, 0)
    stored(attacked, 1, "membership-rmia", likelihood_ratio=rates_of(1.0))
    assert "client 1 (membership-rmia) has a true positive rate" in refusal(attacked, policy(tmp_path, ATTACKED))


def _no_attack(run: Path) -> None:
    assert not RunFolder(run).attack.exists()


def _other_kind(run: Path) -> None:
    stored(run, name="uploads")


def _other_model(run: Path) -> None:
    stored(run)
    content = RunFolder(run).model.read_bytes()
    RunFolder(run).model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (_no_attack, "no membership attack"),
        (_other_kind, "no membership attack"),
        (_other_model, "another run or model"),
    ],
)
def test_no_attack_or_one_on_another_model_closes_it(
    attacked: Path, tmp_path: Path, done: Callable[[Path], None], words: str
) -> None:
    done(attacked)
    with pytest.raises(GateClosed, match=words):
        pass_gate(attacked, policy(tmp_path, ATTACKED))


def test_a_stored_attack_names_its_run(attacked: Path, tmp_path: Path) -> None:
    """The attack itself, and that its fields are those of the doubles above."""
    found = membership(attacked, Membership(shadows=4, client=0))
    assert found["run"] == release_policy.identity(attacked)
    double = json.loads(stored(second_copy(attacked, tmp_path)).read_text())["membership"]
    assert double.keys() <= found.keys()
    assert double["likelihood_ratio"]["online"].keys() == next(iter(found["likelihood_ratio"].values())).keys()
    assert "non-members, too few" in refusal(attacked, policy(tmp_path, ATTACKED))


def second_copy(run: Path, tmp_path: Path) -> Path:
    """A second copy, so that the double does not replace the attack."""
    copy = tmp_path / "second"
    copy.mkdir()
    for place in (RunFolder(run).summary, RunFolder(run).model):
        (copy / place.name).write_bytes(place.read_bytes())
    return copy
