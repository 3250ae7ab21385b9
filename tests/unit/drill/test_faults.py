"""Every fault judges the reports about it: what is right passes, and what is wrong is named."""

import signal
from dataclasses import replace
from random import Random

import pytest
from tests.expect import refused

from ingot.drill.damage import cut, flip, flip_any
from ingot.drill.faults import FAULTS, faults_of
from ingot.drill.rows import NOT_PLAYED, chosen_faults
from ingot.theory.rules import load_run

KILLED = {"kind": "fault", "rank": 1, "cause": "was killed (SIGKILL)", "detected_by": "supervisor", "seconds": None}
HUNG = {"kind": "fault", "rank": 1, "cause": "is stopped (SIGSTOP)", "detected_by": "watchdog", "seconds": 3.1}
STARTED = {"kind": "run_started", "from_step": 0}
WATCHED = "\n[launch]\nwatchdog_seconds = 3\n"


def expects(name, trial):
    (fault,) = (fault for fault in FAULTS if fault.id == name)
    return fault.expects(trial)


def test_a_killed_rank_is_named_once(trial):
    assert expects("RS01", trial(KILLED)) == ""
    assert "faults []" in expects("RS01", trial())
    assert "not one of rank 1" in expects("RS01", trial(KILLED | {"rank": 0}))
    assert "not one of rank 1" in expects("RS01", trial(KILLED | {"cause": "exited"}))
    assert "not one of rank 1" in expects("RS01", trial(KILLED, KILLED))
    assert expects("RS01 server", trial(KILLED)) == ""
    assert "2 faults" in expects("RS01 server", trial(KILLED, KILLED))


def test_the_others_keep_their_processes(trial):
    def started(rank, *pids):
        return [{"kind": "rank_started", "rank": rank, "pid": pid} for pid in pids]

    def partial(*log):
        return expects("RS01 partial", trial(KILLED, *log))

    assert partial(*started(0, 50, 50), *started(1, 51, 61)) == ""
    assert "ranks [0, 1] got new processes" in partial(*started(0, 50, 60), *started(1, 51, 61))
    assert "ranks [] got new processes" in partial(*started(0, 50), *started(1, 51, 51))
    assert "faults []" in expects("RS01 partial", trial(*started(0, 50), *started(1, 51, 61)))


def with_stacks(trial, count):
    for rank in range(count):
        path = trial.folder.incidents / "0001" / f"rank-{rank}.stacks"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('File "ingot/trainer/loop.py", line 1 in run')
    return trial


def test_a_hang_is_found_by_the_watchdog_in_time_with_the_stacks_of_the_others(trial):
    assert expects("RS03", with_stacks(trial(HUNG, settings=WATCHED), 1)) == ""
    assert "not one hang" in expects("RS03", trial(KILLED, settings=WATCHED))
    assert "not one hang" in expects("RS03", trial(HUNG | {"rank": 0}, settings=WATCHED))
    assert "found after 4.6 s" in expects("RS03", trial(HUNG | {"seconds": 4.6}, settings=WATCHED))
    assert "stacks of 0 ranks" in expects("RS03", with_no_stacks(trial(HUNG, settings=WATCHED)))
    slow = [STARTED, *({"kind": "step", "step": n, "time": 10.0 + 2 * n} for n in (1, 2))]
    assert trial(*slow).longest_step() == 2.0
    assert expects("RS03", with_stacks(trial(*slow, HUNG | {"seconds": 11.0}, settings=WATCHED), 1)) == ""


def with_no_stacks(trial):
    for path in trial.folder.incidents.rglob("*.stacks"):
        path.unlink()
    return trial


def test_a_job_that_lives_on_reports_nothing(trial):
    assert expects("RS06", trial(STARTED)) == ""
    assert "a fault was reported" in expects("RS06", trial(KILLED))
    failed = {"kind": "checkpoint_failed", "code": "E-CKPT-WRITER"}
    assert expects("RS15", trial(failed)) == ""
    assert "E-CKPT-WRITE" in expects("RS15", trial(failed | {"code": "E-CKPT-WRITE"}))
    quiet = trial(STARTED)
    quiet.folder.incidents.mkdir()
    assert "a hang" in expects("RS06", quiet)


def test_the_same_command_continues_once(trial):
    assert expects("RS08", trial(STARTED, STARTED)) == ""
    assert "1 attempts trained" in expects("RS08", trial(STARTED))
    assert "faults ['was killed (SIGKILL)']" in expects("RS08", trial(STARTED, KILLED, STARTED))


def test_a_stop_saves_the_last_step_on_a_busy_machine_too(trial):
    def stopped(step, saved, seconds=0.5, code=10, reason="SIGTERM"):
        one = trial({"kind": "stopped", "step": step, "saved_step": saved, "reason": reason})
        one.codes, one.stopped_seconds, one.stop_reasons = [code, 0], seconds, ("SIGTERM",)
        return expects("RS28", one)

    assert stopped(7, 7) == ""
    assert "is not saved" in stopped(7, 5)
    assert stopped(7, 7, seconds=2.5) == ""  # slow, and not wrong
    assert "it stopped for requested, not for SIGTERM" in stopped(7, 7, reason="requested")
    assert stopped(7, 5, code=130) == ""


def test_a_damaged_checkpoint_is_refused_by_name_and_the_older_one_taken(trial):
    def fell_back(begun, reason="rank-00001.safetensors differs", path="checkpoints/step-00000040"):
        refusal = {"kind": "checkpoint_refused", "step": 40, "path": path, "reason": reason}
        one = trial(STARTED, refusal, STARTED | {"from_step": begun})
        one.folder.root.with_name("trial.damaged").write_text("step-00000040 rank-00001.safetensors")
        return expects("RS10", one)

    assert fell_back(20) == ""
    assert "continued from step 0" in fell_back(0)
    assert "continued from step 40" in fell_back(40)
    assert "no reason names" in fell_back(20, reason="another file differs")
    assert "was not refused" in fell_back(20, path="checkpoints/step-00000020")


def test_damage_changes_what_it_names(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(64))
    place = flip_any(file, Random(1))
    (byte,) = (number for number, value in enumerate(file.read_bytes()) if value)
    assert f"byte {byte} of file" in place and file.read_bytes()[byte].bit_count() == 1
    flip(file, byte, file.read_bytes()[byte].bit_length() - 1)
    assert file.read_bytes() == bytes(64)
    assert f"file cut after {len(cut_of(file))} of 64 bytes" == cut_of.place


def cut_of(file):
    cut_of.place = cut(file, Random(2))
    return file.read_bytes()


def test_rows_are_chosen_by_the_ids_of_the_board(run_file, monkeypatch):
    monkeypatch.setattr("ingot.drill.programs.find_gpus", list)
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert [fault.id for fault in faults_of("RS03")] == ["RS03", "RS03 all"]
    assert [fault.id for fault in chosen_faults(["RS03 all", "RS01"])] == ["RS03 all", "RS01"]
    assert [fault.id for fault in chosen_faults(["RS01+", "RS01", "RS02+"])] == [
        "RS01",
        "RS01 server",
        "RS01 partial",
        "RS02",
    ]
    assert [fault.id for fault in chosen_faults(smoke=True)] == ["RS01", "RS03", "RS08", "RS10", "RS28"]
    assert len(chosen_faults()) == len(FAULTS)
    assert [fault.id for fault in chosen_faults(["RS07"])] == ["RS07 memory", "RS07 node"]  # it has nothing else
    with refused("E-DRILL-ROW", row="RS99"):
        chosen_faults(["RS01", "RS99"])
    assert [fault.id for fault in chosen_faults(["RS04", "RS33", "RS36+"])][:3] == ["RS04", "RS33", "RS36"]
    for row, rows in (("RS09", ["RS09"]), ("RS12+", ["RS12"]), ("RS07 spare", ["RS07 spare"])):
        with refused("E-DRILL-NOT-HERE", row=row, rows=rows) as error:
            chosen_faults(["RS01", row])
        (one,) = (one for one in NOT_PLAYED if [one.id] == rows)
        assert one.why in str(error.value) and one.way_out in str(error.value)
    of_31 = [f"RS31 {name}" for name in ("leader", "links", "mount", "sinks", "store")]
    with refused("E-DRILL-NOT-HERE", row="RS31", rows=of_31):
        chosen_faults(["RS31"])
    config = load_run(run_file)
    alone = replace(config, parallel=replace(config.parallel, dp_shard=1))
    left_out = {fault.id for fault in FAULTS if fault.needs(alone)}
    others = {"RS01 partial", "RS04 wait", "RS05", "RS35"}
    assert left_out == {"RS03 all", "RS06 all", "RS07 node", "RS15", "RS20"} | others
    often = replace(config, checkpoint=replace(config.checkpoint, every_steps=2))
    assert {fault.id for fault in FAULTS if fault.needs(often)} == {"RS07 memory", "RS07 node", "RS15"}
    background = replace(config, checkpoint=replace(config.checkpoint, mode="async"))
    assert not [fault for fault in FAULTS if fault.needs(background)]


@pytest.mark.parametrize(("ranks", "text"), [([1], "SIGSTOP of rank 1"), ([0, 1], "SIGSTOP of all 2 ranks")])
def test_an_injection_is_recorded_before_it_acts(trial, ranks, text):
    one = trial()
    one.step = 7
    one.signal_ranks(signal.SIGSTOP, ranks)
    (event,) = one.found("drill")
    assert (event["action"], event["step"], event["rank"]) == (text, 7, 1 if ranks == [1] else None)
    assert one.where == f"{text} (last logged step: 7)" and len(one.recoveries) == 2
