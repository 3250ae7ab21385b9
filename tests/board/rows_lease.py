"""Rows of a job that is suspended, loses its lease to a second one on a file system without locks, and goes on."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ingot.drill.job import DEADLINE_SECONDS, Ended, gone_within, marked_processes
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.fence import TOO_LATE
from ingot.trainer.checkpoint.manifest import candidate_folders, late_folders

from .bench import ONE_RANK, Bench, options
from .crash_points import DURING, PREVIOUS, SAVED, calls_of_a_save
from .killpoints import fault
from .row import Row, drawn_mode, judge_recovered, mode_of, random_of, refused_steps, resumed_from

LEASE_OF_SECONDS = "launch.lease_seconds=2"
_LONG = "train.steps=60"
BUSY = 30


def rs30_zombie(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Suspend a job at a random step, and in its commit; let another take over, and the first one go on."""
    _in_a_step(bench, seed, verdicts)
    _in_its_commit(bench, seed, verdicts)


def _in_a_step(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    random, name = random_of("RS30 zombie", seed), f"zombie-{seed}"
    step = random.randrange(5, 40)
    where = f"suspended near step {step}"
    settings = options([_LONG, LEASE_OF_SECONDS, drawn_mode(seed)])
    process = bench.start(name, *settings)
    bench.wait_for_step(name, step, process)
    time.sleep(random.uniform(0, 0.03))
    folder, ranks = bench.folder(name), set(bench.job(name).ranks().values())
    suspended = _suspend(bench, name)
    there = {int(path.name.removeprefix("step-")) for path in candidate_folders(folder.checkpoints)}
    second = bench.train(name, *settings)
    verdicts.judge("o6", where, "" if second.code == 0 else f"exit code {second.code}: {second.output[-500:]}")
    before = len(_saved(folder))
    go_on([pid for pid in suspended if pid != process.pid])  # the launcher, which looks at the lease, comes later
    left = gone_within(DEADLINE_SECONDS, lambda: [pid for pid in marked_processes(folder.root) if pid in ranks])
    late = [step for step in _saved(folder)[before:] if step not in there]  # the newest may not have been logged yet
    verdicts.judge("o6", where, f"it saved steps {late} after another job took over" if late else "")
    verdicts.judge("o6", where, f"its ranks {left} do not end" if left else "")
    go_on([process.pid])
    _judge_refused(verdicts, where, bench.ended(process))
    # The first job trains on until its next sign of life, so the limit on repeated steps is that of the whole run.
    judge_recovered(bench, verdicts, name, where, bench.reference(_LONG), faults=15)


def _in_its_commit(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Suspend the writer after its last look at the lease and before the rename that publishes the checkpoint."""
    name, where = f"late-{seed}", "suspended before the rename of a checkpoint"
    settings, during = options([*ONE_RANK, *PREVIOUS, mode_of("async"), LEASE_OF_SECONDS]), DURING
    folder = bench.copy(bench.base(SAVED, *PREVIOUS), name)
    published = folder.checkpoint(during)
    calls = calls_of_a_save(bench, "async")
    k = next(n for n, (call, path) in enumerate(calls, 1) if call == "rename" and Path(path).name == published.name)
    process = bench.start(name, *settings, env=fault(folder, "stop", k, who="writer"))
    writer = _stopped(bench, name)
    suspended = _suspend(bench, name)
    (unfinished,) = folder.checkpoints.glob(".saving-*")
    kept = shutil.copytree(unfinished, bench.root / "kept")
    second = bench.train(name, *settings, "--until-step", str(during - 1))
    verdicts.judge("o6", where, "" if second.code == 10 else f"exit code {second.code}: {second.output[-500:]}")
    verdicts.judge("o6", where, "the second job left the first one's files" if unfinished.exists() else "")
    kept.rename(unfinished)  # as if the first one had begun to write only now, after its last look
    os.kill(writer, signal.SIGCONT)
    until = time.monotonic() + DEADLINE_SECONDS
    while not published.exists() and time.monotonic() < until:
        time.sleep(0.01)
    verdicts.judge(
        "o6", where, "" if late_folders(folder.checkpoints) == [published] else "the commit was not too late"
    )
    newest = candidate_folders(folder.checkpoints)[:1]
    verdicts.judge("o6", where, "" if newest == [folder.checkpoint(during - 1)] else f"the newest is {newest}")
    go_on(suspended)
    _judge_refused(verdicts, where, bench.ended(process))
    listed = bench.ingot("ckpt", "ls", str(folder.root)).output
    verdicts.judge("o6", where, "" if TOO_LATE.split(" after ")[0] in listed else listed[-500:])
    third = bench.train(name, *settings)
    verdicts.judge("o6", where, "" if third.code == 0 else f"exit code {third.code}: {third.output[-500:]}")
    back, refused = resumed_from(folder), refused_steps(folder)
    verdicts.judge("o6", where, "" if (back, refused) == (during - 1, [during]) else f"from {back}, refused {refused}")
    # The first job trained on while its writer was stopped, up to its end.
    judge_recovered(bench, verdicts, name, where, bench.reference(*PREVIOUS, ranks=1), faults=6)


def _saved(folder: RunFolder) -> list[int]:
    """Return the steps of the checkpoints in the log, in order."""
    return [event["step"] for event in read_events(folder.events, events.CHECKPOINT)]


def _suspend(bench: Bench, name: str) -> list[int]:
    """Stop all processes of the run `name`, and take its lock away, as a file system without locks does."""
    folder = bench.folder(name)
    pids = marked_processes(folder.root)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    folder.lock.unlink()
    return pids


def go_on(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stopped(bench: Bench, name: str) -> int:
    """Wait until a process of the run `name` is stopped, and return its id."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        for pid in marked_processes(bench.folder(name).root):
            with suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    return pid
        time.sleep(0.01)
    raise subprocess.TimeoutExpired("a save", DEADLINE_SECONDS)


def _judge_refused(verdicts: Verdicts, where: str, first: Ended) -> None:
    fine = first.code == BUSY and "E-LEASE-LOST" in first.output
    verdicts.judge("o6", where, "" if fine else f"the first job ended with {first.code}: {first.output[-500:]}")


ROWS = (Row("RS30 zombie", "a suspended job goes on after another took over", rs30_zombie),)
