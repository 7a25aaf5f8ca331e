"""`fedstill runs`, `watch`, `publish`: what is done with finished runs."""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.command import FORM, Command
from fedstill.cli.output import Bad, print_json, print_sentences, print_wide, table

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.cli.flags import Format, Judged, Listing, Predicted, Published, Removal, Watching
    from fedstill.report.record import RunRecord
    from fedstill.runs.listing import Listed


_FOLDER = 20
"""Width to which the column of folders does not shrink."""


def tag(words: list[str]) -> None:
    """``fedstill runs tag``."""
    from fedstill.runs.listing import change_tags

    for run in _runs_of(words[1:]):
        print(f"{run}: {', '.join(change_tags(run, add=words[:1])) or 'no tag'}")


def untag(words: list[str]) -> None:
    """``fedstill runs untag``."""
    from fedstill.runs.listing import change_tags

    for run in _runs_of(words[1:]):
        print(f"{run}: {', '.join(change_tags(run, remove=words[:1])) or 'no tag'}")


def _runs_of(places: Sequence[str]) -> list[Path]:
    """The runs in some folders, each of which must have one."""
    from fedstill.runs.folder import runs_below

    found = {place: runs_below(Path(place)) for place in places}
    if missing := next((place for place, runs in found.items() if not runs), None):
        raise Bad(f"{missing} has no run; give the folder of a run or of a comparison (fedstill runs)")
    return list(dict.fromkeys(run for runs in found.values() for run in runs))


def compare(words: list[str], form: "Format") -> None:
    """``fedstill runs compare``."""
    from fedstill.report import groups, spending
    from fedstill.report.record import find_runs, read_run

    folders = list(dict.fromkeys(run for word in words for run in find_runs(Path(word), unfinished=True)))
    if len(folders) < 2:
        raise Bad(_TWO)
    records = [read_run(folder, unfinished=True) for folder in folders]
    everything = [
        {"method": groups.method_name(r), **groups.task_settings(r), **groups.method_settings(r)}
        | {"records": str(r.config.get("fingerprint") or "")[:8]}  # of one name, as a file that changed
        | groups.facts(r)
        for r in records
    ]
    differing = groups.differing(everything)
    remarks = spending.remarks(records)
    if form.json_:
        settings = [{key: own.get(key) for key in differing} for own in everything]
        print_json({"runs": list(map(_compared, records, settings)), "remarks": remarks})
        return
    rows = [[key, *(groups.value_words(own.get(key)) for own in everything)] for key in differing]
    shown = table(["", *map(str, folders)], rows, whole=("",))
    shown.add_section()
    results = [_results(record) for record in records]
    for key in dict.fromkeys(key for result in results for key in result):
        shown.add_row(key, *(result.get(key, "") for result in results))
    print_wide(shown)
    print_sentences(remarks)


def _results(record: "RunRecord") -> dict[str, str]:
    """The results of a run by their names, in words."""
    from fedstill.report import guarantees
    from fedstill.report.record import human_bytes

    return {
        "state": record.state,
        **dict([record.score]),
        "up/client": human_bytes(record["bytes_up_per_client"]),
        "down/client": human_bytes(record["bytes_down_per_client"]),
        "guarantee": guarantees.words(record.guarantee) if record.finished else "",
        "seconds": f"{record['seconds']:.1f}",
    }


def _compared(record: "RunRecord", settings: dict[str, object]) -> dict[str, object]:
    """A run as JSON, with the settings in which it differs from others."""
    from fedstill.report import groups, guarantees

    numbers = ("accuracy", "bytes_up_per_client", "bytes_down_per_client", "rounds", "seconds")
    return {
        "folder": str(record.folder),
        "label": record.label,
        "method": groups.method_name(record),
        "state": record.state,
        "settings": settings,
        **{key: record[key] for key in numbers},
        **{key: record.get(key) for key in ("measure", "errors")},
        "guarantee": guarantees.as_json(record.guarantee) if record.finished else None,
    }


def list_runs(words: list[str], chosen: "Listing") -> None:
    """``fedstill runs``."""
    from fedstill.report import guarantees
    from fedstill.runs import listing
    from fedstill.runs.folder import runs_below

    folder, tag = Path(words[0] if words else "runs"), chosen.tag
    found = map(listing.entry, runs_below(folder))
    entries = [entry for entry in found if tag is None or {tag, listing.UNKNOWN} & {*entry.tags}]
    if chosen.json_:
        runs = [_as_json(entry) for entry in entries]
        print_json({"folder": str(folder), "runs": runs, "remarks": _sums(entries)})
        return
    if not entries:
        print(f"{folder} has no run" + (f" with the tag {tag}" if tag else ""))
        return
    names = [str(entry.folder.relative_to(folder)) for entry in entries]
    tagged = any(entry.tags for entry in entries)
    heads = (f"in {folder}", "method", "data", "acc. %", "guarantee", "state", "when", *["tags"] * tagged)
    rows = [
        (
            *(name, entry.label, entry.data),
            _score(entry),
            "" if entry.guarantee is None else guarantees.words(entry.guarantee),
            entry.state + " (validation)" * ("validation" in entry.judged_on),
            f"{entry.last_change:%m-%d %H:%M}",
            *[" ".join(entry.tags)] * tagged,
        )
        for name, entry in zip(names, entries, strict=True)
    ]
    least = min(max(map(len, names)), _FOLDER)
    print_wide(table(heads, rows, whole=("acc. %", "state", "when"), least=least))
    print_sentences(_sums(entries))


def _score(entry: "Listed") -> str:
    """Accuracy in percent, or the error of a number."""
    if entry.accuracy is not None:
        return f"{100 * entry.accuracy:.1f}"
    error = (entry.errors or {}).get("rmse")
    return "" if error is None else f"RMSE {error:.4g}"


def _sums(entries: "Sequence[Listed]") -> list[str]:
    """The sums of the epsilons of runs on the same records, of which a list shows each."""
    real = [one.folder for one in entries if _may_add(one)]
    if len(real) < 2:
        return []
    from fedstill.report import spending
    from fedstill.report.record import read_run

    records = []
    for folder in real:
        with suppress(ValueError):  # a damaged one is in the list all the same
            records.append(read_run(folder, unfinished=True))
    return spending.sums(records)


def _may_add(entry: "Listed") -> bool:
    """Whether a run has a guarantee with real noise, or has not finished and has released something."""
    if entry.guarantee is not None:
        return entry.guarantee.holds and not entry.guarantee.simulated
    from fedstill.runs.folder import RunFolder
    from fedstill.runs.journal import JournalFiles

    return JournalFiles(RunFolder(entry.folder).journal).spent.exists()


def _as_json(entry: "Listed") -> dict[str, object]:
    from fedstill.report import guarantees

    changed = entry.last_change.isoformat(timespec="seconds")
    return {
        **entry._asdict(),
        "folder": str(entry.folder),
        "guarantee": guarantees.as_json(entry.guarantee),
        "finished": changed if entry.state == "finished" else None,
        "last_change": changed,
    }


def remove(words: list[str], consent: "Removal") -> None:
    """``fedstill runs remove``."""
    from fedstill.runs import listing

    found = {place: listing.removable(place) for place in map(Path, words)}
    number = len({run for runs in found.values() for run in runs})
    if not consent.yes:
        for place, runs in found.items():
            print(f"{place}: {len(runs)} run{'s' * (len(runs) != 1)}")
        if not sys.stdin.isatty():
            raise Bad("nobody can be asked here, so nothing is removed; add --yes")
        if input(f"Remove {number} run{'s' * (number != 1)} for good? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing removed")
            return
    for place, runs in found.items():
        for run in runs:
            listing.remove(run, place)
    print(f"{number} run{'s' * (number != 1)} removed")


def watch(words: list[str], chosen: "Watching", form: "Format") -> None:
    """``fedstill watch``."""
    run = Path(words[0])
    from fedstill.report.live_page import document

    if form.json_:
        print_json(document(run, {}))
    else:
        _serve_page(run, chosen)


def _serve_page(place: Path, chosen: "Watching") -> None:
    from fedstill.report.live_page import LivePage

    with LivePage(place, chosen.port) as page:
        try:
            print(f"{place}: {page.url} (Ctrl-C ends the page, not the run)", flush=True)
            if chosen.browser:
                import webbrowser

                webbrowser.open(page.url)
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


def publish(words: list[str], target: "Published", form: "Format") -> None:
    """``fedstill publish``."""
    from fedstill.attacks import results as attacks
    from fedstill.attacks.release_policy import pass_gate
    from fedstill.base.lookup import add_working_folder
    from fedstill.report import publish as publishing

    add_working_folder()
    run = Path(words[0])
    out = target.out or Path("published") / run.resolve().name
    gate = [] if target.gate is None else pass_gate(run, target.gate)
    chosen = target.model_dump(include={"shape", "onnx", "positive", "threshold"})
    done = publishing.publish(run, out, attacks=attacks.stored(run), gate=gate, **chosen)
    if gate:
        done["gate"] = gate
    if target.hub is not None:
        done["hub"] = publishing.upload(out, target.hub)
    if form.json_:
        print_json(done)
    else:
        print(f"model: {out} ({', '.join(done['files'])})" + (f"\nhub: {done['hub']}" if "hub" in done else ""))


def judge(words: list[str], judged: "Judged", form: "Format") -> None:
    """``fedstill evaluate``."""
    from fedstill import judged as judging
    from fedstill.base.lookup import add_working_folder

    add_working_folder()
    chosen = judged.model_dump(exclude={"predictions"})
    found = judging.evaluate(words[0], words[1], **chosen)
    if judged.predictions is not None:
        found.save(judged.predictions)
    measures = found.measures()
    if form.json_:
        rows = {row.measure: {"value": row.value, "low": row.low, "high": row.high} for row in measures.itertuples()}
        calibration = {"calibration": found.scores.calibration()} if isinstance(found, judging.Evaluation) else {}
        print_json({"records": found.records, "measures": rows, **calibration, "remarks": found.remarks})
        return
    who = "persons" if found.persons is not None else "records"
    shown = [[row.measure.replace("_", " "), *_shown(row.value, row.low, row.high)] for row in measures.itertuples()]
    print_wide(table(["measure", "value", "95 % interval"], shown))
    print(f"{found.records:,} records; intervals by resampling {who}. No guarantee covers the scores of these records.")
    for remark in found.remarks:
        print(remark)


def predict(words: list[str], wanted: "Predicted", form: "Format") -> None:
    """``fedstill predict``."""
    from fedstill import predictions
    from fedstill.base.lookup import add_working_folder

    add_working_folder()
    if wanted.out is not None and wanted.out.exists():
        raise Bad(f"{str(wanted.out)!r} exists; name a new file for the predictions")
    found = predictions.predict(words[0], words[1], **wanted.model_dump(exclude={"out"}))
    if wanted.out is not None:
        found.save(wanted.out)
    if form.json_:
        rows = found.to_pandas().to_dict("records")
        print_json({"records": len(rows), "predictions": rows, "remarks": [*found.told]})
        return
    if wanted.out is None:
        print(found.to_pandas().to_csv(), end="")
    else:
        print(f"{wanted.out}: {len(found.predicted):,} records. No guarantee covers the predictions of these records.")
    for remark in found.told:
        print(remark, file=sys.stderr)


def _shown(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """A value and its interval as texts; an absent one is a dash."""
    if value is None or value != value:
        return "-", "-"
    return f"{value:.3f}", "-" if low is None or low != low else f"{low:.3f} to {high:.3f}"


_TAG = "{0} needs a tag and a run: fedstill runs {0} baseline runs/fedavg-digits-0"
_TWO = "compare needs two runs or more: fedstill runs compare runs/a runs/b"
_PLACE = "remove needs the folder of a run or of a comparison: fedstill runs remove FOLDER ... [--yes]"
RUNS = Command(
    list_runs,
    "[FOLDER]",
    "List the runs in FOLDER (runs) and below it; show in which settings and results some differ; tag them; or remove "
    "runs, or comparisons with all their runs.\n\nExample: fedstill runs tag baseline runs/fedavg-digits-0",
    ("Listing",),
    below={
        "compare": Command(compare, "RUN ...", "Show the settings and results in which runs differ.", (FORM,), _TWO),
        "tag": Command(tag, "TAG RUN ...", "Give runs a tag.", needs=_TAG.format("tag")),
        "untag": Command(untag, "TAG RUN ...", "Take a tag from runs.", needs=_TAG.format("untag")),
        "remove": Command(remove, "FOLDER ...", "Remove runs, or comparisons with their runs.", ("Removal",), _PLACE),
    },
)
WATCH = Command(
    watch,
    "RUN",
    "Follow a run, or all runs of a comparison, on a page of this machine: rounds, clients that answered, bytes, "
    "epsilon and time left. The page only reads, and no other machine can open it.\n\n"
    "Example: fedstill watch runs/fedavg-digits-0",
    ("Watching", FORM),
)
EVALUATE = Command(
    judge,
    "RUN DATA",
    "Judge a run's model on a labelled file: accuracy, areas under curves, sensitivity ..., with 95 % intervals. Of "
    "the run's own data those records are judged that it held out; of other data the test split, or all records.\n\n"
    "Example: fedstill evaluate runs/afl new_patients.csv --positive yes --group patient",
    ("Judged", FORM),
    needs="usage: fedstill evaluate RUN DATA [flags]; name a finished run and a labelled file, folder or data set",
)
PREDICT = Command(
    predict,
    "RUN DATA",
    "Predict the classes, or the numbers, of new records with the model of a run: of a CSV or parquet file, whose "
    "columns are found by name, or of the pictures in a folder. They need no labels.\n\n"
    "Example: fedstill predict runs/afl new_patients.csv --keep patient --out predicted.csv",
    ("Predicted", FORM),
    needs="usage: fedstill predict RUN DATA [flags]; name a finished run, and a table or a folder of pictures",
)
PUBLISH = Command(
    publish,
    "RUN",
    "Write a run's model as files for plain PyTorch, with a model card: accuracy, bytes and guarantee.\n\n"
    "Example: fedstill publish runs/fedgm --out handed-on",
    ("Published", FORM),
)
