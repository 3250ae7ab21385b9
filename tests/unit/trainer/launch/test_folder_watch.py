"""The watch over a run folder that vanishes, fails, or does not answer. Real mounts: tests/board/rows_mount.py."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
from tests.expect import refused

from ingot.errors import ResourceError
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.files import CheckpointFiles
from ingot.trainer.launch.folder_watch import FolderWatch

LOST, SILENT = "E-RUN-FOLDER-LOST", "E-RUN-FOLDER-SILENT"
SHORT = Launch(watchdog_other_seconds=0.3)
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
    with FolderWatch(root, Launch()) as watch:
        monkeypatch.setattr(os, "utime", answers(code))
        watch.require()
        with refused(LOST, why=os.strerror(code)):
            watch.require(writable=True)


def test_a_file_system_without_times_of_folders_is_none_that_is_lost(root, monkeypatch):
    with FolderWatch(root, Launch()) as watch:
        monkeypatch.setattr(os, "utime", answers(errno.EPERM))
        watch.require(writable=True)


def test_what_the_thread_finds_is_heard_of_unless_it_may_pass(root, monkeypatch):
    touched, codes = threading.Semaphore(0), [errno.EIO, errno.EROFS]

    def utime(*_):
        touched.release()
        code = codes.pop(0) if codes else errno.EROFS
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "utime", utime)
    with FolderWatch(root, SHORT) as watch:
        touched.acquire(timeout=20)
        watch.require()  # an input/output error may pass
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
    touched, ended = threading.Semaphore(0), []

    def utime(*_):
        time.sleep(0.25)
        touched.release()

    monkeypatch.setattr(os, "utime", utime)
    with FolderWatch(root, Launch(watchdog_other_seconds=0.9), end=ended.append):
        for _ in range(4):  # longer than the limit, all together
            assert touched.acquire(timeout=20)
    assert ended == []


def test_an_attempt_saves_nothing_into_a_folder_without_its_run_file(root):
    root.mkdir()
    save = CheckpointFiles(RunFolder(root), 4, epoch=1)
    for act in (lambda: save.make_folder([8]), save.require_newest):
        with refused(LOST, run=str(root), why="its run file is not there"):
            act()
    assert list(root.iterdir()) == []
