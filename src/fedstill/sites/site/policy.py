"""A real site's policy: the site's own rules for the requests that it accepts."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from fedstill import methods, models, schema
from fedstill.base import lookup
from fedstill.base.files import expanded
from fedstill.base.settings import Settings, read_toml
from fedstill.data import features, sources
from fedstill.data.places import Reading
from fedstill.data.public import is_noise
from fedstill.data.published import numbers_are_names, places_of_numbers
from fedstill.data.table_schema import TableSchema
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.column_scale import NAME as SCALE_STEP
from fedstill.engines.column_scale import PrivateScale
from fedstill.engines.run_spec import RunSpec
from fedstill.privacy.releases import LEAST_DELTA
from fedstill.protocol import Method
from fedstill.sites.site.charges import Limits

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{4}(-[0-9a-f]{4}){4}$")]
"""Fingerprint of another site's public keys (`fedstill.sums.keys.fingerprint`)."""


class SitePolicy(Settings):
    """A site's policy, read from a TOML file with these settings; it refuses every other request."""

    client: NonNegativeInt
    """Number of the site in every run, from 0, as agreed with the server."""
    data: Path | None = None
    """The site's records: a table (a .csv or .parquet file), a folder of images or of parquet files, or an .npz file. A
    server can't choose them. None for a site that is a helper of masked sums and nothing else."""
    size: Annotated[int, Ge(1), Le(4096)] | None = None
    """Height and width to which the site's pictures, and public ones, are resized, and cropped at the centre."""
    schema_file: Path | None = None
    """Schema of a table (a TOML file, as the server's), by which the columns become numbers; relative to this file."""
    label_column: str | None = None
    """Column of the site's table with the classes; by default label, labels, fine_label or target, or the folders."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0, 1, ... of records whose labels are integers. A run whose classes have names needs them,
    as their order at the server need not be the site's."""
    state: Path
    """Folder for the site's journal, which is its ledger and its log, and the state of runs between steps."""
    methods: tuple[str, ...] = ()
    """Allowed steps: "METHOD" for all steps of a method, "METHOD.STEP" for one."""
    classes: tuple[str, ...] = ()
    """Names of the classes of the site's records, which "fedstill site init" writes here: a public statement, so that a
    run without one of them is refused before the records are read, and a failure tells nothing of a rare class."""
    budget: Annotated[float, Gt(0), Le(1e8)] | None = None
    """Maximum epsilon, for each unit, of all releases of all runs together; None releases nothing, or without a limit
    if ``unprotected``."""
    delta: Annotated[float, Ge(LEAST_DELTA), Lt(1)] = 1e-5
    """Delta of that epsilon, and the maximum delta of a run."""
    budget_per_run: PositiveFloat | None = None
    """Maximum epsilon, at ``delta``, of the releases of one run; None lets one run take the whole budget."""
    approval: Literal["none", "ask"] = "none"
    """Whether a new run waits until the site's operator approves it ("ask"): fedstill site approve."""
    unprotected: bool = False
    """Whether fields that no mechanism protects (models, images) may leave."""
    public_images: bool = False
    """Whether the images of ``data`` are public and only their labels are secret, as label privacy supposes. Otherwise
    a step that protects labels only needs ``unprotected``."""
    min_epsilon: Annotated[float, Ge(0)] = 1e-3
    """Smallest epsilon of a release at ``delta``; smaller ones would fill the ledger for nothing. 0 for no limit."""
    max_releases: PositiveInt = 10_000
    """Number of releases of all runs together, for the life of the site."""
    min_records: PositiveInt = 50
    """Minimum number of records; with fewer the site refuses every request."""
    max_failures: PositiveInt = 3
    """Number of questions that failed, or went beyond the budget, after which the site answers a run no more: whether a
    step fails, before the ledger refuses, may tell a bit of the records."""
    max_failures_ever: PositiveInt = 50
    """Number of such questions of all runs together after which the site answers nothing until this is raised."""
    max_questions: PositiveInt = 1000
    """Number of questions of a run that the site answers."""
    runs_per_day: PositiveInt = 100
    """Number of runs that the site begins in 24 hours."""
    refusals_per_day: PositiveInt = 2000
    """Number of messages of a day (UTC) that the site refuses with a line in its log; then it logs and answers none
    until the next day."""
    max_seconds: PositiveFloat = 3600.0
    """Largest time in seconds that a question may take; then its process is ended."""
    reply_seconds: NonNegativeFloat = 0.0
    """Seconds to a whole multiple of which a reply waits, from its question on, so that its time tells less of the
    records; with ``max_seconds`` no more than whether there is one. 0 for at once."""
    max_memory_gb: NonNegativeFloat = 16.0
    """Largest address space of a question's processes in gigabytes; 0 for no limit, which CUDA needs."""
    max_request_mb: Annotated[float, Gt(0), Le(16_384)] = 512.0
    """Largest request in megabytes, as the largest message of a run (--max-message-mb); nothing of a larger one is
    decoded, and the site stops to read it. The node reads this limit when it starts."""
    keep_sent_days: NonNegativeFloat = 30.0
    """Number of days for which the site keeps a copy of what it sent; 0 for none. Releases stay for good."""
    keep_sent_gb: NonNegativeFloat = 1.0
    """Largest size of these copies in gigabytes; the oldest go first."""
    state_gb: PositiveFloat = 50.0
    """Size of ``state`` in gigabytes from which on the site answers nothing: releases stay there for good."""
    messages_at_a_time: Annotated[int, Ge(1), Le(64)] = 2
    """Number of messages that the site works on at a time."""
    public: dict[str, Path] = {}
    """Paths of public data sets at this site, by the names that runs use; noise needs no entry."""
    features: tuple[str, ...] = ()
    """Backbones (--features) that a run may use; they are installed at this site."""
    measured_scale: bool = False
    """Whether a run of an allowed method may measure the scale of the table's columns first (--scale): sums of values
    and squares within their public ranges and counts of classes, with privacy noise."""
    simulated_noise: bool = False
    """Whether a run may draw privacy noise from its seed; the server can subtract such noise, so for tests only."""
    helper: bool = False
    """Whether the site is a helper of masked sums (docs/sums.md): it holds seeds of others' masks and opens totals."""
    helpers: tuple[Fingerprint, ...] = ()
    """Fingerprints of the helpers that the site trusts, which their operators tell it; it takes part in a masked sum
    only if all helpers of the run are among them."""
    traitors: Annotated[int, Ge(1), Le(8)] = 1
    """Helpers who may work with the server without harm, at least, in a masked sum that the site takes part in."""
    partners: tuple[Fingerprint, ...] = ()
    """Fingerprints of the sites on whose noise this site counts, with sum_budget total."""
    sum_budget: Literal["alone", "total"] = "alone"
    """The epsilon of a masked sum that is charged: of the site's own noise, should everybody else work together
    (alone), or of the total, on the noise of its partners (total)."""
    own_code: tuple[str, ...] = ()
    """Names of methods and models outside of fedstill that a run may use, as "package.module:name"."""
    device: str = "cpu"
    """Device of the steps: cpu or cuda."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Number of threads of a step."""

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true as a number, a word as true or false, an unknown device, and an empty path, which is a folder."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if kind is bool and str(value).lower() not in ("true", "false"):  # a command line has words
            raise ValueError("write true or false, without quotes")
        if kind is not bool and isinstance(value, bool):
            raise ValueError(f"{str(value).lower()} is no value of this setting")
        if info.field_name == "device" and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", str(value)):
            raise ValueError(f"{value!r} is no device; write cpu or cuda")
        paths = [*value.values()] if isinstance(value, dict) else [value] if kind in (Path, Path | None) else []
        if bad := [path for path in paths if isinstance(path, str) and (not path.strip() or "\0" in path)]:
            raise ValueError(f"{bad[0]!r} is no path; leave it out, or name a folder or file")
        return value

    @classmethod
    def read(cls, path: Path) -> "SitePolicy":
        """Read the file; its relative paths are relative to its folder.

        Raises:
            ValueError: the file can't be read, a newer fedstill wrote it (its ``format``), or a setting is invalid.
        """
        none = f"there is no policy {str(path)!r}; make one with fedstill site init"
        policy = read_toml(cls, path, f"the policy {str(path)!r}", none)
        here = path.resolve().parent
        try:
            found = policy.model_copy(
                update={
                    "data": policy.data and here / expanded(policy.data),
                    "state": here / expanded(policy.state),
                    "schema_file": policy.schema_file and here / expanded(policy.schema_file),
                    "public": {name: here / expanded(place) for name, place in policy.public.items()},
                }
            )
        except ValueError as error:  # of a user whom the machine does not know
            raise ValueError(f"the policy {str(path)!r}: {error}") from error
        for name, at in found.public.items():  # lines after [public] belong to it, and would change nothing
            if name in cls.model_fields and not at.exists():
                raise ValueError(
                    f"the policy {str(path)!r} has {name!r} among its public data, which is a setting of the policy; "
                    "write that line above [public]"
                )
        return found

    @property
    def reading(self) -> Reading:
        """How the site's records are read."""
        schema = None if self.schema_file is None else TableSchema.read(self.schema_file)
        return Reading(self.size, self.label_column, schema=schema)

    @property
    def unlimited(self) -> bool:
        """Whether releases have no limit: there is no budget, and unprotected values may leave anyway."""
        return self.unprotected and self.budget is None

    @property
    def max_request(self) -> int:
        """``max_request_mb`` in bytes."""
        return int(self.max_request_mb * 10**6)

    def limits(self, spec: RunSpec) -> Limits:
        """Limits of the site's ledger for a run."""
        return Limits(
            self.delta,
            self.budget,
            min_epsilon=self.min_epsilon,
            max_releases=self.max_releases,
            allow_unbounded=self.unlimited,
            public_images=self.public_images or self.unprotected,
            budget_per_run=self.budget_per_run,
            run_limit=None if spec.budget is None else (spec.budget, spec.delta),
            alone=self.sum_budget == "alone",
        )

    def check_run(self, spec: RunSpec, step: object) -> None:
        """Refuse a step of a run that the policy does not allow, before any code of the method is imported.

        Raises:
            Refused: the policy does not allow the step.
        """
        if self.data is None:
            raise schema.Refused("the site has no records; it is a helper of masked sums (data)")
        if spec.scale is not None and not self.measured_scale:
            raise schema.Refused("the site's policy lets no run measure a scale of columns (measured_scale)")
        engines = spec.scale is not None and step == SCALE_STEP  # which belongs to no method
        if not {spec.name, f"{spec.name}.{step}"} & set(self.methods) and not (engines and self._names(spec.name)):
            allowed, refused = ", ".join(self.methods) or "nothing", schema.clean(f"{spec.name}.{step}")
            raise schema.Refused(f"the site's policy allows {allowed}, not '{refused}' (methods)")
        if any(lookup.is_file(name) for name in (spec.name, spec.model, *spec.models)):
            raise schema.Refused("the run names code in a file; a site runs code of installed packages only (own_code)")
        names = [spec.name] if spec.name not in methods.TABLE else []
        names += [name for name in (spec.model, *spec.models) if models.is_own(name)]
        if foreign := [name for name in names if name not in self.own_code]:
            raise schema.Refused(f"the site's policy does not allow the code '{schema.clean(foreign[0])}' (own_code)")
        if spec.features is not None and spec.features not in self.features:
            raise schema.Refused(
                f"the site's policy does not allow the backbone '{schema.clean(spec.features)}' (features)"
            )
        if spec.simulated_noise and not self.simulated_noise:
            raise schema.Refused(
                "the server knows the seed of the privacy noise (simulated_noise); use --noise entropy"
            )
        if spec.delta > self.delta:
            raise schema.Refused(f"the run's delta is {spec.delta:g}; the site's limit is {self.delta:g} (delta)")
        if spec.delta < LEAST_DELTA and not spec.simulated_noise:
            raise schema.Refused(f"the run's delta is {spec.delta:g}; real noise has tails to {LEAST_DELTA:g} only")
        named = {lookup.nfc(name) for name in spec.class_names}
        if missing := [name for name in self.classes or self.class_names if lookup.nfc(name) not in named]:
            raise schema.Refused(f"the site's class '{schema.clean(missing[0])}' is not a class of the run (classes)")
        if spec.public and not is_noise(spec.public) and spec.public.partition(":")[0] not in self.public:
            raise schema.Refused(f"the site has no public data '{schema.clean(spec.public)}' (public)")

    def _names(self, method: str) -> bool:
        """Whether a step of the method is allowed."""
        return any(entry == method or entry.startswith(f"{method}.") for entry in self.methods)

    def check_fields(self, method: Method, step: str, scale: PrivateScale | None = None) -> None:
        """Refuse a step whose reply has fields that the policy does not allow to leave.

        Raises:
            Refused: the method has no such step, or the policy does not allow a field.
        """
        steps = steps_of(method, scale)
        if step not in steps:
            raise schema.Refused(f"step '{schema.clean(step)}' is not one of {', '.join(sorted(steps))}")
        fields = steps[step].reply.schema
        if any(f.is_released for f in fields) and self.budget is None and not self.unprotected:
            raise schema.Refused("the site's policy has no budget, so nothing is released (budget)")
        bare = [f.name for f in fields if f.protection == "unprotected"]
        if bare and not self.unprotected:
            raise schema.Refused(f"the site's policy allows no unprotected field, such as '{bare[0]}' (unprotected)")


def class_names(policy: SitePolicy) -> tuple[str, ...]:
    """Names of the classes of the site's records: those of the source or of the policy, else their numbers."""
    cache_dir = policy.state / "data"
    read = partial(sources.load_raw_part, str(policy.data), policy.reading, cache_dir=cache_dir)
    part: sources.Raw = _loaded("the site's records", read)
    occur = torch.unique(torch.cat([part.train[1], part.test[1]])).tolist()
    return part.class_names or places_of_numbers(policy.class_names) or tuple(map(str, occur))


T = TypeVar("T")
_MUCH = 10.0
"""Epsilon above which a budget protects little."""
_FEW = 10
"""Number of records below which a reply tells much of each."""


def check(policy: SitePolicy) -> Iterator[str]:
    """Check a policy against this machine, reading its data; yields warnings, for what may be meant.

    Raises:
        ValueError: a method, a step, a device, code or data do not exist, or the policy allows nothing.
    """
    if policy.data is None:
        if policy.methods or not policy.helper:
            raise ValueError("the policy names no records (data); only a helper without methods has none (helper)")
        return
    yield from _check_steps(policy)
    _check_device(policy)
    for name in policy.own_code:
        _check_code(name)
    for name, place in policy.public.items():
        if not place.exists():
            raise ValueError(f"the public data {name!r} are in {place}, which does not exist (public)")
        load = sources.load_raw if policy.features else sources.load
        _loaded(f"the public data {name!r}", partial(load, str(place), Reading(policy.size)))
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
    kind = torch.device(policy.device).type
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
    if (own := policy.reading.schema) is not None and own.range is not None:
        raise ValueError(
            f"the target {own.target!r} of the schema is a number, and real sites take classes alone: every run would "
            "be refused; take a schema whose target has classes (schema_file)"
        )
    cache_dir = policy.state / "data"
    load: Callable[..., sources.SiteRecords | sources.Raw] = (
        sources.load_raw_part if policy.features else sources.load_part
    )
    part = _loaded("the site's records", partial(load, str(policy.data), policy.reading, cache_dir=cache_dir))
    yield from part.remarks
    if isinstance(part, sources.Raw):
        for name in policy.features:
            read = partial(features.load_backbone, name, part.shape, download=False, cache_dir=cache_dir)
            _loaded(f"the backbone {name!r} (features)", read)
    records, labels = len(part.train[0]), part.train[1]
    if tested := len(part.test[1]):
        yield f"of {records + tested:,} records {tested:,} are a test split of their own, and train nothing"
    if policy.class_names and not part.class_names:
        _check_labels(policy.class_names, torch.cat([part.train[1], part.test[1]]))
    if records < policy.min_records:
        raise ValueError(f"the site has {records} records; with fewer than {policy.min_records} it answers nothing "
                         "(min_records)")  # fmt: skip
    if policy.budget is not None and policy.delta * records >= 1:
        raise ValueError(f"delta is {policy.delta:g}; with {records:,} records it must be below {1 / records:.2g}")
    names = class_names(policy)
    if not policy.classes and not policy.class_names:
        listed = ", ".join(f'"{name}"' for name in names[:20])
        yield (
            "a run without one of the site's classes fails, which tells its server a bit; state them, as public: "
            f"classes = [{listed}{', ...' if len(names) > 20 else ''}]"
        )
    elif policy.classes and (unknown := [n for n in names if lookup.nfc(n) not in map(lookup.nfc, policy.classes)]):
        raise ValueError(f"the site has records of the class {unknown[0]!r}, which its policy lacks (classes)")
    if len(torch.unique(labels)) < 2:
        yield "all records have one class"
    if policy.min_records < _FEW:
        yield f"min_records is {policy.min_records}; the replies of so few records tell much of each"


def _check_labels(names: tuple[str, ...], labels: torch.Tensor) -> None:
    if numbers_are_names(names):
        if lacking := [label for label in torch.unique(labels).tolist() if str(label) not in names]:
            raise ValueError(f"the site has the class {str(lacking[0])!r}, which its policy lacks (class_names)")
        return
    if len(labels) and int(labels.max()) >= len(names):
        raise ValueError(
            f"the site has the class {int(labels.max())}, but the policy names {len(names)} classes, which are "
            f"0..{len(names) - 1}; number them from 0, or name more (class_names)"
        )


def _loaded(what: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except (ValueError, OSError) as error:
        raise ValueError(f"{what} can't be read: {error}") from error


def words(policy: SitePolicy) -> Iterator[str]:
    """Sentences on what leaves the site under a policy."""
    for entry in policy.methods:
        method, steps = _entry(policy, entry)
        name = entry if len(steps) > 1 else entry.rpartition(".")[0] or entry
        for step in steps:
            if _refusal(policy, method, step) is None:
                yield from (f"{name}, step {step}: {field}" for field in _fields(policy, method, step))
    if policy.budget is not None:
        yield (
            f"all runs together: epsilon {policy.budget:g} at delta {policy.delta:g} for each unit that a method "
            "protects; then nothing more is released"
        )
    elif policy.unprotected:
        yield "all runs together: without a limit, as there is no budget"
    if policy.measured_scale and policy.budget is not None:
        yield "before a run's other steps: sums of columns, with privacy noise, charged to the budget (measured_scale)"
    if policy.helper:
        yield "as a helper of masked sums: signatures of sets of clients, and sums of masks that others sealed to it"
    if policy.helpers:
        alone, others = policy.sum_budget == "alone", f"noise shared with {len(policy.partners)} partners"
        yield (
            f"in masked sums, with {len(policy.helpers)} known helpers: numbers that nobody reads alone, charged for "
            f"{'its own noise alone' if alone else others}"
        )
    if policy.data is None:
        return
    yield "to every run: the site's number and version, whether and when it answers, refusals that depend on no record"
    yield f"nothing else: neither files of {policy.data} nor what another step would send"


def _fields(policy: SitePolicy, method: Method, step: str) -> Iterator[str]:
    fields = steps_of(method)[step].reply.schema
    released = "with privacy noise, charged to the budget"
    if policy.budget is None:
        released = "with the noise that the server asks for, which may be NONE, without a limit, as there is no budget"
    for protection, how in (
        ("released", released),
        ("public", "as it is; the method holds it to be public"),
        ("unprotected", "as it is, WITHOUT PROTECTION"),
    ):
        if names := [f.name for f in fields if f.protection == protection]:
            yield f"{', '.join(names)} {how}"
