"""``fedstill check``: methods of one's own on neighbours, broken ones by name, and where a pass is said."""

import re
from pathlib import Path
from typing import Any

import pytest
from method_settings import FACTS, PRIVATE, SMALL

from fedstill import methods
from fedstill.audits.own_methods import Checked, CheckSettings, check
from fedstill.base import lookup
from fedstill.cli import main
from fedstill.methods import find
from fedstill.report import guarantees
from fedstill.report.record import read_run

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_method.md"
ROWS = "        rows = client.train.pixels().flatten(1)\n"
SENT = "sums=sums.map(lambda total: total.float())"
DECLARED = '    sums: Released[Float32[Tensor, "classes pixels"]]\n'


def source() -> str:
    """The private method of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return next(block for block in blocks if "class ClassMeans(Method)" in block)


def planted(name: str) -> str:
    """The same with a fault, or with the other way to write it."""
    text = source()
    faults = {
        "means": ("", ""),
        "centred": (ROWS, f"{ROWS}        rows = rows - rows.mean(0)\n"),
        "one sign for all": (ROWS, f"{ROWS}        rows = rows * (1 if rows.sum() > 0 else -1)\n"),
        "from 300 records on": (ROWS, f"{ROWS}        rows = rows / rows.abs().max() if len(rows) > 300 else rows\n"),
        "a count by hand": (f"Sums({SENT})", f"Sums({SENT}, count=Released(torch.tensor([len(rows)])))"),
        "hundreds by hand": (f"Sums({SENT})", f"Sums({SENT}, count=Released(torch.tensor([len(rows) // 100])))"),
        "a small class hidden": (
            ROWS,
            f"{ROWS}        rows = rows * (client.train.labels.bincount()[client.train.labels] > 19)[:, None]\n",
        ),
        "a dark image doubles all": (ROWS, f"{ROWS}        rows = rows * (1 + (rows.mean(1) < 0.1).any())\n"),
        "twins halve all": (ROWS, f"{ROWS}        rows = rows / (1 + (len(rows.unique(dim=0)) < len(rows)))\n"),
        "a guard by the total": (ROWS, f"{ROWS}        rows = rows * (len(rows) > 9)\n"),
        "any order": (
            "client.release(mechanism, (rows, client.train.labels))",
            "client.release(mechanism, (rows[torch.randperm(len(rows), generator=client.rng('order'))], "
            "client.train.labels[torch.randperm(len(rows), generator=client.rng('order'))]))",
        ),
        "a mean that is kept": (ROWS, f"{ROWS}        rows = rows - KEPT.setdefault('mean', rows.mean(0))\n"),
        "a mean of many that is kept": (
            ROWS,
            f"{ROWS}        rows = rows - KEPT.setdefault('mean', rows.mean(0)) if len(rows) > 100 else rows\n",
        ),
        "the end of a second process": (ROWS, f"{ROWS}        KEPT or __import__('os')._exit(3)\n"),
        "a refusal by records": (ROWS, f"{ROWS}        assert len(rows) > 3, 'too few'\n"),
        "sixteen noises for one charge": (" ClassSums(", " Sixteen("),
        "a loop over batches": (ROWS, "        rows = torch.cat(outputs(client.new_model(), client.train)).double()\n"),
    }
    old, new = faults[name]
    assert old in text
    text = text.replace(old, new)
    if name in ("a count by hand", "hundreds by hand"):
        text = text.replace(DECLARED, f'{DECLARED}    count: Released[Int64[Tensor, "1"]]\n')
        text = text.replace("import Float32", "import Float32, Int64")
    if name == "sixteen noises for one charge":
        text += (
            "\n\nclass Sixteen(ClassSums):\n    def __call__(self, rows, noise):\n"
            "        return torch.stack([super(Sixteen, self).__call__(rows, noise) for _ in range(16)]).mean(0)\n"
        )
        text = text.replace("from torch import Tensor, nn\n", "import torch\nfrom torch import Tensor, nn\n")
    if name in ("a mean that is kept", "a mean of many that is kept"):
        text += "\n\nKEPT = {}\n"
    if name == "the end of a second process":
        text += "\n\nimport multiprocessing\n\nKEPT = multiprocessing.parent_process() is None\n"
    if name == "a loop over batches":
        text = text.replace("classes pixels", "classes logits")
        text = text.replace(
            "from torch import Tensor, nn\n",
            "from torch import Tensor, nn\n\nfrom fedstill.evaluation import outputs\n",
        )
    return text


def checked(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Checked:
    monkeypatch.chdir(folder)
    module = f"own_{abs(hash((name, str(folder))))}"
    (folder / f"{module}.py").write_text(planted(name))
    lookup.add_working_folder()
    given = {"model": "linear", "class_records": 0, **settings}
    return check(find(f"{module}:ClassMeans")(), CheckSettings(**given), lambda done, number: None)


def test_the_method_of_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked("means", tmp_path, monkeypatch, class_records=33)
    assert found.found == [] and found.pairs == 21 + 33 + 1 and not found.mixed
    assert found.guarantee.epsilon == pytest.approx(1.0, rel=0.01)


def test_rows_in_another_order_are_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked("any order", tmp_path, monkeypatch, records=(61,)).found == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("centred", "the first record of 61: a row depends on other records: row 1 of 61 moves with record 0"),
        ("from 300 records on", "an outlier of 2,051: a row depends on other records: row 0 of 2,051"),
        ("a count by hand", "replies differ beside their releases"),
        ("a refusal by records", "ends differently"),
        ("twins halve all", "a record that is there twice of 61: a row depends on other records: row 0 of 61 moves"),
        ("a guard by the total", "record 7 of a class: a row depends on other records: row 0 of 10 moves"),
        ("hundreds by hand", "all 2,051 records: replies differ beside their releases"),
        ("a small class hidden", "record 20 of a class: a row depends on other records: row 3 of 23"),
        ("a dark image doubles all", "a record of zeros of 61: a row depends on other records: row 0 of 61 moves"),
        ("a mean that is kept", "an outlier of 61, each in its own process: a row depends on other records: row 0 of"),
        ("a mean of many that is kept", "an outlier of 500, each in its own process: a row depends on other records"),
        (
            "sixteen noises for one charge",
            "of its class of 61: a record moves the 16 noisy values of a release together by 3.2 ",
        ),
    ],
)
def test_a_broken_method_is_named_with_its_record(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"shape": (4,)} if name in ("one sign for all", "from 300 records on") else {}
    if name in ("a refusal by records", "a mean of many that is kept"):
        shape = {"records": (500 if "many" in name else 4,)}
    if name in ("a small class hidden", "a guard by the total"):
        shape = {"records": (61,), "class_records": 22}
    found = checked(name, tmp_path, monkeypatch, **shape)
    assert any(sentence in one for one in found.found), found.found
    if name in ("from 300 records on", "hundreds by hand"):
        assert all("2,051" in one for one in found.found)


def test_a_method_that_ends_its_process_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the method ended the process that ran it; nothing of it can be compared"):
        checked("the end of a second process", tmp_path, monkeypatch, records=(4,))


def test_a_network_in_a_plain_loop_is_not_shown_to_be_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked("a loop over batches", tmp_path, monkeypatch, records=(61,)).mixed


def test_a_pass_stands_beside_the_epsilon_of_this_code_with_these_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "passing_means.py").write_text(source())
    name, model = "passing_means.py:ClassMeans", ["--model", "linear"]

    def words(*more: str) -> str:
        main(["run", name, "--data", "digits", "--limit", "100", "--clients", "2", *model, *more, "--workers", "0"])
        capsys.readouterr()
        return guarantees.words(read_run(more[-1]).guarantee)

    stated = ["--mean", "0.5", "--std", "0.25"]
    assert "if ClassMeans keeps records apart (unchecked)" in words(*stated, "--out", "first")
    main(["check", name, *model, "--records", "3", "61", "--class-records", "0"])
    assert "say so beside their epsilon" not in capsys.readouterr().out  # thousands are needed
    main(["check", name, *model, "--class-records", "3"])
    told = " ".join(capsys.readouterr().out.split())
    sizes = "3, 61 and 2,051 records, and of a class growing to 3,"
    assert f"on 25 pairs of data sets of {sizes} nothing but releases differs" in told
    assert "say so beside their epsilon" in told
    assert "keeps records apart (checked on 25 pairs)" in words(*stated, "--out", "second")
    assert "fedstill check found no other on 25 pairs of data sets, which is no proof" in " ".join(
        (tmp_path / "second" / "report.html").read_text().split()
    )
    assert "(unchecked)" in words(*stated, "--epsilon", "2", "--out", "third")


def test_the_command_says_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "centred_means.py").write_text(planted("centred"))
    with pytest.raises(SystemExit) as stop:
        main(["check", "centred_means.py:ClassMeans", "--model", "linear", "--records", "3", "--class-records", "0"])
    told = capsys.readouterr().out
    assert stop.value.code == 1 and "BROKEN: the first record of 3: a row depends on other records" in told
    assert "7 of 8 pairs differ beside releases; its epsilon does not hold" in told
    with pytest.raises(SystemExit) as stop:
        main(["audit", "centred_means.py:ClassMeans", "--epsilon", "1", "--clients", "8", "--out", "audits"])
    assert stop.value.code == 1 and "a row depends on other records" in capsys.readouterr().out
    for words, sentence in (
        (["fedavg"], "has no guarantee to check: field 'weights'"),
        (["ldp-fedavg"], "is for clients, whose rows may depend on each other"),
        (["dp-fl", "--records", "3", "--rounds", "1"], "trains on drawn batches"),
        (["--model", "linear"], "the method comes first: fedstill check mine.py:Mine --model linear"),
        (["nothing.py:Mine"], "there is no file nothing.py"),
        (["afl", "--records", "2"], "--records"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["check", *words])
        assert stop.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split()), words


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRIVATE, "fedgm-labels"])
def test_every_private_method_holds_at_thousands_of_records(name: str) -> None:
    """Where rules act that a hundred records never meet: parts of 2,000 rows, subsets, chunks."""
    settings = dict(PRIVATE.get(name, SMALL[name]))
    if "supposed_records" in str(settings):  # every record in every batch
        settings["local"] = {**settings["local"], "batch_size": 4096, "supposed_records": 4096}
    if name in ("ldp-fedavg", "dp-fedavg"):
        pytest.skip("its guarantee is for clients")
    model = FACTS.get(name, {}).get("model", "convnet:width=8,depth=1")
    found = check(
        methods.find(name)(**settings),
        CheckSettings(model=model, records=(2051,), class_records=0, budget=50.0),
        _quiet,
    )
    assert found.found == [] and found.pairs == 8
    assert found.mixed == (name in ("fedcgs-p", "fedrd-records"))  # their clients' own models, which never leave


def _quiet(done: int, number: int) -> None:
    """A check without progress."""
