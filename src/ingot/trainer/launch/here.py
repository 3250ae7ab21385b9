"""A run in this process: for runs with one rank whose callbacks are objects of the program, and for loops of one's own.

Afterwards the process is as before: without a process group, with its signal handlers, environment, random state and
number of threads.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from ingot.errors import UsageError
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.given import GivenCallbacks
from ingot.trainer.interrupts import signals_ask
from ingot.trainer.launch.outcome import EventLogReader, JobResult
from ingot.trainer.mesh.start import ATTEMPT_VARIABLE, STORE_VARIABLE, stop
from ingot.trainer.run import run_rank

# The place of this process in a job, which a run of one process must not join.
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ATTEMPT_VARIABLE)
_JOB += (STORE_VARIABLE, "TORCHELASTIC_RESTART_COUNT")


def train_here(
    folder: RunFolder,
    env: Mapping[str, str],
    launch: Launch,
    *,
    epoch: int,
    until_step: int | None,
    given: GivenCallbacks,
    say: Callable[[str], None],
) -> JobResult:
    """Train the run in `folder` as its only rank. The caller holds the run's lock.

    env: the environment of a rank. epoch: the number of this attempt (checkpoint/fence.py). launch: the settings of the
    run. Stop signals and launch.stop_after ask the loop to save and stop (see signals_ask). Raises every error of the
    run: there are no restarts.
    """
    began, reader = time.monotonic(), EventLogReader(folder.events)
    folder.stop_request.unlink(missing_ok=True)
    with own_process(env, alone=True), signals_ask(folder, launch, say) as stops:
        code = run_rank(folder, until_step, say, given, stops, epoch=epoch).exit_code
    reader.read()
    saved = resume_step(folder) if reader.saved is None else reader.saved
    seconds = time.monotonic() - began
    return JobResult(exit_code=code, step=reader.step, saved_step=saved, restarts=0, seconds=seconds, run=folder.root)


@contextlib.contextmanager
def own_process(env: Mapping[str, str], *, alone: bool) -> Iterator[None]:
    """Give this process the environment of a rank, and restore what the rank changes.

    env: variables that the user's own override. alone: the rank is the only one; with False, the environment names its
    job, as torchrun does. Raises UsageError if the process is a part of a process group already.
    """
    if dist.is_initialized():
        raise UsageError(
            "E-PROCESS-GROUP",
            "this process is already in a process group of torch.distributed",
            rule="a rank joins the group of its run, and a process has one default group",
            fix="leave the other group first (torch.distributed.destroy_process_group), or train in another process",
        )
    names = {*(_JOB if alone else ()), *env}
    before = {name: os.environ[name] for name in names if name in os.environ}
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    for name in _JOB if alone else ():
        os.environ.pop(name, None)
    for name, value in env.items():
        os.environ.setdefault(name, value)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
        # The model is in cycles of references. Its groups have threads, which must not end while the interpreter does.
        gc.collect()
        stop()
    finally:
        if alone:  # after an error, a group of several ranks may not be left: a peer may wait in a collective
            stop()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
