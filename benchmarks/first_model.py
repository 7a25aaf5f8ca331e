"""From a CSV file at each of five hospitals to a private model and its page: commands and minutes.

    pip install survset                          # GPL; none of its files is in this repository
    python benchmarks/first_model.py run OUT     # some minutes of two cores, after pip install '.[flower]'
    python benchmarks/first_model.py page        # the table of docs/small_sites.md

The hospitals are the five largest dialysis centres of `dialysis.py`; the server judges on the records of the others.
Each hospital has a folder, a key and a process of its own, over TLS, all on this machine, where five sites share its
cores. What a person does between the commands (send an invitation, check a schema, agree on a budget) takes no time.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import dialysis
import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/first_model.json", ROOT / "docs/small_sites.md"
BEGIN, END = "<!-- commands -->\n", "<!-- end of commands -->"
SITES = 5
RUN = {"method": "afl", "data": "others.csv", "schema_file": "shared.toml", "clients": SITES, "model": "linear"} | {
    "public": "noise=500",
    "noise": "entropy",
    "afl": {"epsilon": 4.0, "space": {"whiten": False, "quantile": 1.0}},
}
TRIAL = "run afl --data ./all.csv --schema-file schema.toml --partition by:centre --clients 5 --model linear "
TRIAL += "--public noise=500 --noise entropy --epsilon 4 --space.whiten False --space.quantile 1.0 --out trial"


def write(out: Path) -> dict[str, int]:
    """The files that the hospitals and the server have; returns the number of records of each."""
    frame = dialysis.table()
    largest = list(frame.centre.value_counts().index[:SITES])
    out.mkdir(parents=True, exist_ok=True)
    parts = {f"hospital-{i}": frame[frame.centre == centre] for i, centre in enumerate(largest)}
    parts |= {"others": frame[~frame.centre.isin(largest)]}
    for name, part in parts.items():
        part.drop(columns="centre").to_csv(out / f"{name}.csv", index=False)
    frame[frame.centre.isin(largest)].to_csv(out / "all.csv", index=False)
    (out / "schema.toml").write_text(dialysis.SCHEMA)
    (out / "shared.toml").write_text(dialysis.SCHEMA.replace('site = "centre"\n', ""))
    (out / "run.yaml").write_text(json.dumps(RUN))
    return {name: len(part) for name, part in parts.items()}


class Diary:
    """Commands of one folder, with who gave each and its seconds.

    Attributes:
        lines: what was done.
        started: programs that go on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.started: list[subprocess.Popen[bytes]] = []
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def do(self, who: str, words: str) -> None:
        """Give a command and wait for its end."""
        begin = time.perf_counter()
        done = subprocess.run(self._words(words), capture_output=True, text=True, **self._place())
        self.lines.append({"who": who, "command": f"fedstill {words}", "seconds": time.perf_counter() - begin})
        if done.returncode:
            raise SystemExit(f"fedstill {words} ended with {done.returncode}: {done.stderr[-2000:]}")

    def start(self, who: str, words: str) -> None:
        """Start a program that goes on."""
        log = (self.folder / f"{words.split()[0]}-{len(self.started)}.log").open("wb")
        process = subprocess.Popen(self._words(words), stdout=log, stderr=subprocess.STDOUT, **self._place())
        self.started.append(process)
        self.lines.append({"who": who, "command": f"fedstill {words}", "seconds": 0.0})

    def end(self) -> None:
        """End the programs, the last one first."""
        for process in reversed(self.started):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()

    def _words(self, words: str) -> list[str]:
        return [sys.executable, "-m", "fedstill", *shlex.split(words)]

    def _place(self) -> dict[str, Any]:
        return {"cwd": self.folder, "env": self._environment, "start_new_session": True}


def between_hospitals(diary: Diary, ports: tuple[int, int]) -> dict[str, Any]:
    """The commands of a server and five sites; the run's numbers."""
    begin, numbers = time.perf_counter(), " ".join(map(str, range(SITES)))
    where = f"--host 127.0.0.1 --bind 127.0.0.1 --port {ports[0]} --inner-port {ports[1]}"
    diary.do("server", f"server init federation {where}")
    diary.start("server", "server start federation")
    diary.do("server", f"server invite federation {numbers} --records 1000")
    for i in range(SITES):
        given = f"--invite federation/invitations/site-{i}.toml --data hospital-{i}.csv --schema-file shared.toml"
        diary.do(f"hospital {i}", f"site init site-{i} {given} --methods afl --budget 4")
        diary.do("server", f"server accept federation {i} site-{i}/site.key.pub")
        diary.start(f"hospital {i}", f"site serve site-{i}")
    diary.do("server", "server run federation run.yaml --out first")
    diary.do("server", "report first --out page")
    diary.do("server", "publish first --out model")
    summary = json.loads((diary.folder / "first/summary.json").read_text())
    assert (diary.folder / "page/report.html").exists() and (diary.folder / "model/README.md").exists()
    assert summary["guarantee"]["holds"] and summary["guarantee"]["epsilon"] <= 4, "no guarantee"
    keys = ("accuracy", "bytes_up_per_client", "predicted_classes")
    found = {"seconds": time.perf_counter() - begin, "epsilon": summary["guarantee"]["epsilon"]}
    return {**found, **{key: summary[key] for key in keys}}


def run(out: Path) -> dict[str, Any]:
    """Both ways; what was found."""
    from fedstill.sites.loopback import free_port

    records, diary = write(out), Diary(out)
    diary.do("draft", "data schema hospital-0.csv --target died")
    trial = {"seconds": -time.perf_counter()}
    diary.do("trial", TRIAL)
    diary.do("trial", "report trial --out trial-page")
    trial["seconds"] += time.perf_counter()
    try:
        deployed = between_hospitals(diary, (free_port(), free_port()))
    finally:
        diary.end()
    facts = {"command": "python benchmarks/first_model.py run OUT", "commit": record.commit()}
    found = {"records": records, "cores": os.cpu_count(), "trial": trial, "deployed": deployed, "lines": diary.lines}
    return {**facts, "date": str(date.today()), **found}


def lines(found: dict[str, Any]) -> str:
    """The table of the page."""
    text = "| who | command | seconds |\n|---|---|---|\n"
    for line in found["lines"]:
        other = line["who"].startswith("hospital") and line["who"] != "hospital 0"
        other = other or " accept " in line["command"] and "accept federation 0" not in line["command"]
        if not other:
            seconds = f"{line['seconds']:.0f}" if line["seconds"] else "goes on"
            text += f"| {line['who']} | `{line['command']}` | {seconds} |\n"
    minutes = found["deployed"]["seconds"] / 60
    each = sum(line["who"] == "hospital 0" for line in found["lines"])
    server = sum(line["who"] == "server" for line in found["lines"])
    text += f"\nBetween hospitals that is {server} commands at the server and {each} at each hospital, "
    text += f"{minutes:.1f} minutes from the first to the published model ({SITES} sites, {found['cores']} cores); "
    text += f"as a trial in one place two commands, {found['trial']['seconds']:.0f} seconds "
    return text + f"({found['date']}, [results](../benchmarks/results/first_model.json)).\n"


def page(text: str, found: dict[str, Any]) -> str:
    """The page with the commands of these results."""
    return record.between(text, BEGIN, END, lines(found))


def main() -> None:
    found = lambda chosen: run(chosen.out.resolve())  # noqa: E731
    record.study(__doc__, "runs/first-model", "the same", RESULTS, PAGE, found, page)


if __name__ == "__main__":
    main()
