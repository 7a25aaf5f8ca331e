"""What a policy lets out of a site, in plain words, and the mistakes that would show weeks later."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

from fedstill import lookup, methods, schema
from fedstill.data import backbones, sources
from fedstill.engines.client_evaluation import steps_of
from fedstill.protocol import Method
from fedstill.sites.policy import SitePolicy

T = TypeVar("T")
_MUCH = 10.0
"""Epsilon above which a budget protects little."""
_FEW = 10
"""Number of records below which a reply tells much of each."""


def check(policy: SitePolicy) -> Iterator[str]:
    """Check a policy against this machine, reading its data; yields warnings, for what may be meant.

    Raises:
        ValueError: a method, a step, a device, code or data do not exist, or the policy allows nothing; one sentence.
    """
    yield from _check_steps(policy)
    _check_device(policy)
    for name in policy.own_code:
        _check_code(name)
    for name, place in policy.public.items():
        if not place.exists():
            raise ValueError(f"the public data {name!r} are in {place}, which does not exist (public)")
        load = sources.load_raw if policy.features else sources.load
        _loaded(f"the public data {name!r}", partial(load, str(place), size=policy.size))
    yield from _check_data(policy)
    if policy.budget is not None and policy.budget > _MUCH:
        yield f"a budget of epsilon {policy.budget:g} protects little; 1 to {_MUCH:g} is usual (budget)"
    if policy.simulated_noise:
        yield "the server can subtract the privacy noise (simulated_noise); for tests only"
    if policy.unprotected:
        yield "THE SERVER CAN GET THE RECORDS: unprotected fields may leave (unprotected)"


def _check_steps(policy: SitePolicy) -> Iterator[str]:
    if not policy.methods:
        yield "no method is allowed, so every request is refused (methods)"
    for entry in policy.methods:
        method, steps = _entry(policy, entry)
        refusals = [reason for step in steps if (reason := _refusal(policy, method, step)) is not None]
        if len(refusals) == len(steps):
            raise ValueError(f"the policy allows {entry!r} but refuses all that it would send: {refusals[0]}")


def _entry(policy: SitePolicy, entry: str) -> tuple[Method, list[str]]:
    """The method and the steps of an entry of ``methods``."""
    name, step = entry, ""
    if entry not in methods.TABLE and entry not in policy.own_code:
        name, _, step = entry.rpartition(".")
    if name not in methods.TABLE and name not in policy.own_code:
        near = lookup.suggestion(entry.partition(".")[0], methods.TABLE)
        raise ValueError(f"there is no method {entry!r} (methods){near or '; fedstill methods lists them'}")
    method = methods.find(name)()
    steps = steps_of(method)
    if step and step not in steps:
        near = lookup.suggestion(step, steps)
        raise ValueError(f"{name} has no step {step!r} (methods){near or '; it has ' + ', '.join(steps)}")
    return method, [step] if step else list(steps)


def _refusal(policy: SitePolicy, method: Method, step: str) -> str | None:
    try:
        policy.check_fields(method, step)
    except schema.Refused as error:
        return str(error)
    return None


def _check_device(policy: SitePolicy) -> None:
    try:
        kind = torch.device(policy.device).type
    except RuntimeError as error:
        raise ValueError(f"device is {policy.device!r}; it must be cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {policy.device!r}; it must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {policy.device!r}, and this machine has no GPU that torch can use")
    if kind == "cuda" and policy.max_memory_gb:
        raise ValueError(f"max_memory_gb is {policy.max_memory_gb:g}; with device cuda it must be 0, for CUDA's sake")


def _check_code(name: str) -> None:
    if lookup.is_file(name):
        raise ValueError(f"own_code has the file {name!r}; a site runs code of installed packages only")
    try:
        lookup.import_own(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"own_code has {name!r}, which can't be imported: {error}") from error


def _check_data(policy: SitePolicy) -> Iterator[str]:
    cache_dir = policy.state / "data"
    load: Callable[..., sources.Part | sources.Raw] = sources.load_raw_part if policy.features else sources.load_part
    part = _loaded("the site's records", partial(load, str(policy.data), size=policy.size, cache_dir=cache_dir))
    if isinstance(part, sources.Raw):
        for name in policy.features:
            read = partial(backbones.load, name, part.shape, download=False, cache_dir=cache_dir)
            _loaded(f"the backbone {name!r} (features)", read)
    records, labels = len(part.train[0]), part.train[1]
    if records < policy.min_records:
        raise ValueError(f"the site has {records} records; with fewer than {policy.min_records} it answers nothing "
                         "(min_records)")  # fmt: skip
    if policy.budget is not None and policy.delta * records >= 1:
        raise ValueError(f"delta is {policy.delta:g}; with {records:,} records it must be below {1 / records:.2g}")
    if len(torch.unique(labels)) < 2:
        yield "all records have one class"
    if policy.min_records < _FEW:
        yield f"min_records is {policy.min_records}; the replies of so few records tell much of each"


def _loaded(what: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except (ValueError, OSError) as error:
        raise ValueError(f"{what} can't be read: {error}") from error


def words(policy: SitePolicy) -> Iterator[str]:
    """What leaves the site under a policy, in sentences."""
    for entry in policy.methods:
        method, steps = _entry(policy, entry)
        name = entry if len(steps) > 1 else entry.rpartition(".")[0] or entry
        for step in steps:
            if _refusal(policy, method, step) is None:
                yield from (f"{name}, step {step}: {field}" for field in _fields(method, step))
    if policy.budget is not None:
        yield (
            f"all runs together: epsilon {policy.budget:g} at delta {policy.delta:g} for each unit that a method "
            "protects; then nothing more is released"
        )
    elif policy.unprotected:
        yield "all runs together: without a limit, as there is no budget"
    yield "to every run: the site's number, whether and when it answers, and refusals that do not depend on the records"
    yield f"nothing else: neither files of {policy.data} nor what another step would send"


def _fields(method: Method, step: str) -> Iterator[str]:
    fields = steps_of(method)[step].reply.schema
    for names, how in (
        ([f.name for f in fields if f.is_released], "with privacy noise, charged to the budget"),
        ([f.name for f in fields if not f.is_released and f.is_public], "as it is; the method holds it to be public"),
        ([f.name for f in fields if not f.is_released and not f.is_public], "as it is, WITHOUT PROTECTION"),
    ):
        if names:
            yield f"{', '.join(names)} {how}"
