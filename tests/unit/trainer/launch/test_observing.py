"""The keeper of the processes that observe a run: pauses, a last start, ends all at once, and signals meanwhile."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.errors import RunBusyError
from ingot.machine.processes import identity_of, is_gone
from ingot.schema.run_folder import RunFolder
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch import observing as module
from ingot.trainer.launch.observing import Observer, observing

ENDS = "import os, pathlib, sys, time; word = sys.stdin.readline(); "
SECONDS = 60.0  # which no test needs


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def signals():
    with PendingSignals() as caught:
        yield caught


def observer(code: str, name: str = "own", seconds: float = SECONDS) -> Observer:
    return Observer(name=name, arguments=("-c", code), end_seconds=seconds)


def eventually(holds) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pair(tmp_path: Path, own: str, other: str) -> str:
    """Code that ends only after the other one was asked to end, too."""
    a, b, done = (str(tmp_path / name) for name in (own, other, f"{own}.done"))
    waits = f"pathlib.Path({a!r}).touch(); [time.sleep(0.01) for _ in range(6000) if not os.path.exists({b!r})]; "
    return f"{ENDS}{waits}pathlib.Path({done!r}).touch()"


def test_all_end_at_once(folder, signals, tmp_path):
    """Each of them, and the function, ends only after the others were asked to."""
    ended = []

    def end() -> None:
        eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
        (tmp_path / "c").touch()
        ended.append(True)

    codes = [pair(tmp_path, "a", "b"), pair(tmp_path, "b", "c")]
    with observing(folder, [observer(code) for code in codes], signals, print) as at_end:
        at_end(end)
    assert ended and {path.name for path in tmp_path.glob("*.done")} == {"a.done", "b.done"}


LAUNCHER = """
import pathlib, signal, sys
from ingot.schema.run_folder import RunFolder
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.observing import Observer, observing
root, number, ends = sys.argv[1:]
code = f"{ends}os.kill(os.getppid(), {number}); time.sleep(0.3); pathlib.Path({root!r}, {number!r}).touch(); "
code += "time.sleep(10000)" if int(number) == signal.SIGINT else ""
own = Observer(name="own", arguments=("-c", code), end_seconds=1000.0)
with PendingSignals() as signals:
    try:
        with observing(RunFolder(pathlib.Path(root)), [own], signals, print):
            raise OSError("planted")
    except OSError:
        print("unwound")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_do_not_skip_the_end_and_ctrl_c_ends_its_wait(tmp_path, number):
    """The observer sends the signal to its launcher, then works on; after Ctrl-C, without end."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(int(number)), ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "unwound\n"), done.stderr
    assert number == signal.SIGINT or (tmp_path / str(int(number))).exists()


def test_an_observer_that_dies_is_started_again_and_reported_once(folder, signals, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.01)
    count = str(tmp_path / "starts")
    code = f"import sys; open({count!r}, 'a').write('x'); len(open({count!r}).read()) < 3 and sys.exit(3); {ENDS}"
    lines = []
    with observing(folder, [observer(code)], signals, lines.append):
        eventually(lambda: (tmp_path / "starts").exists() and len((tmp_path / "starts").read_text()) == 3)
    assert len(lines) == 1 and "ended with exit code 3" in lines[0] and "logs/own.log" in lines[0]
    assert (tmp_path / "starts").read_text() == "xxx"


def test_an_observer_in_its_pause_is_started_for_the_end(folder, signals, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 1000.0)
    first, word = tmp_path / "first", tmp_path / "word"
    code = f"import os; first = {str(first)!r}; os.path.exists(first) or (open(first, 'w'), os._exit(1)); {ENDS}"
    lines = []
    with observing(folder, [observer(f"{code}open({str(word)!r}, 'w').write(word)")], signals, lines.append):
        eventually(lambda: lines)
    assert word.read_text() == "end\n"


def test_the_next_leader_waits_for_no_observer(folder, signals, tmp_path):
    word, pids = tmp_path / "word", tmp_path / "pid"
    begins = f"import os; open({str(pids)!r}, 'w').write(f'{{os.getpid()}} '); "
    code = f"{begins}{ENDS}word and open({str(word)!r}, 'w'); time.sleep(99)"
    with pytest.raises(RunBusyError), observing(folder, [observer(code)], signals, print):
        eventually(lambda: pids.exists() and pids.read_text().endswith(" "))
        process = identity_of(int(pids.read_text()))
        raise RunBusyError("E-RUN-BUSY", "planted")
    assert is_gone(process) and not word.exists()


def test_an_observer_that_cannot_start_costs_a_line(folder, signals, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/none")
    lines, block = [], []
    with observing(folder, [observer("")], signals, lines.append):
        eventually(lambda: lines)
        block.append(True)
    assert block and len(lines) == 1 and "cannot be started" in lines[0]


def test_lines_of_an_observer_are_lines_of_the_launcher(folder, signals):
    lines, code = [], f"print('a line', flush=True); {ENDS}print('the last')"
    with observing(folder, [observer(code)], signals, lines.append):
        eventually(lambda: lines)
    assert lines == ["a line", "the last"]
