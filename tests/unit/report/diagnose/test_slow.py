"""Causes from logs that are written here: what is measured, what is planned, and what cannot be known."""

import json
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.config import to_dict, to_toml
from ingot.planner.run.plan import make_plan
from ingot.report.diagnose.evidence import (
    changed,
    exposed_seconds,
    fewer_exchanges,
    less_communication,
    measure,
    shorter_bubbles,
)
from ingot.report.diagnose.slow import explain_slow
from ingot.report.facts import gather
from ingot.report.recovery import recovery_section
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.launch import Launch
from ingot.schema.load_filter import LoadFilter
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.parallel import Parallel
from ingot.schema.run import Checkpoint, Data, Evaluate, RunConfig, Train, WatchSettings
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic, write_json
from ingot.trainer.telemetry.usage import KINDS

ARCH = Arch(
    vocab_size=256, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=256
)
CPU = Cluster(
    name="here", device="cpu", devices_per_node=2, memory_bytes=16 << 30, memory_bandwidth=8e9,
    peak_flops={"bf16": 4e10}, op_seconds=8e-6, runtime_bytes=350 << 20, link_bandwidth=1e9, link_seconds=1e-3,
    measured="2026-11-22",
)  # fmt: skip
GPU = Cluster(
    name="8xgpu", device="cuda", devices_per_node=8, memory_bytes=80 << 30, memory_bandwidth=2.4e12,
    peak_flops={"bf16": 9.9e14}, matmul_efficiency=0.7, attention_efficiency=0.5, op_seconds=6e-6,
    runtime_bytes=2 << 30, link_bandwidth=450e9, network_bandwidth=50e9,
)  # fmt: skip
START = 1_780_000_000.0


def run_config(**sections) -> RunConfig:
    train = {"steps": 100, "seq_len": 64, "global_batch": 16, "micro_batch": 8} | sections.pop("train", {})
    return RunConfig(
        name="logged", model=ARCH, data=Data(tokens="tokens"), train=Train(**train), watch=WatchSettings(log_every=10),
        checkpoint=Checkpoint(every_steps=20), **sections,
    )  # fmt: skip


def started(time: float, from_step: int = 0, device: str = "cpu", host: str = "here") -> dict:
    return {"kind": "run_started", "time": time, "from_step": from_step, "world_size": 2, "device": device,
            "hardware": {"host": host}}  # fmt: skip


def line(step: int, seconds: float, waits: dict | None = None, data: float = 0.0) -> list[dict]:
    """A progress event, and a `waits` event if any are given: kind -> mean, or (mean, least, most, rank)."""
    time = START + step * seconds
    progress = {"kind": "progress", "time": time, "step": step, "tokens": step * 1024, "tokens_per_second": 1.0,
                "step_seconds": seconds, "data_wait_seconds": data}  # fmt: skip
    if waits is None:
        return [progress]
    spreads = {}
    for kind in KINDS:
        value = waits.get(kind, 0.0)
        values = value if isinstance(value, tuple) else (value, value, value, 0)
        spreads[kind] = dict(zip(("mean", "least", "most", "rank"), values, strict=True))
    return [progress, {"kind": "waits", "time": time, "step": step, "steps": 10, **spreads}]


@pytest.fixture
def logged(tmp_path):
    """logged(events, run=, cluster=, plan=) -> the folder of a run that logged these events."""

    def write(events: list[dict], run: RunConfig | None = None, cluster: Cluster | None = CPU):
        folder, run = RunFolder(tmp_path / "run"), run or run_config(parallel=Parallel(dp_replicate=2))
        write_atomic(folder.config, to_toml(run))
        if cluster:
            write_json(folder.plan, to_dict(make_plan(run, cluster)))
        folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder.root

    return write


def lines(seconds: float = 0.1, first: float = 0.5, **waits) -> list[dict]:
    """Ten lines of ten steps, the first of which took longer."""
    found = [*line(10, first, waits)]
    for step in range(20, 101, 10):
        found += line(step, seconds, waits)
    return found


def test_the_first_line_of_an_attempt_is_separate(logged):
    found = measure(gather(logged([started(START), *lines()])))
    assert found and found.steps == 90 and found.step_seconds == pytest.approx(0.1)
    assert found.first_seconds == pytest.approx(10 * 0.4)


def test_the_slowest_loader_counts_and_the_freest_rank_measures_collectives(logged):
    waits = {"data": (0.02, 0.0, 0.04, 1), "collectives": (0.03, 0.01, 0.05, 0), "computing": (0.05, 0.05, 0.05, 0)}
    found = explain_slow(logged([started(START), *lines(**waits)]))
    causes = {cause.name: cause for cause in found.causes}
    assert causes["data stall"].seconds == pytest.approx(0.04)
    assert causes["exposed collectives"].seconds == pytest.approx(0.01)
    assert found.causes[0].name == "data stall" and "straggler" not in causes


def with_axes(events: list[dict], *, hidden: bool = True) -> list[dict]:
    """`events` with the communication of two axes in their `waits` events."""
    spread = {"mean": 0.04, "least": 0.035, "most": 0.05, "rank": 0}
    parts = {"exposed": spread} | ({"hidden": spread} if hidden else {})
    little = {part: dict.fromkeys(("mean", "least", "most", "rank"), 0) for part in parts}
    for event in events:
        if event["kind"] == "waits":
            event["axes"] = {"dp_shard": little, "tp": parts, "planted": {"exposed": 7}, "cp": "damaged"}
    return events


def test_the_class_of_communication_names_its_axis(logged):
    found = explain_slow(logged(with_axes([started(START), *lines(collectives=(0.04, 0.035, 0.05, 0))])))
    (cause,) = (cause for cause in found.causes if cause.name == "exposed collectives")
    assert [one.name for one in found.classes] == ["communication-bound by tp"]
    assert cause.evidence.endswith("means by axis: tp 40.0 ms (and 40.0 ms hidden)")
    assert found.measured.exposed.keys() == {"dp_shard", "tp"}


def test_gpus_measure_the_communication_of_each_axis(logged):
    run = run_config(parallel=Parallel(dp_replicate=2))
    events = with_axes([started(START, device="cuda"), *lines(reading=0.05, computing=0.01)], hidden=False)
    causes = {cause.name: cause for cause in explain_slow(logged(events, run, GPU)).causes}
    assert causes["exposed collectives"].source == "measured"
    assert causes["exposed collectives"].seconds == pytest.approx(0.035)
    assert causes["exposed collectives"].evidence.endswith("means by axis: tp 40.0 ms")


def test_logs_without_the_time_in_collectives_have_it_among_what_was_blocked(logged):
    events = [started(START), *lines(blocked=(0.03, 0.01, 0.05, 0))]
    for event in events:
        event.pop("collectives", None)
    causes = {cause.name: cause for cause in explain_slow(logged(events)).causes}
    assert causes["exposed collectives"].seconds == pytest.approx(0.01)


def test_pauses_of_the_storage_want_a_deeper_prefetch_and_slow_storage_does_not(logged):
    events = [started(START), *line(10, 0.1)]
    for step in range(20, 201, 10):
        pause = 0.2 if step in (60, 150) else 0.0
        events += line(step, 0.1 + pause, {"data": (pause, 0.0, pause, 0)})
    stall = explain_slow(logged(events)).causes[0]
    assert stall.name == "data stall" and "in bursts" in stall.evidence
    assert stall.remedies[0].settings == {"data.prefetch": 2 + 20}  # two seconds of pause, steps of 0.1
    slow = explain_slow(logged([started(START), *lines(data=(0.05, 0.05, 0.05, 0))])).causes[0]
    assert slow.name == "data stall" and not slow.remedies[0].settings


def test_a_gpu_that_is_behind_its_host_does_not_wait_for_data(logged):
    """Steps of 0.1 s, ten a line: 0.3 s of work are left for the device when the host reads the results."""
    run = run_config(parallel=Parallel(dp_shard=8), train={"global_batch": 8, "micro_batch": 1})
    fed = [started(START, device="cuda"), *lines(data=0.04, reading=0.03, computing=0.01)]
    assert "data stall" not in {cause.name for cause in explain_slow(logged(fed, run, GPU)).causes}
    starved = [started(START, device="cuda"), *lines(data=0.04, reading=0.006, computing=0.01)]
    stall = next(c for c in explain_slow(logged(starved, run, GPU)).causes if c.name == "data stall")
    assert stall.seconds == pytest.approx(0.04)


def test_collectives_are_known_by_the_planners_own_names():
    from ingot.planner.predict.time.step_time import estimate

    run = run_config(parallel=Parallel(dp_shard=4, tp=2), train={"global_batch": 8, "micro_batch": 1})
    found = estimate(run, GPU)
    assert found
    waited = sum(line.exposed_seconds for line in found.communication.values())
    assert 0 < waited <= exposed_seconds(found.terms) <= 1.5 * waited  # what overlap slows down is in it, too


def test_exposed_collectives_are_met_by_the_layout_and_by_the_micro_batch(logged):
    run = run_config(parallel=Parallel(dp_shard=2, zero=3, unit_layers=1), train={"global_batch": 8, "micro_batch": 1})
    found = explain_slow(logged([started(START), *lines(collectives=0.04)], run))
    cause = next(cause for cause in found.causes if cause.name == "exposed collectives")
    keys = [set(remedy.settings) for remedy in cause.remedies]
    assert {"train.micro_batch"} in keys and any(key.startswith("parallel.") for k in keys for key in k)


def test_a_straggler_and_a_busy_machine_are_two_things(logged):
    waits = {"computing": (0.05, 0.03, 0.07, 1), "queued": (0.01, 0.0, 0.02, 0)}
    found = explain_slow(logged([started(START), *lines(**waits)]))
    seconds = {cause.name: cause.seconds for cause in found.causes}
    assert seconds["straggler"] == pytest.approx(0.02) and seconds["no free core"] == pytest.approx(0.02)


def test_ranks_that_the_run_found_to_be_slow_are_the_stragglers(logged):
    """None of them computes longer: it waits for something. Not those that recovered, or only wait for their data."""
    slow = {
        "kind": "straggler",
        "time": START,
        "step": 20,
        "host": "node-7",
        "factor": 2.0,
        "since": 11,
        "ended": False,
    }
    found = [
        slow | {"rank": 1, "phase": "data", "seconds": 0.03},
        slow | {"rank": 3, "phase": "compute", "seconds": 0.04},
    ]
    found += [
        slow | {"rank": 2, "phase": "compute", "seconds": 0.05},
        slow | {"rank": 2, "phase": "compute", "seconds": 0.05, "ended": True},
    ]
    causes = explain_slow(logged([started(START), *lines(computing=0.05), *found])).causes
    (cause,) = [cause for cause in causes if cause.name == "straggler"]
    assert cause.seconds == 0.04 and "rank 3 on node-7 takes 2.0 times" in cause.evidence
    assert not cause.remedies[0].settings  # of one machine


def test_a_slow_machine_can_be_drained_or_was(logged):
    slow = {"kind": "straggler", "time": START, "step": 20, "host": "node-7", "factor": 2.0, "since": 11}
    slow |= {"rank": 3, "phase": "compute", "seconds": 0.04, "ended": False}
    left = {"kind": "health", "time": START, "node": "node-7", "device": "rank 3", "report": "slow", "verdict": "drain"}
    run, found = run_config(parallel=Parallel(dp_replicate=2), launch=Launch(nodes=2)), []
    for more in ([], [left | {"verdict": "warn"}], [left], [left, slow | {"host": "node-9"}]):
        causes = explain_slow(logged([started(START), *lines(computing=0.05), slow, *more], run)).causes
        (cause,) = [cause for cause in causes if cause.name == "straggler"]
        found.append(("left the run" in cause.evidence, cause.remedies[0].settings))
    drain = {"launch.on_straggler": "drain"}
    assert found == [(False, drain), (False, drain), (True, {}), (False, drain)]
    for verdict in ("warn", "drain"):
        more = left | {"words": "rank 3 takes 2.0 times as long", "verdict": verdict}
        section = repr(recovery_section(gather(logged([started(START), *lines(), more], run))))
        assert ("Drained machines" in section and "rank 3 takes" in section) == (verdict == "drain")


def test_stops_between_steps_are_counted_per_step(logged):
    events = [started(START), *lines()]
    events += [{"kind": "checkpoint", "time": START, "step": step, "bytes": 1, "stall_seconds": 0.4, "path": "x"}
               for step in (20, 40, 60, 80, 100)]  # fmt: skip
    events += [{"kind": "weights_saved", "time": START, "step": step, "bytes": 1, "stall_seconds": 0.1, "path": "x"}
               for step in (30, 50)]  # fmt: skip
    run = run_config(parallel=Parallel(dp_replicate=2), evaluate=Evaluate(every_steps=50))
    events += [{"kind": "evaluation", "time": START, "step": 50, "bpb": 1.0, "loss": 1.0, "unigram_bpb": 2.0,
                "tokens": 10, "seconds": 1.0}]  # fmt: skip
    found = explain_slow(logged(events, run))
    causes = {cause.name: cause for cause in found.causes}
    assert causes["checkpoint stall"].seconds == pytest.approx((5 * 0.4 + 2 * 0.1) / 100)
    assert "2 saves of the weights alone" in causes["checkpoint stall"].evidence
    assert causes["evaluation"].seconds == pytest.approx(1.0 / 100)
    assert found.measured.clock_seconds == pytest.approx(0.1 + 0.022 + 0.01)
    (remedy,) = causes["checkpoint stall"].remedies
    assert remedy.settings["checkpoint.every_steps"] == 100  # no more than the run has


def test_a_fault_costs_its_gap_and_the_steps_done_again(logged):
    events = [started(START), *line(10, 0.1), *line(20, 0.1)]
    events += [{"kind": "step", "time": START + 2, "step": 20, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0}]
    events += [{"kind": "fault", "time": START + 2, "rank": 1, "cause": "was killed", "step": 20},
               started(START + 7, from_step=10)]  # fmt: skip
    for step in range(20, 101, 10):
        events += line(step, 0.1)
    found = explain_slow(logged(events))
    restarts = next(cause for cause in found.causes if cause.name == "restarts")
    assert restarts.seconds == pytest.approx((5 + 10 * 0.1) / 100)
    assert "was killed" in restarts.evidence and "10 steps" in restarts.evidence


def test_without_waits_or_plan_it_says_what_it_does_not_know(logged):
    events = [started(START), *line(10, 0.2), *line(20, 0.1, data=0.05)]
    found = explain_slow(logged(events, cluster=None))
    assert found.causes[0].name == "data stall" and "others were not timed" in found.causes[0].evidence
    assert any("no plan.json" in sentence for sentence in found.unknown)
    assert any("without `waits` events" in sentence for sentence in found.unknown)
    assert not found.planned_seconds


def test_a_run_without_a_plan_is_planned_for_the_machine_that_is_offered(logged):
    root = logged([started(START), *lines()], cluster=None)
    found = explain_slow(root, unplanned=CPU)
    assert found.planned_seconds and any("planned now" in sentence for sentence in found.unknown)
    assert not explain_slow(root, CPU).unknown  # named by the user: no sentence needed
    elsewhere = explain_slow(root, unplanned=replace(CPU, name="elsewhere"))
    assert any("ran on here" in sentence for sentence in elsewhere.unknown)


def test_a_plan_for_another_kind_of_machine_is_not_compared(logged):
    root = logged([started(START), *lines(blocked=0.05)], cluster=GPU)
    found = explain_slow(root)
    assert not found.planned_seconds and any("ran on cpu" in sentence for sentence in found.unknown)
    assert explain_slow(root, CPU).planned_seconds  # but with the machine that it ran on


def test_a_log_from_another_machine_of_the_kind_is_compared_and_reported(logged):
    found = explain_slow(logged([started(START, host="elsewhere"), *lines()]))
    assert found.planned_seconds and any("ran on elsewhere" in sentence for sentence in found.unknown)


def test_on_gpus_the_plan_speaks_for_collectives_and_the_host_for_launches(logged):
    run = run_config(parallel=Parallel(dp_shard=8), train={"global_batch": 8, "micro_batch": 1})
    waits = {"computing": 0.095, "reading": 0.001}
    found = explain_slow(logged([started(START, device="cuda"), *lines(**waits)], run, GPU))
    causes = {cause.name: cause for cause in found.causes}
    launches = causes["host and launches"]
    assert launches.source == "measured" and 0.05 < launches.seconds <= 0.095
    assert any("only the host is timed" in sentence for sentence in found.unknown)
    busy = explain_slow(logged([started(START, device="cuda"), *lines(computing=0.01, reading=0.08)], run, GPU))
    assert all(cause.source == "planned" for cause in busy.causes if cause.name == "host and launches")


def test_the_clocks_of_gpus_show_the_slow_one_and_the_gaps_between_phases(logged):
    run = run_config(parallel=Parallel(dp_replicate=2), train={"global_batch": 16, "micro_batch": 8})
    root = logged([started(START, device="cuda"), *lines(computing=0.01, reading=0.08)], run, GPU)
    RunFolder(root).metrics.mkdir()
    for rank, forward in ((0, 0.02), (1, 0.03)):
        table = lineage_folder(RunFolder(root).metrics, 1, 1) / f"rank-{rank:05}"
        writer = TableWriter(table, [f"perf/{phase}_seconds" for phase in ("forward", "backward", "optimizer")], {})
        for step in range(10, 101, 10):
            slow = 9.0 if step == 10 else 1.0  # the first line of an attempt
            values = {"perf/forward_seconds": forward * slow, "perf/backward_seconds": 0.03}
            writer.add(step, START + step, values | {"perf/optimizer_seconds": 0.005})
        writer.close()
    causes = {cause.name: cause for cause in explain_slow(root).causes}
    slow, host = causes["straggler"], causes["host and launches"]
    assert slow.seconds == pytest.approx(0.005 * (0.025 + 0.03) / 0.025) and "rank 1" in slow.evidence
    assert host.source == "measured" and host.seconds == pytest.approx(0.1 - 0.025 - 0.03 - 0.005)
    assert [one.name for one in explain_slow(root).classes] == ["host-bound", "held up by a straggler"]


def test_the_class_of_a_run_is_that_of_its_largest_wait(logged):
    waits = {"data": (0.03, 0.0, 0.04, 1), "collectives": (0.03, 0.031, 0.05, 0)}
    found = explain_slow(logged([started(START), *lines(**waits)]))
    assert [one.name for one in found.classes] == ["data-bound", "communication-bound"]
    assert "the storage gives" in found.causes[0].evidence
    below = explain_slow(logged([started(START), *lines(collectives=(0.03, 0.029, 0.05, 0))]))
    assert not below.classes and below.causes[0].name == "exposed collectives"
    filtered = run_config(parallel=Parallel(dp_replicate=2))
    filtered = replace(filtered, data=replace(filtered.data, filter=LoadFilter(max_repeated=0.5)))
    stall = explain_slow(logged([started(START), *lines(**waits)], filtered)).causes[0]
    assert "the loader is slower" in stall.evidence and "data.filter" in stall.remedies[0].text


def test_remedies_are_legal_and_fit(logged):
    run = run_config(parallel=Parallel(pp=2), train={"global_batch": 16, "micro_batch": 16})
    root = logged([started(START), *lines(pipeline=0.04)], run)
    bubble = next(cause for cause in explain_slow(root).causes if cause.name == "pipeline bubble")
    (remedy,) = bubble.remedies
    assert changed(run, remedy.settings) is not None and remedy.seconds and remedy.seconds > 0
    tight = replace(CPU, memory_bytes=1 << 20)
    assert not any(r.settings for c in explain_slow(root, tight).causes for r in c.remedies)


def test_proposals_keep_the_number_of_ranks():
    run = run_config(parallel=Parallel(dp_shard=2, tp=2, zero=3), train={"global_batch": 32})
    kept = [other for s in (*less_communication(run), *fewer_exchanges(run)) if (other := changed(run, s))]
    assert len(kept) > 4 and all(other.parallel.world_size == 4 for other in kept)
    assert all(other.train.global_batch == 32 for other in kept)
    whole = run_config(parallel=Parallel(dp_replicate=2), train={"micro_batch": 1})
    assert not list(less_communication(whole)) and not list(
        fewer_exchanges(whole)
    )  # one all-reduce per step, whatever its micro-batches
    pipeline = run_config(parallel=Parallel(pp=2), train={"global_batch": 16, "micro_batch": 4})
    schedules = {other.parallel.schedule for s in shorter_bubbles(pipeline) if (other := changed(pipeline, s))}
    assert {"1f1b", "zb_h1", "interleaved"} <= schedules


def test_wrong_folders_and_empty_logs(tmp_path, logged):
    with refused("E-RUN-NO-LOG", run=str(tmp_path)):
        explain_slow(tmp_path)
    root = logged([started(START)])
    with refused("E-LOG-NO-PROGRESS", running=False):
        explain_slow(root)
    RunFolder(root).events.write_text("")
    with refused("E-LOG-NO-EVENTS"):
        explain_slow(root)
    RunFolder(root).events.write_text("not json\n" * 3)
    with refused("E-LOG-NO-EVENTS"):
        explain_slow(root)
    root = logged([started(START), *lines()])
    RunFolder(root).config.unlink()
    with refused("E-RUN-FOLDER", run=str(root)):
        explain_slow(root)


def test_a_damaged_event_is_counted_and_left_out(logged):
    damaged = {"kind": "waits", "time": START, "step": 50, "steps": 10, "data": {"mean": "much"}}
    found = explain_slow(logged([started(START), *line(10, 0.1), *line(20, 0.1), damaged, {"kind": "progress"}]))
    assert found.measured.steps == 10 and "1 event could not be read" in found.unknown
