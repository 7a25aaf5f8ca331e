"""A server's folder and its commands, without a SuperLink."""

import datetime
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography import x509

from fedstill.cli import main
from fedstill.sites.certificates import site_key
from fedstill.sites.server import roster, service, submit
from fedstill.sites.server.service import FAILED, Server
from fedstill.sites.server.submit import SubmitFlags
from fedstill.sites.site.policy import SitePolicy


@pytest.fixture
def made(tmp_path: Path) -> Server:
    return service.init(tmp_path / "server", {"host": "fl.example.org"})


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fedstill: ") and error.count("\n") == 1, error
    return error


def test_a_server_is_made_with_secrets_that_only_its_user_reads(made: Server) -> None:
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    keys = {place.name: stat.S_IMODE(place.stat().st_mode) for place in made.folder.rglob("*.key")}
    assert keys == {"ca.key": 0o600, "server.key": 0o600}
    certificate = x509.load_pem_x509_certificate(made.certificates.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


@pytest.mark.parametrize("knows", [True, False])
def test_who_may_use_the_inner_port_is_said_where_the_system_cannot_tell(
    knows: bool, made: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink = pytest.importorskip("fedstill.engines.flower.superlink", reason="needs Flower")
    monkeypatch.setattr(superlink, "KNOWS_USERS", knows)
    monkeypatch.setattr(superlink, "start", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    monkeypatch.setattr(service, "_listens_soon", lambda *_: True)
    monkeypatch.setattr(service, "signal", types.SimpleNamespace(SIGTERM=15, SIGINT=2, signal=lambda *_: None))
    made.settings = made.settings.model_copy(update={"proxy": "nginx"})
    said = list[str]()
    service.start(made, said.append)
    assert sum("whoever has an account on this machine can start runs" in line for line in said) == (not knows)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--host is missing"),
        (("--host", "fl.example.org:9443"), "it must be a host name or an IP address, without a port"),
        (("--host", "a b"), "it must be a host name or an IP address, without a port"),
        (("--host", "x; return 200"), "it must be a host name"),
        (("--host", "a", "--port", "0"), "--port is 0"),
        (("--host", "a", "--port", "9444"), "--port and --inner-port are both 9444"),
        (("--host", "a", "--bind", "everywhere"), "--bind is 'everywhere'"),
        (("--host", "a", "--proxy", "apache"), "--proxy is 'apache'"),
        (("--host", "a", "--days", "0"), "--days is 0"),
    ],
)
def test_a_wrong_flag_makes_no_server(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, "server", "init", str(tmp_path / "s"), *flags)
    assert not (tmp_path / "s").exists()


def test_an_address_of_ipv6_has_brackets_where_a_port_follows(tmp_path: Path) -> None:
    made = service.init(tmp_path / "six", {"host": "2001:DB8::1", "bind": "::"})
    assert made.address == "[2001:db8::1]:9443"
    assert roster.read_invitation(made.invite(0, None)).address == made.address
    assert "listen [::]:9443 ssl" in (made.folder / "nginx.conf").read_text()


@pytest.mark.parametrize("name", ["with space", 'a"b', "a;b", "a$b", "a%b"])
def test_a_folder_that_units_cannot_name_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "choose another folder" in refusal(capsys, "server", "init", str(tmp_path / name), "--host", "a")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("status nowhere", "nowhere is no folder of a server; make one with 'fedstill server init'"),
        ("start", "the server's folder comes first"),
        ("strat FOLDER", "there is no command 'server strat'; did you mean start?"),
        ("invite FOLDER", "no client is named"),
        ("invite FOLDER one", "CLIENT is 'one'; it must be a whole number"),
        ("invite FOLDER 0 --records", "--records needs a value"),
        ("invite FOLDER 0 --records 0", "--records is 0"),
        ("invite FOLDER 0 --record 5", "there is no flag --record; did you mean --records?"),
        ("invite FOLDER --records 5", "no client is named"),
        ("invite --records=many FOLDER 0", "--records is 'many'; it must be a whole number"),
        ("accept FOLDER --replace 0", "usage: fedstill server accept"),
        ("accept --replace FOLDER 0 key", "the server does not run"),
        ("status FOLDER --json=maybe", "--json is 'maybe'; it must be True or False"),
        ("accept FOLDER 0", "usage: fedstill server accept"),
        ("accept FOLDER 0 key", "the server does not run"),
        ("remove FOLDER 0", "the server does not run"),
        ("run FOLDER", "give an experiment file, or --extend"),
        ("run FOLDER nowhere.yaml", "--out is missing"),
        ("run FOLDER nowhere.yaml --out x", "nowhere.yaml"),
        ("run FOLDER pyproject.toml --out x --clients 3", "--clients goes with --extend"),
        ("run FOLDER pyproject.toml --out x", "the server does not run"),
        ("run FOLDER pyproject.toml --out x --wait -1", "--wait is -1"),
        ("init FOLDER --host a", "exists already"),
    ],
)
def test_a_wrong_word_is_a_sentence(
    words: str, sentence: str, made: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert sentence in refusal(capsys, "server", *words.replace("FOLDER", str(made.folder)).split())


def test_settings_of_a_server_that_are_wrong_are_a_sentence(made: Server) -> None:
    for text, sentence in [("port = ", "can't be read as TOML"), ("port = 1", "is invalid"), ("\0", "can't be read")]:
        (made.folder / "server.toml").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            Server(made.folder)


def test_the_state_of_a_server_that_does_not_run(made: Server, capsys: pytest.CaptureFixture[str]) -> None:
    made.invite(1, 500)
    main(["server", "status", str(made.folder), "--json"])
    state = json.loads(capsys.readouterr().out)
    assert (state["running"], state["invited"], state["sites"], state["runs"]) == (False, [1], [], [])
    assert state["certificate_days"] in (364, 365)
    main(["server", "status", str(made.folder)])
    assert "client 1: invited, its key has not been accepted yet" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["server", "status", str(made.folder), "--check"])
    assert stopped.value.code == 1 and "not running" in capsys.readouterr().out
    main(["server", "stop", str(made.folder)])
    assert "does not run" in capsys.readouterr().out


def trusts(authority: str, made: Server) -> bool:
    """Whether a client with this authority accepts the server's certificate."""
    client, inner = ssl.create_default_context(cadata=authority), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inner.load_cert_chain(made.certificates.certificate, made.certificates.key)
    ours, theirs = socket.socketpair()
    buffers = [ssl.MemoryBIO() for _ in range(4)]
    one = client.wrap_bio(buffers[0], buffers[1], server_hostname="fl.example.org")
    other = inner.wrap_bio(buffers[2], buffers[3], server_side=True)
    ours.close()
    theirs.close()
    done = [False, False]
    for _ in range(10):
        for number, end in enumerate((one, other)):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
        buffers[2].write(buffers[1].read())
        buffers[0].write(buffers[3].read())
    return all(done)


def test_a_new_authority_cuts_no_site_off(made: Server) -> None:
    def invited() -> str:
        return roster.read_invitation(made.invite(0, None)).authority

    first = invited()
    assert trusts(first, made)
    service.renew(made, authority=False)
    assert trusts(first, made) and invited() == first
    service.renew(made, authority=True)
    both = invited()
    assert trusts(first, made) and trusts(both, made)  # sites of before, and those that have joined again
    service.renew(made, authority=False)
    last = invited()
    assert not trusts(first, made) and trusts(both, made) and trusts(last, made)
    assert len(x509.load_pem_x509_certificates(last.encode())) == 1
    other = service.init(made.folder.parent / "other", {"host": "fl.example.org"})
    assert not trusts(last, other)


def test_a_renewal_without_the_authority_s_key_is_a_sentence(made: Server) -> None:
    key = made.certificates.authority_key
    before = made.certificates.certificate.read_bytes()
    key.rename(key.with_suffix(".away"))
    with pytest.raises(ValueError, match="bring the authority's key back"):
        service.renew(made, authority=False)
    shutil.copy(made.certificates.key, key)
    with pytest.raises(ValueError, match="is not the key of the last certificate"):
        service.renew(made, authority=False)
    assert made.certificates.certificate.read_bytes() == before


def test_a_certificate_that_has_expired_is_shown(made: Server, capsys: pytest.CaptureFixture[str]) -> None:
    made.certificates.sign(["fl.example.org"], -1)
    main(["server", "status", str(made.folder)])
    assert "certificate: EXPIRED" in capsys.readouterr().out


@pytest.mark.parametrize(("days", "code"), [(7, None), (-1, 1)])
def test_a_server_that_runs_is_well_until_its_certificate_expires(
    days: float, code: int | None, made: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.certificates.sign(["fl.example.org"], days)
    monkeypatch.setattr(service, "is_running", lambda _: True)
    monkeypatch.setattr(service, "listens", lambda _: True)
    monkeypatch.setattr(service, "_listed", lambda *_: [])
    with pytest.raises(SystemExit) if code else nullcontext() as stopped:
        main(["server", "status", str(made.folder), "--check"])
    assert code is None or stopped.value.code == code


def test_a_server_that_has_just_started_is_waited_for(made: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SuperLink listens some seconds after its process has the lock."""
    answers = iter([False, False, True])
    monkeypatch.setattr(service, "is_running", lambda _: True)
    monkeypatch.setattr(service, "listens", lambda _: next(answers))
    assert service.ready(made) and next(answers, None) is None
    monkeypatch.setattr(service, "listens", lambda _: False)
    assert not service.ready(made, seconds=0.1)
    monkeypatch.setattr(service, "is_running", lambda _: False)
    assert not service.ready(made)


FLWR = """#!{python}
import sys, time, pathlib
words = sys.argv[1:]
place = pathlib.Path({folder!r})
with (place / "calls").open("a") as file:
    print(*words, file=file)
if words[0] == "run":
    print('{{"run-id": "77"}}')
elif words[0] == "log":
    print((place / "output").read_text(), end="")
elif words[0] == "list":
    states = (place / "states").read_text().split()
    (place / "states").write_text(" ".join(states[1:] or states))
    print('{{"runs": [{{"status": "' + states[0] + '"}}]}}')
"""


@pytest.fixture
def flower(made: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command ``flwr`` that says what the files beside it say, at a server that seems to run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "flwr").write_text(FLWR.format(python=sys.executable, folder=str(folder)))
    (folder / "flwr").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(Server, "environment", environment)
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.setattr(service, "is_running", lambda _: True)
    monkeypatch.setattr(service, "listens", lambda _: True)
    monkeypatch.setattr(submit, "_POLL", 0.0)
    return folder


def outcome(made: Server, flower: Path, states: str, *output: str) -> tuple[list[str], str]:
    """The lines shown, and the reason of a failure."""
    (flower / "states").write_text(states)
    (flower / "output").write_text("".join(f"{line}\n" for line in output))
    file = made.folder / "run.yaml"
    file.write_text("method: fedavg\n")
    shown: list[str] = []
    try:
        submit.run(made, file, SubmitFlags(out=made.folder / "out"), shown.append)
    except submit.Ended as error:
        return shown, str(error)
    return shown, ""


@pytest.mark.slow
def test_a_run_s_own_lines_are_shown_and_its_end_is_told(made: Server, flower: Path) -> None:
    lines = ("Using SuperLink: here", "\x1b[92mINFO \x1b[0m:      Start", "asking 2 clients", "accuracy 57 %")
    done = "finished:completed finished:completed"
    assert outcome(made, flower, done, *lines) == (["asking 2 clients", "accuracy 57 %"], "")
    settings = submit.settings_of(made, made.folder / "run.yaml", SubmitFlags(out=made.folder / "out"))
    (call, *_) = (flower / "calls").read_text().splitlines()
    assert f'roster="{made.roster}"' in call and f'out="{settings["out"]}"' in call


def test_without_flags_nothing_limits_a_run(made: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (made.folder / "run.yaml").write_text("method: fedavg\n")
    settings = submit.settings_of(made, made.folder / "run.yaml", SubmitFlags(out=made.folder / "out"))
    assert (settings["at-a-time"], settings["max-records"]) == (0, 0)  # the convention of the app's TOML
    for flag in ("--at-a-time", "--max-records", "--clients"):
        with pytest.raises(SystemExit) as stop:
            main(["server", "run", str(made.folder), "run.yaml", "--out", "out", flag, "0"])
        assert stop.value.code == 2 and f"{flag} is 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_gives_its_sentence_and_no_trace(made: Server, flower: Path) -> None:
    failed = ("asking 2 clients", f"{FAILED}only 1 of 2 clients replied", "ERROR: ServerApp raised an exception",
              "Traceback (most recent call last):", "  File ...", "TooFewReplies: only 1 of 2")  # fmt: skip
    assert outcome(made, flower, "finished:failed", *failed) == (["asking 2 clients"], "only 1 of 2 clients replied")
    lost = ("ERROR: ServerApp raised an exception", "Traceback (most recent call last):", "KeyError: 'x'")
    shown, reason = outcome(made, flower, "finished:failed", *lost)
    assert shown == list(lost)  # fedstill's own mistake: everything is shown
    assert reason == "the run ended as finished:failed; repeat the command to resume"


@pytest.mark.slow
def test_a_stream_that_breaks_is_taken_up_without_repetition(made: Server, flower: Path) -> None:
    states = "running running finished:completed finished:completed"
    assert outcome(made, flower, states, "one", "two") == (["one", "two"], "")
    assert sum(line.startswith("log ") for line in (flower / "calls").read_text().splitlines()) == 3


@pytest.mark.slow
def test_an_interruption_stops_the_run(made: Server, flower: Path) -> None:
    (flower / "states").write_text("running")
    (flower / "output").write_text("one\n")
    (made.folder / "run.yaml").write_text("method: fedavg\n")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit.run(made, made.folder / "run.yaml", SubmitFlags(out=made.folder / "out"), interrupt)
    assert (flower / "calls").read_text().splitlines()[-1] == "stop 77 server"


@pytest.mark.slow
def test_the_command_says_how_the_run_ended(made: Server, flower: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (flower / "states").write_text("finished:failed")
    (flower / "output").write_text(f"{FAILED}client 0 is away\n")
    (made.folder / "run.yaml").write_text("method: fedavg\n")
    words = ["server", "run", str(made.folder), str(made.folder / "run.yaml"), "--out", str(made.folder / "out")]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 1
    assert capsys.readouterr().err == "fedstill: client 0 is away\n"
    (flower / "states").write_text("finished:completed")
    main(words)
    assert str(made.folder / "out") in capsys.readouterr().out


def test_keys_are_registered_at_this_server(made: Server, flower: Path, tmp_path: Path) -> None:
    made.invite(0, None)
    key = site_key(tmp_path / "site.key", 0).read_text()
    with pytest.raises(ValueError, match="Flower does not register the key"):
        roster.accept(made.roster, 0, key, made.supernode)
    (call,) = (flower / "calls").read_text().splitlines()
    assert call.split()[:2] == ["supernode", "register"]
    assert call.split()[3:] == ["server", "--name", "site-0", "--format", "json"]


def test_a_key_in_one_word_is_no_file(
    made: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One key in eight has no slash, so that its line would be one name, and a longer one than files may have."""
    monkeypatch.setattr(service, "is_running", lambda _: True)
    monkeypatch.setattr(service, "listens", lambda _: True)
    line = f"ecdsa-sha2-nistp384 {'A' * 256}"
    assert "is not a public key of OpenSSH" in refusal(capsys, "server", "accept", str(made.folder), "0", line)


def test_flower_s_output_has_no_colours_in_a_notebook(made: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")  # what a notebook's kernel and many CI services set
    printing = [sys.executable, "-c", 'import rich; rich.print_json(\'{"node-id": "7"}\')']  # as Flower prints JSON
    plain, coloured = (
        subprocess.run(printing, env=environment, capture_output=True, text=True, check=True).stdout
        for environment in (made.environment, os.environ)
    )
    assert json.loads(plain) == {"node-id": "7"} and "\x1b[" in coloured


def test_files_of_a_newer_format_are_refused_in_one_sentence(made: Server, tmp_path: Path) -> None:
    invite, policy = made.invite(0, None), tmp_path / "policy.toml"
    policy.write_text('client = 0\ndata = "d"\nstate = "s"\nmethods = []\n')
    reads: list[tuple[Path, Callable[[], object]]] = [
        (made.folder / "server.toml", lambda: Server(made.folder)),
        (made.roster, lambda: roster.read(made.roster)),
        (invite, lambda: roster.read_invitation(invite)),
        (policy, lambda: SitePolicy.read(policy)),
    ]
    for place, read in reads:
        text = place.read_text()
        place.write_text(f"format = 1\n{text}")
        assert read() is not None
        for number, sentence in (
            ("2", "has the format 2; this fedstill reads formats up to 1, so install the newer fedstill that wrote it"),
            ("0", "has the format 0; it must be a number from 1 to 1"),
            ('"1"', "has the format '1'; it must be a number from 1 to 1"),
        ):
            place.write_text(f"format = {number}\nunheard = 1\n{text}")
            with pytest.raises(ValueError) as refused:
                read()
            assert str(refused.value) == f"{place} {sentence}"
        place.write_text(text)


@pytest.mark.parametrize("words", [("invite", "0"), ("renew",)])
def test_a_damaged_authority_is_one_sentence(
    words: tuple[str, ...], made: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    made.certificates.authority.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    error = refusal(capsys, "server", words[0], str(made.folder), *words[1:])
    assert "ca.crt is damaged: its authority is no certificate in PEM" in error and "bring it back" in error
