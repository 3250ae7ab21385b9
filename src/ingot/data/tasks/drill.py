"""A made-up job that tells whether a runner works where you are, before a real build of days depends on it.

    python -m ingot.data.tasks.drill FOLDER --workers 2
    python -m ingot.data.tasks.drill /shared/FOLDER --ray auto
    python -m ingot.data.tasks.drill /shared/FOLDER --slurm --set partition=cpu

Three phases that depend on each other, like a build's: many small tasks, some that gather from all of them, one that
gathers from those. It is done in this process and on the runner, and the SHA-256 of all that was written must agree;
kill what you like meanwhile and give the command again. `misbehave` is what bad input does to a worker.
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
from pathlib import Path
from typing import Any

from ingot.data.tasks.run import Inline, Runner, Watch, describe, run_all
from ingot.data.tasks.task import Context, Store, Task
from ingot.errors import DataError, IngotError
from ingot.storage import sha256_bytes, sha256_file

_DROPPED = "read.killed_worker"


def first_phase(
    tasks: int, records: int, *, faults: Mapping[int, str] | None = None, places: Mapping[str, Any] | None = None
) -> list[Task]:
    """`tasks` tasks of `records` records each. faults: record -> kind, in the first task only (see `misbehave`); -1 is
    before the first record.

    places: "seconds" that each record takes; "log", a file that gets a line per attempt.
    """
    return [
        Task(
            function="ingot.data.tasks.drill:make",
            arguments={
                "seed": seed,
                "records": records,
                "faults": {str(record): kind for record, kind in (faults or {}).items()} if seed == 0 else {},
            },
            places=dict(places or {}),
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
    places: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> str:
    """Do all three phases. Returns one SHA-256 of everything written."""
    made = first_phase(tasks, records, faults=faults, places=places)
    run_all(made, store, runner, watch)
    parts = [
        Task(
            function="ingot.data.tasks.drill:gather",
            arguments={"part": part, "parts": 4},
            inputs=tuple(task.key for task in made),
            places=dict(places or {}),
            label=f"part-{part}",
        )
        for part in range(4)
    ]
    run_all(parts, store, runner, watch)
    whole = Task(
        function="ingot.data.tasks.drill:gather",
        arguments={"part": 0, "parts": 1},
        inputs=tuple(task.key for task in parts),
        places=dict(places or {}),
        label="whole",
    )
    run_all([whole], store, runner, watch)
    return digest(store, [*made, *parts, whole])


def digest(store: Store, tasks: Sequence[Task]) -> str:
    """SHA-256 of the finished folders of `tasks`: names, results and files, but not how long they took."""
    found = []
    for task in tasks:
        folder = store.folder(task.key)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json")
        found += [f"{task.key}/{path.relative_to(folder)} {sha256_file(path)}" for path in files]
    return sha256_bytes("\n".join(found).encode())


def make(context: Context) -> dict[str, int]:
    """Lines that depend on the seed alone; about a third is dropped by a rule."""
    arguments = context.task.arguments
    counts: Counter[str] = Counter()
    _log(context)
    misbehave(arguments["faults"].get("-1", ""))
    with (context.out / "lines.jsonl").open("w", encoding="utf-8") as file:
        for record in range(arguments["records"]):
            context.at(record, lambda: counts)
            if record in context.skip:
                counts[_DROPPED] += 1
                continue
            misbehave(arguments["faults"].get(str(record), ""))
            time.sleep(context.task.places.get("seconds", 0))
            value = random.Random(f"{arguments['seed']} {record}").getrandbits(64)
            if value % 3 == 0:
                counts["drill.third"] += 1
                continue
            counts["kept"] += 1
            file.write(json.dumps({"seed": arguments["seed"], "record": record, "value": value}) + "\n")
    context.at(-1)
    return dict(counts)


def gather(context: Context) -> int:
    """The lines of all inputs whose value belongs to this part, sorted; returns how many."""
    part, parts = context.task.arguments["part"], context.task.arguments["parts"]
    lines: list[tuple[int, str]] = []
    _log(context)
    for folder in context.folders:
        context.at(-1)
        time.sleep(context.task.places.get("seconds", 0))
        for line in (folder / "lines.jsonl").read_text(encoding="utf-8").splitlines():
            value = json.loads(line)["value"]
            if value % parts == part:
                lines.append((value, line))
    (context.out / "lines.jsonl").write_text("".join(f"{line}\n" for _, line in sorted(lines)), encoding="utf-8")
    return len(lines)


def misbehave(kind: str) -> None:
    """What a record can do to its process. abort, segfault, kill, exit: it dies. loop, sleep: it hangs. memory: it
    takes all there is. refuse: DataError; bug: ValueError; anything else: nothing."""
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
            raise DataError("this file is no crawl file", rule="a rule", fix="a fix")
        case "bug":
            raise ValueError("a bug")


def _log(context: Context) -> None:
    if "log" in context.task.places:
        with Path(context.task.places["log"]).open("a", encoding="utf-8") as file:
            file.write(f"{context.task.key}\n")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ingot.data.tasks.drill", description="Try a runner on a made-up job."
    )
    parser.add_argument("folder", type=Path, help="where to work; seen by every machine at the same path")
    parser.add_argument("--workers", type=int, default=2, help="processes of this machine (default 2)")
    parser.add_argument("--ray", metavar="ADDRESS", help="on the Ray cluster there; 'auto' finds a running one")
    parser.add_argument("--slurm", action="store_true", help="as Slurm job arrays")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="an option of Slurm(...)")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.02, help="that a record takes; a task has 50")
    chosen = parser.parse_args(argv)
    try:
        expected = run_job(Store(chosen.folder / "inline"), Inline(), tasks=chosen.tasks)
        found = run_job(
            Store(chosen.folder / "runner"),
            _runner(chosen),
            tasks=chosen.tasks,
            places={"seconds": chosen.seconds},
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
    sys.exit(main(sys.argv[1:]))
