"""Cases of a site's journal for ``tests/vectors/journal.json``: files of good ones, and what makes them bad ones."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from releases import entry

from fedstill.privacy.releases import Gaussian, Pure
from fedstill.sites.site import site_journal
from fedstill.sites.site.chain import Chain
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sites.site.state_format import FORMAT, HEAD, KEY, LINES

RUN, TIME = f"{1:032x}-0123456789abcdef", "2026-01-01T00:00:00+00:00"
KEY_BYTES = bytes(range(32))
Files = dict[str, str]
"""Contents of files by name; the key in hexadecimal."""


def lines(number: int) -> list[dict[str, Any]]:
    """The lines of some questions, each with a release and a reply; the last one has failed."""
    found: list[dict[str, Any]] = []
    for i in range(number):
        asked = len(found) + 1
        own = {"run": RUN, "spec": "a" * 64, "request": f"{i:064x}", "process": 1}
        noise = Pure(epsilon=0.125) if i == 1 else Gaussian(noise_multiplier=8.0 + i)
        charge = {"charge": i + 1, "entry": entry(noise, exchange=i).model_dump(mode="json")}
        found += [
            {"what": "asked", **own},
            {"what": "accepted", "run": RUN, "spec": "a" * 64, "at": 1000.0 + i},
            {"what": "charged", **own, **charge},
            {"what": "failed" if i == number - 1 else "answered", **own, "charges": [i + 1]},
        ]
        for line in found[asked:]:
            line["question"] = asked
    return found


def written(folder: Path, facts: list[dict[str, Any]], checkpoint_after: int | None = None) -> Files:
    """The files of a journal with these lines."""
    with mock.patch("secrets.token_bytes", lambda _: KEY_BYTES):
        site_journal.create(folder)
    chain = Chain(folder, "journal", "")
    chain.synchronise()
    for number, line in enumerate(facts):
        if number == checkpoint_after:
            at = SiteJournal(folder).standing().checkpoint(0.0).model_dump(mode="json")
            chain.rotate()
            chain.append({"n": chain.count + 1, "time": TIME, "what": "checkpoint", "at": at, "detail": ""})
        chain.append({"n": chain.count + 1, "time": TIME, **line, "detail": ""})
    return read_files(folder)


def read_files(folder: Path) -> Files:
    places = [*folder.glob("journal*.jsonl"), folder / HEAD, folder / FORMAT]
    return {KEY: (folder / KEY).read_bytes().hex(), **{place.name: place.read_text() for place in sorted(places)}}


def write_files(folder: Path, found: Files) -> Path:
    """Lay the files of a case."""
    folder.mkdir(parents=True)
    for name, text in found.items():
        (folder / name).write_bytes(bytes.fromhex(text) if name == KEY else text.encode())
    return folder


def bad(found: Files) -> dict[str, Files]:
    """Files that make a journal of several files one that must be refused."""
    a, b, *rest = found[LINES].splitlines(keepends=True)
    older = next(name for name in sorted(found) if name.startswith("journal-"))
    changes: dict[str, Callable[[], Files]] = {
        "a byte of a line is another": lambda: {LINES: found[LINES].replace("8.0", "9.0").replace("asked", "Asked", 1)},
        "a line is missing": lambda: {LINES: "".join([a, *rest])},
        "the last two lines are missing": lambda: {LINES: "".join([a, b, *rest][:-2])},
        "two lines have changed places": lambda: {LINES: "".join([b, a, *rest])},
        "a line comes twice": lambda: {LINES: "".join([a, b, b, *rest])},
        "a line has a hash of zeros": lambda: {LINES: found[LINES] + '{"n":99,"mac":"' + "0" * 64 + '"}\n'},
        "the key is another": lambda: {KEY: bytes(32).hex()},
        "the key is a byte short": lambda: {KEY: found[KEY][:-2]},
        "the head has another number": lambda: {HEAD: found[HEAD].replace('"count": ', '"count": 1')},
        "an earlier file has another byte": lambda: {older: found[older].replace('"charge":1', '"charge":7')},
        "an earlier file lacks its last line": lambda: {older: "".join(found[older].splitlines(keepends=True)[:-1])},
        "the format is newer": lambda: {FORMAT: '{"version": 99}'},
    }
    return {name: change() for name, change in changes.items()}


def contents() -> dict[str, Any]:
    """All of ``journal.json``."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        one = written(folder / "one", lines(3))
        two = written(folder / "two", lines(3), checkpoint_after=8)
        shorter = written(folder / "shorter", lines(3)[:-1])
        twice = [*lines(1), {**lines(1)[2], "question": 1}]
        good = {
            "no line": (written(folder / "none", []), 0, 0),
            "three questions": (one, 12, 3),
            "a checkpoint after two of them": (two, 13, 3),
            "a crash between the last line and the head": ({**one, HEAD: shorter[HEAD]}, 12, 3),
            "a crash within the last line": ({**shorter, LINES: one[LINES][:-1]}, 11, 3),
        }
        refused = {**bad(two), "a charge has the number of another": written(folder / "twice", twice)}
    found = [{"name": n, "good": True, "files": f, "lines": k, "charges": m} for n, (f, k, m) in good.items()]
    others = [
        {"name": n, "good": False, "of": "a checkpoint after two of them", "files": f} for n, f in refused.items()
    ]
    return {"format": 1, "cases": [*found, *others]}


def main() -> None:
    """Write the file again."""
    place = Path(__file__).parents[1] / "vectors" / "journal.json"
    place.write_text(json.dumps(contents(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
