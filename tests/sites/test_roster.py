"""The server's roster: a key is one client, with one node and a largest number of records."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from fedstill.base import files
from fedstill.engines.transport import Arrival, Transport
from fedstill.protocol import wire
from fedstill.sites.certificates import site_key
from fedstill.sites.seals import RECEIPTS, Receipts
from fedstill.sites.server import roster
from fedstill.sites.server.serve import LimitedRecords, Present


class Flwr:
    """Registers keys like Flower, under the numbers 100, 101, ...; it never takes a key twice."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.keys: list[str] = []
        self.gone: list[int] = []

    def __call__(self, *words: str) -> str:
        self.calls.append(words)
        if words[0] == "unregister":
            self.gone.append(int(words[1]))
            return json.dumps({"success": True, "node-id": int(words[1])})
        key = Path(words[1]).read_text()
        if key in self.keys:
            return "Error: Public key already in use."
        self.keys.append(key)
        return json.dumps({"node-id": str(99 + len(self.keys))})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty roster."""
    roster.write(tmp_path / "roster.toml", roster.Roster())
    return tmp_path / "roster.toml"


def keys_of(folder: Path, *names: str) -> list[str]:
    """Public keys without a comment, as of ssh-keygen."""
    lines = [site_key(folder / f"{name}.key", 0).read_text() for name in names]
    return [" ".join(line.split()[:2]) for line in lines]


def test_a_key_is_registered_once_for_one_client(place: Path, tmp_path: Path) -> None:
    flwr, keys = Flwr(), keys_of(tmp_path, *"abc")
    for client, limit in ((1, None), (0, 500), (2, None)):
        roster.invite(place, client, limit)
    roster.accept(place, 1, keys[0], flwr)
    roster.accept(place, 0, f"{keys[1].strip()} someone@hospital\n", flwr)
    members = roster.read(place)
    assert [(m.client, m.node, m.max_records) for m in members.values()] == [(0, 101, 500), (1, 100, None)]
    assert members[1].key == " ".join(keys[0].split()[:2])
    with pytest.raises(ValueError, match="is client 1's already; a key is one client"):
        roster.accept(place, 2, keys[0], flwr)
    with pytest.raises(ValueError, match="client 1 has another key already; --replace"):
        roster.accept(place, 1, keys[2], flwr)
    with pytest.raises(ValueError, match="client 3 is not invited"):
        roster.accept(place, 3, keys[2], flwr)
    assert roster.accept(place, 1, keys[0], flwr) == members[1]  # again, by mistake
    assert len(flwr.calls) == 2  # Flower was not asked
    with pytest.raises(ValueError, match="Flower does not register the key: 'no'"):
        roster.accept(place, 2, keys[2], lambda *_: "no")
    assert roster.read(place) == members
    assert [entry.client for entry in roster.load(place).invited] == [2]
    assert not list(tmp_path.glob(".site*"))


def test_an_invitation_may_change_the_limit_of_a_member(place: Path, tmp_path: Path) -> None:
    roster.invite(place, 0, 500)
    roster.accept(place, 0, keys_of(tmp_path, "a")[0], Flwr())
    roster.invite(place, 0, None)
    assert roster.read(place)[0].max_records == 500
    roster.invite(place, 0, 600)
    assert roster.read(place)[0].max_records == 600
    assert roster.load(place).invited == ()


def test_a_new_key_takes_the_place_of_the_old_one(place: Path, tmp_path: Path) -> None:
    flwr, keys = Flwr(), keys_of(tmp_path, *"ab")
    roster.invite(place, 0, 500)
    before = roster.accept(place, 0, keys[0], flwr)
    after = roster.accept(place, 0, keys[1], flwr, replace=True)
    assert roster.read(place) == {0: after}
    assert (before.node, after.node, after.max_records) == (100, 101, 500)
    assert flwr.gone == [100]
    with pytest.raises(ValueError, match="was removed, and Flower never takes it again; 'fedstill site rekey'"):
        roster.accept(place, 0, keys[0], flwr, replace=True)


def test_a_site_that_left_comes_back_with_a_new_key(place: Path, tmp_path: Path) -> None:
    flwr, keys = Flwr(), keys_of(tmp_path, *"ab")
    roster.invite(place, 4, None)
    roster.accept(place, 4, keys[0], flwr)
    roster.remove(place, 4, flwr)
    assert roster.read(place) == {}
    assert flwr.gone == [100]
    with pytest.raises(ValueError, match="has no client 4"):
        roster.remove(place, 4, flwr)
    with pytest.raises(ValueError, match="client 4 is not invited"):
        roster.accept(place, 4, keys[1], flwr)
    roster.invite(place, 4, None)
    with pytest.raises(ValueError, match="was removed"):
        roster.accept(place, 4, keys[0], flwr)
    assert roster.accept(place, 4, keys[1], flwr).node == 101


def test_a_site_that_comes_back_has_the_limits_that_it_had(place: Path, tmp_path: Path) -> None:
    flwr, keys = Flwr(), keys_of(tmp_path, *"ab")
    roster.invite(place, 4, 500, helper=True)
    roster.accept(place, 4, keys[0], flwr)
    roster.remove(place, 4, flwr)
    roster.invite(place, 4, None)
    back = roster.accept(place, 4, keys[1], flwr)
    assert (back.max_records, back.helper) == (500, True)


def test_a_new_key_that_flower_did_not_take_at_first_has_the_newest_receipt(place: Path, tmp_path: Path) -> None:
    flwr, keys = Flwr(), keys_of(tmp_path, *"ab")
    receipts = Receipts(tmp_path / RECEIPTS)
    roster.invite(place, 4, None)
    roster.accept(place, 4, keys[0], flwr)
    for number, takes in ((5, False), (9, True)):
        receipts.note(keys[0], f"{number}.{'a' * 64}.{'b' * 64}")
        with nullcontext() if takes else pytest.raises(ValueError, match="Flower does not register the key"):
            roster.accept(place, 4, keys[1], flwr if takes else lambda *_: "down", replace=True)
    assert receipts.of(keys[1]) == receipts.of(keys[0]) == f"9.{'a' * 64}.{'b' * 64}"


def test_damaged_receipts_are_said_before_flower_takes_a_key(place: Path, tmp_path: Path) -> None:
    flwr, (key,) = Flwr(), keys_of(tmp_path, "a")
    roster.invite(place, 4, None)
    (tmp_path / RECEIPTS).write_text("{")
    with pytest.raises(files.Damaged, match="receipts.json is damaged"):
        roster.accept(place, 4, key, flwr)
    assert not flwr.calls
    (tmp_path / RECEIPTS).unlink()
    assert roster.accept(place, 4, key, flwr).node == 100


def test_a_client_that_flower_keeps_is_in_no_run_all_the_same(place: Path, tmp_path: Path) -> None:
    flwr = Flwr()
    roster.invite(place, 0, None)
    roster.accept(place, 0, keys_of(tmp_path, "a")[0], flwr)
    with pytest.raises(ValueError, match="in no run any more, but Flower did not unregister its node 100: 'down'"):
        roster.remove(place, 0, lambda *_: "down")
    assert roster.read(place) == {}


def test_commands_at_the_same_time_lose_no_client(place: Path, tmp_path: Path) -> None:
    class Slow(Flwr):
        def __call__(self, *words: str) -> str:
            time.sleep(0.2)
            return super().__call__(*words)

    flwr, keys = Slow(), keys_of(tmp_path, *"abcd")
    for client in range(4):
        roster.invite(place, client, None)
    roster.accept(place, 3, keys[3], flwr)
    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(roster.accept, place, client, keys[client], flwr) for client in range(3)]
        jobs += [pool.submit(roster.invite, place, 4, 500), pool.submit(roster.remove, place, 3, flwr)]
        for job in jobs:
            job.result()
    found = roster.load(place)
    assert {member.client for member in found.site} == {0, 1, 2}
    assert [entry.client for entry in found.invited] == [4]
    assert [entry.client for entry in found.left] == [3]


def test_a_command_that_never_ends_is_a_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_PATIENCE", 0.1)
    with FileLock(place.with_suffix(".lock")), pytest.raises(ValueError, match="another command has changed the"):
        roster.invite(place, 0, None)


@pytest.mark.parametrize("text", ["", "ssh-rsa AAAA", "ecdsa-sha2-nistp384 AAAA", "x" * 5000, "\0", "-----BEGIN"])
def test_what_is_no_key_is_a_sentence(text: str, place: Path) -> None:
    roster.invite(place, 0, None)
    with pytest.raises(ValueError, match="is not a public key of OpenSSH") as error:
        roster.accept(place, 0, text, Flwr())
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("site = ", "can't be read as TOML"),
        ("[[site]]\nclient = 0\nkey = 'a'\n", "node"),
        ("[[site]]\nclient = 0\nkey = 'a'\nnode = 1\n" * 2, "has the client 0 twice"),
        ("[[site]]\nclient = 0\nkey = 'a'\nnode = 1\n[[site]]\nclient = 1\nkey = 'a'\nnode = 2\n", "the key 'a' twice"),
        ("[[site]]\nclient = 0\nkey = 'a'\nnode = 1\n[[site]]\nclient = 1\nkey = 'b'\nnode = 1\n", "the node 1 twice"),
    ],
)
def test_a_roster_that_is_wrong_is_a_sentence(text: str, reason: str, tmp_path: Path) -> None:
    place = tmp_path / "roster.toml"
    place.write_text(text)
    with pytest.raises(ValueError, match=reason):
        roster.read(place)


class Canned(Transport):
    def __init__(self, replies: Sequence[bytes]) -> None:
        self.replies = replies

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        return (Arrival(client, self.replies[client]) for client in clients)


def test_more_records_than_a_client_may_have_are_refused() -> None:
    def claiming(number: int) -> bytes:
        return wire.pack({}, {"fields": {"num_records": number}})

    by_class, too_large = (
        wire.pack({"counts": torch.tensor(counts)}, {"fields": {}}) for counts in ([300, 300], [2**62, 2**62, 0])
    )
    replies = [claiming(500), claiming(501), claiming(2**40), claiming(2**40), by_class, b"none", too_large]
    limits = dict.fromkeys((0, 1, 2, 4, 5, 6), 500)
    arrivals = list(LimitedRecords(Canned(replies), limits).exchange(b"", range(7), lambda _: None))
    assert [arrival.failure is None for arrival in arrivals] == [True, False, False, True, False, True, False]
    assert arrivals[1].failure == "it claims 501 records; its limit is 500 (max_records)"
    assert arrivals[1].reply == replies[1]  # it crossed, so its bytes count


def test_a_client_that_the_roster_lacks_is_not_asked_or_waited_for() -> None:
    replies = [b"first", b"never sent", b"third"]
    found = list(Present(Canned(replies), {1, 5}).exchange(b"", [0, 1, 2], lambda _: None))
    assert sorted((one.client, one.reply, one.failure) for one in found) == [
        (0, b"first", None),
        (1, b"", "the roster has no key of it"),
        (2, b"third", None),
    ]
    assert [one.client for one in Present(Canned(replies), {1}).exchange(b"", [1], lambda _: None)] == [1]


def test_a_mistyped_place_gets_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="roster"):
        roster.invite(tmp_path / "nowhere" / "roster.toml", 0, None)
    assert not (tmp_path / "nowhere").exists()


def test_a_key_under_a_wrong_number_costs_nothing(place: Path, tmp_path: Path) -> None:
    """The third site's operator mails a key, and the server's types another number."""
    key = site_key(tmp_path / "site.key", 2).read_text()
    for client in (0, 2):
        roster.invite(place, client, None)
    before = place.read_bytes()

    def flwr(*words: object, **_: object) -> str:
        raise AssertionError("Flower takes a key once")

    with pytest.raises(
        ValueError, match="this key was made for client 2, not 0; 'fedstill server accept FOLDER 2 KEY'"
    ):
        roster.accept(place, 0, key, flwr)
    assert place.read_bytes() == before


def test_who_is_invited_again_keeps_the_limit(place: Path) -> None:
    roster.invite(place, 5, 1000, helper=True)
    roster.invite(place, 5, None)
    (found,) = [entry for entry in roster.load(place).invited if entry.client == 5]
    assert found.max_records == 1000 and found.helper
    roster.invite(place, 5, 2000)
    assert [entry.max_records for entry in roster.load(place).invited if entry.client == 5] == [2000]
