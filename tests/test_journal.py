import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from small import room

from fedstill.base import files
from fedstill.runs.journal import Journal, Refusal


def test_replies_refusals_and_bytes_survive_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.count_sent(0, 1, 10)
    journal.count_sent(0, 2, 10)
    journal.store_reply(0, "update", 1, b"hello")
    journal.store_refusal(0, Refusal(2, "update", 1, "late"), 3)
    for opened in (journal, Journal(tmp_path)):
        assert opened.read_reply(0, "update", 1) == b"hello"
        assert opened.replies_to(0, "update") == ([1], [Refusal(2, "update", 1, "late")])
        assert (opened.bytes_down, opened.bytes_up) == (20, 8)
        assert opened.refusals() == [Refusal(2, "update", 1, "late")]


def test_a_crash_between_a_reply_and_its_line_loses_no_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.store_reply(0, "update", 1, b"hello")
    journal.store_refusal(0, Refusal(2, "update", None, "late"), 3)
    journal.flush()
    (tmp_path / "meter.jsonl").unlink()
    journal = Journal(tmp_path)
    assert journal.bytes_up == 0
    journal.replies_to(0, "update")
    journal.replies_to(0, "update")
    assert journal.bytes_up == 8


def test_every_message_counts_even_if_a_client_is_asked_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for reply in (b"first", b"second!"):
        journal.count_sent(0, 1, 10)
        journal.count_sent(0, 2, 10)
        journal.store_refusal(0, Refusal(2, "update", None, "bad"), 3)
        journal.forget_refusals(0, "update")
        journal.store_reply(0, "update", 1, reply)
        journal.refuse_reply(0, Refusal(1, "update", None, "too large"))  # the same message
        journal.forget_refusals(0, "update")
    journal.store_reply(0, "update", 2, b"good")
    journal.flush()
    for opened in (journal, Journal(tmp_path)):
        opened.replies_to(0, "update", size=10)
        assert (opened.bytes_down, opened.bytes_up) == (40, 5 + 7 + 2 * 3 + 4)


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.count_sent(0, 1, 10)
    with (tmp_path / "meter.jsonl").open("a") as file:
        file.write('{"exchange": 0, "cli')
    journal = Journal(tmp_path)
    journal.count_sent(0, 2, 7)
    assert Journal(tmp_path).bytes_down == 17


@pytest.mark.parametrize("name", ["meter.jsonl", "spent.jsonl"])
def test_every_change_of_a_line_but_the_loss_of_the_last_is_noticed(name: str, tmp_path: Path) -> None:
    """A run of one request has no checkpoint, whose seal would notice it."""
    journal = Journal(tmp_path)
    for client in range(3):
        journal.count_sent(0, client, 10 + client)
        journal.store_releases(0, client, [])
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    changed = lines[1].replace(b'"client": 1', b'"client": 7')
    assert changed != lines[1]
    for damaged in (
        [lines[0], changed, lines[2]],
        [lines[1], lines[2]],
        [lines[0], lines[2]],
        [*lines, lines[2]],
        [lines[1], lines[0], lines[2]],
        [lines[0], lines[1].split(b', "link"')[0] + b"}\n", lines[2]],
    ):
        (tmp_path / name).write_bytes(b"".join(damaged))
        with pytest.raises(files.Damaged, match=f"{name} is damaged .* delete {tmp_path.parent} and"):
            Journal(tmp_path).releases()
    (tmp_path / name).write_bytes(b"".join(lines[:2]))
    assert Journal(tmp_path).bytes_down == (21 if name == "meter.jsonl" else 33)


def test_a_request_whose_line_was_lost_is_counted_again_if_there_is_its_reply(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for client in range(3):
        journal.count_sent(0, client, 10)
        journal.store_reply(0, "update", client, b"hello")
    journal.flush()
    place = tmp_path / "meter.jsonl"
    place.write_bytes(b"".join(place.read_bytes().splitlines(keepends=True)[:3]))
    journal = Journal(tmp_path)
    journal.replies_to(0, "update", None, 10)
    for opened in (journal, Journal(tmp_path)):
        assert (opened.bytes_down, opened.bytes_up) == (30, 15)


def test_seconds_go_on_where_the_last_message_left_them(tmp_path: Path) -> None:
    (tmp_path / "meter.jsonl").write_text(json.dumps({"exchange": 0, "client": 0, "down": 1, "seconds": 1000.0}) + "\n")
    assert 1000 <= Journal(tmp_path).seconds < 1100


def test_old_replies_go_and_refusals_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.store_reply(0, "update", 1, b"a")
    journal.store_reply(1, "update", 1, b"b")
    journal.store_refusal(1, Refusal(2, "update", 2, "late"), 0)
    journal.store_reply(2, "update", 1, b"c")
    journal.forget_replies(first=1, before=2)
    assert sorted(f.name for f in tmp_path.glob("*/*")) == ["00001.reply", "00001.reply", "00002.refused"]
    assert journal.read_reply(0, "update", 1) == b"a"
    assert journal.read_reply(2, "update", 1) == b"c"


def test_checkpoints_replace_each_other_and_damage_is_noticed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.load_checkpoint() is None
    journal.save_checkpoint({"a": torch.tensor([1.0])}, {"round": 1})
    journal.save_checkpoint({"a": torch.tensor([2.0])}, {"round": 2})
    tensors, header = journal.load_checkpoint() or ({}, {})
    assert tensors["a"].tolist() == [2.0]
    assert header == {"round": 2}
    place = tmp_path / "journal" / "checkpoint"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged .* run again"):
        journal.load_checkpoint()


def test_a_reply_or_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    """Two seeds of one method ask alike, so that the places of their replies are the same."""
    for name in ("one", "other"):
        journal = Journal(tmp_path / name)
        journal.count_sent(0, 1, 10)
        journal.store_reply(0, "update", 1, name.encode())
        journal.save_checkpoint({"a": torch.zeros(1)}, {"of": name})
        journal.flush()
    for place in ("000000-update/00001.reply", "checkpoint"):
        shutil.copy(tmp_path / "other" / place, tmp_path / "one" / place)
    again = Journal(tmp_path / "one")
    with pytest.raises(files.Damaged, match="00001.reply is damaged .*delete it and run again"):
        again.read_reply(0, "update", 1)
    with pytest.raises(files.Damaged, match="checkpoint is damaged .*run again"):
        again.load_checkpoint()
    for place in ("000000-update/00001.reply", "checkpoint", "name"):
        shutil.copy(tmp_path / "other" / place, tmp_path / "one" / place)
    assert Journal(tmp_path / "one").read_reply(0, "update", 1) == b"other"


def test_a_journal_of_an_earlier_version_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "meter.jsonl").write_text(json.dumps({"exchange": 0, "client": 1, "up": 5, "seconds": 1.0}) + "\n")
    files.write_checked(tmp_path / "000000-update" / "00001.reply", b"hello", b"0/update/1/")
    for _ in range(2):
        journal = Journal(tmp_path)
        assert journal.read_reply(0, "update", 1) == b"hello"
        journal.store_reply(1, "update", 1, b"there")
        assert journal.read_reply(1, "update", 1) == b"there" and not journal.files.name.exists()


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "deep" / "file"
    files.write_bytes(place, b"old")

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="disk full"):
        files.write_bytes(place, b"new")
    assert place.read_bytes() == b"old"
    assert [f.name for f in place.parent.iterdir()] == ["file"]


def test_only_files_of_replies_are_replies(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.store_reply(0, "update", 1, b"hello")
    journal.flush()
    (tmp_path / "000000-update" / "0x.reply").touch()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "000000-update" / "00002.reply")  # reading it would wait for ever
    assert journal.replies_to(0, "update")[0] == [1]
    journal.store_reply(0, "update", 2, b"there")
    assert journal.read_reply(0, "update", 2) == b"there"


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'a'}'")):
        files.write_bytes(tmp_path / "a", b"content")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 1])
def test_lost_releases_of_finished_rounds_are_noticed(tmp_path: Path, kept: int) -> None:
    journal = Journal(tmp_path)
    for client in range(2):
        journal.store_releases(0, client, [])
    seals = journal.seals()
    Journal(tmp_path).check_seals(seals)
    spent = tmp_path / "spent.jsonl"
    spent.write_bytes(b"".join(spent.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(files.Damaged, match="spent.jsonl is damaged .lines of finished rounds are missing"):
        Journal(tmp_path).check_seals(seals)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a file's size")
@pytest.mark.parametrize("chain", [False, True])
def test_a_line_for_which_there_is_no_room_leaves_the_file_as_it_was(chain: bool, tmp_path: Path) -> None:
    """A disk that fills within a line takes its first half without an error."""
    place = tmp_path / "lines.jsonl"
    lines = files.JsonLines(place, chain=chain)
    lines.append({"number": 1})
    content = place.read_bytes()
    with room(len(content) + 10), pytest.raises(OSError, match="File too large"):
        lines.append({"number": 2, "text": "x" * 100})
    assert place.read_bytes() == content
    lines.append({"number": 3})
    lines.close()
    assert [line["number"] for line in files.read_json_lines(place)] == [1, 3]
