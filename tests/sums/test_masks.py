"""Masked sums between parties: totals to the bit, and everything that a hostile one may try."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small import room

from fedstill.sums import helpers as helping
from fedstill.sums import masks
from fedstill.sums.helpers import Helper, masks_of, total_of, usable
from fedstill.sums.masks import SumRefused, Terms, Upload, centred, is_signed, mask, packed, quorum, unpacked

KEYS = [Ed25519PrivateKey.from_private_bytes(hashlib.sha256(bytes([i])).digest()) for i in range(12)]


def roster(client: int) -> bytes | None:
    return KEYS[client].public_key().public_bytes_raw() if 0 <= client < len(KEYS) else None


class Party:
    """Helpers in folders, terms, and the uploads of clients."""

    def __init__(self, folder: Path, helpers: int = 4, traitors: int = 1, least: int = 3, length: int = 50) -> None:
        self.folder = folder
        self.helpers = [Helper(folder / str(i), i, roster) for i in range(helpers)]
        keys = tuple(h.keys.box for h in self.helpers), tuple(h.keys.signer for h in self.helpers)
        self.terms = Terms(bytes(32), 0, *keys, traitors, least, length, 5)
        rng = np.random.default_rng(0)
        self.numbers = [rng.integers(-(10**9), 10**9, length) for _ in KEYS]
        made = [mask(x, self.terms, i, KEYS[i].sign) for i, x in enumerate(self.numbers)]
        self.masked, self.uploads = [data for data, _ in made], [upload for _, upload in made]

    def again(self) -> None:
        """The helpers' processes start again."""
        self.helpers = [Helper(self.folder / str(i), i, roster) for i in range(len(self.helpers))]

    def total(self, clients: list[int], absent: tuple[int, ...] = ()) -> NDArray[np.int64]:
        present = [Absent(h.number) if h.number in absent else h for h in self.helpers]
        found = masks_of(present, self.terms, [self.uploads[c] for c in clients])
        return total_of((self.masked[c] for c in clients), found, self.terms.width)


class Absent:
    def __init__(self, number: int) -> None:
        self.number = number

    def check(self, terms: Terms, uploads: object) -> dict[int, str]:
        raise ConnectionError("no helper here")

    agree = open = check


@given(st.sets(st.integers(0, 11), min_size=3), st.sampled_from([(), (0,), (3,)]))
@settings(max_examples=25, deadline=None)
def test_the_total_is_exact_for_any_clients_that_arrive(
    tmp_path_factory: pytest.TempPathFactory, clients: set[int], absent: tuple[int, ...]
) -> None:
    party = Party(tmp_path_factory.mktemp("party"))
    arrived = sorted(clients)
    assert (party.total(arrived, absent) == sum(party.numbers[c] for c in arrived)).all()


@pytest.mark.parametrize(("helpers", "traitors", "gone"), [(2, 1, 0), (3, 1, 0), (5, 2, 1), (7, 2, 2), (4, 1, 1)])
def test_other_numbers_of_helpers(tmp_path: Path, helpers: int, traitors: int, gone: int) -> None:
    party = Party(tmp_path, helpers, traitors)
    assert (party.total([0, 4, 7], tuple(range(gone))) == sum(party.numbers[c] for c in (0, 4, 7))).all()
    if gone + 1 <= helpers:
        with pytest.raises(SumRefused, match="helpers answer and .* are needed .* stays sealed"):
            Party(tmp_path / "more", helpers, traitors).total([0, 4, 7], tuple(range(gone + 1)))


@pytest.mark.parametrize("width", range(2, 8))
def test_numbers_of_each_width_wrap_where_they_must(width: int) -> None:
    most = 2 ** (8 * width - 1) - 1
    numbers = np.array([0, 1, -1, most, -most - 1], dtype=np.int64)
    assert (centred(unpacked(packed(numbers.view(np.uint64), width), width), width) == numbers).all()
    assert centred((numbers + 1).view(np.uint64), width)[3] == -most - 1  # a modulus that is too small


def test_an_upload_shows_nothing_without_the_missing_class(tmp_path: Path) -> None:
    """With the seeds that one helper has, the rest of the mask is a keystream that it has not: bytes look uniform."""
    party = Party(tmp_path, length=20_000)
    held = masks.opened(party.uploads[0], party.terms, 0, party.helpers[0].keys.opening)
    assert len(held) == 3 and set(held) == set(party.terms.held(0))
    seen = unpacked(party.masked[0], 5).copy()
    for seed in held.values():
        total = np.zeros(len(seen), np.uint64)
        masks.add_mask(total, seed, 5)
        seen -= total
    low = packed(seen, 5)
    counts = np.bincount(np.frombuffer(low, np.uint8), minlength=256)
    assert abs(((counts - len(low) / 256) ** 2 / (len(low) / 256)).sum() - 255) < 6 * np.sqrt(510)
    missing = next(number for number in range(4) if number not in held)
    other = masks.opened(party.uploads[0], party.terms, 1, party.helpers[1].keys.opening)[missing]
    masks.add_mask(total := np.zeros(len(seen), np.uint64), other, 5)
    assert (centred(seen - total, 5) == party.numbers[0]).all()


# What must be refused -------------------------------------------------------------------------------------------------


class Traitor(Helper):
    """A helper that signs and opens whatever the server asks for."""

    _asked: bytes | None = None

    def _signed(self, terms: Terms) -> bytes | None:
        return self._asked

    def agree(self, terms: Terms, uploads: Sequence[Upload]) -> bytes:
        self._asked = None
        return super().agree(terms, uploads)

    def open(self, terms: Terms, uploads: Sequence[Upload], signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        self._asked = helping.set_digest(terms, uploads)
        return super().open(terms, uploads, signatures)


def attack(party: Party) -> NDArray[np.int64]:
    """The numbers of client 0: two sums that differ by it, each opened by the traitor and half of the other helpers."""
    traitor, others = Traitor(party.folder / "0", 0, roster), party.helpers[1:]
    needed = helping.quorum(len(party.helpers), 1) - 1
    sums = []
    for clients, asked in (([0, 1, 2, 3], others[:needed]), ([1, 2, 3], others[-needed:])):
        absent = [Absent(h.number) for h in others if h not in asked]
        found = masks_of([traitor, *asked, *absent], party.terms, [party.uploads[c] for c in clients])
        sums.append(total_of((party.masked[c] for c in clients), found, 5))
    return sums[0] - sums[1]


def test_a_traitor_and_the_server_open_two_sets_where_the_quorum_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack for which `quorum` is as large as it is."""
    for helpers in (3, 4, 5):
        with pytest.raises(SumRefused, match="has signed another set of clients"):
            attack(Party(tmp_path / str(helpers), helpers))
    monkeypatch.setattr(helping, "quorum", lambda helpers, traitors: 2)
    broken = Party(tmp_path / "broken", helpers=3)
    assert (attack(broken) == broken.numbers[0]).all()


def test_a_helper_names_one_set_even_after_it_was_killed(tmp_path: Path) -> None:
    party = Party(tmp_path)
    helper = party.helpers[0]
    signature = helper.agree(party.terms, party.uploads[:4])
    party.again()
    assert party.helpers[0].agree(party.terms, party.uploads[:4]) == signature
    for other in (party.uploads[:3], party.uploads[:5]):
        with pytest.raises(SumRefused, match="has signed another set"):
            party.helpers[0].agree(party.terms, other)
    with pytest.raises(
        SumRefused, match="has signed another set"
    ):  # a lowered least is another sum of the same request
        lowered = replace(party.terms, least=2)
        party.helpers[0].agree(lowered, [mask(party.numbers[c], lowered, c, KEYS[c].sign)[1] for c in range(2)])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a file's size")
def test_a_helper_whose_disk_is_full_signs_nothing(tmp_path: Path) -> None:
    """Half a line was written without an error, and the signature left; the next set was signed too."""
    party = Party(tmp_path)
    size = (tmp_path / "0" / "signed.jsonl").stat().st_size
    with room(size + 40), pytest.raises(OSError, match="File too large"):
        party.helpers[0].agree(party.terms, party.uploads[:4])
    signature = party.helpers[0].agree(party.terms, party.uploads[:3])  # once there is room, any one set
    party.again()
    assert party.helpers[0].agree(party.terms, party.uploads[:3]) == signature
    with pytest.raises(SumRefused, match="has signed another set"):
        party.helpers[0].agree(party.terms, party.uploads[:4])


def test_nothing_is_opened_without_the_signatures_of_a_quorum(tmp_path: Path) -> None:
    party = Party(tmp_path)
    uploads = party.uploads[:4]
    signatures = {h.number: h.agree(party.terms, uploads) for h in party.helpers[:2]}
    with pytest.raises(SumRefused, match=r"2 helpers have signed this set; before helper 0 opens, 3 must"):
        party.helpers[0].open(party.terms, uploads, signatures)
    forged = signatures | {2: signatures[0], 3: bytes(64), 9: signatures[0]}
    with pytest.raises(SumRefused, match="2 helpers have signed"):
        party.helpers[0].open(party.terms, uploads, forged)
    with pytest.raises(SumRefused, match="has not signed this set"):
        party.helpers[3].open(party.terms, uploads, signatures)


def test_uploads_that_helpers_can_t_use_are_left_out_as_a_whole(tmp_path: Path) -> None:
    party = Party(tmp_path)
    good = party.uploads[:8]
    flipped = bytes([good[0].boxes[2][0] ^ 1]) + good[0].boxes[2][1:]
    swapped = (good[1].boxes[1], good[1].boxes[0], *good[1].boxes[2:])
    elsewhere = mask(party.numbers[4], replace(party.terms, exchange=1), 4, KEYS[4].sign)[1]
    bad = [
        good[0]._replace(boxes=(*good[0].boxes[:2], flipped, good[0].boxes[3])),  # a box that was changed
        good[1]._replace(boxes=swapped),
        good[2]._replace(client=3),  # another's upload
        elsewhere,  # a replayed upload of another request
        good[5]._replace(digest=bytes(32)),  # other numbers
        Upload(99, *good[6][1:]),  # no client
    ]
    reasons = usable(party.helpers, party.terms, [*bad, good[7]])
    assert set(reasons) == {0, 1, 3, 4, 5, 99}
    assert all("signature" in why for why in reasons.values())
    with pytest.raises(SumRefused, match="signs no such set"):
        party.helpers[0].agree(party.terms, sorted([bad[0], *good[5:8]]))


def test_a_box_that_its_client_sealed_wrongly_is_named(tmp_path: Path) -> None:
    party = Party(tmp_path)
    wrong = replace(
        party.terms, boxes=(*party.terms.boxes[:3], X25519PrivateKey.generate().public_key().public_bytes_raw())
    )
    _, upload = mask(party.numbers[0], wrong, 0, KEYS[0].sign)
    signed = upload._replace(signature=KEYS[0].sign(masks.signed_text(party.terms, upload)))
    reasons = usable(party.helpers, party.terms, [signed, *party.uploads[1:4]])
    assert list(reasons) == [0] and "does not open" in reasons[0]


def test_equal_seeds_of_two_clients_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party(tmp_path)
    monkeypatch.setattr(masks.os, "urandom", lambda size: bytes(size))
    one = mask(party.numbers[0], party.terms, 0, KEYS[0].sign)[1]
    reasons = usable(party.helpers, party.terms, [one, *party.uploads[1:4]])
    assert reasons == {0: "client 0 has one seed for two classes"}
    counter = iter(range(1000))
    monkeypatch.setattr(masks.os, "urandom", lambda size: (next(counter) % 4).to_bytes(size, "big"))
    two = [mask(party.numbers[c], party.terms, c, KEYS[c].sign)[1] for c in (0, 1)]
    assert usable(party.helpers, party.terms, [*two, *party.uploads[2:4]]) == {1: "clients 0 and 1 have the same seed"}


def test_one_helper_that_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    """A client may give a bad box to a helper that is absent while boxes are checked, and back when sets are signed."""
    party = Party(tmp_path)
    upload = party.uploads[2]
    bad = upload._replace(boxes=(*upload.boxes[:3], bytes(len(upload.boxes[3]))))
    party.uploads[2] = bad._replace(signature=KEYS[2].sign(masks.signed_text(party.terms, bad)))
    assert usable([*party.helpers[:3], Absent(3)], party.terms, party.uploads[:5]) == {}
    with pytest.raises(SumRefused, match="signs no such set"):
        party.helpers[3].agree(party.terms, party.uploads[:5])
    assert (party.total([0, 1, 2, 3, 4]) == sum(party.numbers[:5])).all()
    with pytest.raises(SumRefused, match=r"2 of 4 helpers answer and 3 are needed .*3 \(helper 3 signs no such set"):
        party.total([0, 1, 2, 3, 4], absent=(0,))


def test_a_wrong_sum_of_masks_is_noticed(tmp_path: Path) -> None:
    party = Party(tmp_path)

    class Lying(Helper):
        def open(self, *asked: object) -> dict[int, bytes]:
            return {number: bytes([data[0] ^ 1]) + data[1:] for number, data in super().open(*asked).items()}

    party.helpers[1] = Lying(tmp_path / "1", 1, roster)
    with pytest.raises(SumRefused, match="helpers 0 and 1 give different sums of the same masks"):
        party.total([0, 1, 2])


def test_small_or_unordered_sets_are_refused(tmp_path: Path) -> None:
    party = Party(tmp_path)
    for clients, why in (([0, 1], "fewer than 3"), ([2, 1, 0], "not in order"), ([0, 1, 1, 2], "has one twice")):
        with pytest.raises(SumRefused, match=why):
            party.helpers[0].agree(party.terms, [party.uploads[c] for c in clients])


def test_terms_that_protect_nobody_are_refused(tmp_path: Path) -> None:
    terms = Party(tmp_path).terms
    for change, why in (
        ({"boxes": (terms.boxes[0],) * 4}, "two helpers have the same key"),
        ({"traitors": 4}, "4 helpers of whom 4"),
        ({"traitors": 0}, "of whom 0"),
        ({"least": 1}, "the sum of one client is that client's upload"),
        ({"width": 8}, "a number has 8 bytes"),
    ):
        with pytest.raises(SumRefused, match=why):
            replace(terms, **change)
    assert [quorum(m, t) for m, t in ((2, 1), (3, 1), (4, 1), (5, 2), (7, 2))] == [2, 3, 3, 4, 5]


def test_another_helper_s_terms_are_refused(tmp_path: Path) -> None:
    party, other = Party(tmp_path / "a"), Party(tmp_path / "b")
    with pytest.raises(SumRefused, match="other keys for helper 0"):
        party.helpers[0].agree(other.terms, other.uploads[:4])


def test_keys_are_the_owner_s_alone(tmp_path: Path) -> None:
    Party(tmp_path)
    assert [(tmp_path / "0" / name).stat().st_mode & 0o777 for name in ("sign.key", "open.key")] == [0o600] * 2
    assert (tmp_path / "0").stat().st_mode & 0o777 == 0o700


# The vectors of the primitives ----------------------------------------------------------------------------------------


def test_primitives_have_the_vectors_of_their_rfcs() -> None:
    bob = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    )
    alice = X25519PublicKey.from_public_bytes(
        bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    )
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"  # RFC 7748, 6.1
    assert bob.exchange(alice).hex() == shared
    assert (
        HKDF(SHA256(), 42, bytes.fromhex("000102030405060708090a0b0c"), bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"))
        .derive(b"\x0b" * 22)
        .hex()
        .startswith("3cb25f25faacd57a90434f64d0362f2a")
    )  # RFC 5869, A.1
    total = np.zeros(8, np.uint64)
    masks.add_mask(total, bytes(32), 4)
    assert packed(total, 4).hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"  # RFC 8439, A.1
    key = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    assert (
        key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    )  # RFC 8032


def test_the_vectors_on_file_are_accepted_and_the_bad_ones_refused() -> None:
    """``tests/vectors/masked_sums.json``, against which another implementation can be written."""
    place = Path(__file__).parents[1] / "vectors/masked_sums.json"
    for case in json.loads(place.read_text()):
        terms = Terms(
            bytes.fromhex(case["run"]),
            case["exchange"],
            tuple(map(bytes.fromhex, case["boxes"])),
            tuple(map(bytes.fromhex, case["signers"])),
            *(case[name] for name in ("traitors", "least", "length", "width")),
        )
        upload = Upload(
            case["client"], *(bytes.fromhex(case[name]) for name in ("digest", "key")),
            tuple(map(bytes.fromhex, case["sealed"])), bytes.fromhex(case["signature"]),
        )  # fmt: skip
        assert terms.digest.hex() == case["terms"]
        opening = X25519PrivateKey.from_private_bytes(bytes.fromhex(case["open_key"]))
        good = is_signed(terms, upload, bytes.fromhex(case["client_key"]))
        try:
            seeds = masks.opened(upload, terms, case["helper"], opening)
        except SumRefused:
            seeds = {}
        assert (good and bool(seeds)) == case["good"], case["name"]
        if case["good"]:
            assert {str(n): seed.hex() for n, seed in seeds.items()} == case["seeds"]
            total = np.zeros(terms.length, np.uint64)
            masks.add_mask(total, seeds[int(min(case["seeds"]))], terms.width)
            assert packed(total, terms.width).hex() == case["mask"]
