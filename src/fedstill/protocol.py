"""The one boundary between methods and engines: all a method file needs to know.

The server is an ordinary loop over a `Federation`; the client is named steps, each from a request to a `Reply`. A
method is one frozen class that holds both; its fields are the hyperparameters. It never learns which engine runs it.
"""

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from fedstill import schema
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.released import Released, together
from fedstill.records import Records
from fedstill.schema import Count, Labels, OwnState, Parameters, Public, Schema, Shared, State
from fedstill.settings import Settings
from fedstill.weights import load, parameters, state

__all__ = [
    "Client",
    "Count",
    "Federation",
    "Labels",
    "Method",
    "OwnState",
    "Parameters",
    "Public",
    "Records",
    "Released",
    "Reply",
    "Round",
    "Settings",
    "Shared",
    "State",
    "Step",
    "load",
    "parameters",
    "state",
    "step",
    "together",
]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Reply:
    """What a step sends to the server: a frozen class whose annotations are the wire schema (see `fedstill.schema`)."""

    schema: ClassVar[Schema] = ()

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
        hints = typing.get_type_hints(cls, include_extras=True)
        cls.schema = schema.declared({f.name: hints[f.name] for f in dataclasses.fields(cls)})  # type: ignore[arg-type]

    def opened(self) -> dict[str, Any]:
        """The values by name, those of released fields taken out of their `Released`.

        Raises:
            TypeError: when the value of such a field did not come from `Client.release`.
        """
        values = {f.name: getattr(self, f.name) for f in self.schema}
        for f in self.schema:
            if f.is_released:
                if not isinstance(values[f.name], Released):
                    raise TypeError(f"field '{f.name}' is declared released, but its value is not from client.release")
                values[f.name] = values[f.name].value
        return values

    @classmethod
    def closed(cls, values: Mapping[str, Any]) -> Self:
        """The reply that carries ``values``; the inverse of `opened`."""
        return cls(**{f.name: Released(values[f.name]) if f.is_released else values[f.name] for f in cls.schema})


R = TypeVar("R", bound=Reply)
Rows = TypeVar("Rows")
Value = TypeVar("Value")


class Step(typing.Generic[R]):
    """A method's client-side function, its request's schema and its reply's class."""

    def __init__(self, function: Callable[..., R]) -> None:
        """Read the schemas off the annotations of ``function(self, client, **payload) -> SomeReply``."""
        self.name = function.__name__
        self.function = function
        self.__doc__ = function.__doc__
        names = list(inspect.signature(function).parameters)
        assert names[:2] == ["self", "client"], f"step {self.name} must start with (self, client), not {names[:2]}"
        self._names = names[2:]
        self._hints: dict[str, Any] | None = None

    def _annotations(self) -> dict[str, Any]:
        if self._hints is None:  # late: the reply's class may stand below the method
            self._hints = typing.get_type_hints(self.function, include_extras=True)
        return self._hints

    @property
    def request(self) -> schema.Schema:
        """The fields a request carries."""
        return schema.declared({name: self._annotations()[name] for name in self._names})

    @property
    def reply(self) -> type[R]:
        """The class of the reply."""
        reply = self._annotations()["return"]
        assert issubclass(reply, Reply), f"step {self.name} must return a Reply, not {reply}"
        return typing.cast(type[R], reply)


def step(function: Callable[..., R]) -> Step[R]:
    """Declare a client step: ``@step def update(self, client: Client, weights: State) -> Update``."""
    return Step(function)


class Method(Settings, ABC):
    """One algorithm: fields are hyperparameters, `server` is the server's loop, `step` functions run at the clients.

    Attributes:
        personal: whether every client ends with a model of its own, so that only clients can judge the result.
        mixed: whether clients may have models of different architectures (``--models``).
        runs_model: whether what it returns is the run's model, so that clients can judge it on records of their own.
    """

    model_config = ConfigDict(ignored_types=(Step,))
    personal: ClassVar[bool] = False
    mixed: ClassVar[bool] = False
    runs_model: ClassVar[bool] = True

    @property
    def first_answer(self) -> tuple[Any, ...] | None:
        """What the replies to the first question depend on, beside the task: the step and some settings.

        Runs of which this is equal get the same replies, so that a comparison asks once. None: never the same.
        """
        return None

    @abstractmethod
    def server(self, fed: "Federation") -> nn.Module:
        """Run the method and return the model it is judged by."""

    def own(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's state that stay at the clients, in `Client.state`; none by default."""
        return frozenset()

    def restored(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model that `server` returned, from its state.

        Args:
            network: a new one of the run's architecture, which is changed.
            weights: `state` of what `server` returned.
        """
        load(network, weights)
        return network

    def shared(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state without what stays at the clients, in its order: what a `Shared` field carries."""
        own = self.own(model)
        return {name: value for name, value in state(model).items() if name not in own}

    def keep(self, client: "Client", model: nn.Module) -> None:
        """Put what stays at the client into its state."""
        held = state(model)
        client.state |= {name: held[name] for name in self.own(model)}

    def personal_model(self, client: "Client", shared: Mapping[str, Tensor]) -> nn.Module:
        """What a client would use, given what the server shares: that, and what it has kept itself."""
        model = client.new_model(shared)
        self.take_back(model, client.state)
        return model

    def take_back(self, model: nn.Module, held: Mapping[str, Tensor]) -> None:
        """Put into ``model`` what `keep` put into a client's state."""
        load(model, {name: held[name] for name in self.own(model) if name in held})

    @classmethod
    def steps(cls) -> dict[str, Step[Any]]:
        """The client steps by name."""
        return {
            name: value for c in reversed(cls.__mro__) for name, value in vars(c).items() if isinstance(value, Step)
        }


class Client(ABC):
    """What a step may see of the client it runs at, and nothing else.

    Attributes:
        id: the client's number, from 0.
        state: named tensors that survive between steps and never leave; change it in place.
        device: where tensors should live.
        delta: where the run states its epsilons; what mechanisms are calibrated for.
        architecture: the name of its own model, as `new_model` takes it; the run's model unless clients differ.
    """

    id: int
    architecture: str
    state: dict[str, Tensor]
    device: torch.device
    delta: float

    @property
    @abstractmethod
    def train(self) -> Records:
        """Its records."""

    @property
    @abstractmethod
    def test(self) -> Records:
        """Its own held-out records; empty unless the run splits them off."""

    @property
    @abstractmethod
    def public(self) -> Records | None:
        """Records that everybody holds, or None."""

    @abstractmethod
    def release(
        self, mechanism: Mechanism[Rows, Value], rows: Rows, *, adaptive: bool = False, part: str | None = None
    ) -> Released[Value]:
        """Send ``rows`` through a privacy mechanism; the only way for private values to leave.

        The client's ledger is charged before anything is computed. What comes back may be post-processed
        (`Released.map`) and put in a reply field that is declared ``Released[...]``.

        Args:
            mechanism: bounds each record's influence, adds noise and knows its cost (see `fedstill.privacy`).
            rows: what it takes, one entry per record.
            adaptive: whether the mechanism's noise was chosen from earlier releases.
            part: public name of the part of the records that ``rows`` are from, where a method splits them into
                disjoint parts before it looks at any label. A label lies in one part only, so of all parts the
                costliest counts. For mechanisms that protect labels. Nothing here can check that the parts of a run
                are disjoint: that is a promise of the method's author, as the one about `Released.map` is.

        Raises:
            BudgetExceeded: when the budget of the ledger does not cover it; nothing is released then.
        """

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """The stream called ``use`` of this client in this step; the same at every call with the same name."""

    @abstractmethod
    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, architecture: str | None = None
    ) -> nn.Module:
        """The run's model in train mode: with ``weights`` (state or parameters), or in its ``draw``-th random start.

        Every client and the server get the same random start for the same ``draw``; draw 0 is the server's w_0. With
        ``architecture`` it is that one of the run's models.
        """


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a server's loop: its number from 1, and where its numbers are logged."""

    number: int
    log: Callable[..., None]
    """``log(accuracy=0.93, ...)``: numbers of this round, kept with the bytes and seconds so far; None is left out."""


class Federation(ABC):
    """What a server's loop may use.

    Attributes:
        clients: the numbers of all clients.
        public: records that everybody holds, or None.
        num_classes: classes of the task.
        shape: channels, height and width of an image.
        like: an empty record set that carries the task's shape, classes and normalisation.
        device: where tensors should live.
        delta: where the run states its epsilons.
        budget: the largest epsilon that a client's releases may come to; None for no limit.
        architecture: the name of the run's model, as `new_model` takes it.
        architectures: the name of every client's own model.
    """

    clients: Sequence[int]
    architecture: str
    architectures: Sequence[str]
    public: Records | None
    num_classes: int
    shape: tuple[int, int, int]
    like: Records
    device: torch.device
    delta: float
    budget: float | None

    @abstractmethod
    def ask(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        **payload: Any,
    ) -> Sequence[R]:
        """Send ``payload`` to the clients (all, or ``to``), run ``step`` there and return their replies.

        The only way to a client. Replies come in the order of the clients, whatever order they arrived in; clients
        whose reply was missing, late or refused are left out. Replies are read from disk as they are used, so going
        through them holds one in memory at a time.

        Args:
            step: a step of this method, as ``self.update``.
            to: which clients; all when None.
            at_most: limits of dimensions the reply leaves open, as ``{"n": images_per_reply}``.
            exactly: sizes of dimensions the reply leaves open, as ``{"coefficients": 513}``.
            **payload: the step's fields.

        Raises:
            TooFewReplies: when fewer clients than the run requires gave a usable reply.
        """

    @abstractmethod
    def rounds(self, number: int, *keep: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        """Rounds 1 to ``number``, with a checkpoint of ``keep`` after each; a resumed run starts behind the last one.

        ``keep`` is everything the loop carries from round to round. It is restored *in place*: change modules and
        dictionaries with `load`, don't rebind their names.
        """

    @abstractmethod
    def epochs(self, number: int, *keep: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        """Epochs 1 to ``number`` of long work at the server, with a checkpoint of ``keep`` every now and then.

        A resumed run goes on behind the last one, so an epoch's random streams must be named by its number. ``keep``
        is as for `rounds`; inside a round it may be that round's work.
        """

    @abstractmethod
    def new_model(self, *, draw: int = 0, architecture: str | None = None) -> nn.Module:
        """The run's model in its ``draw``-th random start (see `Client.new_model`)."""

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """The server's stream called ``use``."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float | None:
        """Accuracy in [0, 1]; None in a round that the run does not judge.

        It is that on the server's test records or, in a run whose clients keep test records, the mean over clients
        of that on their own.
        """

    @abstractmethod
    def server_accuracies(self, together: nn.Module) -> list[float] | None:
        """Accuracies of ``k`` networks on the server's test records, to be logged; None in a round not judged.

        Args:
            together: gives all their logits for ``n`` inputs, ``(n, k, classes)``.
        """

    @abstractmethod
    def progress(self, what: str) -> Callable[[int, int], None]:
        """A function of (done, all) that moves a progress bar called ``what``; for long work at the server."""

    @abstractmethod
    def show(self, name: str, images: Records) -> None:
        """Keep ``images`` for the report, under ``name``."""
