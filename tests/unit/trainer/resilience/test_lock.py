import json
import os
import signal
import time

import pytest
from tests.expect import refused

from ingot.trainer.resilience.lock import RunLock, is_locked


def test_a_second_owner_is_refused_and_told_who_is_first(tmp_path):
    path = tmp_path / "run" / "lock"
    with RunLock(path):
        assert is_locked(path)
        with refused("E-RUN-BUSY", run=str(tmp_path / "run")) as busy:
            RunLock(path)
        assert busy.value.exit_code == 30
    assert not is_locked(path)
    RunLock(path).release()


def test_the_kernel_releases_the_lock_of_a_killed_owner(tmp_path):
    path = tmp_path / "lock"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        RunLock(path)
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    assert os.read(read, 1) == b"x"
    with refused("E-RUN-BUSY"):
        RunLock(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_children_do_not_inherit_the_lock(tmp_path):
    import subprocess

    lock = RunLock(tmp_path / "lock")
    child = subprocess.Popen(["sleep", "60"])
    try:
        lock.release()
        assert not is_locked(tmp_path / "lock")
    finally:
        child.kill()
        child.wait()


def test_a_copy_of_the_descriptor_does_not_keep_a_released_lock(tmp_path):
    lock = RunLock(tmp_path / "lock")
    copy = os.dup(lock._fd)  # as in a child that was forked by C code
    try:
        lock.release()
        assert not is_locked(tmp_path / "lock")
    finally:
        os.close(copy)


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path):
    path = tmp_path / "lock"
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        lock = RunLock(path)
        child = os.fork()
        if child == 0:
            lock.release()  # has no effect: the lock is that of the parent
            os.write(write, f"{int(is_locked(path))} {os.getpid()}".encode())
            time.sleep(60)
        time.sleep(60)
        os._exit(0)
    held, orphan = map(int, os.read(read, 100).split())
    try:
        assert held and is_locked(path) and json.loads(path.read_text())["pid"] == owner
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.kill(orphan, 0)
        assert not is_locked(path)
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"[]", b"{}", b'{"host": 1, "pid": 2, "started": "x"}'])
def test_an_owner_that_cannot_be_read_is_still_an_owner(tmp_path, content):
    path = tmp_path / "lock"
    with RunLock(path):
        path.write_bytes(content)
        with refused("E-RUN-BUSY"):
            RunLock(path)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with refused("E-RUN-LOCK"):
        RunLock(tmp_path / "lock")
    assert (tmp_path / "precious").read_text() == "data"


def test_nothing_is_locked_where_nothing_is(tmp_path):
    assert not is_locked(tmp_path / "lock")
