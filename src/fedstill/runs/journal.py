"""The journal of a run on disk: every reply, byte counts, and the server's last checkpoint.

::

    journal/
      name                            two random numbers: checksums of replies cover the first, of checkpoints both
      meter.jsonl                     one line per message: exchange, client, bytes down or up, seconds since the start
      spent.jsonl                     one line per reply with released values: exchange, client, the releases
      000000-update/request           digest of the first request
      000002-update/00007.reply       reply of client 7 to the third request
      000002-update/00009.refused     reason why client 9's reply is not used
      1000003-judge/00007.reply       client 7's evaluation of the model before the fourth request, on its test records
      newest/00007                    number of the request after which simulated client 7's newest state was written
      checkpoint                      state of the server's loop after its last finished round
      epochs                          state of long work at the server after one of its epochs

An exchange is the number of a request, from 0. A resumed run sends the same requests in the same order and reads stored
replies from here. Every file is whole or absent (`fedstill.base.files`); replies, checkpoints and lines have a
checksum. Those of replies and checkpoints cover their place and the name of the journal, so that another run's is not
taken for this one's. Runs that use the same replies share the first half of the name.
"""

import hashlib
import json
import secrets
import shutil
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedstill.base import files
from fedstill.privacy.ledger import Charge

if TYPE_CHECKING:  # reading the folder of a run does not need torch, which takes a second
    from torch import Tensor


class JournalFiles:
    """The files of the journal in ``folder``, which need not exist.

    Attributes:
        name: two random numbers; absent in journals of earlier versions.
        meter: a line for each message.
        spent: a line for each reply with released values.
        newest: folder with the number of each simulated client's newest state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder / "name"
        self.meter = folder / "meter.jsonl"
        self.spent = folder / "spent.jsonl"
        self.newest = folder / "newest"

    def request(self, exchange: int, step: str) -> Path:
        """The folder of a request and its replies."""
        return self.folder / f"{exchange:06d}-{step}"

    def digest(self, exchange: int, step: str) -> Path:
        """The file with the request's digest."""
        return self.request(exchange, step) / "request"

    def digests(self, exchange: int) -> list[Path]:
        """The files with the digest of a request, if there are any."""
        return [file for place in self.requests(exchange) if (file := place / "request").is_file()]

    def reply(self, exchange: int, step: str, client: int) -> Path:
        """The file of a client's reply."""
        return self.request(exchange, step) / f"{client:05d}.reply"

    def refusal(self, exchange: int, step: str, client: int) -> Path:
        """The file with the reason why a client's reply is not used."""
        return self.request(exchange, step) / f"{client:05d}.refused"

    def requests(self, exchange: int | None = None) -> list[Path]:
        """The folders of requests that still have one, of all or of this number, in order."""
        return sorted(self.folder.glob("[0-9]*-*" if exchange is None else f"{exchange:06d}-*"))

    def step(self, exchange: int) -> str | None:
        """The name of the step that a request asked for, if its folder is there."""
        return next((place.name.partition("-")[2] for place in self.requests(exchange)), None)

    def replies(self, exchange: int) -> dict[int, Path]:
        """The files of replies to a request by client, in order."""
        return self._by_client(exchange, "reply")

    def checksums(self, exchange: int) -> dict[int, bytes]:
        """The checksums of replies to a request by client, in order."""
        return {client: files.checksum(place) for client, place in self.replies(exchange).items()}

    def refused(self, exchange: int) -> dict[int, Path]:
        """The files of refusals of a request by client, in order."""
        return self._by_client(exchange, "refused")

    def refusals(self) -> list[Path]:
        """The files of all refusals, in order of requests and clients."""
        return [file for place in self.requests() for file in sorted(place.glob("*.refused"))]

    def messages(self, remedy: str = "delete its run and run again") -> list[dict[str, Any]]:
        """The lines of `meter`; raises `fedstill.base.files.Damaged`, which names the remedy."""
        return files.read_json_lines(self.meter, remedy)

    def _by_client(self, exchange: int, kind: str) -> dict[int, Path]:
        found = [f for place in self.requests(exchange) for f in sorted(place.glob(f"*.{kind}"))]
        return {int(f.stem): f for f in found if f.stem.isdecimal() and f.is_file()}


def exchange_of(request: Path) -> int:
    """The number of the request with this folder."""
    return int(request.name.partition("-")[0])


def new_name(replies: bytes | None = None) -> bytes:
    """The name of a new journal; ``replies`` is that of the one whose replies it has."""
    first = secrets.token_hex(16).encode() if replies is None else replies.partition(b" ")[0]
    return first + b" " + secrets.token_hex(16).encode()


CHECKPOINT = "checkpoint"
EVALUATIONS = 1_000_000
"""Distance between the numbers of evaluations: the k-th evaluation before request n has the number n + k times this.
Evaluating more often then shifts no random stream. The bytes of evaluations are counted apart."""
_SMALL = 1 << 18
"""Size in bytes up to which a reply is written in the background."""
_PENDING = 128
"""Maximum number of replies that wait in memory for the disk."""
_WRITERS = 8


WITHDRAWN = "its reply was withdrawn (--without)"
"""Reason of the refusal that stands for a withdrawn reply."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a client's reply to one request is not used."""

    client: int
    step: str
    round: int | None
    reason: str


class Journal:
    """The journal in ``folder``; opening an existing one continues it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = JournalFiles(folder)
        folder.mkdir(parents=True, exist_ok=True)
        places = (self.files.meter, self.files.spent)
        self._lines, self._spending = (files.JsonLines(place, chain=True) for place in places)
        self._releases: dict[tuple[int, int], list[Charge]] | None = None  # by client and request, once read
        self._known: bytes | None = None  # the journal's name, once read or drawn
        self.bytes_down = 0
        self.bytes_up = 0
        self.bytes_judging = 0
        self._crossed = {"down": set[tuple[int, int]](), "up": set[tuple[int, int]]()}
        self._times: dict[tuple[int, int], float] = {}
        seconds = 0.0
        for line in self.files.messages(f"delete {folder.parent} and run again"):
            try:
                seconds = float(line.pop("seconds"))
                self._count(**line)
                self._times[line["exchange"], line["client"]] = seconds
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(self.files.meter) from error
        self._began = time.perf_counter() - seconds
        self._writers = ThreadPoolExecutor(_WRITERS, "journal")
        self._writing: deque[Future[None]] = deque()

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, over all its starts; a killed start counts up to its last message."""
        return time.perf_counter() - self._began

    def _count(self, exchange: int, client: int, down: int = 0, up: int = 0) -> None:
        if exchange >= EVALUATIONS:
            self.bytes_judging += down + up
        else:
            self.bytes_down += down
            self.bytes_up += up
        if up or down:
            self._crossed["up" if up else "down"].add((exchange, client))

    def count_sent(self, exchange: int, client: int, size: int) -> None:
        """Count the bytes of a request; a request that is sent again after a crash counts twice."""
        self._line(exchange=exchange, client=client, down=size)

    def _count_received(self, exchange: int, client: int, size: int) -> None:
        """Count the bytes of a reply, used or not; those of a client that is asked again count twice."""
        if size:
            self._line(exchange=exchange, client=client, up=size)

    def _named(self) -> bytes:
        """The journal's name, drawn before its first line is written; none in journals of earlier versions."""
        if self._known is None:
            place = self.files.name
            if not (place.exists() or self.files.meter.exists() or self.files.requests()):
                files.write_bytes(place, new_name())
            self._known = place.read_bytes() if place.exists() else b""
        return self._known

    def _label(self, exchange: int, step: str, client: int) -> bytes:
        """The first half of the journal's name and the place of a reply, which its checksum covers."""
        return self._named().partition(b" ")[0] + f"{exchange}/{step}/{client}/".encode()

    def _line(self, **counts: int) -> None:
        self._named()  # before the first line
        self._lines.append({**counts, "seconds": round(self.seconds, 3)})
        self._count(**counts)

    def store_releases(self, exchange: int, client: int, entries: Sequence[Charge]) -> None:
        """Store the releases that a client lists in its reply to a request."""
        spent = [entry.model_dump(mode="json") for entry in entries]
        self._spending.append({"exchange": exchange, "client": client, "spent": spent})
        self._spending.close()
        if self._releases is not None:
            self._releases[client, exchange] = list(entries)

    def last_message_times(self) -> dict[tuple[int, int], float]:
        """Seconds from the run's start to the last message of each (exchange, client) before the journal was opened."""
        return dict(self._times)

    def releases(self, before: int | None = None) -> dict[int, list[Charge]]:
        """The releases of each client, in order, in replies to requests before number ``before`` (None: to all).

        If a crash led to two replies to one request, the later one counts.
        """
        ledgers: dict[int, list[Charge]] = {}
        for (client, exchange), entries in sorted(self._releases_by_request().items()):
            if before is None or exchange < before:
                ledgers.setdefault(client, []).extend(entries)
        return ledgers

    def has_releases(self, exchange: int, client: int) -> bool:
        """Whether releases of a client's reply are stored, which may have been lost with their file."""
        return (client, exchange) in self._releases_by_request()

    def check_kept(self, exchange: int, clients: Collection[int], states: Path) -> None:
        """Refuse to ask simulated clients again that have released values and know nothing of it any more.

        Their noise would be drawn anew: a second release, which the sum of the first ones leaves out.

        Args:
            exchange: number of the request.
            clients: the clients that would be asked, none of whose replies is stored.
            states: the folder of their states, with the ledger of each.

        Raises:
            Damaged: there is such a client.
        """
        for client in clients:
            ledger = states / f"{client:05d}" / "ledger.jsonl"
            lines = files.read_json_lines(ledger) if self.has_releases(exchange, client) else []
            if self.has_releases(exchange, client) and not any(line.get("exchange") == exchange for line in lines):
                raise files.Damaged(
                    f"client {client} has released private values to {self.folder.parent}, but neither the reply nor "
                    "the client's state is there any more; asked again, it would release others: bring the reply back, "
                    "or run anew with another --out"
                )

    def _releases_by_request(self) -> dict[tuple[int, int], list[Charge]]:
        if self._releases is None:
            self._releases = self._read_releases()
        return self._releases

    def _read_releases(self) -> dict[tuple[int, int], list[Charge]]:
        releases: dict[tuple[int, int], list[Charge]] = {}
        for line in files.read_json_lines(self.files.spent, f"delete {self.folder.parent} and run again"):
            try:
                releases[int(line["client"]), int(line["exchange"])] = [Charge(**entry) for entry in line["spent"]]
            except (KeyError, TypeError, ValueError, ValidationError) as error:
                raise self._damaged(self.files.spent) from error
        return releases

    def store_reply(self, exchange: int, step: str, client: int, reply: bytes) -> None:
        """Store a reply that passed its checks. Small replies are written in the background until `flush`."""
        self._count_received(exchange, client, len(reply))
        place = self.files.reply(exchange, step, client)
        label = self._label(exchange, step, client)
        if len(reply) > _SMALL:
            files.write_checked(place, reply, label)
        else:
            if len(self._writing) == _PENDING:
                self._writing.popleft().result()
            self._writing.append(self._writers.submit(files.write_checked, place, reply, label))

    def flush(self) -> None:
        """Wait until every reply is on the disk; raise the first error of a background write."""
        self._lines.close()
        while self._writing:
            self._writing.popleft().result()

    def store_refusal(self, exchange: int, refusal: Refusal, size: int) -> None:
        """Store the reason why a reply is not used, and count the reply's ``size`` in bytes."""
        self._count_received(exchange, refusal.client, size)
        self._write_refusal(exchange, refusal, size)

    def _write_refusal(self, exchange: int, refusal: Refusal, size: int) -> None:
        place = self.files.refusal(exchange, refusal.step, refusal.client)
        files.write_json(place, {**vars(refusal), "bytes": size})

    def refuse_reply(self, exchange: int, refusal: Refusal) -> None:
        """Replace a stored reply by the reason why it is not used after all."""
        self.flush()
        place = self.files.reply(exchange, refusal.step, refusal.client)
        size = files.checked_size(place)
        place.unlink()  # first: after a crash in between, the client is asked again
        self._write_refusal(exchange, refusal, size)

    def read_reply(self, exchange: int, step: str, client: int) -> bytearray:
        """A stored reply; raises `Damaged` if its checksum differs, as that of another client's, request's or run's."""
        self.flush()
        place = self.files.reply(exchange, step, client)
        remedy = f"bring a copy back, or delete it and run again to ask client {client} anew"
        if not self.files.name.exists():
            remedy = f"bring {self.files.name} back, if there was one, or {remedy}"
        return files.read_checked(place, remedy, self._label(exchange, step, client))

    def check_request(self, exchange: int, step: str, request: bytes) -> None:
        """Store the digest of a run's first request; ValueError if another digest is stored.

        An extended run must send new clients the request that the others got. Later requests are not compared: they are
        computed from replies, and a GPU may round them differently when a resumed run computes them again.
        """
        if exchange:
            return
        self._named()  # before the journal has a request
        place = self.files.digest(exchange, step)
        digest = hashlib.sha256(request).hexdigest()
        if not place.exists():
            files.write_bytes(place, digest.encode())
        elif place.read_text("utf-8") != digest:
            raise ValueError(
                f"{self.folder} holds replies to another request than step '{step}' sends now (the method's code or "
                "the data have changed since); start anew with another --out"
            )

    def replies_to(
        self, exchange: int, step: str, asked: Collection[int] | None = None, size: int = 0
    ) -> tuple[list[int], list[Refusal]]:
        """The clients of ``asked`` (None: of all) whose reply to a request of ``size`` bytes is stored, and refusals.

        Raises:
            ValueError: the journal has replies to another step under that number, so it belongs to another run.
        """
        self.flush()
        others = [place.name for place in self.files.requests(exchange) if place != self.files.request(exchange, step)]
        if others:
            raise ValueError(f"{self.folder} holds {others[0]} where this run asks '{step}'; choose another --out")
        stored = self.files.replies(exchange)
        clients = [client for client in stored if asked is None or client in asked]
        refusals = []
        for file in self.files.refused(exchange).values():
            refusal, refused = self._read_refusal(file)
            if asked is not None and refusal.client not in asked:
                continue
            refusals.append(refusal)
            if (exchange, refusal.client) not in self._crossed["up"]:
                self._count_received(exchange, refusal.client, refused)
        for client in clients:  # after a crash that lost the last lines of the meter
            if size and (exchange, client) not in self._crossed["down"]:
                self.count_sent(exchange, client, size)
            if (exchange, client) not in self._crossed["up"]:
                self._count_received(exchange, client, files.checked_size(stored[client]))
        return clients, refusals

    def _read_refusal(self, place: Path) -> tuple[Refusal, int]:
        try:
            fields = json.loads(place.read_text("utf-8"))
            size = int(fields.pop("bytes"))
            return Refusal(**fields), size
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(place) from error

    def _damaged(self, place: Path) -> files.Damaged:
        return files.Damaged(f"{place} is damaged; delete {self.folder.parent} and run again")

    def forget_refusals(self, exchange: int, step: str) -> None:
        """Delete the refusals of a request that failed, so that the next start asks these clients again."""
        for place in self.files.request(exchange, step).glob("*.refused"):
            place.unlink()

    def refusals(self) -> list[Refusal]:
        """All refusals so far, in order."""
        return [self._read_refusal(place)[0] for place in self.files.refusals()]

    def check_answered(self, required: int, before: int | None = None) -> None:
        """Refuse the journal if fewer than ``required`` of the clients asked gave a usable reply to a request.

        Args:
            required: number of usable replies that each request needs, or one of each client that was asked.
            before: number of the first request that is not looked at (None: all are).

        Raises:
            ValueError: there is such a request.
        """
        refused: dict[int, set[int]] = {}
        for place in self.files.refusals():
            refused.setdefault(exchange_of(place.parent), set()).add(int(place.stem))
        if refused and not self.files.meter.exists():
            remedy = f"bring it back, or delete {self.folder.parent} and run again"
            raise files.Damaged(f"{self.files.meter} is missing; {remedy}")
        for exchange, refusing in sorted(refused.items()):
            asked = refusing | {client for number, client in self._crossed["down"] if number == exchange}
            needed, usable = min(required, len(asked)), len(asked - refusing)
            if usable < needed and (before is None or exchange % EVALUATIONS < before):
                raise ValueError(
                    f"{self.folder.parent} has usable replies of {usable} of {len(asked)} clients to a request, but "
                    f"{needed} are needed now (--min-clients); lower it, or choose another --out (fedstill run "
                    "--extend asks the missing clients of a finished one-shot run)"
                )

    def forget_replies(self, first: int, before: int) -> None:
        """Delete replies to requests ``first`` to ``before - 1``, which a checkpoint has replaced; refusals stay."""
        self.flush()
        for place in self.files.requests():
            if first <= exchange_of(place) % EVALUATIONS < before:
                if any(place.glob("*.refused")):
                    for f in place.glob("*.reply"):
                        f.unlink()
                else:
                    shutil.rmtree(place)

    def seals(self, *others: Path) -> dict[str, Any]:
        """Seals of the byte counts, the releases and ``others``, for a checkpoint (`fedstill.base.files.seal`)."""
        return {place.name: files.seal(place) for place in (self.files.meter, self.files.spent, *others)}

    def check_seals(self, seals: Mapping[str, Any], *others: Path) -> None:
        """Raise `Damaged` if the byte counts, the releases or ``others`` lost or changed lines since `seals`."""
        for place in (self.files.meter, self.files.spent, *others):
            files.check_seal(place, seals[place.name], f"delete {self.folder.parent} and run again")

    def save_checkpoint(
        self, tensors: "Mapping[str, Tensor]", header: Mapping[str, Any], name: str = CHECKPOINT
    ) -> None:
        """Replace the checkpoint called ``name``."""
        from fedstill.protocol import wire

        files.write_checked(self.folder / name, wire.pack(tensors, header), self._named())

    def load_checkpoint(self, name: str = CHECKPOINT) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
        """The last checkpoint called ``name``, or None; raises `Damaged` if its checksum differs."""
        from fedstill.protocol import wire

        place = self.folder / name
        if not place.exists():
            return None
        remedy = f"delete {self.folder.parent} and run again"
        if name != CHECKPOINT:  # its work is recomputed from replies that are all stored
            remedy = "delete it and run again: that work at the server starts anew, and no client is asked again"
        return wire.unpack(files.read_checked(place, remedy, self._named()))
