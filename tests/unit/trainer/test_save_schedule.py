"""When saves are due, by a clock that the test moves; and runs on forked ranks that save at these times."""

import itertools
import math
import time
from statistics import median

import pytest
import torch

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.launch import Launch
from ingot.schema.run import Checkpoint, Data, RunConfig, Train
from ingot.theory.failures import daly_interval, job_mttf_seconds
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.files import CheckpointFiles
from ingot.trainer.checkpoint.manifest import list_checkpoints, verify_checkpoint
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.resilience import stop_vote
from ingot.trainer.run import build_trainer
from ingot.trainer.save_schedule import SOON_SECONDS, SaveSchedule

from .test_background_saves import continue_writer, files_by_step, of_kind, stop_writer, written
from .test_loop import ledger_proof, step_facts
from .test_loop import run_rank as run_undisturbed

BOTH = 3  # the vote for both kinds
HOUR = 3600.0


def place_of(rank=0, ranks=1, on_each_node=1):
    return RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=on_each_node,
        attempt=0,
        device=torch.device("cpu"),
    )


class Timed:
    """A schedule with its clock `now`; `logged` has its events."""

    def __init__(self, place=None, launch=None, **settings):
        arch = Arch(vocab_size=8, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ffn=8)
        config = RunConfig(
            name="timed",
            model=arch,
            data=Data(tokens="t"),
            train=Train(steps=9, seq_len=8, global_batch=1, micro_batch=1),
            checkpoint=Checkpoint(**settings),
            launch=launch or Launch(),
        )
        self.now, self.logged, self.step = 0.0, [], 0
        self.schedule = SaveSchedule(config, place or place_of(), 1, self._log, lambda line: None, lambda: self.now)

    def _log(self, kind, **fields):
        assert kind == events.CHECKPOINT_INTERVAL
        self.logged.append(fields)

    def at(self, now, *, writing=False):
        """The vote at this time, and what is taken after the next step."""
        self.now = now
        self.schedule.agree(vote := self.schedule.vote(writing))
        self.step += 1
        return vote and self.schedule.take(self.step)


def test_the_first_save_of_an_attempt_comes_soon_and_later_ones_after_the_whole_interval():
    timed = Timed(every="1h", weights_every="")
    assert not timed.at(SOON_SECONDS - 1)
    assert timed.at(SOON_SECONDS) == FULL
    assert not timed.at(SOON_SECONDS + HOUR - 1)
    assert timed.at(SOON_SECONDS + HOUR) == FULL


def test_an_interval_below_ten_minutes_holds_from_the_start():
    timed = Timed(every="90 s", weights_every="")
    assert [timed.at(now) for now in (89, 90, 179, 180)] == [0, FULL, 0, FULL]


def test_the_defaults_are_an_hour_and_ten_minutes():
    timed = Timed()
    saves = {minute: kind for minute in range(1, 131) if (kind := timed.at(60.0 * minute))}
    assert [minute for minute, kind in saves.items() if kind == FULL] == [10, 70, 130]
    assert [minute for minute, kind in saves.items() if kind == WEIGHTS] == [*range(20, 70, 10), *range(80, 130, 10)]


def test_a_failed_save_is_tried_again_soon():
    timed = Timed(every="1h", weights_every="")
    timed.at(SOON_SECONDS)
    timed.now = 1000.0
    timed.schedule.failed(FULL)
    assert [timed.at(now) for now in (1000 + SOON_SECONDS - 1, 1000 + SOON_SECONDS)] == [0, FULL]


def test_a_full_checkpoint_counts_as_a_save_of_the_weights():
    timed = Timed(every="4 steps", weights_every="3 steps")
    assert [timed.schedule.take(step) for step in range(1, 13)] == [
        *("", "", WEIGHTS, FULL, "", WEIGHTS),
        *("", FULL, WEIGHTS, "", "", FULL),
    ]
    timed = Timed(every="4 steps", weights_every="100 s")
    timed.now = 90.0
    assert timed.schedule.take(4) == FULL
    assert [timed.at(now) for now in (189, 190)] == [0, WEIGHTS]


def test_only_the_clock_of_rank_0_counts():
    timed = Timed(place_of(rank=1, ranks=2, on_each_node=2))
    timed.now = 9e9
    assert timed.schedule.vote(False) == 0
    timed.schedule.agree(2)  # the vote of rank 0
    assert timed.schedule.take(1) == WEIGHTS


def test_a_full_checkpoint_that_was_left_out_takes_the_place_of_the_next_save():
    timed = Timed(every="1h", weights_every="5 min")
    assert timed.at(300) == WEIGHTS
    timed.schedule.begun(WEIGHTS)
    timed.now = SOON_SECONDS
    assert timed.schedule.vote(writing=True) == 2  # the full one waits for the weights
    assert timed.schedule.vote(writing=False) == BOTH
    assert timed.at(SOON_SECONDS) == FULL  # but on another rank they are still being written
    timed.schedule.left_out(FULL)
    assert timed.schedule.owes_full
    assert not timed.at(SOON_SECONDS + 299, writing=True)
    assert timed.at(SOON_SECONDS + 300, writing=True) == FULL
    timed.schedule.left_out(FULL)
    assert timed.at(SOON_SECONDS + 301) == FULL
    assert not timed.schedule.owes_full and not timed.at(SOON_SECONDS + 302)


def test_weights_that_are_left_out_are_not_owed():
    timed = Timed(every="1h", weights_every="5 min")
    timed.schedule.begun(FULL)
    timed.schedule.left_out(WEIGHTS)
    timed.schedule.left_out(FULL)  # its own interval is shorter than a write
    assert not timed.schedule.owes_full and not timed.at(1)


def test_auto_saves_after_a_minute_and_then_at_dalys_interval_of_the_median_stall():
    """The job has 8 nodes with 0.5 failures a day each: one fails every 6 hours."""
    launch = Launch(failures_per_node_day=0.5)
    timed = Timed(place_of(ranks=16, on_each_node=2), launch, every="auto", weights_every="")
    (first,) = timed.logged
    assert (first["step"], first["what"], first["seconds"], first["stall_seconds"]) == (0, FULL, 60.0, None)
    assert [timed.at(now) for now in (59, 60)] == [0, FULL]
    mttf = job_mttf_seconds(8, 0.5)
    assert mttf == 6 * HOUR
    timed.schedule.measured(FULL, 2, stall=3.0, write=5.0)
    decided = timed.logged[1]
    assert decided["seconds"] == pytest.approx(daly_interval(mttf, 3.0)) and decided["stall_seconds"] == 3.0
    assert (decided["step"], decided["nodes"], decided["failures_per_node_day"]) == (2, 8, 0.5)
    assert "Daly 2006" in decided["formula"] and "as given" in decided["formula"]
    assert [timed.at(60 + decided["seconds"] + late) for late in (-1, 0)] == [0, FULL]
    timed.schedule.measured(FULL, 3, stall=90.0, write=5.0)  # the median of 3 and 90 is 46.5
    assert timed.logged[2]["seconds"] == pytest.approx(daly_interval(mttf, 46.5))
    timed.schedule.measured(FULL, 4, stall=47.0, write=5.0)  # little changes, and nothing is logged
    assert len(timed.logged) == 3


def test_auto_waits_at_least_for_the_write():
    timed = Timed(launch=Launch(failures_per_node_day=900.0), every="auto", weights_every="auto")
    timed.schedule.measured(WEIGHTS, 1, stall=0.001, write=7.0)
    timed.schedule.measured(FULL, 1, stall=0.001, write=77.0)
    assert [(e["what"], e["seconds"]) for e in timed.logged[2:]] == [(WEIGHTS, 7.0), (FULL, 77.0)]
    assert "the write itself" in timed.logged[-1]["formula"]
    timed = Timed(launch=Launch(failures_per_node_day=900.0), every="auto")
    timed.schedule.measured(FULL, 1, stall=1e-6, write=0.0)
    assert timed.logged[-1]["seconds"] == 1.0


def test_auto_without_a_rate_says_whose_it_assumes():
    assert "Llama team 2024" in Timed(every="auto").logged[0]["formula"]


# -- runs --

FULL_STEPS, WEIGHT_STEPS = [7, 19, 21], [4, 10, 13, 16]
BY_TIME = {"dp_shard": 2, "steps": 21, "keep": 9, "weights_keep": 9}


class EachStep(DefaultPolicy):
    """Calls a function with the trainer and the step after each step."""

    def __init__(self, folder, trainer, call):
        super().__init__(folder)
        self.trainer, self.call = trainer, call

    def verdict(self, facts):
        verdict = super().verdict(facts)
        self.call(self.trainer, facts.step)
        return verdict


def run_rank(rank, ranks, folder, call, clock=lambda: 0.0, settings=(), until_step=None):
    place = place_of(rank, ranks, ranks)
    run = build_trainer(load_run(folder.config, settings), folder, place, until_step=until_step, say=lambda line: None)
    run.schedule = SaveSchedule(run.config, place, run.first_step, run.log, run.say, clock)
    run.policy = EachStep(folder, run, call)
    if run.first_step > 1:  # the rest of the step that was saved counts for the next interval
        call(run, run.first_step - 1)
    try:
        train(run)
    finally:
        run.close()
    return run.schedule.owes_full


def train_by_the_clock(rank, ranks, folder):
    """On rank 0, a step takes 100 s; the clock of rank 1 is far ahead and is not asked."""
    now = [0.0 if rank == 0 else 1e9]

    def pass_time(run, step):
        now[0] += 100.0 if rank == 0 else 1e6
        if run.background is not None:
            written(run)

    return run_rank(rank, ranks, folder, pass_time, lambda: now[0])


@pytest.fixture(scope="module")
def each_step():
    """Votes take place after every step, however long a step takes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_vote, "VOTE_SECONDS", 0.0)
        yield


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_saves_by_time_are_after_the_same_step_on_all_ranks_and_change_no_number(fork_ranks, make_run, each_step, mode):
    """Full ones every 20 minutes, the first one after 10; the weights every 5. A vote is heard after the next step."""
    reference = make_run("reference", every_steps=1, **(BY_TIME | {"keep": 30}), weights_every="")
    fork_ranks(run_undisturbed, 2, reference)
    folder = make_run("timed", mode=mode, every_steps=0, every="20 min", weights_every="5 min", **BY_TIME)
    assert fork_ranks(train_by_the_clock, 2, folder) == [False] * 2

    assert [step for step, _ in of_kind(folder, events.CHECKPOINT)] == FULL_STEPS
    assert [step for step, _ in of_kind(folder, events.WEIGHTS_SAVED)] == WEIGHT_STEPS
    assert of_kind(folder, events.CHECKPOINT_SKIPPED) == of_kind(folder, events.CHECKPOINT_FAILED) == []
    assert step_facts(folder) == step_facts(reference)
    expected = {c.step: c.manifest for c in list_checkpoints(reference.checkpoints)}
    full = {c.step: c.manifest for c in list_checkpoints(folder.checkpoints)}
    assert {step: m.files for step, m in full.items()} == {step: expected[step].files for step in FULL_STEPS}
    ledger_proof(folder, load_run(folder.config))

    weights = {c.step: c.manifest for c in list_checkpoints(folder.weights.checkpoints)}
    assert sorted(weights) == WEIGHT_STEPS
    for step, manifest in weights.items():
        verify_checkpoint(folder.weights.checkpoint(step))
        assert (manifest.kind, manifest.ledger, manifest.callbacks) == (WEIGHTS, (), {})
        wanted = {name: t.crc32 for name, t in expected[step].tensors.items() if name.startswith("model.")}
        assert {name: t.crc32 for name, t in manifest.tensors.items()} == wanted
        sizes = [sum(f.bytes for f in m.files.values()) for m in (manifest, expected[step])]
        assert sizes[0] < sizes[1] / 2.5  # AdamW's two moments, and the random states, are left out


def test_a_full_checkpoint_that_is_due_while_weights_are_written_follows_them(fork_ranks, make_run, each_step):
    """The weights of step 3 are being written until after step 5. The checkpoint of step 4 is left out, and saved after
    step 6 instead of the weights that are due then."""
    folder = make_run(mode="async", every_steps=4, weights_every="3 steps", steps=8, dp_shard=2)
    script = {2: stop_writer, 5: continue_writer}

    def act(run, step):
        script.get(step, written if step > 5 else lambda run: None)(run)

    assert fork_ranks(run_rank, 2, folder, act) == [False] * 2
    skipped = [(e["step"], e["what"], e["in_flight"]) for e in read_events(folder.events, events.CHECKPOINT_SKIPPED)]
    assert skipped == [(4, FULL, 3)]
    assert of_kind(folder, events.WEIGHTS_SAVED) == [(3, None)]
    assert of_kind(folder, events.CHECKPOINT) == [(6, None), (8, None)]
    ledger_proof(folder, load_run(folder.config))


def train_by_steps(rank, ranks, folder, settings, until_step=None):
    """On the clock of the schedule, a step takes 20 s; the stalls of saves are measured."""
    now = [0.0]

    def pass_time(run, step):
        now[0] += 20.0

    run_rank(rank, ranks, folder, pass_time, lambda: now[0], settings, until_step)


def train_with_auto(rank, ranks, folder, settings):
    """From step 9 on, the disk is slow."""
    finish = CheckpointFiles.finish

    def finish_slowly(self, *arguments):
        time.sleep(1.0 if self.step >= 9 else 0.0)  # a loaded machine is not mistaken for it
        return finish(self, *arguments)

    CheckpointFiles.finish = finish_slowly
    train_by_steps(rank, ranks, folder, settings)


@pytest.mark.slow
def test_auto_decides_by_measured_saves_and_its_logged_intervals_repeat_the_run(fork_ranks, make_run, each_step):
    """A failure every 18 hours. Saves of some hundredths of a second pay every few steps; when each takes 1 s more,
    the interval grows as soon as the median of the last saves does."""
    whole = {"steps": 60, "keep": 60, "weights_every": "", "every_steps": 0, "dp_shard": 2}
    folder = make_run("auto", every="auto", **whole)
    fork_ranks(train_with_auto, 2, folder, ("launch.failures_per_node_day=1.35",))
    *_, first = decided = [e for e in read_events(folder.events, events.CHECKPOINT_INTERVAL) if not e["step"]]
    measured = list(read_events(folder.events, events.CHECKPOINT_INTERVAL))[len(decided) :]
    assert (first["seconds"], first["stall_seconds"]) == (60.0, None)
    stalls = {e["step"]: e["stall_seconds"] for e in read_events(folder.events, events.CHECKPOINT)}
    for decision in measured:
        before = [stall for step, stall in stalls.items() if step <= decision["step"]]
        assert decision["stall_seconds"] == median(before[-5:])
        mttf = job_mttf_seconds(decision["nodes"], decision["failures_per_node_day"])
        assert decision["seconds"] == daly_interval(mttf, decision["stall_seconds"])
        assert "Daly 2006" in decision["formula"] and "135.000%" in decision["formula"]
    assert len(measured) >= 2 and measured[-1]["seconds"] > 1.25 * measured[0]["seconds"]

    repeated = make_run("repeated", every="auto", **whole)
    for decision, later in itertools.zip_longest([first, *measured], measured):
        settings = (f'checkpoint.every="{math.ceil(decision["seconds"])} s"',)
        fork_ranks(train_by_steps, 2, repeated, settings, later and later["step"])
    assert of_kind(repeated, events.CHECKPOINT) == of_kind(folder, events.CHECKPOINT)
    assert not list(read_events(repeated.events, events.CHECKPOINT_INTERVAL))
    assert step_facts(repeated) == step_facts(folder) and files_by_step(repeated) == files_by_step(folder)
