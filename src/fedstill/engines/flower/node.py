"""A site's Flower node whose messages go to programs of fedstill's own, so that the server's bundle never runs there.

A SuperNode with ``--isolation process`` starts no program for its messages: whoever asks its Runtime API on this
machine, with the secret that only `run_node` and the SuperNode share, gets a message's token. `run_node` asks and forks
a program for each, in which `run_task` takes the message, gives it to an app that is installed here, and sends the
reply. Flower's own programs, which unpack and import the bundle, are never started. These functions of Flower are not
documented; tests/checks/test_node.py pins them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedstill.engines.flower.forks import Forks, PipeLines
from fedstill.engines.flower.supernode import end_with_parent

_HOST = "127.0.0.1"
_POLL = 0.2
"""Seconds between two questions for a task."""
_BEAT = 10.0
"""Seconds between two words to the SuperNode that a program lives."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""The method that gives a message's token."""
_SUPERNODE = "from fedstill.engines.flower import supernode; supernode.main()"


class NodeLimits(NamedTuple):
    """Limits of a node.

    Attributes:
        programs: largest number of programs at a time.
        request: largest number of bytes of a request.
        refusal: the reply to a larger one, or to a message that is not made like a request.
        refused: called with facts of such a message, which no program gets: ``run``, ``detail``, ``bundle``.
    """

    programs: int
    request: int
    refusal: bytes
    refused: Callable[[Mapping[str, Any]], None]


def run_node(options: Sequence[str], programs: Sequence[str], limits: NodeLimits) -> int:
    """Run a SuperNode until it ends, and return its exit code.

    Args:
        options: options of ``flower-supernode``; those for its Runtime API and its isolation are set here.
        programs: words that start a process which calls `forks.fork_for_each` with the pipe that follows them; each of
            its children calls `run_task` with the address and the token that it is given.
        limits: limits of what it takes.

    Raises:
        ValueError: that process did not start; its output says why.
    """
    forks = Forks(programs)
    port = _free_port()
    read, write = os.pipe()
    secret, pipe = _piped_secret()
    own = ["--isolation", "process", "--host", _HOST, "--port", str(port)]  # last, so they count
    own += ["--superexec-auth-secret-file", f"/dev/fd/{pipe}"]
    words = [str(os.getpid()), str(limits.request), b64encode(limits.refusal).decode(), str(write)]
    node = subprocess.Popen([sys.executable, "-P", "-c", _SUPERNODE, *words, *options, *own], pass_fds=[write, pipe])
    os.close(write)
    os.close(pipe)
    signal.signal(signal.SIGTERM, lambda *_: node.terminate())
    notes = PipeLines(read)
    address, running, due = f"{_HOST}:{port}", list[_Program](), 0.0
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE])
    client = client_of(address, RuntimeVersionHttpInterceptor(component_name="SuperExec"), signed)
    try:
        while (code := node.poll()) is None:
            for line in notes.read():
                limits.refused(json.loads(line))
            is_ready = forks.look()
            for program in list(running):
                if (ended := forks.code(program.number)) is not None:
                    running.remove(program)
                    program.close(failed=ended != 0)
            token = _next_token(client) if is_ready and len(running) < limits.programs else None
            if token is not None:
                running.append(_Program(forks.start(address, token), address, token))
                running[-1].beat()
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT
                for program in running:
                    program.beat()
            time.sleep(_POLL)
        return code
    finally:
        if node.poll() is None:
            node.terminate()
        forks.close()
        client.close()
        notes.close()


def _piped_secret() -> tuple[bytes, int]:
    """A secret, and the end of a pipe in which it is: no other user of the machine can read it, and no file has it.

    Whoever asks for a task without it gets none; otherwise any local user could take a message, and answer it.
    """
    secret, (read, write) = os.urandom(32), os.pipe()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(secret)
    return secret, read


class _Program:
    """A program that works on a message, whose token lasts while this process says that it lives."""

    def __init__(self, number: int, address: str, token: str) -> None:
        self.number = number
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        self._client = client_of(address, version, RuntimeTokenHttpInterceptor(token))

    def beat(self) -> None:
        with suppress(httpx.HTTPError):  # it has just sent its reply
            self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def close(self, *, failed: bool) -> None:
        """Note that the program has ended; if it was killed, its message gets an error before its token is too old."""
        if failed:
            output = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="the site's program ended")
            with suppress(httpx.HTTPError):  # it has said so itself
                self._client.PushTaskOutput(output)
        self._client.close()


def _next_token(client: RuntimeHttpClient) -> str | None:
    try:  # only tasks of client apps: the SuperNode of a site has no business with others
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.HTTPError:  # it is still starting, or ending
        return None
    return str(answer.token) if answer.HasField("task") and answer.token else None


def run_task(address: str, token: str, parent: int, app: ClientApp, refuse: Callable[[bytes, int], str | None]) -> None:
    """Reply to one message of the SuperNode.

    Args:
        address: the SuperNode's Runtime API.
        token: the message's token.
        parent: id of the process that started this one; this one ends with it.
        app: the app that replies.
        refuse: returns the reason why the bundle with these bytes, of the run with this id, gets no reply, or None.
    """
    end_with_parent(parent)  # Flower's own would wait for ever to tell the SuperNode, which has ended too
    client = client_of(
        address,
        RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
        RuntimeTokenHttpInterceptor(token),
        retry_invoker=make_simple_http_retry_invoker(),
    )
    context, status, details = None, SubStatus.FAILED, "the site's program failed"
    try:
        message, context, run, bundle = pull_task_input(client)
        if reason := refuse(bundle.content, run.run_id):
            reply = Message(Error(code=ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason=reason), reply_to=message)
        else:
            reply = app(message=message, context=context)
        push_message(client, reply, context)
        status, details = SubStatus.COMPLETED, ""
    finally:
        with suppress(RunNotRunningException):  # it would hide an earlier error
            push_task_output(client=client, context=context, sub_status=status, details=details)
        client.close()


def client_of(address: str, *interceptors: Any, retry_invoker: RetryInvoker | None = None) -> RuntimeHttpClient:
    """A client of Flower's inner interface at ``address`` of this machine."""
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # on this machine's loopback
        root_certificates=None,
        interceptors=list(interceptors),
        retry_invoker=retry_invoker,
    )


def _free_port() -> int:
    with socket.socket() as server:
        server.bind((_HOST, 0))
        return int(server.getsockname()[1])
