"""The oracles see what they are for."""

import json
import struct
import subprocess
import sys

import pytest
from tests.checkpoints import write_checkpoint

from ingot.drill import clean
from ingot.drill.clean import leftovers, o7, shared_memory
from ingot.drill.job import RUN_VARIABLE
from ingot.drill.oracles import o1, o2, o3, read_facts, recovery, redone
from ingot.schema import events
from ingot.schema.run_folder import RunFolder


def bits(loss: float, norm: float = 1.0) -> tuple[bytes, bytes]:
    return struct.pack("<d", loss), struct.pack("<d", norm)


R = {1: [bits(4.0)], 2: [bits(3.0)]}


def test_o1_compares_bits_of_every_time_a_step_was_logged():
    assert o1({1: [bits(4.0)], 2: [bits(3.0), bits(3.0)]}, R) == ""
    assert "step 2" in o1({1: [bits(4.0)], 2: [bits(3.0), bits(3.0000000000000004)]}, R)
    assert "step 2" in o1({1: [bits(4.0)], 2: [bits(3.0, norm=1.0000000000000002)]}, R)
    assert "step 2 was not logged" in o1({1: [bits(4.0)]}, R)
    assert "step 3" in o1(R | {3: [bits(2.0)]}, R)
    assert "step 1" in o1({1: [bits(-0.0)]}, {1: [bits(0.0)]})
    # A step that was rolled back may have had a damaged state, but not the last time.
    spoiled = {1: [bits(4.0)], 2: [bits(9.0), bits(3.0)]}
    assert "step 2" in o1(spoiled, R) and o1(spoiled, R, frozenset({2})) == ""
    assert "step 2" in o1({1: [bits(4.0)], 2: [bits(3.0), bits(9.0)]}, R, frozenset({2}))


def test_o2_and_o3_name_the_difference():
    assert o2("ab", "ab") == "" and "cd" in o2("ab", "cd")
    samples = [(1, b"a"), (2, b"b")]
    assert o3(samples, samples) == ""
    assert "1 steps instead of 2" in o3(samples[:1], samples)
    assert "step 1 instead of step 2" in o3([(1, b"a"), (1, b"a")], samples)
    assert "step 2 has other samples" in o3([(1, b"a"), (2, b"c")], samples)


def test_o5_counts_from_the_fault_to_the_first_step_that_is_new(tmp_path):
    folder = RunFolder(tmp_path)
    log = [(events.RUN_STARTED, 1.0, 0), (events.STEP, 2.0, 5), (events.STEP, 3.5, 6)]
    log += [(events.RUN_STARTED, 5.0, 4), (events.STEP, 6.0, 5), (events.STEP, 7.0, 6), (events.STEP, 8.0, 7)]
    lines = [{"kind": kind, "time": time, "step": step, "loss": 1.0, "grad_norm": 1.0} for kind, time, step in log]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recovery(folder, 3.0).recovered == 5.0
    assert recovery(folder, 5.5).recovered is None
    assert redone({5: [bits(1.0)] * 2, 6: [bits(1.0)] * 2, 7: [bits(1.0)]}) == 2


def test_o7_sees_everything_that_can_be_left(tmp_path):
    folder, temporary = RunFolder(tmp_path / "run"), tmp_path / "temporary"
    temporary.mkdir()

    def left() -> str:
        return o7(folder, temporary, shared_memory())

    folder.root.mkdir()
    assert left() == "there is no checkpoint"
    write_checkpoint(folder, 3, {"train.global_batch": 1, "train.seq_len": 1})
    assert left() == ""
    for path in (folder.checkpoints / ".saving-step-00000004", folder.ledger / ".a.1.tmp", folder.stop_request):
        path.mkdir()
        assert leftovers(folder) == [str(path.relative_to(folder.root))] and path.name in left()
        path.rmdir()
    (temporary / "file").write_bytes(b"")
    assert "temporary files" in left()
    (temporary / "file").unlink()
    (folder.checkpoint(3) / "manifest.json").write_bytes(b"{}")
    assert "damaged" in left()


# Listens in each way, with nothing in its environment, as a process that keeps snapshots does.
LISTENER = """
import socket, sys
ipv4, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
port = ipv4.getsockname()[1]
unix.bind(f"\\0o7-{port}")
unix.listen()
found = [f"127.0.0.1:{port}", f"@o7-{port}"]
try:
    ipv6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
    found.append(f"[::1]:{ipv6.getsockname()[1]}")
except OSError:
    pass  # a machine without IPv6
sys.stderr.write(", ".join(found) + "\\n")
sys.stderr.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("marked", [True, False])
def test_o7_names_the_ports_of_processes_that_are_left_also_of_those_without_a_mark(tmp_path, monkeypatch, marked):
    monkeypatch.setattr(clean, "END_SECONDS", 0.1)
    root = tmp_path / "run"
    root.mkdir()
    log = root / "0.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-S", "-c", LISTENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={RUN_VARIABLE: str(root)} if marked else {},
        ) as process,
    ):
        while not log.read_text().endswith("\n"):
            assert process.poll() is None, log.read_text()
        found = f"processes [{process.pid}] are left, and listen at {log.read_text().strip()}"
        assert o7(RunFolder(root), tmp_path / "temporary", shared_memory()) == found
        assert clean.left_running(tmp_path) == found
        assert clean.left_running(tmp_path / "ru") == clean.left_running(root / "1") == ""
        process.communicate()
    assert clean.left_running(tmp_path) == ""


def test_the_state_has_step_and_samples(tmp_path):
    states = []
    for step in (3, 4):
        folder = RunFolder(tmp_path / str(step))
        write_checkpoint(folder, step, {"train.global_batch": 2, "train.seq_len": 1})
        facts = read_facts(folder)
        assert [number for number, _ in facts.samples] == list(range(1, step + 1))
        states.append(facts.state)
    assert states[0] != states[1]
