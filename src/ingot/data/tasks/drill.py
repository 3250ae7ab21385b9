"""A test job that shows whether a runner works on this machine or cluster, before a build of days depends on it.

    python -m ingot.data.tasks.drill FOLDER --workers 2
    python -m ingot.data.tasks.drill /shared/FOLDER --ray auto
    python -m ingot.data.tasks.drill /shared/FOLDER --slurm --set partition=cpu

The job has three phases that depend on each other, as in a build: many small tasks that write lines, four tasks that
each gather lines of all of them, and one task that gathers the lines of those four. The command does the job in this
process and on the runner, and compares the SHA-256 of all files. Processes may be killed meanwhile: the same command
continues. `misbehave` imitates bad input.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ingot.data.tasks.run import Inline, Runner, Watch, describe, run_all
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import PLACE, Attempt, Task, TaskRef, task_function
from ingot.errors import DataError, IngotError
from ingot.storage import sha256_bytes, sha256_file

_DROPPED = "read.killed_worker"


@dataclass(frozen=True, kw_only=True)
class MakeLines:
    """Settings of `make_lines`: `records` records that depend on `seed`.

    faults: record number -> kind of fault (see `misbehave`); -1 is before the first record. wait: seconds to sleep per
    record. log: a file that gets a line per attempt.
    """

    seed: int
    records: int
    faults: dict[str, str]
    wait: Annotated[float, PLACE] = 0.0
    log: Annotated[Path | None, PLACE] = None


@dataclass(frozen=True, kw_only=True)
class GatherLines:
    """Settings of `gather_lines`: gather the lines of `inputs` whose value modulo `parts` is `part`.

    wait: seconds per input. log: see MakeLines.
    """

    part: int
    parts: int
    inputs: tuple[TaskRef[dict[str, int]] | TaskRef[int], ...]
    wait: Annotated[float, PLACE] = 0.0
    log: Annotated[Path | None, PLACE] = None


def first_phase(
    tasks: int,
    records: int,
    *,
    faults: Mapping[int, str] | None = None,
    wait: float = 0.0,
    log: Path | None = None,
) -> list[Task[dict[str, int]]]:
    """Return the tasks of the first phase: `tasks` tasks that each make `records` lines.

    faults: record number -> kind, for the first task only. wait, log: see MakeLines.
    """
    return [
        make_lines.task(
            MakeLines(
                seed=seed,
                records=records,
                faults={str(record): kind for record, kind in (faults or {}).items()} if seed == 0 else {},
                wait=wait,
                log=log,
            ),
            label=f"made-{seed}",
        )
        for seed in range(tasks)
    ]


def run_job(
    store: Store,
    runner: Runner,
    *,
    tasks: int = 16,
    records: int = 50,
    faults: Mapping[int, str] | None = None,
    wait: float = 0.0,
    log: Path | None = None,
    watch: Watch | None = None,
) -> str:
    """Do the three phases on `runner`: make lines, gather them in four parts, gather the parts.

    Return one SHA-256 of what the tasks wrote (see `digest`). faults: record number -> kind (see `misbehave`), for the
    first task only. wait, log: see MakeLines.
    """
    made = first_phase(tasks, records, faults=faults, wait=wait, log=log)
    run_all(made, store, runner, watch)
    inputs = tuple(task.ref for task in made)
    parts = [
        gather_lines.task(GatherLines(part=part, parts=4, inputs=inputs, wait=wait, log=log), f"part-{part}")
        for part in range(4)
    ]
    run_all(parts, store, runner, watch)
    inputs = tuple(task.ref for task in parts)
    whole = gather_lines.task(GatherLines(part=0, parts=1, inputs=inputs, wait=wait, log=log), "whole")
    run_all([whole], store, runner, watch)
    return digest(store, [*made, *parts, whole])


def digest(store: Store, tasks: Sequence[Task]) -> str:
    """Return one SHA-256 of the finished folders of `tasks`: their file names, results and files, but not times."""
    found = []
    for task in tasks:
        folder = store.folder(task)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json")
        found += [f"{task.key}/{path.relative_to(folder)} {sha256_file(path)}" for path in files]
    return sha256_bytes("\n".join(found).encode())


@task_function("drill_make_lines")
def make_lines(specification: MakeLines, attempt: Attempt) -> dict[str, int]:
    """Write lines that depend on the seed alone; a rule drops about a third. Return rule -> records."""
    counts: Counter[str] = Counter()
    _log(specification.log, attempt)
    misbehave(specification.faults.get("-1", ""))
    with (attempt.out / "lines.jsonl").open("w", encoding="utf-8") as file:
        for record in range(specification.records):
            attempt.at(record, lambda: counts)
            if record in attempt.skip:
                counts[_DROPPED] += 1
                continue
            misbehave(specification.faults.get(str(record), ""))
            time.sleep(specification.wait)
            value = random.Random(f"{specification.seed} {record}").getrandbits(64)
            if value % 3 == 0:
                counts["drill.third"] += 1
                continue
            counts["kept"] += 1
            file.write(json.dumps({"seed": specification.seed, "record": record, "value": value}) + "\n")
    attempt.at(-1)
    return dict(counts)


@task_function("drill_gather_lines")
def gather_lines(specification: GatherLines, attempt: Attempt) -> int:
    """Write the lines of all inputs that belong to this part, sorted by value. Return their number."""
    lines: list[tuple[int, str]] = []
    _log(specification.log, attempt)
    for one in specification.inputs:
        attempt.at(-1)
        time.sleep(specification.wait)
        for line in (one.folder / "lines.jsonl").read_text(encoding="utf-8").splitlines():
            value = json.loads(line)["value"]
            if value % specification.parts == specification.part:
                lines.append((value, line))
    (attempt.out / "lines.jsonl").write_text("".join(f"{line}\n" for _, line in sorted(lines)), encoding="utf-8")
    return len(lines)


def misbehave(kind: str) -> None:
    """Make this process fail the way a bad record can make it fail.

    abort, segfault, kill, exit: the process dies. loop, sleep: it hangs. memory: it allocates all memory. refuse: it
    raises DataError. bug: it raises ValueError. Any other word does nothing.
    """
    match kind:
        case "abort":
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(1e6)
        case "memory":
            hoard = []
            while True:
                hoard.append(bytearray(1 << 24))
        case "refuse":
            raise DataError("E-DRILL-REFUSED", "this file is not a crawl file", rule="a rule", fix="a fix", kind=kind)
        case "bug":
            raise ValueError("a bug")


def _log(path: Path | None, attempt: Attempt) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(attempt.out.name.partition(".")[0] + "\n")  # the key of the task


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ingot.data.tasks.drill", description="Test a runner with a small synthetic job."
    )
    parser.add_argument("folder", type=Path, help="the folder to work in, at the same path on every machine")
    parser.add_argument("--workers", type=int, default=2, help="processes of this machine (default 2)")
    parser.add_argument("--ray", metavar="ADDRESS", help="use the Ray cluster at ADDRESS; 'auto' finds a running one")
    parser.add_argument("--slurm", action="store_true", help="use Slurm job arrays")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="an option of Slurm(...)")
    parser.add_argument("--tasks", type=int, default=64, help="tasks of the first phase (default 64)")
    parser.add_argument("--seconds", type=float, default=0.02, help="seconds per record; a task has 50 records")
    chosen = parser.parse_args(argv)
    try:
        expected = run_job(Store(chosen.folder / "inline"), Inline(), tasks=chosen.tasks)
        found = run_job(
            Store(chosen.folder / "runner"),
            _runner(chosen),
            tasks=chosen.tasks,
            wait=chosen.seconds,
            watch=lambda status: print(describe(status, "tasks"), file=sys.stderr, flush=True),
        )
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("same bytes" if found == expected else "DIFFERENT BYTES: do not build with this runner")
    return 0 if found == expected else 1


def _runner(chosen: argparse.Namespace) -> Runner:
    if chosen.ray:
        from ingot.data.tasks.ray import Ray

        return Ray(chosen.ray)
    if chosen.slurm:
        from ingot.data.tasks.slurm import Slurm

        options: dict[str, Any] = {}
        for option in chosen.set:
            key, _, value = option.partition("=")
            options[key] = int(value) if value.isdecimal() else value
        return Slurm(**options)
    from ingot.data.tasks.local import Local

    return Local(chosen.workers)


if __name__ == "__main__":
    from ingot.data.tasks import drill  # registers the task functions under this name, not under __main__

    sys.exit(drill.main(sys.argv[1:]))
