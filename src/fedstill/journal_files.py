"""Where a run's journal has which file; whoever reads or copies one asks here (`fedstill.journal` writes them)."""

from pathlib import Path
from typing import Any

from fedstill import files


class JournalFiles:
    """The files of the journal in ``folder``, which need not exist.

    Attributes:
        meter: a line for each message.
        spent: a line for each reply with released values.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meter = folder / "meter.jsonl"
        self.spent = folder / "spent.jsonl"

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

    def refused(self, exchange: int) -> dict[int, Path]:
        """The files of refusals of a request by client, in order."""
        return self._by_client(exchange, "refused")

    def refusals(self) -> list[Path]:
        """The files of all refusals, in order of requests and clients."""
        return [file for place in self.requests() for file in sorted(place.glob("*.refused"))]

    def messages(self, remedy: str = "delete its run and run again") -> list[dict[str, Any]]:
        """The lines of `meter`; raises `fedstill.files.Damaged`, which names the remedy."""
        return files.read_json_lines(self.meter, remedy)

    def _by_client(self, exchange: int, kind: str) -> dict[int, Path]:
        found = [f for place in self.requests(exchange) for f in sorted(place.glob(f"*.{kind}"))]
        return {int(f.stem): f for f in found if f.stem.isdecimal() and f.is_file()}


def exchange_of(request: Path) -> int:
    """The number of the request with this folder."""
    return int(request.name.partition("-")[0])
