"""The boundary between methods and engines: all a method file needs to know.

The server is an ordinary loop over a `Federation`; the client is a set of named steps, each of which turns a request
into a `Reply`. A method is one frozen class with both; its fields are the hyperparameters. No method knows its engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from fedstill.privacy.events import Event, Unit
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.released import Released, map_released
from fedstill.records import Records
from fedstill.schema import Change, Count, Labels, OwnState, Parameters, Public, Shared, State
from fedstill.settings import Settings
from fedstill.steps import Reply, Step, step
from fedstill.weights import load, parameters, state

__all__ = [
    "Change",
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


R = TypeVar("R", bound=Reply)
Result = TypeVar("Result")
Rows = TypeVar("Rows")
Value = TypeVar("Value")


class Method(Settings, ABC):
    """One algorithm: fields are hyperparameters, `server` is the server's loop, `step` functions run at the clients.

    `server` and one step make a method. The other members are for three special cases; each has a default:

    * parts of the model that stay at the clients: `own`, `personal_model`, `personal`;
    * another result than the run's model: `rebuild`; clients with models of different architectures: `mixed`;
    * replies that other runs can reuse: `first_answer`.

    Attributes:
        personal: whether every client ends with a model of its own, so that only clients can evaluate the result.
        mixed: whether clients may have models of different architectures (``--models``).
    """

    model_config = ConfigDict(ignored_types=(Step,))
    personal: ClassVar[bool] = False
    mixed: ClassVar[bool] = False

    @abstractmethod
    def server(self, fed: "Federation") -> nn.Module:
        """Run the method and return the resulting model, which is evaluated and saved."""

    def own(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's state that stay at the clients, in `Client.state`; none by default.

        A step stores them by ``client.state |= own_part(self, model)``. The rest, `shared_part`, crosses in fields of
        type `Shared`.
        """
        return frozenset()

    def personal_model(self, client: "Client", shared: Mapping[str, Tensor]) -> nn.Module:
        """The model a client uses and evaluates: the server's ``shared`` part, and its own as last stored."""
        model = client.new_model(shared)
        load_own(self, model, client.state)
        return model

    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model that `server` returned, from its state.

        Override it where `server` returns another network than the run's model. Clients can't evaluate such a network.

        Args:
            network: a new one of the run's architecture, which is changed.
            weights: `state` of the returned model.
        """
        load(network, weights)
        return network

    @property
    def first_answer(self) -> tuple[Any, ...] | None:
        """Everything besides the task that the first request's replies depend on: the step and some settings.

        Runs in which it is equal get the same replies, so that a comparison asks once. None: never the same.
        """
        return None


def client_steps(kind: type[Method]) -> dict[str, Step[Any]]:
    """The client steps of a method by name."""
    return {name: value for c in reversed(kind.__mro__) for name, value in vars(c).items() if isinstance(value, Step)}


def returns_run_model(kind: type[Method]) -> bool:
    """Whether the method's result is the run's model (``--model``), so that clients can evaluate it."""
    return kind.rebuild is Method.rebuild


def shared_part(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The model's state without the parts that stay at the clients, in its order: the value of a `Shared` field."""
    own = method.own(model)
    return {name: value for name, value in state(model).items() if name not in own}


def own_part(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The part of the model's state that stays at the clients, in its order."""
    own = method.own(model)
    return {name: value for name, value in state(model).items() if name in own}


def load_own(method: Method, model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the client's own part, as far as a client's state ``stored`` has it, into ``model``."""
    load(model, {name: stored[name] for name in method.own(model) if name in stored})


def public_images(public: Records | None, method: str) -> Records:
    """The public records of a client or the server, for a method that needs some.

    Args:
        public: `Client.public` or `Federation.public`.
        method: the method's name, for the error.

    Raises:
        ValueError: there are fewer than 2.
    """
    if public is None or len(public) < 2:
        raise ValueError(
            f"{method} needs public images, 2 at least, and has {0 if public is None else len(public)}; name some with "
            "--public, as --public noise"
        )
    return public


class Client(ABC):
    """The client a step runs at: everything that a step may see.

    Attributes:
        id: number of the client, from 0.
        state: named tensors that survive between steps and never leave; change it in place.
        device: device of the tensors. Replies may hold tensors of any device.
        delta: the run's delta, for which mechanisms are calibrated.
        architecture: name of the client's own model, as `new_model` takes it; the run's model unless clients differ.
    """

    id: int
    architecture: str
    state: dict[str, Tensor]
    device: torch.device
    delta: float

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
        """The result of ``compute()``, which runs once for all clients of one request that one process plays.

        Args:
            name: names the result within the step.
            compute: a function of the request and the public records alone: its result goes to other clients too.
        """

    @abstractmethod
    def release(
        self, mechanism: Mechanism[Rows, Value], rows: Rows, *, adaptive: bool = False, part: str | None = None
    ) -> Released[Value]:
        """Send ``rows`` through a privacy mechanism; the only way for private values to leave.

        The client's ledger is charged before the mechanism runs. The result may be post-processed (`Released.map`) and
        put in a reply field that is declared ``Released[...]``.

        Args:
            mechanism: bounds each record's influence, adds noise and knows its cost (see `fedstill.privacy`).
            rows: the mechanism's input, one entry per record.
            adaptive: whether the mechanism's noise was chosen from earlier releases.
            part: public name of the part of the records that ``rows`` are from, for a method that splits them into
                disjoint parts before it looks at any label. A label lies in one part only, so only the costliest part
                counts. For mechanisms that protect labels. The method's author promises that the parts are disjoint;
                nothing here can check it.

        Raises:
            BudgetExceeded: when the budget of the ledger does not cover the release; nothing is released then.
        """

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """The random stream ``use`` of this client in this step; every call with one name starts the stream anew."""

    @abstractmethod
    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, architecture: str | None = None
    ) -> nn.Module:
        """A new model in train mode, with ``weights`` (state, parameters or a part of these) copied in if given.

        The other weights are those of random start number ``draw``, the same at the server and every client; draw 0 is
        the server's w_0. ``architecture`` names one of the run's models; by default it is the run's model.
        """


@dataclass(frozen=True)
class Round:
    """One round of a server's loop: its number, from 1, and its log."""

    number: int
    log: Callable[..., None]
    """``log(accuracy=0.93, ...)`` logs numbers of this round, with the bytes and seconds so far; None is left out."""


class Federation(ABC):
    """The server's side of a run: everything that a server's loop may use.

    Attributes:
        clients: numbers of all clients.
        public: public records, the same at the server and every client, or None.
        num_classes: number of the task's classes.
        like: an empty record set with the task's image shape (``like.shape``), classes and normalisation.
        device: device of the tensors. Replies arrive on the CPU.
        delta: the run's delta.
        budget: limit of each client's total epsilon; None for no limit.
        architecture: name of the run's model, as `new_model` takes it.
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

    @abstractmethod
    def ask(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        **arguments: Any,
    ) -> Sequence[R]:
        """Send a request to the clients (all, or ``to``), run ``step`` there and return their replies.

        The only way to a client. Replies are in the order of the clients, not of arrival; clients whose reply is
        missing, late or refused are left out. Replies are read from disk one at a time as they are used, so go through
        them once and don't make a list of them.

        Args:
            step: a step of this method, as ``self.update``.
            to: numbers of the clients to ask; all when None.
            at_most: limits of open dimensions, the ones that the run does not fix, as ``{"n": images_per_reply}``.
            exactly: sizes of open dimensions, as ``{"features": feature_width(model, fed.like.shape)}``
                (`fedstill.models.feature_width`).
            **arguments: the step's arguments after ``client``.

        Raises:
            TooFewReplies: when fewer clients than the run requires gave a usable reply.
        """

    @abstractmethod
    def able(self, event: Event, *, adaptive: bool = False, unit: Unit = "record") -> list[int]:
        """The clients whose budget covers one more release; all in a run without a budget.

        A client's ledger gives the same answer when it charges the release, as both call
        `fedstill.privacy.ledger.covers`. The server knows the releases that replies to earlier requests list, so a
        resumed run gets the same answer.

        Args:
            event: the cost of the release, as the mechanism's ``event``.
            adaptive: as in `Client.release`.
            unit: the mechanism's unit.

        Raises:
            ValueError: ``adaptive`` without a budget, as only a budget can bound noise that is chosen adaptively.
        """

    @abstractmethod
    def spent(self, unit: Unit = "record") -> float | None:
        """The epsilon of the client that has released most so far, to be logged; None where nothing bounds it.

        Where noise was chosen adaptively it is the epsilon of the filter.
        """

    @abstractmethod
    def rounds(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        """Rounds 1 to ``number``, each followed by a checkpoint of ``carry``, after the last of which a run resumes.

        Args:
            number: number of rounds.
            *carry: everything the loop carries from round to round. It is restored *in place*: change modules and
                dictionaries with `load`, don't rebind their names.
        """

    @abstractmethod
    def epochs(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        """Epochs 1 to ``number`` of long work at the server, with a checkpoint of ``carry`` every 20 seconds or so.

        A resumed run continues after the last checkpoint, so name an epoch's random streams by its number. ``carry``
        is as for `rounds`; inside a round it may be that round's work.
        """

    @abstractmethod
    def new_model(self, *, draw: int = 0, architecture: str | None = None) -> nn.Module:
        """A new model in random start number ``draw`` (see `Client.new_model`)."""

    @abstractmethod
    def rng(self, *use: str | int) -> torch.Generator:
        """The server's random stream ``use``; every call with one name starts the stream anew."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float | None:
        """Accuracy of ``model`` in [0, 1]; None in a round without evaluation (``--evaluate-every``).

        Evaluated on the server's test records. In a run whose clients have test records (``--local-test``) it is the
        mean over clients of the accuracy on theirs.
        """

    @abstractmethod
    def evaluate_each(self, networks: nn.Module) -> list[float] | None:
        """Accuracies of ``k`` networks on the server's test records; None in a round without evaluation.

        Args:
            networks: maps ``n`` inputs to the logits of all networks, ``(n, k, classes)``.
        """

    @abstractmethod
    def progress(self, label: str) -> Callable[[int, int], None]:
        """A function of (done, all) that moves the progress bar ``label``; for long work at the server."""

    @abstractmethod
    def show(self, name: str, images: Records) -> None:
        """Save ``images`` for the report, under ``name``."""
