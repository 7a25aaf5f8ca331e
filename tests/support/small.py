"""A small task and small methods for the tests of engines; importable in worker processes."""

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.records import Normalisation, Records
from fedstill.data import public as public_data
from fedstill.data.shards import Shards
from fedstill.engines.client import Site, StateFiles
from fedstill.engines.reply_checks import Replies
from fedstill.engines.run_spec import DEFAULTS, RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival, Inline, Workers
from fedstill.protocol import Client, Federation, Labels, Method, Reply, State, Step, load, state, step
from fedstill.runs.journal import EVALUATIONS
from fedstill.train.sgd import SGD

MODEL = "convnet:width=8,depth=2"
MODELS = {"FedRD": "projected:width=8", "FedRDRecords": "projected:width=8"}
"""Of methods that want a certain one."""
BUDGETS = {"AdapDPFL": 5.0, "FedKADP": 5.0}
"""Of methods that want one."""
STEEPEST = SGD(lr=0.1, momentum=0.0, batch_size=10_000)
"""One step of plain gradient descent on all records at once, which no shuffle changes; see `descended`."""


class Update(Reply):
    weights: State
    noise: Float32[Tensor, " n"]
    labels: Labels
    seen: PositiveInt


class Probe(Method):
    """Averages, keeps a counter at the client, draws from the client's streams."""

    rounds: PositiveInt = 2
    """Rounds."""
    misbehave: dict[int, str] = {}
    """What which client does wrong."""

    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        total = {"sum": torch.zeros(3)}
        for round in fed.rounds(self.rounds, model, total):
            replies = fed.ask(self.update, weights=state(model), at_most={"n": 3})
            load(total, {"sum": total["sum"] + sum(r.noise for r in replies)})
            load(model, {k: sum(r.weights[k] for r in replies) / len(replies) for k in state(model)})
            round.log(accuracy=fed.evaluate(model), seen=sum(r.seen for r in replies))
        with torch.no_grad():
            next(model.parameters()).view(-1)[:3] += total["sum"]
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        wrong = self.misbehave.get(client.id)
        if wrong in ("sleep", "nap"):
            time.sleep(60 if wrong == "sleep" else 20)
        if wrong == "die":
            os._exit(3)
        if wrong == "raise":
            raise ArithmeticError("the abacus broke")
        model = client.new_model(weights)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=client.rng("step")), alpha=0.01)
                p.add_(torch.rand(p.shape), alpha=0.01)  # a step's own global stream, as dropout uses it
        seen = client.state.setdefault("seen", torch.zeros((), dtype=torch.int64))
        seen += 1
        return Update(
            weights=state(model),
            noise=torch.randn(3, generator=client.rng("noise")),
            labels=client.train.labels[:3],
            seen=int(seen) * len(client.train),
        )


class Told(Reply):
    number: float


class Gossip(Method):
    """Complains in words that hold a record."""

    def server(self, fed: Any) -> Any:
        fed.ask(self.tell)

    @step
    def tell(self, client: Client) -> Told:
        raise ValueError(f"the patient's pixels are {client.train.images.flatten()[:4].tolist()}")


def spec_of(method: Method, train: Records, **facts: Any) -> RunSpec:
    """The spec of a small run."""
    kind = type(method).__name__
    return RunSpec.of(method, train, **{"model": MODELS.get(kind, MODEL), "budget": BUDGETS.get(kind), **facts})


def noise_images(data: Any, count: int = 64) -> Callable[[], Records]:
    """Loads public images for a task, with labels; worker processes can have it too."""
    return partial(_labelled, count, data.train.shape, data.train.normalisation, data.train.num_classes)


def _labelled(count: int, shape: tuple[int, int, int], normalisation: Normalisation, num_classes: int) -> Records:
    images = public_data.load(f"noise={count}", shape, normalisation).images
    return Records(images, torch.arange(count) % num_classes, num_classes, normalisation)


Parts = Sequence[tuple[Any, Any]]
"""The train and the test indices of each client."""


def equal_parts(train: Records, clients: int) -> Parts:
    """Each client has a part of the records, and every tenth of these to be evaluated on."""
    return [(part, part[::10]) for part in np.array_split(np.arange(len(train)), clients)]


def site(
    method: Method,
    train: Records,
    folder: Path,
    clients: int | Parts = 4,
    seed: int = 0,
    public: Callable[[], Records] | None = None,
    **facts: Any,
) -> Callable[[], Site]:
    """Makes the site of all clients; picklable."""
    parts = equal_parts(train, clients) if isinstance(clients, int) else clients
    return partial(Site, spec_of(method, train, seed=seed, **facts), Shards(train, parts, public), folder / "clients")


def slow_to_start(seconds: float, make_site: Callable[[], Site]) -> Site:
    """A site that takes so long to set up."""
    time.sleep(seconds)
    return make_site()


class World(NamedTuple):
    """A run in this process."""

    spec: RunSpec
    site: Site
    transport: Any
    federation: Any


def world(
    method: Method,
    data: Any,
    folder: Path,
    clients: int | Parts = 4,
    public: Callable[[], Records] | None = None,
    models: tuple[str, ...] = (),
    *,
    transport: Callable[[Site], Any] = Inline,
    **facts: Any,
) -> World:
    """Site, transport and server of a small run in this process.

    Args:
        method: the method.
        data: the data set.
        folder: the run's folder.
        clients: number of clients with equal parts of the records, or the indices of each.
        public: loads the public records.
        models: models of the clients, where they differ.
        transport: makes the way to the site.
        **facts: other fields of `RunSpec`, and options of `ServerFederation`; ``kind`` is a subclass of it.
    """
    fields = {name: facts.pop(name) for name in facts.keys() & RunSpec.model_fields.keys()}
    here = site(method, data.train, folder, clients, public=public, models=models, **fields)()
    way = transport(here)
    number = clients if isinstance(clients, int) else len(clients)
    shown = None if public is None else public()
    fed = federation(method, way, data, folder, spec=here.spec, **{"num_clients": number, "public": shown, **facts})
    return World(here.spec, here, way, fed)


class SeveralSites:
    """The sites of several runs in one worker, as starting a process takes seconds; the request's head says which."""

    def __init__(self, make_sites: dict[str, Callable[[], Site]]) -> None:
        self._make_sites = make_sites

    def answer(self, client: int, request: bytes, tell: Any = None) -> bytes:
        name, _, rest = request.partition(b"\0")
        return self._make_sites[name.decode()]().answer(client, rest, tell)


class Addressed:
    """Names the run to `SeveralSites`."""

    failure = None

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        yield from self.inner.exchange(self.name.encode() + b"\0" + request, clients, sent)


class Shuffled:
    """Hands replies on in another order than they came."""

    def __init__(self, inner: Inline | Addressed) -> None:
        self.inner = inner

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        yield from reversed(list(self.inner.exchange(request, clients, sent)))


def federation(
    method: Method, transport: Any, data: Any, folder: Path, seed: int = 0, spec: RunSpec | None = None, **options: Any
) -> Any:
    """A server of four clients; personal methods are evaluated by their clients."""
    kind: Any = options.pop("kind", ServerFederation)
    defaults = {"num_clients": 4, "test": data.test, "local_test": type(method).personal}
    return kind(spec or spec_of(method, data.train, seed=seed), transport, folder=folder, **{**defaults, **options})


def run(
    method: Method,
    data: Any,
    folder: Path,
    *,
    workers: int = 0,
    clients: int = 4,
    shuffle: bool = False,
    timeout: float | None = None,
    public: Callable[[], Records] | None = None,
    **facts: Any,
) -> tuple[nn.Module, ServerFederation]:
    """A whole run; see `world`."""

    def transport(here: Site) -> Any:
        make = partial(Site, here.spec, here.data, here.folder)
        way = stack.enter_context(Workers(make, workers, timeout=timeout) if workers else Inline(here))
        return Shuffled(way) if shuffle else way

    with ExitStack() as stack:
        fed = world(method, data, folder, clients, public, transport=transport, **facts).federation
        return method.server(fed), fed


def last_state(folder: Path, client: int) -> dict[str, Tensor]:
    """State of a client after its last reply; ``folder`` has the states of all clients."""
    name = f"{client:05d}"
    return StateFiles(folder / name, folder / "newest" / name, f"{DEFAULTS['run']}/{client}", "").read(EVALUATIONS)


def weights(model: nn.Module) -> bytes:
    return b"".join(value.numpy().tobytes() for value in state(model).values())


def of_sizes(*sizes: int) -> list[tuple[Any, Any]]:
    """Parts of a data set, one after the other: so many records for each client, none of them to be judged on."""
    ends = np.cumsum(sizes)
    return [(np.arange(end - size, end), np.arange(0)) for size, end in zip(sizes, ends, strict=True)]


def holding(parts: Parts, method: Method, data: Any, folder: Path, **facts: Any) -> ServerFederation:
    """A server whose clients have these parts of the records (train, test), in this process; it keeps all replies."""
    tested = any(len(test) for _, test in parts)
    facts = {"keep_replies": True, "local_test": tested, **facts}
    fed: ServerFederation = world(method, data, folder, parts, **facts).federation
    return fed


def kept(fed: ServerFederation, asked: Step[Any], exchange: int = 0) -> Sequence[Any]:
    """What the clients replied to a question, by its number; only those who were asked."""
    clients, _ = fed.journal.replies_to(exchange, asked.name)
    return Replies(fed.journal, fed.spec.facts, exchange, asked, clients)


def descended(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    steps: int = 1,
    only: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """A copy of ``model`` after steps of `STEEPEST`, written out; ``only`` says which parameters move."""
    found = copy.deepcopy(model)
    moving = [p for name, p in found.named_parameters() if only(name)]
    for _ in range(steps):
        gradients = torch.autograd.grad(loss(found), moving)
        with torch.no_grad():
            for p, gradient in zip(moving, gradients, strict=True):
                p.sub_(gradient, alpha=STEEPEST.lr)
    return found


def loss_on(records: Records) -> Callable[[nn.Module], Tensor]:
    """The cross-entropy of a model on all of ``records``."""
    return lambda model: cross_entropy(model(records.inputs()), records.labels)


def near(found: nn.Module, expected: nn.Module) -> bool:
    """Whether all weights agree but for the order of float32 sums; a step that is left out moves some by 1e-3."""
    ours, theirs = state(found), state(expected)
    return all(torch.allclose(ours[name], value, rtol=0, atol=1e-5) for name, value in theirs.items())


@contextmanager
def room(size: int) -> Iterator[None]:
    """Inside the block, no file of this process grows beyond so many bytes, as on a full disk; not on Windows."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
