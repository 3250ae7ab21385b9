"""Ranks that wait for what never comes: for hours, for a peer that is gone, for another collective than their peer."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.board.bench import Bench, options
from tests.proof.ranks import Ranks

from ingot.drill.job import marked_processes
from ingot.events import read_events
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback, StepNumbers
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.trainer.callbacks import Callbacks
from ingot.trainer.launch.watchdog import state_of
from ingot.trainer.resilience.collective_calls import find_blame
from ingot.trainer.resilience.reports import calls_of_this_process

from .runs import DAY, WATCHDOG, planted, require_recovered


def waits_for_a_day(rank: int, ranks: int) -> bool:
    """Let rank 1 come late to an all-reduce of a group whose timeout is a day. Returns whether rank 0 waited, and no
    more."""
    group = dist.new_group(timeout=timedelta(seconds=DAY))
    sum_over_ranks = partial(dist.all_reduce, torch.ones(1), group=group)
    if rank == 1:
        dist.barrier()
        sum_over_ranks()
        return True
    waiting = threading.Thread(target=sum_over_ranks)
    waiting.start()
    waiting.join(1.0)
    still = waiting.is_alive()
    dist.barrier()
    waiting.join()
    return still


def test_a_stalled_rank_and_a_timeout_of_hours_are_a_job_that_says_nothing(fork_ranks):
    """OLMo-core issue 829: nothing but somebody who looks would end it."""
    assert fork_ranks(waits_for_a_day, 2) == [True, True]


@pytest.mark.slow
def test_the_watchdog_does_not_depend_on_the_timeout_of_groups(bench: Bench):
    """The same in `ingot train`: found in the time of the watchdog, named, with stacks, and the bits are equal."""
    settings = planted(bench, "board/planted.py")
    ended = bench.train("stalled", *options(settings), env={"BOARD_FAULT": "wait 1 13 on_update"})
    assert ended.code == 0, ended.output
    (fault,) = read_events(bench.folder("stalled").events, events.FAULT)
    assert (fault["rank"], fault["failure"], fault["detected_by"]) == (1, "hang", "watchdog")
    assert fault["seconds"] <= WATCHDOG + 1
    assert "sigwait" in (bench.folder("stalled").root / fault["evidence"] / "rank-1.stacks").read_text()
    require_recovered(bench, "stalled", settings)


def leaves_out_its_metrics(folder: Path) -> tuple[float, str, tuple]:
    """Ranks sum their metrics, then a flag that asks to stop. Rank 1 has no metrics, and leaves their sum out."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    flag, error = torch.zeros(1), ""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 7.0), group=group)
    work = dist.all_reduce(flag, group=group, async_op=True)
    calls = calls_of_this_process()  # what a rank reports when the watchdog asks
    try:
        work.wait()
    except RuntimeError as failure:
        error = str(failure)
    return flag.item(), error, calls


def test_a_collective_that_one_rank_leaves_out_is_taken_for_the_next_one(monkeypatch):
    """open-instruct pull request 1708: two sums of one shape match each other. One rank then reads a metric as the
    request to stop, and the other waits for the group's timeout, which is half an hour by default.

    Gloo sends neither the operation nor its purpose, so nobody sees that the first two differ. The rank to blame for
    the wait is seen at once. Where shapes differ, the board's row RS05 ends with E-COLLECTIVES-DIFFER.
    """
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")  # as worker_environment has it
    with Ranks() as ranks:
        (_, error, calls), (flag, nothing, others) = ranks.run(leaves_out_its_metrics, 2, timeout=20.0)
    assert flag == 7.0 and not nothing
    assert "imed out" in error
    blame = find_blame({0: calls, 1: others})
    assert blame is not None and blame.ranks == (1,) and not blame.mismatch
    assert "all_reduce [1] Float, number 2" in blame.words


class Forgetful(StepCallback):
    """A callback whose rank 1 has nothing to sum."""

    def __init__(self, run, options):
        self.run, self.error = run, ""

    def on_update(self, step):
        if self.run.rank == 0:
            try:
                self.run.sum_over_ranks(torch.full((2,), 7.0, dtype=torch.float64))  # as the vote after it
            except RuntimeError as error:
                self.error = str(error)


def votes_after_a_sum_that_is_left_out(rank: int, ranks: int) -> tuple[str, str]:
    CALLBACKS.register(CallbackPart(name="forgetful", make=Forgetful))
    config = SimpleNamespace(callbacks={"forgetful": {}}, launch=Launch(timeout_seconds=1.0))
    callbacks = Callbacks(config, [], torch.device("cpu"))
    callbacks.updated(1)
    verdict = callbacks.line([StepNumbers(1, 2.0, 1.0, False)], lambda *_, **__: None)
    return verdict.name, callbacks._own["forgetful"].error


def test_a_sum_that_a_callback_leaves_out_is_not_taken_for_a_vote_of_the_run(fork_ranks):
    """The same in ingot: sums of callbacks have a group of their own, so that the vote has the votes of all ranks."""
    (first, error), (second, nothing) = fork_ranks(votes_after_a_sum_that_is_left_out, 2)
    assert (first, second) == ("CONTINUE", "CONTINUE")
    assert "imed out" in error and not nothing


CONNECT, GROUPS = timedelta(seconds=0.1), 16


def loses_its_peer_before_they_connect(rank: int, store: Path, answer) -> None:
    """Rank 1 ends before the first collective of some groups, in which ranks connect when they first need each other.

    Which of two ranks listens for the other depends on random ports, so about half of the groups show the fault.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    shared = dist.FileStore(str(store), 2)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    groups = [dist.new_group(timeout=CONNECT) for _ in range(GROUPS)]
    if rank == 1:
        shared.set("pid", str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os._exit(0)
    while state_of(int(shared.get("pid"))) not in "ZX-":
        time.sleep(0.01)
    for group in groups:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            if "onnect timeout" in str(error):
                answer.send(time.monotonic() - began)
                break
    os._exit(0)


def test_a_lazy_connection_waits_for_several_times_the_timeout(tmp_path):
    """gloo issue 520: the timeout of the group does not hold for the connection to a peer that is gone."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    members = [
        context.Process(target=loses_its_peer_before_they_connect, args=(rank, tmp_path / "store", theirs), daemon=True)
        for rank in range(2)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
    assert ours.poll() and ours.recv() > 3 * CONNECT.total_seconds()


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_attempt_whatever_its_peers_wait_for(bench: Bench):
    """The same in `ingot train`, in the first step: the end of the process is seen, not that of a wait."""
    settings = planted(bench, "board/planted.py")
    lazy = {"TORCH_GLOO_LAZY_INIT": "1", "BOARD_FAULT": "kill 1 1 on_gradients"}
    began = time.time()
    ended = bench.train("lazy", *options(settings), env=lazy)
    assert ended.code == 0 and time.time() - began < 60, ended.output
    (fault,) = read_events(bench.folder("lazy").events, events.FAULT)
    assert (fault["rank"], fault["failure"], fault["detected_by"]) == (1, "killed", "supervisor")
    require_recovered(bench, "lazy", settings)


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_end_of_its_groups_does_not_keep_a_finished_run(bench: Bench):
    """PyTorch issues 75097 and 190489: destroy_process_group may never return. All is saved and reported before."""
    settings = planted(bench, "public_bugs/planted_leave.py")
    ended = bench.train("leave", *options(settings))
    assert ended.code == 0 and ended.seconds < 60, ended.output
    assert bench.root.joinpath("leave.hangs").exists()
    assert not list(read_events(bench.folder("leave").events, events.FAULT))
    assert len(list(read_events(bench.folder("leave").events, events.FINISHED))) == 1
    assert not marked_processes(bench.folder("leave").root)
