"""The rules of alerts: each kind fires on what it is for, is over when that is over, and a healthy run has none."""

import json
import math
import random
import tracemalloc

import pytest
from tests.unit.observe.conftest import HOSTILE, RUN_DIR, START, History, plan_of, run_of

from ingot.observe.alerts import kinds
from ingot.observe.alerts.rules import AlertRules
from ingot.schema import alert, events
from ingot.schema.alert_record import CRITICAL, FIRED, RESOLVED, WARNING
from ingot.schema.alerting import Alerts
from ingot.schema.run import Checkpoint, Data

FINDING = {"step": 20, "found": ["loss spike"], "loss": 9.0, "grad_norm": 2.0, "loss_sigmas": 14.0, "norm_sigmas": 1.0,
           "norm_factor": 1.0, "skipped": True}  # fmt: skip
MEASURE = {"first": 18, "last": 20, "skipped": 0, "found": ["loss spike"], "lr_factor": 1.0, "clip_factor": 1.0,
           "lr_last": 0}  # fmt: skip
SLOW = {"step": 20, "rank": 1, "host": "n1", "phase": "compute", "factor": 1.5, "since": 8, "seconds": 0.5,
        "ended": False, "slowdown": None}  # fmt: skip
FAULT = {"rank": 1, "failure": "killed", "cause": "was killed by SIGKILL", "step": 20, "detected_by": "supervisor",
         "evidence": "", "seconds": None}  # fmt: skip
DAMAGE = {"step": 20, "rank": 1, "host": "n1", "tensor": "w", "element": 3, "bit": 7, "sign": "minority"}
UNSTORED = {"step": 20, "what": "full", "store": "s3://b/p", "code": "", "reason": "no answer", "fix": "",
            "retry_seconds": 8.0}  # fmt: skip
HEALTH = {"node": "n1", "device": "0", "report": "xid", "code": 79, "count": 1, "words": "fell off the bus"}
CHECK = {"seconds": 1.0, "fleet": [], "links": []}
UNFIT = {"node": "n1", "check": "matmul", "words": "half as fast as the others", "slow": True}


def alert_event(kind: str) -> dict:
    return {"alert": kind, "step": 20, "since": 11, "value": 3.0, "limit": 2.0, "places": [], "cause": ""}


# kind of alert, severity, event, its fields, first step, the event that ends it ("": quiet steps; "line": a log line)
VERDICTS = [
    (kinds.SPIKE, WARNING, events.FINDING, FINDING, 20, ""),
    (kinds.NOT_FINITE, WARNING, events.FINDING, FINDING | {"found": ["loss not finite"], "loss": math.nan}, 20, ""),
    (kinds.GUARD_MEASURE, WARNING, events.GUARD, MEASURE | {"action": "again"}, 18, ""),
    (kinds.GUARD_STOPPED, CRITICAL, events.GUARD, MEASURE | {"action": "stop"}, 18, (events.RUN_STARTED, {
        "from_step": 10, "world_size": 2, "device": "cuda"})),
    (kinds.GUARD_ASKS, CRITICAL, events.GUARD_ASKED, {"first": 18, "last": 20, "found": ["x"], "until": START + 99}, 18,
     (events.GUARD, MEASURE | {"action": "pass"})),
    *((one, CRITICAL if one == alert.UNCHANGED else WARNING, events.ALERT, alert_event(one), 11, "")
      for one in (alert.LOSS_RATIO, alert.EXPLOSION, alert.VANISHED, alert.PLATEAU, alert.UNIFORM, alert.UNCHANGED,
                  alert.LOSS_SCALE, alert.UNDERFLOW, alert.SATURATION, alert.ACTIVATIONS, alert.TRANSIENT)),
    (kinds.SUSPECT_WEIGHTS, WARNING, events.SANITY, {"step": 20, "loss": 5.0, "suspect": True}, 20,
     (events.SANITY, {"step": 30, "loss": 4.0, "suspect": False})),
    (kinds.STATE_DAMAGED, CRITICAL, events.STATE_DAMAGED, DAMAGE, 20,
     (events.STATE_REPLAYED, {"step": 20, "ranks": [1], "named": True, "verdict": "transient"})),
    (kinds.STRAGGLER, WARNING, events.STRAGGLER, SLOW, 8, (events.STRAGGLER, SLOW | {"ended": True})),
    (kinds.DAMAGED_DATA, WARNING, events.QUARANTINED, {"rank": 0, "host": "n", "step": 20, "shard": "web-1", "begin": 0,
     "end": 9, "windows": 3, "code": "E-X", "found": "a hash differs"}, 20, ""),
    (kinds.DATA_TROUBLE, WARNING, events.DATA_TROUBLE, {"rank": 0, "step": 20, "path": "web-1.tokens", "reason": "EIO",
     "tries": 3, "seconds": 4.0}, 20, ""),
    (kinds.RANK_LOST, CRITICAL, events.FAULT, FAULT, 20, "line"),
    (kinds.RANK_SILENT, CRITICAL, events.FAULT, FAULT | {"failure": "hang", "seconds": 61.0}, 20, "line"),
    (kinds.MACHINE_LOST, CRITICAL, events.NODE, {"action": "lost", "host": "n1", "pid": 3, "node": 1, "reason": "gone"},
     None, (events.NODE, {"action": "joined", "host": "n1", "pid": 3, "node": 1})),
    (kinds.MACHINE_FAULT, CRITICAL, events.HEALTH, HEALTH | {"verdict": "drain"}, None, ""),
    (kinds.MACHINE_FAULT, WARNING, events.HEALTH, HEALTH | {"verdict": "warn"}, None, ""),
    (kinds.UNFIT_MACHINE, WARNING, events.FLEET_CHECK, CHECK | {"unfit": [UNFIT]}, None,
     (events.FLEET_CHECK, CHECK | {"unfit": []})),
    (kinds.NOT_SAVED, CRITICAL, events.CHECKPOINT_FAILED, {"step": 20, "what": "full", "code": "", "reason": "EIO",
     "write_seconds": 1.0}, 20, (events.CHECKPOINT, {"step": 30, "bytes": 9, "stall_seconds": 0.1})),
    (kinds.NOT_STORED, WARNING, events.CHECKPOINT_NOT_STORED, UNSTORED, 20,
     (events.CHECKPOINT_STORED, {"step": 30, "what": "full", "store": "s3://b/p", "bytes": 9, "seconds": 1.0})),
    (kinds.NOT_STORED, CRITICAL, events.LEASE_NOT_RECORDED, {"store": "s", "epoch": 1, "code": "", "reason": "no"},
     None, (events.LEASE_RECORDED, {"store": "s", "epoch": 1})),
    (kinds.CHECKPOINT_REFUSED, CRITICAL, events.CHECKPOINT_REFUSED, {"step": 20, "path": "p", "reason": "a hash"}, 20,
     (events.CHECKPOINT, {"step": 30, "bytes": 9, "stall_seconds": 0.1})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "severity", "name", "fields", "since", "end"), VERDICTS, ids=lambda one: str(one)[:20]
)
def test_a_verdict_of_the_run_is_an_alert_until_it_is_over(history, kind, severity, name, fields, since, end):
    run = history()
    assert run.lines(2) == []
    (fired,) = run.event(name, **fields)
    assert (fired.kind, fired.severity, fired.state, fired.since) == (kind, severity, FIRED, since)
    assert fired.next.startswith("ingot ") and RUN_DIR in fired.next and fired.evidence
    assert run.rules.open == [fired]
    if not end:
        over = run.lines(9 if name == events.FINDING else 150)  # guard.calm_steps is 128, a window of alerts 1000
        if name == events.FINDING:
            assert over == []
            over = run.lines(5)
    else:
        over = run.line() if end == "line" else run.event(end[0], **end[1])
    over = [one for one in over if one.state == RESOLVED]
    assert [(one.id, one.kind) for one in over] == [(fired.id, kind)]
    assert fired not in run.rules.open


def test_a_healthy_run_has_no_alert(history):
    run = history(plan=plan_of(run_of(), 1.0), alerts=Alerts(budget_usd=100.0))
    for number in range(400):
        jitter = random.Random(number).uniform(0.9, 1.1)
        run.line(seconds=jitter, cost_usd=0.01 * number, mfu=0.45 / jitter)
        run.event(events.METRICS, step=run.step, by="data", values={"data/share/web": 0.75 + 0.02 * (jitter - 1)})
        run.event("disk", path="runs", free_bytes=5e12, total_bytes=9e12)
    run.event(events.EVALUATION, step=run.step, bpb=1.0)
    run.event(events.FINISHED, step=run.step, tokens=1, seconds=1.0)
    assert (run.records, run.rules.unreadable) == ([], 0)
    assert run.rules.tick(run.time + 1e6) == run.rules.end(run.time + 1e6) == []


# kind, changes of a log line that are beyond the limit, settings that switch the alert off
LINES = [
    (kinds.LOW_MFU, {"mfu": 0.3}, {"mfu_least": 0.0}),
    (kinds.COMMUNICATION, {"collectives": 0.31}, {"communication_most": 0.0}),
    (kinds.THROUGHPUT, {"seconds": 1.4}, {"throughput_least": 0.0}),
    (kinds.BUDGET_FORECAST, {"cost_usd": 30.5}, {"budget_usd": 0.0}),
]


@pytest.mark.parametrize(("kind", "beyond", "off"), LINES, ids=[one[0] for one in LINES])
def test_lines_in_a_row_beyond_a_limit_are_an_alert_until_as_many_are_within_it(history, kind, beyond, off):
    limits = {"budget_usd": 50.0}
    plan = plan_of(run_of(), 1.0)
    run = history(plan=plan, alerts=Alerts(**limits))
    assert run.lines(2) == [] and run.lines(2, **beyond) == []
    assert run.line() == [] and run.lines(2, **beyond) == []  # not in a row
    (fired,) = run.line(**beyond)
    assert (fired.kind, fired.severity, fired.since) == (kind, WARNING, run.step)
    assert fired.value is not None and fired.limit is not None
    assert run.lines(2) == [] and run.lines(2, **beyond) == [] and run.lines(2) == []
    (over,) = run.line()
    assert (over.id, over.state) == (fired.id, RESOLVED)
    other = history(plan=plan, alerts=Alerts(**(limits | off)))
    assert other.lines(9, **beyond) == []


def _spread(seconds: float) -> dict:
    return {"mean": seconds, "least": 0.9 * seconds, "most": 1.1 * seconds, "rank": 0}


def test_communication_names_the_axis_that_takes_most(history):
    axes = {
        "dp_shard": {"exposed": _spread(0.25), "hidden": _spread(0.4)},
        "tp": {"exposed": _spread(0.125), "hidden": _spread(0.0)},
        "pp": {"exposed": _spread(0.5), "hidden": _spread(0.0)},  # waits for the work of other stages
    }
    run = history()
    run.lines(2)
    (fired,) = run.lines(3, collectives=0.0, axes=axes)  # on a GPU, whose host waits for nothing
    assert fired.kind == kinds.COMMUNICATION and fired.value == pytest.approx(0.9 * 0.375)
    assert "dp_shard takes most: 25% of a step" in fired.evidence and "hides 400.0 ms" in fired.evidence
    assert fired.next == f"ingot explain slow {RUN_DIR}"
    for damaged in ({"tp": "x", "ep": {"exposed": 1}, "x": {"exposed": _spread(1.0)}}, [], None):
        (plain,) = history().lines(5, collectives=0.9, axes=damaged)
        assert "takes most" not in plain.evidence


def test_the_first_line_of_an_attempt_counts_for_nothing(history):
    run = history(alerts=Alerts(lines=1))
    for _ in range(3):
        assert run.line(mfu=0.05, collectives=0.9) == []
        run.start(from_step=0)
    assert {one.kind for one in run.lines(2, mfu=0.05, collectives=0.9)} == {kinds.LOW_MFU, kinds.COMMUNICATION}


def test_a_speed_within_the_error_band_of_the_plan_is_no_alert(history):
    slow = {"seconds": 1.6}
    assert history(plan=plan_of(run_of(), 1.0, high=1.7)).lines(9, **slow) == []
    assert history(plan=plan_of(run_of(), 1.0, high=1.5)).lines(9, **slow)
    run = history(plan=plan_of(run_of(), 1.0))
    run.event(events.LAYOUT, nodes=1, of_nodes=2, ranks=1, overrides=["parallel.dp_shard=1"], reason="nodes")
    assert run.lines(9, **slow) == []  # the plan is for another layout


def test_the_cost_of_an_hour_is_that_of_the_part_that_is_lost(history):
    run = history()
    run.lines(2)
    (low,) = run.lines(3, mfu=0.3)
    assert low.usd_per_hour == pytest.approx(20 * (1 - 0.3 / 0.45))  # two devices of 10 dollars
    assert "$6.67 of each hour is lost" in low.evidence and "the MFU is 30.0% (poor)" in low.evidence
    (slow,) = run.event(events.STRAGGLER, **SLOW)
    assert slow.usd_per_hour == pytest.approx(20 * 0.5)
    (lost,) = run.event(events.FAULT, **FAULT)
    assert lost.usd_per_hour == 20


def test_money_that_is_spent_is_critical_and_stays_so(history):
    run = history(alerts=Alerts(budget_usd=50.0))
    run.lines(2)
    forecast, *_ = run.lines(3, cost_usd=49.0)
    assert run.lines(2, cost_usd=49.0) == []
    over, fired = run.line(cost_usd=50.5)
    assert over.more == 0  # lines that go on are not more alerts
    assert (forecast.kind, forecast.severity) == (kinds.BUDGET_FORECAST, WARNING)
    assert (over.id, over.state) == (forecast.id, RESOLVED)
    assert (fired.kind, fired.severity) == (kinds.OVER_BUDGET, CRITICAL)
    assert run.event(events.STOPPED, step=run.step, reason="requested", saved_step=0) == []
    assert run.rules.open == [fired]


def test_a_source_that_drifts_from_its_weight(history):
    def shares(web: float):
        return run.event(events.METRICS, step=1, by="data", values={"data/share/web": web, "data/books/share": 0.25})

    run = history()
    assert [*shares(0.79), *shares(0.81), *shares(0.81)] == []
    (fired,) = shares(0.81)
    assert (fired.kind, fired.subject, fired.value, fired.limit) == (kinds.MIX_DRIFT, "web", 0.81, 0.75)
    assert [one.state for _ in range(3) for one in shares(0.74)] == [RESOLVED]


def test_shares_of_the_run_are_compared_by_the_names_of_metrics(history):
    def shares(code: float):
        return run.event(events.SOURCES, step=1, loss={}, share={"code_rust": code, "web": 1 - code})

    run = history(data=Data(tokens="t", weights={"code/rust": 3.0, "web": 3.0}))
    assert [found for _ in range(5) for found in shares(0.7)] == []  # of 40 sequences: less than 3 deviations
    fired = [found for _ in range(3) for found in shares(0.9)]
    assert {(one.kind, one.subject, one.limit) for one in fired} == {
        (kinds.MIX_DRIFT, "code_rust", 0.5),
        (kinds.MIX_DRIFT, "web", 0.5),
    }


def test_a_disk_that_answers_with_an_error(history):
    def states(**answer) -> list[tuple[str, str]]:
        return [(one.kind, one.state) for one in run.event("disk", path="/nfs", **answer)]

    run = history()
    assert states(silent_seconds=60.0) == [(kinds.DISK_SILENT, FIRED)]
    stale = {"error": "ESTALE", "words": "Stale file handle"}
    assert states(**stale) == [(kinds.DISK_SILENT, RESOLVED), (kinds.DISK_ERROR, FIRED)]
    assert states(**stale) == []
    assert states(free_bytes=1e15, total_bytes=1e15) == [(kinds.DISK_ERROR, RESOLVED)]
    assert states(error="ENOENT", words="No such file or directory") == []
    run = history(alerts=Alerts(disk_hours=0.0))
    assert states(**stale) == []


def test_goodput_counts_restarts_and_repeated_steps_but_not_stops(history):
    run = history(alerts=Alerts(goodput_seconds=7200.0), checkpoint=Checkpoint(every="10 h"))
    run.time += 1500  # the first start
    run.lines(370)
    run.event(events.STOPPED, step=run.step, reason="requested", saved_step=run.step)
    run.time += 9000
    run.start(from_step=run.step)
    assert run.lines(30) == []
    for _ in range(4):  # each loses 20 s, and 300 s of steps
        run.time += 20
        run.start(from_step=run.step - 300)
        run.lines(30)
    run.lines(3)
    (fired,) = run.records
    assert (fired.kind, fired.limit) == (kinds.GOODPUT, 0.9) and 0.8 < fired.value < 0.9
    assert [one.state for one in run.lines(700)] == [RESOLVED]


def test_a_checkpoint_that_is_too_old_by_steps_and_by_time(history):
    run = history()
    run.lines(10)
    assert run.lines(30, saves=False) == []
    (fired,) = run.line(saves=False)
    assert (fired.kind, fired.severity, fired.since, fired.value) == (kinds.CHECKPOINT_OLD, CRITICAL, 100, 310)
    assert [one.state for one in run.lines(9)] == [RESOLVED]
    run = history(checkpoint=Checkpoint(every="10 min"))
    run.lines(180, saves=False)
    run.time += 5
    (fired,) = run.rules.tick(run.time)
    assert (fired.kind, fired.since) == (kinds.CHECKPOINT_OLD, 0) and fired.value == pytest.approx(1805)
    run = history(checkpoint=Checkpoint(every="auto"))
    run.event(events.CHECKPOINT_INTERVAL, step=1, what="full", seconds=100.0)
    assert [one.kind for one in run.lines(31, saves=False)] == [kinds.CHECKPOINT_OLD]
    assert history(alerts=Alerts(checkpoint_intervals=0.0)).lines(99, saves=False) == []


def test_a_silent_run_is_an_alert_while_it_is_silent(history):
    run = history()
    assert run.rules.tick(run.time + 1700) == []  # a start may take as long as the watchdog lets it
    run.lines(2)
    assert run.rules.tick(run.time + 599) == []
    (fired,) = run.rules.tick(run.time + 601)
    assert (fired.kind, fired.severity, fired.since, fired.usd_per_hour) == (kinds.RUN_SILENT, CRITICAL, 20, 20.0)
    assert run.rules.tick(run.time + 700) == []
    run.time += 800
    assert [(one.id, one.state) for one in run.event(events.EVALUATION, step=20)] == [(fired.id, RESOLVED)]
    slow = history()
    slow.lines(2, seconds=30.0)
    assert slow.rules.tick(slow.time + 1400) == []  # five log lines take 1500 s
    assert slow.rules.tick(slow.time + 1501) != []
    off = history(alerts=Alerts(silent_seconds=0.0), checkpoint=Checkpoint(every="10 h"))
    off.lines(2)
    assert off.rules.tick(off.time + 9999) == []


def test_a_run_that_just_ended_is_an_alert_until_steps_come_again(history):
    run = history()
    run.lines(2)
    (fired,) = run.rules.end(run.time + 1)
    assert (fired.kind, fired.severity) == (kinds.RUN_ENDED, CRITICAL)
    run.start(from_step=20)
    assert [(one.id, one.state) for one in run.line()] == [(fired.id, RESOLVED)]


def test_a_planned_restart_is_no_end_and_no_late_checkpoint(history):
    run = history(checkpoint=Checkpoint(every="10 min"))
    run.lines(2)
    assert run.event(events.STOPPED, step=20, reason="drain", saved_step=20) == []
    assert [one.kind for one in run.rules.tick(run.time + 9999)] == [kinds.RUN_SILENT]  # if it does not start again
    silent, fired = run.rules.end(run.time + 10_000)
    assert (silent.kind, silent.state, fired.kind) == (kinds.RUN_SILENT, RESOLVED, kinds.RUN_ENDED)
    again = history(checkpoint=Checkpoint(every="10 min"))
    again.lines(2)
    again.time += 9 * 3600  # its launcher was killed
    again.event(events.RANK_STARTED, rank=0, pid=1, host="a", attempt=0)
    assert again.rules.tick(again.time + 60) == []  # the model is being built


def test_a_disk_that_fills(history):
    run = history(checkpoint=Checkpoint(every="10 min", keep=2))

    def hour(tb_per_hour: float, free: float) -> tuple[list, float]:
        found = []
        for _ in range(6):
            run.lines(60)
            free -= tb_per_hour / 6
            run.event(events.CHECKPOINT, step=run.step, bytes=1e12, stall_seconds=0.1)
            found += run.event("disk", path="/runs", free_bytes=free * 1e12, total_bytes=99e12)
            found += run.event("disk", path="/runs", free_bytes=(free + 2) * 1e12, total_bytes=99e12)
        return found, free

    found, free = hour(0.0, 20.0)
    assert found == []
    found, free = hour(0.5, free)
    assert found == []  # 20 hours and more
    found, free = hour(6.0, free)
    assert [(one.kind, one.severity, one.subject) for one in found] == [(kinds.DISK, WARNING, "/runs")]
    (grown,) = run.event("disk", path="/runs", free_bytes=1.05e12, total_bytes=99e12)
    assert (grown.severity, grown.id) == (CRITICAL, found[0].id) and "the next checkpoint needs" in grown.evidence
    assert history(alerts=Alerts(disk_hours=0.0)).event("disk", path="/runs", free_bytes=0.0) == []


def test_an_alert_that_goes_on_is_sent_again_after_a_time_and_counted_meanwhile(history):
    run = history()
    run.lines(2)
    (first,) = run.event(events.FINDING, **FINDING)
    for _ in range(12):
        run.time += 60
        assert run.event(events.FINDING, **FINDING) == []
    run.time += 14_400
    (again,) = [one for one in run.event(events.FINDING, **FINDING) if one.kind == kinds.SPIKE]
    assert (again.id, again.state, again.more) == (first.id, FIRED, 12)


def test_many_alerts_of_a_kind_are_counted_in_the_next_one(history):
    run = history()
    run.lines(2)
    for rank in range(30):
        run.event(events.STRAGGLER, **SLOW | {"rank": rank})
    assert [one.subject for one in run.records] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    run.event(events.FAULT, **FAULT)
    assert run.records[-1].kind == kinds.RANK_LOST  # another kind is not held back
    run.time += 14_401
    found = run.event(events.STRAGGLER, **SLOW | {"rank": 29})  # which was only counted, and is still slow
    assert [(one.subject, one.more) for one in found if one.kind == kinds.STRAGGLER] == [("rank 29", 26)]
    found = run.event(events.STRAGGLER, **SLOW | {"rank": 99})
    assert [(one.subject, one.more) for one in found if one.kind == kinds.STRAGGLER] == [("rank 99", 0)]


@pytest.mark.parametrize("count", [3000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_a_million_alerts_are_few_records_in_little_memory(count):
    rules, records = AlertRules(run_of(), None, RUN_DIR), 0
    rules.take({"kind": events.RUN_STARTED, "time": START, "from_step": 0, "world_size": 2, "device": "cuda"})
    event = {"kind": events.STRAGGLER, **SLOW, "host": HOSTILE}
    tracemalloc.start()
    for number in range(count):
        event |= {"time": START + number / 1000, "rank": number}
        records += len(rules.take(event))
    assert records == 4 and tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_logs_that_are_damaged_end_nothing(history):
    run = history()
    run.lines(3)
    unreadable = fired = 0
    values = [None, math.nan, math.inf, -1, 10**400, "x", [], {}, True, HOSTILE]
    logged = [(name, fields) for _, _, name, fields, *_ in VERDICTS]
    logged += [(event["kind"], {k: v for k, v in event.items() if k != "time"}) for event in run.events[:3]]
    for name, fields in logged:
        for key in ("none", "time", *fields):
            for value in values:
                rules = AlertRules(run.run, None, RUN_DIR)
                rules.take(run.events[0]), rules.take(run.events[1])
                event = {"kind": name, "time": run.time, **fields, key: value}
                records = rules.take(event) + rules.take({k: v for k, v in event.items() if k != key})
                records += rules.take(run.events[1])
                for record in records:
                    json.dumps(record.as_dict(), allow_nan=False)
                unreadable, fired = unreadable + rules.unreadable, fired + len(records)
    assert unreadable > 500 and fired > 500
    for broken in (None, [], "x", {"kind": 3, "time": 1.0}, {"time": 1.0}):
        assert run.rules.take(broken) == []


def test_clocks_that_jump_change_no_rate(history):
    run = history(alerts=Alerts(goodput_seconds=7200.0), checkpoint=Checkpoint(every="10 h"))
    run.lines(400)
    for jump in (-5e8, 5e8, -3600.0):
        run.time += jump
        run.lines(400)
    assert {one.kind for one in run.records} <= {
        kinds.RUN_SILENT,
        kinds.CHECKPOINT_OLD,
    }
    assert [one.state for one in run.records].count(FIRED) <= 2
    assert not run.rules.open


def test_hostile_names_are_clean_in_records(history):
    run = history()
    run.lines(2)
    (fired,) = run.event(events.STRAGGLER, **SLOW | {"host": HOSTILE})
    (machine,) = run.event(events.NODE, action="lost", host=HOSTILE, reason=HOSTILE, pid=1, node=1)
    for record in (fired, machine):
        text = record.evidence + record.subject + record.next
        assert "\n" not in text and "\x1b" not in text and "\u202e" not in text
    other = AlertRules(run_of(), None, "my runs/$(rm -rf)")
    other.take({"kind": events.RUN_STARTED, "time": START, "from_step": 0, "world_size": 2, "device": "cuda"})
    (fired,) = other.take({"kind": events.STRAGGLER, "time": START, **SLOW})
    assert fired.next == "ingot explain slow 'my runs/$(rm -rf)'"


def test_a_log_gives_the_same_alerts_again(history):
    run = history()
    run.lines(2)
    run.event(events.FINDING, **FINDING)
    run.lines(20, mfu=0.2)
    run.time += 900
    run.lines(20)
    again = AlertRules(run.run, None, RUN_DIR)
    assert [record for event in run.events for record in again.take(event)] == run.records
    assert isinstance(run, History) and len(run.records) >= 6
