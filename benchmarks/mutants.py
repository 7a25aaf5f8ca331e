"""Plant faults in the code that guarantees rest on, one at a time, and count those that the tests find.

    python benchmarks/mutants.py privacy --number 60 --seed 0

works in a clone of the last commit. A fault is one change of the source: a comparison, a sign or a number, a condition
turned round, a statement left out. Where no test fails, the fault survives; ``results/mutants.json`` lists each
survivor with its line, so that somebody can judge whether the change is one that anybody could notice.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.json"
_NEIGHBOURS = ["tests/methods/test_neighbours.py", "tests/engines/test_release.py"]
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "privacy": (["src/fedstill/privacy"], ["tests/privacy", *_NEIGHBOURS, "tests/engines/test_budget.py"]),
    "methods": (
        [
            *(
                f"src/fedstill/methods/{name}.py"
                for name in ("afl", "fedcgs", "gh_ofl", "safle", "dp_fl", "ldp_fedavg")
            ),
            *(f"src/fedstill/methods/{name}.py" for name in ("fedgm_records", "fedrd_records", "fedauxfdp", "fedkadp")),
            "src/fedstill/methods/parts",
        ],
        [*_NEIGHBOURS, "tests/methods"],
    ),
    "sites": (["src/fedstill/sites"], ["tests/sites"]),
    "journal": (
        [f"src/fedstill/sites/site/{name}.py" for name in ("chain", "site_journal", "checkpoint", "charges")],
        [
            f"tests/sites/test_{name}.py"
            for name in ("log", "journal_vectors", "state_format", "seals", "lasting_limits", "checkpoint", "ledger")
        ],
    ),
    "ledger": (
        [f"src/fedstill/privacy/{name}.py" for name in ("accounting", "ledger", "solver", "mechanisms")],
        [f"tests/privacy/test_{name}.py" for name in ("ledger", "mechanisms", "accounting", "logistic", "composition")],
    ),
}
"""Name -> the code, and the tests that are to find its faults, in the order in which they run."""
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_REPLACED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}


class Mutant(NamedTuple):
    """One fault: the file, the line, and the text in place of what stands at the places from ``start`` to ``end``."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Every fault that can be planted in a file."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(text)):
        for changed in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[start:end].decode()
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, start, end, before, changed)


def _code(tree: ast.AST) -> Iterator[Any]:
    """The nodes of functions' bodies, without docstrings, annotations and messages."""
    for found in ast.walk(tree):
        if isinstance(found, ast.FunctionDef):
            yield from (node for statement in found.body for node in _within(statement))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.FunctionDef | ast.Raise | ast.JoinedStr | ast.Assert):  # the first has its own turn
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _within(child)


def _changes(node: Any) -> Iterator[str]:
    """Texts in place of a node's."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield f"({ast.unparse(ast.Compare(node.left, [_COMPARED[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _REPLACED:
        if not any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in (node.left, node.right)):
            yield f"({ast.unparse(ast.BinOp(node.left, _REPLACED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield {bool: lambda v: repr(not v), int: lambda v: repr(v + 1), float: lambda v: repr(1.5 * v or 1.0)}[
            type(node.value)
        ](node.value)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def failure(copy: Path, tests: list[str], limit: float, slow: bool = False) -> str:
    """What the tests say in a copy where one fails, ``slow`` ones too if asked; empty if all pass."""
    env = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", *([] if slow else ["-m", "not slow"]), *tests]
    try:
        ended = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {limit:g} s"
    return ended.stdout + ended.stderr if ended.returncode else ""


def run_one(copy: Path, mutant: Mutant, tests: list[str], limit: float, slow: bool) -> tuple[bool, float]:
    """Whether the tests find a fault in the copy, and the seconds that they took."""
    file = copy / mutant.path
    original = file.read_bytes()
    file.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    before = time.monotonic()
    try:
        found = bool(failure(copy, tests, limit, slow))
    finally:
        file.write_bytes(original)
    return found, time.monotonic() - before


def main() -> None:
    """Plant the faults and write the result, after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--number", type=int, default=60, help="faults, drawn from all (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="only survivors, with slow tests of their module")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests of one fault (default: 240)")
    chosen = parser.parse_args()
    places, tests = AREAS[chosen.area]
    files = [f for place in places for f in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))]
    every = [mutant for file in sorted(files) for mutant in mutants(file)]
    drawn = random.Random(chosen.seed).sample(every, min(chosen.number, len(every)))
    before = json.loads(RESULTS.read_text())[chosen.area] if chosen.slow else None
    if before is not None:
        left = {(one["path"], one["before"], one["after"]) for one in before["survivors"]}
        drawn = [mutant for mutant in drawn if (mutant.path, mutant.before, mutant.after) in left]
    survivors: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "-q", ROOT, copy], check=True)
        if words := failure(copy, tests, chosen.limit):
            raise SystemExit(f"a test fails without any fault:\n{words[-3000:]}")
        for done, mutant in enumerate(drawn, 1):
            own = sorted((copy / "tests").rglob(f"test_{Path(mutant.path).stem}.py"))  # the quickest to find it
            first = [str(file.relative_to(copy)) for file in own]
            found, seconds = run_one(
                copy, mutant, first or tests if chosen.slow else [*first, *tests], chosen.limit, chosen.slow
            )
            if not found:
                survivors.append({key: getattr(mutant, key) for key in ("path", "line", "before", "after")})
            words = "found" if found else "SURVIVED"
            print(
                f"{done}/{len(drawn)} {words} in {seconds:.0f} s: {mutant.path}:{mutant.line} {mutant.after[:70]!r}",
                flush=True,
            )
            if before is None:
                _write(chosen, len(every), done, survivors)
        if before is not None:
            results = json.loads(RESULTS.read_text())
            results[chosen.area] |= {"found_by_slow_tests": len(drawn) - len(survivors), "survivors": survivors}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _write(chosen: argparse.Namespace, every: int, done: int, survivors: list[dict[str, object]]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[chosen.area] = {
        "command": f"python benchmarks/mutants.py {chosen.area} --number {chosen.number} --seed {chosen.seed}",
        "date": date.today().isoformat(),
        "possible": every,
        "planted": done,
        "found": done - len(survivors),
        "survivors": survivors,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
