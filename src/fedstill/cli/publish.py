"""``fedstill publish``."""

from pathlib import Path

from fedstill.cli.common import Bad, print_json, usage


def publish(words: list[str]) -> None:
    """``fedstill publish``."""
    from fedstill.cli import flags, parser

    about = (
        "Write a run's model as files for plain PyTorch, with a model card: accuracy, bytes and guarantee.\n\n"
        "Example: fedstill publish runs/fedgm --out handed-on"
    )
    sections = [parser.Section(flags.Published()), parser.Section(flags.Format())]
    text = f"usage: fedstill publish RUN [flags]\n\n{about}\n" + parser.flags_text("fedstill publish", sections)
    if usage(words, text):
        return
    if words[0].startswith("-"):
        raise Bad(f"the run comes first: fedstill publish RUN {' '.join(words)}")
    run = Path(words[0])
    target, form = parser.parse("fedstill publish RUN", about, words[1:], sections)
    from fedstill.lookup import add_working_folder
    from fedstill.report import publish as publishing

    add_working_folder()
    out = target.out or Path("published") / run.resolve().name
    done = publishing.publish(run, out)
    if target.hub is not None:
        done["hub"] = publishing.upload(out, target.hub)
    if form.json_:
        print_json(done)
    else:
        print(f"model: {out} ({', '.join(done['files'])})" + (f"\nhub: {done['hub']}" if "hub" in done else ""))
