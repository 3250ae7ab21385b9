"""The library of disk faults, on a small program instead of a training run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.schema.run_folder import RunFolder

from . import killpoints

# Writes a file in two parts, flushes it, renames it, flushes the folder, and appends to it without a flush.
PROGRAM = """
import os, sys
folder = sys.argv[1]
new, name = folder + "/new", folder + "/name"
fd = os.open(new, os.O_CREAT | os.O_WRONLY)
os.write(fd, b"one ")
os.write(fd, b"two ")
os.fsync(fd)
os.rename(new, name)
parent = os.open(folder, os.O_RDONLY)
os.fsync(parent)
os.write(fd, b"three")
open(os.path.dirname(folder) + "/elsewhere", "w").write("not counted")
os.mkdir(folder + "/inner")
print(open(name).read())
"""
# Writes a file to the end, one that it does not flush, and one whose name it does not flush.
OTHER_RANK = """
import os, sys
fds = {}
for name in ("kept", "cut", "lost"):
    if name == "lost":
        os.fsync(os.open(sys.argv[1], os.O_RDONLY))
    fds[name] = os.open(sys.argv[1] + "/" + name, os.O_CREAT | os.O_WRONLY)
    os.write(fds[name], name.encode())
os.fsync(fds["kept"])
print(flush=True)
input()
"""
CALLS = ["create", "write", "write", "fsync", "rename", "fsync", "write", "mkdir"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if reason := killpoints.missing():
        pytest.skip(reason)
    return killpoints.build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def play(library, tmp_path):
    """`play(do, k)` runs the program with a fault in an empty folder; returns its end."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()

    def run(do: str, k: int = 0, who: str = "rank", **more: object) -> subprocess.CompletedProcess:
        fault = killpoints.fault(folder, do, k, who=who, log=tmp_path / "calls", **more)
        top = {"LD_PRELOAD": str(library), "BOARD_TOP": str(os.getpid()), "RANK": "0"}
        command = [sys.executable, "-S", "-c", PROGRAM, str(folder.checkpoints)]
        return subprocess.run(command, env=os.environ | fault | top, capture_output=True, text=True)

    run.folder = folder.checkpoints
    run.calls = lambda: [name for name, _ in killpoints.read_calls(tmp_path / "calls")]
    return run


def test_calls_below_the_folder_are_counted_in_order(play):
    ended = play("count")
    assert (ended.returncode, ended.stdout) == (0, "one two three\n")
    assert play.calls() == CALLS
    assert killpoints.after_renames([(name, "") for name in CALLS]) == [6, 8]


@pytest.mark.parametrize("who", ["writer", "rank:1"])
def test_only_the_chosen_process_has_the_fault(play, who):
    assert play("kill", 1, who=who).returncode == 0
    assert not play.calls()


@pytest.mark.parametrize(
    ("k", "files"),
    [
        (1, {}),
        (2, {"new": ""}),
        (4, {"new": "one two "}),
        (6, {"name": "one two "}),
        (8, {"name": "one two three"}),
    ],
)
def test_a_kill_comes_before_the_call_and_keeps_what_was_done(play, k, files):
    assert play("kill", k).returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in play.folder.iterdir()} == files
    assert play.calls() == CALLS[:k]


@pytest.mark.parametrize(
    ("k", "files"),
    [
        (2, {}),  # nobody flushed the folder: the name is lost
        (6, {}),
        (7, {"name": "one two "}),
        (8, {"name": "one two "}),  # the third part was not flushed
    ],
)
def test_a_loss_of_power_takes_what_was_not_flushed(play, k, files):
    assert play("power", k).returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in play.folder.iterdir()} == files


def test_a_lost_rename_has_the_old_name_again(play):
    (play.folder / "new").write_text("")
    assert play("power", 6).returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in play.folder.iterdir()} == {"new": "one two "}


def test_a_full_disk_fails_one_call(play):
    ended = play("full", 4)  # a flush takes no room: the next call that does
    assert "No space left on device" in ended.stderr
    assert play.calls() == CALLS[:7]


def test_a_wrong_bit_is_written_without_an_error(play):
    assert play("flip", 2).stdout != "one two three\n"
    written = (play.folder / "name").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(written, b"one two three", strict=True)) == 1


def test_a_file_that_must_not_be_read(play):
    assert "Permission denied" in play("deny", deny="/name").stderr


def test_all_processes_of_a_job_lose_power_together(play, library, tmp_path):
    """Bytes that another rank has written and not flushed are lost with that of the rank which has the fault."""
    job = {"shared": tmp_path / "shared"}
    fault = killpoints.fault(RunFolder(tmp_path), "power", 2, who="rank:0", **job)
    command = [sys.executable, "-S", "-c", OTHER_RANK, str(play.folder)]
    env, pipes = os.environ | fault | {"LD_PRELOAD": str(library), "RANK": "1"}, {"stdin": -1, "stdout": -1}
    with subprocess.Popen(command, env=env, text=True, **pipes) as other:
        other.stdout.readline()
        assert play("power", 2, who="rank:0", **job).returncode == -signal.SIGKILL
        assert {path.name: path.read_text() for path in play.folder.iterdir()} == {"cut": "", "kept": "kept"}
        other.communicate("")


def test_messages_to_a_keeper_are_counted(play, library, tmp_path):
    name = f"{killpoints.KEEPER}{os.getpid()}"
    program = f"""
import os, socket
to = socket.socket(socket.AF_UNIX)
to.connect("\\0{name}")
to.sendall(b"one")
socket.send_fds(to, [b"+"], [0])
other, _ = socket.socketpair()
other.sendall(b"not counted")
"""
    log = tmp_path / "calls"
    fault = killpoints.fault(RunFolder(tmp_path), "kill", 2, who="rank", log=log, sends=killpoints.KEEPER)
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(f"\0{name}")
        keeper.listen()
        top = {"LD_PRELOAD": str(library), "BOARD_TOP": str(os.getpid())}
        command = [sys.executable, "-S", "-c", program]
        ended = {
            do: subprocess.run(command, env=os.environ | fault | top | {"BOARD_DO": do}).returncode
            for do in ("count", "kill")
        }
    assert ended == {"count": 0, "kill": -signal.SIGKILL}
    calls = killpoints.read_calls(log)
    assert calls == [("send", name)] * 4 and killpoints.place_of(calls[0]) == "keeper: send"


def test_a_second_process_has_no_fault_that_is_for_one(play):
    assert play("die", 7, once=1).returncode == -signal.SIGKILL
    assert play("die", 7, once=1).returncode == 0
