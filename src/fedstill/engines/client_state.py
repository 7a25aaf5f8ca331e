"""Files of a client: its state between steps, and copies of replies that must not be computed twice."""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from fedstill import files, wire
from fedstill.journal import EVALUATIONS


class ReplyCopy:
    """A copy of the reply to one request in the client's ``folder``, to send the same bytes again."""

    def __init__(self, folder: Path, exchange: int, request: bytes) -> None:
        self._place = folder / f"{exchange:06d}-{hashlib.sha256(request).hexdigest()[:16]}.given"

    def read(self) -> bytes | None:
        """The stored reply, or None."""
        if not self._place.exists():
            return None
        return bytes(files.read_checked(self._place, "the client releases nothing again; start another run"))

    def write(self, reply: bytes) -> None:
        """Store the reply."""
        files.write_checked(self._place, reply)


class StateFiles:
    """State of a client, one file per request, so that a step repeated after a crash starts from the same state.

    Args:
        folder: the client's.
        remedy: end of the sentence of `fedstill.files.Damaged`; by default that of a simulation. With one, the client
            is a real site, which keeps the number of its newest state apart, since its files live for long.
    """

    def __init__(self, folder: Path, remedy: str | None = None) -> None:
        self.folder = folder
        self._remedy = remedy or f"delete {folder.parent.parent} and run again"
        self._deleted = folder / "earlier-deleted"
        self._newest = None if remedy is None else folder / "newest"

    def read(self, exchange: int) -> dict[str, Tensor]:
        """The state before request ``exchange``.

        Raises:
            fedstill.files.Damaged: it is damaged, or no longer kept, as after a reply before the last was deleted.
        """
        earlier = self._before(exchange)
        newest = self._newest_number()
        lost = 0 <= newest < exchange and not (earlier and int(earlier[-1].stem) >= newest)
        if lost or (not earlier and self._deleted.exists()):
            raise files.Damaged(f"{self.folder} has no state from before request {exchange} any more; {self._remedy}")
        return wire.unpack(files.read_checked(earlier[-1], self._remedy))[0] if earlier else {}

    def write(self, exchange: int, state: Mapping[str, Tensor]) -> None:
        """Store the state after request ``exchange``, if it changed; of the earlier ones only the last is kept."""
        if not state and not self.folder.exists():
            return
        packed, place, earlier = wire.pack(state, {}), self.folder / f"{exchange:06d}.state", self._before(exchange)
        if earlier and not place.exists() and files.read_checked(earlier[-1], self._remedy) == packed:
            return
        files.write_checked(place, packed)
        if self._newest is not None:
            files.write_bytes(self._newest, str(max(exchange, self._newest_number())).encode())
        for old in earlier[:-1]:
            self._deleted.touch()
            old.unlink()

    def _newest_number(self) -> int:
        """The request after which the newest state was written; -1 if there was none, or it is not kept apart."""
        if self._newest is None or not self._newest.exists():
            return -1
        text = self._newest.read_text()
        if not text.isdecimal():
            raise files.Damaged(f"{self._newest} is damaged; {self._remedy}")
        return int(text)

    def _before(self, exchange: int) -> list[Path]:
        """The files of states before request ``exchange``, in order."""
        return sorted(file for file in self.folder.glob("*.state") if int(file.stem) < exchange)


def last_state(folder: Path, client: int) -> dict[str, Tensor]:
    """State of a simulated client after its last reply; ``folder`` has the states of all clients."""
    return StateFiles(folder / f"{client:05d}").read(EVALUATIONS)


def forget_state(folder: Path, keep: Collection[int] = ()) -> None:
    """Delete the clients' states after a simulation, except those in ``keep``, which an extension may ask again."""
    for place in folder.glob("*") if keep else [folder]:
        if place.name not in {f"{client:05d}" for client in keep}:
            shutil.rmtree(place, ignore_errors=True)
