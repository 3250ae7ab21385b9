"""Whole runs with batches that hurt, on forked ranks: what is found, how the run goes on, and the bits it ends with."""

import math
import shutil
from dataclasses import replace

import pytest
from tests.unit.trainer.test_loop import files_of, ledger_proof, run_rank, saved_tensors, step_facts
from tests.unit.trainer.test_mixture_change import accept

from ingot.cli.main import main
from ingot.drill.planted import flip_bit
from ingot.errors import RunFailed
from ingot.events import read_events
from ingot.report.facts import gather
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.order_sections import windows_of
from ingot.report.lineage.prove import prove_run
from ingot.report.status import read_status
from ingot.schema.guard_record import AGAIN, EARLIER, LOWER, PASS, STOP, Measure, read_measures, write_measures
from ingot.theory.rules import load_run
from ingot.trainer import loop
from ingot.trainer import step as trainer_step
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.loader.ledger import of_step, read_ledger
from ingot.trainer.loader.reader import Windows
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.resilience.lock import RunLock
from ingot.trainer.resilience.stop_requests import StopRequest, StopRequests
from ingot.trainer.step import train_step
from ingot.watch.chapters import head
from ingot.watch.live import LiveRun

GUARD = {"window": 16, "ready": 8, "settle_steps": 4, "loss_spread": 0.2, "norm_spread": 0.5}


def shuffled(batch):
    """The batch with other targets: a loss that no learning explains."""
    return replace(batch, targets=(batch.targets * 7 + 11) % 300)


def train_hurting(rank, world, folder, bad, until_step=None, times=math.inf):
    """Train `folder`, with batches that hurt in the steps `bad`, the first `times` that they come."""
    loop.train_step = train_step_with(bad, times)
    return run_rank(rank, world, folder, until_step)


def train_step_with(bad, times=math.inf):
    """The function that trains a step, with batches that hurt in the steps `bad`, the first `times` that they come."""
    seen = []

    def step(parts, batch, lr):
        seen.append(batch.step)
        hurts = batch.step in bad and seen.count(batch.step) <= times
        return train_step(parts, shuffled(batch) if hurts else batch, lr)

    return step


def train_with(fork_ranks, folder, bad, ranks=2, until_step=None, times=math.inf):
    """Train `folder` on forked ranks, as `train_hurting` does."""
    return fork_ranks(lambda rank, world: train_hurting(rank, world, folder, bad, until_step, times), ranks)


def of_kind(folder, kind):
    return list(read_events(folder.events, kind))


def test_a_batch_that_hurts_costs_its_update_alone(fork_ranks, make_run, capsys):
    """The bits are those of a run that was directed to pass it. After the warm-up, sizes are not judged for a while."""
    run = {"dp_shard": 2, "steps": 24, "guard": GUARD | {"settle_steps": 10}, "lr": 2e-2}
    found, ordered = make_run("found", **run), make_run("ordered", skip=("17", "21"), **run)
    train_with(fork_ranks, found, {12, 17, 21})
    train_with(fork_ranks, ordered, {12})
    assert [(e["step"], e["found"][0], e["skipped"]) for e in of_kind(found, "finding")] == [
        (17, "loss spike", True),
        (21, "loss spike", True),
    ]
    assert [e["steps"] for e in of_kind(found, "skipped")] == [[17], [21]]
    assert [e["steps"] for e in of_kind(ordered, "passed")] == [[17], [21]]
    assert saved_tensors(found) == saved_tensors(ordered)
    trained = {step: facts for step, facts in step_facts(found).items() if step not in (17, 21)}
    assert trained == step_facts(ordered) and not found.guard.exists()
    for folder in (found, ordered):
        ledger = ledger_proof(folder, load_run(folder.config)).ledger
        assert [step for one in ledger for step in one.untrained] == [17, 21]
        proof = prove_run(folder.root)
        assert proof.fault is None and proof.untrained == (17, 21) and proof.steps == 24
    assert main(["ckpt", "prove", str(found.root)]) == 0
    assert "untrained 17, 21 (2 steps changed no weights" in capsys.readouterr().out
    assert [one.sha256 for one in list_checkpoints(found.checkpoints)[0].manifest.ledger] == [
        one.sha256 for one in list_checkpoints(ordered.checkpoints)[0].manifest.ledger
    ]


def test_a_row_of_batches_that_hurt_is_passed(fork_ranks, make_run):
    """The run goes back twice, to a proven checkpoint: first it trains them again, then it passes them. A kill on the
    way changes nothing."""
    run = {"dp_shard": 2, "steps": 30, "guard": GUARD, "lr": 2e-2}
    bad = {20, 21, 22, 23, 24}
    found, ordered = make_run("found", **run), make_run("ordered", skip=("20-24",), **run)
    results = train_with(fork_ranks, found, bad)
    assert [ending for ending, _ in results] == [(30, False)] * 2
    train_with(fork_ranks, ordered, ())
    measures = read_measures(found.guard)
    assert [(one.action, one.first, one.last) for one in measures] == [(AGAIN, 20, 22), (PASS, 20, 22)]
    assert [(e["from_step"], e["to_step"]) for e in of_kind(found, "rolled_back")] == [(24, 10)] * 2
    assert any(line.startswith("guard     steps 20-22: ") for line in results[0][1])
    assert [[one["step"] for one in e["passed_over"]] for e in of_kind(found, "rolled_back")] == [[20, 15]] * 2
    assert all("without doubt" in e["why"] for e in of_kind(found, "rolled_back"))
    assert saved_tensors(found) == saved_tensors(ordered)
    manifest = ledger_proof(found, load_run(found.config))
    assert manifest.guard.measures == tuple(measures)
    assert [step for one in manifest.ledger for step in one.untrained] == [20, 21, 22, 23, 24]
    consumed = {step: of_step(ids) for step, ids in read_ledger(found.ledger, manifest.ledger)}
    windows = Windows(RunTokens(found.root).manifest, 16)
    passed = windows_of(found.root, [20, 22])
    assert {step: [begin for _, begin, _ in own] for step, own in passed.items()} == {
        step: windows.locate(consumed[step])[1].tolist() for step in (20, 22)
    }
    killed = make_run("killed", **run)
    train_with(fork_ranks, killed, bad, until_step=21)
    assert [e["step"] for e in of_kind(killed, "stopped")] == [21] and not killed.guard.exists()
    train_with(fork_ranks, killed, bad)
    assert files_of(killed) == files_of(found)
    assert [(one.action, one.last) for one in read_measures(killed.guard)] == [(AGAIN, 22), (PASS, 22)]


@pytest.mark.slow
def test_a_stop_between_two_log_lines_loses_no_measure(fork_ranks, make_run):
    """Three steps hurt after a line, and a request to stop comes before the next one: the run goes back first."""
    run = {"steps": 40, "guard": GUARD, "lr": 2e-2, "log_every": 10, "every_steps": 10}
    bad, folder, through = {21, 22, 23}, make_run("stopped", **run), make_run("through", **run)

    def stopping(rank, world):
        hurting, requests = train_step_with(bad), []

        def step(parts, batch, lr):
            if batch.step == 24:
                requests.append(StopRequest("SIGTERM"))
            return hurting(parts, batch, lr)

        loop.train_step = step
        StopRequests.current = lambda self: requests[0] if requests else None
        return run_rank(rank, world, folder)

    (((step, stopped), _),) = fork_ranks(stopping, 1)
    assert stopped and step < 24 and [one.action for one in read_measures(folder.guard)] == [AGAIN]
    train_with(fork_ranks, folder, bad, ranks=1)
    train_with(fork_ranks, through, bad, ranks=1)
    assert saved_tensors(folder) == saved_tensors(through) and read_measures(folder.guard) == read_measures(
        through.guard
    )


def test_a_kill_before_the_run_has_gone_back_changes_nothing(fork_ranks, make_run, monkeypatch):
    """Each measure is recorded, and then the run dies: the next start goes back in its place. A preset that takes no
    measures keeps those of before."""
    run = {"steps": 30, "guard": GUARD, "lr": 2e-2}
    bad, folder, ordered = {20, 21, 22}, make_run("killed", **run), make_run("ordered", skip=("20-22",), **run)

    def killed(*_):
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "roll_back", killed)
        for taken in ([AGAIN], [AGAIN, PASS]):
            with pytest.raises(pytest.fail.Exception):
                train_with(fork_ranks, folder, bad, ranks=1)
            assert [one.action for one in read_measures(folder.guard)] == taken
    for preset, until in (("off", 25), ("guard", None)):
        config = load_run(folder.config)
        accept(folder, replace(config, guard=replace(config.guard, preset=preset)), "guard.preset")
        train_with(fork_ranks, folder, bad, ranks=1, until_step=until)
    train_with(fork_ranks, ordered, (), ranks=1)
    assert [e["from_step"] for e in of_kind(folder, "run_started")][:3] == [0, 10, 10]
    assert saved_tensors(folder) == saved_tensors(ordered)


def test_steps_that_hurt_once_are_trained_again(fork_ranks, make_run):
    """A fault that does not come again leaves no trace in the weights."""
    run = {"steps": 25, "guard": GUARD, "lr": 2e-2}
    found, calm = make_run("found", **run), make_run("calm", **run)
    train_with(fork_ranks, found, {16, 17, 18}, ranks=1, times=1)
    train_with(fork_ranks, calm, (), ranks=1)
    assert [one.action for one in read_measures(found.guard)] == [AGAIN]
    assert files_of(found) == files_of(calm)


def test_the_run_goes_back_to_the_step_of_an_accepted_change(fork_ranks, make_run):
    """No further, so the change holds from there on; also in a later attempt. The measures have the new rate."""
    folder = make_run(steps=24, guard=GUARD, lr=2e-2)
    train_with(fork_ranks, folder, (), ranks=1, until_step=14)
    config = load_run(folder.config)
    accept(folder, replace(config, optim=replace(config.optim, lr=1e-2)), "optim.lr")
    train_with(fork_ranks, folder, (), ranks=1, until_step=15)
    train_with(fork_ranks, folder, {16, 17, 18}, ranks=1)
    assert [e["to_step"] for e in of_kind(folder, "rolled_back")] == [14, 14]
    assert [(one.action, one.first, one.lr) for one in read_measures(folder.guard)] == [
        (AGAIN, 16, 1e-2),
        (PASS, 16, 1e-2),
    ]


def test_an_update_that_harmed_the_weights_is_undone(fork_ranks, make_run, monkeypatch):
    """A learning rate of fifty times in step 15 shows from step 16 on. Its checkpoint is suspect, and an older one is
    used: the run ends as one that was directed to pass the steps. If none is proven, the newest is taken."""
    run = {"steps": 30, "lr": 2e-2, "guard": GUARD | {"proven_steps": 100}}
    folder = make_run(**run)
    plain = learning_rate(30, 2e-2, load_run(folder.config).schedule)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: lambda step: plain(step) * (50 if step == 15 else 1))
    train_with(fork_ranks, folder, (), ranks=1)
    measures = read_measures(folder.guard)
    assert [(one.action, one.first) for one in measures] == [(AGAIN, 16), (PASS, 16), (EARLIER, 15)]
    last = measures[-1].last
    assert [e["to_step"] for e in of_kind(folder, "rolled_back")] == [15, 15, 10]
    ordered = make_run("ordered", skip=(f"15-{last}",), **run)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: plain)
    train_with(fork_ranks, ordered, (), ranks=1)
    assert saved_tensors(folder) == saved_tensors(ordered)
    trained = {step: facts for step, facts in step_facts(folder).items() if not 15 <= step <= last}
    assert trained == step_facts(ordered)


def test_bad_batches_among_good_ones_end_in_a_stop(fork_ranks, make_run):
    """Two of every three steps hurt, for ever: there is no row of three, but there is a share."""
    guard = GUARD | {"preset": "strict", "calm_steps": 30, "skip_share": 0.2}
    folder = make_run(steps=300, guard=guard, lr=2e-2)
    bad = {step for step in range(30, 300) if step % 3}

    def run(rank, world):
        with pytest.raises(RunFailed) as caught:
            train_hurting(rank, world, folder, bad)
        return caught.value.code, caught.value.facts["step"]

    assert fork_ranks(run, 1) == [("E-GUARD-STOPPED", 40)]
    measures = [(one.action, one.first, one.last, one.skipped) for one in read_measures(folder.guard)]
    assert measures == [(AGAIN, 31, 38, 6), (PASS, 31, 38, 6), (STOP, 40, 47, 6)]
    assert sum(len(e["steps"]) for e in of_kind(folder, "skipped")) == 18


def too_high(monkeypatch, folder, factor, first):
    """From step `first` on, the learning rate is `factor` times that of the schedule."""
    config = load_run(folder.config)
    plain = learning_rate(config.train.steps, config.optim.lr, config.schedule)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: lambda step: plain(step) * (factor if step >= first else 1))


@pytest.mark.slow
def test_a_rate_that_is_too_high_from_a_step_on_is_lowered(fork_ranks, make_run, monkeypatch):
    """Data that are passed do not help, because the next update harms the weights again. The run ends as one that had
    the lower rate from the start, and passed the same steps."""
    run = {"steps": 44, "lr": 2e-2, "guard": GUARD | {"lr_factor": 1 / 64, "clip_factor": 1.0}}
    folder = make_run(**run)
    with monkeypatch.context() as patch:
        too_high(patch, folder, 64, 18)
        train_with(fork_ranks, folder, (), ranks=1)
    measures = read_measures(folder.guard)
    assert [(one.action, one.first) for one in measures] == [(AGAIN, 19), (PASS, 19), (EARLIER, 18), (LOWER, 18)]
    ordered = make_run("ordered", skip=(f"18-{measures[-1].last}",), **run)
    train_with(fork_ranks, ordered, (), ranks=1)
    assert saved_tensors(folder) == saved_tensors(ordered)
    losses = [loss for step, (loss, _, _) in sorted(step_facts(folder).items()) if step > measures[-1].last]
    assert len(losses) > 8 and max(losses) < 5


@pytest.mark.slow
def test_the_measures_hold_on_another_layout(fork_ranks, make_run, monkeypatch):
    """A run on two copies of the model passed steps and has a lower rate; stopped there, it goes on with shards, and
    with pipeline stages, as on two copies: measures, rates, limits, losses and the ledger are the same."""
    guard = GUARD | {"lr_factor": 1 / 64, "lr_steps": 16, "clip_factor": 0.25}
    run = {"steps": 48, "lr": 2e-2, "precision": "fp64", "guard": guard, "log_every": 1}
    layouts = {"copies": {"dp_replicate": 2}, "shards": {"dp_shard": 2, "zero": 3}, "stages": {"pp": 2}}
    copies, *others = folders = [make_run(name, **run, **layout) for name, layout in layouts.items()]
    with monkeypatch.context() as patch:
        too_high(patch, copies, 64, 18)
        train_with(fork_ranks, copies, (), until_step=34)
    measures = read_measures(copies.guard)
    lowered = measures[-1].lr_last - 34
    assert [one.action for one in measures] == [AGAIN, PASS, EARLIER, LOWER] and 0 < lowered < 14
    for folder in others:
        shutil.copytree(copies.root, folder.root, ignore=lambda *_: ["run.toml"], dirs_exist_ok=True)

    def go_on(rank, world, folder):
        limits, clip = [], trainer_step.clip_factor
        trainer_step.clip_factor = lambda norm, limit, **more: limits.append(limit) or clip(norm, limit, **more)
        run_rank(rank, world, folder)
        return limits

    for folder in folders:
        assert fork_ranks(go_on, 2, folder) == [[0.25] * lowered + [1.0] * (14 - lowered)] * 2
        rates = {step: rate for step, (_, _, rate) in step_facts(folder).items() if step > 34}
        plain = learning_rate(48, 2e-2, load_run(folder.config).schedule)
        assert rates == {step: plain(step) / (64 if step <= 34 + lowered else 1) for step in range(35, 49)}
        assert step_facts(folder) == {
            step: pytest.approx(facts, rel=1e-9) for step, facts in step_facts(copies).items()
        }
        manifest = ledger_proof(folder, load_run(folder.config))
        assert list(manifest.guard.measures) == measures == read_measures(folder.guard)
        untrained = [step for one in manifest.ledger for step in one.untrained]
        assert untrained == [*range(18, measures[-1].last + 1)]


def test_a_start_says_that_most_steps_are_passed(fork_ranks, make_run):
    lines = [fork_ranks(run_rank, 1, make_run(skip, steps=6, skip=(skip,)))[0][1] for skip in ("1-3", "2-5")]
    warnings = [[line[:53] for line in own if "the data of" in line] for own in lines]
    assert warnings == [[], ["WARNING   the data of 4 of the 6 steps from step 1 on"]]


def test_passed_steps_show_as_such_and_have_no_numbers(fork_ranks, make_run, capsys):
    """Log lines, what watches the run, and averages leave them out."""
    folder = make_run(steps=12, skip=("2", "5-8"), log_every=4, every_steps=12)
    ((_, output),) = fork_ranks(run_rank, 1, folder)
    lines = [line for line in output if line.startswith("step ")]
    assert ["nan" in line for line in lines] == [False] * 3
    assert lines[1] == "step  8/12  passed 4 steps without training"
    mixed, passed, trained = of_kind(folder, "progress")
    assert [one["passed"] for one in (mixed, passed, trained)] == [1, 4, 0]
    assert passed["loss"] is passed["tokens_per_second"] is passed["mfu"] is passed["eta_seconds"] is None
    tokens = load_run(folder.config).tokens_per_step
    assert mixed["tokens_per_second"] * mixed["step_seconds"] == pytest.approx(tokens)
    assert mixed["loss"] == of_kind(folder, "step")[2]["loss"]  # of step 4, the third that was trained
    assert [one["step"] for one in of_kind(folder, "waits")] == [4, 12]

    log = folder.events.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(log) if '"passed"' in line and '"step": 8' in line)
    folder.events.write_text("".join(log[: at + 1]))  # as it was then
    live = LiveRun(folder.root).read_all()
    own = head(live)
    assert (live.last_step, own.note) == (8, "passed the data since step 4")
    assert math.isfinite(live.lines.newest("tokens_per_second")) and list(live.lines.points("bpb").steps) == [4]
    status = read_status(folder.root)
    assert status.passed and status.step == 8 and status.tokens_per_second == mixed["tokens_per_second"]
    assert main(["status", str(folder.root)]) == 0 and "step 8/12 passed" in capsys.readouterr().out
    data = gather(folder.root)
    assert (list(data.progress), data.valid_step, data.trained_between(0, 8)) == ([4], 8, 3)
    assert data.unreadable_events == live.data.unreadable_events == 0


@pytest.mark.slow
def test_a_person_chooses_the_measure(fork_ranks, make_run, capsys):
    """While the run waits, which takes it at once; or after it has stopped: then the next start takes it."""
    run = {"dp_shard": 2, "steps": 28, "lr": 2e-2}
    waits, stops = (
        make_run(name, guard=GUARD | {"preset": "strict", "ask_seconds": seconds}, **run)
        for name, seconds in (("waits", 60.0), ("stops", 0.1))
    )
    bad, ordered = range(18, 24), make_run("ordered", skip=("18-23",), guard=GUARD, **run)

    def train(folder, answers):
        def rank_of(rank, world):
            def say(line):
                if rank == 0 and answers and "Waiting until" in line:
                    with RunLock(folder.lock):  # a launcher holds it
                        assert main(["guard", str(folder.root), "--take", "pass"]) == 0

            hurting = lambda parts, batch, lr: train_step(  # noqa: E731
                parts, shuffled(batch) if batch.step in bad else batch, lr
            )
            loop.train_step = hurting
            try:
                return run_rank(rank, world, folder, say=say)[0]
            except RunFailed as error:
                return error.code

        return fork_ranks(rank_of, 2)

    assert train(waits, answers=True) == [(28, False)] * 2
    assert train(stops, answers=False) == ["E-GUARD-STOPPED"] * 2
    assert main(["guard", str(stops.root)]) == 0 and "--take lower" in capsys.readouterr().out
    assert main(["guard", str(stops.root), "--take", "pass"]) == 0
    assert train(stops, answers=False) == [(28, False)] * 2
    train_with(fork_ranks, ordered, ())
    actions = [[one.action for one in read_measures(folder.guard)] for folder in (waits, stops)]
    assert actions == [[AGAIN, PASS, PASS], [AGAIN, PASS, STOP, PASS]]
    assert saved_tensors(waits) == saved_tensors(stops) == saved_tensors(ordered)
    assert not waits.guard_answer.exists() and not waits.guard_question.exists()
    write_measures(stops.guard, read_measures(stops.guard)[:3])  # a checkpoint has its last one: the run went on
    for folder in (waits, stops):
        assert main(["guard", str(folder.root), "--take", "lower"]) == 2
        assert "E-GUARD-NO-QUESTION" in capsys.readouterr().err


def test_lower_rates_come_with_a_lower_limit(fork_ranks, make_run):
    """From the record of the folder, in the steps that it names."""
    folder = make_run(steps=8, guard=GUARD, clip_norm=0.2, lr=1e-2)
    lower = Measure(
        action=LOWER, first=3, last=4, found=("loss spike",), proven_to=0, lr_factor=0.5, clip_factor=0.25, lr_last=6
    )
    write_measures(folder.guard, [lower])

    def run(rank, world):
        limits, clip = [], trainer_step.clip_factor
        trainer_step.clip_factor = lambda norm, limit, **more: limits.append(limit) or clip(norm, limit, **more)
        run_rank(rank, world, folder)
        return limits

    assert fork_ranks(run, 1) == [pytest.approx([0.2, 0.2, 0.05, 0.05, 0.2, 0.2])]
    rates, plain = step_facts(folder), learning_rate(8, 1e-2, load_run(folder.config).schedule)
    factors = {step: facts[2] / plain(step) for step, facts in rates.items()}
    assert factors == pytest.approx({1: 1, 2: 1, 5: 0.5, 6: 0.5, 7: 1, 8: 1})


def test_the_same_command_passes_batches_that_are_never_finite(fork_ranks, make_run):
    """Before the first checkpoint there is nothing to go back to: each command records the next measure."""
    folder = make_run(steps=10, guard=GUARD)

    def run(rank, world):
        def step(parts, batch, lr):
            if batch.step in (2, 3, 4, 5):
                reduce = type(parts.model).reduce

                def reduced():
                    reduce(parts.model)
                    parts.model.shards[0].grad.fill_(math.nan)

                parts.model.reduce = reduced
            else:
                parts.model.__dict__.pop("reduce", None)
            return train_step(parts, batch, lr)

        loop.train_step = step
        codes = []
        for _ in range(3):
            try:
                codes.append(run_rank(rank, world, folder)[0])
            except RunFailed as error:
                codes.append(error.code)
        return codes

    assert fork_ranks(run, 1) == [["E-ROLLBACK-NO-CHECKPOINT", "E-ROLLBACK-NO-CHECKPOINT", (10, False)]]
    assert [one.action for one in read_measures(folder.guard)] == [AGAIN, PASS]
    assert all(math.isfinite(loss) for loss, _, _ in step_facts(folder).values())


def spoiled_once(at):
    """The function that trains a step, in whose first try of step `at` a bit flips in a gradient of rank 0."""
    tries = []

    def step(parts, batch, lr):
        reduce = type(parts.model).reduce

        def reduced():
            reduce(parts.model)
            tries.append(batch.step)
            if batch.step == at and tries.count(at) == 1 and parts.place.is_first:
                flip_bit(parts.model.shards[0].grad, 5, 30)

        parts.model.reduce = reduced
        return train_step(parts, batch, lr)

    return step


def test_a_fault_that_comes_once_costs_nothing_if_steps_are_tried_again(fork_ranks, make_run):
    """The run has the bits of one without the fault; a batch that hurts has the same bits again, and is skipped."""
    strict = GUARD | {"preset": "strict", "hash_every": 0}

    def spoiled(rank, world, folder):
        loop.train_step = spoiled_once(20)
        return run_rank(rank, world, folder, 22)

    plain, spoilt = (make_run(name, dp_shard=2, steps=24, guard=strict) for name in ("plain", "spoilt"))
    fork_ranks(lambda rank, world: run_rank(rank, world, plain, 22), 2)
    results = fork_ranks(lambda rank, world: spoiled(rank, world, spoilt), 2)
    assert any("the fault was transient" in line for line in results[0][1])
    ((tried,), ()) = of_kind(spoilt, "retried"), of_kind(plain, "retried")
    assert (tried["step"], tried["healthy"], tried["same"]) == (20, True, False)
    assert not of_kind(spoilt, "finding") and not of_kind(spoilt, "skipped")
    assert saved_tensors(spoilt) == saved_tensors(plain) and step_facts(spoilt) == step_facts(plain)

    again, off = (make_run(name, steps=24, guard=strict | {"retry": name}) for name in ("on", "off"))
    for folder in (again, off):
        train_with(fork_ranks, folder, {20}, ranks=1, until_step=22)
        assert [event["steps"] for event in of_kind(folder, "skipped")] == [[20]]
    ((tried,), ()) = of_kind(again, "retried"), of_kind(off, "retried")
    assert (tried["step"], tried["healthy"], tried["same"]) == (20, False, True)
    assert saved_tensors(again) == saved_tensors(off)
