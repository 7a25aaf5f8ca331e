"""The public settings of a run, which the server and all clients know before the first request."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Gt, Le, Len, Lt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn

from fedstill import methods, models, schema
from fedstill.base import seeds
from fedstill.base.records import Normalisation, Records
from fedstill.base.settings import Settings
from fedstill.base.weights import load, parameters, state
from fedstill.data.public import SAMPLED
from fedstill.engines.column_scale import PrivateScale
from fedstill.engines.masked_sums import MaskedSums
from fedstill.protocol import Method, shared_part

LARGEST = 600_000
"""Maximum length of the JSON text, in characters."""
DEFAULTS: dict[str, Any] = {"run": "0" * 32, "seed": 0, "max_bytes": 1 << 29, "delta": 1e-5, "simulated_noise": True}
"""Defaults of `RunSpec.of`, for a simulated run."""

Text = Annotated[str, Len(1, 200)]


def _method_or_settings(value: Any) -> Any:
    if not isinstance(value, Method | dict):
        raise ValueError("the method's settings must be an object")
    return value


def _image_or_vector(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) not in (1, 3):
        raise ValueError(f"a record has {len(shape)} dimensions; images have 3, vectors 1")
    return shape


def _plain(value: Method | dict[str, Any]) -> dict[str, Any]:
    return value.model_dump(mode="json") if isinstance(value, Method) else value


class PublicSample(Settings):
    """A server's description of its public records, by which a site notices that its own are others."""

    records: PositiveInt
    """Number of all public records."""
    labels: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of all labels."""
    sums: Annotated[tuple[float, ...], Len(1, SAMPLED)]
    """Random sum of each record of the sample (`fedstill.data.public.sample`)."""
    total: float
    """Random sum of all records."""

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if len(self.sums) != (needed := min(self.records, SAMPLED)):
            raise ValueError(f"{len(self.sums)} sums describe {self.records} records; {needed} are needed")
        return self


class RunSpec(Settings):
    """The public settings of a run.

    Real sites receive their JSON (`text`) and name the run's state folder by a hash of it. Do not change names, order
    or defaults of fields without a new `version`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(populate_by_name=True)

    version: Literal[1] = 1
    """Version of the JSON format."""
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random number of the run, drawn once by the server; a resumed run has the same."""
    name: Annotated[Text, Field(alias="method")]
    """Name of the method, as `fedstill.methods.find` takes it."""
    settings: Annotated[Any, BeforeValidator(_method_or_settings), PlainSerializer(_plain)]
    """The method, or its hyperparameters as received from a server (see `method`)."""
    model: Text
    """Name and options of the model, as `fedstill.models.build` takes them."""
    shape: Annotated[tuple[PositiveInt, ...], AfterValidator(_image_or_vector)]
    """Channels, height and width of an image, or the length of a vector."""
    class_names: Annotated[tuple[Annotated[str, Len(0, 200)], ...], Len(1)]
    """Class names of the task, in order."""
    mean: Annotated[tuple[float, ...], Len(1)]
    """Mean of each channel's pixels, in [0, 1], or of each column of vectors."""
    std: Annotated[tuple[PositiveFloat, ...], Len(1)]
    """Standard deviation of each channel's pixels, or of each column of vectors."""
    seed: NonNegativeInt
    """Seed of every random stream except privacy noise."""
    max_bytes: Annotated[int, Gt(0), Le(1 << 34)]
    """Size of the largest message that either side accepts."""
    delta: Annotated[float, Gt(0), Lt(1)]
    """Delta of all epsilons and of the noise calibration."""
    budget: PositiveFloat | None = None
    """Maximum epsilon of one client's releases in this run; None for no limit. A real site has its own limit too."""
    simulated_noise: bool = False
    """Whether privacy noise is drawn from the seed (the server could subtract it) instead of the system's entropy."""
    models: Annotated[tuple[Text, ...], Len(0, 1000)] = ()
    """Models of the clients, in turn, if they differ from ``model``."""
    public: Text | None = None
    """Public records, as `fedstill.data.public.load` takes them."""
    features: Text | None = None
    """Backbone that every client has, as `fedstill.data.features.load` takes it; records are its vectors."""
    backbone: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of that backbone."""
    public_sample: PublicSample | None = None
    """Sample of the public records, if they are of a data set that real sites have."""
    columns: Annotated[tuple[Annotated[str, Len(1, 200)], ...], Len(0, 10_000)] = ()
    """Names of the columns of a table's vectors, in order, by which a site orders its own."""
    table_schema: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the schema of a table: kinds, ranges and categories of its columns, the same at every site."""
    target: tuple[float, float] | None = None
    """Range of the target, if it is a number, whose name is the only class; outputs are scaled from it to [-1, 1]."""
    sums: MaskedSums | None = None
    """Helpers and sizes of masked sums; None where the server sees each upload."""
    scale: PrivateScale | None = None
    """Columns whose scale the first request measures, under an epsilon of its own; ``mean`` and ``std`` are then those
    of the public range."""

    @model_validator(mode="after")
    def _of_vectors(self) -> Self:
        if self.scale is not None and (len(self.shape) != 1 or self.scale.columns[-1] >= self.shape[0]):
            raise ValueError("the scale is of columns that the records do not have")
        return self

    @classmethod
    def of(cls, method: Method, records: Records, **facts: Any) -> Self:
        """The spec of a simulated run.

        Args:
            method: the method with its hyperparameters.
            records: records of the task, for their shape, classes and normalisation.
            **facts: other fields: ``model``, and values other than `DEFAULTS`.

        Raises:
            ValidationError: a value is out of its range.
        """
        kind, normalisation = type(method), records.normalisation
        task = {
            "name": f"{kind.__module__}:{kind.__qualname__}",
            "shape": records.shape,
            "class_names": tuple(map(str, range(records.num_classes))),
            "mean": normalisation.mean,
            "std": normalisation.std,
        }
        return cls(settings=method, **{**DEFAULTS, **task, **facts})

    def replace(self, **facts: Any) -> Self:
        """A copy with other values of some fields, checked like a new spec."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **facts})

    def text(self) -> str:
        """JSON of the spec, for `read`; facts that came later are left out where there are none."""
        return self.model_dump_json(by_alias=True, exclude={name for name in _LATER if not getattr(self, name)})

    @property
    def digest(self) -> bytes:
        """SHA-256 of `text`."""
        return hashlib.sha256(self.text().encode()).digest()

    @classmethod
    def read(cls, text: str) -> Self:
        """The spec that a server sent as `text`.

        Raises:
            Refused: the text is not JSON of a spec, or a value is out of its range.
        """
        if len(text) > LARGEST:
            raise schema.Refused(f"the run's spec has {len(text):,} characters; the limit is {LARGEST:,}")
        try:
            return cls.model_validate_json(text)
        except (ValidationError, RecursionError) as error:
            reason = "it nests too deeply"
            if isinstance(error, ValidationError):
                reason = _first(error)
            raise schema.Refused(f"the run's spec is invalid: {reason}") from error

    @cached_property
    def method(self) -> Method:
        """The method with its hyperparameters.

        After `read` the method is imported at first use, so that a site's policy can check its name before.

        Raises:
            Refused: there is no such method, or it does not take these settings.
        """
        if isinstance(self.settings, Method):
            return self.settings
        try:
            return methods.find(self.name)(**self.settings)
        except (ValueError, TypeError) as error:
            raise schema.Refused(f"method '{schema.clean(self.name)}' can't be set up: {_first(error)}") from error

    @property
    def num_classes(self) -> int:
        """Number of classes of the task."""
        return len(self.class_names)

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of the task's images."""
        return Normalisation(self.mean, self.std)

    @property
    def task(self) -> dict[str, Any]:
        """The fields that the final model's file needs: model, shape, class names, normalisation, and backbone."""
        names = {"model", "shape", "class_names", "mean", "std", "features", "backbone"}
        if self.columns:
            names.add("columns")
        if self.target is not None:
            names.add("target")
        return self.model_dump(mode="json", include=names, exclude_none=True)

    def architecture(self, client: int) -> str:
        """Name of the client's own model."""
        return self.models[client % len(self.models)] if self.models else self.model

    def new_model(
        self,
        weights: Mapping[str, Tensor] | None = None,
        *,
        draw: int = 0,
        architecture: str | None = None,
        device: torch.device | str = "cpu",
    ) -> nn.Module:
        """A model in train mode: random start number ``draw``, with ``weights`` copied in if given."""
        name = self.model if architecture is None else architecture
        assert name in (self.model, *self.models), f"{name} is not one of the run's models"
        with seeds.isolated(seeds.derive(self.seed, "model", draw)):
            model = models.build(name, self.shape, self.num_classes)
        if weights is not None:
            load(model, weights)
        return model.to(device).train()

    @cached_property
    def facts(self) -> schema.Facts:
        """Sizes and templates for the checks of every message."""
        model = self.new_model()
        names = ("columns",) if len(self.shape) == 1 else ("channels", "height", "width")
        templates = {
            "state": schema.template(state(model)),
            "parameters": schema.template(parameters(model)),
            "shared": schema.template(shared_part(self.method, model)),
        }
        templates[f"state of {self.model}"] = templates["state"]
        for name in {*self.models} - {self.model}:
            templates[f"state of {name}"] = schema.template(state(self.new_model(architecture=name)))
        return schema.Facts(
            sizes={**dict(zip(names, self.shape, strict=True)), "classes": self.num_classes},
            templates=templates,
            max_bytes=self.max_bytes,
        )


def _first(error: Exception) -> str:
    """The first fault of an error as a short line, whatever a server chose as names and values."""
    if not isinstance(error, ValidationError):
        return schema.clean(str(error), 500)
    first = error.errors()[0]
    return schema.clean(f"'{schema.clean('.'.join(map(str, first['loc'])))}': {first['msg']}", 500)


_LATER = ("features", "backbone", "public_sample", "columns", "table_schema", "target", "sums", "scale")
"""Facts that version 1 did not have; sites name the state of a run by a hash of its text."""
