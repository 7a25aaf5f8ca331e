"""Files of a client: its state between steps, and copies of replies that it must not compute twice."""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from fedstill import files, wire
from fedstill.journal import EVALUATIONS


class ReplyCopy:
    """A copy of the reply to one request, to send the same bytes again."""

    def __init__(self, folder: Path, exchange: int, request: bytes) -> None:
        """``folder`` is the client's; the request's exchange and digest name the file."""
        self._place = folder / f"{exchange:06d}-{hashlib.sha256(request).hexdigest()[:16]}.given"

    def read(self) -> bytes | None:
        """The reply, or None if there is no copy yet."""
        if not self._place.exists():
            return None
        return bytes(files.read_checked(self._place, "the client releases nothing again; start another run"))

    def write(self, reply: bytes) -> None:
        """Store the reply."""
        files.write_checked(self._place, reply)


class StateFiles:
    """State of a client, one file per exchange: a step that is repeated after a crash starts from the same state."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the client's."""
        self.folder = folder

    def read(self, exchange: int) -> dict[str, Tensor]:
        """The state before ``exchange``."""
        earlier = [f for f in sorted(self.folder.glob("*.state")) if int(f.stem) < exchange]
        if not earlier:
            return {}
        remedy = f"delete {self.folder.parent.parent} and run again"
        return wire.unpack(files.read_checked(earlier[-1], remedy))[0]

    def write(self, exchange: int, state: Mapping[str, Tensor]) -> None:
        """Store the state after ``exchange``; delete all earlier ones but the last."""
        if not state and not self.folder.exists():
            return
        files.write_checked(self.folder / f"{exchange:06d}.state", wire.pack(state, {}))
        for old in sorted(f for f in self.folder.glob("*.state") if int(f.stem) < exchange)[:-1]:
            old.unlink()


def last_state(folder: Path, client: int) -> dict[str, Tensor]:
    """State of a simulated client after its last reply; ``folder`` holds the states of all clients."""
    return StateFiles(folder / f"{client:05d}").read(EVALUATIONS)


def forget_state(folder: Path, keep: Collection[int] = ()) -> None:
    """Delete the states of a finished simulation, except those of clients in ``keep``, who may be asked again."""
    for place in folder.glob("*") if keep else [folder]:
        if place.name not in {f"{client:05d}" for client in keep}:
            shutil.rmtree(place, ignore_errors=True)
