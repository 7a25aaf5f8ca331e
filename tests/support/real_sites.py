"""Real sites in this process, for tests: their policies, and a server's way to them."""

from pathlib import Path
from typing import Any

import numpy as np
import small
import torch

from fedstill import methods
from fedstill.base.records import Records
from fedstill.data.sources import DataSet
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival
from fedstill.sites.site import setup
from fedstill.sites.site.answer import answer
from fedstill.sites.site.policy import SitePolicy

RUN = "0123456789abcdef" * 2


def write_data(place: Path, records: Records) -> None:
    np.savez(place, x_train=records.images.permute(0, 2, 3, 1).numpy(), y_train=records.labels.numpy())


def make_site(
    folder: Path, digits: DataSet, client: int = 0, records: Records | None = None, **policy: Any
) -> SitePolicy:
    """A site with half the digits, in a folder of its own."""
    place = folder / f"site-{client}"
    place.mkdir()
    part = np.array_split(np.arange(len(digits.train)), 2)[client]
    write_data(place / "data.npz", digits.train[torch.from_numpy(part)] if records is None else records)
    wanted = {"methods": ["fedavg", "fedgm", "fedavg-p"], "unprotected": True, "simulated_noise": True, **policy}
    return setup.site(place, {"client": client, "data": "data.npz", "state": "state", **wanted})


def spec_of(name: str, digits: DataSet, **facts: Any) -> RunSpec:
    small_settings: dict[str, Any] = {
        "fedavg": {"rounds": 2, "local": {"lr": 0.05, "batch_size": 32}},
        "fedgm": {"ipc": 1, "training": {"epochs": 1}, "matching": {"nets": 1, "batch_size": 8}},
        "fedavg-p": {"extractor": {"pretrain": "none"}, "space": {"dims": 8}},
    }
    method = methods.find(name)(**small_settings.get(name, {}))
    return small.spec_of(method, digits.train, **{"name": name, "run": RUN, "public": "noise=64", **facts})


class Direct:
    """The way to sites in this process."""

    failure = None

    def __init__(self, sites: list[SitePolicy], spec: RunSpec) -> None:
        self.sites = sites
        self.spec = spec
        self.replies: list[bytes] = []

    def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
        for client in clients:
            sent(client)
            self.replies.append(answer(self.sites[client], self.spec.text(), request))
            yield Arrival(client, self.replies[-1])


def federation(name: str, digits: DataSet, sites: list[SitePolicy], folder: Path, **facts: Any) -> ServerFederation:
    spec = spec_of(name, digits, **facts)
    options = {"num_clients": len(sites), "public": small.noise_images(digits)()}
    fed: ServerFederation = small.federation(spec.method, Direct(sites, spec), digits, folder, spec=spec, **options)
    return fed
