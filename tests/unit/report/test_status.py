"""The status of a run, from its event log and its lock."""

import json
import shutil
import time
from dataclasses import asdict, replace

import pytest
from tests.checkpoints import write_checkpoint
from tests.expect import refused

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import EventLog, read_events
from ingot.planner.request.presets import load_model
from ingot.report.status import read_status, sparkline
from ingot.schema import events
from ingot.schema.alert import LOSS_RATIO, UNCHANGED, Alert
from ingot.schema.launch import Launch
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import RunLock


@pytest.fixture
def folder(tmp_path):
    train = Train(steps=10, seq_len=8, global_batch=2, micro_batch=2)
    run = RunConfig(name="demo", model=load_model("tiny").arch, data=Data(tokens="t"), train=train)
    folder = RunFolder(tmp_path)
    folder.config.write_text(to_toml(replace(run, seed=1)))
    return folder


def steps(log, first, last, shift=0.0):
    for step in range(first, last + 1):
        log.write(events.STEP, step=step, loss=8.0 - step / 2 + shift, grad_norm=1.0, lr=1e-3)


def test_a_run_that_never_started(folder):
    status = read_status(folder.root)
    assert (status.state, status.step, status.loss, status.losses) == ("not started", 0, None, ())


def test_a_finished_run(folder):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    steps(log, 1, 10)
    log.write(events.PROGRESS, step=10, bpb=2.5, tokens_per_second=1e4, eta_seconds=0.0)
    log.write(events.EVALUATION, step=10, bpb=2.6)
    log.write(events.CHECKPOINT, step=10)
    log.write(events.FINISHED, step=10)
    write_checkpoint(folder, 10)
    status = read_status(folder.root)
    assert (status.state, status.step, status.steps, status.loss) == ("finished", 10, 10, 3.0)
    assert (status.bpb, status.heldout_bpb, status.checkpoint_step) == (2.5, 2.6, 10)
    assert status.eta_seconds is None  # nothing is on its way


def test_the_evaluation_is_that_of_the_last_step_although_one_in_the_background_came_later(folder):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    log.write(events.EVALUATION, step=10, bpb=2.6)
    log.write(events.EVALUATION, step=5, bpb=2.9, background=True)
    assert read_status(folder.root).heldout_bpb == 2.6
    log.write(events.ROLLED_BACK, from_step=12, to_step=7)
    assert read_status(folder.root).heldout_bpb is None
    log.write(events.EVALUATION, step=7, bpb=2.7, background=True)
    assert read_status(folder.root).heldout_bpb == 2.7


@pytest.mark.parametrize(
    ("nodes", "reason", "why"),
    [
        (1, "nodes", "1 of 2 nodes are there"),
        (2, "memory", "a rank ran out of memory"),
        (1, "memory", "1 of 2 nodes are there and a rank ran out of memory"),
    ],
)
def test_a_job_with_another_layout_shows_it_and_its_ranks_until_it_has_its_own_again(
    folder, nodes, reason, why, capsys
):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0, world_size=2)
    facts = {"nodes": nodes, "of_nodes": 2, "ranks": 1, "overrides": ["parallel.dp_shard=1", "launch.nodes=1"]}
    log.write(events.LAYOUT, **facts, reason=reason)
    log.write(events.RUN_STARTED, from_step=4, world_size=1)
    status = read_status(folder.root)
    assert status.ranks == 1 and status.fallback == facts | {"reason": reason}
    assert main(["status", str(folder.root)]) == 0
    assert f"layout parallel.dp_shard=1 launch.nodes=1   because {why}\n" in (capsys.readouterr().out)
    log.write(events.LAYOUT, nodes=2, of_nodes=2, ranks=2, overrides=[], reason="")
    log.write(events.RUN_STARTED, from_step=8, world_size=2)
    assert (read_status(folder.root).ranks, read_status(folder.root).fallback) == (2, None)


def test_a_fault_and_its_recovery_count_each_step_once(folder):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0, world_size=2)
    steps(log, 1, 7)
    log.write(events.FAULT, rank=1, cause="SIGKILL")
    assert read_status(folder.root).state == "failed"
    log.write(events.RESTART, attempt=1)
    log.write(events.RUN_STARTED, from_step=4, world_size=2)
    assert read_status(folder.root).step == 4
    steps(log, 5, 6, shift=0.25)
    status = read_status(folder.root)
    assert (status.state, status.step, status.restarts) == ("interrupted", 6, 1)
    assert status.faults == ("rank 1 SIGKILL, step 7",)
    assert status.losses == (7.5, 7.0, 6.5, 6.0, 5.75, 5.25)


def test_slow_ranks_until_they_recover_or_start_again(folder, capsys):
    log = EventLog(folder.events)
    facts = {"host": "node-7", "phase": "data", "factor": 2.04, "since": 10, "seconds": 0.25, "ended": False}
    log.write(events.STRAGGLER, step=18, rank=1, **facts)
    log.write(events.STRAGGLER, step=19, rank=0, **facts)
    log.write(events.STRAGGLER, step=40, rank=0, **facts | {"ended": True})
    (slow,) = read_status(folder.root).stragglers
    assert slow == {"step": 18, "rank": 1, **facts}
    assert main(["status", str(folder.root)]) == 0
    line = "slow   rank 1 on node-7 takes 2.0 times as long as its peers since step 10 (data): all wait 250.0 ms"
    assert line in capsys.readouterr().out
    log.write(events.STRAGGLER, step=50, rank=1, **facts | {"phase": "compute", "slowdown": 1.7})
    health = {"device": "rank 1", "report": "slow", "code": 0, "count": 1}
    log.write(events.HEALTH, node="node-8", verdict="warn", words="hot", **health)
    log.write(events.HEALTH, node="node-7", verdict="drain", words="rank 1 is slow", **health)
    assert main(["status", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert "long enough to drain its machine" in shown and "drained node-7: rank 1 is slow" in shown
    assert "node-8" not in shown
    log.write(events.RUN_STARTED, from_step=16)
    assert read_status(folder.root).stragglers == ()


def test_spares_until_another_node_leads(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.SPARES, wanted=2, waiting=1)
    assert read_status(folder.root).spares == {"wanted": 2, "waiting": 1}
    with RunLock(folder.lock):
        assert main(["status", str(folder.root)]) == 0
    assert "spares 1 of 2 wait" in capsys.readouterr().out
    log.write(events.NODE, action="leads", host="node-8", pid=1, node=0, reason="")
    assert read_status(folder.root).spares is None


def test_the_last_restart_by_phase(folder, capsys):
    log = EventLog(folder.events)
    phases = {"detect": None, "kill": None, "wait": None, "schedule": 0.5, "import": 3.0, "warm_up": 1.5}
    log.write(events.START_TIMES, attempt=0, seconds=phases, total_seconds=5.0)
    assert main(["status", str(folder.root)]) == 0
    assert "start  the start took 5.0 s: schedule 0.50 s, import 3.00 s, warm up 1.50 s" in capsys.readouterr().out
    for attempt, total in ((1, 8.0), (2, 6.0)):
        again = phases | {"detect": 0.25, "kill": 0.5, "wait": 0.0}
        log.write(events.START_TIMES, attempt=attempt, seconds=again, total_seconds=total)
    status = read_status(folder.root)
    assert status.restart_seconds == (8.0, 6.0) and status.start_times["attempt"] == 2
    assert main(["status", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert "start  the last restart took 6.0 s: detect 0.25 s, kill 0.50 s, schedule" in shown
    assert "; median of 2: 7.0 s" in shown


def test_a_running_one_holds_its_lock_and_a_stopped_one_does_not(folder):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    log.write(events.PROGRESS, step=1, eta_seconds=30.0)
    with RunLock(folder.lock):
        status = read_status(folder.root)
        assert (status.state, status.eta_seconds) == ("running", 30.0)
    log.write(events.STOPPED, step=1, reason="requested")
    assert read_status(folder.root).state == "stopped"


def test_a_job_without_progress_shows_since_when_and_no_rate(folder, capsys, monkeypatch):
    """A log line covers ten steps of 0.5 s here, so that one may take a while."""
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    steps(log, 1, 5)
    log.write(events.PROGRESS, step=5, tokens_per_second=1e4, eta_seconds=60.0, step_seconds=0.5)
    newest = list(read_events(folder.events))[-1]["time"]
    with RunLock(folder.lock):
        for since, rate, eta, still in ((24, 1e4, 60.0, None), (26, None, None, 26)):
            status = read_status(folder.root, newest + since)
            assert (status.tokens_per_second, status.eta_seconds) == (rate, eta)
            assert status.still_seconds == (None if still is None else pytest.approx(still))
        log.write(events.PROGRESS, step=6, tokens_per_second=1e4, eta_seconds=60.0, step_seconds=1e-9)
        monkeypatch.setattr(time, "time", lambda: newest + 100)
        assert main(["status", str(folder.root)]) == 0
    printed = capsys.readouterr().out
    assert "no step for 1 min" in printed and "tok/s" not in printed and "eta" not in printed
    log.write(events.FINISHED, step=10)
    with RunLock(folder.lock):  # for its uploads
        assert read_status(folder.root).still_seconds is None
    assert read_status(folder.root).still_seconds is None  # nothing runs


def test_a_job_that_starts_again_is_late_only_after_the_time_of_a_start(folder):
    """The newest log line of the attempt before may be hours old."""
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0, world_size=2)
    log.write(events.PROGRESS, step=5, tokens_per_second=1e4, eta_seconds=60.0, step_seconds=0.5)
    newest = list(read_events(folder.events))[-1]["time"]
    append = {"rank": 0, "pid": 7, "host": "", "attempt": 0}
    with folder.events.open("a") as file:
        file.write(json.dumps({"kind": events.RANK_STARTED, "time": newest + 8000, **append}) + "\n")
    limit = Launch().watchdog_other_seconds
    with RunLock(folder.lock):
        assert read_status(folder.root, newest + 8001).still_seconds is None
        assert read_status(folder.root, newest + 8000 + limit - 1).still_seconds is None
        assert read_status(folder.root, newest + 8001 + limit).still_seconds == pytest.approx(limit + 1)


def test_of_two_faults_the_one_that_ended_the_run_is_named(folder, capsys):
    """The supervisor writes a fault per attempt. Here, the restart finds no checkpoint that it can use."""
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0, world_size=2, attempt=0)
    steps(log, 1, 7)
    log.write(events.FAULT, rank=1, failure="killed", cause="was killed (SIGKILL)", code="", step=7)
    log.write(events.RESTART, attempt=1)
    log.write(events.RANK_STARTED, rank=0, pid=7, host="", attempt=1)
    log.write(events.FAULT, rank=0, failure="disk", cause="none can be used", code="E-CKPT-NONE-USABLE", step=7)
    status = read_status(folder.root)
    assert status.failure == "rank 0: none can be used (E-CKPT-NONE-USABLE)"
    assert status.fault["code"] == "E-CKPT-NONE-USABLE" and len(status.faults) == 2
    assert main(["status", str(folder.root)]) == 0
    assert "faults 2, restarts 1\n       rank 1 was killed (SIGKILL), step 7\n" in capsys.readouterr().out


def test_a_torn_line_and_unknown_kinds_do_no_harm(folder):
    log = EventLog(folder.events)
    log.write("future_kind", anything=1)
    steps(log, 1, 1)
    with folder.events.open("a") as file:
        file.write('{"kind": "step", "lo')
    assert read_status(folder.root).step == 1


@pytest.mark.parametrize(
    ("log", "damage"), [(None, "is missing"), ("", "is damaged"), ("\x00 what?\n7\n", "is damaged")]
)
def test_without_a_log_the_newest_checkpoint_gives_the_step(folder, log, damage, capsys):
    from ingot.cli.main import main

    write_checkpoint(folder, 6)
    if log is not None:
        folder.events.write_text(log)
    status = read_status(folder.root)
    assert (status.state, status.step) == ("unknown", 6) and damage in status.log_damage
    assert main(["status", str(folder.root)]) == 0
    assert damage in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "not JSON", "refused"])
def test_a_checkpoint_that_cannot_be_used_is_not_shown_as_saved(folder, how, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    for step in (4, 8):
        write_checkpoint(folder, step)
        log.write(events.CHECKPOINT, step=step)
    assert read_status(folder.root).unused_step is None
    if how == "missing":
        shutil.rmtree(folder.checkpoint(8))
    elif how == "not JSON":
        (folder.checkpoint(8) / "manifest.json").write_text("torn")
    else:
        log.write(events.CHECKPOINT_REFUSED, step=8, path="x", reason="checkpoint x: its bytes were refused by a test")
    status = read_status(folder.root)
    assert (status.checkpoint_step, status.unused_step) == (4, 8) and how in status.unused_reason
    assert main(["status", str(folder.root)]) == 0
    saved, unused = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("saved", "unused"))]
    assert "step 4," in saved and "step 8" in unused and how in unused and "resumes from step 4" in unused
    log.write(events.CHECKPOINT_STORED, step=8, store="s3://bucket/run")
    main(["status", str(folder.root)])
    assert (
        f"resumes from step 8, which the store has (ingot ckpt fetch {folder.root} --step 8)" in capsys.readouterr().out
    )
    log.write(events.CHECKPOINT, step=8)
    write_checkpoint(folder, 8)
    assert read_status(folder.root).unused_step is None


def test_a_save_that_failed_is_shown_until_one_succeeds(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    log.write(events.CHECKPOINT_FAILED, step=4, code="E-CKPT-WRITE", reason="the disk is full", write_seconds=1.0)
    status = read_status(folder.root)
    assert (status.failed_step, status.failed_reason) == (4, "the disk is full")
    assert main(["status", str(folder.root)]) == 0
    assert "failed the save of step 4: the disk is full" in capsys.readouterr().out
    log.write(events.CHECKPOINT, step=8)
    assert read_status(folder.root).failed_step is None


def test_saves_of_the_weights_are_shown_and_hide_no_failed_checkpoint(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.CHECKPOINT_FAILED, step=3, what="weights", code="", reason="slow", write_seconds=1.0)
    assert read_status(folder.root).failed_step == 3
    log.write(events.CHECKPOINT_FAILED, step=4, what="full", code="", reason="full", write_seconds=1.0)
    log.write(events.CHECKPOINT_FAILED, step=5, what="weights", code="", reason="slow", write_seconds=1.0)
    assert read_status(folder.root).failed_step == 4
    log.write(events.WEIGHTS_SAVED, step=6)
    status = read_status(folder.root)
    assert (status.failed_step, status.weights_step) == (4, 6)
    main(["status", str(folder.root)])
    assert "the weights alone of step 6, " in capsys.readouterr().out
    log.write(events.CHECKPOINT, step=8)
    assert read_status(folder.root).failed_step is None


def test_how_long_the_parts_of_the_newest_save_took_is_shown_for_each_tier(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.CHECKPOINT, step=4, stall_seconds=0.5, write_seconds=0.5)  # training waited; of an older version
    assert main(["status", str(folder.root)]) == 0
    assert "took   step 4: stall 500.0 ms, written in 500.0 ms\n" in capsys.readouterr().out
    seconds = {"stall_seconds": 0.25, "snapshot_seconds": 0.125, "write_seconds": 2.0, "verify_seconds": 1.5}
    log.write(events.CHECKPOINT, step=8, bytes=9, **seconds, path="x")
    log.write(events.SNAPSHOT_KEPT, step=8, nodes=2, seconds=3.0)
    log.write(events.CHECKPOINT_STORED, step=4, what="full", store="s3://bucket/run", bytes=9, seconds=4.0)
    main(["status", str(folder.root)])
    shown = capsys.readouterr().out
    assert (
        "took   step 8: stall 250.0 ms (copy of the state 125.0 ms of it), written in 2.0 s (reading back 1.5 s of it)"
        ", kept in memory in 3.0 s, uploaded in 4.0 s (step 4)\n"
    ) in shown
    assert "kept   step 8 in the memory of 2 nodes, " in shown
    assert read_status(folder.root).last_save == {"step": 8, "bytes": 9, **seconds}
    log.write(events.CHECKPOINT_STORED, step=8, what="full", store="s3://bucket/run", bytes=0, seconds=1.0)
    assert read_status(folder.root).stored_seconds is None  # an earlier attempt sent it


def test_what_is_no_run_folder_is_refused(tmp_path):
    with refused("E-RUN-FOLDER", run=str(tmp_path)):
        read_status(tmp_path)
    with refused("E-RUN-FOLDER", run=str(tmp_path / "absent")):
        read_status(tmp_path / "absent")


def test_sparklines():
    assert sparkline(()) == ""
    assert sparkline((1.0,)) == "▁"
    assert sparkline((8.0, 1.0), 2) == "█▁"
    assert sparkline((3.0,) * 50) == "▁" * 24
    assert sparkline((1.0, float("nan"), 2.0), 3) == "▁×█"
    spiked = sparkline((*(8.0 - i / 4 for i in range(11)), 673.0), 12)
    assert spiked[-1] == "↑" and spiked[0] == "█" and spiked[10] == "▁"  # one outlier does not flatten the others
    assert len(sparkline(tuple(float(i) for i in range(1000)))) == 24


def test_the_verb_prints_json_that_a_script_can_use(folder, capsys):
    from ingot.cli.main import main

    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    steps(log, 1, 3)
    assert main(["status", str(folder.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert main(["status", str(folder.root)]) == 0
    assert "step 3/10" in capsys.readouterr().out


def test_layout_and_experts_are_shown(folder, capsys):
    from ingot.cli.main import main

    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0, layout={"dp_shard": 2, "tp": 2})
    steps(log, 1, 3)
    by_layer = {"layers": [1, 2], "load_cv": [0.5, 0.25], "max_load": [1.5, 3.25], "min_load": [0.0, 0.5]}
    log.write(events.EXPERTS, step=3, steps=3, **by_layer, dropped=[0.02, 0.04], entropy=[1.0, 1.5], loads=[[1.0]] * 2)
    assert main(["status", str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert "(dp_shard 2 x tp 2)" in out
    assert "busiest expert 3.2x the mean (layer 2)   dropped 3.0%   entropy 1.25 nats" in out
    by_layer |= {"dropped": None, "fallback": [0.02, 0.04]}
    log.write(events.EXPERTS, step=3, steps=3, **by_layer, entropy=[1.0, 1.5], loads=None)
    assert main(["status", str(folder.root)]) == 0
    beyond = capsys.readouterr().out
    assert "over capacity, to the fallback expert 3.0%" in beyond and "dropped" not in beyond
    assert "deviation █▁   0.25..0.50, layers 1 to 2" in out
    assert main(["status", str(folder.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] == {"dp_shard": 2, "tp": 2}
    assert facts["experts"]["max_load"] == [1.5, 3.25] and "loads" not in facts["experts"]


def test_the_newest_own_metrics_are_shown(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    assert read_status(folder.root).metrics == {}
    assert main(["status", str(folder.root)]) == 0
    assert not any(line.startswith("own") for line in capsys.readouterr().out.splitlines())
    log.write(events.METRICS, step=1, by="best_loss", values={"lowest": 5.0, "early": 1.0})
    log.write(events.METRICS, step=1, by="loss", values={"z": 69.0})
    log.write(events.METRICS, step=2, by="best_loss", values={"lowest": 4.25})
    log.write(events.METRICS, step=3, by="best_loss", values={"lowest": "damaged"})
    assert main(["status", str(folder.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["metrics"] == {"best_loss": {"lowest": 4.25, "early": 1.0}, "loss": {"z": 69.0}}
    assert main(["status", str(folder.root)]) == 0
    assert "own    best_loss.lowest 4.25   best_loss.early 1   loss.z 69\n" in capsys.readouterr().out
    log.write(events.METRICS, step=3, by="many", values={f"m{n}": float(n) for n in range(9)})
    assert main(["status", str(folder.root)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("own")]
    assert line.endswith("many.m2 2   and 6 more")


def test_skipped_updates_and_roll_backs_are_counted_and_shown(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    steps(log, 1, 7)
    log.write(events.SKIPPED, steps=[3, 5])
    assert main(["status", str(folder.root)]) == 0
    assert "policy updates skipped 2 (steps 3, 5)\n" in capsys.readouterr().out
    log.write(events.ROLLED_BACK, from_step=7, to_step=4)
    status = read_status(folder.root)
    assert (status.skipped_steps, status.roll_backs, status.step) == ((3, 5), ((7, 4),), 4)
    log.write(events.SKIPPED, steps=[5, 6, 7, 8])
    assert main(["status", str(folder.root)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("policy"))
    assert line == "policy updates skipped 5 (steps .., 6, 7, 8), roll-backs 1 (last: step 7 to 4)" and len(line) < 80


def test_the_last_alert_of_each_kind_is_shown(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, from_step=0)
    still = Alert(alert=UNCHANGED, step=40, since=21, value=20, limit=10, places=("rank 1",), cause="")
    for alert in (still, replace(still, alert=LOSS_RATIO, value=2.5, limit=2, places=()), replace(still, step=90)):
        log.write(events.ALERT, **asdict(alert))
    assert main(["status", str(folder.root)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("alert")] == [
        "alert  step 40: the loss is 2.50 times the mean of the steps before (limit 2)",
        "alert  step 90: 20 updates since step 21 changed no weights: rank 1",
    ]


def test_the_newest_checkpoint_in_the_store_is_shown_and_why_an_upload_failed(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.CHECKPOINT_STORED, step=4, store="s3://bucket/run")
    main(["status", str(folder.root)])
    shown = capsys.readouterr().out
    assert "stored step 4, " in shown
    assert "upload" not in shown
    log.write(events.CHECKPOINT_NOT_STORED, step=8, store="s3://bucket/run", reason="no answer")
    status = read_status(folder.root)
    assert (status.stored_step, status.unstored_reason) == (4, "no answer")
    main(["status", str(folder.root)])
    assert "store  the last upload failed: no answer" in capsys.readouterr().out
    log.write(events.CHECKPOINT_STORED, step=9, what="weights", store="s3://bucket/run")
    assert (read_status(folder.root).stored_step, read_status(folder.root).unstored_reason) == (4, "no answer")


def test_a_failed_run_names_the_error_and_the_command_that_explains_it(folder, capsys):
    log = EventLog(folder.events)
    log.write(events.RUN_STARTED, world_size=2, from_step=0, attempt=0)
    log.write(events.FAULT, rank=1, failure="numerics", cause="loss 673", code="E-LOSS-EXPLODED", step=82)
    log.close()
    assert main(["status", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert "failed rank 1: loss 673 (E-LOSS-EXPLODED)" in shown and "(E-LOSS-EXPLODED), step 82" in shown
    assert "ingot explain E-LOSS-EXPLODED" in shown and f"ingot explain nan {folder.root}" in shown
    with RunLock(folder.lock):
        assert main(["status", str(folder.root)]) == 0
    assert f"Next:  ingot watch {folder.root}" in capsys.readouterr().out


def test_the_step_of_an_attempt_that_logged_no_step_is_that_of_its_checkpoint(folder):
    log = EventLog(folder.events)
    for kind, facts, step in (
        (events.RUN_STARTED, {"from_step": 40}, 40),
        (events.ROLLED_BACK, {"from_step": 40, "to_step": 20}, 20),
        (events.STEP, {"step": 21, "loss": 3.0}, 21),
        (events.STOPPED, {"step": 21, "reason": "requested", "saved_step": 21}, 21),
        (events.RUN_STARTED, {"from_step": 60}, 60),  # from the store: another machine trained the steps between
        (events.FINISHED, {"step": 60}, 60),
    ):
        log.write(kind, **facts)
        assert read_status(folder.root).step == step
