"""Files of a finished run that are lost or another run's, and replies that several runs use: said, and counted once."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstill
from fedstill.base.files import Damaged
from fedstill.cli import main
from fedstill.experiment import reuse
from fedstill.report import spending
from fedstill.report.record import read_run
from fedstill.runs.folder import RunFolder

PRIVATE: dict[str, Any] = {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 8}}
REFUSED = """
from fedstill.methods import afl
from fedstill.protocol import Client, step


class BadAFL(afl.AFL):
    \"\"\"AFL whose client 2 sends a reply that the server refuses.\"\"\"

    @step
    def sum_up(self, client: Client, features: afl.PublicFeatures) -> afl.Sums:
        \"\"\"As there.\"\"\"
        reply = afl.AFL.sum_up.function(self, client, features)
        return afl.Sums(second=reply.second[:-1], first=reply.first) if client.id == 2 else reply
"""
TASK: dict[str, Any] = {"data": "digits", "limit": 300, "model": "linear", "clients": 3, "workers": 0}
FLAGS = "--data digits --limit 300 --model linear --clients 3 --workers 0 --quiet".split()
AFL = [*FLAGS, *"--public noise=200 --epsilon 1 --extractor.pretrain none --space.dims 8 --noise entropy".split()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two private runs with other seeds and other noise."""
    folder = tmp_path_factory.mktemp("made")
    for seed in (0, 1):
        own = {**TASK, **PRIVATE, "seed": seed, "epsilon": 1.0 + seed}
        fedstill.run("afl", out=folder / str(seed), public="noise=200", noise="entropy", **own)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "0", tmp_path / "run")


def told(runs: list[Path]) -> list[str]:
    return spending.sums([read_run(run) for run in runs])


@pytest.mark.parametrize("name", ["model.safetensors", "evaluation.json", "journal/spent.jsonl"])
def test_a_file_of_another_run_is_refused_by_whoever_reads_it(name: str, made: Path, run: Path, tmp_path: Path) -> None:
    """A card had the accuracy of one model and the weights of another; a lost ledger said that nothing was released."""
    read = {
        "model.safetensors": lambda: fedstill.publish(run, tmp_path / "card"),
        "evaluation.json": lambda: read_run(run),
        "journal/spent.jsonl": lambda: spending.numbers(run),
    }[name]
    again = lambda: fedstill.run("afl", out=run, public="noise=200", noise="entropy", **TASK, **PRIVATE)  # noqa: E731
    read()
    shutil.rmtree(tmp_path / "card", ignore_errors=True)
    shutil.copy(made / "1" / name, run / name)
    for call in (read, again):
        with pytest.raises(Damaged, match="is missing, or not the file that .*summary.json is of"):
            call()
    (run / name).unlink()
    for call in (read, again):
        with pytest.raises(Damaged, match="is missing, or not the file that .*summary.json is of"):
            call()
    shutil.copy(made / "0" / name, run / name)
    read()


def test_replies_that_several_runs_use_are_counted_once(run: Path, tmp_path: Path) -> None:
    without, other, both = (tmp_path / name for name in ("without", "other", "both"))
    main(["run", "--without", "1", str(run), "--out", str(without), "--quiet"])
    main(["run", "--replies", str(run), "afl", "--ridge", "3", "--out", str(other), "--quiet"])
    main(["run", "--without", "0", str(other), "--out", str(both), "--quiet"])
    assert told([run, without, other, both]) == []  # one release of each client
    second = tmp_path / "second"
    main(["run", "afl", *AFL, "--out", str(second)])
    (sentence,) = told([run, without, other, both, second])
    assert "Whoever sees all 2 runs of these records has an epsilon of up to 2.0" in sentence


def test_methods_of_a_comparison_that_share_replies_release_once(tmp_path: Path) -> None:
    own = "epsilon 1 extractor.pretrain none space.dims 8".split()
    pairs = [(label, name, value) for label in ("afl", "x") for name, value in zip(own[::2], own[1::2], strict=True)]
    words = [*FLAGS, *(word for label, name, value in pairs for word in (f"--{label}.{name}", value))]
    words += "--public noise=200 --noise entropy --x.ridge 3".split()
    main(["compare", "afl", "x=afl", *words, "--out", str(tmp_path / "both")])
    runs = fedstill.find_runs(tmp_path / "both")
    assert len(runs) == 2 and told(runs) == []


def test_clients_that_are_asked_again_release_again(tmp_path: Path) -> None:
    """A client whose reply was refused is asked by each run that takes the replies of the others."""
    (tmp_path / "mine.py").write_text(REFUSED)
    flags = "--each.epsilon 1 --each.extractor.pretrain none --each.space.dims 8 --min-clients 2 --b.ridge 3".split()
    words = [*FLAGS, *"--public noise=200 --noise entropy".split(), *flags, "--out", str(tmp_path / "both")]
    kind = f"{tmp_path / 'mine.py'}:BadAFL"
    main(["compare", f"a={kind}", f"b={kind}", *words])
    (sentence,) = told(fedstill.find_runs(tmp_path / "both"))
    assert "all 2 runs of these records has an epsilon of up to 2.0" in sentence


def test_copies_of_an_interrupted_run_release_twice(run: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "environment.jsonl", "partition.json"):
            shutil.copy(run / file, tmp_path / name)
        main(["run", "afl", *AFL, "--out", str(tmp_path / name)])
    (sentence,) = told([tmp_path / "first", tmp_path / "second"])
    assert "all 2 runs of these records has an epsilon of up to 2.0" in sentence


def test_extensions_of_one_run_ask_its_late_client_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late, one, two, other = (tmp_path / name for name in ("late", "one", "two", "other"))
    main(["run", "afl", *AFL, "--slow", "0.34", "--min-clients", "2", "--out", str(late)])
    for out in (one, two):
        main(["run", "--extend", str(late), "--out", str(out), "--quiet"])
    (sentence,) = told([one, two])
    assert "all 2 runs of these records has an epsilon of up to 2.0" in sentence
    assert told([late, one]) == []  # what the late run has, the extension has
    words = ["run", "--replies", str(one), "afl", "--ridge", "3", "--out", str(other), "--quiet"]
    main(words)
    shutil.rmtree(one)
    main(["run", "--extend", str(late), "--out", str(one), "--quiet"])
    with pytest.raises(SystemExit):
        main(words)
    assert "has replies of an earlier run in" in capsys.readouterr().err


def test_releases_that_are_lost_leave_no_epsilon_out(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two extensions released anew; one that lost the lines of it counted as having what the other has."""
    late, one, two = (tmp_path / name for name in ("late", "one", "two"))
    main(["run", "afl", *AFL, "--slow", "0.67", "--min-clients", "1", "--out", str(late)])
    for out in (one, two):
        main(["run", "--extend", str(late), "--out", str(out), "--quiet"])
    (two / "journal" / "spent.jsonl").write_bytes((late / "journal" / "spent.jsonl").read_bytes())
    (tmp_path / "gate.toml").write_text('[guarantee]\nepsilon = 9.0\ndelta = 1e-5\nunit = "record"\nexposed = 1000\n')
    gate = ["publish", str(two), "--gate", str(tmp_path / "gate.toml"), "--out", str(tmp_path / "card")]
    for words in (["report", str(one), str(two), "--out", str(tmp_path / "report")], gate):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "spent.jsonl is missing, or not the file that" in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_the_epochs_of_a_run_whose_replies_it_has_are_not_taken(tmp_path: Path) -> None:
    """A model "without client 1" was to the bit the one with it."""
    base, true, copied = (tmp_path / name for name in ("base", "true", "copied"))
    main(["run", "feddf", *FLAGS, "--public", "noise=50", "--out", str(base)])
    main(["run", "--without", "1", str(base), "--out", str(true), "--quiet"])
    shutil.copytree(true, copied)
    for name in ("summary.json", "model.safetensors", "metrics.jsonl", "evaluation.json", "journal/checkpoint"):
        (copied / name).unlink(missing_ok=True)
    again = shutil.copytree(copied, tmp_path / "again")
    shutil.copy(base / "journal" / "epochs", copied / "journal" / "epochs")
    with pytest.raises(SystemExit):
        main(["run", "--without", "1", str(base), "--out", str(copied), "--quiet"])
    main(["run", "--without", "1", str(base), "--out", str(again), "--quiet"])
    models = [(run / "model.safetensors").read_bytes() for run in (true, again)]
    assert models[0] == models[1]


def test_a_run_that_was_made_anew_has_other_replies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = tmp_path / "run", ["--without", "1", str(tmp_path / "run"), "--out", str(tmp_path / "w"), "--quiet"]
    main(["run", "afl", *AFL, "--out", str(run)])
    main(["run", *words])
    main(["run", *words])  # it is finished; nothing to do
    shutil.rmtree(run)
    main(["run", "afl", *AFL, "--out", str(run)])
    with pytest.raises(SystemExit) as stopped:
        main(["run", *words])
    assert stopped.value.code == 2
    assert "has replies of an earlier run in" in capsys.readouterr().err


def test_a_folder_for_other_work_may_be_a_link_and_a_failure_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "--without", "1", str(run), "--quiet", "--out"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    main([*words, str(tmp_path / "link")])
    assert (tmp_path / "empty" / "summary.json").exists() and (tmp_path / "link").is_symlink()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(reuse.Journal, "store_refusal", full)
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "other")])
    assert not list(tmp_path.glob(".*.part")) and not (tmp_path / "other").exists()


def test_the_help_of_another_method_on_replies_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--replies", str(run), "fedcgs", "--help"])
    assert not stopped.value.code and "--ridge" in capsys.readouterr().out


def test_lost_byte_counts_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "journal" / "meter.jsonl").unlink()
    with pytest.raises(SystemExit):
        main(["run", "--without", "1", str(run), "--out", str(tmp_path / "w"), "--quiet"])
    assert "meter.jsonl is missing; bring it back" in capsys.readouterr().err


def test_runs_of_one_name_on_other_records_differ_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    settings = {"data": str(tmp_path / "d.npz"), "model": "linear", "clients": 2, "rounds": 1, "workers": 0}
    for number in range(2):
        x, y = rng.normal(size=(80, 3)).astype(np.float32), np.arange(80) % 2
        np.savez(tmp_path / "d.npz", x_train=x, y_train=y)
        fedstill.run("fedavg", out=tmp_path / str(number), **settings)
    capsys.readouterr()
    main(["runs", "compare", str(tmp_path / "0"), str(tmp_path / "1")])
    assert "records" in capsys.readouterr().out
    main(["runs", "compare", str(tmp_path / "0"), str(tmp_path / "0"), str(tmp_path / "1"), "--json"])
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert runs[0]["settings"]["records"] != runs[1]["settings"]["records"]


@pytest.mark.parametrize("moved", range(1, 5))
def test_a_card_is_moved_into_place_whole_or_not_at_all(
    moved: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "card", os.replace, list[object]()

    def full(source: Any, target: Any) -> None:
        if Path(target).parent == out:
            calls.append(target)
            if len(calls) == moved:
                raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        fedstill.publish(run, out)
    assert not out.exists()
    monkeypatch.setattr(os, "replace", real)
    fedstill.publish(run, out)
    assert (out / "README.md").exists()


@pytest.mark.parametrize("content", ["", "[0, ", "{}", "[]", '["a"]'])
def test_a_damaged_set_of_a_masked_sum_is_named(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.sums.mkdir()
    (folder.sums / "000000.json").write_text(content)
    with pytest.raises(Damaged, match=r"sums/000000.json is damaged"):
        folder.read_clients_of(folder.sums / "000000.json")
