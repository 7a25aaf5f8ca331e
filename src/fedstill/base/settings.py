"""The base of every settings class, shared types of fields, and an invalid setting in one sentence."""

import tomllib
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from annotated_types import Gt, Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
)

from fedstill.base import files
from fedstill.base.lookup import suggestion

Epsilon = PositiveFloat | None
"""Privacy cost of an upload at the run's delta; None adds no noise and gives no guarantee."""
Rate = Annotated[float, Gt(0), Le(1e38)]
"""A learning rate, within what float32 can hold."""
MOST_CLASSES = 32768
"""Largest number of classes: a larger one is a mistake (a patient's number as the class), whose tables fill memory."""
Share = Annotated[float, Gt(0), Lt(1)]
"""A share strictly between 0 and 1."""


class Settings(BaseModel):
    """Hyperparameters: frozen and checked, unknown names refused; the docstrings of fields are their help texts."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _a_part_of_a_group(cls, value: object, info: ValidationInfo) -> object:
        """A mapping of some settings of a group, whose others keep the values of this field's own default."""
        return _completed(cls.model_fields[info.field_name or ""].default, value)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """``rounds=True`` is a mistake, which pydantic takes for 1; a validator of the field's own decides itself."""
        field = cls.model_fields[info.field_name or ""]
        if not any(isinstance(part, _OWN_VALIDATORS) for part in field.metadata):
            _check_truth(field.annotation, value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_set(cls, value: object) -> object:
        """A set has no order, which a list of names, of numbers or of tries has."""
        if isinstance(value, Set):
            raise ValueError("a set has no order; give a list")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_path(cls, value: object, info: ValidationInfo) -> object:
        """An empty text, as of a shell's unset variable, would be the working folder."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and not value and kind in (Path, Path | None):
            raise ValueError("give a path, or . for the working folder")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _one_number_for_several(cls, value: object, info: ValidationInfo) -> object:
        """A number where any number of them may stand, as ``mean=0.3``; an array or a column as its list."""
        if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):
            return value.tolist()
        kind = cls.model_fields[info.field_name or ""].annotation
        alone = isinstance(value, int | float) and not isinstance(value, bool)
        return (value,) if alone and get_origin(kind) is tuple and ... in get_args(kind) else value


def is_truth(value: object) -> bool:
    """Whether a value is a truth value, of Python or in an array or a tensor."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


_OWN_VALIDATORS = BeforeValidator, PlainValidator, WrapValidator


def _check_truth(annotation: Any, value: object) -> None:
    """Refuse a truth value where a type, or that of the parts of a list or a mapping, can only be a number.

    Raises:
        ValueError: there is one.
    """
    if is_truth(value):
        if _is_for_numbers(annotation):
            raise ValueError("it must be a number, and no truth value")
        return
    kinds = [part for part in get_args(annotation) if part not in (..., NoneType)]
    if get_origin(annotation) in (Union, UnionType) and len(kinds) == 1:
        _check_truth(kinds[0], value)
    elif isinstance(value, list | tuple) and kinds:
        whole = zip(kinds, value, strict=False) if len(kinds) > 1 else ((kinds[0], part) for part in value)
        for kind, part in whole:
            _check_truth(kind, part)
    elif isinstance(value, Mapping) and len(kinds) == 2:
        for part in value.values():
            _check_truth(kinds[1], part)


def _is_for_numbers(annotation: Any) -> bool:
    """Whether a type is a number's, or a union of such and None, without a validator that could take more."""
    if get_origin(annotation) is Annotated:
        kind, *more = get_args(annotation)
        return _is_for_numbers(kind) and not any(isinstance(part, _OWN_VALIDATORS) for part in more)
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        return bool(parts) and all(_is_for_numbers(part) for part in parts)
    return annotation in (int, float)


def _completed(default: object, value: object) -> object:
    if not (isinstance(default, Settings) and isinstance(value, Mapping)):
        return value
    own = {name: getattr(default, name) for name in type(default).model_fields}
    return {**own, **{name: _completed(own.get(name), part) for name, part in value.items()}}


def sentence(
    error: ValidationError,
    *,
    flags: str = "",
    kind: type[Settings] | None = None,
    also: Collection[str] = (),
    owners: Mapping[str, type[Settings]] = {},
) -> str:
    """A validation error as one sentence with the value and the limit.

    Args:
        error: the error.
        flags: a prefix of the setting's name.
        kind: the settings that were checked, to suggest a name in place of an unknown one.
        also: other names that may stand at the same place.
        owners: settings that stand apart, by the heading under which they do.
    """
    first = error.errors()[0]
    name = ".".join(part for part in first["loc"] if isinstance(part, str))  # without places in a list
    name = flags + name.replace("_", "-").rstrip("-") if flags else name
    why = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    why = _WORDS.get(first["type"], why)
    value = first["input"]
    if not flags and first["type"] in ("int_parsing", "float_parsing") and str(value).lower() == "none":
        why += ", or None (null in YAML) where it may be absent"
    if first["type"] == "missing":
        return f"{name} is missing; give it"
    if first["type"] == "extra_forbidden" and "." in str(first["loc"][-1]) and not flags:  # a flag's name in a file
        *path, last = str(first["loc"][-1]).split(".")
        inside = "".join(f"{part}: {{" for part in path)
        return f"{name} is not a setting here; write {inside}{last}: {value}{'}' * len(path)}"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting here{_remedy(name, kind, also, owners)}"
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # settings that conflict
        return f"{name}: {why}" if first["loc"] else why
    shown = repr(value)
    shown = f"a {type(value).__name__}" if "\n" in shown else shown  # a table's rows are nobody's but its owner's
    return f"{name} is {value if _is_number(value) else shown}; {why}"


def _remedy(name: str, kind: type[Settings] | None, also: Collection[str], owners: Mapping[str, type[Settings]]) -> str:
    """Remedy for an unknown setting: the place where it belongs, or the most similar name."""
    *path, last = name.split(".")
    if place := next((label for label, owner in owners.items() if last in owner.model_fields), None):
        return f"; put it under {place}:"
    there = [word.split(".") for word in [*(() if path else also), *(names(kind) if kind else ())]]
    beside = [words[-1] for words in there if words[:-1] == path]
    elsewhere = [".".join(words) for words in there if words[-1] == last]
    near = f"; did you mean {elsewhere[0]}?" if elsewhere else "; leave it out"
    return suggestion(last, beside, "".join(f"{part}." for part in path)) or near


def names(kind: type[Settings]) -> Iterator[str]:
    """The dotted names of all settings, those of settings inside them too."""
    for name, field in kind.model_fields.items():
        yield name
        for one in (field.annotation, *get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, Settings):
                yield from (f"{name}.{inner}" for inner in names(one))


S = TypeVar("S", bound=Settings)


def read_toml(kind: type[S], place: Path, what: str, missing: str | None = None) -> S:
    """The settings in a TOML file with its own ``format``.

    Args:
        kind: the class of the settings.
        place: the file.
        what: words for the file at the beginning of a sentence.
        missing: the sentence if there is no file; by default that it can't be read.

    Raises:
        ValueError: the file can't be read, a newer fedstill wrote it (its ``format``), or a setting is invalid.
    """
    try:
        return kind(**files.without_format(tomllib.loads(place.read_text("utf-8")), place))
    except FileNotFoundError as error:
        raise ValueError(missing or f"{what} can't be read as TOML: {error}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{what} can't be read as TOML: {error}") from error
    except ValidationError as error:
        raise ValueError(f"{what} is invalid: {sentence(error, kind=kind)}") from error


_WORDS = {
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "bool_parsing": "it must be True or False",
}
"""Limits in words, by pydantic's type of the error."""


def _is_number(value: object) -> bool:
    """Whether a value is a number in words, as flags give them."""
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False
