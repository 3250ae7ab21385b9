"""Units, random streams, files and the event log."""

import contextlib
import errno
import json
import os
import pickle
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot import errors
from ingot.data.tasks.run import _only_driver
from ingot.data.tasks.store import Store
from ingot.errors import IngotError, require
from ingot.events import EventLog, read_events
from ingot.rng import derive
from ingot.storage import atomic_file, exclusive, require_free, write_json
from ingot.units import (
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_seconds,
)


def test_quantities_as_people_write_them():
    assert (parse_count("1.5T"), parse_count("125m"), parse_count("8b"), parse_count(300)) == (
        1_500_000_000_000,
        125_000_000,
        8_000_000_000,
        300,
    )
    assert (parse_bytes("64 MiB"), parse_bytes("1 GB"), parse_bytes("7")) == (1 << 26, 10**9, 7)
    assert (parse_seconds("24h"), parse_seconds("2 min"), parse_seconds("90")) == (86400, 120, 90)
    forms = {"4h": 14400, "1d2h30m": 95400, "90 min": 5400, "45s": 45, "04:00:00": 14400, "1-12": 129600}
    forms |= {"1-12:30": 131400, "1-12:00:05": 129605, "0:00:00": 0}
    assert {text: parse_duration(text) for text in forms} == forms
    for text in ("", "90", "04:00", "4x", "1h2d", "-1h", "1:2:3:4", "1.5h"):  # without a unit, programs read other ones
        with refused("E-QUANTITY", value=text):
            parse_duration(text)
    for bad in ("", "8 q", "b8", "1..2", "1e400", "1e308T"):
        with refused("E-QUANTITY", value=bad):
            parse_count(bad)


def test_quantities_as_people_read_them():
    assert format_count(1_234_567) == "1.23M"
    assert [format_count(n) for n in (7, 0.5, 999.9, 999_600_000)] == ["7", "0.5", "1,000", "1,000M"]
    assert [format_flops(n) for n in (2.5e6, 999.9e6, 989e12)] == ["2.5 MFLOP", "1,000 MFLOP", "989 TFLOP"]
    assert format_bytes(1 << 26) == "64.0 MiB"
    assert [format_seconds(s) for s in (0.0042, 7.25, 15.46, 42, 59.98, 75, 3600, 90_000)] == [
        "4.2 ms", "7.2 s", "15.5 s", "42 s", "60 s", "1 min 15 s", "1 h", "1 d 1 h",
    ]  # fmt: skip


@given(st.integers(), st.lists(st.one_of(st.text(), st.integers()), max_size=3))
def test_streams_are_seeds_and_differ_by_name(seed, names):
    value = derive(seed, *names)
    assert 0 <= value < 2**63
    assert value == derive(seed, *names)
    assert value != derive(seed, *names, "other")


def test_a_number_and_its_text_are_different_streams():
    assert derive(1, 2) != derive(1, "2")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    write_json(path, {"b": 1, "a": [1]})
    assert json.loads(path.read_text()) == {"a": [1], "b": 1}
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.fixture
def living_child():
    """A function that forks a child, which calls a function and then lives until the end of the test."""
    children = []

    def fork(work=lambda: None):
        ready, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work()
                os.write(report, b"x")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        os.close(report)
        assert os.read(ready, 1) == b"x"
        os.close(ready)

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


LOCKS = [
    (lambda folder: exclusive(folder, "testing"), "E-FOLDER-BUSY"),
    (lambda folder: _only_driver(Store(folder)), "E-STORE-BUSY"),
]


@pytest.mark.parametrize(("lock", "busy"), LOCKS)
def test_a_folder_is_free_at_the_end_of_the_block_even_if_a_child_lives_on(tmp_path, living_child, lock, busy):
    with lock(tmp_path):
        living_child()
        with refused(busy), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


@pytest.mark.parametrize(("lock", "busy"), LOCKS)
def test_a_child_that_leaves_the_block_does_not_unlock_the_folder_of_its_parent(tmp_path, living_child, lock, busy):
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(tmp_path))
        living_child(stack.close)
        with refused(busy), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


def test_space_is_asked_for_before_it_is_used(tmp_path):
    require_free(tmp_path / "not" / "yet", 1, "a test")
    with refused("E-DISK-SPACE"):
        require_free(tmp_path, 1 << 60, "a test")


def test_events_survive_a_torn_line_and_keep_every_bit(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    loss = 0.1 + 0.2
    EventLog(path).write("step", step=1, loss=loss)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    EventLog(path).write("finished", step=2)
    assert [e["kind"] for e in read_events(path)] == ["step", "finished"]
    assert next(read_events(path, "step"))["loss"].hex() == loss.hex()
    assert list(read_events(tmp_path / "absent")) == []


def test_events_for_which_a_disk_has_no_room_wait_for_it(tmp_path, monkeypatch):
    log, write, room = EventLog(tmp_path / "events.jsonl"), os.write, [0]

    def full(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= (written := write(fd, data[: room[0]]))
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for step, room[0] in enumerate((0, 10, 0)):  # none; a part of a line, and none for its end; none
            log.write("step", step=step)
    other = EventLog(log.path)  # of another process, which ends the torn line
    other.write("step", step=7)
    log.write("step", step=3)
    log.close()
    assert [(e["step"], e.get("late", False)) for e in read_events(log.path)] == [
        (7, False), (0, True), (1, True), (2, True), (3, True)
    ]  # fmt: skip


def test_a_log_that_stays_full_is_an_error_with_the_events_it_lacks(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "events.jsonl")

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    log.write("step", text="a" * (3 << 20))
    with refused("E-DISK-FULL", path=str(log.path)):
        log.write("step", text="a" * (3 << 20))
    with refused("E-DISK-FULL") as caught:
        log.require_room()
    assert "2 events of the log could not be finished" in caught.value.found
    with pytest.raises(KeyError), log:  # which an error of the log does not hide
        raise KeyError


def test_errors_have_distinct_codes_and_cross_processes():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, IngotError)]
    assert len({k.kind for k in kinds}) == len(kinds)
    for kind in kinds:
        error = kind("E-SOME-CAUSE", "found", rule="must", fix="do", path="a", step=3)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, "found\n  rule: must\n  fix:  do")
        assert (copy.code, copy.facts) == ("E-SOME-CAUSE", {"path": "a", "step": 3})


def test_a_missing_part_names_its_extra():
    with refused("E-PART-MISSING", package="no_such_package", part="data"):
        require("no_such_package", "data")
