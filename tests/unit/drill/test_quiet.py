"""Quiet faults: planted when they are due, judged by what was reported, and compared with the right run."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.checkpoints import write_checkpoint
from tests.dist.steps import batch_of, run_of
from tests.expect import refused

from ingot.drill import guarded, planted, shards
from ingot.drill.fault import DrillFault, play
from ingot.drill.faults import FAULTS
from ingot.drill.guarded import with_settings
from ingot.drill.job import RUN_VARIABLE
from ingot.drill.oracles import Recovery, RunFacts, Verdicts, read_facts
from ingot.drill.plan import FaultPlan, PlannedFault
from ingot.drill.planted import PlantedFaults, flip_bit
from ingot.drill.shards import SHARD_FAULTS, tokens_of
from ingot.drill.trial import DrilledRun, Silence, judge_recovered
from ingot.drill.undisturbed import DrillReference
from ingot.schema.guard_record import AGAIN, PASS, Measure, write_measures
from ingot.schema.quarantine import QuarantineEntry, add_to_quarantine
from ingot.schema.quarantine_record import Quarantined, write_quarantine
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import DOCUMENT_DTYPE, read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer import step as trainer_step
from ingot.trainer.build import build_parts
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.retry import StepRetry

DAMAGED = {"kind": "state_damaged", "step": 7, "rank": 1, "bit": 3, "tensor": "model.w"}
REPLAYED = {"kind": "state_replayed", "verdict": "transient", "ranks": [1], "named": True}
NAN = {"kind": "finding", "step": 7, "found": ["gradient not finite"], "skipped": True}


def fault_of(name: str) -> DrillFault:
    (found,) = (fault for fault in FAULTS if fault.id == name)
    return found


def measure(action, first, last):
    return Measure(action=action, first=first, last=last, found=("loss spike",))


def with_plan(trial, *kinds, step=7, measures=(), untrained=()):
    """Return the trial after faults of these kinds were planted at `step`, with the record of the guard, and a
    checkpoint whose ledger says which steps changed no weights."""
    for kind in kinds:
        number = trial.plan.add(PlannedFault(kind=kind, rank=1))
        trial.planned.append(number)
        trial.plan.record(number, step=step, bit=3)
    write_measures(trial.folder.guard, measures)
    ids = np.arange(30).reshape(30, 1)
    ids[[at - 1 for at in untrained]] = ~ids[[at - 1 for at in untrained]]
    write_checkpoint(trial.folder, 30, {}, ledger=(write_segment(trial.folder.ledger, 1, 30, ids),))
    return trial


# -- what was reported --


def test_a_flipped_bit_is_named_with_its_step_rank_and_verdict(trial):
    expects = fault_of("RS19").expects
    assert expects(with_plan(trial(DAMAGED, REPLAYED), "flip")) == ""
    assert "damage (step, rank, bit) []" in expects(with_plan(trial(REPLAYED), "flip"))
    for wrong in ({"rank": 0}, {"step": 8}, {"bit": 4}):
        assert "was reported, not" in expects(with_plan(trial(DAMAGED | wrong, REPLAYED), "flip"))
    assert "the replay says" in expects(with_plan(trial(DAMAGED, REPLAYED | {"verdict": "persistent"}), "flip"))
    assert "found trouble in the steps [7]" in expects(with_plan(trial(DAMAGED, REPLAYED, NAN), "flip"))


def test_wrong_gradients_and_moments_are_named_and_no_learning_rate_is_reported(trial):
    wrong, moment, still = (fault_of(name).expects for name in ("RS20", "RS21", "RS24"))
    both = [DAMAGED, DAMAGED | {"rank": 0}]  # both computed it
    assert wrong(with_plan(trial(*both, REPLAYED), "gradient")) == ""
    assert wrong(with_plan(trial(DAMAGED, REPLAYED), "gradient")) == ""
    assert "was reported, not" in wrong(with_plan(trial(*both, DAMAGED | {"rank": 0, "step": 9}, REPLAYED), "gradient"))
    assert "the replay says" in wrong(with_plan(trial(*both), "gradient"))
    assert moment(with_plan(trial(DAMAGED, REPLAYED), "moment")) == ""
    assert "was reported, not" in moment(with_plan(trial(*both, REPLAYED), "moment"))
    alert = {"kind": "alert", "alert": "weights unchanged", "step": 12}
    assert still(with_plan(trial(alert), "still")) == ""
    for other in ({"alert": "plateau"}, {"step": 7}, {"step": 99}):
        assert "without a learning rate" in still(with_plan(trial(alert | other), "still"))
    assert "found trouble" in still(with_plan(trial(alert, NAN), "still"))


@pytest.mark.parametrize("name", ["RS19", "RS20", "RS21", "RS22", "RS22 row", "RS23", "RS23 together", "RS24"])
def test_a_fault_that_was_not_planted_is_red(trial, name):
    one = trial(DAMAGED, REPLAYED, NAN)
    assert "it was not injected" in fault_of(name).expects(one)  # nothing was planned
    for kind in ("flip", "nan", "rate", "document"):
        one.planned.append(one.plan.add(PlannedFault(kind=kind)))
    assert "it was not injected" in fault_of(name).expects(one)


def test_a_step_without_a_finite_gradient_is_skipped_alone(trial):
    expects = fault_of("RS22").expects
    assert expects(with_plan(trial(NAN), "nan", untrained=[7])) == ""
    assert "was reported, not" in expects(with_plan(trial(), "nan", untrained=[7]))
    assert "was reported, not" in expects(with_plan(trial(NAN, NAN | {"step": 9}), "nan", untrained=[7]))
    assert "skipped [7, 8]" in expects(with_plan(trial(NAN), "nan", untrained=[7, 8]))
    assert "AGAIN" not in expects(with_plan(trial(NAN), "nan", untrained=[7]))
    assert "again" in expects(with_plan(trial(NAN), "nan", untrained=[7], measures=[measure(AGAIN, 7, 9)]))


def test_a_row_and_a_rate_are_trained_again_once(trial):
    row, rate = fault_of("RS22 row").expects, fault_of("RS23").expects
    assert row(with_plan(trial(), "nan", measures=[measure(AGAIN, 7, 9)])) == ""
    assert "took the measures" in row(with_plan(trial(), "nan", measures=[measure(AGAIN, 8, 10)]))
    assert rate(with_plan(trial(), "rate", measures=[measure(AGAIN, 8, 10)])) == ""
    for measures in ([], [measure(AGAIN, 7, 9)], [measure(AGAIN, 8, 10), measure(PASS, 8, 10)]):
        assert "took the measures" in rate(with_plan(trial(), "rate", measures=measures))


def test_three_faults_are_each_found_and_only_the_document_is_passed(trial):
    document = [measure(AGAIN, 7, 9), measure(PASS, 7, 9)]
    all_three = [*document, measure(AGAIN, 8, 10)]

    def together(*log, kinds=("document", "rate", "flip"), measures=all_three, untrained=(7, 8, 9)):
        one = with_plan(trial(*log), *kinds, measures=measures, untrained=untrained)
        return fault_of("RS23 together").expects(one)

    assert together(DAMAGED, REPLAYED) == ""
    assert "only 2 of three" in together(DAMAGED, REPLAYED, kinds=("document", "rate"))
    assert "against a document in the steps 7-9" in together(DAMAGED, REPLAYED, measures=document[:1])
    assert "changed no weights, not 7-9" in together(DAMAGED, REPLAYED, untrained=(7, 8, 9, 10))
    assert "after a spike of the rate" in together(DAMAGED, REPLAYED, measures=document)
    assert "was reported, not" in together(REPLAYED)


def test_a_slow_rank_and_a_report_are_found_by_their_own_events():
    slow = {"kind": "straggler", "time": 11.0, "step": 12, "rank": 1, "factor": 2.0, "phase": "compute"}
    found = Recovery(9.5, quiet=True, found_by="straggler")
    for event in (NAN | {"time": 10.0}, slow, {"kind": "progress", "time": 12.0, "step": 13}):
        found.take(event)
    assert (found.detected, found.by, found.recovered) == (1.5, "the watch for slow ranks", 2.5)
    assert found.cause == "step 12: rank 1 is 2 times as slow in its compute"
    other = Recovery(9.5, quiet=True)
    other.take(slow)
    assert other.detected is None
    report = {"kind": "health", "time": 10.5, "node": "a", "words": "w", "verdict": "drain"}
    left = Recovery(9.5, reached=4, found_by="health")
    for event in (report, {"kind": "run_started", "time": 11.0}, {"kind": "step", "step": 5, "time": 12.5}):
        left.take(event)
    assert (left.detected, left.cause, left.recovered) == (1.0, "a: w (drain)", 3.0)


def test_a_quiet_fault_has_recovered_at_the_first_sound_step(trial):
    log = [
        {"kind": "progress", "step": 6},
        NAN,
        {"kind": "progress", "step": 7},
        {"kind": "rolled_back", "from_step": 9, "to_step": 4},
        *({"kind": "progress", "step": step} for step in (8, 9, 10, 11)),
    ]
    found = Recovery(9.5, quiet=True)
    for number, event in enumerate(log):
        found.take({"time": 10.0 + number, **event})
    assert (found.detected, found.by, found.recovered) == (1.5, "the guard", 6.5)
    assert found.cause == "step 7: gradient not finite"
    loud = Recovery(9.5)
    loud.take({"time": 10.0, **NAN})
    assert loud.detected is None


# -- what it is compared with --


def test_only_steps_without_an_update_may_be_missing_in_the_directed_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    ids = np.arange(3).reshape(3, 1)
    ids[1] = ~ids[1]
    write_checkpoint(folder, 3, {}, ledger=(write_segment(folder.ledger, 1, 3, ids),))
    steps = [{"kind": "step", "time": 1.0, "step": n, "loss": 1.0, "grad_norm": 1.0} for n in (1, 2, 3)]
    folder.events.write_text("".join(json.dumps(step) + "\n" for step in steps))
    own = read_facts(folder)
    assert own.untrained == {2}

    def wrong(*missing) -> list[str]:
        directed = replace(own, trace={step: own.trace[step] for step in own.trace if step not in missing})
        verdicts = Verdicts()
        judge_recovered(verdicts, folder, "it", directed, 0)
        assert verdicts.untrained == (2,)
        return sorted(verdicts.wrong)

    assert wrong() == [] and wrong(2) == [] and wrong(3) == ["o1"]


def test_a_copy_that_decided_is_compared_with_the_directed_run(trial, monkeypatch):
    one, compared = trial(), []
    facts = RunFacts({}, "state", "state", [])
    for name in ("start", "finish", "judge", "judge_end"):
        monkeypatch.setattr(one, name, lambda *_: one.run.done_code)
    monkeypatch.setattr(one, "follow", lambda _: True)
    monkeypatch.setattr(one, "judge_recovered", lambda facts, _, since=None: compared.append((facts.state, since)))
    alone = DrillFault(id="X", injects="x", inject=lambda _: None, expects=lambda _: "")
    reference = replace(facts, state="undisturbed")
    play(alone, one, reference)
    play(replace(alone, directed=lambda _: facts), one, reference)
    play(replace(alone, wrong_from=lambda _: 9), one, reference)
    assert compared == [("undisturbed", None), ("state", None), ("undisturbed", 9)]


class _Shown(Silence):
    def __init__(self):
        self.lines = []

    def say(self, text=""):
        self.lines.append(text)


@pytest.fixture
def reference(run_file):
    facts = RunFacts({1: [(b"1", b"1")]}, "state", "state", [])
    return DrillReference(DrilledRun(run_file=run_file, config=load_run(run_file), step_seconds=0.01), facts, 1.0)


def test_a_spike_has_to_be_farther_than_all_healthy_steps(reference, tmp_path, monkeypatch):
    found = {"kind": "finding", "loss_sigmas": 1.0, "norm_sigmas": 9.1}
    shown, given = _Shown(), []

    def undisturbed(run, place, output):
        RunFolder(place).root.mkdir(parents=True)
        RunFolder(place).events.write_text(json.dumps(found) + "\n")
        given.append(run)
        return reference.facts, 1.0

    monkeypatch.setattr(guarded, "undisturbed", undisturbed)
    made = guarded.train_guarded(reference, tmp_path / "drill", shown)
    assert made.run.config.guard.sigmas == 14 and made.run.config.guard.settle_steps == 0
    assert made.run.config.guard.preset == "guard" and 'guard.preset="watch"' in given[0].settings
    assert any("guard.sigmas = 14" in line and "9.1 deviations" in line for line in shown.lines)
    monkeypatch.setattr(guarded, "undisturbed", lambda *_: (replace(reference.facts, state="other"), 1.0))
    with refused("E-DRILL-UNSTEADY"):
        guarded.train_guarded(reference, tmp_path / "drill", shown)
    skipped = RunFolder(tmp_path / "drill" / "reference").events
    skipped.parent.mkdir(parents=True)
    skipped.write_text('{"kind": "skipped", "steps": [3]}\n')
    guarded.train_guarded(reference, tmp_path / "drill", shown)
    assert any("because the guard acted in the first one" in line for line in shown.lines)


def test_a_run_that_tries_steps_again_does_so_in_its_copies_alone(reference, tmp_path, monkeypatch):
    """Without measures there is no second try, so a run with preset "watch" may not ask for one."""
    given = []
    monkeypatch.setattr(guarded, "undisturbed", lambda run, *_: given.append(run) or (reference.facts, 1.0))
    own = replace(reference, run=with_settings(reference.run, {"guard.retry": "on"}))
    made = guarded.train_guarded(own, tmp_path / "drill", Silence())
    assert [list(one.config.guard.problems()) for one in (*given, made.run)] == [[], []]
    assert made.run.config.guard.retries and 'guard.retry="off"' in given[0].settings


@pytest.mark.parametrize(("gpus", "values", "trained"), [((), 1, 0), (("H200",), 1, 1), (("H200",), 0, 0)])
def test_other_kernels_are_compared_with_a_run_that_has_them(reference, tmp_path, monkeypatch, gpus, values, trained):
    given, facts = [], replace(reference.facts, state="other kernels")
    monkeypatch.setattr(guarded, "find_gpus", lambda: gpus)
    monkeypatch.setattr(guarded, "undisturbed", lambda run, *_: given.append(run) or (facts, 1.0))
    settings = {"guard.hash_every": 1, "guard.recompute_every": values}
    found = guarded.facts_with(reference, settings, tmp_path, Silence())
    assert len(given) == trained and found.state == ("other kernels" if trained else "state")
    assert fault_of("RS20").settings(reference.run.config)["guard.recompute_every"] == 1


def test_the_plug_in_is_added_to_those_of_the_run(reference, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own")
    config = reference.run.config
    run = replace(reference.run, config=replace(config, plugins=replace(config.plugins, modules=("mine",))))
    made = guarded.planted(run, tmp_path / "RS19")
    assert 'plugins.modules=["mine", "ingot_drill"]' in made.settings
    assert made.variables["PYTHONPATH"] == f"{tmp_path / 'RS19.planted'}:/own"
    assert (tmp_path / "RS19.planted" / "ingot_drill.py").exists()


# -- what is planted --


@dataclass(frozen=True)
class _Batch:
    step: int
    inputs: torch.Tensor
    targets: torch.Tensor


class _Rank:
    """A rank with one weight, whose steps are called by hand."""

    def __init__(self, folder: Path, config, monkeypatch, rank=0):
        monkeypatch.setenv(RUN_VARIABLE, str(folder))
        monkeypatch.setattr(planted, "change_steps", lambda **_: None)
        self.piece = SimpleNamespace(name="w", value=torch.ones(4), grad=None)
        run = SimpleNamespace(
            config=config, rank=rank, pieces=[self.piece], device="cpu", sum_over_ranks=lambda tensor: tensor
        )
        self.faults = PlantedFaults(run, None)

    def step(self, number: int) -> str:
        """Do a step. Returns what was planted in it."""
        self.piece.grad, before = torch.zeros(4), self.piece.value.clone()
        batch = _Batch(number, *torch.zeros(2, 1, 1, 2, dtype=torch.int64))
        found = "document " * bool(self.faults.on_batch(batch).targets.any())
        found += "nan " * (self.faults.on_norm(number) is None and math.isnan(float(self.piece.grad.sum())))
        self.faults.on_gradients(number)
        found += "flip " * (not torch.equal(before, self.piece.value))
        found += "rate " * (self.faults.on_rate(number, 1.0) != 1.0)
        self.faults.on_update(number)
        self.faults.on_line([SimpleNamespace(step=number)])
        return found.strip()


@pytest.fixture
def config(run_file):
    own = load_run(run_file)
    return replace(own, guard=replace(own.guard, calm_steps=3))


def test_faults_come_one_after_the_other_until_the_guard_acts(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    plan, rank = FaultPlan(run.root), _Rank(run.root, config, monkeypatch)
    assert rank.step(1) == ""
    plan.add(PlannedFault(kind="nan", steps=2))
    plan.add(PlannedFault(kind="rate", factor=50.0))
    assert [rank.step(n) for n in (2, 3, 4, 5)] == ["", "nan", "nan", ""]  # they are planned between 1 and 2
    # The rank goes back, also in a new process: without a measure it comes again.
    rank = _Rank(run.root, config, monkeypatch)
    assert [rank.step(n) for n in (3, 4)] == ["nan", "nan"]
    write_measures(run.guard, [measure(AGAIN, 3, 4)])
    assert [rank.step(n) for n in range(2, 10)] == ["", "", "", "", "", "", "rate", ""]  # calm for three steps first
    assert plan.planted(0) == {"step": 3} and plan.planted(1) == {"step": 8}


def test_a_bit_flips_once_after_a_step_of_the_same_attempt(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    plan = FaultPlan(run.root)
    plan.add(PlannedFault(kind="flip", rank=1, element=6, bit=35))
    rank, other = _Rank(run.root, config, monkeypatch, rank=1), _Rank(run.root, config, monkeypatch, rank=0)
    assert other.step(1) == "" and plan.starts() == {0: 2}
    rank = _Rank(run.root, config, monkeypatch, rank=1)
    assert [rank.step(n) for n in (2, 3, 4)] == ["", "flip", ""]  # its state was not hashed before step 2
    assert plan.planted(0) == {"step": 3, "tensor": "w", "bit": 3}
    assert [_Rank(run.root, config, monkeypatch, rank=1).step(n) for n in (3, 4)] == ["", ""]


def test_bits_of_gradients_and_moments_flip_once_on_their_rank(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    plan = FaultPlan(run.root)
    plan.add(PlannedFault(kind="gradient", rank=1, element=33, bit=35))
    rank, other = _Rank(run.root, config, monkeypatch, rank=1), _Rank(run.root, config, monkeypatch, rank=0)
    assert other.step(1) == ""
    rank = _Rank(run.root, config, monkeypatch, rank=1)
    buffer = torch.ones(40)
    for step in (1, 2, 2):
        rank.faults.on_own_gradients(step, buffer)
    assert torch.nonzero(buffer != 1).tolist() == [[1]] and plan.planted(0) == {
        "step": 2,
        "tensor": "gradient",
        "bit": 3,
    }
    plan.add(PlannedFault(kind="moment", rank=1, element=1, bit=2))
    moments = {"w": {"step": torch.ones(1), "m": torch.ones(4), "v": torch.ones(4)}}
    monkeypatch.setattr(planted, "_changes", [SimpleNamespace(optimizer=SimpleNamespace(moments=lambda: moments))])
    assert other.step(3) == "" and plan.starts() == {0: 2, 1: 4}
    rank = _Rank(run.root, config, monkeypatch, rank=1)
    assert [rank.step(n) for n in (3, 4)] == ["", ""]
    assert plan.planted(1) == {"step": 4, "tensor": "v.w", "bit": 2}
    assert torch.equal(moments["w"]["m"], torch.ones(4)) and int((moments["w"]["v"] != 1).sum()) == 1


def test_steps_without_a_learning_rate_have_none_each_time(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    plan, rank = FaultPlan(run.root), _Rank(run.root, config, monkeypatch)
    plan.add(PlannedFault(kind="still", steps=2))
    assert [rank.step(n) for n in (1, 2, 3, 4)] == ["", "rate", "rate", ""]
    assert [rank.faults.on_rate(n, 0.1) for n in (1, 2, 3, 4)] == [0.1, 0.0, 0.0, 0.1]
    assert [_Rank(run.root, config, monkeypatch).step(n) for n in (2, 3, 4)] == ["rate", "rate", ""]


def test_a_fault_comes_neither_before_the_guard_knows_enough_nor_too_late(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    plan = FaultPlan(run.root)
    plan.add(PlannedFault(kind="rate", factor=50.0, latest=1))
    plan.add(PlannedFault(kind="nan", once=False, earliest=5, latest=6))
    rank = _Rank(run.root, config, monkeypatch)
    assert [rank.step(n) for n in range(1, 8)] == ["", "", "", "", "nan", "", ""]


def test_a_document_comes_whenever_its_data_are_read(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    FaultPlan(run.root).add(PlannedFault(kind="document", steps=2))
    rank = _Rank(run.root, config, monkeypatch)
    assert [rank.step(n) for n in (1, 2, 3, 4, 2, 3)] == ["", "document", "document", "", "document", "document"]


def test_programs_hang_once_and_fail_until_they_are_repaired(tmp_path, config, monkeypatch):
    run, done = RunFolder(tmp_path / "run"), []
    run.root.mkdir()
    for name, where in (("hold_interpreter_lock", planted), ("wait_for_ever", planted), ("abort", planted.os)):
        monkeypatch.setattr(where, name, lambda name=name: done.append(name))
    monkeypatch.setattr(planted.dist, "all_reduce", lambda tensor: done.append(tensor.numel()))
    monkeypatch.setattr(planted.time, "sleep", done.append)

    def steps(rank, first, last):
        done.clear()
        one = _Rank(run.root, config, monkeypatch, rank=rank)
        for number in range(first, last + 1):
            one.step(number)
        return list(done)

    plan = FaultPlan(run.root)
    plan.add(PlannedFault(kind="hold", rank=0))
    plan.add(PlannedFault(kind="wait", rank=1))
    assert steps(0, 1, 3) == ["hold_interpreter_lock"] and plan.planted(0) == {"step": 2} and 1 in plan.starts()
    assert steps(0, 2, 4) == [] and steps(1, 2, 5) == ["wait_for_ever"] and steps(1, 2, 5) == []
    plan.add(PlannedFault(kind="abort", rank=0))
    assert steps(0, 5, 8) == ["abort"] and plan.planted(2) == {"step": 6}
    assert steps(0, 5, 8) == ["abort"] and steps(1, 5, 8) == []  # in each attempt, of that rank
    plan.add(PlannedFault(kind="leave", rank=0))
    assert steps(0, 7, 9) == [] and 3 not in plan.starts()  # not before the one before it is over
    plan.repair(2)
    assert steps(0, 5, 9) == [] and plan.planted(3) is not None
    assert steps(1, 5, 9) == [7] == steps(1, 5, 9)
    plan.repair(3)
    assert steps(1, 5, 9) == []
    plan.add(PlannedFault(kind="slow", rank=0, seconds=0.5, steps=2, once=False))
    assert steps(0, 10, 13) == [0.5, 0.5] and steps(1, 10, 13) == [0.0, 0.0]


def test_a_step_that_is_tried_again_has_the_faults_in_both_tries(fork_ranks):
    """Through the step of a run: the data and the gradients of each try, and the rate of the update."""

    def step_of(rank, ranks):
        run, seen = run_of(precision="fp32"), []
        parts = build_parts(run, torch.device("cpu"), None)
        parts.step_judge = StepJudge(run.guard, "cpu")
        parts.retry = StepRetry(parts.model.stages, torch.device("cpu"), scaled_loss=False, data_rank=0, ranks=1)
        parts.retry.is_needed = lambda judged: True
        planted.change_steps(
            batch=lambda batch: seen.append("batch") or batch,
            rate=lambda step, rate: 0.25,
            before_norm=lambda step: seen.append(f"norm {step}"),
        )
        result = trainer_step.train_step(parts, batch_of(run, parts.mesh, 3), 1e-3)
        program = trainer_step.update(
            parts, 4, trainer_step.forward_backward(parts, batch_of(run, parts.mesh, 4)), 1e-3
        )
        return seen, result.lr, program.lr, [one.step for one in parts.retry.take()]

    assert fork_ranks(step_of, 1) == [(["batch", "norm 3"] * 2 + ["batch", "norm 4"], 0.25, 0.25, [3])]


@pytest.mark.parametrize("bit", [0, 9, 31])
def test_one_bit_of_one_element_flips(bit):
    tensor = torch.ones(3)
    flip_bit(tensor, 1, bit)
    changed = tensor.view(torch.int32) ^ torch.ones(3).view(torch.int32)
    assert [value % 2**32 for value in changed.tolist()] == [0, 1 << bit, 0]


# -- damage to tokens --


def test_the_tokens_of_the_run_are_not_touched(reference, tmp_path):
    tokens, place = tmp_path / "tokens", tmp_path / "drill" / "RS25"
    place.parent.mkdir()
    before = {path.name: path.read_bytes() for path in tokens.iterdir()}
    stop, quarantine = SHARD_FAULTS
    run = stop.prepare(reference.run, place)
    own = tokens_of(place)
    assert run.config.data.tokens == str(own) and not (own / "walk.tokens").is_symlink()
    assert (own / "walk.blocks").resolve() == tokens / "walk.blocks"
    shown = SimpleNamespace(run=run, folder=RunFolder(place), injects=lambda *_, **__: None, output=Silence())
    stop.inject(shown)
    assert (own / "walk.tokens").read_bytes() != before["walk.tokens"]
    assert {path.name: path.read_bytes() for path in tokens.iterdir()} == before
    stop.repair(shown)
    assert (own / "walk.tokens").read_bytes() == before["walk.tokens"]
    leaves_out = quarantine.prepare(reference.run, place.with_name("other")).config.data
    assert (leaves_out.on_damage, leaves_out.max_quarantined) == ("quarantine", 1.0)


def test_listed_documents_are_no_damage_of_the_shard(reference, trial, tmp_path):
    """They are in the record of the copy as well, and the bit that flips is in none of them."""
    quarantine, tokens = SHARD_FAULTS[1], tmp_path / "tokens"
    shard, place = read_token_manifest(tokens).shards[0], shards._place_of(reference.run)
    token = place[1] // 2
    index = np.array([(0, token, b"a" * 16), (token, 40, b"b" * 16)], DOCUMENT_DTYPE)
    index.tofile(tokens / f"{shard.name}.documents")
    entry = QuarantineEntry(document=(b"b" * 16).hex(), reason="x", date="2026-11-28")
    add_to_quarantine(tmp_path / "list.jsonl", [entry])
    one = trial({"kind": "quarantined", "code": "E-SHARD-HASH"}, {"kind": "quarantined", "code": "E-FILTER"})
    one.run = quarantine.prepare(with_settings(reference.run, {"data.quarantine": ("list.jsonl",)}), one.folder.root)
    moved = shards._place_of(one.run)
    assert moved != place and not token <= moved[1] // 2 < token + 40

    def record(begin, end, code):
        return Quarantined(step=1, shard=shard.name, blocks_sha256=shard.blocks_sha256, begin=begin, end=end, code=code)

    listed, at = record(0, 10**6, "E-DOCUMENT-LISTED"), moved[1] // 2
    for damaged, named in (((at, at + 1), ""), ((at + 1, at + 9), "not the damaged block"), ((0, at), "not the")):
        write_quarantine(one.folder.quarantine, (listed, record(*damaged, "E-SHARD-HASH")))
        found = quarantine.expects(one)
        assert named in found if named else found == ""


def test_a_run_that_cannot_have_a_fault_leaves_it_out(run_file, monkeypatch):
    monkeypatch.setattr("ingot.drill.programs.find_gpus", list)
    config = load_run(run_file)

    def left_out(**sections):
        own = replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})
        return {fault.id for fault in FAULTS if fault.needs(own)} - {"RS15"}

    sizes = {"RS23", "RS23 together"}
    assert left_out() == set()
    assert left_out(guard={"hash_every": 0}) == {"RS19", "RS20", "RS21", "RS23 together"}
    assert left_out(guard={"preset": "off"}) == {"RS22", "RS22 row", "RS24"} | sizes
    assert left_out(guard={"preset": "watch"}) == {"RS22", "RS22 row"} | sizes
    assert left_out(train={"precision": "fp16"}) == {"RS22", "RS22 row"} | sizes
    assert left_out(train={"steps": 20}) == {"RS23 together"}
    assert left_out(train={"steps": 16}) == {"RS23 together", "RS35"}
    assert (
        left_out(launch={"straggler_factor": 0.0}) == left_out(parallel={"dp_shard": 1, "pp": 2}) - {"RS20"} == {"RS35"}
    )
    assert left_out(data={"prefetch": 64}) == {"RS25", "RS25 quarantine"}
