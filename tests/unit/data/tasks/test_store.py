import errno
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.tasks import store as module
from ingot.data.tasks.drill import digest, first_phase
from ingot.data.tasks.store import Store, note_death, open_store, run_task, too_many
from ingot.data.tasks.task import BOARD, COUNTS_BYTES, Attempt, Task
from ingot.storage import write_json


def one(faults=None, **places) -> Task:
    return first_phase(1, 20, faults=faults, **places)[0]


def die_inside(store, task, record):
    """Make the files that a process leaves when it is killed at `record`."""
    for name in ("attempts", "progress", "deaths"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
    (store.root / "attempts" / f"{task.key}.dead").mkdir(exist_ok=True)
    board = bytearray(BOARD.size + COUNTS_BYTES)
    Attempt(store.root, frozenset(), board).at(record)
    (store.root / "progress" / task.key).write_bytes(board)


def test_done_once(tmp_path):
    store, task, log = Store(tmp_path / "s"), one(log=tmp_path / "log"), tmp_path / "log"
    run_task(task, store)
    run_task(task, store)
    assert log.read_text().count("\n") == 1
    assert store.finished(task)
    assert store.facts(task)["records"] == 20
    assert store.facts(task)["counts"] == store.result(task) == {"drill.third": 6, "kept": 14}
    assert store.finished_keys([task.key, "0" * 32]) == {task.key}
    for name in ("attempts", "progress", "deaths"):
        assert not list((store.root / name).iterdir())


def test_an_error_leaves_nothing(tmp_path):
    store, task = Store(tmp_path), one({3: "refuse"})
    with refused("E-DRILL-REFUSED"):
        run_task(task, store)
    assert not store.finished(task)
    for name in ("attempts", "progress", "deaths"):
        assert not list((store.root / name).iterdir())


def test_two_attempts_at_once_are_harmless(tmp_path):
    """A machine that was taken for dead continues: neither attempt loses its folder or board."""
    store, task = Store(tmp_path), one()
    with module._attempt(task, store, True, None) as first:
        first.at(7)
        with module._attempt(task, store, True, None) as second:
            second.at(3)
            assert first.out != second.out
            assert first.out.is_dir()
            assert store.progress(task).record == 7
            (second.out / "x").write_text("same")
            module._publish(second, store.folder(task), {"result": 1}, 0.0)
        assert store.progress(task).record == 7
        (first.out / "x").write_text("same")
        module._publish(first, store.folder(task), {"result": 1}, 0.0)
    assert store.facts(task)["result"] == 1
    assert not list((tmp_path / "attempts").iterdir())


def test_a_record_at_which_three_attempts_died_is_left_out(tmp_path):
    store, task = Store(tmp_path), one()
    for record in (4, 4, 9, 4):
        die_inside(store, task, record)
        with module._attempt(task, store, False, None) as attempt:  # no process watched: the attempt records the death
            skip = attempt.skip
            (tmp_path / "copy").write_text((tmp_path / "deaths" / task.key).read_text())
        (tmp_path / "deaths" / task.key).write_text((tmp_path / "copy").read_text())
    assert skip == {4}
    die_inside(store, task, -1)  # no record's fault
    run_task(task, store)
    assert store.result(task)["read.killed_worker"] == 1
    assert not list((tmp_path / "deaths").iterdir())
    assert not list((tmp_path / "attempts").iterdir())


@pytest.mark.parametrize(("kind", "needed"), [("hung", 2), ("crashed", 3), ("stalled", 3), ("killed", 6)])
def test_how_many_deaths_are_enough(tmp_path, kind, needed):
    store, task = Store(tmp_path), one()
    for number in range(needed):
        with module._attempt(task, store, False, None) as attempt:
            assert not attempt.skip
            saved = tmp_path / "deaths" / task.key
            lines = saved.read_text() if saved.exists() else ""
        saved.write_text(lines)
        die_inside(store, task, 5)
        assert note_death(task, store, kind) == 5
        assert too_many([kind] * (number + 1)) == (number + 1 == needed)
    with module._attempt(task, store, False, None) as attempt:
        assert attempt.skip == {5}


def test_what_a_killed_driver_watched_is_not_blamed_as_a_crash(tmp_path):
    store, task = Store(tmp_path), one()
    with module._attempt(task, store, True, None) as attempt:
        attempt.at(5)
        left = (tmp_path / "progress" / task.key).read_bytes()
    (tmp_path / "progress" / task.key).write_bytes(left)  # as if both had been killed there
    with module._attempt(task, store, True, None):
        assert (tmp_path / "deaths" / task.key).read_text() == "killed 5\n"


def test_an_attempt_that_is_removed_cannot_publish(tmp_path):
    """A process that takes another for dead moves its folder away before deleting it: no torn folder is published."""
    store, task = Store(tmp_path), one()
    with pytest.raises(FileNotFoundError), module._attempt(task, store, True, None) as attempt:
        (attempt.out / "x").write_text("whole")
        module._remove_attempts(task, store)
        write_json(attempt.out / "y.json", "makes its folder")
        module._publish(attempt, store.folder(task), {"result": 1}, 0.0)
    assert not store.finished(task)


def test_torn_files_are_no_obstacle(tmp_path):
    store, task = Store(tmp_path), one()
    die_inside(store, task, 5)
    (tmp_path / "deaths" / task.key).write_text("crashed 5\nhung\n\0\0 x\ncrashed")
    (tmp_path / "progress" / task.key).write_bytes(b"\1\2\3")
    assert store.progress(task).record == -1
    run_task(task, store)
    assert store.result(task) == {"drill.third": 6, "kept": 14}


@given(st.dictionaries(st.text(max_size=60), st.integers(0, 10**12), max_size=300))
def test_counts_fit_their_place(counts):
    board = bytearray(BOARD.size + COUNTS_BYTES)
    attempt = Attempt(Path(), frozenset(), board)
    attempt._due = 0.0
    attempt.at(3, lambda: counts)
    assert len(board) == BOARD.size + COUNTS_BYTES
    kept = module.json.loads(board[BOARD.size :].rstrip(b"\0"))
    assert kept.items() <= counts.items()
    assert all(counts[name] <= min(kept.values()) for name in counts.keys() - kept.keys())  # the largest stay


def test_work_of_another_version_is_removed_with_a_notice(tmp_path, capsys):
    root = tmp_path / "store"
    store = open_store(root)
    run_task(one(), store)
    open_store(root)
    assert store.finished(one())
    assert capsys.readouterr().err == ""
    (root / "fetched").mkdir()
    (root / "format").write_text("ingot 0.0.1 layout 1\n")
    open_store(root)
    assert str(root) in capsys.readouterr().err
    assert not store.finished(one())
    assert sorted(path.name for path in root.iterdir()) == ["fetched", "format"]
    run_task(one(), store)
    (root / "format").unlink()  # a store of the layout that had no such file
    open_store(root)
    assert str(root) in capsys.readouterr().err
    assert not store.finished(one())


_LIMITED = """
import resource, sys
from pathlib import Path
from ingot.data.tasks.drill import first_phase
from ingot.data.tasks.local import Local
from ingot.data.tasks.run import Inline, run_all
from ingot.data.tasks.store import Store
from ingot.errors import ResourceError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    run_all(first_phase(2, 1500), Store(Path(sys.argv[1])), Local(2) if sys.argv[3] == "local" else Inline())
except ResourceError as error:
    print(error.code)
"""


@pytest.mark.parametrize("runner", ["inline", "local"])
def test_a_full_disk_stops_cleanly_and_the_same_command_goes_on(tmp_path, runner):
    """A limit on file sizes stands for the disk: the same path, another errno."""
    store, tasks = Store(tmp_path / "s"), first_phase(2, 1500)

    def build(limit):
        command = [sys.executable, "-c", _LIMITED, str(store.root), str(limit), runner]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    stopped = build(20_000)
    assert "E-DISK-FULL" in stopped.stdout, stopped.stderr
    assert not list((store.root / "attempts").iterdir())
    assert not list((store.root / "progress").iterdir())
    assert build(1 << 30).stdout == ""
    other = Store(tmp_path / "other")
    for task in tasks:
        run_task(task, other)
    assert digest(store, tasks) == digest(other, tasks)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("Not enough free space to write 80000000 bytes after offset 128"),
        OSError("1048576 requested and 4096 written"),
        RuntimeError("IO Error: Could not write file: No space left on device"),
    ],
)
def test_no_space_is_a_resource_error(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(module.os, "pwrite", full)
    with refused("E-DISK-FULL", path=str(tmp_path)):
        run_task(one(), Store(tmp_path))
    assert not list((tmp_path / "attempts").iterdir())


def test_a_disk_that_is_full_within_a_write_is_noticed(tmp_path, monkeypatch):
    real = module.os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda file, data, place: real(file, data[:4096], place))
    with refused("E-DISK-FULL", path=str(tmp_path)):
        run_task(one(), Store(tmp_path))
    monkeypatch.undo()
    run_task(one(), Store(tmp_path))


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output error"):
        run_task(one(), Store(tmp_path))
