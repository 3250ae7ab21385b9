"""One rank of a training job: `python -m ingot.trainer.main RUN_FOLDER [--until-step N]`, as `ingot train` runs it.

Under torchrun, which starts no supervisor, the rank itself takes stop signals and counts launch.stop_after, and rank 0
locks the run.

Exit codes: 0 finished; 10 stopped on request or after --until-step; otherwise the error's code.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import IngotError
from ingot.events import EventLog
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import is_full
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.remote import open_tier
from ingot.trainer.checkpoint.tiers import fetch_newest
from ingot.trainer.interrupts import signals_ask
from ingot.trainer.lease import open_lease
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE, environment_number
from ingot.trainer.resilience.again import forget, open_line
from ingot.trainer.resilience.endings import guarded
from ingot.trainer.resilience.heartbeat import Heartbeat, open_heartbeat
from ingot.trainer.resilience.leaving import PeerLost
from ingot.trainer.resilience.lock import RunLock
from ingot.trainer.resilience.reports import Reports
from ingot.trainer.resilience.start_times import StartClock, open_start_clock

if TYPE_CHECKING:
    from ingot.trainer.loop import Ending


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, guard the rank and train."""
    clock = open_start_clock()
    parser = argparse.ArgumentParser(prog="python -m ingot.trainer.main", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="folder with the resolved run.toml; all output goes there")
    parser.add_argument("--epoch", type=int, default=0, help="number of this attempt (default: rank 0 takes the next)")
    parser.add_argument("--until-step", type=int, help="save and stop after this step (default: the run's last step)")
    parser.add_argument("--quiet", action="store_true", help="print no progress lines")
    parser.add_argument(
        "--callback", nargs=2, action="append", default=[], help="folder and module:Class of another callback"
    )
    args = parser.parse_args(argv)
    folder = RunFolder(args.run_folder)
    line = open_line()
    try:
        while True:
            try:
                with guarded(folder, environment_number("RANK", 0)):
                    ending = _train(folder, args, clock)
                if line is None or not ending.again:
                    return ending.exit_code
            except PeerLost as error:
                if line is None:
                    raise
                forget(error)
            line.start_again()
            clock = open_start_clock()
    except IngotError as error:
        print(f"{error.code}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _train(folder: RunFolder, args: argparse.Namespace, clock: StartClock) -> "Ending":
    """Train as the rank that the environment describes. Raises as `run_rank`."""
    supervised = os.environ.get(SUPERVISOR_VARIABLE)
    heartbeat = _watched() if supervised else None  # before the imports, which may hang as well
    from ingot.trainer.given import imported_callbacks
    from ingot.trainer.run import run_rank  # imports torch: guarded, so that a failure is recorded

    given = imported_callbacks(args.callback)
    clock.end("import")
    say = None if args.quiet else _say
    if supervised:  # it takes the signals, and asks by a file
        return run_rank(folder, args.until_step, say, given, epoch=args.epoch, heartbeat=heartbeat, clock=clock)
    config = load_run(folder.config, same_code=True)
    is_first = environment_number("RANK", 0) == 0
    on_rank_zero = say if say and is_first else lambda line: None
    with contextlib.ExitStack() as stack:
        epoch = _begin(folder, config, on_rank_zero, stack) if is_first else 0
        stops = stack.enter_context(signals_ask(folder, config.launch, on_rank_zero))
        return run_rank(folder, args.until_step, say, given, stops, epoch=epoch, clock=clock)


def _watched() -> Heartbeat:
    """Let the supervisor of this rank see where it is, and ask what it does."""
    reports = _reports()
    return open_heartbeat(environment_number("LOCAL_RANK", 0), reports.stacks, reports.collectives)


@functools.cache
def _reports() -> Reports:
    """Return the reports of this process, which it keeps when it starts again."""
    return Reports()


def _begin(folder: RunFolder, config: RunConfig, say: Callable[[str], None], stack: contextlib.ExitStack) -> int:
    """Lock the run, fetch what the disk lacks, and take the lease, as a launcher does. Returns the number of this
    attempt."""
    stack.enter_context(RunLock(folder.lock))
    lease = stack.enter_context(open_lease(folder, config))
    lease.wait(say)
    with EventLog(folder.events) as log:
        tier = open_tier(folder, config.checkpoint)
        fetch_newest(folder, tier, log.write, say, lambda stored: lease.require_same_run())
    lease.take()
    return lease.epoch


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        if is_full(error):  # of the file of the lines: the next one may find room
            return
        # The reader of the lines is gone (`| head`, a closed terminal); training continues without it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
