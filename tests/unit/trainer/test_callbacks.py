"""Callbacks in runs: what they see and when, what their verdicts do, and what checkpoints keep of them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tests.expect import refused

from ingot.config import to_toml
from ingot.events import read_events
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback, StepNumbers, Verdict
from ingot.schema import events
from ingot.theory.rules import load_run
from ingot.trainer.callbacks import Callbacks
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.checkpoint.reader import read_blocks
from ingot.trainer.checkpoint.state import StateBlock

from .test_loop import files_of, run_rank, step_facts
from .test_mixture_change import accept

CPU = torch.device("cpu")
LINE = [StepNumbers(step=3, loss=1.0, grad_norm=1.0, skipped=False)]


class Counting(StepCallback):
    """Counts updates in a tensor, sums gradients in tensors cut like the pieces, and records the steps of its lines."""

    script: ClassVar[dict[int, Verdict]] = {}

    def __init__(self, run, options):
        self.own = [piece for piece in run.pieces if piece.value.numel()]
        self.sums = {piece.name: torch.zeros_like(piece.value) for piece in self.own}
        self.count, self.seen, self.asked = torch.zeros((), dtype=torch.int64), [], set()

    def on_gradients(self, step):
        for piece in self.own:
            self.sums[piece.name] += piece.grad * step

    def on_update(self, step):
        assert all(piece.grad is None for piece in self.own)
        self.count += 1

    def on_line(self, steps):
        self.seen += [one.step for one in steps]
        return {"updates": int(self.count)}

    def verdict(self, steps):
        step = steps[-1].step
        if step in self.script and step not in self.asked:
            self.asked.add(step)
            return self.script[step]
        return Verdict.CONTINUE

    def tensors(self):
        return {"sums": self.sums, "count": self.count}

    def record(self):
        return {"seen": self.seen}

    def restore(self, record):
        self.seen = list(record["seen"])


@pytest.fixture
def counted(register, make_run):
    """`counted(name, ...)` makes a run with the callback Counting."""
    register(Counting, pieces=1)

    def make(name="run", **changes):
        folder = make_run(name, **changes)
        folder.config.write_text(folder.config.read_text() + "\n[callbacks.probe]\n")
        return folder

    return make


def scripted(folder, script):
    def run(rank, ranks, until_step=None):
        Counting.script = script
        return run_rank(rank, ranks, folder, until_step)[0]

    return run


def saved(folder) -> dict:
    """The record and the tensors of the callback in the newest checkpoint, as (shape, checksum or value)."""
    manifest = list_checkpoints(folder.checkpoints)[0].manifest
    tensors = {name: entry for name, entry in manifest.tensors.items() if name.startswith("callback.")}
    return {"record": manifest.callbacks, **{name: entry.crc32 for name, entry in tensors.items()}}


def metrics(folder):
    return {e["step"]: e["values"] for e in read_events(folder.events, events.METRICS)}


def relayout(folder, **parallel):
    config = load_run(folder.config)
    folder.config.write_text(to_toml(replace(config, parallel=replace(config.parallel, **parallel))))


def tensors_of(folder) -> dict[str, torch.Tensor]:
    """The whole tensors of callbacks in the newest checkpoint."""
    newest = list_checkpoints(folder.checkpoints)[0]
    entries = {n: entry for n, entry in newest.manifest.tensors.items() if n.startswith("callback.")}
    found = {n: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for n, entry in entries.items()}
    blocks = [StateBlock(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in found.items()]
    read_blocks(newest.path, newest.manifest, blocks)
    return found


def test_the_state_of_a_callback_is_in_the_checkpoint(fork_ranks, counted):
    folder = counted(dp_shard=2)
    fork_ranks(run_rank, 2, folder)
    found = saved(folder)
    assert found["record"] == {"probe": {"seen": list(range(1, 13))}} and "callback.probe.count" in found
    assert {n for n in found if "sums" in n} == {f"callback.probe.sums.{n}" for n in parameters(folder)}
    assert {step: values["updates"] for step, values in metrics(folder).items()} == {n: n for n in (3, 5, 6, 9, 10, 12)}
    assert {e["by"] for e in read_events(folder.events, events.METRICS)} == {"probe"}


def parameters(folder):
    tensors = list_checkpoints(folder.checkpoints)[0].manifest.tensors
    return {name.removeprefix("model.") for name in tensors if name.startswith("model.")}


def test_callbacks_leave_training_alone(fork_ranks, counted, make_run):
    watched, plain = counted("watched", dp_shard=2), make_run("plain", dp_shard=2)
    fork_ranks(run_rank, 2, watched)
    fork_ranks(run_rank, 2, plain)
    assert step_facts(watched) == step_facts(plain)
    assert list_checkpoints(plain.checkpoints)[0].manifest.callbacks == {}


@pytest.mark.parametrize("ends", [7, pytest.param(10, marks=pytest.mark.slow)])
def test_stopping_and_resuming_gives_the_bits_of_an_undisturbed_run(fork_ranks, counted, ends):
    whole, broken = counted("whole", dp_shard=2), counted("broken", dp_shard=2)
    fork_ranks(run_rank, 2, whole)
    fork_ranks(run_rank, 2, broken, ends)
    fork_ranks(run_rank, 2, broken)
    assert saved(broken) == saved(whole) and files_of(broken) == files_of(whole)


def test_another_layout_takes_the_state_over(fork_ranks, counted):
    whole, moved = counted("whole", precision="fp64"), counted("moved", dp_shard=2, precision="fp64")
    fork_ranks(run_rank, 1, whole)
    fork_ranks(run_rank, 2, moved, 5)
    relayout(moved, dp_shard=1, tp=2)
    fork_ranks(run_rank, 2, moved, 8)
    relayout(moved, dp_shard=2, tp=1, pp=2, zero=1)
    fork_ranks(run_rank, 4, moved, 10)
    relayout(moved, dp_shard=1, pp=1)
    fork_ranks(run_rank, 1, moved)
    ours, theirs = tensors_of(moved), tensors_of(whole)
    assert ours.keys() == theirs.keys() and ours["callback.probe.count"] == 12
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert saved(moved)["record"] == saved(whole)["record"]


def test_a_verdict_to_stop_saves_and_stops(fork_ranks, counted):
    folder = counted(dp_shard=2)
    assert fork_ranks(scripted(folder, {6: Verdict.STOP}), 2) == [(6, True)] * 2
    assert saved(folder)["record"] == {"probe": {"seen": [1, 2, 3, 4, 5, 6]}}
    assert [e["step"] for e in read_events(folder.events, events.STOPPED)] == [6]


def test_a_verdict_to_roll_back_takes_tensors_and_record_back(fork_ranks, counted):
    whole, back = counted("whole", dp_shard=2), counted("back", dp_shard=2)
    fork_ranks(run_rank, 2, whole)
    assert fork_ranks(scripted(back, {9: Verdict.ROLL_BACK, 12: Verdict.ROLL_BACK}), 2) == [(12, False)] * 2
    jumps = [(e["from_step"], e["to_step"]) for e in read_events(back.events, events.ROLLED_BACK)]
    assert jumps == [(9, 5), (12, 10)]
    assert saved(back) == saved(whole) and files_of(back) == files_of(whole)


def test_the_most_urgent_verdict_counts(register):
    class Stopping(StepCallback):
        def verdict(self, steps):
            return Verdict.STOP

    register(Counting, pieces=1)
    CALLBACKS.register(CallbackPart(name="stopping", make=Stopping))
    made = {"stopping": {}, "probe": {}}
    for names in (list(made), list(reversed(made))):
        callbacks = Callbacks(SimpleNamespace(callbacks={name: {} for name in names}), [], CPU)
        assert callbacks.line(LINE, lambda *_, **__: None) is Verdict.STOP


def test_a_verdict_is_the_same_on_all_ranks(fork_ranks, counted):
    folder = counted(dp_shard=2)

    def differ(rank, ranks):
        Counting.script = {3: Verdict.STOP} if rank else {}
        with refused("E-CALLBACK", callback="probe", method="verdict"):
            run_rank(rank, ranks, folder)
        return True

    assert fork_ranks(differ, 2, timeout=30) == [True, True]


def test_a_callback_that_is_added_needs_consent_and_begins_anew(fork_ranks, counted, make_run, capsys):
    plain, folder = make_run("plain"), make_run("run")
    fork_ranks(run_rank, 1, plain)
    fork_ranks(run_rank, 1, folder, 5)
    config = load_run(folder.config)
    accept(folder, replace(config, callbacks={"probe": {}}), "callbacks")
    fork_ranks(run_rank, 1, folder)
    assert tensors_of(folder)["callback.probe.count"] == 7
    assert saved(folder)["record"] == {"probe": {"seen": list(range(6, 13))}}
    assert step_facts(folder) == step_facts(plain)


def test_a_callback_that_is_removed_needs_consent_and_leaves_nothing(fork_ranks, counted, make_run, capsys):
    off = {"preset": "off"}  # a guard would compare losses with those since the change alone
    plain, folder = make_run("plain", guard=off), counted("run", guard=off)
    fork_ranks(run_rank, 1, plain)
    fork_ranks(run_rank, 1, folder, 5)
    accept(folder, replace(load_run(folder.config), callbacks={}), "callbacks")
    fork_ranks(run_rank, 1, folder)
    assert tensors_of(folder) == {} and saved(folder) == {"record": {}}
    assert files_of(folder) == files_of(plain)


class Norms(StepCallback):
    """The norm of the gradient and the sum of all values, by the contract: a piece counts where it is owned."""

    def __init__(self, run, options):
        self.run, self.norm, self.order = run, torch.zeros(()), []

    def on_gradients(self, step):
        self.order.append(("gradients", step))
        owned = [piece for piece in self.run.pieces if piece.owner and piece.value.numel()]
        squares = sum((piece.grad.double().square().sum() for piece in owned), torch.zeros((), dtype=torch.float64))
        self.norm = self.run.sum_over_ranks(squares).sqrt()

    def on_update(self, step):
        self.order.append(("update", step))

    def on_line(self, steps):
        order, self.order = self.order, []
        numbers = [one.step for one in steps]
        assert order == [(kind, step) for step in numbers for kind in ("gradients", "update")]
        return {"norm": self.norm.item()}


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "zero": 3},
        {"dp_shard": 2, "offload": "cpu"},
        {"tp": 2},
        {"pp": 2},
        {"dp_replicate": 2},
    ],
    ids=str,
)
def test_callbacks_see_gradients_before_clipping_in_every_layout(fork_ranks, register, make_run, layout):
    register(Norms)
    folder = make_run(clip_norm=0.05, steps=4, log_every=2)
    folder.config.write_text(folder.config.read_text() + "\n[callbacks.probe]\n")
    relayout(folder, **layout)
    fork_ranks(run_rank, 2, folder)
    logged = step_facts(folder)
    assert {step: v["norm"] for step, v in metrics(folder).items()} == {
        step: pytest.approx(logged[step][1], rel=1e-5) for step in (2, 4)
    }
    assert min(facts[1] for facts in logged.values()) > 0.05  # clipping acts
