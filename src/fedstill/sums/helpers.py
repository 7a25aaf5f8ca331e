"""The helpers' part of a masked sum, and what a server makes of it.

A helper answers in three steps. `check` names uploads that it can't use, so that the server leaves those clients out as
a whole. `agree` signs the set of the others, once: it writes the set down before it signs, and signs no second set for
the same request of the same run, whoever asks. `open` hands over the sums of the masks whose seeds it has, to whoever
shows the signatures of a quorum for that set.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedstill.base import files
from fedstill.sums.keys import JOURNAL, Keys
from fedstill.sums.masks import (
    SumRefused,
    Terms,
    Upload,
    add_mask,
    centred,
    is_signed,
    opened,
    packed,
    quorum,
    unpacked,
    verified,
)

Roster = Callable[[int], bytes | None]
"""The Ed25519 key of a client by its number; None for a number that is no client."""


def set_digest(terms: Terms, uploads: Sequence[Upload]) -> bytes:
    """SHA-256 of the set of uploads, in the order of client numbers."""
    text = b"".join(one.client.to_bytes(8, "big") + one.digest + one.signature for one in uploads)
    return hashlib.sha256(b"fedstill masked sum 1 set" + terms.digest + text).digest()


class Answers(Protocol):
    """A helper as the server reaches it; each call may raise OSError if the helper is absent."""

    number: int

    def check(self, terms: Terms, uploads: Sequence[Upload]) -> dict[int, str]:
        """The clients whose uploads are of no use, with the reasons."""

    def agree(self, terms: Terms, uploads: Sequence[Upload]) -> bytes:
        """The helper's signature of the set."""

    def open(self, terms: Terms, uploads: Sequence[Upload], signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """The sums of the masks of the helper's classes, packed, by number of the class."""


class Helper:
    """One helper with its keys and its journal, in a folder of its own.

    Args:
        folder: the helper's folder, made if it is absent.
        number: the helper's place in the terms.
        roster: the clients' keys.
    """

    def __init__(self, folder: Path, number: int, roster: Roster) -> None:
        self.number = number
        self._roster = roster
        self._folder = folder
        self.keys = Keys(folder)
        self._lock = FileLock(folder / "signed.lock", timeout=60)

    def check(self, terms: Terms, uploads: Sequence[Upload]) -> dict[int, str]:
        """The clients whose uploads are of no use, with the reasons: signature, box, or a seed that another has too.

        Raises:
            SumRefused: the terms are not for this helper.
        """
        self._own(terms)
        reasons: dict[int, str] = {}
        owners: dict[bytes, int] = {}
        for upload in uploads:
            key = self._roster(upload.client)
            if key is None or not is_signed(terms, upload, key):
                reasons[upload.client] = f"the signature of client {upload.client} is not by its key for this sum"
                continue
            try:
                seeds = opened(upload, terms, self.number, self.keys.opening)
            except SumRefused as refused:
                reasons[upload.client] = str(refused)
                continue
            for seed in seeds.values():
                if (first := owners.setdefault(seed, upload.client)) != upload.client:
                    reasons[upload.client] = f"clients {first} and {upload.client} have the same seed"
            if len(set(seeds.values())) < len(seeds):
                reasons[upload.client] = f"client {upload.client} has one seed for two classes"
        return reasons

    def agree(self, terms: Terms, uploads: Sequence[Upload]) -> bytes:
        """The signature of the set of uploads, after it is in the journal.

        Raises:
            SumRefused: the set is too small, has an upload of no use, or another was signed for this request.
        """
        self._check_set(terms, uploads)
        if reasons := self.check(terms, uploads):
            raise SumRefused(f"helper {self.number} signs no such set: {next(iter(reasons.values()))}")
        digest = set_digest(terms, uploads)
        with self._lock:  # a helper may be asked twice at once
            signed = self._signed(terms)
            if signed not in (None, digest):
                raise SumRefused(
                    f"helper {self.number} has signed another set of clients for request {terms.exchange} of this run, "
                    "and signs no second"
                )
            if signed is None:
                line = {"run": terms.run.hex(), "exchange": terms.exchange, "set": digest.hex()}
                files.append_json(self._folder / JOURNAL, line, flush=True)  # before the signature leaves
        return self.keys.sign(_agreed(digest))

    def open(self, terms: Terms, uploads: Sequence[Upload], signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """The sums of the masks of this helper's classes, packed, by number of the class.

        Raises:
            SumRefused: this helper has not signed this set, or fewer helpers than a quorum have.
        """
        self._check_set(terms, uploads)
        digest = set_digest(terms, uploads)
        if self._signed(terms) != digest:
            raise SumRefused(f"helper {self.number} has not signed this set of clients, and opens no other")
        good = [
            number
            for number, signature in signatures.items()
            if 0 <= number < len(terms.signers) and verified(terms.signers[number], signature, _agreed(digest))
        ]
        needed = quorum(len(terms.signers), terms.traitors)
        if len(good) < needed:
            raise SumRefused(
                f"{len(good)} helpers have signed this set; before helper {self.number} opens, {needed} must"
            )
        sums = {number: np.zeros(terms.length, dtype=np.uint64) for number in terms.held(self.number)}
        for upload in uploads:
            for number, seed in opened(upload, terms, self.number, self.keys.opening).items():
                add_mask(sums[number], seed, terms.width)
        return {number: packed(total, terms.width) for number, total in sums.items()}

    @property
    def signatures(self) -> int:
        """Number of sets that were signed."""
        return len(self._lines())

    def _own(self, terms: Terms) -> None:
        place, own = self.number, (self.keys.box, self.keys.signer)
        if not place < len(terms.boxes) or (terms.boxes[place], terms.signers[place]) != own:
            raise SumRefused(f"the terms name other keys for helper {place} than it has")

    def _check_set(self, terms: Terms, uploads: Sequence[Upload]) -> None:
        self._own(terms)
        clients = [upload.client for upload in uploads]
        if clients != sorted(set(clients)):
            raise SumRefused("the set of clients is not in order, or has one twice")
        if len(clients) < terms.least:
            raise SumRefused(f"the set has {len(clients)} clients; a sum of fewer than {terms.least} is not opened")

    def _signed(self, terms: Terms) -> bytes | None:
        """The set that was signed for this request; None if none was."""
        for line in self._lines():
            if (line["run"], line["exchange"]) == (terms.run.hex(), terms.exchange):
                return bytes.fromhex(line["set"])
        return None

    def _lines(self) -> list[dict[str, Any]]:
        place = self._folder / JOURNAL
        remedy = "remove the folder, which makes new keys: a copy may lack what was signed after it"
        if not place.exists():  # another set may have been signed
            raise files.Damaged(f"{place} is gone, and this helper signs nothing without it; {remedy}")
        return files.read_json_lines(place, remedy)


def _agreed(digest: bytes) -> bytes:
    return b"fedstill masked sum 1 agreed" + digest


# The server -----------------------------------------------------------------------------------------------------------


def usable(helpers: Sequence[Answers], terms: Terms, uploads: Sequence[Upload]) -> dict[int, str]:
    """The clients to leave out as a whole, with the reasons, by all helpers that answer."""
    reasons: dict[int, str] = {}
    _present(helpers, lambda one: one.check(terms, uploads), terms, reasons.update)
    return reasons


def masks_of(helpers: Sequence[Answers], terms: Terms, uploads: Sequence[Upload]) -> NDArray[np.uint64]:
    """The sum of all masks of a set of clients, modulo 2^(8 b).

    Raises:
        SumRefused: too few helpers answer, or two of them disagree; what the clients sent stays sealed.
    """
    signatures: dict[int, bytes] = {}
    present = _present(helpers, lambda one: {one.number: one.agree(terms, uploads)}, terms, signatures.update)
    sums: dict[int, tuple[int, bytes]] = {}

    def compare(found: dict[int, tuple[int, bytes]]) -> None:
        for number, (helper, data) in found.items():
            other, first = sums.setdefault(number, (helper, data))
            if first != data:
                raise SumRefused(f"helpers {other} and {helper} give different sums of the same masks; one is wrong")

    _present(
        present,
        lambda one: {n: (one.number, data) for n, data in one.open(terms, uploads, signatures).items()},
        terms,
        compare,
    )
    if missing := set(range(len(terms.classes))) - sums.keys():
        raise SumRefused(f"no helper that answers has the masks of class {min(missing)}")
    total = np.zeros(terms.length, dtype=np.uint64)
    for number, (helper, data) in sums.items():
        if len(data) != terms.length * terms.width:
            raise SumRefused(f"helper {helper} gives {len(data)} bytes for class {number}")
        total += unpacked(data, terms.width)
    return total


def total_of(masked: Iterable[bytes | NDArray[np.uint8]], masks: NDArray[np.uint64], width: int) -> NDArray[np.int64]:
    """The clients' total: their masked numbers, read one at a time, less the sum of their masks."""
    total = np.zeros(len(masks), dtype=np.uint64)
    for data in masked:
        total += unpacked(data, width)
    return centred(total - masks, width)


Found = TypeVar("Found")


def _present(
    helpers: Sequence[Answers], ask: Callable[[Answers], Found], terms: Terms, use: Callable[[Found], object]
) -> list[Answers]:
    """Ask every helper and use what it says; returns those that answered and did not refuse.

    Raises:
        SumRefused: they are fewer than a quorum.
    """
    present, absent = [], list[str]()
    for helper in helpers:
        try:
            found = ask(helper)
        except (OSError, SumRefused) as error:  # one that alone refuses does not stop the others
            absent.append(f"{helper.number} ({error})" if str(error) else str(helper.number))
            continue
        use(found)
        present.append(helper)
    needed = quorum(len(terms.signers), terms.traitors)
    if len(present) < needed:
        raise SumRefused(
            f"{len(present)} of {len(terms.signers)} helpers answer and {needed} are needed (helpers "
            f"{', '.join(absent)} do not); what the clients sent stays sealed, so start again when they do"
        )
    return present
