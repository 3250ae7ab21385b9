"""Alerts of weights and of gradients' ranges, and those of whole runs on forked ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.trainer.test_loop import files_of, run_rank

from ingot.events import EventLog, read_events
from ingot.plugins.callback import StepNumbers
from ingot.plugins.piece import ParameterShard
from ingot.schema.alert import ACTIVATIONS, PLATEAU, SATURATION, UNCHANGED, UNDERFLOW, alert_of, described
from ingot.theory.rules import load_run
from ingot.trainer import loop
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import OUTSIDE, GradientRange
from ingot.trainer.guard.weights import WeightProbe


def shard(name, grad=None, elements=64, owner=True):
    value = torch.linspace(0.1, 1, elements)
    return ParameterShard(name, (elements,), (0,), (elements,), value, owner, grad)


def line_of(first, count, skipped=()):
    steps = range(first, first + count)
    return [StepNumbers(step, 3.0, 0.5, skipped=step in skipped) for step in steps]


def test_updates_that_change_no_weights_are_counted():
    shards = [shard("a"), shard("b", elements=0), shard("c", elements=3)]
    probe = WeightProbe(shards)
    assert probe.look(line_of(1, 4, skipped=(1, 3))) == (2, 2)
    assert probe.look(line_of(5, 3, skipped=(5, 6, 7))) == (2, 2)  # no update was made
    assert probe.look(line_of(8, 3)) == (5, 2)
    shards[2].value[1] += 1e-7
    assert probe.look(line_of(11, 3)) == (0, 0)
    assert probe.look(line_of(14, 3)) == (3, 14)
    assert probe.look(line_of(14, 3)) == (0, 0)  # the run went back: it has the weights of this line again
    assert probe.look(line_of(17, 3)) == (3, 17)
    assert WeightProbe([]).look(line_of(1, 9)) == (0, 0)


def test_the_range_of_the_gradient_by_layer():
    """fp16 has normal numbers from 6.1e-5 to 65504."""
    first, second = torch.full((10,), 1e-3), torch.full((10,), -1e-3)
    first[:3] = torch.tensor([0.0, -6e-5, 6e-5])
    second[:2] = torch.tensor([-4e4, torch.inf])
    shards = [
        shard("blocks.0.mlp.up.weight", first, 10),
        shard("blocks.1.mlp.up.weight", second, 10),
        shard("blocks.1.norm.weight", torch.ones(30), 30),
        shard("blocks.1.copy.weight", torch.zeros(30), 30, owner=False),
        shard("embed.weight", torch.zeros(10), 10),
        shard("norm.weight", None, 10),
    ]
    measured = GradientRange(shards, 2, torch.float16, 4, tied=False)
    for step in range(1, 9):
        measured.look(step)
    (step, layers), (again, _) = measured.read()
    assert (step, again) == (4, 8) and measured.read() == []
    assert [(one.layer, one.underflow, one.saturation) for one in layers] == [
        ("blocks.0", 0.3, 0.0),
        ("blocks.1", 0.0, 2 / 40),
    ]
    tied = GradientRange(shards, 2, torch.bfloat16, 1, tied=True)
    tied.look(1)
    ((_, layers),) = tied.read()
    assert [(one.layer, one.underflow) for one in layers] == [("blocks.0", 0.1), ("blocks.1", 0.0), (OUTSIDE, 1.0)]


def watch_of(make_run, shards, measured, written, **guard):
    config = load_run(make_run("watched", guard=guard).config)
    log = lambda kind, **facts: written.append((kind, facts))  # noqa: E731
    return AlertWatch(config, shards, measured, lambda: 8.0, log, is_first=True)


def test_layers_out_of_range_are_named_the_worst_first(make_run):
    grads = [torch.full((10,), 1e-3) for _ in range(4)]
    grads[1][:6], grads[2][:9], grads[3][:1] = 0, 0, 6e4
    shards = [shard(f"blocks.{i}.mlp.up.weight", grad, 10) for i, grad in enumerate(grads)]
    measured, written = GradientRange(shards, 4, torch.float16, 2, tied=True), []
    watch = watch_of(make_run, shards, measured, written, plateau_window=1000)
    measured.look(2)
    found = watch.line(line_of(1, 2), 1e-3, np.zeros((1, 2)))
    assert [(one.alert, one.places, one.value) for one in found] == [
        (UNDERFLOW, ("blocks.2", "blocks.1"), 0.9),
        (SATURATION, ("blocks.3",), 0.1),
    ]
    assert written[0][1]["underflow"] == [0, 0.6, 0.9, 0] and written[0][1]["loss_scale"] == 8.0
    measured.look(4)  # the same is not reported again
    assert watch.line(line_of(3, 2), 1e-3, np.zeros((1, 2))) == [] and len(written) == 2
    measured.look(1002)  # an overflow, whose update is skipped
    overflow = [replace(one, grad_norm=float("inf")) for one in line_of(1002, 1)]
    assert watch.line(overflow, 1e-3, np.zeros((1, 2))) == [] and len(written) == 3
    measured.look(1004)
    assert len(watch.line(line_of(1003, 2), 1e-3, np.zeros((1, 2)))) == 2


def test_layers_whose_activations_saturate_are_named_by_the_same_limit(make_run):
    watch = watch_of(make_run, [shard("a")], None, [])
    values = {f"layers/{layer}/activation_saturation": share for layer, share in enumerate((0.01, 0.2, 0.5))}
    (alert,) = watch.line(
        line_of(1, 2), 1e-3, np.zeros((1, 2)), measured=[(2, values | {"layers/0/activation_rms": 9.0})]
    )
    assert (alert.alert, alert.places, alert.value, alert.step) == (ACTIVATIONS, ("blocks.2", "blocks.1"), 0.5, 2)
    assert "50.0% of the hidden states" in described(alert)


def test_ranks_whose_weights_do_not_change_are_named(make_run):
    watch = watch_of(make_run, [shard("a")], None, [], still_steps=4)
    assert watch.line(line_of(1, 3), 1e-3, np.array([[3, 1], [0, 0]])) == []
    (alert,) = watch.line(line_of(4, 3), 1e-3, np.array([[6, 1], [0, 0]]))
    assert (alert.places, alert.value, alert.since, alert.cause) == (("rank 0",), 6, 1, "")
    rates = (5e-3, 1e-9, 0.0, 0.0)  # a schedule that falls to 0 has updates that are too small
    assert [watch.unchanged(line_of(2 * number + 1, 2), lr)[0] for number, lr in enumerate(rates)] == [2, 2, 4, 6]
    (alert,) = watch.line(line_of(1007, 3), 0.0, np.array([[4, 1006], [5, 1005]]))
    assert (alert.places, alert.since, alert.cause) == ((), 1005, "the learning rate is 0")
    assert described(alert) == "step 1009: 5 updates since step 1,005 changed no weights; the learning rate is 0"


def test_losses_before_the_last_change_of_a_setting_do_not_count(make_run):
    """Steps that the checkpoint lacks do not count, either: they are trained again."""
    folder = make_run("continued", guard={"plateau_window": 64})
    log = EventLog(folder.events)

    def found(changed):
        for step in range(8, 257, 8):
            log.write("progress", step=step, loss=4.0 if step <= 96 else 3.0)
        if changed:
            log.write("setting_changed", key="optim.lr", old=1, new=2, step=256)
        watch = AlertWatch(load_run(folder.config), [shard("a")], None, None, log.write, is_first=True)
        watch.take_up(folder.events, 200)
        return [one.alert for one in watch.line(line_of(201, 55), 1e-3, np.zeros((1, 2)))]

    assert found(changed=False) == [PLATEAU] and found(changed=True) == []


def events_of(folder, kind):
    return list(read_events(folder.events, kind))


@pytest.mark.parametrize("preset", ["guard", "off"])
def test_a_learning_rate_of_0_is_reported_and_the_run_goes_on(fork_ranks, make_run, monkeypatch, preset):
    run = {"dp_shard": 2, "steps": 24}
    folder, plain = make_run(guard={"preset": preset, "still_steps": 6}, **run), loop.learning_rate
    monkeypatch.setattr(
        loop, "learning_rate", lambda *given: lambda step: 0.0 if 5 <= step < 20 else plain(*given)(step)
    )
    results = fork_ranks(run_rank, 2, folder)
    assert [ending for ending, _ in results] == [(24, False)] * 2
    found = [alert_of(event) for event in events_of(folder, "alert")]
    assert [(one.alert, one.places, one.cause) for one in found] == (
        [(UNCHANGED, (), "the learning rate is 0")] if preset == "guard" else []
    )
    assert all(10 <= one.step <= 15 and one.since in (5, 6, 7) for one in found)
    assert [line.startswith("alert     step ") for line in results[0][1]].count(True) == len(found)


@pytest.mark.slow
def test_the_range_of_a_run_is_the_same_on_any_layout(fork_ranks, make_run):
    """Also with a sharded state, where each rank looks at its own rows; and the bits are those of a run without it."""
    measured, plain = {"precision_every": 3}, {"precision_every": 0}
    run = {"steps": 6, "precision": "fp16"}
    one = make_run("one", guard=measured, **run)
    without = make_run("without", guard=plain, **run)
    for folder in (one, without):
        fork_ranks(run_rank, 1, folder)
    found = events_of(one, "gradient_range")
    assert [event["step"] for event in found] == [3, 6]
    assert all(event["layers"] == ["blocks.0", "blocks.1", OUTSIDE] for event in found)
    assert all(max(event["underflow"]) < 0.05 and max(event["saturation"]) == 0 for event in found)
    assert events_of(without, "gradient_range") == [] and files_of(without) == files_of(one)
    for layout in ({"dp_shard": 2}, {"dp_shard": 2, "zero": 3}, {"pp": 2}):
        folder = make_run("".join(layout), guard=measured, **run | layout)
        fork_ranks(run_rank, 2, folder)
        for event, other in zip(found, events_of(folder, "gradient_range"), strict=True):
            assert event["layers"] == other["layers"] and event["loss_scale"] == other["loss_scale"] == 2.0**16
            np.testing.assert_allclose(event["underflow"], other["underflow"], atol=2e-3)
