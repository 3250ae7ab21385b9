"""Faults after which a run continues from memory: when they come, and what has to be reported."""

import pytest

from ingot.drill import memory, reference
from ingot.drill.faults import FAULTS

KEPT, STEP, DRILL = ({"kind": kind, "step": 20} for kind in ("snapshot_kept", "step", "drill"))
RESTORED = {"kind": "snapshot_restored", "step": 20, "own_bytes": 7, "peer_bytes": 0}
KILLED = {"kind": "fault", "rank": 1, "cause": "was killed (SIGKILL)", "failure": "killed"}
LOST = KILLED | {"cause": "was lost with node 1", "failure": "node"}


def fault(name):
    return next(fault for fault in FAULTS if fault.id == name)


@pytest.mark.parametrize(
    ("name", "own", "other", "peer_bytes"), [("RS07 memory", KILLED, LOST, 0), ("RS07 node", LOST, KILLED, 5)]
)
def test_the_newest_snapshot_before_the_fault_has_to_be_restored_and_no_checkpoint(trial, name, own, other, peer_bytes):
    expects, restored = fault(name).expects, RESTORED | {"peer_bytes": peer_bytes}
    late = {"kind": "snapshot_kept", "step": 40}
    assert expects(trial(KEPT, DRILL, own, restored, late)) == ""
    assert "nothing was injected" in expects(trial(KEPT))
    assert "not one of rank 1" in expects(trial(KEPT, DRILL, restored))
    assert "not one of rank 1" in expects(trial(KEPT, DRILL, other, restored))
    assert "not one of rank 1" in expects(trial(KEPT, DRILL, own | {"rank": 0}, restored))
    assert "restored from memory" in expects(trial(KEPT, DRILL, own))
    assert "restored from memory" in expects(trial(KEPT, DRILL, own, restored | {"step": 0}))
    assert "restored from memory" in expects(trial(KEPT, DRILL, own, restored | {"peer_bytes": 5 - peer_bytes}))
    for kind in ("checkpoint_fetched", "checkpoint_refused"):
        assert f"checkpoints were tried: ['{kind}']" in expects(trial(KEPT, DRILL, own, {"kind": kind}, restored))


@pytest.mark.parametrize(
    ("kept", "trained", "between"), [([], 10, False), ([20], 20, True), ([20], 38, True), ([20], 39, False)]
)
def test_ranks_are_stopped_between_two_saves_only(trial, kept, trained, between):
    log = [KEPT | {"step": step} for step in kept]  # a save every 20 steps
    assert memory._is_between_saves(trial(*log, STEP | {"step": trained})) is between


def test_nodes_of_one_machine_share_its_devices_and_its_threads(trial, tmp_path, monkeypatch):
    one = trial().run
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(reference, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    two = fault("RS07 node").prepare(one, tmp_path)
    assert reference.threads_of(one.config) == reference.threads_of(two.config) == {"OMP_NUM_THREADS": "4"}
    assert one.devices(0) == {}
    assert [two.devices(node)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert [two.devices(node)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["GPU-a", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [two.devices(node)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["", ""]
    assert (two.config.launch.nodes, two.config.checkpoint.mode, two.config.checkpoint.replicas) == (2, "async", 1)
