"""The base of every settings class."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Hyperparameters: frozen, every value checked, unknown names refused, docstrings become help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
