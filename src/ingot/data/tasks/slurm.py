"""A runner that does tasks as Slurm job arrays. An array element does a block of tasks on its node (worker.py).

The store alone decides which tasks are done; squeue reports which elements still wait or run. Tasks of elements that
ended without doing them are submitted again. A job has the name of its phase: when this process dies, the jobs
continue, and the same command finds them and waits for them instead of submitting them twice. No accounting database
(sacct) is needed.
"""

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.data.tasks.local import MEMORY_BYTES
from ingot.data.tasks.run import Look
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import Task
from ingot.data.tasks.worker import TaskPhase, first_error, read_phase, write_phase
from ingot.errors import DataError, IngotError, ResourceError
from ingot.storage import write_atomic

_NAME = "ingot-"
_ELEMENTS = 1000  # per array; a common limit (MaxArraySize) is 1001
_SUBMISSIONS = 4  # maximum submissions per task; requeues by Slurm do not count
_DEAF_SECONDS = 1800.0  # longest time without an answer from Slurm


@dataclass(frozen=True)
class _Element:
    """An element of an array that waits, runs, or is held (held elements never run)."""

    job: str  # "123"
    index: int
    phase: str
    held: bool


class Slurm:
    """A runner that does tasks as Slurm job arrays; each array element uses one node.

    partition, time, mem: options of sbatch, left out if empty. cpus: CPUs per element, each with a worker process.
    max_parallel: elements that run at once. lines: more '#SBATCH' options, such as '--account=x'. block: tasks per
    element (default: one per CPU, more if there would be over 1,000 elements). memory_bytes: memory limit per worker
    process; `mem` must be at least `cpus` times this limit. poll_seconds: time between two calls of squeue.
    settle_seconds: how long to wait for a file that another machine wrote to appear on a network file system.
    """

    def __init__(
        self,
        *,
        partition: str = "",
        time: str = "",
        cpus: int = 8,
        mem: str = "",
        max_parallel: int = 100,
        lines: Sequence[str] = (),
        block: int = 0,
        memory_bytes: int = MEMORY_BYTES,
        poll_seconds: float = 5.0,
        settle_seconds: float = 60.0,
    ):
        self.options = {"partition": partition, "time": time, "mem": mem, "cpus-per-task": str(cpus)}
        self.cpus, self.max_parallel, self.lines, self.block = cpus, max_parallel, tuple(lines), block
        self.memory_bytes = memory_bytes
        self.poll_seconds, self.settle_seconds = poll_seconds, settle_seconds

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        """Return when all tasks are done.

        Raises the first error that an element recorded (the others are canceled); DataError if a task is not done after
        several submissions; ResourceError if Slurm rejects the jobs or does not answer.
        """
        missing = {task.key: task for task in tasks}
        unclaimed_since = dict.fromkeys(missing, float("-inf"))  # key -> time since which no element has the task
        phases: dict[str, TaskPhase] = {}
        elements: list[_Element] = []
        submitted, heard = Counter[str](), time.monotonic()
        try:
            while True:
                # Elements are read before finished tasks: an element that has ended has already written its results.
                alive = self._alive(store, phases)
                done = store.finished_keys(missing)
                ended = [missing.pop(key) for key in sorted(done)]
                if error := first_error(store, list(phases.values())):
                    raise error
                elements, heard = (alive, time.monotonic()) if alive is not None else (elements, heard)
                claimed = {t.key: t for e in elements if not e.held for t in phases[e.phase].tasks_of(e.index)}
                watch(ended, [task for key, task in claimed.items() if key in missing])
                if not missing:
                    return
                now = time.monotonic()
                if now - heard > _DEAF_SECONDS:
                    raise ResourceError(
                        "E-SLURM-SILENT",
                        f"squeue has failed for {_DEAF_SECONDS / 60:.0f} minutes",
                        rule="Slurm answers within that time",
                        fix="ask the administrator of the cluster; the same command continues",
                        command="squeue",
                    )
                unclaimed_since = {key: unclaimed_since.get(key, now) for key in missing if key not in claimed}
                lost = [key for key, since in unclaimed_since.items() if now - since >= self.settle_seconds]
                if lost and alive is not None:
                    submitted.update(lost)
                    if tired := [missing[key] for key in lost if submitted[key] > _SUBMISSIONS]:
                        raise _gave_up(store, tired)
                    self._cancel([element for element in elements if element.held])
                    phase = self._submit([missing[key] for key in lost], store)
                    phases[phase.name] = phase
                    unclaimed_since = {}
                    time.sleep(min(self.poll_seconds, 1.0))
                    continue
                time.sleep(self.poll_seconds)
        finally:  # after an error, or for elements that were submitted twice
            alive = self._alive(store, phases)
            self._cancel(elements if alive is None else alive)

    def _alive(self, store: Store, phases: dict[str, TaskPhase]) -> list[_Element] | None:
        """Return the elements that this or an earlier driver submitted for the store; None if Slurm does not answer."""
        try:
            # One line per element, "123_4 ingot-NAME Reason".
            text = _slurm("squeue", "--me", "--array", "--noheader", "--format=%i %j %r")
        except ResourceError:
            return None
        found = []
        for line in text.splitlines():
            number, _, rest = line.strip().partition(" ")
            name, _, reason = rest.partition(" ")
            job, _, index = number.partition("_")
            phase = name.removeprefix(_NAME)
            if not (name.startswith(_NAME) and index.isdecimal()):
                continue
            if phase not in phases:
                try:
                    phases[phase] = read_phase(store, phase)
                except IngotError:
                    continue  # a phase of another store
            found.append(_Element(job, int(index), phase, "held" in reason.lower()))
        return found

    def _submit(self, tasks: Sequence[Task], store: Store) -> TaskPhase:
        block = self.block or max(self.cpus, -(-len(tasks) // _ELEMENTS))
        phase = write_phase(tasks, store, block)
        (store.root / "logs").mkdir(exist_ok=True)
        script = store.root.absolute() / "phases" / f"{phase.name}.sh"
        write_atomic(script, self._script(store, phase))
        _slurm("sbatch", "--parsable", str(script))
        return phase

    def _script(self, store: Store, phase: TaskPhase) -> str:
        root = store.root.absolute()
        options = {
            "job-name": _NAME + phase.name,
            "array": f"0-{phase.blocks - 1}%{self.max_parallel}",
            "output": f"{root}/logs/%A_%a.log",
            "open-mode": "append",  # a requeued element would truncate its log
            "nodes": "1",
            "ntasks": "1",
            **{name: value for name, value in self.options.items() if value},
        }
        worker = shlex.join([sys.executable, "-m", "ingot.data.tasks.worker", str(root), phase.name])
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{name}={value}" for name, value in options.items()),
                "#SBATCH --requeue",
                *(f"#SBATCH {line}" for line in self.lines),
                f'exec {worker} "$SLURM_ARRAY_TASK_ID" --workers {self.cpus} --memory {self.memory_bytes}',
                "",
            ]
        )

    def _cancel(self, elements: Sequence[_Element]) -> None:
        names = [f"{element.job}_{element.index}" for element in elements]
        for start in range(0, len(names), 200):
            try:
                _slurm("scancel", *names[start : start + 200])
            except ResourceError:
                return  # the elements find nothing to do, or end at their time limit


def _slurm(*command: str) -> str:
    # Inside a job, the job's settings (SLURM_MEM_PER_CPU, SBATCH_...) would override the options given here.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_")) or k == "SLURM_CONF"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept)
    except FileNotFoundError:
        raise ResourceError(
            "E-SLURM-MISSING",
            f"the command {command[0]} does not exist on this machine",
            rule="the driver runs where jobs can be submitted",
            fix="load Slurm, or give the command on a login node",
            command=command[0],
        ) from None
    except subprocess.TimeoutExpired:
        raise ResourceError(
            "E-SLURM-SILENT",
            f"{command[0]} does not answer",
            rule="Slurm answers within two minutes",
            fix="wait until squeue works, then run the same command again: it continues",
            command=command[0],
        ) from None
    if done.returncode:
        raise ResourceError(
            "E-SLURM-FAILED",
            f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}",
            rule="the options of the runner are passed to Slurm unchanged",
            fix="check the options of the runner against the limits of the partition",
            command=command[0],
        )
    return done.stdout


def _gave_up(store: Store, tasks: Sequence[Task]) -> DataError:
    return DataError(
        "E-SLURM-GAVE-UP",
        f"{tasks[0].title} and {len(tasks) - 1:,} other tasks are still not done after {_SUBMISSIONS} job arrays",
        rule=f"tasks that an array leaves undone are submitted again, at most {_SUBMISSIONS} times",
        fix=f"read the logs in {store.root}/logs; the same command continues",
        task=tasks[0].title,
        tasks=len(tasks),
    )
