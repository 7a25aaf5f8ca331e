"""The program that replies to the messages of a real site, started by `fedstill.sites.site.launcher`.

It forks for each message (`fedstill.engines.flower.forks`). The child forks once more, before it has any thread: it
speaks to Flower itself, and its own child computes the reply within the policy's limits of time and memory. Whatever
becomes of that one, the server gets a reply; if it has none, that is `NO_REPLY`.
"""

import hashlib
import io
import multiprocessing
import os
import sys
import threading
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedstill import __version__, schema
from fedstill.base import errors, files
from fedstill.engines.client import NO_REPLY
from fedstill.engines.flower import apps, forks, node
from fedstill.engines.transport import RECEIPT, SIGNATURE
from fedstill.protocol import wire
from fedstill.sites import seals, units
from fedstill.sites.site import log, setup, site_journal
from fedstill.sites.site.answer import answer as site_answer
from fedstill.sites.site.policy import SitePolicy

APP = Path(__file__).parents[1] / "flower_app" / "pyproject.toml"
"""The file of fedstill's app."""
_FILES = {"pyproject.toml", ".info/CONTENT"}
_LARGEST = 1 << 16
"""Maximum size of each file in bytes."""


def foreign(content: bytes) -> str | None:
    """The reason why the bytes of a zip file are not fedstill's app, or None; nothing is unpacked to disk."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            if other := [info.filename for info in bundle.infolist() if info.filename not in _FILES]:
                return f"it has the file {schema.short(other[0])}"
            if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in bundle.infolist()):
                return "it is compressed in another way than Flower does"
            with bundle.open("pyproject.toml") as file:
                text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            return f"its pyproject.toml has more than {_LARGEST:,} bytes"
        found, own = tomllib.loads(text.decode()), tomllib.loads(APP.read_text("utf-8"))
        if _code(found) != _code(own):
            return f"it asks for {schema.short(_code(found))}"
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        return f"it can't be read: {schema.clean(str(error))}"
    return None


def _code(project: dict[str, Any]) -> dict[str, Any]:
    """Everything in a project that names code."""
    return {"components": project["tool"]["flwr"]["app"]["components"], "needs": project["project"]["dependencies"]}


_GB = 10**9


def main() -> None:
    """Fork for each message; the words are the policy's file, the site's state folder and a pipe's descriptor.

    The addresses and tokens come through the standard input, as other users can list the words of a process.
    """
    place, state, pipe = sys.argv[1:]
    forks.fork_for_each(partial(reply, Path(place), Path(state), os.getpid()), int(pipe))


def reply(place: Path, state: Path, parent: int, address: str, token: str) -> None:
    """Reply to one message; without a policy that can be read, no question gets an answer.

    Args:
        place: the policy's file.
        state: the state folder when the node started, for the log of a site whose policy can't be read.
        parent: id of the process that forked this one.
        address: the Runtime API's address.
        token: the message's token.
    """
    wrong: ValueError | None = None
    try:
        policy = SitePolicy.read(place)
    except ValueError as error:
        policy, wrong = SitePolicy(client=0, data=state, state=state, methods=()), error
    limit_memory(policy)
    with Worker(policy) as worker:

        def number(*_: object) -> int:
            if wrong is not None:
                failed(policy, wrong)
                raise wrong
            return policy.client

        def answer(node: object, run: object, client: int, spec: str, request: bytes) -> bytes:
            if wrong is not None:
                raise wrong
            return worker(spec, request)

        seal = SiteSeal(place.parent, policy, is_known=wrong is None)
        app = apps.client_app(number, answer, partial(failed, policy), policy.max_request, seal, partial(older, policy))
        try:
            node.run_task(address, token, parent, app, refuse_by(policy))
        except Exception as error:  # a message of a kind that no app of fedstill's takes
            failed(policy, error)
            raise


class SiteSeal:
    """A site's check of its server's requests, and its signature of replies (`fedstill.sites.seals`).

    Args:
        folder: the site's folder, with its key and its server's.
        policy: the site's policy.
        is_known: whether it is the policy; of a site whose policy can't be read nothing is answered anyway.
    """

    def __init__(self, folder: Path, policy: SitePolicy, *, is_known: bool = True) -> None:
        self._folder, self._policy, self._is_known = folder, policy, is_known
        self._is_newest = False  # whether the log has the line of the server's receipt

    def refusal(self, spec: str, request: bytes, facts: Mapping[str, object]) -> bytes | None:
        """The reply to a request that is not the server's, or if this state is an older copy; None for others."""
        self._is_newest = False
        if not self._is_known:
            return None
        policy, server = self._policy, setup.server_of(self._folder)
        receipt = str(facts.get(RECEIPT, ""))
        try:
            if server is None:
                raise schema.Refused("the site has no server ('fedstill site join')")
            signed = (policy.client, spec, request, receipt)
            if not seals.is_request_signed(server, facts.get(SIGNATURE), *signed):
                raise schema.Refused(
                    "the request is not signed with the key of the server whose invitation the site has"
                )
            site_journal.check_receipt(policy.state, receipt)
            self._is_newest = True
        except (schema.Refused, files.Damaged) as error:
            digests = {"request": _sha256(request), "spec": _sha256(spec.encode())}
            with suppress(files.Damaged, OSError):  # nothing is answered in any case
                if not log.is_full(policy):
                    log.write(policy, digests, "refused", str(error))
            return wire.pack({}, {"error": f"refused by the site: {schema.clean(str(error), 500)}"})
        return None

    def of(self, spec: str, request: bytes, reply: bytes) -> dict[str, str]:
        """The signature of a reply, and the receipt of the log that it stands in, unless that may be an older copy."""
        receipt = site_journal.receipt(self._policy.state) if self._is_newest else ""
        key = setup.node_key(self._folder)
        if not key.exists():  # the server takes no reply without
            return {}
        signature = seals.sign_reply(key, spec, request, reply, receipt)
        return {SIGNATURE: signature, RECEIPT: receipt}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def failed(policy: SitePolicy, error: Exception) -> None:
    """Log what kept a message from the site's own answer; that the log itself is damaged needs no line."""
    with suppress(files.Damaged, OSError):
        log.write(policy, {}, "failed", error)


def older(policy: SitePolicy, version: str) -> None:
    """Log that the site waits for its upgrade, as the server has a newer version."""
    why = f"the server runs fedstill {version}, this site {__version__}: upgrade the site, which no run asks before"
    log.write(policy, {}, "waiting", why)


def refuse_by(policy: SitePolicy) -> Callable[[bytes, int], str | None]:
    """A function that refuses foreign bundles, with a line in the site's log."""

    def refuse(content: bytes, run: int) -> str | None:
        reason = foreign(content)
        if reason is None:
            return None
        facts = {"run": str(run), "bundle": _sha256(content)}
        log.write(policy, facts, "refused", f"the bundle is not fedstill's: {reason}")
        return "the site runs fedstill's own app only"

    return refuse


def limit_memory(policy: SitePolicy) -> None:
    """Limit the address space of this process to the policy's memory."""
    if policy.max_memory_gb:
        import resource  # imported here because Windows lacks it

        assert sys.platform != "win32"
        size = int(policy.max_memory_gb * _GB)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Worker:
    """A child process that computes one reply; make it before this process has threads.

    Args:
        policy: the site's policy.
    """

    def __init__(self, policy: SitePolicy) -> None:
        self._policy = policy
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self.child = context.Process(target=_work, args=(policy, other, os.getpid()), daemon=True)
        self.child.start()
        other.close()

    def __call__(self, spec: str, request: bytes) -> bytes:
        """The reply within the policy's seconds, or `NO_REPLY`; either at a whole multiple of `reply_seconds`."""
        began, every = time.monotonic(), self._policy.reply_seconds
        reply = self._reply(spec, request)
        if every:
            time.sleep((began - time.monotonic()) % every)
        return reply

    def _reply(self, spec: str, request: bytes) -> bytes:
        if len(request) > self._policy.max_request:  # nobody hashes or decodes it
            why = f"the request has {len(request):,} bytes; the limit is {self._policy.max_request:,} (max_request_mb)"
            log.write(self._policy, {"bytes": len(request)}, "failed", why)
            return NO_REPLY
        try:
            self._pipe.send_bytes(spec.encode())
            self._pipe.send_bytes(request)
            if self._pipe.poll(self._policy.max_seconds):
                return self._pipe.recv_bytes()
            why = f"no reply within {self._policy.max_seconds:g} s (max_seconds), so the process was ended"
        except (EOFError, OSError, MemoryError) as error:
            self.child.join(1)
            why = f"the process ended with code {self.child.exitcode} ({type(error).__name__}); out of memory?"
        facts: dict[str, Any] = {"request": _sha256(request), "spec": _sha256(spec.encode())}
        asked = site_journal.SiteJournal(self._policy.state).standing().at.asked
        for number, each in asked.items():
            if (each.request, each.process) == (facts["request"], self.child.pid):
                facts["question"] = number
        log.write(self._policy, facts, "failed", why)
        return NO_REPLY

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.join()


def _work(policy: SitePolicy, pipe: Connection, parent: int) -> None:
    limit_memory(policy)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    try:
        spec, request = pipe.recv_bytes().decode(), pipe.recv_bytes()
    except EOFError:  # the message was no request
        return
    pipe.send_bytes(site_answer(policy, spec, request))


def _end_after(parent: int) -> None:
    """End this process soon after its parent, which may be killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


_PROGRAM = """
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node ends, and this process with it
from fedstill.sites.site import launcher; launcher.main()
"""


def serve(folder: Path, options: Sequence[str] = (), say: Callable[[str], None] = lambda _: None) -> int:
    """Run the node of the site in ``folder`` until it ends, and return its exit code.

    Args:
        folder: the folder that ``fedstill site init`` made.
        options: further options of ``flower-supernode``.
        say: gets sentences for the operator.

    Raises:
        ValueError: the policy is invalid, the site has no server, the log is damaged, or Flower is not installed.
    """
    place = folder.resolve() / setup.POLICY
    policy = SitePolicy.read(place)
    address, connection = setup.connection(folder)
    try:  # a late import, as its packages are optional
        from fedstill.engines.flower.node import NodeLimits, run_node
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; {errors.install('flower')}") from error
    if sentence := units.of_root("this site"):
        say(sentence)
    for name, at in policy.public.items():
        if not at.exists():  # or a slip: a line after [public] belongs to it
            say(f"the public data {name!r} are in {at}, which does not exist; runs that use them are refused (public)")
    os.umask(0o077)
    os.environ["FLWR_HOME"] = str(folder.resolve() / "flower")  # a service may have no home
    settings = policy.model_dump(mode="json")
    log.write(policy, {"fedstill": __version__, "settings": settings}, "started", "the site's node starts")

    def refused(facts: Mapping[str, Any]) -> None:
        known = {name: str(facts[name]) for name in ("run", "bundle") if facts[name] is not None}
        log.write(policy, known, "refused", f"no program gets the message: {schema.clean(facts['detail'], 300)}")

    limits = NodeLimits(policy.messages_at_a_time, policy.max_request, NO_REPLY, refused)
    program = [sys.executable, "-P", "-c", _PROGRAM, str(place), str(policy.state)]
    with _alone(policy.state):
        files.write_secret(folder / setup.NODE_KEY, (folder / setup.KEY).read_bytes())
        began = time.monotonic()
        code = run_node([*connection, *options], program, limits)
    if code > 0 and time.monotonic() - began < _EARLY:
        key = folder / f"{setup.KEY}.pub"
        say(_NOT_TAKEN.format(address=address, key=key, client=policy.client))
    return code


_EARLY = 90.0
"""Seconds after which the end of a node is no refusal of the server any more."""
_NOT_TAKEN = (
    "fedstill: the server at {address} did not take this site's node. Either it has not accepted the site's key yet "
    "(its operator: fedstill server accept FOLDER {client} KEY, with the line in {key}), or this site's last node "
    "ended less than a minute ago and the server has not noticed (start it again in a minute), or the server can't "
    "be reached (the lines above)"
)


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Refuse a second node of a site, of which the server would take neither.

    Raises:
        ValueError: one runs already.
    """
    lock = FileLock(state / "serve.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another 'fedstill site serve' of {state.parent} runs; stop it first") from error
    try:
        yield
    finally:
        lock.release()
