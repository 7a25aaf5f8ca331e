"""What a site's node takes from Flower, of which Flower promises nothing."""

import inspect
import signal
import subprocess
import sys
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common.constant import SubStatus  # noqa: E402
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse  # noqa: E402
from flwr.proto.task_pb2 import Task  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.interceptors import (  # noqa: E402
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException  # noqa: E402
from flwr.supercore.runtime import RuntimeHttpClient  # noqa: E402
from flwr.supernode import start_client_internal  # noqa: E402
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode  # noqa: E402
from flwr.supernode.runtime import run_clientapp  # noqa: E402

from fedstill.engines.flower import node  # noqa: E402

TAKEN: list[tuple[Any, list[str]]] = [
    (run_clientapp.pull_task_input, ["client"]),
    (run_clientapp.push_message, ["client", "message", "context"]),
    (run_clientapp.push_task_output, ["client", "context", "sub_status", "details"]),
    (RuntimeHttpClient.AcquireTask, ["self", "request"]),
    (RuntimeTokenHttpInterceptor.__init__, ["self", "token"]),
    (RuntimeVersionHttpInterceptor.__init__, ["self", "component_name"]),
    (SuperExecAuthHttpInterceptor.__init__, ["self", "master_secret", "protected_methods"]),
    (RuntimeHttpClient.SendTaskHeartbeat, ["self", "request"]),
    (RuntimeHttpClient.PushTaskOutput, ["self", "request"]),
]


@pytest.mark.parametrize(("function", "names"), TAKEN)
def test_flower_s_functions_have_the_arguments_that_are_used(function: Any, names: list[str]) -> None:
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    assert needed == names


def test_a_task_is_asked_for_by_its_type_and_comes_with_a_token() -> None:
    assert [field.name for field in AcquireTaskRequest.DESCRIPTOR.fields][0] == "supported_task_types"
    assert {"task", "token"} <= {field.name for field in AcquireTaskResponse.DESCRIPTOR.fields}
    assert TaskType.CLIENT_APP == "flwr-clientapp"


def test_the_runtime_api_of_a_supernode_is_where_the_node_looks_for_it() -> None:
    words = ["--isolation", "subprocess", "--isolation", "process", "--host", "127.0.0.1", "--port", "9"]
    options = _parse_args_run_supernode().parse_args(words)
    assert (options.isolation, options.host, options.port) == ("process", "127.0.0.1", 9)
    words = ["--isolation", "process", "--superexec-auth-secret-file", "/dev/fd/3"]
    assert _parse_args_run_supernode().parse_args(words).superexec_auth_secret_file == "/dev/fd/3"
    assert {"server_address", "insecure", "root_certificates", "interceptors", "retry_invoker"} <= set(
        inspect.signature(RuntimeHttpClient.from_server_address).parameters
    )


def test_a_supernode_in_process_isolation_starts_no_program() -> None:
    """The only program that it starts stands under a test for the other isolation."""
    lines = inspect.getsource(start_client_internal).splitlines()
    (started,) = [number for number, line in enumerate(lines) if "subprocess.Popen" in line]
    above = [line for line in lines[:started] if line.startswith("    if ") or line.startswith("    with ")]
    assert above[-1].strip() == "if isolation == ISOLATION_MODE_SUBPROCESS:"
    assert lines[started].startswith("        ")


STUBBORN = """
import os, signal, sys, time
from fedstill.engines.flower.supernode import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a SuperNode whose server is away
if sys.argv[2] == "late":  # it was killed while this program imported
    print(os.getpid(), flush=True)
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(1000)
"""
LAUNCHED = """
import os, sys
from fedstill.engines.flower import node
print(os.getpid(), flush=True)
node.run_task("127.0.0.1:9", "token", int(sys.argv[1]), None, None)  # its SuperNode is away
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid()), sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "when"), [(STUBBORN, "early"), (STUBBORN, "late"), (LAUNCHED, "")])
def test_a_program_of_flower_s_ends_after_its_parent_is_killed(program: str, when: str) -> None:
    words = [sys.executable, "-c", PARENT, program, when]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert psutil.wait_procs([child], timeout=120)[1] == []


SUPERNODE = """
import os, sys, time
limit, refusal, pipe = sys.argv[2:5]
os.write(int(pipe), b'{"run": 7, "det')
time.sleep(0.5)
os.write(int(pipe), b'ail": "too large", "bundle": null}\\n')
time.sleep(4)
sys.exit(int(limit))
"""


class Api:
    """A SuperNode's Runtime API with one task."""

    heard: ClassVar[list[str]] = []

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
        self.heard.append("asked")
        return (
            AcquireTaskResponse(token="a", task=Task(task_id=1)) if self.heard == ["asked"] else AcquireTaskResponse()
        )

    def SendTaskHeartbeat(self, request: Any) -> None:
        self.heard.append("beat")

    def PushTaskOutput(self, request: Any) -> None:
        assert request.sub_status == SubStatus.FAILED
        self.heard.append("failed")

    def close(self) -> None:
        self.heard.append("closed")


SLEEPER = """
import os, sys, time
from fedstill.engines.flower.forks import fork_for_each
def sleep(address, token):
    assert token == "a" and token not in sys.argv
    time.sleep(1)
    os._exit(int(sys.argv[1]))
time.sleep(1)  # as if it imported something
fork_for_each(sleep, int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 7])
def test_a_token_lasts_while_its_program_works_and_refusals_of_the_supernode_are_heard(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower gives a program 30 seconds until it says that it lives, so no task is taken before one can start."""
    monkeypatch.setattr(Api, "heard", [])
    monkeypatch.setattr(node, "_SUPERNODE", SUPERNODE)
    monkeypatch.setattr(node, "client_of", lambda *_, **__: Api())
    monkeypatch.setattr(node, "_BEAT", 0.1)
    refused: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        words = [sys.executable, "-c", SLEEPER, str(code)]
        assert node.run_node([], words, node.NodeLimits(1, 9, b"no", refused.append)) == 9
    finally:
        signal.signal(signal.SIGTERM, before)
    assert refused == [{"run": 7, "detail": "too large", "bundle": None}]
    assert Api.heard[:2] == ["asked", "beat"]
    assert Api.heard.count("failed") == (code != 0)  # its message need not wait until the token is too old
    assert Api.heard.count("beat") >= 2
    assert "beat" not in Api.heard[Api.heard.index("closed") :]  # the program has ended


def test_the_first_error_of_a_program_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(client: Any) -> None:
        raise ValueError("the first")

    def stopped(**_: Any) -> None:
        raise RunNotRunningException

    monkeypatch.setattr(node, "pull_task_input", lost)
    monkeypatch.setattr(node, "push_task_output", stopped)
    monkeypatch.setattr(node, "end_with_parent", lambda parent: None)
    with pytest.raises(ValueError, match="the first"):
        node.run_task("127.0.0.1:9", "token", 1, ClientApp(), lambda *_: None)
