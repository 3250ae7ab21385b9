"""Tasks of a phase, done on this machine: what an element of a Slurm array runs, and any other scheduler's may.

    python -m ingot.data.tasks.worker STORE PHASE 7 --workers 8
    python -m ingot.data.tasks.worker STORE PHASE --all

Finished tasks are left alone, so it may be given again, anywhere, at any time. Exit 0 when all are done.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.data.tasks.local import MEMORY_BYTES, Local
from ingot.data.tasks.phases import Phase, clear_error, read_phase, write_error
from ingot.data.tasks.task import Store
from ingot.errors import IngotError
from ingot.units import parse_bytes


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ingot.data.tasks.worker", description="Do tasks of a phase that a runner wrote down."
    )
    parser.add_argument("store", type=Path, help="the folder of finished tasks, seen by every machine at this path")
    parser.add_argument("phase", help="its name: STORE/phases/NAME.json")
    parser.add_argument("index", type=int, nargs="?", help="number of the block of tasks to do")
    parser.add_argument("--all", action="store_true", help="do every block, one after the other")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    parser.add_argument("--memory", default=f"{MEMORY_BYTES}", help="per process (default 1.5 GiB)")
    chosen = parser.parse_args(argv)
    if chosen.all == (chosen.index is not None):
        parser.error("give the number of a block, or --all")
    store = Store(chosen.store)
    try:
        phase = read_phase(store, chosen.phase)
        with Local(chosen.workers, memory_bytes=parse_bytes(chosen.memory)) as runner:
            for index in range(phase.blocks) if chosen.all else [chosen.index]:
                _do(store, phase, index, runner)
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _do(store: Store, phase: Phase, index: int, runner: Local) -> None:
    clear_error(store, phase, index)
    tasks = [task for task in phase.tasks_of(index) if not store.finished(task)]

    def watch(ended, running) -> None:
        for task in ended:
            print(f"done: {task.label or task.key}", flush=True)

    try:
        runner.run(tasks, store, watch)
    except Exception as error:
        write_error(store, phase, index, error)  # for who waits for the phase, maybe elsewhere
        raise
    print(f"block {index}: all {len(phase.tasks_of(index))} tasks are done", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
