"""``fedstill publish``: a run's model as files that need no fedstill, with a model card."""

import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from safetensors.torch import save

import fedstill
from fedstill import measures, methods
from fedstill.base import files
from fedstill.base.errors import first_line
from fedstill.base.weights import state
from fedstill.data.table_schema import TableSchema
from fedstill.experiment.config import flat
from fedstill.experiment.reuse import check_code, read_job
from fedstill.experiment.trained import Trained, model_of
from fedstill.report import caveats, guarantees, pixels, programs, regression, rows, spending
from fedstill.report.groups import setting_words
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, measure_words, read_run
from fedstill.report.tables import balanced_accuracy
from fedstill.schema import clean

_RESIZED = {
    "rotation": "as the EXIF tag says",
    "transparency": "over white",
    "crop": "largest centred square",
    "resize": "bilinear, antialiased (Pillow)",
    "scale": "8 bits; gray of 16 bits / 257",
}
"""The work of `fedstill.data.pictures.fitted` on a picture, in its order; the program crops and resizes."""
_LONGEST = 1000
"""Largest length of a text on the card."""
PROGRAM, ONNX, WEIGHTS, CARD, FACTS = "model.pt2", "model.onnx", "model.safetensors", "README.md", "config.json"
ROWS = "rows.py"
"""The reader of a table's rows (`fedstill.report.rows`), beside a program that takes them."""
PIXELS = "pixels.py"
"""The reader of pictures (`fedstill.report.pixels`)."""


def publish(
    run: Path,
    out: Path,
    *,
    shape: tuple[int, ...] = (),
    onnx: bool = False,
    attacks: Sequence[str] = (),
    gate: Sequence[str] = (),
    positive: str | int | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Write the model of the finished run ``run`` to the new folder ``out``.

    ``model.pt2`` is a program of `torch.export`: it takes pictures, uint8 ``(n, c, h, w)``, of any size after
    ``--size``, the raw rows of a table with a schema, float64 ``(n, columns)``, or vectors ``(n, d)``, and returns
    logits ``(n, classes)`` or the number in its unit; that of a run on features begins with the backbone.
    ``model.safetensors`` has the network's weights, ``config.json`` schema, shape, classes and normalisation,
    ``rows.py`` or ``pixels.py`` reads rows or pictures for the program, and ``README.md`` says what the model is and
    what its guarantee rests on. No file has the folders of this machine, which may name persons.

    Args:
        run: folder of the run.
        out: folder of the files.
        shape: for a run on features of images, channels, height and width of the images that the program takes; by
            default those of the run's data, which are read for that.
        onnx: whether to write ``model.onnx`` too, for ONNX Runtime.
        attacks: what attacks on the run have found, in words (`fedstill.attacks.results.stored`).
        gate: what a policy asked and what was found (`fedstill.attacks.release_policy.pass_gate`).
        positive: the class of two that ``threshold`` is for; by default the last.
        threshold: probability from which that class is predicted; by default the likelier class is.

    Returns:
        The folder, the files and the number of parameters.

    Raises:
        ValueError: there is no finished run or no model for all, ``out`` has files, ``shape`` does not fit, code of the
            user's own has changed since, or torch or ONNX cannot write the model; one sentence. No file is left then.
    """
    record, job = read_run(run), read_job(run, run, "")
    check_code(run, job)
    model = model_of(job)
    taken, schema = _shape(model, shape), _schema(record, model)
    size = None if shape else record.config["experiment"].get("size")
    decision = decision_of(model, positive, threshold)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        begun = next(out.glob(f".*{files.PART}"), None) if out.is_dir() else None
        remedy = f"delete {begun.name} there, if nobody publishes at the moment, or choose" if begun else "choose"
        raise ValueError(f"{out} exists; {remedy} an empty folder")
    part = out / f".{os.getpid()}{files.PART}"
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    part.mkdir(parents=True)
    try:
        onnx_file = part / ONNX if onnx else None
        programs.write(model, taken, part / PROGRAM, onnx_file, schema=schema, size=size)
        if schema is not None:
            files.write_bytes(part / ROWS, inspect.getsource(rows).encode())
        elif len(taken) == 3:
            files.write_bytes(part / PIXELS, inspect.getsource(pixels).encode())
        weights = {name: tensor.contiguous() for name, tensor in state(model.network).items()}
        files.write_bytes(part / WEIGHTS, save(weights))
        facts = {**facts_of(record, model, taken, schema), **decision}
        texts = {
            FACTS: json.dumps(facts, indent=2, ensure_ascii=False) + "\n",
            CARD: card_of(record, facts, onnx=onnx, attacks=attacks, gate=gate),
        }
        for name, text in texts.items():
            files.write_bytes(part / name, without_folders(text, record).encode())
        _move(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # it has the model
                folder.rmdir()
    return {"folder": str(out), "files": sorted(path.name for path in out.iterdir()), **facts}


def without_folders(text: str, record: RunRecord) -> str:
    """A text of the run's with the last part of each path that its settings name, in place of the path."""
    config = record.config
    values = (
        *flat({**config["experiment"], **config["method"]}).values(),
        record.summary["data"],
        config.get("data_path"),
    )
    words = {word for value in values if value is not None for word in (str(value), str(value).rpartition(":")[0])}
    for word in sorted(filter(_leads_away, words), key=len, reverse=True):
        for form in (str, _plain, _in_json):
            whole = rf"(?<![\w./~]){re.escape(form(word))}(?!\w)"
            text = re.sub(whole, form(_name(word)).replace("\\", r"\\"), text)
    return text


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _leads_away(path: str) -> bool:
    """Whether a text is the path of a place outside of the working folder."""
    return bool(re.match(r"/|~|\.\.|[A-Za-z]:[\\/]", path) and _name(path))


def _name(path: str) -> str:
    """The last part of a path, of Windows too."""
    return (PureWindowsPath(path) if path[1:2] == ":" else Path(path)).name


def _move(part: Path, out: Path) -> None:
    """Move the files into place, the card last; all of them, or none."""
    moved: list[Path] = []
    try:
        for path in sorted(part.iterdir(), key=lambda path: (path.name == CARD, path.name)):
            moved.append(out / path.name)
            os.replace(path, moved[-1])
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _shape(model: Trained, given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the records that the program takes."""
    if model.features is None:
        if given not in ((), model.shape):
            raise ValueError(f"--shape is {given}, but the model takes {model.shape}; leave it out")
        return model.shape
    if given:
        if len(given) != 3 or min(given) < 1:
            raise ValueError(f"--shape is {given}; give channels, height and width of an image: --shape 3 224 224")
        return given
    if not model.pictures:
        raise ValueError("the run keeps no shape of images, as one whose server has none; give it: --shape 3 224 224")
    return model.pictures


def _schema(record: RunRecord, model: Trained) -> TableSchema | None:
    """The schema of the run's table, as it was for the run; None without one."""
    found, kept = record.table_schema, record.config.get("table_schema")
    if found is not None and kept is None and found.features != model.columns:
        named = record.config["experiment"]["schema_file"]
        raise ValueError(f"{named} has other columns than the run's model; bring the schema of the run back")
    return found


def decision_of(model: Trained, positive: str | int | None, threshold: float | None) -> dict[str, Any]:
    """The class of two that measures are of, and the probability from which it is predicted, if it is stated.

    As ``{"decision": {"positive": ..., "threshold": ...}}``; nothing of other models.

    Raises:
        ValueError: as `fedstill.experiment.trained.Trained.decided`.
    """
    name = model.class_names[model.decided(positive, threshold)]
    if model.target is not None or len(model.class_names) != 2:
        return {}
    return {"decision": {"positive": name, **({} if threshold is None else {"threshold": float(threshold)})}}


def upload(folder: Path, name: str) -> str:
    """Upload a published folder to the Hugging Face hub as the model ``owner/name``; returns its address.

    Raises:
        ValueError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi(library_name="fedstill", library_version=fedstill.__version__)
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Publish a model of fedstill"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        why = first_line(error)
        raise ValueError(
            f"{folder} is complete, but {name} was not uploaded ({why}); log in with 'hf auth login'"
        ) from error


def facts_of(
    record: RunRecord, model: Trained, shape: tuple[int, ...], schema: TableSchema | None = None
) -> dict[str, Any]:
    """What a program needs to use the model; mean and standard deviation are of its input, or of the features."""
    behind = {} if model.features is None else dict(zip(("backbone", "backbone_sha256"), model.features, strict=True))
    size = record.config["experiment"].get("size")
    resized = {} if size is None else {"preprocessing": {"size": size, **_RESIZED}}
    return {
        "model": record.config["experiment"]["model"],
        **behind,
        "num_parameters": sum(weight.numel() for weight in model.network.parameters()),
        "shape": list(shape),
        **({"columns": list(model.columns)} if model.columns else {}),
        **({"schema": schema.model_dump(mode="json")} if schema is not None else {}),
        **_said(model),
        "mean": list(model.normalisation.mean),
        "std": list(model.normalisation.std),
        **resized,
        "version": fedstill.__version__,
    }


def _said(model: Trained) -> dict[str, Any]:
    """What the program's outputs are: logits of classes, or a number that its range has scaled to [-1, 1]."""
    if model.target is None:
        return {"class_names": list(model.class_names)}
    return {"target": model.class_names[0], "target_range": list(model.target)}


def card_of(
    record: RunRecord,
    facts: dict[str, Any],
    *,
    onnx: bool = False,
    attacks: Sequence[str] = (),
    gate: Sequence[str] = (),
) -> str:
    """The model card in Markdown, with the header that the hub reads.

    Args:
        record: the run.
        facts: what `facts_of` and `decision_of` say.
        onnx: whether the folder has an ONNX program too.
        attacks: what was found by attacks on the run, a line each.
        gate: what a gate before publishing found, a line each.
    """
    summary = record.summary
    task, tag, what = _task(facts)
    behind = ""
    if "backbone" in facts:
        behind = (
            f"\nIt works on the features of the public network {_plain(facts['backbone'])} (SHA-256 "
            f"{facts['backbone_sha256'][:16]}...), which no\nclient trained. `{PROGRAM}` contains that network, under "
            "its own licence.\n"
        )
    hidden = "".join(f"* {_plain(text[0].upper() + text[1:])}.\n" for text in _caveats(record))
    hidden = f"\nWhat the measures hide:\n\n{hidden}" if hidden else ""
    tried = [f"* {_plain(text)}" for text in attacks]
    tried = tried or ["* No attack on this run is stored (`fedstill attack`), which says nothing of its success."]
    return f"""---
library_name: pytorch
pipeline_tag: {tag}-{task}
tags: [federated-learning, fedstill]
---

# {_plain(record.label)} on {_plain(summary["data"])}

A {what} ({_plain(facts["model"])}, {facts["num_parameters"]:,} parameters) that
{_clients(summary)} trained with fedstill's method {_plain(summary["method"])}.
{behind}
| | |
|---|---|
{"".join(_scores(record, facts))}| task | {_plain(setting_words(record))} |
| upload of a client, mean of all | {human_bytes(summary["bytes_up_per_client"])} |
| download of a client, mean of all | {human_bytes(summary["bytes_down_per_client"])} |
| rounds | {summary["rounds"]} |
| seed | {summary["seed"]} |
{hidden}
## Use

{_use(facts, onnx=onnx)}{_outputs(facts)}
`{WEIGHTS}` has the network's weights alone.

{_columns(facts)}## Privacy

{chr(10).join(privacy_lines(record))}

## Attacks

{chr(10).join(tried)}

{_asked(gate)}{_reproduce(record)}fedstill {_plain(str(summary["version"]))}, {_plain(str(summary["finished"]))}.
"""


def _caveats(record: RunRecord) -> list[str]:
    """What the measures hide, without the number of test records that equal a private one."""
    found, copies = caveats.of_run(record), caveats.copies(record)
    if not spending.hides_numbers(record):
        return found
    general = "test records that equal a training record count too; their number is not published"
    return [*(text for text in found if text not in copies), general]


def _task(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    """The hub's word for the task, its word for the records, and both in words."""
    kind, tag = ("vectors", "tabular") if len(facts["shape"]) == 1 else ("images", "image")
    kind = "rows" if "schema" in facts else kind
    if "target" in facts:
        return "regression", tag, f"regression of {_plain(facts['target'])} on {kind}"
    return "classification", tag, f"classifier of {kind}"


_ON_THE_CARD = ("accuracy", "balanced-accuracy", "sensitivity", "specificity", "precision", "f1")
"""Measures of which the card has intervals."""


def _scores(record: RunRecord, facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the card's table on what the test records say, with 95 % intervals where there are some."""
    if "target" in facts:
        yield from _errors(record)
        return
    of = _plain(record.summary["judged_on"])
    if (asked := record.get("measure")) and asked["name"] not in _ON_THE_CARD and not record.measures:
        yield f"| {_plain(asked['name'])} on {of} | {measure_words([asked['value']])} |\n"
    tuned = ", after each client's own training, which is not in this model"
    tuned = tuned if methods.find(str(record.config["method"]["name"])).personal else ""
    accuracy, counts = record.summary["accuracy"], record.confusion
    if counts is None or accuracy is None or abs(np.trace(counts) / counts.sum() - accuracy) > 1e-9:
        yield f"| accuracy on {of}{tuned} | {accuracy_words(accuracy, None)} % |\n"
        if (mean := balanced_accuracy(record)) is not None:
            yield f"| balanced accuracy, mean recall of the classes | {accuracy_words(mean, None)} % |\n"
        return
    decision = facts.get("decision")
    positive = facts["class_names"].index(decision["positive"]) if decision else 0
    says = {
        "accuracy": f"accuracy on {of}{tuned}",
        "balanced accuracy": "balanced accuracy, mean recall of the classes",
        "auc": "AUC, the area under the receiver's curve",
        "log loss": "log loss, nats",
        "brier": "Brier score (summed over classes)",
    }
    measured = (record.measures or {}).get(decision["positive"]) if decision else None
    found: Mapping[str, Sequence[float | None]] = measured or measures.of_counts(counts, positive)
    for key, values in found.items():
        name = "F1" if key == "f1" else key.replace("_", " ")
        word = says.get(name, f"{name} for {_plain(decision['positive'])}" if decision else name)
        yield f"| {word} | {_bounded(values, share=name not in ('log loss', 'brier'))} |\n"
    persons = facts.get("schema", {}).get("group") or record.persons
    how = "them"
    if persons and measured:
        how = f"whole persons ({_plain(persons)})"
    elif persons:
        how = f"them; {_plain(persons)} has several, so `fedstill evaluate` has wider ones"
    yield f"| test records; intervals by resampling {how} | {int(counts.sum()):,} |\n"


def _bounded(values: Sequence[float | None], share: bool) -> str:
    """A measure with its interval, a share as a percentage; without the interval where the records define none."""
    value, low, high = ((100 if share else 1) * one if one is not None else None for one in values)
    if value is None:
        return "not defined by the test records"
    digits, unit = (2, " %") if share else (4, "")
    ends = "" if low is None or high is None else f" (95 % interval {low:.{digits}f} to {high:.{digits}f})"
    return f"{value:.{digits}f}{unit}{ends}"


def _errors(record: RunRecord) -> Iterator[str]:
    """The lines of the card's table on a predicted number."""
    for name, words in regression.measures((record.numbers or {})["all"]).items():
        yield f"| {name} on {_plain(record.summary['judged_on'])}, with its 95 % interval | {words} |\n"
    schema = record.table_schema
    if schema is not None and schema.outside == "clip":
        low, high = schema.range or (0, 0)
        yield f"| true numbers outside of {low:g} to {high:g} | clipped before they are compared |\n"


def privacy_lines(record: RunRecord) -> list[str]:
    """The lines of the card on the run's guarantee."""
    promised = record.guarantee
    holds = guarantees.is_finite(promised)
    lines = [f"* {guarantees.words(promised) if holds else 'No guarantee.'}"]
    lines += [
        f"* {_plain(sentence, 4 * _LONGEST)}"
        for sentence in guarantees.explained(promised, sent=record.summary["bytes_up"] > 0)
    ]
    if holds:
        lines += [f"* Neighbours: {_plain(promised.adjacency)}.", f"* Composed by: {_plain(promised.accountant)}."]
    lines += [f"* {_plain(sentence)}" for sentence in spending.of_model(record)]
    if guarantees.is_simulated(promised):
        lines.append("* **The noise came from the run's seed, so whoever knows the seed can remove it.**")
    return lines


def _asked(gate: Sequence[str]) -> str:
    """The section on the policy that let the model out, if one did."""
    lines = "".join(f"* {_plain(text, 4 * _LONGEST)}\n" for text in gate)
    opening = "The model was published under a policy (`fedstill publish --gate`):"
    return f"## Policy\n\n{opening}\n\n{lines}\n" if gate else ""


def _clients(summary: Mapping[str, Any]) -> str:
    """How many clients have a part in the model."""
    without = len({refusal["client"] for refusal in summary["refused"]})
    return f"{summary['clients']} clients" + (f" ({without} of them without all of their replies)" if without else "")


def _use(facts: Mapping[str, Any], *, onnx: bool) -> str:
    """The section's code, from a raw record to the program's output."""
    if "schema" in facts:
        return _use_of_rows(onnx=onnx)
    shape = ", ".join(map(str, facts["shape"]))
    name, given, np_given = "vectors", f"torch.rand(1, {shape})", f"np.random.rand(1, {shape}).astype(np.float32)"
    takes = f"vectors (n, {shape}), floats, not normalised"
    if len(facts["shape"]) == 3:
        channels = facts["shape"][0]
        side = f"{channels}, height, width" if "preprocessing" in facts else shape
        takes = f"images (n, {side}), uint8 from 0 to 255" + ", of any size" * ("preprocessing" in facts)
        name, given = "images", f"torch.zeros(1, {shape}, dtype=torch.uint8)"
        np_given = f"np.zeros((1, {shape}), np.uint8)"
    running = f"""```python
import torch

model = torch.export.load("{PROGRAM}").module()
logits = model({given})  # {takes}
```

{_before(facts)}"""
    if not onnx:
        return running
    return f"""{running}With ONNX Runtime, where the {name} are an array:

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{ONNX}")
logits = session.run(["logits"], {{"records": {np_given}}})[0]
```

"""


def _use_of_rows(*, onnx: bool) -> str:
    other = f' With `Model(".", onnx=True)` ONNX Runtime computes, by `{ONNX}`.' if onnx else ""
    return f"""```python
from rows import Model

model = Model(".")
model.predict("new.csv")  # or a list of dictionaries, or a pandas, polars or Arrow table
```

`{ROWS}` checks each row by the [schema](#schema): an absent column and a value that the schema refuses are a
sentence with the row, and values that it clips or takes for others are counted in a warning. Without it, a program
takes float64 (n, columns) in the order of the schema: numbers as they are, dates as days since 1 January of year 1
(day 1; Python's `date.toordinal`), booleans as 0 and 1, categories as their place in the list from 0 on (the number of
categories for others), gaps as NaN. It fills gaps,
scales, clips and makes the columns of categories itself, and gives NaN for a row that the schema refuses.{other}

"""


def _outputs(facts: Mapping[str, Any]) -> str:
    """What the outputs are, and the threshold of a class of two, if one is stated."""
    if "target" in facts:
        name, (low, high) = _plain(facts["target"]), facts["target_range"]
        return f"The output (n, 1) is {name} in its unit; in training it went from {low:g} to {high:g}.\n"
    found = f"Classes, in the order of the logits: {', '.join(map(_plain, facts['class_names']))}.\n"
    if "threshold" not in (decision := facts.get("decision", {})):
        return f"{found}The class with the largest logit is predicted.\n"
    name, threshold = _plain(decision["positive"]), decision["threshold"]
    found += (
        f"Decision threshold: {name} is predicted from a probability (softmax of the logits) of {threshold:g} on.\n"
    )
    if threshold != 0.5:
        found += f"The measures above are at 0.5; `fedstill evaluate RUN DATA --threshold {threshold:g}` has its.\n"
    return found


def _columns(facts: Mapping[str, Any]) -> str:
    """The section on the schema of a table."""
    if (schema := facts.get("schema")) is None:
        return ""
    lines = []
    for name, column in schema["columns"].items():
        limits = column["range"] or column["values"] or ("false", "true")
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in limits]
        shown = (" to " if column["range"] else ", ").join(texts)
        fill = f"{fill:g}" if isinstance(fill := column["missing"], float) else fill
        gap = "refused" if fill is None else f"{fill}, and a column that tells gaps"
        lines.append(f"| {_plain(name)} | {column['kind']} | {_plain(shown)} | {_plain(gap)} | {column['outside']} |")
    whole = " to ".join(f"{value:g}" for value in schema["range"] or ()) or ", ".join(schema["classes"])
    return f"""## Schema

The target is {_plain(schema["target"])}: {_plain(whole)}. The columns, in the order that the program takes:

| column | kind | range or values | a gap is | a value outside is |
|---|---|---|---|---|
{chr(10).join(lines)}

"""


def _before(facts: Mapping[str, Any]) -> str:
    """The way from a picture's file to the program's input; the columns of a table without a schema."""
    if "columns" in facts:
        return (
            f"The numbers of a vector are these columns, in this order: {', '.join(map(_plain, facts['columns']))}.\n\n"
        )
    if len(facts["shape"]) == 1:
        return ""
    inside = "The program scales and normalises pixels"
    if "preprocessing" in facts:
        size = facts["preprocessing"]["size"]
        inside += f"; it takes the largest centred square, resized to {size} x {size} (bilinear, antialiased)"
    return f"""{inside}. `{PIXELS}` reads a file, turned as its EXIF
tag says, laid over white where it is transparent and with gray of 16 bits as 8 bits; it refuses several pictures in
one file, and colours for a model of gray pictures:

```python
import torch
from pixels import read

images = torch.from_numpy(read("picture.jpg", channels={facts["shape"][0]}))
```

"""


def _reproduce(record: RunRecord) -> str:
    """The command on a line of code: a fence that no backticks within it end."""
    said = str(record.config.get("command") or "")
    words = [*map(_last, given := _words(said))]
    if not (command := clean(" ".join((said if words == given else shlex.join(words)).split()), 4 * _LONGEST)):
        return ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"## Reproduce\n\n{fence}\n{command}\n{fence}\n\n"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote of an edited file that nobody closes
        return command.split()


def _last(word: str) -> str:
    """A word of a command without the folders of a path that leads away; ``--flag=path`` too."""
    flag, sign, path = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{sign}{_name(path)}" if _leads_away(path) else word


def _plain(text: object, longest: int = _LONGEST) -> str:
    """Text on one line without control characters and Markdown's and HTML's special ones."""
    line = clean(" ".join(str(text).split()), longest)
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in line)
