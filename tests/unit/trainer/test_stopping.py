"""Runs of forked ranks that are asked to stop: by a signal to one rank, with and without time for a save."""

import contextlib
import os
import signal

import pytest
import torch

import ingot.trainer.resilience.stop_vote as stop_vote_module
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.interrupts import signals_ask
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS
from ingot.trainer.run import build_trainer

from .test_loop import run_rank as run_undisturbed
from .test_loop import step_facts


class Scripted(DefaultPolicy):
    """Calls, after a step, what the script has for it, with the trainer."""

    def __init__(self, folder, script, trainer):
        super().__init__(folder)
        self.script, self.trainer = script, trainer

    def verdict(self, facts):
        self.script.get(facts.step, lambda trainer: None)(self.trainer)
        return super().verdict(facts)


def run_rank(rank, ranks, folder, script, *, launch=None):
    """Train with the script. launch: the rank takes signals itself, with these settings. Returns (ending, lines)."""
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    lines = []
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(signals_ask(folder, launch, lines.append)) if launch else None
        run = build_trainer(load_run(folder.config), folder, place, say=lines.append, stops=stops)
        run.policy = Scripted(folder, script, run)
        try:
            ending = train(run)
        finally:
            run.close()
    return (ending.step, ending.stopped), lines


def signal_to(rank, number):
    return lambda trainer: trainer.place.rank == rank and os.kill(os.getpid(), number)


def ending_of(folder):
    ((stopped),) = read_events(folder.events, events.STOPPED)
    return stopped["step"], stopped["saved_step"], stopped["reason"]


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(fork_ranks, make_run, monkeypatch, layout):
    """Between log lines, which are after steps 3, 6 and 9. The undisturbed run has the same bits."""
    monkeypatch.setattr(stop_vote_module, "VOTE_SECONDS", 0.0)  # these steps are very short
    whole, folder = make_run("whole", **layout), make_run(**layout)
    script = {7: signal_to(1, signal.SIGUSR1)}
    ends = fork_ranks(lambda rank, ranks: run_rank(rank, ranks, folder, script, launch=Launch()), 2)
    assert [end for end, _ in ends] == [(7, True)] * 2
    assert ending_of(folder) == (7, 7, "SIGUSR1")
    assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT)] == [5, 7]
    fork_ranks(run_undisturbed, 2, folder)
    fork_ranks(run_undisturbed, 2, whole)
    assert step_facts(folder) == step_facts(whole)


def test_the_file_of_the_supervisor_stops_the_run(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    script = {7: lambda trainer: trainer.folder.stop_request.touch()}
    ends = fork_ranks(lambda rank, ranks: run_rank(rank, ranks, folder, script), 2)
    assert {end for end, _ in ends} <= {(7, True), (8, True), (9, True)} and ends[0][0] == ends[1][0]
    assert ending_of(folder)[2] == "requested"


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
@pytest.mark.parametrize(("seconds", "saved"), [(3000.0, 5), (1.0, 7)])
def test_a_save_that_does_not_fit_into_the_grace_is_not_begun(fork_ranks, make_run, monkeypatch, mode, seconds, saved):
    """The ranks decide together, by the slowest one."""
    monkeypatch.setattr(stop_vote_module, "VOTE_SECONDS", 0.0)
    folder = make_run(dp_shard=2, mode=mode)

    def slow_disk(trainer):
        if trainer.background is not None:  # the save of step 5 ends first, and is measured
            trainer.background.in_flight and trainer.background.in_flight.wait()

    def slow_and_signal(trainer):
        if trainer.place.rank == 1:
            trainer.save_seconds = seconds
            os.kill(os.getpid(), signal.SIGTERM)

    script = {6: slow_disk, 7: slow_and_signal}
    ends = fork_ranks(lambda rank, ranks: run_rank(rank, ranks, folder, script, launch=Launch(grace="30min")), 2)
    assert [end for end, _ in ends] == [(7, True)] * 2
    assert ending_of(folder) == (7, saved, "SIGTERM")
    assert list_checkpoints(folder.checkpoints)[0].step == saved
    warnings = [line for line in ends[0][1] if line.startswith("WARNING")]
    assert len(warnings) == (saved == 5) and all("2 steps will be trained again" in line for line in warnings)
    fork_ranks(run_undisturbed, 2, folder)
    assert list(step_facts(folder)) == list(range(1, 13))


def test_the_process_that_writes_a_checkpoint_outlives_the_signals_of_a_scheduler(fork_ranks, make_run):
    folder = make_run(mode="async")

    def signal_writer(trainer):
        for number in STOP_SIGNALS:
            os.kill(trainer.background.writer_pid, number)

    script = {4: signal_writer, 6: signal_writer}
    assert fork_ranks(lambda rank, ranks: run_rank(rank, ranks, folder, script), 1)[0][0] == (12, False)
    assert not list(read_events(folder.events, events.CHECKPOINT_FAILED))
    assert list_checkpoints(folder.checkpoints)[0].step == 12
