"""Tasks as Slurm job arrays: an element does a block of tasks on its node (worker.py), this process waits.

What is done is what lies in the store; Slurm is only asked (squeue) which elements still wait or run. Tasks of
elements that are gone without having done them are submitted again. Jobs are known by their name, which is the phase's:
when this process dies they go on, and the same command finds them and waits for them instead of submitting twice. No
accounting database (sacct) is needed.
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
from ingot.data.tasks.phases import Phase, first_error, read_phase, write_phase
from ingot.data.tasks.run import Look
from ingot.data.tasks.task import Store, Task
from ingot.errors import DataError, IngotError, ResourceError
from ingot.storage import write_atomic

_NAME = "ingot-"
_ELEMENTS = 1000  # of one array; a common limit (MaxArraySize) is 1001
_SUBMISSIONS = 4  # of one task; that Slurm requeues an element does not count
_DEAF_SECONDS = 1800.0  # that Slurm may leave us without an answer


@dataclass(frozen=True)
class _Element:
    """An element of an array that waits or runs, or is held and will do neither."""

    job: str  # "123"
    index: int
    phase: str
    held: bool


class Slurm:
    """A runner: job arrays of one node per element.

    partition, time, mem: as sbatch takes them, left out when empty. cpus: per element, each with a worker process.
    max_parallel: elements that run at once. lines: more '#SBATCH' options, such as '--account=x'. block: tasks per
    element (default: a task per CPU, more if there would be over 1,000 elements). memory_bytes: of a worker process, as
    of `Local`; `mem` has to be cpus times that. poll_seconds: between looks.
    settle_seconds: what a network file system may take to show what another machine wrote.
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
        """Return when all are done. Raises the first error that an element wrote down (the others are cancelled);
        DataError when submission after submission finishes nothing; ResourceError when Slurm refuses or is silent."""
        missing = {task.key: task for task in tasks}
        unclaimed_since = dict.fromkeys(missing, float("-inf"))  # key -> when no element had it
        phases: dict[str, Phase] = {}
        elements: list[_Element] = []
        submitted, heard = Counter[str](), time.monotonic()
        try:
            while True:
                # Asked before looking for what is done: an element that is gone has done what it did.
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
                    raise ResourceError(f"squeue fails for {_DEAF_SECONDS / 60:.0f} minutes", fix="ask Slurm's admin")
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
        finally:  # after an error, or of what was submitted twice
            alive = self._alive(store, phases)
            self._cancel(elements if alive is None else alive)

    def _alive(self, store: Store, phases: dict[str, Phase]) -> list[_Element] | None:
        """Elements of this store's phases, also those of an earlier driver. None when Slurm does not answer."""
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
                    continue  # of another store
            found.append(_Element(job, int(index), phase, "held" in reason.lower()))
        return found

    def _submit(self, tasks: Sequence[Task], store: Store) -> Phase:
        block = self.block or max(self.cpus, -(-len(tasks) // _ELEMENTS))
        phase = write_phase(tasks, store, block)
        (store.root / "logs").mkdir(exist_ok=True)
        script = store.root.absolute() / "phases" / f"{phase.name}.sh"
        write_atomic(script, self._script(store, phase))
        _slurm("sbatch", "--parsable", str(script))
        return phase

    def _script(self, store: Store, phase: Phase) -> str:
        root = store.root.absolute()
        options = {
            "job-name": _NAME + phase.name,
            "array": f"0-{phase.blocks - 1}%{self.max_parallel}",
            "output": f"{root}/logs/%A_%a.log",
            "open-mode": "append",  # a requeued element would cut its log
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
                return  # they find nothing to do, or end with their time


def _slurm(*command: str) -> str:
    # Inside a job, its own settings (SLURM_MEM_PER_CPU, SBATCH_...) would rule over what is asked for here.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_")) or k == "SLURM_CONF"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept)
    except FileNotFoundError:
        raise ResourceError(
            f"no {command[0]} on this machine", rule="the driver runs where jobs can be submitted", fix="load Slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{command[0]} does not answer", fix="try again when Slurm is up") from None
    if done.returncode:
        raise ResourceError(
            f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}",
            rule="Slurm takes the options as they are given",
            fix="look at the options of the runner, and at the limits of the partition",
        )
    return done.stdout


def _gave_up(store: Store, tasks: Sequence[Task]) -> DataError:
    return DataError(
        f"{tasks[0].label or tasks[0].function} and {len(tasks) - 1:,} other tasks are not done after "
        f"{_SUBMISSIONS} job arrays",
        rule="what an array leaves undone is submitted again, but not for ever",
        fix=f"read the logs in {store.root}/logs; the same command goes on",
    )
