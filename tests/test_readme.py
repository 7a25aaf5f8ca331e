"""Every command and Python block in the documents runs, made small; every link leads somewhere."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tiny_backbones
import torch
import yaml
from method_settings import flags
from PIL import Image
from sklearn.datasets import load_breast_cancer

import fedstill
from fedstill import methods
from fedstill.cli import main

ROOT = Path(__file__).parents[1]
FEATURES, GALLERY = ROOT / "docs" / "features.md", ROOT / "docs" / "gallery.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "reproduce").rglob("*.md"))]


def commands() -> list[str]:
    found = []
    for page in PAGES:
        if page not in (FEATURES, GALLERY):  # whose commands need files of theirs; the site's build runs the gallery's
            text = (
                page.read_text().replace("$epsilon", "1").replace("$flags", "").replace("$alpha", "0.5")
            )  # of loops in a shell
            found += [line for line in lines(text) if line.startswith("fedstill ")]
    elsewhere = ("...", "/srv/")  # parts left out, and the folders of real sites
    return sorted({line for line in found if not any(part in line for part in elsewhere)})


def blocks(text: str, language: str = "") -> list[str]:
    """The content of the fenced blocks in a language; commands are in blocks without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for found, block in fenced if found == language]


def lines(text: str) -> list[str]:
    """The lines of the blocks of commands, with their continuations, without comments."""
    joined = (block.replace("\\\n", " ") for block in blocks(text))
    return [line.split("#")[0].strip() for block in joined for line in block.split("\n")]


def small(words: list[str], out: Path) -> list[str]:
    """The command with little data, little work and a folder of its own."""
    words = words[1:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    if words[0] == "run":
        name = Path(words[1]).suffix and "fedgm" or words[1]
        words += flags(name)
    if words[0] == "compare":
        if "--seeds" in words:
            at = words.index("--seeds")
            end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
            del words[at:end]
        for entry in [w for w in words[1:] if w.rpartition("=")[2] in methods.TABLE and not w.startswith("-")]:
            label, _, name = entry.rpartition("=")
            words += flags(name, f"{label or name}.")
    if words[0] in ("run", "compare"):
        model = "projected:width=8" if {"fedrd", "fedrd-records"} & {*words} else "convnet:width=8,depth=2"
        model = "mlp:hidden=8" if "./cancer.parquet" in words else model
        words += ["--limit", "400", "--workers", "0", "--model", model]
        words += ["--clients", "10"] * ("100" in words)
        words += ["--data", "digits"] * ("--data" not in words and ".yaml" not in words[1])
        labelled = "held=" in " ".join(words) or "fedmd" in words
        words += ["--public", "held=64" if labelled else "noise=64"]
    if words[0] == "audit":
        words += ["--clients", "8"]
    return [*words, "--out", str(out)] if words[0] in ("run", "compare", "audit") else words


def small_sweep(file: Path, folder: Path) -> Path:
    """The sweep's file with little data, little work and one value of each setting to try."""
    content = yaml.safe_load(file.read_text("utf-8")) | {"seeds": [0], "limit": 300, "model": "convnet:width=8,depth=2"}
    for settings in content["methods"].values():
        settings["try"] = {name: values[:1] for name, values in settings.get("try", {}).items()} or None
    content["methods"]["fedgm"] |= {"matching": {"nets": 2}, "training": {"epochs": 2}, "try": {"ipc": [1]}}
    content["methods"]["fedavg"]["rounds"] = 1
    (folder / file.name).write_text(yaml.safe_dump(content), "utf-8")
    return folder / file.name


def compare(folder: Path) -> None:
    main(["compare", "fedavg", "--data", "digits", "--fedavg.rounds", "1", "--limit", "300", "--workers", "0"]
         + ["--model", "convnet:width=8,depth=2", "--out", str(folder / "runs" / "compare-digits")])  # fmt: skip


def readable(command: str) -> str:
    return " ".join(command.removeprefix("fedstill ").split())[:80]


class Parsed(Exception):
    """The moment at which a run would begin."""


NEW = [c for c in commands() if c.split()[1] in ("run", "compare") and "--replies" not in c]


@pytest.mark.parametrize("command", NEW, ids=readable)
def test_it_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in the document, up to its first run."""

    def begin(*_: object, **__: object) -> None:
        raise Parsed

    for name in ("attacks.membership", "experiment.sweep", "sites.server.serve"):
        import_module(f"fedstill.{name}")  # first imported below, they would keep the stand-in for all later tests
    monkeypatch.setattr("fedstill.experiment.run.run", begin)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Parsed):
        main(shlex.split(command.replace("examples/", f"{ROOT}/examples/"))[1:])


DEPLOYED = pytest.mark.skipif(
    not os.environ.get("FEDSTILL_SLOW"), reason="test_deployment.py and test_flower.py try them; set FEDSTILL_SLOW=1"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[DEPLOYED] * ("deploy check" in c or "--engine flower" in c)) for c in commands()],
    ids=readable,
)
def test_it_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Asserts only that the command ends without an error; other tests know what it should print."""
    words = shlex.split(command)
    if words[1] == "run":  # tests/report draws these figures; here they would take a third of the time
        monkeypatch.setattr("fedstill.report.html.page_svg", lambda plot, name, caption: f"<svg>{len(plot.y)}</svg>")
    if "mnist" in command or "cifar" in command:
        monkeypatch.setenv("FEDSTILL_DATA", str(request.getfixturevalue("hub_copies")))
    if "./scans" in command:
        for i in range(24):
            place = tmp_path / "scans" / f"hospital{i % 3}" / "train" / "ab"[i // 3 % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), i).save(place / f"{i}.png")
    if "./pictures" in command:
        (tmp_path / "pictures").mkdir()
        Image.new("L", (8, 8)).save(tmp_path / "pictures" / "one.png")
    if "./cancer.parquet" in command:
        load_breast_cancer(as_frame=True).frame.to_parquet(tmp_path / "cancer.parquet")
    if words[1] in ("report", "runs", "watch"):
        compare(tmp_path)
    if words[1] in ("attack", "publish", "evaluate", "predict"):
        task = "--data digits --rounds 1 --limit 200 --workers 0 --clients 2 --model convnet:width=8,depth=2".split()
        main(["run", "fedavg", *task, "--out", str(tmp_path / words[2])])
    if "--replies" in words:  # of a run of the same method, whose clients do the same work
        run, name = words[3:5]
        main(small(["fedstill", "run", name], tmp_path / run))
        monkeypatch.chdir(tmp_path)
        main([*words[1:], *flags(name)])
        return
    if words[1] == "sweep":
        monkeypatch.setattr("fedstill.base.processes.pool", lambda *_: ThreadPoolExecutor(1))
        words[2] = str(small_sweep(ROOT / words[2], tmp_path))
    if "examples/" in command:
        words = [word.replace("examples/", f"{ROOT}/examples/") for word in words]
    monkeypatch.chdir(tmp_path)
    main(small(words, tmp_path / "out"))


def test_there_are_commands_to_run() -> None:
    assert len(commands()) > 8


@pytest.fixture(scope="module")
def hub_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of random images, in the folders and with the columns that their repositories on the hub have."""
    import datasets

    root, rng = tmp_path_factory.mktemp("hub"), np.random.default_rng(0)
    layouts = {
        "mnist": ("mnist", (28, 28), {"image": None, "label": 10}),
        "fashion_mnist": ("fashion_mnist", (28, 28), {"image": None, "label": 10}),
        "cifar10": ("plain_text", (32, 32, 3), {"img": None, "label": 10}),
        "cifar100": ("cifar100", (32, 32, 3), {"img": None, "fine_label": 100, "coarse_label": 20}),
    }
    for name, (config, shape, columns) in layouts.items():
        features = datasets.Features(
            {
                column: datasets.ClassLabel(names=[f"{i}" for i in range(count)]) if count else datasets.Image()
                for column, count in columns.items()
            }
        )
        for split, size in (("train", 600), ("test", 100)):
            labels = np.arange(size)
            images = rng.integers(0, 128, (size, *shape), dtype=np.uint8)
            images[labels, labels % 10 + 5] += 127  # a bright line for each class
            rows = {
                column: [value % count for value in labels] if count else [Image.fromarray(image) for image in images]
                for column, count in columns.items()
            }
            (root / name / config).mkdir(parents=True, exist_ok=True)
            table = datasets.Dataset.from_dict(rows, features=features)
            table.to_parquet(root / name / config / f"{split}-00000-of-00001.parquet")
    return root


def test_the_copies_have_the_columns_of_the_hub(
    hub_copies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(hub_copies))
    assert not fedstill.load_data("mnist").columns  # the real one has no writers
    with pytest.raises(SystemExit):
        main("data show mnist --partition by:writer_id --clients 20".split())
    assert (
        "no column 'writer_id' to partition by, of integers or texts without gaps; it has no columns but images"
        in capsys.readouterr().err
    )
    assert [*fedstill.load_data("cifar100").columns] == ["coarse_label"]


def section(heading: str) -> str:
    """A section of the page about features."""
    return next(part for part in FEATURES.read_text().split("\n## ") if part.startswith(heading))


def follow(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write the files of a text and run its commands in its order; returns them."""
    rng = np.random.default_rng(0)
    for name, classes in (("mine", 4), ("public", 6)):
        labels = np.arange(240) % classes
        images = rng.integers(0, 128, (240, 16, 16, 3), dtype=np.uint8)
        images[np.arange(240), 2 * labels + 2] += 127
        np.savez(folder / f"{name}.npz", x_train=images, y_train=labels)
    for block in blocks(text, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, f"a file without a name: {block[:50]}"
        (folder / name[1]).write_text(block)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    done = [line for line in lines(text) if line]
    for line in done:
        program, *words = shlex.split(line)
        if program == "python":
            subprocess.run([sys.executable, *words], cwd=folder, check=True, env={**os.environ, "PYTHONPATH": _PATH})
        else:
            assert program == "fedstill"
            main([*words, "--workers", "0"] if words[0] == "run" else words)
    return done


_PATH = os.pathsep.join(filter(None, sys.path))


@pytest.fixture
def _forget_modules() -> Iterator[None]:
    yield
    for name in ("cnn", "vit"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_modules")
def test_own_features_of_a_network_and_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = follow(section("A network and its weights"), tmp_path, monkeypatch)
    assert len(done) == 3
    assert "simulated fedavg-p on ./mine.npz, iid, features of cnn:cnn" in " ".join(capsys.readouterr().out.split())
    weights = torch.load(tmp_path / "cnn.pt", weights_only=True)
    state = fedstill.load_model("runs/own-cnn").state_dict()
    (first,) = (value for name, value in state.items() if name.endswith("trunk.body.0.weight"))
    assert torch.equal(first, weights["body.0.weight"])
    summary = json.loads((tmp_path / "runs/own-cnn/summary.json").read_text())
    assert summary["accuracy"] > 0.4 and summary["guarantee"]["epsilon"] <= 1.01  # four classes


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_modules")
@pytest.mark.filterwarnings("default")  # of a package that is not ours to mend
def test_own_features_of_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    tiny = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    transformers.ViTModel(tiny).save_pretrained(tmp_path / "vit")
    assert len(follow(section("A transformer from a folder"), tmp_path, monkeypatch)) == 1
    summary = json.loads((tmp_path / "runs/own-vit/summary.json").read_text())
    assert summary["guarantee"]["holds"]
    assert summary["bytes_down_per_client"] < 4 * 32 * (32 + 20)  # the map and a linear layer, not the transformer
    assert summary["num_parameters"] < 1000
    assert fedstill.load_model("runs/own-vit")(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that are not ours to mend
def test_a_backbone_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fedstill[hf]'")
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path / "backbones"))
    tiny_backbones.save_images("dinov2", tmp_path / "backbones/facebook/dinov2-small")
    assert len(follow(section("A backbone by name"), tmp_path, monkeypatch)) == 3
    summary = json.loads((tmp_path / "runs/texts/summary.json").read_text())
    assert summary["accuracy"] > 0.8 and summary["guarantee"]["holds"]
    assert fedstill.load_model("runs/texts")(["the film was great"]).shape == (1, 2)


def python_blocks() -> list[str]:
    pages = [page.read_text() for page in PAGES if page != FEATURES]
    return [block for text in pages for block in blocks(text, "python")]


QUICK = (", ipc=1)", ", ipc=1, matching={'nets': 2}, training={'epochs': 2})")
"""The README's run of FedGM, and the same with little work."""


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.strip().split("\n")[0][:40])
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documented.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "compare-digits" in block:
        compare(tmp_path)
    block = block.replace(*QUICK).replace(", ipc=1,", ", workers=0, limit=400, ipc=1,")
    try:
        exec(compile(block, "documented", "exec"), {"__name__": "__main__"})
        if "def small" in block:
            main(["run", "fedavg", "--data", "digits", "--model", "documented:small", "--rounds", "1", "--workers", "0"]
                 + ["--limit", "300", "--out", str(tmp_path / "out")])  # fmt: skip
    finally:
        sys.modules.pop("documented", None)


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_the_readme_s_snippet_runs_as_a_script_with_workers(guarded: bool, tmp_path: Path) -> None:
    (block,) = (block for block in python_blocks() if 'fedstill.run("fedgm"' in block)
    block = block.replace(*QUICK)
    block = block.replace('data="digits"', 'data="digits", workers=2, clients=2, partition="iid", limit=300').replace(
        'partition="classes:1", ', ""
    )
    block = block if guarded else block.replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "script.py").write_text(block)
    found = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    if guarded:
        assert found.returncode == 0, found.stderr
        assert float(found.stdout.split()[0]) > 0
    else:
        assert found.returncode
        assert "put it under if __name__ == '__main__':" in found.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_public_names_are_there() -> None:
    for name in fedstill.__all__:
        assert getattr(fedstill, name).__module__.startswith("fedstill."), name
    assert {"FedAvg", "Method", "load_data", "load_model", "run"} <= set(fedstill.__all__) <= set(dir(fedstill))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fedstill.nothing  # type: ignore[attr-defined] # noqa: B018


def promised() -> dict[str, set[str]]:
    """The public names of each module, by the page about stability."""
    rows = re.findall(
        r"^\| `(fedstill\.[\w.]+)` \| (.*) \|$", (ROOT / "docs" / "stability.md").read_text(), re.MULTILINE
    )
    names = {module: set(re.findall(r"`(\w+)`", text)) for module, text in rows if module[9:10].islower()}
    packages = {name: {*import_module(name).__all__} for name in ("fedstill", "fedstill.protocol")}
    return {**names, **packages}


def test_documents_import_nothing_that_is_not_promised() -> None:
    public = promised()
    assert len(public) > 10
    for module, names in public.items():
        assert all(hasattr(import_module(module), name) for name in names), module
    cells = [
        "".join(cell["source"])
        for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
        for cell in json.loads(notebook.read_text())["cells"]
        if cell["cell_type"] == "code" and not "".join(cell["source"]).startswith("%")
    ]
    pages = [block for page in PAGES for block in blocks(page.read_text(), "python")]
    found = {
        (node.module, alias.name)
        for text in [*pages, *cells]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fedstill"
        for alias in node.names
    }
    assert ("fedstill.train.sgd", "SGD") in found
    assert {
        (module, name)
        for module, name in found
        if name not in public.get(str(module), ()) and f"{module}.{name}" not in public
    } == set()


def test_the_package_shows_its_public_names_only() -> None:
    """In a process of its own: here, imports of modules have made them attributes."""
    code = "import fedstill; print(*sorted(name for name in vars(fedstill) if not name.startswith('_')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_method_s_name_is_its_module_s() -> None:
    """So a method is one line in the list of public names, and every one of its files is in the list."""
    assert list(methods.TABLE)[:3] == ["fedavg", "fedprox", "fednova"]
    for name, place in methods.TABLE.items():
        assert place.startswith(f"fedstill.methods.{name.replace('-', '_')}:")
        assert methods.find(name).__module__ == place.partition(":")[0]
