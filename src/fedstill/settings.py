"""The base of every settings class, and types of fields that several have."""

from typing import Annotated

from annotated_types import Gt, Lt
from pydantic import BaseModel, ConfigDict, PositiveFloat

Epsilon = PositiveFloat | None
"""Privacy cost of an upload at the run's delta; None adds no noise and guarantees nothing."""
Share = Annotated[float, Gt(0), Lt(1)]
"""A share strictly between nothing and the whole."""


class Settings(BaseModel):
    """Hyperparameters: frozen, every value checked, unknown names refused, docstrings become help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
