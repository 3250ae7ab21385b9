"""Checkpoints that are written while training goes on, on two forked ranks with real writer processes."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from ingot.errors import IngotError
from ingot.events import read_events
from ingot.plugins.callback import Verdict
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint import background, writer
from ingot.trainer.checkpoint.files import CheckpointFacts, CheckpointFiles
from ingot.trainer.checkpoint.manifest import list_checkpoints, verify_checkpoint
from ingot.trainer.checkpoint.part import RankBlocks
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.resilience.heartbeat import Heartbeat, Phase
from ingot.trainer.run import build_trainer
from ingot.trainer.save import save

from .test_loop import ledger_proof, step_facts
from .test_loop import run_rank as run_undisturbed


class Disturbing(DefaultPolicy):
    """Calls, after a step, what the script has for it, with the trainer."""

    def __init__(self, folder, script, trainer):
        super().__init__(folder)
        self.script, self.trainer = script, trainer

    def verdict(self, facts):
        verdict = super().verdict(facts)
        return self.script.get(facts.step, lambda trainer: None)(self.trainer) or verdict


def run_rank(rank, ranks, folder, script=None, until_step=None, say=lambda line: None):
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    run = build_trainer(load_run(folder.config), folder, place, until_step=until_step, say=say)
    run.policy = Disturbing(folder, script or {}, run)
    try:
        train(run)
    except IngotError as error:
        return error.code
    finally:
        run.close()
    return "ended"


def written(run):
    """Let the save in flight end on this rank, if it was not reported yet."""
    if run.background.in_flight is not None:
        run.background.in_flight.wait()


def stop_writer(run):
    os.kill(run.background.writer_pid, signal.SIGSTOP)


def continue_writer(run):
    os.kill(run.background.writer_pid, signal.SIGCONT)
    written(run)


def kill_writer_of_rank_1(run):
    """The writer of rank 1 dies before it has written."""
    if run.place.rank == 1:
        os.kill(run.background.writer_pid, signal.SIGKILL)
    else:
        os.kill(run.background.writer_pid, signal.SIGCONT)
    written(run)


def fill_disk(run):
    """Files of the writer of rank 0 can have 4 KiB: the kernel refuses more, as a full disk does."""
    if run.place.rank == 0:
        resource.prlimit(run.background.writer_pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def free_disk(run):
    written(run)
    if run.place.rank == 0:
        assert not CheckpointFiles(run.folder, 12).temporary.exists()  # the next save needs its space
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(run.background.writer_pid, resource.RLIMIT_FSIZE, unlimited)


def spoil(run):
    """Put a NaN where no loss sees it: into a tensor of a callback."""
    run.state.callbacks["probe.x"] = torch.tensor([float("nan")])


def files_by_step(folder):
    return {c.step: c.manifest.files for c in list_checkpoints(folder.checkpoints)}


def of_kind(folder, kind):
    return [(e["step"], e.get("code")) for e in read_events(folder.events, kind)]


def reports_of_the_heart(rank, ranks, folder):
    learned, ages = [], []
    Heartbeat.learn = lambda _, phase, seconds: learned.append((phase, seconds))
    Heartbeat.wait_for_save = lambda _, age: ages.append(age)
    run_rank(rank, ranks, folder)
    return learned, ages


def test_every_rank_reports_to_the_watchdog_how_long_whole_saves_and_evaluations_took(fork_ranks, make_run):
    folder = make_run("async", mode="async", dp_shard=2, steps=8, every_steps=4)
    reports = fork_ranks(reports_of_the_heart, 2, folder)
    saves = [e["stall_seconds"] + e["write_seconds"] for e in read_events(folder.events, events.CHECKPOINT)]
    evaluations = [e["seconds"] for e in read_events(folder.events, events.EVALUATION)]
    assert saves and evaluations
    learned, _ = reports[0]
    assert [seconds for phase, seconds in learned if phase is Phase.SAVE] == saves
    assert [seconds for phase, seconds in learned if phase is Phase.EVALUATE] == evaluations
    for learned, ages in reports:
        assert [phase for phase, _ in learned] == [phase for phase, _ in reports[0][0]]
        assert ages and all(0 <= age < 60 for age in ages)  # at least of the last save, which the end waits for


def test_the_bytes_are_those_of_a_run_that_waits_whatever_happens_to_the_writers(fork_ranks, make_run):
    """Saves are due after the steps 4, 8, 12, 16 and 20. The snapshot of step 4 is written after step 6, when the
    weights have changed; a writer dies during the save of step 8, the disk is full at 12, and at 20 nothing is wrong.
    """
    changes = {"dp_shard": 2, "steps": 20, "every_steps": 4, "keep": 9}
    waiting = make_run("waiting", **changes)
    fork_ranks(run_undisturbed, 2, waiting)
    script = {3: stop_writer, 6: continue_writer, 7: stop_writer, 10: kill_writer_of_rank_1}
    script |= {11: fill_disk, 14: free_disk, 18: written}
    folder = make_run("async", mode="async", **changes)
    assert fork_ranks(run_rank, 2, folder, script) == ["ended"] * 2
    assert step_facts(folder) == step_facts(waiting)
    assert of_kind(folder, events.CHECKPOINT_FAILED) == [(8, "E-CKPT-WRITER"), (12, "E-CKPT-WRITE")]
    assert of_kind(folder, events.CHECKPOINT) == [(4, None), (16, None), (20, None)]
    assert of_kind(folder, events.CHECKPOINT_SKIPPED) == []
    expected = files_by_step(waiting)
    assert files_by_step(folder) == {step: expected[step] for step in (4, 16, 20)}
    for path in folder.checkpoints.iterdir():
        verify_checkpoint(path)
    segments = [(s.first_step, s.last_step) for s in ledger_proof(folder, load_run(folder.config)).ledger]
    assert segments == [(1, 4), (5, 16), (17, 20)]


def test_a_save_that_is_due_while_another_is_written_is_left_out(fork_ranks, make_run):
    """The first one has a line; that of the next save counts the others. Held-out text is scored for saves alone."""
    folder = make_run(dp_shard=2, steps=12, every_steps=3, mode="async", guard={"sanity_every": 1})

    def run_and_read(rank, ranks):
        lines = []
        return run_rank(rank, ranks, folder, {2: stop_writer, 10: continue_writer}, say=lines.append), lines

    (ended, lines), (other, _) = fork_ranks(run_and_read, 2)
    assert (ended, other) == ("ended", "ended")
    (first,) = (line for line in lines if line.startswith("not saved"))
    assert "step 6: an earlier save is still being written" in first
    counts = [(line.split()[2], line.partition("verified")[2].strip()) for line in lines if line.startswith("saved")]
    assert counts == [("3", "1 save left out"), ("12", "")]
    skipped = [(e["step"], e["in_flight"]) for e in read_events(folder.events, events.CHECKPOINT_SKIPPED)]
    assert skipped == [(6, 3), (9, 3)]
    assert [e["step"] for e in read_events(folder.events, events.SANITY)] == [3, 12]
    assert of_kind(folder, events.CHECKPOINT) == [(3, None), (12, None)]
    ledger_proof(folder, load_run(folder.config))


def test_state_that_is_not_finite_ends_the_run_at_the_next_save(fork_ranks, make_run):
    folder = make_run(dp_shard=2, steps=12, every_steps=3, mode="async")
    script = {4: written, 6: spoil, 8: written}
    assert fork_ranks(run_rank, 2, folder, script) == ["E-STATE-NOT-FINITE"] * 2
    assert list(files_by_step(folder)) == [3]
    assert of_kind(folder, events.CHECKPOINT_FAILED) == [(6, "E-STATE-NOT-FINITE")]


def test_the_last_save_must_succeed(fork_ranks, make_run):
    folder = make_run(dp_shard=2, steps=4, every_steps=4, mode="async")

    def spoiled(rank, ranks):
        return run_rank(rank, ranks, folder, {4: spoil})

    assert fork_ranks(spoiled, 2) == ["E-STATE-NOT-FINITE"] * 2
    assert not list(read_events(folder.events, events.FINISHED))


def test_a_rollback_waits_for_the_save_in_flight(fork_ranks, make_run):
    folder = make_run(dp_shard=2, steps=8, every_steps=4, mode="async")
    back = iter([Verdict.ROLL_BACK])

    def once(run):
        os.kill(run.background.writer_pid, signal.SIGCONT)
        return next(back, None)

    assert fork_ranks(run_rank, 2, folder, {3: stop_writer, 6: once}) == ["ended"] * 2
    assert [(e["from_step"], e["to_step"]) for e in read_events(folder.events, events.ROLLED_BACK)] == [(6, 4)]
    ledger_proof(folder, load_run(folder.config))


def test_a_writer_that_hangs_is_replaced(fork_ranks, make_run):
    """The writer of rank 1 stops before the save of step 4, and does not answer. Rank 0 is patient: its writer may not
    have started yet, and if it gave up first, rank 1 would not ask."""

    def hang(run):
        if run.place.rank == 1:
            writer._PATIENCE_SECONDS = 0.3
            stop_writer(run)

    def given_up(run):
        written(run)
        writer._PATIENCE_SECONDS = patience

    patience = writer._PATIENCE_SECONDS
    folder = make_run(dp_shard=2, steps=8, every_steps=4, mode="async")
    assert fork_ranks(run_rank, 2, folder, {3: hang, 6: given_up}) == ["ended"] * 2
    assert of_kind(folder, events.CHECKPOINT_FAILED) == [(4, "E-CKPT-WRITER")]
    manifest = ledger_proof(folder, load_run(folder.config))
    assert [(s.first_step, s.last_step) for s in manifest.ledger] == [(1, 8)]


def refuse_page_locks(run):
    run.background._snapshot.refusal = 2


def test_memory_that_is_not_page_locked_is_reported_once_for_each_rank(fork_ranks, make_run):
    folder = make_run(dp_shard=2, steps=8, every_steps=2, mode="async")
    fork_ranks(run_rank, 2, folder, {1: refuse_page_locks, 2: written, 4: written, 6: written})
    found = sorted((e["rank"], e["step"], e["code"]) for e in read_events(folder.events, events.SNAPSHOT_PAGEABLE))
    assert found == [(0, 2, 2), (1, 2, 2)]
    for saved in read_events(folder.events, events.CHECKPOINT):
        assert 0 < saved["snapshot_seconds"] <= saved["stall_seconds"]
        assert 0 < saved["verify_seconds"] <= saved["write_seconds"]


def test_a_stopped_writer_ends_with_its_rank(tmp_path):
    def die(pipe):
        own = writer.WriterProcess(RunFolder(tmp_path), 0, [os.memfd_create("snapshot")])
        own.begin()
        own.make_folder(CheckpointFacts(1, 1, {}, "", "", {}), [1])  # it has begun to work
        os.kill(own.pid, signal.SIGSTOP)
        pipe.send(own.pid)
        os.kill(os.getpid(), signal.SIGKILL)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    rank = context.Process(target=die, args=(theirs,))
    rank.start()
    theirs.close()
    pid = ours.recv()
    rank.join()
    deadline = time.monotonic() + 10
    try:
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_agree_on_whether_a_save_has_ended(fork_ranks):
    """On rank 0 alone, the save has ended: both ranks leave the next one out, and none begins it."""

    def save_while_one_waits(rank, ranks):
        logged = []
        in_flight = SimpleNamespace(ended=rank == 0, step=3)
        trainer = SimpleNamespace(
            background=SimpleNamespace(in_flight=in_flight, broken=None),
            schedule=SimpleNamespace(left_out=lambda kind: None),
            left_out=0,
            log=lambda kind, **fields: logged.append((kind, fields)),
            say=lambda line: None,
        )
        return save(trainer, 6), logged

    logged = [(events.CHECKPOINT_SKIPPED, {"step": 6, "what": "full", "in_flight": 3})]
    assert fork_ranks(save_while_one_waits, 2) == [(False, logged)] * 2


def test_training_may_change_the_state_once_the_save_has_begun(fork_ranks, make_run):
    """The thread of the save of step 4 waits until step 6 was trained."""
    folder, waiting = make_run("async", steps=8, every_steps=4, mode="async"), make_run("sync", steps=8, every_steps=4)
    fork_ranks(run_undisturbed, 1, waiting)

    def train_with_a_late_thread(rank, ranks):
        changed, at_once = threading.Event(), background.from_all_ranks

        def late(*arguments, **options):
            changed.wait()
            return at_once(*arguments, **options)

        background.from_all_ranks = late
        return run_rank(rank, ranks, folder, {6: lambda run: changed.set()})

    assert fork_ranks(train_with_a_late_thread, 1) == ["ended"]
    assert files_by_step(folder) == files_by_step(waiting)
    assert sorted(files_by_step(folder)) == [4, 8]


def test_a_rank_that_trains_never_reads_the_blocks_of_other_ranks(fork_ranks, make_run):
    """To read those of 16,384 ranks takes seconds, in which training would wait for the lock of the interpreter."""
    folder = make_run("async", mode="async", dp_shard=2, steps=8, every_steps=4)

    def train_without_reading(rank, ranks):
        RankBlocks.from_bytes = staticmethod(lambda data: 1 // 0)
        return run_rank(rank, ranks, folder)

    assert fork_ranks(train_without_reading, 2) == ["ended"] * 2
    assert sorted(files_by_step(folder)) == [4, 8]
