"""What a run has been told, on disk: every reply, the bytes that crossed, and the server's last checkpoint.

::

    journal/
      meter.jsonl                     one line per message: exchange, client, bytes down or up, seconds since the start
      000002-update/00007.reply       the reply of client 7 to the server's third question
      000002-update/00009.refused     why client 9's reply is not used
      checkpoint.safetensors          what the server's loop carries after its last finished round

A resumed run asks the same questions in the same order; what is already answered is read from here. Every file is whole
or absent (`fedstill.files`) and carries a checksum of its own.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstill import files, wire

_DIGEST = 32


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
        self.bytes_down = 0
        self.bytes_up = 0
        self._up: set[tuple[int, int]] = set()
        seconds = 0.0
        for line in files.read_json_lines(self._meter):
            seconds = line.pop("seconds")
            self._count(**line)
        self._began = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all its starts; what a killed start did after its last message is not in it."""
        return time.perf_counter() - self._began

    # ------------------------------------------------------------------------------------------------------- the meter

    def _count(self, exchange: int, client: int, down: int = 0, up: int = 0) -> None:
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
        files.append_json(self._meter, {**counts, "seconds": round(self.seconds, 3)})
        self._count(**counts)

    # --------------------------------------------------------------------------------------------------------- replies

    def _place(self, exchange: int, step: str) -> Path:
        return self.folder / f"{exchange:06d}-{step}"

    def keep_reply(self, exchange: int, step: str, client: int, reply: bytes) -> None:
        """Keep a reply that passed its checks."""
        place = self._place(exchange, step) / f"{client:05d}.reply"
        files.write_bytes(place, hashlib.sha256(reply).digest(), reply)
        self._received(exchange, client, len(reply))

    def keep_refusal(self, exchange: int, refusal: Refusal, size: int) -> None:
        """Keep why a reply is not used; ``size`` is the bytes that crossed all the same."""
        place = self._place(exchange, refusal.step) / f"{refusal.client:05d}.refused"
        files.write_json(place, {**vars(refusal), "bytes": size})
        self._received(exchange, refusal.client, size)

    def read_reply(self, exchange: int, step: str, client: int) -> bytes:
        """A kept reply.

        Raises:
            ValueError: when the file was damaged since.
        """
        place = self._place(exchange, step) / f"{client:05d}.reply"
        data = place.read_bytes()
        digest, reply = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(reply).digest() != digest:
            raise ValueError(f"{place} is damaged (its checksum differs); delete it and run again to ask client {client} anew")
        return reply

    def answered(self, exchange: int, step: str) -> tuple[list[int], list[Refusal]]:
        """Who replied well to a question, and who was refused.

        Raises:
            ValueError: when the journal holds another question under that number, so another run's.
        """
        others = [f.name for f in self.folder.glob(f"{exchange:06d}-*") if f.name != f"{exchange:06d}-{step}"]
        if others:
            raise ValueError(f"{self.folder} holds {others[0]} where this run asks '{step}'; choose another --out")
        place = self._place(exchange, step)
        good = sorted(int(f.stem) for f in place.glob("*.reply"))
        refused = []
        for f in sorted(place.glob("*.refused")):
            kept = json.loads(f.read_text())
            size = kept.pop("bytes")
            refused.append(Refusal(**kept))
            self._received(exchange, refused[-1].client, size)
        for client in good:  # a crash between a reply and its line in the meter
            if (exchange, client) not in self._up:
                self._received(exchange, client, (place / f"{client:05d}.reply").stat().st_size - _DIGEST)
        return good, refused

    def refusals(self) -> list[Refusal]:
        """Every refusal so far, in order."""
        found = []
        for f in sorted(self.folder.glob("*/*.refused")):
            kept = json.loads(f.read_text())
            del kept["bytes"]
            found.append(Refusal(**kept))
        return found

    def forget_replies(self, before: int) -> None:
        """Delete replies to questions older than ``before``, which a checkpoint has made needless; refusals stay."""
        for place in self.folder.glob("[0-9]*-*"):
            if int(place.name.split("-")[0]) < before:
                if any(place.glob("*.refused")):
                    for f in place.glob("*.reply"):
                        f.unlink()
                else:
                    shutil.rmtree(place)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        data = wire.pack(tensors, header)
        files.write_bytes(self.folder / "checkpoint.safetensors", data)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or None."""
        place = self.folder / "checkpoint.safetensors"
        if not place.exists():
            return None
        try:
            return wire.unpack(place.read_bytes())
        except wire.Refused as error:
            raise ValueError(f"{place} is damaged ({error}); delete {self.folder.parent} and run again") from error
