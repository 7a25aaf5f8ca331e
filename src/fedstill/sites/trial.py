"""``fedstill deploy check``: a trial deployment on this machine."""

import shutil
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstill.base import errors
from fedstill.data import sources
from fedstill.report import spending
from fedstill.runs.folder import RunFolder

if TYPE_CHECKING:
    from fedstill.sites.loopback import Loopback

_PATIENCE = 600.0
"""Seconds to wait for the two sites: a busy machine may lose sight of them for a while."""
_BUDGET = 1.3
"""Epsilon of a site for all runs: one of epsilon 1 and a small one fit, a second of epsilon 1 does not."""


def check(folder: Path | None = None) -> Iterator[Any]:
    """Run a deployment of two sites on this machine, over TLS with keys; yields lines to print.

    Raises:
        ValueError: Flower is not installed.
        RuntimeError: a part failed; the message names it and the logs.
    """
    kept = folder is not None
    folder = (folder or Path(mkdtemp(prefix="fedstill-check-"))).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; choose another, or none for a temporary one")
    try:
        yield from _steps(folder)
    except RuntimeError:
        kept = True  # whoever looks for the cause needs the logs
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)  # it has the sites' keys and records
    where = f"the files are in {folder}" if kept else "its files are removed (fedstill deploy check FOLDER keeps them)"
    yield f"everything works; {where}"


def _steps(folder: Path) -> Iterator[Any]:
    """Set up the deployment in ``folder`` and try it; yields lines to print."""
    try:  # a late import, as its packages are optional
        from fedstill.sites.loopback import loopback
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; {errors.install('flower')}") from error
    data = sources.load("digits")
    with loopback(folder) as here:
        yield f"server: TLS at 127.0.0.1:{here.port}, a certificate made for it, sites accepted by their keys"
        yield f"the paths of runs and of keys there: {_refused(here.port, here.server.certificates.authority)}"
        for client, part in enumerate(np.array_split(np.arange(len(data.train)), 2)):
            own = data.train[torch.from_numpy(part)]
            here.add_site(client, own, methods=["fedavg-p", "afl"], budget=_BUDGET, helper=True)
        here.trust_helpers(0, 1)
        for client in range(2):
            here.start_site(client)
            yield f"site {client}: a policy that allows fedavg-p and afl up to epsilon {_BUDGET:g}, a helper of sums"
        task = {"data": "digits", "clients": 2, "model": "scattering", "public": "noise=200", "noise": "entropy"}
        method = {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 32}}
        run = here.run("first", {"method": "fedavg-p", **task, "fedavg-p": method}, _PATIENCE)
        status = here.finish(run, 2 * _PATIENCE)
        out = folder / "runs" / "first"
        if status != "finished:completed" or not RunFolder(out).is_finished:
            raise RuntimeError(f"the run ended as {status}: {here.output(run)[-2000:]}\nsee {folder / 'logs'}")
        yield f"run: {status}, one upload from each site"
        yield from spending.show(out)
        yield from _masked(here, task)
        again = here.run("second", {"method": "fedavg-p", **task, "seed": 1, "fedavg-p": method}, _PATIENCE)
        here.finish(again, 2 * _PATIENCE)
        if "nothing was released" not in (output := here.output(again)):
            raise RuntimeError(f"the sites did not refuse a second run that exceeds their budgets: {output[-2000:]}")
        yield "both sites refused a second run, which would exceed their budgets"


def _masked(here: "Loopback", task: Mapping[str, Any]) -> Iterator[Any]:
    """Run a masked sum, which the two sites open for each other."""
    method = {"epsilon": 0.1, "extractor": {"pretrain": "none"}, "space": {"dims": 8}}
    content = {**task, "method": "afl", "afl": method, "sums": "masked:helpers=2,records=10000"}
    run = here.run("masked", content, _PATIENCE)
    status = here.finish(run, 2 * _PATIENCE)
    if status != "finished:completed":
        raise RuntimeError(f"the run with masked sums ended as {status}: {here.output(run)[-2000:]}")
    yield "a second run of one masked sum: both sites are its helpers, and the server learned the total alone"


def _refused(port: int, authority: Path) -> str:
    """The gate's replies to the start of a run and to the registration of a key, from outside."""
    import httpx  # optional, comes with Flower

    context = ssl.create_default_context(cafile=str(authority))
    with httpx.Client(verify=context, trust_env=False) as client:
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/fleet/../control/start-run"):
            answer = client.post(f"https://127.0.0.1:{port}{path}", content=b"")
            if answer.status_code != 403:
                raise RuntimeError(f"{path} is not refused at the door: {answer.status_code} {answer.text[:200]}")
    return "refused (403)"
