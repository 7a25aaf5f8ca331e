"""What a server tells a real site about a run, beside the request: everything that a simulated client just knows."""

from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, Len, Lt
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from fedstill import methods, schema
from fedstill.engines.agreement import Agreement
from fedstill.records import Normalisation
from fedstill.settings import Settings

Text = Annotated[str, Len(1, 200)]
Numbers = Annotated[tuple[float, ...], Len(1, 16)]
LARGEST = 100_000
"""Bytes that terms may take."""


class Terms(Settings):
    """The public set-up of a run, as JSON."""

    version: Literal[1] = 1
    """Of this format."""
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Which run: a random number that the server drew once and keeps when it resumes."""
    method: Text
    """The method's name."""
    settings: dict[str, Any]
    """Its hyperparameters."""
    model: Text
    """As `fedstill.models.build` takes it."""
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Channels, height and width of an image."""
    class_names: Annotated[tuple[Annotated[str, Len(0, 200)], ...], Len(1, 10_000)]
    """The task's classes, in order."""
    mean: Numbers
    """Of the pixels of each channel, in [0, 1]."""
    std: Annotated[tuple[PositiveFloat, ...], Len(1, 16)]
    """Their standard deviation."""
    seed: NonNegativeInt
    """Of every random stream that is not privacy noise."""
    max_bytes: Annotated[int, Gt(0), Le(1 << 34)]
    """The largest message."""
    delta: Annotated[float, Gt(0), Lt(1)]
    """Where the method calibrates its noise."""
    budget: PositiveFloat | None = None
    """The run's own limit on a client's epsilon; the site has one of its own besides."""
    simulated_noise: bool = False
    """Whether privacy noise is to come from the seed, so that the server could subtract it."""
    models: Annotated[tuple[Text, ...], Len(0, 1000)] = ()
    """The clients' own models, in turn, where they differ."""
    public: Text | None = None
    """The public records, as `fedstill.data.public.load` takes them."""

    @classmethod
    def of(
        cls, agreement: Agreement, *, run: str, method: str, class_names: tuple[str, ...], public: str | None
    ) -> "Terms":
        """The terms of a run."""
        return cls(
            run=run,
            method=method,
            settings=agreement.method.model_dump(mode="json"),
            model=agreement.model,
            shape=agreement.shape,
            class_names=class_names,
            mean=agreement.normalisation.mean,
            std=agreement.normalisation.std,
            seed=agreement.seed,
            max_bytes=agreement.max_bytes,
            delta=agreement.delta,
            budget=agreement.budget,
            simulated_noise=agreement.simulated_noise,
            models=agreement.models,
            public=public,
        )

    @classmethod
    def read(cls, text: str) -> "Terms":
        """Read what came.

        Raises:
            Refused: it is no such JSON, or a value is out of its range.
        """
        if len(text) > LARGEST:
            raise schema.Refused(f"the run's terms take {len(text):,} characters; {LARGEST:,} are the most")
        try:
            return cls.model_validate_json(text)
        except (ValidationError, RecursionError) as error:
            what = "they nest too deeply"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                what = f"'{schema.clean('.'.join(map(str, first['loc'])))}': {first['msg']}"
            raise schema.Refused(f"the run's terms are wrong at {what}") from error

    @property
    def normalisation(self) -> Normalisation:
        """Of the task's images."""
        return Normalisation(self.mean, self.std)

    def agreement(self) -> Agreement:
        """What a site agrees to, once its policy has looked at method and model.

        Raises:
            Refused: the method does not know such settings.
        """
        try:
            method = methods.find(self.method)(**self.settings)
        except (ValueError, TypeError) as error:
            raise schema.Refused(f"method '{schema.clean(self.method)}' can't be set up: {error}") from error
        return Agreement(
            method=method,
            model=self.model,
            shape=self.shape,
            num_classes=len(self.class_names),
            normalisation=self.normalisation,
            seed=self.seed,
            max_bytes=self.max_bytes,
            delta=self.delta,
            budget=self.budget,
            simulated_noise=self.simulated_noise,
            models=self.models,
        )
