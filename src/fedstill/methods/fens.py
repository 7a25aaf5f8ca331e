"""FENS: clients upload models once; then they train, in rounds of a few kilobytes, an aggregator of all their outputs.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, "Revisiting ensembling in one-shot federated
learning", NeurIPS 2024 (arXiv:2411.07182), section 3.

Differs from the paper (docs/methods/fens.md has the whole list):

* models cross as 32-bit floats; the authors quantise them to 8 bits;
* clients train on plain records; the authors' code shifts and mirrors them;
* the aggregator may be trained on standardised logits, without which it can end up constant;
* all clients have the run's architecture.
"""

import copy
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float32
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Share
from fedstill.base.weights import flattened, load_flat
from fedstill.distill.stacking import Scaling, ServerAdam, StackedModel, aggregator, first_moments, rebuilt
from fedstill.distill.teachers import Teachers
from fedstill.evaluation import outputs
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.parts.model_uploads import ensemble_accuracies
from fedstill.protocol import Client, Count, Federation, Method, Public, Reply, State, load, state, step
from fedstill.train.sgd import SGD


class TrainedModel(Reply):
    """A client's model."""

    weights: State


Number = Annotated[NonNegativeInt, Public()]


class Prepared(Reply):
    """A client that has the models' logits for its records of the aggregator, and the number of these records."""

    client: Number
    num_records: Count


class Measured(Reply):
    """Sums over a client's records of the aggregator: of the models' logits, and of their squares."""

    sums: Float32[Tensor, " inputs"]
    squares: Float32[Tensor, " inputs"]
    num_records: Count


class Aggregator(Reply):
    """The aggregator's weights, or their change: two linear layers."""

    first: Float32[Tensor, "units inputs"]
    first_bias: Float32[Tensor, " units"]
    second: Float32[Tensor, "classes units"]
    second_bias: Float32[Tensor, " classes"]


class AggregatorUpdate(Aggregator):
    """The change of the aggregator's weights, and the number of records that were in its batches."""

    num_records: Count


class FENS(Method):
    """An ensemble of all clients' models whose aggregator is trained by the clients."""

    rebuilds: ClassVar[bool] = True

    local: SGD = SGD(batch_size=128, epochs=200)
    """A client's training of its own model, from a random start of its own."""
    proxy: Share = 0.1
    """Share of a client's records that its model is not trained on, for the aggregator."""
    rounds: PositiveInt = 500
    """Rounds of the aggregator's training."""
    hidden: PositiveInt = 2
    """The aggregator's hidden units for each model (d)."""
    update: SGD = SGD(lr=1.0, momentum=0.0, batch_size=128, max_steps=1)
    """A client's training of the aggregator in one round."""
    optimiser: ServerAdam = ServerAdam()
    """The server's step on the clients' mean change."""
    standardise: bool = False
    """Train the aggregator on logits of mean 0 and deviation 1 over the records set aside, which the result folds into
    its first layer. Without, clients of one class make all its units 0 for good."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        networks, size = [], 4 * len(fed.clients) * len(flattened(fed.new_model()))
        if size > fed.max_bytes:
            raise ValueError(
                f"each client would receive {size / 1e6:.0f} MB, the models of {len(fed.clients)} clients, but the "
                f"limit is {fed.max_bytes / 1e6:.0f} MB; use a smaller --model or a larger --max-message-mb"
            )
        for reply in fed.ask(self.train):  # phase 1: one upload of every client's model
            networks.append(fed.new_model())
            load(networks[-1], reply.weights)
        with isolated(draw_seed(fed.rng("aggregator"))):
            head = aggregator(len(networks), fed.num_classes, self.hidden).to(fed.device)
        stack = torch.stack([flattened(network) for network in networks])
        ready = sorted(reply.client for reply in fed.ask(self.prepare, models=stack))
        weights = state(head)  # live tensors of the aggregator
        moments = first_moments(weights)
        sizes = {"inputs": len(networks) * fed.num_classes, "units": len(networks) * self.hidden}
        scaling = self._scaling(fed, ready, sizes["inputs"])
        stacked = StackedModel(networks, copy.deepcopy(head))
        for round in fed.rounds(self.rounds, head, moments):  # phase 2: FedAdam on the aggregator alone
            sent = Aggregator(**_fields(scaling.folded(weights)))
            replies = fed.ask(self.improve, ready, exactly=sizes, head=sent)
            change = weighted_mean((reply.num_records, _named(reply)) for reply in replies)
            self.optimiser.step(weights, moments, scaling.change(change))
            if round.number == self.rounds:
                load(stacked.head, scaling.folded(weights))
                others = ensemble_accuracies(fed, Teachers(networks), None)
                round.log(accuracy=fed.evaluate(stacked), **others)
        load(stacked.head, scaling.folded(weights))  # a resumed run may enter no round
        return stacked

    def _scaling(self, fed: Federation, ready: list[int], inputs: int) -> Scaling:
        """Of the logits of the records set aside, if the aggregator is to be trained on standardised ones."""
        if not self.standardise:
            return Scaling(torch.zeros(inputs), torch.ones(inputs))
        replies = fed.ask(self.measure, ready, exactly={"inputs": inputs})
        return Scaling.of_sums((reply.num_records, reply.sums, reply.squares) for reply in replies)

    @override
    def first_draw(self, client: int) -> int:
        return 1 + client

    @step
    def train(self, client: Client) -> TrainedModel:
        """Set a random share of the records aside, and train a model on the others."""
        rest = self._set_aside(client)
        model = client.new_model(draw=self.first_draw(client.id))
        self.local.fit(model, client.train[rest], client.rng("batches"))
        return TrainedModel(weights=state(model))

    @step
    def prepare(self, client: Client, models: Float32[Tensor, "models values"]) -> Prepared:
        """Compute the logits of all models for the records set aside."""
        if "proxy" not in client.state:  # it could not take part in phase 1
            self._set_aside(client)
        records = client.train[client.state["proxy"]]
        logits, model = [], client.new_model()
        for values in models:
            load_flat(model, values)
            logits.append(torch.cat(outputs(model, records)))
        client.state["logits"] = torch.cat(logits, 1)
        return Prepared(client=client.id, num_records=len(records))

    @step
    def measure(self, client: Client) -> Measured:
        """Add up the logits that the client has for its records of the aggregator, and their squares."""
        logits = client.state["logits"].double()
        sums, squares = logits.sum(0).float(), logits.square().sum(0).float()
        return Measured(sums=sums, squares=squares, num_records=len(logits))

    @step
    def improve(self, client: Client, head: Aggregator) -> AggregatorUpdate:
        """Take a step of SGD on the aggregator, from its current weights."""
        records, logits = client.train[client.state["proxy"]], client.state["logits"]
        model = aggregator(logits.shape[1] // records.num_classes, records.num_classes, self.hidden).to(client.device)
        before = _named(head)
        load(model, before)
        steps = self.update.fit(model, Examples(logits, records.labels), client.rng("batches"))
        change = {name: value - before[name].to(value) for name, value in state(model).items()}
        return AggregatorUpdate(**_fields(change), num_records=min(len(records), self.update.batch_size * steps))

    def _set_aside(self, client: Client) -> Tensor:
        """Draw the records for the aggregator, and return the positions of the others."""
        order = torch.randperm(len(client.train), generator=client.rng("proxy")).to(client.train.labels.device)
        count = max(1, int(self.proxy * len(order)))
        client.state["proxy"] = order[:count].clone()
        return order[count:] if len(order) > count else order  # a single record serves both

    @override
    def rebuild(self, network: nn.Module, weights: Any) -> nn.Module:
        return rebuilt(network, weights)


_NAMES = {"first": "0.weight", "first_bias": "0.bias", "second": "2.weight", "second_bias": "2.bias"}


def _fields(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {field: tensors[name].detach().clone() for field, name in _NAMES.items()}


def _named(head: Aggregator) -> dict[str, Tensor]:
    return {name: getattr(head, field) for field, name in _NAMES.items()}
