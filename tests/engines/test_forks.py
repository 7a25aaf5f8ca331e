"""Programs forked for messages: nothing of one is in another, and none outlives what started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from fedstill.engines.flower.forks import Forks  # noqa: E402

pytestmark = pytest.mark.slow

PROGRAM = """
import os, random, sys, time
from pathlib import Path
from fedstill.engines.flower.forks import fork_for_each
from fedstill.engines.flower.supernode import end_with_parent
parent, seen = os.getpid(), []
def work(what, place):
    assert not seen and sys.stdin.read() == "", "something of another message is here"
    seen.append(what)
    noise = repr((what in sys.argv, os.getpid(), random.random()))
    Path(place).with_suffix(".new").write_text(noise)
    Path(place).with_suffix(".new").replace(place)
    end_with_parent(parent)
    {"fail": lambda: 1 / 0, "sleep": lambda: time.sleep(1000), "end": lambda: None}[what]()
fork_for_each(work, int(sys.argv[1]))
"""


NOISE = """
import sys
from fedstill.base import seeds
from fedstill.engines.flower.forks import fork_for_each
def work(place):
    noise = seeds.Entropy()
    with open(place, "a") as file:
        print(noise.gaussian((1,)).item(), noise.uniform((1,)).item(), file=file)
fork_for_each(work, int(sys.argv[1]))
"""


def words_of(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def ended(forks: Forks, number: int) -> int:
    """The exit code of a program, when it has ended."""
    while (code := (forks.look(), forks.code(number))[1]) is None:
        time.sleep(0.05)
    return code


def wait(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(words_of(PROGRAM))
    assert not made.look()
    wait(made.look)
    yield made
    made.close()


def start(forks: Forks, what: str, place: Path) -> tuple[int, psutil.Process]:
    """Start a program, and wait until it has begun."""
    number = forks.start(what, str(place))
    wait(place.exists)
    return number, psutil.Process(int(place.read_text().split(",")[1])) if what == "sleep" else None


def test_programs_share_no_memory(forks: Forks, tmp_path: Path) -> None:
    for what, name, code in (("end", "a", 0), ("fail", "b", 1), ("end", "c", 0)):
        assert ended(forks, start(forks, what, tmp_path / name)[0]) == code
    drawn = [(tmp_path / name).read_text().strip("()").split(", ") for name in "abc"]
    assert [row[0] for row in drawn] == ["False"] * 3
    assert all(len({row[column] for row in drawn}) == 3 for column in (1, 2))


def test_no_two_programs_draw_the_same_noise(tmp_path: Path) -> None:
    """A generator's state that was there before the fork would be the state of all, and differences free of noise."""
    forks = Forks(words_of(NOISE))
    wait(forks.look)
    started = [forks.start(str(tmp_path / "drawn")) for _ in range(20)]
    assert {ended(forks, number) for number in started} == {0}
    forks.close()
    for column in zip(*(map(float, line.split()) for line in (tmp_path / "drawn").open()), strict=True):
        assert len({*column}) == len(column) == 20


def test_a_killed_program_has_ended_and_the_others_go_on(forks: Forks, tmp_path: Path) -> None:
    (first, one), (second, other) = (start(forks, "sleep", tmp_path / name) for name in "ab")
    one.kill()
    assert ended(forks, first) == -signal.SIGKILL
    assert forks.code(second) is None
    other.kill()


def test_programs_end_with_the_process_that_forks_and_that_one_is_started_again(forks: Forks, tmp_path: Path) -> None:
    number, program = start(forks, "sleep", tmp_path / "a")
    forks.process.kill()
    assert psutil.wait_procs([program], timeout=60)[1] == []
    wait(forks.look)
    assert forks.code(number) == -1
    start(forks, "end", tmp_path / "b")


def test_a_word_that_meets_no_process_is_no_error(forks: Forks, tmp_path: Path) -> None:
    forks.process.kill()
    forks.process.wait()
    number = forks.start("end", str(tmp_path / "a"))
    assert not forks.look() and forks.code(number) == -1
    wait(forks.look)


def test_a_process_that_can_t_start_is_said() -> None:
    forks = Forks(words_of("import nothing_of_this_name"))
    with pytest.raises(ValueError, match=r"did not start \(code 1\); its output above says why"):
        wait(forks.look)
    forks.close()


OWNER = """
import os, sys, time
from fedstill.engines.flower.forks import Forks
forks = Forks([sys.executable, "-c", sys.argv[1]])
while not forks.look():
    time.sleep(0.05)
forks.start("sleep", sys.argv[2])
time.sleep(1000)
"""


def test_all_end_after_their_node_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([*words_of(OWNER), PROGRAM, str(tmp_path / "a")])
    wait((tmp_path / "a").exists)
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 2
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert psutil.wait_procs(below, timeout=60)[1] == []
