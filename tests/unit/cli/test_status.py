"""`ingot status` is one screen, however much happened to a run."""

from dataclasses import replace

import pytest
from tests.checkpoints import write_checkpoint

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import EventLog
from ingot.planner.request.presets import load_model
from ingot.schema import alert as alerts
from ingot.schema import events
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder

WIDTH, LINES = 80, 40
LONG = "the disk of the run folder answered with an error, and so did the mount from which it came, " * 20


@pytest.fixture
def crowded(tmp_path):
    """A run of 512 ranks with experts in which all that status shows happened, most of it often."""
    train = Train(steps=1000, seq_len=8, global_batch=2, micro_batch=2)
    run = RunConfig(name="crowded", model=load_model("tiny").arch, data=Data(tokens="t"), train=train)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text(to_toml(replace(run, seed=1)))
    log = EventLog(folder.events)
    layout = {"dp_replicate": 2, "dp_shard": 16, "tp": 8, "pp": 2, "ep": 8}
    for attempt in range(12):
        log.write(events.RUN_STARTED, from_step=attempt, world_size=512, layout=layout, run="crowded", attempt=attempt)
        log.write(events.STEP, step=attempt + 1, loss=9.0 - attempt / 10, grad_norm=1.0, lr=1e-3)
        log.write(events.FAULT, rank=attempt, failure="disk", cause=LONG, step=attempt + 1, detected_by="supervisor")
        log.write(events.RESTART, attempt=attempt + 1)
    log.write(events.RUN_STARTED, from_step=12, world_size=512, layout=layout, run="crowded", attempt=12)
    log.write(events.PROGRESS, step=12, bpb=2.5, tokens_per_second=1e6, step_seconds=1.0, eta_seconds=1e6)
    by_layer = {"layers": [*range(64)], "load_cv": [0.5] * 64, "max_load": [1.5] * 64, "min_load": [0.0] * 64}
    log.write(events.EXPERTS, step=12, steps=1, **by_layer, dropped=[0.02] * 64, entropy=[1.0] * 64, loads=None)
    log.write(events.METRICS, step=12, by="probe", values={f"metric_{one}": 1.0 for one in range(50)})
    write_checkpoint(folder, 10)
    save = {"stall_seconds": 1.0, "snapshot_seconds": 0.5, "write_seconds": 40.0, "verify_seconds": 9.0}
    log.write(events.CHECKPOINT, step=10, bytes=1 << 40, path="checkpoints/step-00000010", store="s3://b/r", **save)
    log.write(events.CHECKPOINT_STORED, step=10, what="full", store="s3://b/r", bytes=1 << 40, seconds=90.0)
    log.write(events.CHECKPOINT_NOT_STORED, step=11, what="full", store="s3://b/r", code="E-STORE", reason=LONG, fix="")
    log.write(events.WEIGHTS_SAVED, step=9, bytes=1 << 30, stall_seconds=0.1)
    log.write(events.SNAPSHOT_KEPT, step=12, nodes=2, bytes=1 << 40, seconds=3.0, failures=0)
    log.write(events.CHECKPOINT_FAILED, step=12, what="full", code="E-DISK", reason=LONG, write_seconds=1.0)
    for rank in range(300):
        log.write(events.STRAGGLER, step=12, rank=rank, host=f"node-{rank // 8}", phase="compute", since=10,
                  factor=1.5 + rank / 100, seconds=0.5, ended=False, slowdown=None)  # fmt: skip
    for node in range(20):
        log.write(events.HEALTH, node=f"node-{node}", device=f"rank {node}", report="xid", code=79, count=1, words=LONG,
                  verdict="drain")  # fmt: skip
    unfit = [{"node": f"node-{node}", "check": "matmul", "words": LONG, "slow": True} for node in range(30)]
    log.write(events.FLEET_CHECK, seconds=9.0, fleet=[{"node": f"node-{node}"} for node in range(64)], links=[],
              unfit=unfit)  # fmt: skip
    phases = dict.fromkeys(("detect", "kill", "wait", "check", "schedule", "import", "groups", "build", "load"), 1.0)
    log.write(events.START_TIMES, attempt=12, seconds=phases, total_seconds=9.0)
    log.write(events.SKIPPED, steps=[*range(1, 12)])
    for kind in alerts._TEXTS:
        log.write(events.ALERT, alert=kind, step=12, since=3, value=1.0, limit=0.5, places=["3", "4"], cause="")
    return folder


def test_a_run_with_all_troubles_is_one_screen(crowded, capsys, monkeypatch):
    monkeypatch.chdir(crowded.root.parent)
    assert main(["status", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(max(-(-len(line) // WIDTH), 1) for line in lines) <= LINES, "\n".join(lines)
    shown = "\n".join(lines)
    for label in ("loss", "load", "saved", "kept", "stored", "store", "faults", "slow", "drained", "check", "alert"):
        assert f"\n{label} " in shown, label
    assert "rank 299 on node-37" in shown and "and 298 ranks more: 297" in shown  # the slowest first
    assert f"and {len(alerts._TEXTS) - 3} older: ingot alerts" in shown
