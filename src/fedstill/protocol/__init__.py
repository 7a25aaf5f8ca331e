"""The boundary between methods and engines: everything that a method's file needs.

A method is one frozen class. Its fields are the hyperparameters; its `server` is an ordinary loop over a `Federation`;
its steps run at a `Client` and turn a request into a `Reply`. No method knows which engine runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.base.weights import load, parameters, state
from fedstill.privacy.ledger import Part
from fedstill.privacy.releases import Released, map_released
from fedstill.protocol.sides import Client, Federation, Reply, Round, Step, Summation, step
from fedstill.schema import Change, Count, Labels, OwnState, Parameters, Public, Shared, State, Summed

__all__ = [
    "Change",
    "Client",
    "Count",
    "Federation",
    "Labels",
    "Method",
    "OwnState",
    "Parameters",
    "Part",
    "Public",
    "Records",
    "Released",
    "Reply",
    "Round",
    "Settings",
    "Shared",
    "State",
    "Step",
    "Summation",
    "Summed",
    "client_steps",
    "load",
    "load_own",
    "map_released",
    "own_part",
    "parameters",
    "public_images",
    "returns_run_model",
    "shared_part",
    "state",
    "step",
]


class Method(Settings, ABC):
    """One algorithm: `server` and at least one step. All other members have defaults and serve special cases.

    Attributes:
        personal: whether every client ends with a model of its own, so that only clients can evaluate the result.
        mixed: whether clients may have models of different architectures (``--models``).
        needs_public: ``"images"`` or ``"labelled"`` if the method refuses to run without public images, or without
            public images with the task's labels.
        rebuilds: whether `server` returns another network than the run's model (``--model``), which `rebuild` makes
            again; clients can't evaluate such a network.
        images_only: whether the method makes or changes images, so that records can't be vectors.
        numeric: whether the target may be a number: `Records.targets` in place of classes, and one output.
        protects: ``"record"``, ``"label"`` or ``"client"``: the unit of the guarantee with default settings, if there
            is one.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(ignored_types=(Step,))
    personal: ClassVar[bool] = False
    mixed: ClassVar[bool] = False
    needs_public: ClassVar[str] = ""
    rebuilds: ClassVar[bool] = False
    images_only: ClassVar[bool] = False
    numeric: ClassVar[bool] = False
    protects: ClassVar[str] = ""

    @abstractmethod
    def server(self, fed: Federation) -> nn.Module:
        """Run the method and return the final model, which is evaluated and saved."""

    @property
    def claims(self) -> str:
        """The unit that the method protects with these settings; by default `protects`, and nothing without noise."""
        settings = dict(self)
        silent = settings.get("epsilon", 1.0) is None or settings.get("noise_multiplier", 1.0) == 0
        return "" if silent else self.protects

    def own(self, model: nn.Module) -> frozenset[str]:
        """Names of state entries that stay at the clients; none by default. The rest crosses in `Shared` fields.

        A step stores them with ``client.state |= own_part(self, model)``.
        """
        return frozenset()

    def personal_model(self, client: Client, shared: Mapping[str, Tensor]) -> nn.Module:
        """The model that a client uses and evaluates: the server's ``shared`` part and the client's own stored part."""
        model = client.new_model(shared)
        load_own(self, model, client.state)
        return model

    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """The final model from its saved state ``weights``; ``network`` is a new model of the run, changed in place.

        A method that `rebuilds` overrides it; it is called for no other.
        """
        load(network, weights)
        return network

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        first = next(kind for kind in cls.__mro__ if {"rebuild", "rebuilds"} & vars(kind).keys())
        if "rebuild" in vars(first) and not cls.rebuilds and first is not Method:  # a subclass may say that it does not
            raise TypeError(f"{cls.__name__} has a method rebuild, but rebuilds is False; set it to True")
        for own in client_steps(cls).values():
            own.check(cls.__name__)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields or not (hasattr(type(self), name) or name in self.__private_attributes__):
            raise AttributeError(
                f"{type(self).__name__} is frozen, so self.{name} can't be set; keep what a client needs later in "
                "client.state, and what the server needs in a variable of server"
            )
        super().__setattr__(name, value)

    def first_draw(self, client: int) -> int:
        """The number (``draw`` of `Client.new_model`) of the random start of the model that a client sends first."""
        return 0

    def for_number(self) -> Self:
        """The method with the defaults for a number as the target, where nobody set others; as it is by default."""
        return self

    def opened(self, sent: Records) -> Records:
        """The images that the server uses, from those that clients sent; the same by default."""
        return sent

    @property
    def first_reply(self) -> tuple[Any, ...] | None:
        """The settings that replies to the first request depend on, or None if replies can't be reused.

        Runs of one task in which it is equal get the same replies, so a comparison of methods asks the clients once.
        The first step must keep nothing in ``client.state``. A class of the user's own shares replies with itself only.
        """
        return None


def client_steps(kind: type[Method]) -> dict[str, Step[Any]]:
    """The client steps of a method by name."""
    return {name: value for c in reversed(kind.__mro__) for name, value in vars(c).items() if isinstance(value, Step)}


def returns_run_model(kind: type[Method]) -> bool:
    """Whether the final model has the run's architecture (``--model``), so that clients can evaluate it."""
    return not kind.rebuilds


def shared_part(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The model's state without the entries that stay at the clients: the value of a `Shared` field."""
    own = method.own(model)
    return {name: value for name, value in state(model).items() if name not in own}


def own_part(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The entries of the model's state that stay at the clients."""
    own = method.own(model)
    return {name: value for name, value in state(model).items() if name in own}


def load_own(method: Method, model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the client's own part from its state ``stored`` into ``model``; skip entries that are not stored yet."""
    load(model, {name: stored[name] for name in method.own(model) if name in stored})


def public_images(public: Records | None, method: str) -> Records:
    """The public records, for a method that needs some; ValueError if there are fewer than 2."""
    if public is None or len(public) < 2:
        raise ValueError(
            f"{method} needs public images, 2 at least, and has {0 if public is None else len(public)}; name some with "
            "--public, as --public noise"
        )
    return public
