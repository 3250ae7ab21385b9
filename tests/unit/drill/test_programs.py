"""Faults of the program of a rank, and reports of the machine: what has to be reported, and what the drill repairs."""

import json

import pytest

from ingot.drill.faults import FAULTS
from ingot.drill.machines import health_file
from ingot.drill.plan import PlannedFault

WATCHED = "\n[launch]\nwatchdog_seconds = 3\n"
HELD = "hung for 3.1 s: native code holds its interpreter lock"
HUNG = {"kind": "fault", "rank": 1, "cause": HELD, "detected_by": "watchdog", "seconds": 3.1}
ABORTED = {"kind": "fault", "rank": 1, "cause": "was killed (SIGABRT)", "detected_by": "supervisor", "seconds": None}
SLOW = {"kind": "straggler", "rank": 1, "step": 18, "phase": "compute", "ended": False}


def fault_of(name):
    (found,) = (fault for fault in FAULTS if fault.id == name)
    return found


def after(trial, kind, *log, step=10, printed=""):
    """Return a trial after a fault of rank 1 was planted at `step`."""
    one = trial(*log, settings=WATCHED)
    number = one.plan.add(PlannedFault(kind=kind, rank=1))
    one.planned.append(number)
    one.plan.record(number, step=step)
    one.printed.write_text(printed)
    return one


@pytest.mark.parametrize("name", ["RS04", "RS04 wait", "RS05", "RS33", "RS35"])
def test_a_fault_of_a_program_that_was_not_planted_is_red(trial, name):
    assert "it was not injected" in fault_of(name).expects(trial(HUNG))


def test_a_rank_that_hangs_is_named_by_the_watchdog_in_time(trial):
    hold, wait = fault_of("RS04").expects, fault_of("RS04 wait").expects
    assert hold(after(trial, "hold", HUNG)) == wait(after(trial, "wait", HUNG | {"cause": "hung"})) == ""
    for wrong in ({"rank": 0}, {"cause": "hung"}, {"detected_by": "peer"}):
        assert "not one hang of rank 1" in hold(after(trial, "hold", HUNG | wrong))
    assert "not one hang of rank 1" in wait(after(trial, "wait", HUNG, HUNG))
    assert "found after 4.6 s" in wait(after(trial, "wait", HUNG | {"seconds": 4.6}))


def test_a_bug_is_given_up_and_repaired(trial):
    differs, repeats = fault_of("RS05"), fault_of("RS33")
    assert differs.codes == repeats.codes == {93}
    assert differs.expects(after(trial, "leave", HUNG, printed="error E-COLLECTIVES-DIFFER")) == ""
    assert "not one that is named as a bug" in differs.expects(
        after(trial, "leave", HUNG, printed="error E-RUN-RESTARTS")
    )
    assert "not one that is named as a bug" in differs.expects(
        after(trial, "leave", HUNG, HUNG, printed="error E-COLLECTIVES-DIFFER")
    )
    one = after(trial, "leave", step=9)
    assert differs.wrong_from(one) == 9 and repeats.wrong_from(one) is None  # what it logged since then is wrong
    thrice = [ABORTED] * 3
    assert repeats.expects(after(trial, "abort", *thrice, printed="error E-RUN-REPEATS")) == ""
    for log, printed in ((thrice[1:], "E-RUN-REPEATS"), (thrice, "E-RUN-RESTARTS"), ([*thrice, HUNG], "E-RUN-REPEATS")):
        assert "and then the end" in repeats.expects(after(trial, "abort", *log, printed=printed))
    one = after(trial, "abort")
    repeats.repair(one)
    assert one.plan.is_repaired(one.planned[-1])
    few = "launch.max_restarts=3" in repeats.prepare(one.run, one.folder.root).settings
    assert few and one.run.config.launch.max_restarts <= 3


def test_a_slow_rank_is_named_alone_and_soon(trial):
    expects = fault_of("RS35").expects
    assert expects(after(trial, "slow", SLOW)) == ""
    assert expects(after(trial, "slow", SLOW | {"step": 9, "rank": 0}, SLOW, SLOW | {"step": 28, "ended": True})) == ""
    for wrong in ({"rank": 0}, {"phase": "data"}, {"step": 30}, {"ended": True}):
        assert "not rank 1 in its compute from step 10 on" in expects(after(trial, "slow", SLOW | wrong))
    assert "not rank 1" in expects(after(trial, "slow", SLOW, SLOW | {"rank": 0}))
    assert "not within 10 steps" in expects(after(trial, "slow", SLOW | {"step": 20}))
    assert "a fault was reported" in expects(after(trial, "slow", SLOW, ABORTED))


def test_a_report_of_the_machine_has_its_consequence(trial, tmp_path):
    def report(kind, verdict, **more):
        return {"kind": "health", "report": kind, "verdict": verdict, "device": "memory INGOT_DRILL", **more}

    saved, other = {"kind": "stopped", "reason": "drain"}, report("xid", "drain", device="GPU 3")
    drain, memory, warning = (fault_of(name).expects for name in ("RS36", "RS36 memory", "RS36 warning"))
    assert drain(trial(report("ecc_scrubbed", "drain"), other, saved)) == ""
    assert "not for the drain" in drain(trial(report("ecc_scrubbed", "drain")))
    assert "not one ecc_scrubbed" in drain(trial(saved))
    assert memory(trial(report("ecc_uncorrected", "discard"))) == ""
    assert "also for the drain" in memory(trial(report("ecc_uncorrected", "discard"), saved))
    assert "with the verdict discard" in memory(trial(report("ecc_uncorrected", "warn")))
    assert warning(trial(report("machine_check", "warn"))) == ""
    assert "a fault was reported" in warning(trial(report("machine_check", "warn"), ABORTED))
    one = trial()
    fault_of("RS36 warning").inject(one)
    (line,) = health_file(one.folder.root).read_text().splitlines()
    assert json.loads(line) == {"kind": "machine_check", "device": "memory INGOT_DRILL"}
    assert f'launch.health_file="{health_file(one.folder.root)}"' in (
        fault_of("RS36").prepare(one.run, one.folder.root).settings
    )
