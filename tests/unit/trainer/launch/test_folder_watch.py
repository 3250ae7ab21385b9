"""The watch over a run folder that vanishes, fails, or does not answer. Real mounts: tests/board/rows_mount.py."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.expect import refused

from ingot.errors import ResourceError
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.files import CheckpointFiles
from ingot.trainer.launch import folder_watch
from ingot.trainer.launch.folder_watch import FolderWatch

LOST, SILENT = "E-RUN-FOLDER-LOST", "E-RUN-FOLDER-SILENT"
# A launcher whose touch of the folder never comes back, with a job that has one process.
LAUNCHER = """
import os, sys, subprocess, threading, time
from pathlib import Path
from ingot.schema.launch import Launch
from ingot.trainer.launch.folder_watch import FolderWatch
os.utime = lambda *_: time.sleep(60)
job = subprocess.Popen(["sleep", "60"])
with FolderWatch(Path(sys.argv[1]), Launch(watchdog_other_seconds=0.3)) as watch:
    watch.kills(lambda: (job.kill(), job.wait(), print("killed", flush=True)))
    time.sleep(60)
"""


def answers(code):
    def utime(*_):
        raise OSError(code, os.strerror(code))

    return utime


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def test_a_folder_that_is_there_is_enough(root):
    with FolderWatch(root, Launch()) as watch:
        watch.require(writable=True)


def test_a_folder_that_is_gone_or_another_one_is_lost(root):
    """A folder below a mount point has another identity."""
    with FolderWatch(root, Launch()) as watch:
        root.rename(root.with_name("aside"))
        with refused(LOST, run=str(root), why="nothing is there"):
            watch.require()
        root.mkdir()
        with refused(LOST, why="another folder is there"):
            watch.require()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOTCONN])
def test_a_folder_that_fails_is_lost(root, code, monkeypatch):
    monkeypatch.setattr(folder_watch, "_STAYS_SECONDS", 0.01)
    with FolderWatch(root, Launch()) as watch:
        monkeypatch.setattr(os, "utime", answers(code))
        watch.require()
        with refused(LOST, why=os.strerror(code)):
            watch.require(writable=True)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_without_times_or_room_is_none_that_is_lost(root, code, monkeypatch):
    with FolderWatch(root, Launch()) as watch:
        monkeypatch.setattr(os, "utime", answers(code))
        assert watch.require(writable=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT])
def test_an_error_that_may_pass_counts_if_it_stays(root, code, monkeypatch):
    codes, fstat, utime = [code, code], os.fstat, os.utime
    monkeypatch.setattr(folder_watch, "_AGAIN_SECONDS", 0.01)

    def once(real):
        return lambda *args: answers(codes.pop())() if codes else real(*args)

    with FolderWatch(root, Launch()) as watch:
        monkeypatch.setattr(os, "fstat", once(fstat))
        assert [watch.require() for _ in range(3)] == [False, False, True]
        monkeypatch.setattr(os, "fstat", fstat)
        codes[:] = [code, code]
        monkeypatch.setattr(os, "utime", once(utime))
        assert watch.require(writable=True) and not codes
        monkeypatch.setattr(os, "fstat", answers(code))
        assert not watch.require()
        monkeypatch.setattr(folder_watch, "_STAYS_SECONDS", 0.0)
        with refused(LOST, why=os.strerror(code)):
            watch.require()
        monkeypatch.setattr(os, "fstat", fstat)


def test_a_watch_needs_no_other_thread_while_the_job_runs(root, monkeypatch):
    touched = threading.Semaphore(0)
    monkeypatch.setattr(os, "utime", lambda *_: touched.release())
    monkeypatch.setattr(folder_watch, "_EVERY_SECONDS", 0.01)
    with FolderWatch(root, Launch()) as watch, monkeypatch.context() as full:
        full.delattr(threading.Thread, "start")
        for _ in range(3):
            assert touched.acquire(timeout=20)
        assert watch.require(writable=True)


def test_what_the_thread_finds_is_heard_of_unless_it_may_pass(root, monkeypatch):
    begun, go_on, codes = threading.Semaphore(0), threading.Semaphore(0), [errno.EIO, errno.EROFS]

    def utime(*_):
        begun.release()
        go_on.acquire()
        code = codes.pop(0) if codes else errno.EROFS
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "utime", utime)
    monkeypatch.setattr(folder_watch, "_EVERY_SECONDS", 0.01)
    with FolderWatch(root, Launch()) as watch:
        assert begun.acquire(timeout=20)
        go_on.release()
        assert begun.acquire(timeout=20)
        watch.require()  # an input/output error may pass
        go_on.release(1000)
        deadline = time.monotonic() + 20
        with refused(LOST, why=os.strerror(errno.EROFS)):
            while time.monotonic() < deadline:
                watch.require()
                time.sleep(0.01)


def test_a_folder_that_does_not_answer_ends_the_launcher_and_its_job(root):
    command = [sys.executable, "-c", LAUNCHER, str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (ResourceError.exit_code, "killed\n")
    assert ended.stderr.startswith(f"{SILENT}  the run folder {root} has not answered")
    assert "rule:" in ended.stderr and "fix:" in ended.stderr and f"ingot explain {SILENT}" in ended.stderr


def test_a_folder_that_answers_late_is_none_that_is_silent(root, monkeypatch):
    """Each of four touches lasts for four looks of half a second, by a clock that does not go on otherwise."""
    touched, late, ended, now, reads, left = threading.Semaphore(0), threading.Semaphore(0), [], [0.0], [0], [4]

    def monotonic():
        if reads[0]:
            now[0] += 0.5
            reads[0] -= 1
            if not reads[0]:
                late.release()
        return now[0]

    def utime(*_):
        if left[0]:
            left[0], reads[0] = left[0] - 1, 8  # two for each look
            assert late.acquire(timeout=20)
        touched.release()

    monkeypatch.setattr(os, "utime", utime)
    monkeypatch.setattr(folder_watch, "time", SimpleNamespace(monotonic=monotonic))
    for name in ("_EVERY_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(folder_watch, name, 0.01)
    with FolderWatch(root, Launch(watchdog_other_seconds=3), end=ended.append):
        for _ in range(5):  # longer than the limit, all together
            assert touched.acquire(timeout=20)
    assert ended == []


def test_an_attempt_saves_nothing_into_a_folder_without_its_run_file(root):
    root.mkdir()
    save = CheckpointFiles(RunFolder(root), 4, epoch=1)
    for act in (lambda: save.make_folder([8]), save.require_newest):
        with refused(LOST, run=str(root), why="its run file is not there"):
            act()
    assert list(root.iterdir()) == []


def test_a_save_that_meets_an_error_that_may_pass_fails_alone(root, monkeypatch):
    root.mkdir()
    save = CheckpointFiles(RunFolder(root), 4, epoch=1)
    with monkeypatch.context() as failing:
        failing.setattr(Path, "stat", answers(errno.ETIMEDOUT))
        with refused("E-CKPT-WRITE"):
            save.require_newest()
