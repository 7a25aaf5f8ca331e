"""What is made of runs and methods from Python: evaluations, sweeps, attacks, audits, plans; and typed settings."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_backbones
import torch
import typed_settings
from PIL import Image

import fedstill
from fedstill import InputError, RunRecord
from fedstill.audits import whole_runs
from fedstill.cli import main

LINEAR = {"model": "linear", "clients": 2, "workers": 0, "rounds": 2, "local": {"lr": 0.5}}


def table(seed: int, n: int = 200) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.normal(size=(n, 3)), columns=["age", "lactate", "creatinine"])
    frame["died"] = np.where(frame["age"] + frame["lactate"] > 0, "yes", "no")
    return frame


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return fedstill.run("fedavg", data=(table(0), "died"), out=tmp_path_factory.mktemp("runs") / "first", **LINEAR)


@pytest.mark.parametrize("form", ["pair", "frame", "parquet", "other order"])
def test_a_model_is_evaluated_on_new_records_by_name(form: str, patients: RunRecord, tmp_path: Path) -> None:
    new = table(1)
    predicted = patients.load_model().predict(new)
    right = int((predicted == new["died"]).sum())
    data, label = (new, "died"), None
    if form == "frame":
        data, label = new, "died"  # type: ignore[assignment]
    elif form == "parquet":
        new.to_parquet(tmp_path / "new.parquet")
        data, label = tmp_path / "new.parquet", "died"  # type: ignore[assignment]
    elif form == "other order":
        data = new[["creatinine", "died", "age", "lactate"]], "died"
    found = fedstill.evaluate(patients, data, label_column=label)
    assert found.records == 200 and found.accuracy == pytest.approx(right / 200)
    assert found.class_names == ("no", "yes")
    for name, recall in found.recalls.items():
        mine = new["died"] == name
        assert recall == pytest.approx(float((predicted[mine] == name).mean()))
    low, high = found.interval
    assert low < found.accuracy < high and found.balanced_accuracy == pytest.approx(np.mean([*found.recalls.values()]))


def test_pictures_are_evaluated_as_they_were_learnt(tmp_path: Path) -> None:
    record = fedstill.run("fedavg", data="digits", model="convnet:width=8,depth=2", clients=2, rounds=2, workers=0)
    digits = fedstill.load_data("digits")
    expected = record.accuracy
    assert fedstill.evaluate(record, digits).accuracy == expected == fedstill.evaluate(record, "digits").accuracy
    pair = digits.test.images, digits.test.labels
    assert fedstill.evaluate(record.load_model(), pair).accuracy == expected
    for i, (image, label) in enumerate(zip(*pair, strict=True)):
        place = tmp_path / "pictures" / "test" / str(int(label)) / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place)
    train = tmp_path / "pictures" / "train" / "0" / "x.png"
    train.parent.mkdir(parents=True)
    Image.fromarray(digits.train.images[0, 0].numpy()).save(train)
    assert fedstill.evaluate(record, tmp_path / "pictures").accuracy == expected


@pytest.mark.parametrize("how", ["the model's network", "a backbone"])
def test_pictures_of_another_size_are_resized_and_said_or_refused(how: str, tmp_path: Path) -> None:
    """A hospital's pictures at their own size are judged at the run's, as its network has learnt no other."""
    own = {"model": "convnet:width=8,depth=2"} if how != "a backbone" else {"model": "linear", "features": "scattering"}
    task = {"clients": 2, "limit": 600, "rounds": 3, "workers": 0, "std": 0.25, "mean": 0.5}
    record = fedstill.run("fedavg", data="digits", out=tmp_path / "run", **own, **task)  # type: ignore[arg-type]
    digits = fedstill.load_data("digits").test
    for i, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        picture = Image.fromarray(image[0].numpy())
        forms = {"own": picture, "coloured": picture.convert("RGB")}
        forms["large"] = picture.resize((16, 16), Image.Resampling.NEAREST)
        forms["deep"] = Image.fromarray(image[0].numpy().astype(np.uint16) * 257)
        for name, some in forms.items():
            place = tmp_path / name / str(int(label)) / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            some.save(place)
    same, large = (fedstill.evaluate(record, tmp_path / name) for name in ("own", "large"))
    assert same.accuracy == record.accuracy and not any("resized" in one for one in same.told)
    assert large.accuracy == pytest.approx(record.accuracy, abs=0.08)
    assert "pictures were cropped and resized to 8 x 8, the size of the run's" in large.told
    deep = fedstill.evaluate(record, tmp_path / "deep")
    assert deep.accuracy == record.accuracy
    assert any(one.startswith("pictures were read as --size 8 reads them, since ") for one in deep.told), deep.told
    assert fedstill.evaluate(record, tmp_path / "coloured").accuracy == record.accuracy  # all three colours are equal
    Image.new("RGB", (8, 8), "red").save(tmp_path / "coloured" / "0" / "red.png")
    with pytest.raises(InputError, match=r"1 of 360 pictures are in colour, but the model takes gray ones"):
        fedstill.evaluate(record, tmp_path / "coloured")
    model = record.load_model()
    for shape in ((2, 1, 16, 16), (2, 3, 8, 8)):
        with pytest.raises(InputError, match=r"this model takes \(n, 1, 8, 8\)"):
            model(torch.zeros(shape, dtype=torch.uint8))
    assert model(torch.zeros(0, 1, 8, 8, dtype=torch.uint8)).shape == (0, 10)


@pytest.mark.slow
def test_a_model_of_texts_takes_lists_of_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    encoder = str(tiny_backbones.save_texts(tmp_path / "encoder"))
    texts = pd.DataFrame({"text": [f"{word} of it {i % 7}" for i in range(60) for word in ("good", "bad")]})
    texts["label"] = ["a", "b"] * 60
    texts.to_csv(tmp_path / "texts.csv", index=False)
    task = {"features": f"hf:{encoder}", "model": "linear", "clients": 2, "workers": 0, "out": tmp_path / "run"}
    record = fedstill.run("fedavg", data=str(tmp_path / "texts.csv"), rounds=1, **task)  # type: ignore[arg-type]
    model = record.load_model()
    assert model(["good"]).shape == (1, 2) and model([]).shape == (0, 2)
    with pytest.raises(InputError, match=r"a text alone is no list of texts; put it into one: \[text\]"):
        model("good")
    with pytest.raises(InputError, match=r"a text alone is no list of texts; put it into one: \[text\]"):
        model.predict_proba("good")
    expected = model.predict_proba(["good", "bad of it"])
    for given in (np.array(["good", "bad of it"]), pd.Series(["good", "bad of it"])):
        assert np.array_equal(model.predict_proba(given), expected)
    with pytest.raises(InputError, match="record 1 is NoneType, and a text is a str"):
        model(["good", None])
    texts.assign(age=[20 + i % 9 for i in range(120)]).to_csv(tmp_path / "ages.csv", index=False)
    with pytest.raises(InputError, match="takes texts, but the records are numbers; a table's texts are taken if"):
        fedstill.evaluate(record, tmp_path / "ages.csv")
    with pytest.raises(InputError, match="takes texts, but the records are numbers; a table's texts are taken if"):
        fedstill.run("fedavg", data=str(tmp_path / "ages.csv"), **{**task, "out": tmp_path / "b"})  # type: ignore[arg-type]


def test_the_records_of_the_run_are_judged_by_those_held_out(tmp_path: Path) -> None:
    table(0).rename(columns={"died": "label"}).to_parquet(tmp_path / "own.parquet")
    run = fedstill.run("fedavg", data=tmp_path / "own.parquet", out=tmp_path / "run", **LINEAR)
    found = fedstill.evaluate(run, tmp_path / "own.parquet")
    assert found.records == 40 and found.accuracy == run.accuracy


def test_what_does_not_fit_the_model_is_refused(patients: RunRecord) -> None:
    other = table(1).replace({"died": {"yes": "dead"}})
    with pytest.raises(InputError, match="the class 'dead', but the model's classes are no, yes"):
        fedstill.evaluate(patients, (other, "died"))
    with pytest.raises(
        InputError, match="lack the column 'lactate', with numbers; the model takes age, lactate, creatinine"
    ):
        fedstill.evaluate(patients, (table(1).drop(columns="lactate"), "died"))
    numbered = table(1).assign(died=lambda f: (f["died"] == "yes").astype(int))
    with pytest.raises(InputError, match="the class '[01]', but the model's classes are no, yes"):
        fedstill.evaluate(patients, (numbered, "died"))
    with pytest.raises(InputError, match="0 records"):
        fedstill.evaluate(patients, (table(1)[:0], "died"))


def test_a_sweep_from_python_is_that_of_the_command_line(tmp_path: Path) -> None:
    plan = {
        "data": "digits",
        "limit": 200,
        "model": "linear",
        "clients": 2,
        "methods": {"fedavg": {"rounds": 1, "try": {"local.lr": [0.001, 0.5]}}, "real": {"ipc": 2}},
    }
    rows = fedstill.sweep(plan, out=tmp_path / "sweep", parallel=1, progress=False)
    by_label = {row["label"]: row for row in rows}
    assert by_label["fedavg"]["best"] == {"local.lr": 0.5} and by_label["fedavg"]["tries"] == 2
    assert by_label["fedavg"]["test"] is None and (tmp_path / "sweep" / "report.html").exists()
    with pytest.raises(InputError, match="the plan: it needs 'methods'"):
        fedstill.sweep({"data": "digits"}, out=tmp_path / "none")
    with pytest.raises(InputError, match="the plan: .*limmit is not a setting here"):
        fedstill.sweep({**plan, "limmit": 3}, out=tmp_path / "none")


def test_attacks_from_python_take_data_that_were_given_as_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fedstill.from_torch(*[(s.images, s.labels) for s in (fedstill.load_data("digits").train[:300],) * 2])
    run = fedstill.run("fedavg", data=data, out=tmp_path / "run", keep_replies=True, **LINEAR)
    found = fedstill.attack(run, shadows=4, data=data, progress=False)
    assert "world" not in capsys.readouterr().err
    assert found["shadows"] == 4 and (tmp_path / "run" / "attack" / "client-00000" / "attack.json").exists()
    uploads = fedstill.attack(tmp_path / "run", "uploads", data=data, progress=False)
    assert uploads["records_known"] == 300
    with pytest.raises(InputError, match="there is no attack 'nothing'"):
        fedstill.attack(run, "nothing")
    with pytest.raises(InputError, match="shadows is 3; it must be an even number"):
        fedstill.attack(run, shadows=3)


def test_an_audit_from_python_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_runs, "_PILOT", 16)
    found = fedstill.audit("fedgm-labels", epsilon=1.0, clients=16, out=tmp_path, progress=False)
    assert [one.method for one in found] == ["fedgm-labels"] and found[0].claim == pytest.approx(1.0, rel=0.01)
    assert found[0].clients == 16 and not found[0].refuted

    class Own(fedstill.FedAvgP):
        """A class that no other process can import."""

    with pytest.raises(InputError, match="Own.*cannot be loaded.*name a class in a file"):
        fedstill.audit(Own, out=tmp_path)


def test_a_plan_from_python_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["privacy", "plan", "--epsilon", "1", "--records", "500", "--json"])
    assert fedstill.plan(epsilon=1.0, records=500) == json.loads(capsys.readouterr().out)
    with pytest.raises(InputError, match="epsilonn is not a setting here; did you mean epsilon"):
        fedstill.plan(epsilonn=(1.0,))  # type: ignore[call-arg]


def test_one_number_stands_for_a_list_of_one() -> None:
    found = fedstill.Experiment(mean=0.3, std=0.25)  # type: ignore[arg-type]
    assert (found.mean, found.std) == ((0.3,), (0.25,))
    with pytest.raises(ValueError, match="mean"):
        fedstill.Experiment(mean=True)  # type: ignore[arg-type]


def test_the_types_of_settings_are_those_of_their_classes() -> None:
    assert typed_settings.FILE.read_text() == typed_settings.content(), "python tests/support/typed_settings.py"


def test_mypy_is_asked_about_misspelt_settings() -> None:
    """Each is an error: ``make lint`` fails for a comment in the file that ignores none."""
    asked = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["mypy"]
    assert asked["strict"] and "tests/support/misspelt.py" in asked["files"]


def test_what_is_judged_is_said_however_the_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records of a copy would have those that the run trained on, and its first record is not the file's."""
    own = table(0).rename(columns={"died": "label"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    own.to_parquet("t/own.parquet")
    run = fedstill.run("fedavg", data="t/own.parquet", out=tmp_path / "run", **LINEAR)
    monkeypatch.chdir(tmp_path / "t")
    found = fedstill.evaluate(run, "own.parquet")
    assert found.records == 40 and found.told[0] == "judged are the 40 records that were held out, of 200"
    found.save(tmp_path / "part.csv")
    assert [*pd.read_csv(tmp_path / "part.csv")] == ["true", "predicted", "probability of no", "probability of yes"]
    own.sample(frac=1, random_state=0).to_parquet("copy.parquet")
    copy = fedstill.evaluate(run, "copy.parquet")
    words = "160 of 200 records have the values of a train record of the run's data"
    assert copy.records == 200 and any(words in one for one in copy.told) and copy.whole
    new = table(1).rename(columns={"died": "label"})
    assert not any("train record" in one for one in fedstill.evaluate(run, new).told)
    (tmp_path / "else" / "t").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "else")
    own.to_parquet("t/own.parquet")  # of the run's relative name, in another folder
    assert any(words in one for one in fedstill.evaluate(run, "t/own.parquet").told)
    monkeypatch.chdir(tmp_path / "t")
    new.to_parquet("own.parquet")
    changed = fedstill.evaluate(run, "own.parquet")
    assert changed.records == 200 and "has other records now than the run was made of" in changed.told[0]
    assert "is unknown, as its own are in no place here" in fedstill.evaluate(run, (new, "label")).told[-1]
    changed.save(tmp_path / "whole.csv")
    saved = pd.read_csv(tmp_path / "whole.csv")
    assert saved["record"].tolist() == [*range(200)] and saved["true"].tolist() == new["label"].tolist()
