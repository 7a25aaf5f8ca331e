"""The base of every settings class, and shared types of fields."""

from typing import Annotated, ClassVar

from annotated_types import Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, PositiveFloat

Epsilon = PositiveFloat | None
"""Privacy cost of an upload at the run's delta; None adds no noise and gives no guarantee."""
Rate = Annotated[float, Gt(0), Le(1e38)]
"""A learning rate, within what float32 can hold."""
Share = Annotated[float, Gt(0), Lt(1)]
"""A share strictly between 0 and 1."""


class Settings(BaseModel):
    """Hyperparameters: frozen and checked, unknown names refused; the docstrings of fields are their help texts."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
