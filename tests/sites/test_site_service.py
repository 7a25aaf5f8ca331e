"""``fedstill site init`` and its like: mistakes are told at once, and what a policy lets out is said in plain words."""

import json
import shutil
import stat
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_backbones
from PIL import Image
from releases import entry

from fedstill.base import files
from fedstill.cli import main
from fedstill.sites.server import roster, service
from fedstill.sites.site import chain, launcher, setup, site_journal
from fedstill.sites.site.charges import Limits, open_site_ledger
from fedstill.sites.site.policy import SitePolicy


@pytest.fixture(scope="module")
def invite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An invitation of client 3."""
    made = service.init(tmp_path_factory.mktemp("invite") / "server", {"host": "fl.example.org"})
    return made.invite(3, None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Records of two classes."""
    place = tmp_path / "data.npz"
    np.savez(place, x_train=np.zeros((60, 8, 8, 1), np.uint8), y_train=np.arange(60) % 2)
    return place


def site_init(folder: Path, invite: Path, data: Path, *flags: str) -> None:
    main(["site", "init", str(folder), "--invite", str(invite), "--data", str(data), *flags])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fedstill: ") and error.count("\n") == 1, error
    return error


BUDGET = ("--methods", "fedavg-p", "--budget", "4")


def test_a_site_is_made_in_one_command(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    site_init(folder, invite, data, *BUDGET)
    text = capsys.readouterr().out
    assert "client 3 of fl.example.org:9443" in text
    assert roster.fingerprint(invite) in text
    assert "with privacy noise, charged to the budget" in text
    assert "all runs together: epsilon 4 at delta 1e-05" in text
    assert "WITHOUT PROTECTION" not in text and "warning" not in text
    assert setup.public_key(folder) in text
    policy = SitePolicy.read(folder / "policy.toml")
    assert (policy.client, policy.budget, policy.methods) == (3, 4.0, ("fedavg-p",))
    names = (".", "state", "state/journal.key", "site.key")
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in names}
    assert modes == {".": 0o700, "state": 0o700, "state/journal.key": 0o600, "site.key": 0o600}
    address, options = setup.connection(folder)
    assert address == "fl.example.org:9443"
    assert options[-1] == str(folder / "node.key")
    assert (folder / "ca.crt").read_text() == roster.read_invitation(invite).authority
    assert str(folder) in (folder / "fedstill-site.service").read_text()


def test_paths_of_the_command_are_relative_to_where_it_is_given(
    invite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a policy are relative to the policy: a schema beside the command was none for the site's questions."""
    monkeypatch.chdir(tmp_path)
    Path("patients.csv").write_text("age,died\n" + "".join(f"{age},{'ny'[age % 2]}\n" for age in range(20, 90)))
    Path("schema.toml").write_text(
        'target = "died"\nclasses = ["n", "y"]\n[columns.age]\nkind = "number"\nrange = [0, 99]\n'
    )
    site_init(Path("site"), invite, Path("patients.csv"), "--schema-file", "schema.toml", *BUDGET)
    policy = SitePolicy.read(Path("site/policy.toml"))
    assert (policy.schema_file, policy.data) == (tmp_path / "schema.toml", tmp_path / "patients.csv")
    assert policy.state == tmp_path / "site/state"
    main(["site", "check", "site"])


def test_a_site_whose_target_is_a_number_is_told_at_once_that_no_run_takes_it(
    invite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was founded with "all records have one class", and each of its runs refused."""
    (tmp_path / "table.csv").write_text("age,days\n" + "".join(f"{age},{age % 9}\n" for age in range(20, 90)))
    place = tmp_path / "schema.toml"
    place.write_text('target = "days"\nrange = [0, 9]\n[columns.age]\nkind = "number"\nrange = [0, 99]\n')
    with pytest.raises(SystemExit) as ended:
        site_init(tmp_path / "site", invite, tmp_path / "table.csv", "--schema-file", str(place), *BUDGET)
    assert ended.value.code == 2 and not (tmp_path / "site" / "policy.toml").exists()
    assert "'days' of the schema is a number, and real sites take classes alone" in capsys.readouterr().err


def test_a_policy_of_another_client_than_the_key_s_is_refused(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    site_init(folder, invite, data, *BUDGET)
    policy = folder / "policy.toml"
    policy.write_text(policy.read_text().replace("client = 3", "client = 4"))
    capsys.readouterr()
    said = refusal(capsys, "site", "check", str(folder))
    assert "the policy is of client 4, but" in said and "was made for client 3" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--methods", "fedavgp", "--budget", "4"), "there is no method 'fedavgp' (methods); did you mean fedavg-p?"),
        (
            ("--methods", "fedgm.distill", "--budget", "4"),
            "has no step 'distill' (methods); did you mean distil?",
        ),
        (("--methods", "mine:Own", "--budget", "4"), "there is no method 'mine:Own'"),
        (("--methods", "fedavg-p"), "the site's policy has no budget, so nothing is released (budget)"),
        (("--methods", "fedavg", "--budget", "4"), "allows no unprotected field, such as"),
        ((*BUDGET, "--device", "foo"), "'foo' is no device; write cpu or cuda"),
        ((*BUDGET, "--device", "mps"), "'mps' is no device; write cpu or cuda"),
        ((*BUDGET, "--public", "c100", "/nowhere"), "the public data 'c100' are in /nowhere, which does not exist"),
        ((*BUDGET, "--delta", "0.9"), "delta is 0.9; with 60 records it must be below 0.017"),
        ((*BUDGET, "--delta", "2"), "it must be less than 1"),
        ((*BUDGET, "--budget", "-1"), "it must be greater than 0"),
        ((*BUDGET, "--min-records", "61"), "the site has 60 records; with fewer than 61 it answers nothing"),
        ((*BUDGET, "--own-code", "no.such:Thing"), "own_code has 'no.such:Thing', which can't be imported"),
        ((*BUDGET, "--own-code", "mine.py:Thing"), "a site runs code of installed packages only"),
        (("--budget", "4"), "--methods is empty"),
        ((*BUDGET, "--data", "/etc"), "the site's records can't be read"),
        ((*BUDGET, "--data", "/nowhere"), "--data is '/nowhere', which does not exist"),
        ((*BUDGET, "--client", "1"), "there is no flag --client"),
        ((*BUDGET, "--invite", "/nowhere"), "/nowhere is no invitation"),
    ],
)
def test_a_mistake_is_told_at_once_and_can_be_mended(
    flags: tuple[str, ...], sentence: str, invite: Path, data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "site"
    words = ("site", "init", str(folder), "--invite", str(invite), "--data", str(data), *flags)
    assert sentence in refusal(capsys, *words)
    assert not (folder / "policy.toml").exists() and not (folder / "site.key").exists()
    site_init(folder, invite, data, *BUDGET)  # the same folder


def test_what_may_be_meant_is_a_warning(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--methods", "fedavg", "fedavg-p", "--unprotected", "--budget", "1e7", "--min-records", "1")
    site_init(tmp_path / "site", invite, data, *flags)
    text = capsys.readouterr().out
    assert "warning: THE SERVER CAN GET THE RECORDS" in text
    assert "warning: a budget of epsilon 1e+07 protects little" in text
    assert "warning: min_records is 1" in text
    assert "fedavg, step update: " in text and "WITHOUT PROTECTION" in text
    main(["site", "check", str(tmp_path / "site"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["client"] == 3 and len(found["warnings"]) == 3
    assert any("WITHOUT PROTECTION" in line for line in found["leaves"])


def test_the_unit_of_a_site_may_write_its_state_elsewhere(invite: Path, data: Path, tmp_path: Path) -> None:
    folder, state = tmp_path / "site", tmp_path / "elsewhere" / "state"
    site_init(folder, invite, data, *BUDGET, "--state", str(state))
    assert f'ReadWritePaths="{folder}" "{state}"\n' in (folder / "fedstill-site.service").read_text()
    setup.join(folder, invite)
    assert f'ReadWritePaths="{folder}" "{state}"\n' in (folder / "fedstill-site.service").read_text()


def test_pictures_of_unequal_sizes_are_read_in_the_size_of_the_policy(
    invite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("own", "public"):
        for i in range(60):
            place = tmp_path / name / "train" / "ab"[i % 2] / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9 + i % 3, 8 + i % 5, 3), i, np.uint8)).save(place)
    public = ("--public", "more", str(tmp_path / "public"))
    words = ("site", "init", str(tmp_path / "site"), "--invite", str(invite), "--data", str(tmp_path / "own"), *BUDGET)
    assert "--size" in refusal(capsys, *words, *public)
    main([*words, *public, "--size", "8"])
    main(["site", "check", str(tmp_path / "site")])
    assert "warning" not in capsys.readouterr().out


def test_the_backbones_of_the_policy_are_tried(
    invite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fedstill[hf]'")
    tiny_backbones.save_texts(tmp_path / "backbones" / "our" / "encoder")
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path / "backbones"))
    texts, labels = tiny_backbones.reviews(60)
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "reviews.parquet")
    words = ("site", "init", str(tmp_path / "site"), "--invite", str(invite), *BUDGET)
    words = (*words, "--data", str(tmp_path / "reviews.parquet"))
    capsys.readouterr()
    assert "are texts; turn them into vectors" in refusal(capsys, *words)
    assert "the backbone 'hf:our/other' (features) can't be read" in refusal(
        capsys, *words, "--features", "hf:our/encoder", "hf:our/other"
    )
    main([*words, "--features", "hf:our/encoder"])


def test_a_changed_policy_is_checked_again(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    site_init(folder, invite, data, *BUDGET)
    place = folder / "policy.toml"
    place.write_text(place.read_text().replace("fedavg-p", "fedauxfdp"))
    capsys.readouterr()
    main(["site", "check", str(folder)])
    assert "fedauxfdp, step" in capsys.readouterr().out
    place.write_text(place.read_text().replace("fedauxfdp", "fedaux-x"))
    assert "there is no method 'fedaux-x'" in refusal(capsys, "site", "check", str(folder))
    assert "is a site already" in refusal(
        capsys, "site", "init", str(folder), "--invite", str(invite), "--data", str(data), *BUDGET
    )


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize("moment", range(1, 7))  # after the key, the lines, the head, two folders; before the policy
def test_a_site_whose_making_was_killed_is_made_by_the_same_command(
    moment: int, invite: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flush, flushed = tmp_path / "site", chain.flush, list[Path]()

    def kill(place: Path) -> None:
        flush(place)
        flushed.append(place)
        if len(flushed) == moment:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(chain, "flush", kill)
        patch.setattr(files, "write_bytes", lambda *_: kill(data))
        setup.site(folder, {"client": 3, "data": str(data), "state": "state", "methods": ["fedavg-p"]})
    assert not (folder / "policy.toml").exists()
    if moment == 3:
        (folder / "state" / "journal.head").write_bytes(b"")  # half a head
    site_init(folder, invite, data, *BUDGET)
    main(["site", "check", str(folder)])


def test_a_journal_with_a_line_is_never_made_anew(tmp_path: Path) -> None:
    settings = {"client": 3, "data": "data", "state": "state", "methods": ["fedavg-p"]}
    policy = setup.site(tmp_path / "site", settings)
    open_site_ledger(policy.state, "run", Limits(1e-5, 9.0)).charge(entry())
    (tmp_path / "site" / "policy.toml").unlink()
    for name in ("journal.head", "journal.jsonl", "format.json", "none"):
        (tmp_path / "copy").mkdir()
        folder = shutil.copytree(tmp_path / "site", tmp_path / "copy" / name)
        (folder / "state" / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match="already; a new journal would forget what was released"):
            setup.site(folder, settings)
        shutil.rmtree(tmp_path / "copy")
    served = setup.site(tmp_path / "served", settings)
    site_journal.append(served.state, {"what": "started", "detail": ""})
    (tmp_path / "served" / "policy.toml").unlink()
    with pytest.raises(ValueError, match="already; a new journal would forget what was released"):
        setup.site(tmp_path / "served", settings)


def test_the_check_of_a_site_reads_its_journal(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    site_init(folder, invite, data, *BUDGET)
    site_journal.append(folder / "state", {"what": "started", "detail": ""})
    main(["site", "check", str(folder)])
    capsys.readouterr()
    for name in ("journal.head", "journal.key", "journal.jsonl"):
        place = folder / "state" / name
        whole = place.read_bytes()
        place.unlink()
        assert f"{place.name} can't be read" in refusal(capsys, "site", "check", str(folder))
        place.write_bytes(whole)


def test_a_new_key_and_a_new_authority_leave_the_rest(invite: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    site_init(folder, invite, data, *BUDGET)
    before = {name: (folder / name).read_bytes() for name in ("policy.toml", "site.key", "state/journal.key")}
    first = setup.public_key(folder)
    main(["site", "rekey", str(folder)])
    assert setup.public_key(folder) != first
    assert (folder / "site.key.old").read_bytes() == before["site.key"]
    assert stat.S_IMODE((folder / "site.key.old").stat().st_mode) == 0o600
    second = setup.public_key(folder)
    made = service.init(tmp_path / "other", {"host": "other.example.org", "port": 1234})
    main(["site", "join", str(folder), "--invite", str(made.invite(3, None))])
    assert setup.connection(folder)[0] == "other.example.org:1234"
    assert setup.public_key(folder) == second
    for name in ("policy.toml", "state/journal.key"):
        assert (folder / name).read_bytes() == before[name]


def test_an_invitation_of_another_client_or_of_nobody_is_refused(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, bad = tmp_path / "site", tmp_path / "bad.toml"
    site_init(folder, invite, data, *BUDGET)
    capsys.readouterr()
    text = invite.read_text()
    for changed, sentence in [
        (text.replace("client = 3", "client = 4"), "is for client 4; the policy"),
        (text.replace("fl.example.org:9443", "fl.example.org"), "it must be HOST:PORT"),
        (text.replace("fl.example.org:9443", "--insecure x:1"), "it must be HOST:PORT"),
        (text.replace("fl.example.org:9443", "a:99999"), "it must be HOST:PORT"),
        (text.replace("BEGIN CERT", "BEGIN CART"), "is no invitation"),
        (text + "extra = 1\n", "extra is not a setting here"),
        ("x" * 2_000_000, "it has more than 1,048,576 bytes"),
        ("\0", "is no invitation"),
    ]:
        bad.write_text(changed)
        assert sentence in refusal(capsys, "site", "join", str(folder), "--invite", str(bad)), changed[:100]
    assert setup.connection(folder)[0] == "fl.example.org:9443"


def test_a_node_without_a_server_or_with_an_open_key_does_not_start(
    invite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    setup.site(folder, {"client": 3, "data": str(data), "state": "state", "methods": ["fedavg-p"]})
    assert "'fedstill site join" in refusal(capsys, "site", "serve", str(folder))
    setup.join(folder, invite)
    (folder / "site.key").chmod(0o640)
    with pytest.raises(ValueError, match="others than its owner can read"):
        launcher.serve(folder)


def test_an_invitation_has_no_secret(tmp_path: Path) -> None:
    made = service.init(tmp_path / "server", {"host": "fl.example.org"})
    text = made.invite(0, 500).read_text()
    secrets = sorted(made.folder.rglob("*.key"))  # by name: under a umask of 077 every file is its owner's only
    assert {place.name for place in secrets} >= {"ca.key", "server.key", "request.key"}
    assert all(place.stat().st_mode & 0o077 == 0 for place in secrets)
    for key in (place.read_bytes() for place in secrets):
        assert key.hex() not in text
        lines = key.decode("latin-1").splitlines()  # of raw bytes, some are one character
        assert not any(line in text for line in lines if len(line) > 8 and line[:5] != "-----")
    assert tomllib.loads(text).keys() == {"client", "address", "authority", "server"}
    assert roster.load(made.roster).invited[0].max_records == 500
