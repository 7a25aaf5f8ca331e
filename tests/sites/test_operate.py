"""What docs/operate.md tells an operator: manifests that a cluster takes, copies that come back, presets."""

import shutil
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import real_sites
import yaml

from fedstill.cli import main
from fedstill.cli.site_commands import PRESETS
from fedstill.data.sources import DataSet
from fedstill.sites import seals
from fedstill.sites.server import roster, service
from fedstill.sites.site import evidence, log, setup
from fedstill.sites.site.answer import answer
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text()
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("place", MANIFESTS, ids=lambda place: place.name)
def test_a_manifest_is_what_a_cluster_takes(place: Path) -> None:
    documents = list(yaml.safe_load_all(place.read_text()))
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents:
        validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("place", MANIFESTS, ids=lambda place: place.name)
def test_a_manifest_runs_one_pod_as_a_plain_user_with_commands_that_there_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = [d for d in yaml.safe_load_all(place.read_text()) if d["kind"] == "StatefulSet"]
    pod = one["spec"]["template"]["spec"]
    assert one["spec"]["replicas"] == 1 and pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in one["spec"]["volumeClaimTemplates"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} | claims
    (main_container,) = pod["containers"]
    is_site = main_container["args"][0] == "site"  # whose process is the container: a dead one is started again
    assert ("livenessProbe" in main_container) != is_site
    probe = main_container["readinessProbe" if is_site else "livenessProbe"]
    for words in (main_container["args"], probe["exec"]["command"][1:]):
        group, command = words[:2]
        with suppress(SystemExit):
            main([group, command, "--help"])
        assert f"fedstill {group} {command}" in capsys.readouterr().out


def packed(folder: Path, copy: Path) -> None:
    """The page's own words, without sudo."""
    subprocess.run(
        ["tar", "--create", "--preserve-permissions", "--file", copy, "-C", folder.parent, folder.name], check=True
    )


def unpacked(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    subprocess.run(["tar", "--extract", "--preserve-permissions", "--file", copy, "-C", folder.parent], check=True)


def test_a_site_goes_on_from_its_newest_copy(tmp_path: Path, digits: DataSet) -> None:
    policy = real_sites.make_site(tmp_path, digits, budget=8.0)
    fed = real_sites.federation("fedavg-p", digits, [policy], tmp_path / "run", simulated_noise=True)
    fed.spec.method.server(fed)
    charges = read_charges(policy.state)
    folder, copy = tmp_path / "site-0", tmp_path / "site.tar"
    packed(folder, copy)
    modes = {place.relative_to(folder): place.stat().st_mode for place in folder.rglob("*")}
    unpacked(copy, folder)
    assert {place.relative_to(folder): place.stat().st_mode for place in folder.rglob("*")} == modes
    assert log.verify(policy.state).is_whole
    assert evidence.status(policy)["health"]["is_well"]
    assert read_charges(policy.state) == charges
    assert answer(policy, fed.spec.text(), b"no request")  # it lives


def test_a_server_goes_on_from_its_copy(tmp_path: Path) -> None:
    made = service.init(tmp_path / "server", {"host": "127.0.0.1"})
    made.invite(0, 500)
    key, authority = seals.server_key(made.folder).public_key(), made.certificates.authority_text()
    packed(made.folder, tmp_path / "server.tar")
    unpacked(tmp_path / "server.tar", made.folder)
    back = service.Server(made.folder)
    assert seals.server_key(back.folder).public_key() == key and back.certificates.authority_text() == authority
    assert roster.load(back.roster).invited[0].max_records == 500
    named = [word.strip("`") for word in PAGE.split("Copy ")[1].split(" together")[0].replace("and", ",").split(",")]
    there = {place.name for place in back.folder.iterdir()}
    assert {name.strip(" `\n/") for name in named} - {"receipts.json", "superlink.db", "the runs' folders"} <= there


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_the_page_says_and_a_flag_counts_more(preset: str, tmp_path: Path, digits: DataSet) -> None:
    server = service.init(tmp_path / "server", {"host": "127.0.0.1"})
    invitation = server.invite(0, None)
    real_sites.write_data(tmp_path / "data.npz", digits.train[:200])
    words = ["site", "init", str(tmp_path / "site"), "--invite", str(invitation), "--data", str(tmp_path / "data.npz")]
    main([*words, "--methods", "fedavg-p", "--budget", "2", "--preset", preset, "--runs-per-day", "7"])
    written: dict[str, Any] = tomllib.loads((tmp_path / "site" / setup.POLICY).read_text())
    policy = SitePolicy.read(tmp_path / "site" / setup.POLICY)
    assert policy.runs_per_day == 7
    for name, value in PRESETS[preset].items():
        assert name == "runs_per_day" or written[name] == value
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{preset}`")]
    said = {
        "strict": ("least epsilon 0.01", "1,000 releases", "10 failed", "10 runs", "200 refusals", "whole minutes"),
        "open": ("1 record",),
    }
    assert all(words in row for words in said.get(preset, ()))
