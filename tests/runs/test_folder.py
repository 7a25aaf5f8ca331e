"""A run's folder: files come back as they were written, and damage is named with its remedy."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill
from fedstill import read_run
from fedstill.base.files import Damaged, NewerFormat
from fedstill.base.records import Normalisation, Records
from fedstill.runs.folder import RunFolder
from fedstill.runs.listing import entry

SUMMARY = {
    "method": "fedgm",
    "label": "fedgm",
    "data": "digits",
    "partition": "iid",
    "clients": 2,
    "rounds": 1,
    "seed": 0,
    "accuracy": 0.9,
    "bytes_up": 2,
    "bytes_down": 6,
    "bytes_up_per_client": 1,
    "bytes_down_per_client": 3,
    "seconds": 1.5,
    "guarantee": {
        "holds": True,
        "unit": "record",
        "adjacency": "one record",
        "epsilon": 1.0,
        "delta": 1e-5,
        "adversary": "the server",
        "accountant": "PLD",
        "reason": "",
        "simulated": False,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_files_come_back_as_they_were_written(folder: RunFolder) -> None:
    folder.path.mkdir()
    assert folder.asked_sites and folder.read_partition(2) == ((), None) and folder.read_evaluation(None) is None
    counts = np.array([[1, 2, 3], [4, 5, 6]])
    folder.write_partition(("a", "b", "c"), counts, {})
    by_value = {"column": "hospital", "cells": {"Nord": [[0, 0, 1]], "Süd": [[1, 1, 1], [2, 2, 1]]}}
    folder.write_evaluation(torch.eye(3, dtype=torch.int64), by_value)
    folder.write_model({"w": torch.arange(3.0)}, {"model": "linear"})
    images = Records(torch.full((2, 1, 4, 4), 7, dtype=torch.uint8), torch.tensor([0, 2]), 3, Normalisation((0,), (1,)))
    folder.write_images("real", images)
    names, read = folder.read_partition(2)
    assert names == ("a", "b", "c") and np.array_equal(read, counts) and not folder.asked_sites
    assert np.array_equal(folder.read_evaluation(3), np.eye(3))
    found = folder.read_by_value()
    assert found is not None and found.column == "hospital" and found.cells["Süd"] == ((1, 1, 1), (2, 2, 1))
    weights, header = folder.read_model(lambda weights, header: (weights, header))
    assert torch.equal(weights["w"], torch.arange(3.0)) and header["model"] == "linear"
    ((name, (pixels, labels)),) = folder.read_images().items()
    assert name == "real" and (pixels == 7).all() and labels.tolist() == [0, 2]


def test_a_run_with_real_sites_has_its_class_names_where_it_was_judged(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.write_evaluation(torch.eye(2, dtype=torch.int64), None, class_names=("alive", "died"))
    assert folder.asked_sites and folder.read_partition(2) == (("alive", "died"), None)
    folder.write_evaluation(torch.eye(2, dtype=torch.int64), None, class_names=("alive", "died", "unknown"))
    with pytest.raises(Damaged, match="it has 3 names of 2 classes"):
        folder.read_partition(2)
    folder.write_evaluation(torch.eye(2, dtype=torch.int64), None)  # an early version's
    assert folder.read_partition(2) == ((), None)


def test_lines_of_rounds_after_a_checkpoint_go_and_two_of_one_round_are_merged(folder: RunFolder) -> None:
    folder.path.mkdir()
    for round, name in ((1, "accuracy"), (1, "loss"), (2, "accuracy"), (3, "accuracy")):
        folder.append_metrics({"round": round, name: round / 10})
    folder.drop_metrics_after(2)
    first, second = folder.read_metrics()
    assert (first["accuracy"], first["loss"], second["accuracy"]) == (0.1, 0.1, 0.2)
    folder.metrics.write_text('{"accuracy": 1}\n')
    with pytest.raises(Damaged, match="a line has no round"):
        folder.drop_metrics_after(2)


def test_the_rounds_of_a_finished_run_are_those_that_it_logged(folder: RunFolder) -> None:
    """A last line that a crash left unfinished is passed over in a run that goes on; a finished one has lost it."""
    folder.path.mkdir()
    folder.config.write_text("{}")
    folder.append_metrics({"round": 2, "accuracy": 0.5})  # of three rounds: a method may log those that it likes
    folder.write_summary(SUMMARY | {"rounds": 3, "files": folder.digests()})
    folder.check_results(folder.metrics)
    with folder.metrics.open("a") as file:
        file.write('{"round": 3, "accu')
    assert [line["round"] for line in folder.read_metrics()] == [2]
    for damage in (lambda: None, folder.metrics.unlink):
        damage()
        with pytest.raises(Damaged, match=r"metrics.jsonl is missing, or not the file that .* is of"):
            folder.check_results(folder.metrics)
    folder.write_summary(SUMMARY | {"files": {"model.safetensors": "0" * 64}})  # of an early version
    folder.check_results(folder.metrics)


@pytest.mark.parametrize(
    ("name", "read"),
    [(name, f"read_{name}") for name in ("config", "summary", "partition", "metrics", "evaluation", "model")],
)
def test_damage_is_named_with_file_and_remedy(name: str, read: str, folder: RunFolder) -> None:
    folder.path.mkdir()
    file: Path = getattr(folder, name)
    arguments = {"read_partition": (2,), "read_evaluation": (2,), "read_model": (dict,)}.get(read, ())
    for content in ("[1]\n", '{"round": []}\n', "{\n"):
        file.write_text(content)
        with pytest.raises(Damaged) as caught:
            getattr(folder, read)(*arguments)
        sentence = str(caught.value)
        assert sentence.startswith(f"{file} is damaged (") and "\n" not in sentence
        assert sentence.endswith(f"; delete {folder.path} and run again")


def test_only_a_folder_with_results_is_a_finished_run(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        folder.check_finished()
    folder.path.mkdir()
    with pytest.raises(ValueError, match="is not the folder of a run; give a folder written by"):
        folder.check_finished()
    folder.journal.mkdir()  # a run that was killed early
    with pytest.raises(ValueError, match=r"is not a finished run \(config.json is missing\); repeat its command"):
        folder.check_finished()
    folder.write_config({"experiment": {}, "method": {}, "label": "x"})
    assert not folder.is_finished
    folder.write_summary(SUMMARY)
    folder.check_finished()
    assert folder.is_finished


def test_a_locked_folder_keeps_others_out_and_its_lock_is_no_stranger(folder: RunFolder) -> None:
    with folder.locked():
        assert folder.stranger() is None
        with pytest.raises(ValueError, match="another process is writing"), RunFolder(folder.path).locked():
            pass
        (folder.path / ".config.json.9.part").write_text("half")
        assert folder.stranger() is None
        (folder.path / "thesis.tex").write_text("precious")
        assert folder.stranger() == "thesis.tex"
    with RunFolder(folder.path).locked():
        pass


@pytest.mark.slow
def test_pictures_that_unpack_to_gigabytes_are_not_unpacked(tmp_path: Path) -> None:
    place = tmp_path / "images" / "real.npz"
    place.parent.mkdir()
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as packed, packed.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (300, 1, 1024, 1024)}
        )
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert place.stat().st_size < 10**6
    with pytest.raises(ValueError, match="it unpacks to more than 256 MiB"):
        RunFolder(tmp_path).read_images()


def wrote(folder: RunFolder, version: str, **changes: object) -> None:
    """A run of some version, with changes of its summary."""
    folder.write_config({"experiment": {}, "method": {}, "label": "x", "version": version})
    folder.summary.write_text(json.dumps({**SUMMARY, "version": version, **changes}))


def test_a_folder_of_a_newer_format_is_neither_damaged_nor_to_be_deleted(folder: RunFolder) -> None:
    for file, read in ((folder.config, folder.read_config), (folder.summary, folder.read_summary)):
        wrote(folder, "1.1.0")
        read()
        content = json.loads(file.read_text())
        for more in ({}, {"label": ["a", "b"], "method": 3}):
            file.write_text(json.dumps({**content, **more, "format": 2}))
            with pytest.raises(NewerFormat) as refused:
                read()
            remedy = "this fedstill reads formats up to 1, so install fedstill 1.1.0 or a newer one"
            assert str(refused.value) == f"{file} has the format 2; {remedy}"
    assert entry(folder.path).state == "newer"
    with pytest.raises(ValueError, match="has the format 2") as told:
        read_run(folder.path)
    assert "delete" not in str(told.value) and "damaged" not in str(told.value)


def test_a_value_of_a_newer_version_is_no_damage(folder: RunFolder) -> None:
    wrote(folder, "1.1.0", guarantee={**SUMMARY["guarantee"], "unit": "group"})  # type: ignore[dict-item]
    folder.partition.write_text("{}")
    for read in (folder.read_summary, lambda: folder.read_partition(2)):
        with pytest.raises(NewerFormat, match=r"was written by fedstill 1.1.0, .*; install fedstill 1.1.0 or") as told:
            read()
        assert "delete" not in str(told.value) and "damaged" not in str(told.value)
    for version in ("0.0.9", fedstill.__version__, "x", None):
        wrote(folder, version, guarantee={"unit": "group"})  # type: ignore[arg-type]
        with pytest.raises(Damaged, match="is damaged .*; delete"):
            folder.read_summary()


@pytest.mark.parametrize("number", [0, -1, "2", None, True, 1.5])
def test_a_format_is_a_number_from_1(number: object, folder: RunFolder) -> None:
    wrote(folder, "0.1.0")
    assert json.loads(folder.config.read_text())["format"] == 1
    folder.config.write_text(json.dumps({**json.loads(folder.config.read_text()), "format": number}))
    with pytest.raises(Damaged, match="it must be a number from 1 to 1"):
        folder.read_config()
