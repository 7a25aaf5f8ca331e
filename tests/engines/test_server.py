"""The server's side: nothing that is not as declared reaches a method, and a killed run loses nothing."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import Killed, Mortal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rogue import Rogue
from small import Probe, federation, run, site, spec_of, weights, world

from fedstill.base import files
from fedstill.engines import server
from fedstill.engines.server import ServerFederation, TooFewReplies
from fedstill.engines.transport import Arrival, Inline, Watcher
from fedstill.methods.dense import Dense
from fedstill.methods.fedavg import FedAvg
from fedstill.protocol import wire
from fedstill.runs.journal import Journal


class Canned:
    """Answers with what it was given."""

    failure = None

    def __init__(self, replies: Sequence[bytes]) -> None:
        self.replies = replies

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        for client in clients:
            sent(client)
            yield Arrival(client, self.replies[client])


def ask(replies: Sequence[bytes], data: Any, folder: Path, **options: Any) -> tuple[Any, ServerFederation]:
    transport = Canned(replies)
    fed = federation(Probe(), transport, data, folder, num_clients=len(replies), **{"min_clients": 0, **options})
    return fed.ask(Probe.update, at_most={"n": 3}, weights=fed.new_model().state_dict()), fed


@pytest.fixture(scope="module")
def good(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An honest client's reply."""
    folder = tmp_path_factory.mktemp("good")
    spec = spec_of(Probe(), digits.train)
    state = spec.new_model().state_dict()
    request = wire.encode({"weights": state}, Probe.update.request, spec.facts, {"step": "update", "exchange": 0})
    return site(Probe(), digits.train, folder)().answer(1, request)


def _rewritten(reply: bytes, **changes: Any) -> bytes:
    tensors, header = wire.unpack(reply)
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name.replace("__", "/").replace("_dot_", ".")] = value
        elif value is None:
            del tensors[name]
        elif name in ("step", "exchange"):
            header[name] = value
        else:
            header["fields"][name] = value
    return wire.pack(tensors, header)


def malformed(good: bytes) -> st.SearchStrategy[bytes]:
    """Every kind of wrong reply: damaged, of other types, sizes and ranges, with more or less than was asked for."""
    tensors, _ = wire.unpack(good)
    weights = [name for name in tensors if name.startswith("weights/")]
    odd = st.sampled_from([torch.nan, torch.inf, -torch.inf])

    def spoilt(name: str, value: float, at: int) -> bytes:
        changed = tensors[name].clone()
        changed.view(-1)[at % changed.numel()] = value
        return _rewritten(good, **{name.replace("/", "__").replace(".", "_dot_"): changed})

    def shaped(name: str, shape: list[int], dtype: torch.dtype) -> bytes:
        return _rewritten(good, **{name.replace("/", "__").replace(".", "_dot_"): torch.zeros(shape, dtype=dtype)})

    names = st.sampled_from([*weights, "noise", "labels"])
    # 5 x 7 fits nothing that is asked for
    wrong_shape = st.lists(st.integers(5, 7), min_size=2, max_size=5)
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
    labels = st.lists(st.one_of(st.integers(-(2**62), -1), st.integers(10, 2**62)), min_size=3, max_size=3)
    extra = st.text(min_size=1, max_size=20).filter(lambda t: t not in ("weights", "noise", "labels", "seen"))
    scalars = st.one_of(
        st.none(),
        st.text(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.integers(max_value=0),
        st.lists(st.integers()),
    )
    return st.one_of(
        st.integers(0, len(good) - 1).map(lambda n: good[:n]),
        st.binary(max_size=400),
        st.binary(min_size=1, max_size=30).map(lambda tail: good + tail),
        st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little") + good[8:]).filter(lambda b: b != good),
        st.builds(spoilt, st.sampled_from([*weights, "noise"]), odd, st.integers(0)),
        st.builds(shaped, names, wrong_shape, dtypes),
        labels.map(lambda values: _rewritten(good, labels=torch.tensor(values))),
        st.integers(4, 5000).map(
            lambda n: _rewritten(good, noise=torch.zeros(n), labels=torch.zeros(n, dtype=torch.int64))
        ),
        extra.map(lambda name: _rewritten(good, **{f"x{name}": torch.zeros(1)})),
        extra.map(lambda name: _rewritten(good, **{f"y{name}": 1})),
        st.sampled_from(["noise", "labels", *weights]).map(lambda name: _rewritten(good, **{name: None})),
        scalars.map(lambda value: _rewritten(good, seen=value) if value is not None else _rewritten(good, seen=[])),
        st.integers(1, 2**40).map(lambda n: _rewritten(good, exchange=n)),
        st.text().map(lambda name: _rewritten(good, step="x" + name)),
    )


def test_an_honest_reply_is_used(good: bytes, digits: Any, tmp_path: Path) -> None:
    replies, federation = ask([good], digits, tmp_path)
    assert len(replies) == 1
    assert federation.journal.refusals() == []


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_malformed_replies_are_refused_and_the_others_used(
    data: st.DataObject, good: bytes, digits: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad = data.draw(malformed(good))
    replies, federation = ask([good, bad, good], digits, tmp_path_factory.mktemp("bad"))
    assert replies.clients == [0, 2]
    (refusal,) = federation.journal.refusals()
    assert refusal.client == 1
    assert len(refusal.reason) < 600
    assert federation.journal.bytes_up == len(good) * 2 + len(bad)
    assert all(torch.isfinite(reply.noise).all() for reply in replies)


def test_an_oversized_reply_is_refused(good: bytes, digits: Any, tmp_path: Path) -> None:
    spec = spec_of(Probe(), digits.train, max_bytes=30_000)
    replies, fed = ask([good + bytes(40_000)], digits, tmp_path, spec=spec)
    assert len(replies) == 0
    assert "--max-message-mb" in fed.journal.refusals()[0].reason


@pytest.fixture(scope="module")
def undisturbed(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Journal]:
    """Weights and journal of a run of three rounds."""
    model, fed = run(Probe(rounds=3), digits, tmp_path_factory.mktemp("undisturbed"))
    return weights(model), fed.journal


@pytest.mark.parametrize("lives", range(12))
def test_a_run_that_dies_after_any_reply_ends_as_if_nothing_had_happened(
    lives: int, undisturbed: tuple[bytes, Journal], digits: Any, tmp_path: Path
) -> None:
    method = Probe(rounds=3)
    whole, journal = undisturbed
    folder = tmp_path / "killed"
    first = world(method, digits, folder, transport=lambda here: Mortal(Inline(here), lives)).federation
    with pytest.raises(Killed):
        method.server(first)
    model, resumed = run(method, digits, folder)
    assert weights(model) == whole
    assert resumed.journal.bytes_up == journal.bytes_up
    # the requests of the exchange that died were sent twice, and that is what is counted
    assert resumed.journal.bytes_down >= journal.bytes_down
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ['{"round": 1', '{"round": 2', '{"round": 3']


def test_a_finished_run_asks_nobody_again(digits: Any, tmp_path: Path) -> None:
    model, first = run(Probe(), digits, tmp_path)
    again = federation(Probe(), Mortal(None, 0), digits, tmp_path)
    assert weights(Probe().server(again)) == weights(model)
    assert again.journal.bytes_down == first.journal.bytes_down


def test_replies_of_old_rounds_go_unless_kept(digits: Any, tmp_path: Path) -> None:
    run(Probe(rounds=3), digits, tmp_path / "lean")
    run(Probe(rounds=3), digits, tmp_path / "all", keep_replies=True)
    assert len(list((tmp_path / "lean").glob("journal/*/*.reply"))) == 4
    assert len(list((tmp_path / "all").glob("journal/*/*.reply"))) == 12


def test_the_meter_counts_what_crossed(good: bytes, digits: Any, tmp_path: Path) -> None:
    _, federation = ask([good, b"junk"], digits, tmp_path)
    assert federation.journal.bytes_up == len(good) + 4
    spec = spec_of(Probe(), digits.train)
    state = spec.new_model().state_dict()
    request = wire.encode({"weights": state}, Probe.update.request, spec.facts, {"step": "update", "exchange": 0})
    assert federation.journal.bytes_down == 2 * len(request)


class Weighed(Inline):
    """Weighs what it carries."""

    up = down = 0

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        self.down += len(request) * len(clients)
        for arrival in super().exchange(request, clients, sent):
            self.up += len(arrival.reply)
            yield arrival


def test_the_metrics_say_how_much_went_up_and_how_much_down(digits: Any, tmp_path: Path) -> None:
    """Of DENSE in two rounds: first models go up and only questions down, then as many models down as up."""
    generation = {"steps": 1, "batch_size": 8, "ngf": 4, "nz": 4}
    quick = {"batch_size": 32, "max_steps": 1}
    method = Dense(rounds=2, local=quick, epochs=1, student=quick, generation=generation)  # type: ignore[arg-type]
    transport = Weighed(site(method, digits.train, tmp_path)())
    crossed: list[tuple[int, int]] = []

    class Notes(Watcher):
        def logged(self, *_: Any) -> None:
            crossed.append((transport.up, transport.down))

    method.server(federation(method, transport, digits, tmp_path, watcher=Notes()))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["bytes_up"], line["bytes_down"]) for line in lines] == crossed
    (first, asked), (up, down) = crossed
    assert first > 20 * asked > 0
    assert down - asked == pytest.approx(up - first, rel=0.1)  # a model either way, in another envelope


def test_another_methods_journal_is_not_taken_for_ones_own(good: bytes, digits: Any, tmp_path: Path) -> None:
    ask([good], digits, tmp_path)
    (tmp_path / "journal" / "000000-update").rename(tmp_path / "journal" / "000000-other")
    with pytest.raises(ValueError, match="holds 000000-other where this run asks 'update'; choose another --out"):
        ask([good], digits, tmp_path)


def test_a_damaged_reply_is_noticed(good: bytes, digits: Any, tmp_path: Path) -> None:
    ask([good], digits, tmp_path)
    place = tmp_path / "journal" / "000000-update" / "00000.reply"
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged .* delete it and run again"):
        ask([good], digits, tmp_path)


@pytest.mark.parametrize("source", ["000000-update/00001.reply", "000001-update/00000.reply"])
def test_a_reply_of_another_client_or_request_is_noticed(source: str, digits: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for exchange, client in ((0, 0), (0, 1), (1, 0)):
        journal.store_reply(exchange, "update", client, f"{exchange} {client}".encode())
    journal.flush()
    place = journal.folder / "000000-update" / "00000.reply"
    assert journal.read_reply(0, "update", 0) == b"0 0"
    place.write_bytes((journal.folder / source).read_bytes())
    with pytest.raises(files.Damaged, match="delete it and run again to ask client 0 anew"):
        journal.read_reply(0, "update", 0)


def test_a_reply_of_no_client_is_not_used(good: bytes, digits: Any, tmp_path: Path) -> None:
    Journal(tmp_path / "journal").store_reply(0, "update", 9, good)
    replies, _ = ask([good], digits, tmp_path)
    assert replies.clients == [0]


def far(good: bytes, factor: float) -> bytes:
    """The reply with longer weights."""
    tensors, _ = wire.unpack(good)
    longer = {n: v * factor for n, v in tensors.items() if n.startswith("weights/") and v.is_floating_point()}
    return _rewritten(good, **{n.replace("/", "__").replace(".", "_dot_"): v for n, v in longer.items()})


@pytest.mark.parametrize("factor", [1e5, 1e30])
def test_weights_far_longer_than_the_others_are_refused(
    factor: float, good: bytes, digits: Any, tmp_path: Path
) -> None:
    replies, fed = ask([good, far(good, factor), good], digits, tmp_path)
    assert replies.clients == [0, 2]
    (refusal,) = fed.journal.refusals()
    assert refusal.client == 1
    assert "the limit is 1000 times that" in refusal.reason
    again, fed = ask([b"", b"", b""], digits, tmp_path)  # a resumed run comes to the same
    assert again.clients == [0, 2]
    assert fed.journal.refusals() == [refusal]
    assert fed.journal.bytes_up == 2 * len(good) + len(far(good, factor))


def test_longer_weights_within_the_limit_are_used(good: bytes, digits: Any, tmp_path: Path) -> None:
    assert ask([good, far(good, 100.0), good], digits, tmp_path)[0].clients == [0, 1, 2]


def test_a_model_that_is_not_finite_becomes_no_checkpoint(good: bytes, digits: Any, tmp_path: Path) -> None:
    fed = ask([good, far(good, 20.0)], digits, tmp_path)[1]
    model = fed.new_model()
    with pytest.raises(ValueError, match="round 1 gave '.*' values that are not finite.* came from client 1"):
        for _ in fed.rounds(2, model):
            next(model.parameters()).data.fill_(math.inf)
    assert fed.journal.load_checkpoint() is None


def test_the_client_with_the_longest_weights_is_named_although_clients_evaluated_since(
    digits: Any, tmp_path: Path
) -> None:
    fed = world(Probe(), digits, tmp_path, local_test=True).federation
    model = fed.new_model()
    with pytest.raises(ValueError, match="values that are not finite.* came from client [0-3]"):
        for _ in fed.rounds(1, model):
            fed.ask(Probe.update, weights=model.state_dict(), at_most={"n": 3})
            assert fed.evaluate(model) is not None  # replies without weights
            next(model.parameters()).data.fill_(math.inf)


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal/meter.jsonl"])
@pytest.mark.parametrize("damage", ["lost", "shorter", "twice", "changed"])
def test_lines_of_finished_rounds_can_not_change(name: str, damage: str, digits: Any, tmp_path: Path) -> None:
    method = Probe(rounds=3)
    with pytest.raises(Killed):
        method.server(world(method, digits, tmp_path, transport=lambda here: Mortal(Inline(here), 10)).federation)
    place = tmp_path / name
    lines = place.read_bytes().splitlines(keepends=True)
    if damage == "lost":
        place.unlink()
    else:
        changed = {
            "shorter": lines[1:],
            "twice": [lines[0], *lines],
            "changed": [lines[0].replace(b"0", b"7"), *lines[1:]],
        }[damage]
        place.write_bytes(b"".join(changed))
    with pytest.raises(files.Damaged, match="is damaged \\((line|lines of finished rounds)"):
        run(method, digits, tmp_path)


def test_no_usable_reply_is_too_few(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies, match="0 bytes are not a fedstill message"):
        ask([b""], digits, tmp_path, min_clients=None)


@pytest.mark.parametrize("error", ["", "\x1b[31mred\nlines", "\ud800", 7, None, {"a": [1]}])
def test_a_clients_own_reason_is_short_and_printable(error: Any, digits: Any, tmp_path: Path) -> None:
    _, federation = ask([wire.pack({}, {"error": error})], digits, tmp_path)
    (refusal,) = federation.journal.refusals()
    assert refusal.reason
    assert refusal.reason.isprintable()


def test_a_failed_exchange_asks_again_at_the_next_start(good: bytes, digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies):
        ask([b"too late"], digits, tmp_path, min_clients=None)
    assert len(ask([good], digits, tmp_path, min_clients=None)[0]) == 1


def test_a_reply_counts_even_if_another_follows_it(good: bytes, digits: Any, tmp_path: Path) -> None:
    with pytest.raises(TooFewReplies):
        ask([good, b"x" * 1000], digits, tmp_path, min_clients=None)
    _, fed = ask([good, good], digits, tmp_path, min_clients=None)
    assert fed.journal.bytes_up == len(good) + 1000 + len(good)


def test_a_negative_variance_is_refused(digits: Any, tmp_path: Path) -> None:
    def negative(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: -value if name.endswith("running_var") else value for name, value in tensors.items()}

    here = world(
        FedAvg(rounds=1), digits, tmp_path, 3, transport=lambda s: Rogue(Inline(s), negative), min_clients=1,
        model="convnet:norm=batch,width=4,depth=1",
    )  # fmt: skip
    here.spec.method.server(here.federation)
    (refusal,) = here.federation.journal.refusals()
    assert refusal.client == 0 and "has the variance -" in refusal.reason


def test_epochs_go_on_in_a_later_round(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SAVE_EVERY", 0)

    def work(fed: ServerFederation, dies: bool) -> Iterator[tuple[int, int]]:
        model = fed.new_model()
        for round in fed.rounds(3, model):
            for epoch in fed.epochs(3, model):
                yield round.number, epoch
                if dies and (round.number, epoch) == (2, 3):
                    raise Killed

    with pytest.raises(Killed):
        list(work(world(Probe(), digits, tmp_path).federation, True))
    left = list(work(world(Probe(), digits, tmp_path).federation, False))
    assert left == [(2, 3), (3, 1), (3, 2), (3, 3)]


def test_requests_are_counted_when_they_leave(digits: Any, tmp_path: Path) -> None:
    class Dead:
        def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
            sent(0)
            raise Killed
            yield

    fed = federation(Probe(), Dead(), digits, tmp_path)
    with pytest.raises(Killed):
        fed.ask(Probe.update, weights=fed.new_model().state_dict())
    assert len((tmp_path / "journal" / "meter.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["journal/checkpoint", "journal/meter.jsonl", "metrics.jsonl", "clients/00001/000000.state"]
)
@pytest.mark.parametrize("damage", ["flip", "list", "empty"])
def test_damaged_files_are_named_and_never_used(name: str, damage: str, digits: Any, tmp_path: Path) -> None:
    mortal_run(digits, tmp_path)
    place = tmp_path / name
    content = place.read_bytes()
    if damage == "flip":
        middle = len(content) // 2
        place.write_bytes(content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :])
    elif damage == "list":
        place.write_bytes(b"[]\n")
    else:
        place.write_bytes(b"")
    with pytest.raises((ValueError, TooFewReplies), match=f"{place.name} is damaged .*run again"):
        run(Probe(rounds=3), digits, tmp_path)


def test_a_checkpoint_of_something_else_is_a_sentence(digits: Any, tmp_path: Path) -> None:
    mortal_run(digits, tmp_path)
    place, label = tmp_path / "journal" / "checkpoint", (tmp_path / "journal" / "name").read_bytes()
    tensors, header = wire.unpack(bytes(files.read_checked(place, "", label)))
    tensors["0/another"] = tensors.pop(min(tensors))
    files.write_checked(place, wire.pack(tensors, header), label)
    with pytest.raises(ValueError, match="checkpoint does not fit what this run carries .*delete it and run again"):
        run(Probe(rounds=3), digits, tmp_path)
    place.unlink()
    run(Probe(rounds=3), digits, tmp_path)


def mortal_run(digits: Any, folder: Path) -> None:
    method = Probe(rounds=3)
    with pytest.raises(Killed):
        method.server(world(method, digits, folder, transport=lambda here: Mortal(Inline(here), 5)).federation)


def test_integer_buffers_are_rounded_not_cut() -> None:
    from fedstill.protocol import load

    held = {"count": torch.tensor(0), "weight": torch.zeros(1)}
    load(held, {"count": torch.tensor(4.75, dtype=torch.float64), "weight": torch.tensor([0.1], dtype=torch.float64)})
    assert held["count"].item() == 5
    assert held["weight"].dtype == torch.float32


def test_a_run_may_be_judged_now_and_then(digits: Any, tmp_path: Path) -> None:
    run(Probe(rounds=5), digits, tmp_path, evaluate_every=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "accuracy" in line] == [2, 4, 5]
    assert len(lines) == 5
