"""``fedstill publish``."""

from pathlib import Path

from fedstill.cli.common import print_json


def publish(words: list[str]) -> None:
    """``fedstill publish``."""
    from fedstill.cli import flags

    about = (
        "Write a run's model as files for plain PyTorch, with a model card: accuracy, bytes and guarantee.\n\n"
        "Example: fedstill publish runs/fedgm --out handed-on"
    )
    if (found := flags.of_run("fedstill publish", about, words, flags.Published())) is None:
        return
    run, target, form = found
    from fedstill.attacks import report as attacks
    from fedstill.lookup import add_working_folder
    from fedstill.report import publish as publishing

    add_working_folder()
    out = target.out or Path("published") / run.resolve().name
    done = publishing.publish(run, out, shape=target.shape, onnx=target.onnx, attacks=attacks.stored(run))
    if target.hub is not None:
        done["hub"] = publishing.upload(out, target.hub)
    if form.json_:
        print_json(done)
    else:
        print(f"model: {out} ({', '.join(done['files'])})" + (f"\nhub: {done['hub']}" if "hub" in done else ""))
