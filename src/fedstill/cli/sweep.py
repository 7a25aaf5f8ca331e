"""``fedstill sweep``."""

import sys
from functools import partial
from pathlib import Path

from fedstill.cli.common import Bad, line_of, print_json, terminal, usage

EXAMPLE = """
data: digits
partition: classes:1
model: convnet:width=16,depth=2
methods:
  fedavg:
    rounds: 5
    try: {local.lr: [0.03, 0.1, 0.3]}
  fedgm:
    ipc: 1
    try: {matching.nets: [10, 30, 100]}
"""


def sweep(words: list[str]) -> None:
    """``fedstill sweep FILE.yaml``."""
    from fedstill.cli import flags, parser

    about = (
        "Try settings of several methods on validation records, each method as often as the others, and write a table "
        "with the best of each. With --final, those run on the test set too. The same command resumes a sweep.\n\n"
        "Example: fedstill sweep examples/sweep.yaml --final"
    )
    sections = [parser.Section(flags.SweepOutput())]
    text = parser.flags_text("fedstill sweep", sections)
    head, _, example = about.partition("\n\nExample: ")
    shown = f"usage: fedstill sweep FILE.yaml [flags]\n\n{head}\n\nthe file:{EXAMPLE}\nexample: {example}\n{text}"
    if usage(words, shown):
        return
    if words[0].startswith("-"):
        raise Bad(f"the file comes first: fedstill sweep FILE.yaml {' '.join(words)}")
    (output,) = parser.parse("fedstill sweep FILE.yaml", about, words[1:], sections)
    from fedstill.experiment.progress import watch
    from fedstill.experiment.sweep import run_sweep
    from fedstill.experiment.sweep_file import read_sweep
    from fedstill.lookup import add_working_folder
    from fedstill.report import tuning

    add_working_folder()
    file = Path(words[0])
    found, command = read_sweep(file), line_of(["sweep", *words])
    out = output.out or Path("runs") / f"sweep-{file.stem}"
    with watch(terminal(stderr=output.json_), file.stem, quiet=output.quiet) as watcher:
        run = partial(run_sweep, found, out, final=output.final, parallel=output.parallel)
        outcome = run(watcher=watcher, command=command)
    page = tuning.write(outcome, out, command)
    failed = next((one for one in outcome.tests.values() if one.score is None), None)
    if output.json_:
        folder = {"folder": str(out), "report": str(page)}
        print_json({**folder, "budget": tuning.budget(outcome), "rows": tuning.rows(outcome)})
    else:
        console = terminal()
        console.print(tuning.terminal(outcome))
        console.print(f"every try: {out / 'sweep.csv'}\nreport: {page}", soft_wrap=True, markup=False)
    if failed is not None:
        print(f"fedstill: {failed.entry.label} failed on the test set: {failed.failure}", file=sys.stderr)
        raise SystemExit(1)
