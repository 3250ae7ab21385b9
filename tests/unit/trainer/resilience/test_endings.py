import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from ingot.errors import DataError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.endings import RankEnding, clear_endings, guarded, read_endings

GLOO_LOST = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3899"
GLOO_TIMEOUT = "[/src/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def in_child():
    """Run `work()` in a forked process, because `guarded` binds a process to its parent."""

    def run(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run


def test_a_good_end_leaves_word(folder, in_child):
    def work():
        with guarded(folder, 3):
            pass

    assert in_child(work) == 0
    assert read_endings(folder)[3].kind == ""
    clear_endings(folder)
    assert read_endings(folder) == {}


def test_an_error_comes_back_with_its_way_out(folder, in_child):
    def work():
        with guarded(folder, 0):
            raise DataError("E-SHARD-HASH", "block 3 differs", rule="as built", fix="copy it again", block=3)

    assert in_child(work) == 1
    error = read_endings(folder)[0].as_user_error()
    assert isinstance(error, DataError)
    assert (error.code, error.facts) == ("E-SHARD-HASH", {"block": 3})
    assert (error.found, error.rule, error.fix) == ("block 3 differs", "as built", "copy it again")  # as raised above


def test_a_full_disk_is_a_cause_that_no_restart_resolves(folder, in_child):
    def work():
        with guarded(folder, 0):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert in_child(work) == 1
    error = read_endings(folder)[0].as_user_error()
    assert error and (error.code, error.facts) == ("E-DISK-FULL", {"path": str(folder.root)})


def test_any_exception_is_written_down(folder, in_child):
    def work():
        with guarded(folder, 1):
            raise ValueError("shapes differ")

    assert in_child(work) == 1
    ending = read_endings(folder)[1]
    assert (ending.kind, ending.found) == ("ValueError", "shapes differ")
    assert ending.as_user_error() is None and not ending.is_echo


def test_a_killed_rank_leaves_no_word(folder, in_child):
    def work():
        with guarded(folder, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    assert read_endings(folder) == {}


def test_a_rank_whose_supervisor_is_gone_does_not_start(folder, in_child):
    gone = subprocess.Popen(["true"])
    gone.wait()

    def work():
        os.environ["INGOT_SUPERVISOR"] = str(gone.pid)
        with guarded(folder, 1):
            (folder.root / "started").touch()

    assert in_child(work) == 1
    assert not (folder.root / "started").exists()


def test_a_rank_dies_with_its_parent(tmp_path):
    """parent -> rank; the parent is killed, and the kernel kills the rank."""
    rank = f"""
import time
from ingot.trainer.resilience.endings import guarded
from ingot.schema.run_folder import RunFolder
from pathlib import Path
with guarded(RunFolder(Path({str(tmp_path)!r})), 0):
    Path({str(tmp_path / "ready")!r}).write_text(str(__import__("os").getpid()))
    time.sleep(60)
"""
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    parent = subprocess.Popen([sys.executable, "-c", launcher])
    ready = tmp_path / "ready"
    deadline = time.monotonic() + 20
    while not ready.exists() or not ready.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while os.path.exists(f"/proc/{ready.read_text()}"):  # noqa: PTH110
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "found", "echo", "timeout"),
    [
        ("RuntimeError", GLOO_LOST, True, False),
        ("RuntimeError", GLOO_TIMEOUT, True, True),
        ("DistBackendError", "NCCL error: remote process exited", True, False),
        ("ValueError", "shapes differ", False, False),
        ("DataError", "Connection closed by peer", False, False),
        ("", "", False, False),
    ],
)
def test_echoes_of_a_lost_peer_are_told_from_causes(kind, found, echo, timeout):
    ending = RankEnding(rank=0, time=0.0, kind=kind, found=found)
    assert (ending.is_echo, ending.is_timeout) == (echo, timeout)


def test_torn_or_foreign_files_are_no_endings(folder):
    folder.logs.mkdir()
    (folder.logs / "rank-0.json").write_text('{"rank": 0')
    (folder.logs / "rank-1.json").write_text('{"rank": "one"}')
    assert read_endings(folder) == {}
