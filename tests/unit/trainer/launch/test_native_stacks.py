"""Stacks with native frames: gdb on a real process, where both are permitted, and programs of the test's own."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from ingot.trainer.launch import native_stacks
from ingot.trainer.resilience.heartbeat import Beat, Phase

BEAT = Beat(pid=7, count=9, phase=Phase.STEP, step=7, since=5.0, stacks=3, collectives=4, longest=(0.0,) * len(Phase))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(py_spy=TEXT, ...)`: a PATH with these shell scripts alone; returns the folder of stacks."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def install(**scripts):
        for name, text in scripts.items():
            program = tmp_path / "bin" / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
        return tmp_path

    return install


def test_py_spy_is_asked_about_all_ranks_in_a_way_that_it_accepts(installed):
    """py-spy refuses --native with --nonblocking."""
    place = installed(py_spy='echo "Thread $*"', gdb="echo Thread of gdb")
    native_stacks.add_native_stacks({0: BEAT, 1: replace(BEAT, pid=8)}, place, [])
    assert "(py-spy):\nThread dump --native --pid 7\n" in (place / "rank-0.stacks").read_text()
    text = (place / "rank-1.stacks").read_text()
    assert "Thread dump --native --pid 8\n" in text and "gdb" not in text


def test_gdb_is_asked_about_ranks_that_did_not_answer_if_py_spy_cannot_read_them(installed):
    place = installed(py_spy="echo Thread; exit 1", gdb='echo "Thread $*"')
    native_stacks.add_native_stacks({0: BEAT, 1: replace(BEAT, pid=8)}, place, [1])
    assert "(gdb):\nThread -p 8 -batch -nx -ex thread apply all backtrace" in (place / "rank-1.stacks").read_text()
    assert not (place / "rank-0.stacks").exists()


def test_a_debugger_that_may_not_attach_adds_nothing(installed):
    place = installed(gdb="echo ptrace: Operation not permitted.")
    native_stacks.add_native_stacks({0: BEAT}, place, [0])
    assert not (place / "rank-0.stacks").exists()


def test_time_and_size_are_limited_and_the_ranks_that_did_not_answer_come_first(installed, monkeypatch):
    monkeypatch.setattr(native_stacks, "_PROGRAMS", [replace(native_stacks._PROGRAMS[0], seconds=0.5)])
    monkeypatch.setattr(native_stacks, "_BYTES", 20)
    place = installed(py_spy='[ "$4" = 9 ] && /bin/sleep 2; echo "Thread $4 and more than that"')
    native_stacks.add_native_stacks({0: BEAT, 1: replace(BEAT, pid=9), 2: replace(BEAT, pid=8)}, place, [2])
    assert (place / "rank-2.stacks").read_text() == "\nwith native frames (py-spy):\nThread 8 and more th"
    assert not (place / "rank-1.stacks").exists()


@pytest.mark.skipif(not shutil.which("gdb"), reason="needs gdb")
def test_gdb_shows_the_native_frames_of_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(native_stacks, "_PROGRAMS", [replace(native_stacks._PROGRAMS[1], seconds=60.0)])
    code = "import signal; print('up', flush=True); signal.sigwait([signal.SIGWINCH])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as waits:
        try:
            assert waits.stdout is not None and waits.stdout.readline() == b"up\n"
            alone = ["gdb", "-p", str(waits.pid), "-batch", "-nx"]
            if "not permitted" in subprocess.run(alone, capture_output=True, text=True).stderr:
                pytest.skip("gdb may not attach to a process here")
            native_stacks.add_native_stacks({0: replace(BEAT, pid=waits.pid)}, tmp_path, [0])
        finally:
            waits.kill()
    text = (tmp_path / "rank-0.stacks").read_text()
    assert "(gdb):" in text and "sigwait" in text and "#0" in text
