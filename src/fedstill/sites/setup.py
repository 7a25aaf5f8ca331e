"""``fedstill deploy``: what a real deployment needs on disk, and a trial of the whole on this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import tomli_w
import torch
from pydantic import ValidationError

from fedstill import files
from fedstill.data import sources
from fedstill.experiment import config
from fedstill.report import privacy as ledger
from fedstill.runs.folder import RunFolder
from fedstill.sites.ledger import create_ledger
from fedstill.sites.policy import Policy, PolicySite

_APP = Path(__file__).parent / "flower_app" / "pyproject.toml"


def app(folder: Path) -> Path:
    """Write the Flower app into ``folder``; returns it."""
    files.write_bytes(folder / "pyproject.toml", _APP.read_bytes())
    return folder


def site(folder: Path, settings: Mapping[str, Any]) -> Policy:
    """Write a site's policy, and make its ledger.

    Raises:
        ValueError: a setting is wrong, or there is a site already.
    """
    place = folder / "policy.toml"
    if place.exists():
        raise ValueError(f"{place} exists already; edit it, or choose another folder")
    try:
        Policy(**settings)
    except ValidationError as error:
        raise ValueError(f"the policy is wrong: {config.sentence(error)}") from error
    plain = {name: _plain(value) for name, value in settings.items() if value is not None}
    files.write_bytes(place, tomli_w.dumps(plain).encode())
    policy = Policy.read(place)
    create_ledger(PolicySite(policy).ledger)
    return policy


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def check(folder: Path | None = None) -> Iterator[Any]:
    """Try a deployment of two sites on this machine, over TLS with keys; yields what was done, to print.

    Raises:
        ValueError: Flower is not installed.
        RuntimeError: something did not work; it says what and where the logs are.
    """
    try:
        from fedstill.sites.loopback import loopback
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a deployment needs the package {error.name}, which is not installed; pip install 'fedstill[flower]'"
        ) from error
    folder = (folder or Path(mkdtemp(prefix="fedstill-check-"))).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; give another one, or none")
    data = sources.load("digits")
    with loopback(folder) as here:
        yield f"SuperLink: TLS at 127.0.0.1:{here.port}, a certificate made for it, sites known by their keys"
        for client, part in enumerate(np.array_split(np.arange(len(data.train)), 2)):
            own = data.train[torch.from_numpy(part)]
            here.add_site(client, own, methods=["fedavg-p"], budget=1.3)
            here.start_site(client)
            yield f"site {client}: {len(own)} records of its own, a policy that answers fedavg-p up to epsilon 1.3"
        task = {"data": "digits", "clients": 2, "model": "scattering", "public": "noise=200", "noise": "entropy"}
        method = {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 32}}
        run = here.run("first", {"method": "fedavg-p", **task, "fedavg-p": method})
        status = here.finish(run)
        out = folder / "runs" / "first"
        if status != "finished:completed" or not RunFolder(out).is_finished:
            raise RuntimeError(f"the run ended as {status}: {here.said(run)[-2000:]}\nsee {folder / 'logs'}")
        yield f"run: {status}, one upload from each site"
        yield from ledger.show(out)
        again = here.run("second", {"method": "fedavg-p", **task, "seed": 1, "fedavg-p": method})
        here.finish(again)
        if "nothing was released" not in (said := here.said(again)):
            raise RuntimeError(f"a second run was not refused, though above the sites' budgets: {said[-2000:]}")
        yield "a second run was refused by both sites: it would have gone above their budgets"
    yield f"everything works; what was made is in {folder}"
