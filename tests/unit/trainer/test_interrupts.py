"""Signals to a rank without a supervisor, and to the processes around it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.expect import uninterrupted

from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import SAVING
from ingot.trainer.interrupts import _launched, signals_ask
from ingot.trainer.launch.stopping import Stopping
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS, StopRequests


@pytest.fixture(autouse=True)
def no_signal_is_ignored():
    """A program that nohup started ignores SIGHUP, and then the run does as well."""
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    for number, handler in before:
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python runs the handler between two instructions


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_asks_once_and_the_handlers_return(tmp_path, number):
    before, lines = [signal.getsignal(each) for each in STOP_SIGNALS], []
    with uninterrupted(), signals_ask(RunFolder(tmp_path), Launch(), lines.append) as requests:
        assert requests.current() is None
        interrupt(number)
        assert requests.current().reason == number.name
        interrupt(signal.SIGTERM)  # a scheduler sends it after its warning
        assert requests.current().reason == number.name
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert [line.split()[0] for line in lines] == ["stopping", "still"]


@pytest.mark.parametrize("is_ending", [False, True])
def test_the_supervisor_says_what_a_second_ctrl_c_does(tmp_path, is_ending):
    """Also when the ranks have saved already, as for a planned restart."""
    folder, lines = RunFolder(tmp_path), []
    stopping = Stopping(folder, StopRequests(None, Launch(), time.monotonic()), lines.append)
    stopping.signal(signal.SIGTERM)
    assert not stopping.is_over(is_ending=is_ending)
    (line,) = lines
    assert line.startswith("stopping") and "; a second Ctrl-C stops now" in line


def test_a_second_ctrl_c_waits_for_a_checkpoint_and_a_third_does_not(tmp_path):
    folder, lines = RunFolder(tmp_path), []
    (folder.checkpoints / f"{SAVING}step-00000008").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), signals_ask(folder, Launch(), lines.append):
        interrupt()
        interrupt()
        assert len(lines) == 2
        interrupt()
    (folder.checkpoints / f"{SAVING}step-00000008").rmdir()
    with pytest.raises(KeyboardInterrupt), signals_ask(folder, Launch(), lines.append):
        interrupt(signal.SIGTERM)
        assert len(lines) == 3
        interrupt()
    assert len(lines) == 3


def test_in_a_notebook_ctrl_c_ends_the_cell(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with signals_ask(RunFolder(tmp_path), Launch(), print) as requests:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert requests.current() is None
        interrupt(signal.SIGTERM)
        assert requests.current().reason == "SIGTERM"


def test_a_rank_of_torchrun_counts_from_the_start_of_torchrun(fork_ranks, monkeypatch):
    """The parent of a forked rank, this process, has imported torch before."""

    def age(rank, ranks):
        moments = [time.monotonic(), _launched(), time.monotonic()]
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        return moments, _launched()

    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    (((before, alone, after), under_torchrun),) = fork_ranks(age, 1)
    assert before <= alone <= after
    assert under_torchrun == pytest.approx(started, abs=0.1) and started < before - 0.2
