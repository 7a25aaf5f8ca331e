"""Another user of a site's machine asks the SuperNode for messages, as the site does: it gets none."""

import threading
import time
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
import httpx  # noqa: E402
from flwr.proto.runtime_pb2 import AcquireTaskRequest  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor  # noqa: E402

from fedstill.data import sources  # noqa: E402
from fedstill.engines.flower import node  # noqa: E402
from fedstill.report.record import read_run  # noqa: E402
from fedstill.sites.loopback import loopback  # noqa: E402

PATIENCE = 300.0


def supernodes() -> list[list[str]]:
    """The command lines of the SuperNodes on this machine, which every user can read."""
    lines = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "from fedstill.engines.flower import supernode; supernode.main()" in words:
            lines.append(words)
    return lines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_local_user_gets_a_message_of_a_site(tmp_path: Path) -> None:
    stop, answers = threading.Event(), list[int]()

    def steal() -> None:
        """Poll faster than the site, without its secret and with another's."""
        while not stop.is_set():
            for words in supernodes():
                address = f"127.0.0.1:{words[words.index('--port') + 1]}"
                signed = node.SuperExecAuthHttpInterceptor(master_secret=b"guess" * 6, protected_methods=[node.ACQUIRE])
                for more in ([], [signed]):
                    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
                    client = node.client_of(address, version, *more)
                    try:
                        got = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
                        answers.append(200 if got.token else 204)
                    except httpx.HTTPStatusError as error:
                        answers.append(error.response.status_code)
                    except Exception:
                        pass  # it starts or ends
                    finally:
                        client.close()
            time.sleep(0.01)

    data = sources.load("digits")
    thieves = [threading.Thread(target=steal) for _ in range(2)]
    with loopback(tmp_path / "deployment") as here:
        for client, part in enumerate(np.array_split(np.arange(len(data.train)), 2)):
            own = data.train[torch.from_numpy(part)]
            here.add_site(client, own, methods=["fedavg"], unprotected=True, simulated_noise=True)
            here.start_site(client)
        for thief in thieves:
            thief.start()
        try:
            task = {"data": "digits", "clients": 2, "model": "linear", "fedavg": {"rounds": 3}}
            run = here.run("first", {"method": "fedavg", **task}, PATIENCE)
            assert here.finish(run, PATIENCE) == "finished:completed", here.output(run)[-3000:]
        finally:
            stop.set()
        for thief in thieves:
            thief.join()
        record = read_run(here.folder / "runs" / "first")
    assert record.refused == () and record["accuracy"] > 0.5
    assert len(answers) > 100 and 200 not in answers and 204 not in answers, sorted(set(answers))
