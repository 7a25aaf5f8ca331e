"""The spec that a server sends to real sites, which is the same at every start of a run."""

from pathlib import Path

from fedstill.data import public
from fedstill.engines.run_spec import RunSpec
from fedstill.records import Records
from fedstill.runs.contents import Config

_SETTINGS = {"max_bytes": "max_bytes (--max-message-mb)"}
"""Facts of a spec with the settings that give them, where these have other names."""


def as_told(run: Path, begun: Config | None, spec: RunSpec, public_records: Records | None) -> RunSpec:
    """The spec with a sample of the public records; of a run that was begun before, the same as then.

    Sites name a run's state by all of its spec: with another they would take it for another run, forget what they did
    and release again.

    Args:
        run: the run's folder.
        begun: its ``config.json``; None before its first start.
        spec: the spec of this start.
        public_records: the server's public records.

    Raises:
        ValueError: a fact is another than at the first start.
    """
    before = None if begun is None or begun.spec is None else RunSpec.read(begun.spec)
    if before is not None:
        spec = spec.replace(public_sample=before.public_sample)
    elif begun is None or begun.run is None:  # else an earlier version began it, which told no sample
        if public_records is not None and spec.public is not None and not public.is_noise(spec.public):
            spec = spec.replace(public_sample=public.sample(public_records))
    if before is not None and spec.text() != before.text():
        old, new = (one.model_dump(mode="json") for one in (before, spec))
        name = next(name for name in new if old[name] != new[name])
        raise ValueError(
            f"{run} was begun with {_SETTINGS.get(name, name)} = {old[name]}, now it is {new[name]}; the sites would "
            "take it for another run and release again: bring the former back, or start anew with another --out"
        )
    return spec
