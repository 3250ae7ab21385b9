"""The numbers of whole runs: those of the events, of every rank and step, with what a roll-back made void."""

import math
import sys
import time

import numpy as np
import pytest
import torch
from tests.unit.trainer.telemetry.test_device_watch import bindings
from tests.unit.trainer.test_loop import Scripted

from ingot.events import read_events
from ingot.observe.scalars import scalars_of
from ingot.plugins.callback import StepCallback, Verdict
from ingot.schema.metric_files import read_lineages
from ingot.schema.metrics import METRICS, metric_of, newest_rows, read_series
from ingot.theory.rules import load_run
from ingot.trainer import record
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.run import build_trainer


def run_rank(rank, ranks, folder, until_step=None, script=None):
    """Train as run.py does, without the environment of a rank. script: step -> the verdict of the policy."""
    place = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        attempt=0,
        device=torch.device("cpu"),
    )
    run = build_trainer(load_run(folder.config), folder, place, until_step=until_step, say=lambda line: None)
    if script:
        run.policy = Scripted(folder, script)
    try:
        train(run)
    finally:
        run.close()


def values_of(folder, name, rank=None):
    """The valid values of a metric: step -> value."""
    series = [one for one in read_series(folder.metrics, rank, name) if one.valid]
    return {int(step): float(value) for one in series for step, value in zip(one.first, one.mean, strict=True)}


def test_every_rank_and_step_has_its_numbers(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder)
    steps = list(read_events(folder.events, "step"))
    for name, field in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("train/lr", "lr")):
        assert values_of(folder, name) == {e["step"]: e[field] for e in steps}  # all bits
    for progress in read_events(folder.events, "progress"):
        step = progress["step"]
        for name in ("perf/tokens_per_second", "run/eta_seconds"):
            assert values_of(folder, name)[step] == progress[name.partition("/")[2]]
        assert values_of(folder, "train/bpb")[step] == pytest.approx(progress["bpb"], rel=1e-12)
        assert values_of(folder, "memory/peak_bytes", 0)[step] == progress["peak_memory_bytes"]
        assert values_of(folder, "train/tokens")[step] == progress["tokens"]
    lines = list(read_events(folder.events, "waits"))
    for rank in range(2):
        seconds = values_of(folder, "perf/step_seconds", rank)
        assert list(seconds) == list(range(1, 13)) and min(seconds.values()) > 0
        assert all(0 <= wait <= seconds[step] for step, wait in values_of(folder, "perf/wait_seconds", rank).items())
        assert list(values_of(folder, "checkpoint/stall_seconds", rank)) == [6, 11]
        assert list(values_of(folder, "memory/peak_bytes", rank)) == [line["step"] for line in lines]
    for line in lines:  # two clocks, of which an event keeps the range over ranks
        own = [values_of(folder, "perf/computing_seconds", rank)[line["step"]] for rank in range(2)]
        assert [min(own), max(own)] == pytest.approx([line["computing"]["least"], line["computing"]["most"]], abs=1e-6)
        waits = [
            np.mean([values_of(folder, "data/wait_seconds", rank)[step] for step in covered(line)]) for rank in range(2)
        ]
        assert max(waits) == pytest.approx(line["data"]["most"], abs=1e-6)
    shares = values_of(folder, "run/goodput")
    assert len(shares) == len(lines) and all(0 < share < 1 for share in shares.values())
    rows = newest_rows(folder.metrics)
    assert sorted(rows) == [0, 1] and {row.step for row in rows.values()} == {12}
    assert rows[0].values["train/loss"] == steps[-1]["loss"] and "train/loss" not in rows[1].values
    assert not list(read_events(folder.events, "metrics_lost"))


def covered(line):
    return range(line["step"] - line["steps"] + 1, line["step"] + 1)


def slow_rank(rank, ranks, folder):
    """Train; the forward of rank 1 sleeps, and rank 0 waits for it."""
    if rank == 1:
        forward = PipelineExecutor._forward

        def slow(*arguments):
            time.sleep(0.02)
            forward(*arguments)

        PipelineExecutor._forward = slow
    run_rank(rank, ranks, folder)


def test_the_phases_of_a_step_have_no_waits_for_other_ranks(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(slow_rank, 2, folder)
    forward, backward, update = (
        [values_of(folder, f"perf/{phase}_seconds", rank) for rank in range(2)]
        for phase in ("forward", "backward", "optimizer")
    )
    lines = {event["step"]: event["steps"] for event in read_events(folder.events, "waits")}
    for rank in range(2):
        seconds, waits = (values_of(folder, f"perf/{name}_seconds", rank) for name in ("step", "wait"))
        assert list(forward[rank]) == list(backward[rank]) == list(update[rank]) == list(lines)
        for step, steps in lines.items():
            covered = range(step - steps + 1, step + 1)
            own = sum(seconds[one] - waits[one] for one in covered) / steps
            parts = [phase[rank][step] for phase in (forward, backward, update)]
            assert min(parts) > 0 and sum(parts) < own
    accumulation = load_run(folder.config).accumulation
    assert min(forward[1].values()) >= 0.02 * accumulation
    # The sleep of rank 1 is no work of rank 0, and none of its own update.
    assert sum(forward[0].values()) < sum(forward[1].values()) and sum(update[1].values()) < sum(forward[1].values())


class Sizes(StepCallback):
    """A plain reference: the weights before and after each update, whole."""

    def __init__(self, run, options):
        self.run, self.owned = run, [piece for piece in run.pieces if piece.owner]

    def on_gradients(self, step):
        self.before = [piece.value.double() for piece in self.owned]

    def on_update(self, step):
        pairs = zip(self.owned, self.before, strict=True)
        nothing = torch.zeros((), dtype=torch.float64)  # a rank may own no piece
        change = sum((((piece.value.double() - before) ** 2).sum() for piece, before in pairs), nothing)
        weights = sum(((piece.value.double() ** 2).sum() for piece in self.owned), nothing)
        self.squares = self.run.sum_over_ranks(torch.stack((change, weights)))

    def on_line(self, steps):
        change, weights = self.squares.sqrt().tolist()
        return {"norm": weights, "ratio": change / weights}


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2}], ids=lambda layout: next(iter(layout))
)
def test_the_sizes_of_weights_and_updates_in_any_layout(fork_ranks, make_run, register, layout):
    register(Sizes)
    folder = make_run(**layout)
    folder.config.write_text(folder.config.read_text() + "\n[callbacks.probe]\n")
    fork_ranks(run_rank, 2, folder)
    expected = {event["step"]: event["values"] for event in read_events(folder.events, "metrics")}
    norms, ratios = values_of(folder, "train/param_norm"), values_of(folder, "train/update_ratio")
    assert list(norms) == list(expected) and list(ratios) == [3, 6, 9, 12]  # of saves between lines, no ratio
    assert norms == pytest.approx({step: values["norm"] for step, values in expected.items()}, rel=1e-6)
    assert ratios == pytest.approx({step: expected[step]["ratio"] for step in ratios}, rel=1e-5)
    sent = [(event["step"], scalars_of(event)) for event in read_events(folder.events, "measured")]
    for name, recorded in {"train/param_norm": norms, "train/update_ratio": ratios}.items():
        assert {step: values[name] for step, values in sent if name in values} == recorded
    assert all(0 <= values["run/goodput"] <= 1 for _, values in sent)


def test_a_roll_back_keeps_the_void_steps(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder, None, {8: Verdict.ROLL_BACK})
    for rank in (None, 0, 1):
        name = "train/lr" if rank is None else "perf/step_seconds"
        found = read_series(folder.metrics, rank, name)
        assert [(one.valid, one.first.tolist()) for one in found] == [
            (True, [1, 2, 3, 4, 5]),
            (False, [6, 7, 8]),
            (True, list(range(6, 13))),
        ]
    first, second = (e["loss"] for e in read_events(folder.events, "step") if e["step"] == 7)
    _, void, again = read_series(folder.metrics, None, "train/loss")
    assert (void.mean[1], again.mean[1]) == (first, second)


def test_another_attempt_is_another_lineage(fork_ranks, make_run):
    folder = make_run()
    fork_ranks(run_rank, 1, folder, 4)
    fork_ranks(run_rank, 1, folder)
    assert [(one.number, one.first_step) for one in read_lineages(folder.metrics)] == [(1, 1), (2, 5)]
    assert list(values_of(folder, "train/loss")) == list(range(1, 13))


def test_a_run_may_do_without(fork_ranks, make_run):
    folder = make_run()
    text = folder.config.read_text()
    folder.config.write_text(text + "\n[metrics]\nrecord = false\n")
    fork_ranks(run_rank, 1, folder, 2)
    assert not folder.metrics.exists()


def test_all_metrics_are_recorded_by_some_run(fork_ranks, make_run, monkeypatch):
    """A name in the table that nothing writes would be an empty chart."""
    monkeypatch.setitem(sys.modules, "pynvml", bindings())
    monkeypatch.setattr(record, "device_uuid", lambda device: "GPU-1")
    folder = make_run(dp_shard=2, guard={"sanity_every": 5}, precision="bf16")
    folder.config.write_text(folder.config.read_text() + "\n[metrics]\nlayers_every = 4\n")
    fork_ranks(run_rank, 2, folder)
    rows = newest_rows(folder.metrics)
    found = [name for row in rows.values() for name in row.values]
    missing = {one.name for one in METRICS} - {metric_of(name).name for name in found}
    experts = {one.name for one in METRICS if one.name.startswith("experts/")}
    assert missing == {"perf/mfu", "run/cost_usd", "run/cost_to_come_usd"} | experts
    assert all(not math.isnan(value) for row in rows.values() for value in row.values.values())
    for line in read_events(folder.events, "sources"):
        for source, loss in line["loss"].items():
            assert values_of(folder, f"data/{source}/loss")[line["step"]] == loss
    assert list(values_of(folder, "eval/sanity_loss")) == [5, 10]
