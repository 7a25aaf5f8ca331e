"""Where runs go without --out, and what a start that did not run leaves behind."""

import functools
import hashlib
import importlib
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.base import lookup
from fedstill.cli import main
from fedstill.experiment.config import Experiment, difference, digest
from fedstill.experiment.job import Job, default_folder
from fedstill.experiment.run import run
from fedstill.methods import find
from fedstill.runs.folder import RunFolder

TASK = {"data": "digits", "clients": 2, "limit": 100, "model": "convnet:width=8,depth=2", "workers": 0}
QUICK = "--data digits --clients 2 --limit 100 --model convnet:width=8,depth=2 --workers 0".split()


def job(name: str = "fedavg", label: str = "", *, task: dict[str, Any] | None = None, **settings: Any) -> Job:
    return Job(Experiment(**{**TASK, **(task or {})}), find(name)(**settings), Path(), name=name, label=label)


def begin(folder: Path, some: Job) -> None:
    """Leave the folder of a run that has begun."""
    folder.mkdir(parents=True)
    RunFolder(folder).write_config(some.description())


def test_a_run_with_another_setting_gets_a_folder_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    plain = tmp_path / "fedavg-digits-0"
    first, second, third = job(rounds=1), job(rounds=2), job(rounds=1, local={"lr": 0.5})
    assert default_folder(plain, {Path(): first}) == plain
    begin(plain, first)
    assert default_folder(plain, {Path(): first}) == plain
    assert default_folder(plain, {Path(): job(task={"workers": 2, "timeout": 5.0}, rounds=1)}) == plain
    folders = [default_folder(plain, {Path(): other}) for other in (second, third)]
    assert len({plain, *folders}) == 3
    assert all(folder.name.startswith("fedavg-digits-0-") for folder in folders)
    begin(folders[0], second)
    assert default_folder(plain, {Path(): second}) == folders[0]
    (plain / "config.json").unlink()
    plain.rmdir()
    assert default_folder(plain, {Path(): second}) == folders[0]  # although the plain name is free again


@pytest.mark.parametrize("content", ["thesis.tex", ".lock", "config.json"])
def test_files_that_are_no_run_of_the_same_settings_are_left_alone(content: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    assert default_folder(plain, {Path(): job()}) == plain
    (plain / content).touch()
    assert default_folder(plain, {Path(): job()}) != plain


def test_a_comparison_is_continued_by_seeds_and_methods_but_not_by_another_task(tmp_path: Path) -> None:
    plain = tmp_path / "compare-digits"

    def jobs(*labels: str, seeds: tuple[int, ...] = (0,), rounds: int = 1, **task: Any) -> dict[Path, Job]:
        return {
            Path(label) / f"seed-{seed}": job(label=label, rounds=rounds, task={**task, "seed": seed})
            for seed in seeds
            for label in labels
        }

    for path, some in jobs("a", "b").items():
        begin(plain / path, some)
    for same in (jobs("a", "b"), jobs("a", "b", seeds=(0, 1, 2)), jobs("a", "c"), jobs("c", seeds=(3,))):
        assert default_folder(plain, same) == plain
    others = [jobs("a", "b", rounds=2), jobs("c", partition="dirichlet:0.1"), {Path(): job(label="a", rounds=1)}]
    folders = [default_folder(plain, other) for other in others]
    assert len({plain, *folders}) == 4
    more_seeds = jobs("a", "b", rounds=2, seeds=(0, 1))
    assert default_folder(plain, more_seeds) == folders[0]


def test_a_digest_is_that_of_the_settings_that_decide() -> None:
    def of(some: Job) -> str:
        return digest(some.experiment, {"": (some.name, some.method)})

    assert of(job()) == of(job(rounds=20)) == of(job(task={"workers": 3}))
    assert len({of(job()), of(job("fedprox")), of(job(rounds=3)), of(job(task={"seed": 1}))}) == 4
    # a nested value that is the nested class's own default, but not the method's
    assert of(job(local={"epochs": 1})) != of(job(local={"epochs": 10})) != of(job(local={"epochs": 2}))


@pytest.mark.slow
def test_the_second_command_just_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--rounds", "1"], ["--rounds", "2"], ["--rounds", "1", "--local.lr", "0.1"], ["--rounds", "2"]):
        main(["run", "fedavg", *QUICK, *words])
    found = sorted(tmp_path.glob("runs/*/config.json"))
    rounds = [json.loads(place.read_text())["method"]["rounds"] for place in found]
    assert sorted(rounds) == [1, 1, 2]
    assert (tmp_path / "runs" / "fedavg-digits-0" / "summary.json").exists()
    for number in ("1", "2"):
        main(["compare", "fedavg", *QUICK, "--each.rounds", number])
    assert len(list((tmp_path / "runs").glob("compare-digits*"))) == 2
    main(["compare", "fedavg", *QUICK, "--each.rounds", "1", "--seeds", "0", "1"])
    assert len(list((tmp_path / "runs").glob("compare-digits*"))) == 2


def test_two_commands_that_begin_at_the_same_moment_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process takes the plain folder between the choice and the lock."""
    monkeypatch.chdir(tmp_path)
    taken = False

    def overtaken(some: Job, **options: Any) -> dict[str, Any]:
        nonlocal taken
        if not taken:
            taken = True
            begin(some.out, job(rounds=7))
        return run(some, **options)

    monkeypatch.setattr("fedstill.experiment.run.run", overtaken)
    main(["run", "fedavg", *QUICK, "--rounds", "1"])
    assert len(list(tmp_path.glob("runs/fedavg-digits-0-*/summary.json"))) == 1
    assert RunFolder(Path("runs/fedavg-digits-0")).read_config().method["rounds"] == 7


@pytest.mark.parametrize(
    "words",
    [
        ["run", "fedavg", "--data", "digts"],
        ["run", "fedavg", *QUICK, "--model", "nets:small"],
        ["run", "fedavg", *QUICK, "--model", "convnet:width=0"],
        ["run", "fedavg", *QUICK, "--public", "nosie"],
        ["run", "fedavg", *QUICK, "--partition", "by:colour"],
        ["run", "feddf", *QUICK],  # refuses at the server, for it has no public data
        ["compare", "fedavg", "real", "--data", "digts"],
        ["run", "fedavg", "--data", "digts", "--out", "deep/down/here"],
    ],
)
def test_a_start_that_never_ran_leaves_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2, capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_and_so_does_a_run_that_asked_somebody(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="digts"):
        run(job(task={"data": "digts"}).replace(out=tmp_path / "mine" / "run"))
    assert list((tmp_path / "mine").iterdir()) == []
    with pytest.raises(ValueError, match="digts"):
        run(job(task={"data": "digts"}).replace(out=tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        run(job().replace(out=tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.tex").exists()

    class Stop(Exception):
        pass

    from fedstill.engines.transport import Watcher

    class Stops(Watcher):
        def arrived(self, refusal: Any) -> None:
            raise Stop

    with pytest.raises(Stop):
        run(job(rounds=1).replace(out=tmp_path / "run"), watcher=Stops())
    assert (tmp_path / "run" / "config.json").exists()
    with pytest.raises(ValueError, match="has a run with rounds = 1, not 2"):
        run(job(rounds=2).replace(out=tmp_path / "run"))
    assert (tmp_path / "run" / "config.json").exists()


def test_a_folder_in_use_is_not_removed_by_another_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with folder.locked():
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    with pytest.raises(ValueError, match="another process is writing"):
        run(job().replace(out=folder.path))
    over.set()
    thread.join()
    assert folder.path.is_dir()


_OWN = """
from torch import nn
def tiny(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], num_classes{bias}))
"""


def _fresh(code: str, file: Path) -> None:
    """Write code of the user's own, as another process would find it."""
    file.write_text(code)
    sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def test_changed_code_of_ones_own_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "tiny_of_mine.py"
    task = {"model": f"{file}:tiny"}
    plain = tmp_path / "runs" / "fedavg-digits-0"
    _fresh(_OWN.format(bias=""), file)
    first = run(job(task=task, rounds=1).replace(out=plain))
    assert run(job(task=task, rounds=1).replace(out=plain)) == first  # finished, and nothing has changed
    seeds = {Path("a/seed-0"): job(label="a", task=task), Path("a/seed-1"): job(label="a", task={**task, "seed": 1})}
    begin(tmp_path / "compare" / "a" / "seed-0", seeds[Path("a/seed-0")])
    assert default_folder(tmp_path / "compare", seeds) == tmp_path / "compare"

    _fresh(_OWN.format(bias=", bias=False"), file)
    changed = job(task=task, rounds=1)
    with pytest.raises(ValueError, match=f"has a run with another version of the code of {file}:tiny; choose another"):
        run(changed.replace(out=plain))
    other = default_folder(plain, {Path(): changed})
    assert other != plain
    assert run(changed.replace(out=other))["num_parameters"] < first["num_parameters"]
    assert default_folder(tmp_path / "compare", seeds) != tmp_path / "compare"


def test_changed_code_that_ones_own_imports_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "kit_of_mine" / "sub").mkdir(parents=True)
    helper, unused = tmp_path / "kit_of_mine" / "sub" / "deep.py", tmp_path / "unused_of_mine.py"
    content = {
        tmp_path / "net_of_mine.py": "import torch\nfrom kit_of_mine import build\n\ndef tiny(*a): return build(*a)\n",
        tmp_path / "kit_of_mine" / "__init__.py": "from .sub.deep import build\n",
        tmp_path / "kit_of_mine" / "sub" / "__init__.py": "",
        helper: _OWN.format(bias="").replace("def tiny", "def build"),
        unused: "",
    }
    for place, text in content.items():
        place.write_text(text)
    task = {"model": f"{tmp_path / 'net_of_mine.py'}:tiny"}
    own = job(task=task, rounds=1).own_code()
    paths = ["kit_of_mine/__init__.py", "kit_of_mine/sub/__init__.py", "kit_of_mine/sub/deep.py"]
    assert [*own] == [task["model"], *paths]
    assert own[paths[-1]] == hashlib.sha256(helper.read_bytes()).hexdigest()
    plain = tmp_path / "runs" / "fedavg-digits-0"
    summary = run(job(task=task, rounds=1).replace(out=plain))
    for change, message in ((unused, ""), (helper, "code of kit_of_mine/sub/deep.py")):
        change.write_text(change.read_text() + "# changed\n")
        lookup.source_digests.cache_clear()  # as in another process
        if not message:
            assert run(job(task=task, rounds=1).replace(out=plain)) == summary
            continue
        with pytest.raises(ValueError, match=f"has a run with another version of the {message}; choose another"):
            run(job(task=task, rounds=1).replace(out=plain))
        assert default_folder(plain, {Path(): job(task=task, rounds=1)}) != plain


def test_code_of_an_installed_package_counts_with_its_own_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "mine_inside").mkdir(parents=True)
    (site / "other_inside.py").write_text("")
    (site / "mine_inside" / "__init__.py").write_text("")
    (site / "mine_inside" / "part.py").write_text("")
    (site / "mine_inside" / "net.py").write_text("import other_inside\nfrom . import part\n\ndef tiny(): ...\n")
    monkeypatch.syspath_prepend(str(site))
    found = lookup.source_digests(importlib.import_module("mine_inside.net").tiny)
    assert [*found] == ["", "mine_inside/__init__.py", "mine_inside/part.py"]


@pytest.mark.parametrize(
    ("imports", "helper"),
    [
        ("import helper_odd", b"x = " + b"-" * 9000 + b"1"),  # too deep for a parser
        ("import helper_odd", b"# coding: nonsense"),
        ("import helper_odd", b"x = '\xff\0"),
        (f"import helper_odd, {'x' * 300}", b"import helper_odd, net_odd"),
    ],
)
def test_odd_code_that_ones_own_imports_does_no_harm(
    imports: str, helper: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helper_odd.py").write_bytes(helper)
    _fresh(f"if False:\n    {imports}\n\ndef tiny(): ...\n", tmp_path / "net_odd.py")
    found = lookup.source_digests(lookup.import_own(f"{tmp_path / 'net_odd.py'}:tiny"))
    assert [*found] == ["", "helper_odd.py"]


@pytest.mark.timeout(20)
def test_links_and_names_of_installed_packages_beside_ones_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Circular links end, and a file that Python imports from elsewhere is no code of one's own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looped").mkdir()
    (tmp_path / "looped" / "__init__.py").write_text("def tiny(): from . import la, lb\n")
    for name in ("la", "lb"):
        (tmp_path / "looped" / name).symlink_to(".")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "wrapper_of_mine.py").write_text(
        "import functools\n\ndef wrap(f):\n    @functools.wraps(f)\n    def g(): ...\n    return g\n"
    )
    (tmp_path / "wrapped_of_mine.py").write_text(
        "import torch\nfrom wrapper_of_mine import wrap\n\n@wrap\ndef tiny(): ...\n"
    )
    assert [*lookup.source_digests(importlib.import_module("looped").tiny)] == [""]
    wrapped = importlib.import_module("wrapped_of_mine").tiny
    for code in (wrapped, functools.partial(wrapped)):
        found = lookup.source_digests(code)
        assert [*found] == ["", "wrapper_of_mine.py"]
        assert found[""] == hashlib.sha256((tmp_path / "wrapped_of_mine.py").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["{}", "~/mine.npz", "mine.npz"])
def test_changed_data_of_ones_own_are_not_answered_with_the_old_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    generator = np.random.default_rng(0)
    file = tmp_path / "mine.npz"
    content = {f"{kind}_{split}": None for kind in "xy" for split in ("train", "test")}
    for split in ("train", "test"):
        content[f"x_{split}"] = generator.integers(0, 255, (60, 8, 8), dtype=np.uint8)
        content[f"y_{split}"] = np.arange(60) % 3
    np.savez(file, **content)
    some = job(task={"data": name.format(file), "limit": None}, rounds=1).replace(out=tmp_path / "run")
    first = run(some)
    assert run(some) == first
    content["y_train"] = content["y_train"][::-1].copy()
    np.savez(file, **content)
    with pytest.raises(ValueError, match=r"the data changed since; bring the former back, or start anew with another"):
        run(some)


def test_a_setting_that_an_older_version_lacked_has_its_default_there() -> None:
    old = job(local={"lr": 0.5}).description()
    old["method"] = {"name": "fedavg", "local": {"lr": 0.5}}
    del old["experiment"]["timeout"]
    assert difference(old, job(local={"lr": 0.5}).description()) is None
    assert difference(old, job(local={"lr": 0.5}, rounds=7).description()) == "rounds = 20, not 7"
    assert difference(old, job(local={"lr": 0.5, "momentum": 0.1}).description()) == "local.momentum = 0.9, not 0.1"
