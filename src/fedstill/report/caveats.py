"""Caveats: what an accuracy hides, in sentences for tables, pages and cards; and the facts that define its task."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.experiment.config import Experiment
from fedstill.report.record import RunRecord
from fedstill.train.sgd import passes_of

_TESTED = "test record"
_FEW = 5
"""Number of test records of a class below which its recall says little."""
_SHOWN = 3
"""Number of classes, or of rows, that a sentence names."""
_FEW_STEPS = 200
"""Training steps of a client below which a model that is no better than a constant is called little trained."""
_POINTS, _STEEP = 0.03, 0.1
"""Rise of the accuracy, and share by which the loss falls, from one fifth of the rounds to the last, that are said."""
_LEVEL = 1.959963984540054
"""Standard deviations of a normal distribution that hold 95 % of it."""


def interval(right: int, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of which ``right`` of ``number`` were seen (Wilson 1927)."""
    if not number:
        return 0.0, 1.0
    share, square = right / number, _LEVEL**2
    centre = (share + square / (2 * number)) / (1 + square / number)
    half = _LEVEL / (1 + square / number) * math.sqrt(share * (1 - share) / number + square / (4 * number**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def of_run(run: RunRecord) -> list[str]:
    """Caveats of one run's accuracy, from its confusion matrix and the copies among its test records."""
    found = [] if run.confusion is None else _of_predictions(run)
    return [*found, *_of_records(run), *of_tries(run), *of_training(run)]


def of_tries(run: RunRecord) -> list[str]:
    """What the tries of ``--tune`` or a sweep came to, in a sentence: how many, on which records, what was chosen."""
    found = run.tries
    if found is None:
        return []
    chosen = ", ".join(f"{name} {f'{v:g}' if isinstance(v, float) else v}" for name, v in found["chosen"].items())
    failed = sum(one["value"] is None for one in found["tries"])
    some = f", of which {failed} failed" if failed else ""
    return [
        f"settings were chosen by {found['measure']} on validation records ({found['records']}) in "
        f"{len(found['tries'])} tries{some}: {chosen}"
    ]


def of_replies(runs: Sequence[RunRecord]) -> list[str]:
    """How many replies of a row were not used, of which the mean number of bytes per client says nothing."""
    number = sum(len(run.refused) for run in runs)
    if not number:
        return []
    words = "1 reply was" if number == 1 else f"{number:,} replies were"
    return [f"{words} lost or not used, and up/client is a mean over all clients, in which a lost reply has 0 bytes"]


def of_training(run: RunRecord) -> list[str]:
    """Caveats of a model that is not trained out: few steps at a client, or a loss that still falls, with the remedy.

    Accuracy and loss are those of the evaluated records, round by round; they decide nothing but this sentence.
    """
    if not run.finished:
        return []
    found, steps = [], client_steps(run)
    constant = bool(of_errors(run)) if run.confusion is None else _is_constant(run.confusion)
    if constant and run.guarantee.holds and run.guarantee.epsilon:
        once = ", or, for a method that only adds up, masked sums (--sums masked), which need noise once,"
        masked = str(run.config["experiment"].get("sums", "")).startswith("masked")
        found.append(
            "the noise may be too large for so few records: more clients, or less noise (a larger epsilon or a smaller "
            f"noise multiplier){'' if masked else once} make it smaller beside them"
        )
    elif constant and (steps is None or steps >= _FEW_STEPS) and run.tries is None:
        ranks = "" if run.confusion is None else ", and --measure auc tells whether it ranks"
        found.append(f"other rates, rounds or ridges may do better (--tune){ranks}")
    elif constant and steps is not None and steps < _FEW_STEPS:
        found.append(
            f"a client took {steps} steps in all (rounds x epochs x batches of records), which train little; raise "
            "--rounds or --local.epochs, or lower --local.batch-size, or let --tune try such settings"
        )
    for name, is_steep, words in _STILL:
        series = [float(line[name]) for line in run.metrics if line.get(name) is not None]
        part = max(1, len(series) // 5)
        if len(series) >= 2 * part and len(series) > 1:
            before, last = float(np.mean(series[-2 * part : -part])), float(np.mean(series[-part:]))
            if is_steep(before, last, 0 if run.confusion is None else int(run.confusion.sum())):
                end = "more rounds (--rounds), or a larger rate, would train it further"
                found.append(f"{words} in the last rounds, so {end}")
                break
    return found


def _rises(before: float, last: float, records: int) -> bool:
    """Whether an accuracy rises by more than `_POINTS`, and by more than two deviations of chance."""
    return records > 0 and last - before > max(_POINTS, 2 * math.sqrt(before * (1 - before) * 2 / records))


def _falls(before: float, last: float, records: int) -> bool:
    return last < (1 - _STEEP) * before


_STILL: Sequence[tuple[str, Callable[[float, float, int], bool], str]] = (
    ("accuracy", _rises, "accuracy still rises"),
    ("log_loss", _falls, "the loss still falls"),
)
"""Number of a round, whether two means of it tell that a model still learns, and the words."""


def client_steps(run: RunRecord) -> int | None:
    """Training steps of the median client in all rounds, as the settings say; None for a method without such rounds."""
    method = run.config.get("method", {})
    local = method.get("local")
    if not isinstance(local, Mapping) or run.counts is None or not isinstance(method.get("rounds"), int):
        return None
    if "epochs" not in local or "batch_size" not in local:
        return None
    records, size = int(np.median(run.counts.sum(1))), int(local["batch_size"])
    return int(method["rounds"]) * (local["epochs"] or passes_of(records, size)) * math.ceil(records / size)


def of_model(confusion: NDArray[np.int64], name: Callable[[int], str], kind: str = _TESTED) -> list[str]:
    """Caveats of a model: classes that it never predicts, and an accuracy that the largest class explains.

    Args:
        confusion: the judged records by true (rows) and predicted class, ``(C, C)``.
        name: the name of a class.
        kind: what such a record is called.
    """
    tested, predicted = confusion.sum(1), confusion.sum(0)
    found = []
    missed = np.flatnonzero((tested > 0) & (predicted == 0)).tolist()
    if len(missed) > 1 and np.count_nonzero(predicted) == 1:
        label, number = int(predicted.argmax()), int(predicted.sum())
        found.append(f"predicts one class, {name(label)}, for all {number:,} {kind}s, which is no result")
    elif missed:
        number = sum(int(tested[label]) for label in missed)
        found.append(f"never predicts {_classes(missed, name)}, of which there are {number:,} {kind}s")
    if _is_constant(confusion):
        label = int(tested.argmax())
        found.append(
            f"accuracy is not above that of always saying {name(label)} ({100 * tested.max() / tested.sum():.1f} % of "
            f"the {kind}s) by more than chance"
        )
    return found


def of_errors(run: RunRecord) -> list[str]:
    """The caveat of a model whose predictions of a number are no better than one number for all records."""
    share = ((run.numbers or {}).get("all") or {}).get("r2") or (None, None, None)
    least = share[0] if share[1] is None else share[1]
    if least is None or least > 0:
        return []
    return ["R2 is not above 0 by more than chance, so that one number for all records, their mean, errs no more"]


def _is_constant(confusion: NDArray[np.int64]) -> bool:
    """Whether always saying the largest class is as accurate, up to chance."""
    tested = confusion.sum(1)
    total, right, most = int(tested.sum()), int(np.trace(confusion)), int(tested.max(initial=0))
    return bool(np.count_nonzero(tested) > 1 and interval(right, total)[0] <= most / total)


def of_test(confusion: NDArray[np.int64], name: Callable[[int], str], kind: str = _TESTED) -> list[str]:
    """Caveats of a set of test records: classes without any, with few, or one alone."""
    tested = confusion.sum(1)
    if len(tested) > 1 and np.count_nonzero(tested) == 1:
        return [f"all {kind}s are of one class, {name(int(tested.argmax()))}, so accuracy is its recall"]
    found = []
    if without := np.flatnonzero(tested == 0).tolist():
        found.append(f"no {kind} is of {_classes(without, name)}, so nothing is known of its recall")
    if few := np.flatnonzero((tested > 0) & (tested < _FEW)).tolist():
        found.append(f"fewer than {_FEW} {kind}s are of {_classes(few, name)}, whose recall is undecided")
    return found


def copies(run: RunRecord) -> list[str]:
    """A sentence on test records that equal a training record."""
    number, counts = run.summary.get("copied_test_records"), "errors count" if run.numbers else "accuracy counts"
    return [f"{number:,} {_kind(run)}s equal a training record, and {counts} them too"] if number else []


def _classes(labels: Sequence[int], name: Callable[[int], str]) -> str:
    more = len(labels) - _SHOWN
    noun = "the class " if len(labels) == 1 else "the classes "
    return noun + ", ".join(name(label) for label in labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def of_rows(rows: Sequence[tuple[str, Sequence[RunRecord]]]) -> list[str]:
    """Sentences on the rows of a table: on the test records once, on each row's model by its name.

    Args:
        rows: the name and the runs, one per seed, of each row.
    """
    runs = [run for _, some in rows for run in some]
    about = dict.fromkeys(text for run in runs for text in _of_records(run))
    found = [f"{text[0].upper()}{text[1:]}." for text in about]
    of_names: dict[str, list[str]] = {}
    for name, some in rows:
        for text in dict.fromkeys([*(text for run in some for text in of_tries(run)), *of_replies(some)]):
            of_names.setdefault(text, []).append(name)
    for name, some in rows:
        told: dict[str, int] = {}
        seeds = [run for run in some if run.confusion is not None or run.numbers is not None]
        for run in seeds:
            for text in (*_of_predictions(run), *of_training(run)):
                told[text] = told.get(text, 0) + 1
        if text := _without_measure(some):
            of_names.setdefault(text, []).append(name)
        for text, count in told.items():
            of_names.setdefault(text, []).append(
                name if count == len(seeds) else f"{name} ({count} of {len(seeds)} seeds)"
            )
    for text, names in of_names.items():
        some_names = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        found.append(f"{some_names}: {text}.")
    return found


def _without_measure(runs: Sequence[RunRecord]) -> str:
    """A sentence on the runs of a row whose measure has no value, so that there is no mean over seeds."""
    asked = [found for run in runs if (found := run.get("measure"))]
    lacking = sum(found["value"] is None for found in asked)
    if not lacking:
        return ""
    which = "" if len(asked) == 1 else f" with {lacking} of {len(asked)} seeds, so that no mean over seeds is shown"
    return f"{asked[0]['name']} has no value{which}, as the records or the predictions define none"


def _of_records(run: RunRecord) -> list[str]:
    """Sentences on the records that a run was judged on."""
    found = [] if run.confusion is None else of_test(run.confusion, run.class_name, _kind(run))
    return [*found, *copies(run)]


def _of_predictions(run: RunRecord) -> list[str]:
    found = of_errors(run) if run.confusion is None else of_model(run.confusion, run.class_name, _kind(run))
    if not (number := run.get("unpredicted")):
        return found
    words = f"the outputs for {number:,} {_kind(run)}s are no finite numbers, as the model diverged, and count as wrong"
    return [f"{words}; use a smaller learning rate", *found]


def _kind(run: RunRecord) -> str:
    """What a record that the run was judged on is called; the tries of a sweep have validation records."""
    return "validation record" if "validation" in str(run.summary.get("judged_on")) else _TESTED


# Facts of a task -----------------------------------------------------------------------------------------------------

_Words = Callable[[Any], str]
_SAID: dict[str, _Words] = {
    "size": lambda value: f"images of {value} x {value} pixels",
    "schema_file": lambda value: f"columns by the schema {value}",
    "label_column": lambda value: f"classes of the column {value}",
    "group": lambda value: "records drawn by themselves" if value == "none" else f"whole groups by {value}",
    "group_bound": lambda value: f"at most {value} records a group",
    "features": lambda value: f"features {value}",
    "mean": lambda _: "stated mean",
    "std": lambda _: "stated deviation",
    "scale": lambda value: f"scale measured at epsilon {value.partition(':')[2]}",
    "num_classes": lambda value: f"{value} classes stated",
    "class_names": lambda value: f"{len(value)} classes stated",
    "models": lambda value: f"clients' models {', '.join(value)}",
    "limit": lambda value: f"{value:,} training records",
    "validation": lambda value: f"{100 * value:g} % of them for validation",
    "local_test": lambda value: f"{100 * value:g} % of each client's for its test",
    "measure": lambda value: f"measured by {value}",
    "drop": lambda value: f"{100 * value:g} % of the replies lost",
    "slow": lambda value: f"{100 * value:g} % of the clients too slow",
    "public": lambda value: f"public {value}",
    "delta": lambda value: f"delta {value:g}",
    "budget": lambda value: f"budget epsilon {value:g}",
    "noise": lambda value: f"{value} noise",
    "sums": lambda value: f"{value.partition(':')[0]} sums",
}
"""Setting of a task -> its words, where it is not the default."""
UNSAID = frozenset(
    {"data", "partition", "clients", "model", "seed"}  # said everywhere
    | {"engine", "workers", "cpus_per_client", "gpus_per_client", "threads", "device", "timeout", "min_clients"}
    | {"evaluate_every", "evaluate_uploads", "keep_replies", "max_message_mb"}
)
"""Settings that stand in every sentence on a task, or define none."""


def facts(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Words for each setting that defines a task, is not the default, and is the same in all ``settings``."""
    first, defaults = settings[0], Experiment().model_dump(mode="json")
    alike = [key for key in _SAID if all(one.get(key) == first.get(key) for one in settings)]
    return [_SAID[key](first[key]) for key in alike if first.get(key) != defaults[key]]


def said() -> frozenset[str]:
    """The settings that have words."""
    return frozenset(_SAID)
