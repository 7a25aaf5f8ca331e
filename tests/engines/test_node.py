"""What a site's node takes from Flower, of which Flower promises nothing."""

import inspect
import subprocess
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.heartbeat import HeartbeatSender  # noqa: E402
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor  # noqa: E402
from flwr.supercore.runtime import RuntimeHttpClient  # noqa: E402
from flwr.supernode import start_client_internal  # noqa: E402
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode  # noqa: E402
from flwr.supernode.runtime import run_clientapp  # noqa: E402

TAKEN: list[tuple[Any, list[str]]] = [
    (run_clientapp.pull_task_input, ["client"]),
    (run_clientapp.push_message, ["client", "message", "context"]),
    (run_clientapp.push_task_output, ["client", "context", "sub_status", "details"]),
    (RuntimeHttpClient.AcquireTask, ["self", "request"]),
    (RuntimeTokenHttpInterceptor.__init__, ["self", "token"]),
    (RuntimeVersionHttpInterceptor.__init__, ["self", "component_name"]),
    (HeartbeatSender.__init__, ["self", "heartbeat_fn"]),
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
import os, signal, time
from fedstill.engines.flower.parent import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a SuperNode whose server is away
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(1000)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.slow
def test_a_program_of_flower_s_ends_after_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert psutil.wait_procs([child], timeout=120)[1] == []
