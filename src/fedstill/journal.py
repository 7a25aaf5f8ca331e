"""What a run has been told, on disk: every reply, the bytes that crossed, and the server's last checkpoint.

::

    journal/
      meter.jsonl                     one line per message: exchange, client, bytes down or up, seconds since the start
      spent.jsonl                     one line per reply with released values: exchange, client, the releases
      000000-update/request           the digest of the server's first question
      000002-update/00007.reply       the reply of client 7 to its third
      000002-update/00009.refused     why client 9's reply is not used
      1000003-judge/00007.reply       what client 7 says of the model before that question, on test records of its own
      checkpoint                      what the server's loop carries after its last finished round
      epochs                          what long work at the server carries after one of its epochs

A resumed run asks the same questions in the same order; what is already answered is read from here. Every file is whole
or absent (`fedstill.files`); replies and the checkpoint carry a checksum.
"""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from fedstill import files, wire
from fedstill.privacy.ledger import Entry

CHECKPOINT = "checkpoint"
JUDGING = 1_000_000
"""Questions that only judge a model are numbered from here on, so that they leave no trace in what else is asked: the
first before question n is n more than this, a second n more than twice this. Their bytes are counted apart."""
_SMALL = 1 << 18
"""Bytes of a reply that may wait for the disk in memory, of which there are `_PENDING` at most."""
_PENDING = 128
_WRITERS = 8


@dataclass(frozen=True)
class Refusal:
    """Why a client's reply to one question is not used."""

    client: int
    step: str
    round: int | None
    reason: str


class Journal:
    """The journal in ``folder``; opening an existing one continues it."""

    def __init__(self, folder: Path) -> None:
        """Open or create; reads the meter, not the replies."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._meter = folder / "meter.jsonl"
        self._lines = files.JsonLines(self._meter)
        self._spent = folder / "spent.jsonl"
        self._releases: dict[tuple[int, int], list[Entry]] | None = None  # by client and request, once read
        self.bytes_down = 0
        self.bytes_up = 0
        self.bytes_judging = 0
        self._up: set[tuple[int, int]] = set()
        self._times: dict[tuple[int, int], float] = {}
        seconds = 0.0
        for line in files.read_json_lines(self._meter):
            try:
                seconds = float(line.pop("seconds"))
                self._count(**line)
                self._times[line["exchange"], line["client"]] = seconds
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(self._meter) from error
        self._began = time.perf_counter() - seconds
        self._writers = ThreadPoolExecutor(_WRITERS, "journal")
        self._writing: deque[Future[None]] = deque()

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all its starts; what a killed start did after its last message is not in it."""
        return time.perf_counter() - self._began

    # ------------------------------------------------------------------------------------------------------- the meter

    def _count(self, exchange: int, client: int, down: int = 0, up: int = 0) -> None:
        if exchange >= JUDGING:
            self.bytes_judging += down + up
        else:
            self.bytes_down += down
            self.bytes_up += up
        if up:
            self._up.add((exchange, client))

    def sent(self, exchange: int, client: int, size: int) -> None:
        """Count a request; one that is sent again after a crash crossed twice and is counted twice."""
        self._line(exchange=exchange, client=client, down=size)

    def _received(self, exchange: int, client: int, size: int) -> None:
        if size and (exchange, client) not in self._up:
            self._line(exchange=exchange, client=client, up=size)

    def _line(self, **counts: int) -> None:
        self._lines.append({**counts, "seconds": round(self.seconds, 3)})
        self._count(**counts)

    # -------------------------------------------------------------------------------------------------------- releases

    def keep_spent(self, exchange: int, client: int, entries: Sequence[Entry]) -> None:
        """Keep what a client says it released for a question."""
        spent = [entry.model_dump(mode="json") for entry in entries]
        files.append_json(self._spent, {"exchange": exchange, "client": client, "spent": spent})
        if self._releases is not None:
            self._releases[client, exchange] = list(entries)

    def times(self) -> dict[tuple[int, int], float]:
        """Seconds since the run's start of the last message to or from a client, by (exchange, client), as opened."""
        return dict(self._times)

    def spent(self, before: int | None = None) -> dict[int, list[Entry]]:
        """The releases of each client, in order, in reply to requests ``before`` this one; to all by default.

        Of two replies to one request, after a crash, the later one counts.
        """
        if self._releases is None:
            self._releases = self._read_spent()
        ledgers: dict[int, list[Entry]] = {}
        for (client, exchange), entries in sorted(self._releases.items()):
            if before is None or exchange < before:
                ledgers.setdefault(client, []).extend(entries)
        return ledgers

    def _read_spent(self) -> dict[tuple[int, int], list[Entry]]:
        releases: dict[tuple[int, int], list[Entry]] = {}
        for line in files.read_json_lines(self._spent):
            try:
                releases[int(line["client"]), int(line["exchange"])] = [Entry(**entry) for entry in line["spent"]]
            except (KeyError, TypeError, ValueError, ValidationError) as error:
                raise self._damaged(self._spent) from error
        return releases

    # --------------------------------------------------------------------------------------------------------- replies

    def _place(self, exchange: int, step: str) -> Path:
        return self.folder / f"{exchange:06d}-{step}"

    def keep_reply(self, exchange: int, step: str, client: int, reply: bytes) -> None:
        """Keep a reply that passed its checks; it is on the disk for sure after `settle`.

        Small ones are written in the background, so that the next client does not wait for the disk.
        """
        place = self._place(exchange, step) / f"{client:05d}.reply"
        if len(reply) > _SMALL:
            files.write_checked(place, reply)
        else:
            if len(self._writing) == _PENDING:
                self._writing.popleft().result()
            self._writing.append(self._writers.submit(files.write_checked, place, reply))
        self._received(exchange, client, len(reply))

    def settle(self) -> None:
        """Wait until every reply is on the disk; raises what went wrong."""
        self._lines.close()
        while self._writing:
            self._writing.popleft().result()

    def keep_refusal(self, exchange: int, refusal: Refusal, size: int) -> None:
        """Keep why a reply is not used; ``size`` is the bytes that crossed all the same."""
        place = self._place(exchange, refusal.step) / f"{refusal.client:05d}.refused"
        files.write_json(place, {**vars(refusal), "bytes": size})
        self._received(exchange, refusal.client, size)

    def read_reply(self, exchange: int, step: str, client: int) -> bytearray:
        """A kept reply.

        Raises:
            Damaged: when the file is not what was written.
        """
        self.settle()
        place = self._place(exchange, step) / f"{client:05d}.reply"
        return files.read_checked(place, f"delete it and run again to ask client {client} anew")

    def asks(self, exchange: int, step: str, request: bytes) -> None:
        """Note the digest of a run's first question; raises ValueError where kept replies answer another one.

        Who extends a run must ask just what the others were asked. Later questions are computed from replies, and a GPU
        may round them otherwise when a killed run computes them again.
        """
        if exchange:
            return
        place = self._place(exchange, step) / "request"
        digest = hashlib.sha256(request).hexdigest()
        if not place.exists():
            files.write_bytes(place, digest.encode())
        elif place.read_text() != digest:
            raise ValueError(
                f"{self.folder} holds replies to another question than step '{step}' asks now (the method's code or "
                "the data have changed since); start anew with another --out"
            )

    def answered(self, exchange: int, step: str) -> tuple[list[int], list[Refusal]]:
        """Who replied well to a question, and who was refused.

        Raises:
            ValueError: when the journal holds another question under that number, so another run's.
        """
        self.settle()
        others = [f.name for f in self.folder.glob(f"{exchange:06d}-*") if f.name != f"{exchange:06d}-{step}"]
        if others:
            raise ValueError(f"{self.folder} holds {others[0]} where this run asks '{step}'; choose another --out")
        place = self._place(exchange, step)
        good = sorted(int(f.stem) for f in place.glob("[0-9]*.reply"))
        refused = []
        for f in sorted(place.glob("*.refused")):
            refusal, size = self._read_refusal(f)
            refused.append(refusal)
            self._received(exchange, refusal.client, size)
        for client in good:  # a crash between a reply and its line in the meter
            if (exchange, client) not in self._up:
                self._received(exchange, client, files.checked_size(place / f"{client:05d}.reply"))
        return good, refused

    def _read_refusal(self, place: Path) -> tuple[Refusal, int]:
        try:
            kept = json.loads(place.read_text())
            size = int(kept.pop("bytes"))
            return Refusal(**kept), size
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(place) from error

    def _damaged(self, place: Path) -> files.Damaged:
        return files.Damaged(f"{place} is damaged; delete {self.folder.parent} and run again")

    def forget_refusals(self, exchange: int, step: str) -> None:
        """Forget who was refused in an exchange that failed, so that the next start asks them again."""
        for place in self._place(exchange, step).glob("*.refused"):
            place.unlink()

    def refusals(self) -> list[Refusal]:
        """Every refusal so far, in order."""
        return [self._read_refusal(place)[0] for place in sorted(self.folder.glob("*/*.refused"))]

    def forget_replies(self, before: int) -> None:
        """Delete replies to questions older than ``before``, which a checkpoint has made needless; refusals stay."""
        self.settle()
        for place in self.folder.glob("[0-9]*-*"):
            if int(place.name.split("-")[0]) % JUDGING < before:
                if any(place.glob("*.refused")):
                    for f in place.glob("*.reply"):
                        f.unlink()
                else:
                    shutil.rmtree(place)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any], name: str = CHECKPOINT) -> None:
        """Replace the checkpoint called ``name``."""
        files.write_checked(self.folder / name, wire.pack(tensors, header))

    def load_checkpoint(self, name: str = CHECKPOINT) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint called ``name``, or None; raises `Damaged` when the file is not what was written."""
        place = self.folder / name
        if not place.exists():
            return None
        remedy = f"delete {self.folder.parent} and run again"
        if name != CHECKPOINT:  # of work inside an exchange, whose replies are all there
            remedy = "delete it and run again: that work at the server starts anew, and nobody is asked again"
        return wire.unpack(files.read_checked(place, remedy))
