"""Signals to a rank without a supervisor, and to the processes around it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.expect import uninterrupted

from ingot.schema.run import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import SAVING
from ingot.trainer.interrupts import _launched, signals_ask
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS


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
        alone = time.monotonic() - _launched()
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        return alone, time.monotonic() - _launched(), time.monotonic() - started

    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    ((alone, under_torchrun, expected),) = fork_ranks(age, 1)
    assert alone < 0.1 < expected and under_torchrun == pytest.approx(expected, abs=0.1)
