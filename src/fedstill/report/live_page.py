"""A page on this machine that follows runs: an HTTP server on 127.0.0.1 that only reads."""

import json
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedstill.base import files
from fedstill.report import guarantees, spending
from fedstill.report.markup import asset
from fedstill.report.record import human_bytes, read_run
from fedstill.runs import listing
from fedstill.runs.folder import RunFolder, runs_below
from fedstill.runs.live import Counted, Live, Spent, live

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("watch.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/watch.css": ("watch.css", "text/css"),
    "/watch.js": ("watch.js", "text/javascript"),
}


class LivePage:
    """The server of the page; a context manager, which stops it.

    Args:
        place: the folder of a run, or one with runs below.
        port: port on 127.0.0.1; 0 takes a free one.

    Attributes:
        url: the page's address.

    Raises:
        ValueError: there is no run, or the port is taken; one sentence.
    """

    def __init__(self, place: Path, port: int = 0) -> None:
        states(place, {})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, States(place)))
        except OSError as error:
            raise ValueError(f"--port is {port}, which cannot be opened ({error.strerror}); choose another") from error
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> "LivePage":
        threading.Thread(target=self._server.serve_forever, name="live page", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class States:
    """The states of the runs in ``place``, computed by one thread at a time."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._known: dict[Path, Counted] = {}
        self._said: Said = {}

    def read(self) -> dict[str, Any]:
        """The folder and its runs now, as JSON."""
        with self._lock:
            return document(self._place, self._known, self._said)


Said = dict[tuple[tuple[Path, int], ...], list[str]]
"""What there was to say of finished runs, by their summaries' paths and times; of the last ones alone."""


def document(place: Path, known: dict[Path, Counted], said: Said | None = None) -> dict[str, Any]:
    """The folder ``place``, the `states` of its runs, and ``remarks`` on the finished ones, as JSON.

    Args:
        place: a run, or a folder with runs below.
        known: as for `fedstill.runs.live.live`.
        said: what an earlier call said; it is changed in place.

    Raises:
        ValueError: there is no run.
    """
    runs = _runs(place)
    found = [_state(run, place, known) for run in runs]
    finished = [run for run, state in zip(runs, found, strict=True) if state["state"] == "finished"]
    return {"folder": str(place), "runs": found, "remarks": _remarks(finished, {} if said is None else said)}


def _remarks(finished: list[Path], said: Said) -> list[str]:
    """What a reader must be told beside the runs' guarantees (`spending.remarks`); read again if a run was written."""
    try:
        key = tuple((run, RunFolder(run).summary.stat().st_mtime_ns) for run in finished)
        if key not in said:
            words = spending.remarks([read_run(run) for run in finished])
            said.clear()
            said[key] = words
        return said[key]
    except (ValueError, OSError):  # a run is moved, or its state says what is wrong with it
        return []


def states(place: Path, known: dict[Path, Counted]) -> list[dict[str, Any]]:
    """The runs in ``place`` as JSON: numbers, and words to show; ``guarantee`` is None before a run's end.

    Raises:
        ValueError: there is no run.
    """
    return [_state(run, place, known) for run in _runs(place)]


def _runs(place: Path) -> list[Path]:
    runs = runs_below(place)
    if not runs:
        raise ValueError(f"{place} has no run; give the folder of a run or of a comparison (fedstill runs)")
    return runs


def _state(run: Path, place: Path, known: dict[Path, Counted]) -> dict[str, Any]:
    name = str(run.relative_to(place)) if run != place else run.name
    try:
        found = live(run, known)
        facts = found._asdict() | {"spent": [each._asdict() for each in found.spent]}
        facts["guarantee"] = guarantees.as_json(facts.pop("promised"))
        return {"name": name, **facts, "words": _words(found)}
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError) as error:
        return {
            "name": name,
            "state": "newer" if isinstance(error, files.NewerFormat) else "damaged",
            "problem": str(error) or type(error).__name__,
            "last_change": _last_change(run),
        }


def _last_change(run: Path) -> str | None:
    """The time of the run's last sign of work; None if it is gone."""
    try:
        return listing.entry(run).last_change.isoformat(timespec="seconds")
    except (OSError, ValueError):
        return None


def _words(found: Live) -> dict[str, str]:
    up, down = (human_bytes(n / found.clients) for n in (found.bytes_up, found.bytes_down))
    return {
        "bytes": f"{human_bytes(found.bytes_up)} up, {human_bytes(found.bytes_down)} down; per client {up} up, "
        f"{down} down",
        "privacy": _privacy(found),
    }


def _privacy(found: Live) -> str:
    if found.promised is not None:
        return guarantees.words(found.promised)
    if not found.spent:
        return "no release through a privacy mechanism yet"
    return "; ".join(map(_cost, found.spent)) + ", of the releases so far"


def _cost(spent: Spent) -> str:
    epsilon = "unbounded" if spent.epsilon is None else guarantees.round_up(spent.epsilon)
    return f"eps {epsilon}, delta {guarantees.round_up(spent.delta)} per {spent.unit}"


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of four files and of the state; every other method is refused by the base class."""

    server_version = "fedstill"
    sys_version = ""

    def __init__(self, states: States, *arguments: Any) -> None:
        self._states = states
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Reply with a file or the state."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Reply with the headers only."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        name, port = self.headers.get("Host", "").rpartition(":")[::2]
        if name not in ("127.0.0.1", "localhost") or port != str(self.connection.getsockname()[1]):
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine")  # a name of a foreign page
            return
        path = self.path.partition("?")[0]
        if path == "/state.json":
            try:
                found = self._states.read()
            except (ValueError, OSError) as error:  # the runs were moved
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "there is no run any more", str(error))
                return
            body, kind = json.dumps(found, allow_nan=False).encode(), "application/json"
        elif path in _FILES:
            file, kind = _FILES[path]
            body = asset(file).encode()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        for header, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks every two seconds."""
