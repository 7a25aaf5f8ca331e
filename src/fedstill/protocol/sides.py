"""Both sides of the boundary: steps and replies, the client that a step sees, the server's federation.

Engines implement both. Methods import them from `fedstill.protocol`.
"""

import dataclasses
import inspect
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from fedstill import schema
from fedstill.base.records import Records
from fedstill.privacy.ledger import Part
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.releases import Event, Released, Unit
from fedstill.schema import Schema


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Reply:
    """A step's message to the server: a frozen class whose annotations are the wire schema (see `fedstill.schema`).

    The server refuses a reply whose field ``client`` is not the number of the client that sent it.
    """

    schema: ClassVar[Schema] = ()

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
        cls.schema = schema.schema_of(_annotations(cls))
        schema.check_declared(cls.schema, f"the reply {cls.__name__}")

    def payload(self) -> dict[str, Any]:
        """The values by name, without `Released` around them.

        Raises:
            TypeError: if the value of a field declared ``Released`` did not come from `Client.release`.
        """
        values = {f.name: getattr(self, f.name) for f in self.schema}
        for f in self.schema:
            if f.is_released:
                if not isinstance(values[f.name], Released):
                    raise TypeError(f"field '{f.name}' is declared released, but its value is not from client.release")
                values[f.name] = values[f.name].value
        return values

    @classmethod
    def from_payload(cls, values: Mapping[str, Any]) -> Self:
        """The reply that carries ``values``; the inverse of `payload`."""
        return cls(**{f.name: Released(values[f.name]) if f.is_released else values[f.name] for f in cls.schema})


def _annotations(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


R = TypeVar("R", bound=Reply)


class Step(typing.Generic[R]):
    """A client-side ``function(self, client, **arguments) -> SomeReply`` with the schemas that its annotations declare.

    A request carries the arguments after ``client``. An argument whose type is a dataclass crosses as the fields of
    that class, in their order, as if each were a separate argument.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.name: str = function.__name__
        self.function = function
        self.__doc__ = function.__doc__
        names = list(inspect.signature(function).parameters)
        if names[:2] != ["self", "client"]:
            raise TypeError(f"the step {self.name} must begin with (self, client), not ({', '.join(names[:2])})")
        if bare := next((name for name in (*names[2:], "return") if name not in function.__annotations__), None):
            what = "has no return annotation" if bare == "return" else f"has no type for its argument {bare!r}"
            raise TypeError(
                f"the step {self.name} {what}; write def {self.name}(self, client, ...: State) -> SomeReply"
            )
        self._names = names[2:]

    @cached_property
    def _hints(self) -> dict[str, Any]:  # not in __init__: the reply's class may be defined after the method
        return typing.get_type_hints(self.function, include_extras=True)

    @cached_property
    def _fields(self) -> dict[str, dict[str, Any] | None]:
        """Field names and types of each argument that is a dataclass; None for other arguments."""
        kinds = {name: self._hints[name] for name in self._names}
        return {name: _annotations(kind) if dataclasses.is_dataclass(kind) else None for name, kind in kinds.items()}

    def check(self, owner: str) -> None:
        """Refuse annotations that no message can carry; a reply that is defined later is checked when it is used.

        Args:
            owner: name of the method's class.

        Raises:
            TypeError: there is one.
        """
        try:
            fields, _ = self.request, self.reply
        except NameError:
            return
        schema.check_declared(fields, f"the step {owner}.{self.name}")

    @cached_property
    def request(self) -> Schema:
        """The schema of a request."""
        annotations: dict[str, Any] = {}
        for name, fields in self._fields.items():
            more = {name: self._hints[name]} if fields is None else fields
            assert not annotations.keys() & more.keys(), f"step {self.name} has two fields of one name in '{name}'"
            annotations |= more
        return schema.schema_of(annotations)

    def payload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request by name, from the step's arguments."""
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            fields = self._fields.get(name)
            values |= {name: value} if fields is None else {field: getattr(value, field) for field in fields}
        return values

    def arguments(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The step's arguments, from a request's fields; the inverse of `payload`."""
        return {
            name: payload[name] if fields is None else self._hints[name](**{field: payload[field] for field in fields})
            for name, fields in self._fields.items()
        }

    @property
    def reply(self) -> type[R]:
        """The class of the reply."""
        reply = self._hints["return"]
        if not (isinstance(reply, type) and issubclass(reply, Reply)):
            raise TypeError(f"the step {self.name} must return a class derived from fedstill.Reply, not {reply}")
        return typing.cast(type[R], reply)

    @property
    def sums(self) -> bool:
        """Whether the server uses the total of the replies only."""
        return any(f.is_summed for f in self.reply.schema)


def step(function: Callable[..., R]) -> Step[R]:
    """Declare a client step: ``@step def update(self, client: Client, weights: State) -> Update``."""
    return Step(function)


Result = TypeVar("Result")
Rows = TypeVar("Rows")
Value = TypeVar("Value")


class Client(ABC):
    """The client that a step runs at: everything that a step may see.

    Attributes:
        id: number of the client, from 0.
        state: named tensors that stay at the client from step to step; change the dictionary in place.
        device: device of the tensors. Replies may hold tensors of any device.
        delta: the delta at which the run states epsilon.
        class_names: names of the task's classes, in order, the same at every client.
        architecture: name of the client's own model for `new_model`; the run's model unless clients differ.
        adders: number of honest clients whose noise a mechanism of a sum counts on; 1 where each upload is seen.
        masked: whether nobody sees this client's upload to a sum, so that it must be whole numbers.
    """

    id: int
    architecture: str
    state: dict[str, Tensor]
    device: torch.device
    delta: float
    class_names: Sequence[str]
    adders: int
    masked: bool

    @property
    @abstractmethod
    def train(self) -> Records:
        """The client's records."""

    @property
    @abstractmethod
    def test(self) -> Records:
        """The client's own test records; empty unless the run splits some off (``--local-test``)."""

    @property
    @abstractmethod
    def public(self) -> Records | None:
        """The public records, the same at the server and every client, or None."""

    @abstractmethod
    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        """The result of ``compute()``, called once for all clients that one process simulates in a request.

        ``compute`` must depend on the request and the public records only. ``name`` identifies it within the step.
        """

    @abstractmethod
    def release(
        self, mechanism: Mechanism[Rows, Value], rows: Rows, *, adaptive: bool = False, part: Part | None = None
    ) -> Released[Value]:
        """Run a privacy mechanism on ``rows``: the only way for private values to leave the client.

        The client's ledger is charged before the mechanism runs. The result may be post-processed (`Released.map`) and
        sent in a reply field that is declared ``Released[...]``.

        Args:
            mechanism: bounds each record's influence, adds noise and knows its cost (see `fedstill.privacy`).
            rows: the mechanism's input, one entry per record.
            adaptive: whether the noise of the mechanism was chosen from earlier releases.
            part: the part of the client's records to release from, if a method splits them into disjoint parts before
                it looks at any label; ``rows`` are then a tensor of all records, of which the mechanism gets those of
                the part. A label lies in one part, so only the costliest part counts. Allowed for mechanisms that
                protect labels. A real site's ledger remembers the part's records and trusts no name.

        Raises:
            BudgetExceeded: if the ledger's budget does not cover the release; then nothing is released.
        """

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """A generator at the start of the random stream ``use`` of this client in this step."""

    @abstractmethod
    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, architecture: str | None = None
    ) -> nn.Module:
        """A new model in train mode, with ``weights`` (any part of its state) copied in.

        All other weights are random initialisation number ``draw``, which is the same at the server and at every
        client; number 0 is the server's w_0. ``architecture`` names one of the run's models (default: ``--model``).
        """


@dataclass(frozen=True)
class Summation(typing.Generic[R]):
    """The total of clients' replies (`Federation.sum`).

    Attributes:
        total: a reply whose tensors are the totals, in float64, or int64 for whole numbers.
        clients: numbers of the clients in it, in order.
        adders: number of honest clients whose noise the guarantee counts on; 1 where each upload is seen.
        records: a public bound of all clients' records, if the run states one.
    """

    total: R
    clients: Sequence[int]
    adders: int = 1
    records: int | None = None

    @property
    def spread(self) -> float:
        """Standard deviation of the total's noise, in units of the noise that the guarantee counts on."""
        return math.sqrt(len(self.clients) / self.adders)


@dataclass(frozen=True)
class Round:
    """One round of a server's loop: its number, from 1, and its log."""

    number: int
    log: Callable[..., None]
    """``log(accuracy=0.93, ...)`` writes numbers of this round to the run's log, with bytes and seconds so far. Values
    of None are left out."""


class Federation(ABC):
    """The server's side of a run: everything that a server's loop may use.

    Attributes:
        clients: numbers of all clients.
        public: public records, the same at the server and every client, or None.
        num_classes: number of the task's classes.
        like: an empty record set with the task's image shape (``like.shape``), classes and normalisation.
        device: device of the server's tensors. Replies arrive on the CPU.
        delta: the delta at which the run states epsilon.
        budget: largest total epsilon of each client; None for no limit.
        max_bytes: size of the largest message.
        masked: whether the server learns totals of sums only (`sum`).
        architecture: name of the run's model for `new_model`.
        architectures: name of every client's own model, by client number.
    """

    clients: Sequence[int]
    architecture: str
    architectures: Sequence[str]
    public: Records | None
    num_classes: int
    like: Records
    device: torch.device
    delta: float
    budget: float | None
    max_bytes: int
    masked: bool

    @abstractmethod
    def ask(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        at_least: int = 0,
        **arguments: Any,
    ) -> Sequence[R]:
        """Send a request to clients, run ``step`` there and return their replies: the only way to reach a client.

        Replies are in the order of client numbers; clients whose reply is missing, late or refused are left out. Each
        reply is read from disk when it is used, so iterate once and don't collect the replies in a list.

        Args:
            step: a step of this method, for example ``self.update``.
            to: numbers of the clients to ask; None asks all.
            at_most: largest sizes of dimensions that the run does not fix, for example ``{"n": images_per_reply}``.
            exactly: exact sizes of such dimensions, for example ``{"features": feature_width(model, fed.like.shape)}``
                (`fedstill.models.feature_width`).
            at_least: fewest replies that the method can use, whatever the run requires.
            **arguments: the step's arguments after ``client``.

        Raises:
            TooFewReplies: if fewer clients than the run or the method requires sent a usable reply.
        """

    @abstractmethod
    def sum(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        exactly: Mapping[str, int] | None = None,
        at_least: int = 0,
        **arguments: Any,
    ) -> Summation[R]:
        """Send a request to clients and return the total of their replies, whose fields are declared `Summed`.

        With ``--sums open`` the server adds up replies that it sees; with ``--sums masked`` it learns the total alone,
        and clients add a share of the noise each. A method's file does not know which. Arguments are as of `ask`.

        Raises:
            TooFewReplies: as in `ask`.
            fedstill.sums.masks.SumRefused: the helpers do not open the sum; what was sent stays sealed.
        """

    @abstractmethod
    def able(self, event: Event, *, adaptive: bool = False, unit: Unit = "record") -> list[int]:
        """The clients whose budget covers one more release; all clients if the run has no budget.

        A client's ledger decides by the same function, `fedstill.privacy.ledger.covers`. The server uses the releases
        that earlier replies list, so a resumed run gets the same clients.

        Args:
            event: cost of the release: the mechanism's ``event``.
            adaptive: as in `Client.release`.
            unit: the mechanism's unit.

        Raises:
            ValueError: ``adaptive`` without a budget, as only a budget can bound noise that is chosen adaptively.
        """

    @abstractmethod
    def spent(self, unit: Unit = "record") -> float | None:
        """The largest epsilon that any client has spent so far, for the log; None if it is unbounded.

        If noise was chosen adaptively, it is the epsilon of the privacy filter.
        """

    @abstractmethod
    def rounds(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        """Rounds 1 to ``number``, with a checkpoint of ``carry`` after each. A resumed run continues after the last.

        ``carry`` must hold everything that the loop passes from round to round. It is restored *in place*, so change
        modules and dictionaries with `load` and don't rebind their names.
        """

    @abstractmethod
    def epochs(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        """Epochs 1 to ``number`` of long work at the server, with a checkpoint of ``carry`` about every 20 seconds.

        A resumed run continues after the last checkpoint, so name an epoch's random streams by its number. ``carry``
        is as for `rounds`; within a round it may be a part of that round's work.
        """

    @abstractmethod
    def new_model(self, *, draw: int = 0, architecture: str | None = None) -> nn.Module:
        """A new model with random initialisation number ``draw``, as in `Client.new_model`."""

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """A generator at the start of the server's random stream ``use``."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float | None:
        """Accuracy of ``model`` in [0, 1]; None in a round without evaluation (``--evaluate-every``).

        It is measured on the server's test records. If clients have test records (``--local-test``), it is the mean
        over clients of the accuracy on their test records.
        """

    @abstractmethod
    def evaluate_each(self, networks: nn.Module) -> list[float] | None:
        """Accuracies of k networks on the server's test records, for the log.

        None in a round without evaluation, and with ``--no-evaluate-uploads``.
        ``networks`` maps n inputs to the logits of all networks, ``(n, k, classes)``.
        """

    @abstractmethod
    def progress(self, label: str) -> Callable[[int, int], None]:
        """A callback for long work at the server: ``(done, total)`` updates the progress bar ``label``."""

    @abstractmethod
    def show(self, name: str, images: Records) -> None:
        """Save ``images`` for the report under ``name``."""
