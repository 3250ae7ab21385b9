import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.data.tasks import slurm, worker
from ingot.data.tasks.drill import digest, first_phase
from ingot.data.tasks.run import Inline, PhaseStatus, run_all
from ingot.data.tasks.slurm import Slurm
from ingot.data.tasks.store import Store, run_task
from ingot.data.tasks.worker import TaskPhase, first_error, read_phase, write_error, write_phase
from ingot.errors import DataError, DataMissing, IngotError, ResourceError
from ingot.storage import write_json

FAST = {"cpus": 1, "poll_seconds": 0.01, "settle_seconds": 0.0}


class Cluster:
    """Slurm in this process. An element is done, lost or held when squeue is asked, as `fate(index)` says."""

    def __init__(self, store: Store, fate=lambda index: "do"):
        self.store, self.fate, self.scripts, self.canceled = store, fate, [], []
        self.waiting: dict[str, TaskPhase] = {}  # "1_0" -> phase
        self.held: set[str] = set()

    def __call__(self, command: str, *arguments: str) -> str:
        return getattr(self, command)(*arguments)

    def sbatch(self, parsable: str, script: str) -> str:
        text = Path(script).read_text()
        self.scripts.append(text)
        name, last = re.findall(r"job-name=ingot-(\w+)\n#SBATCH --array=0-(\d+)%", text)[0]
        for index in range(int(last) + 1):
            self.waiting[f"{len(self.scripts)}_{index}"] = read_phase(self.store, name)
        return f"{len(self.scripts)};cluster\n"

    def squeue(self, *options: str) -> str:
        lines = []
        for name, phase in list(self.waiting.items()):
            reason = "launch_failed_requeued_held" if name in self.held else "Resources"
            lines.append(f"{name} ingot-{phase.name} {reason}\n")
            if (what := self.fate(int(name.partition("_")[2]))) == "held":
                self.held.add(name)
            else:
                del self.waiting[name]
                if what == "do":
                    self._do(phase, int(name.partition("_")[2]))
        return "77_1 somebody-elses None\n88 ingot-x None\n" + "".join(lines)

    def _do(self, phase: TaskPhase, index: int) -> None:
        for task in phase.tasks_of(index):
            try:
                run_task(task, self.store)
            except IngotError as error:
                write_error(self.store, phase, index, error)

    def scancel(self, *names: str) -> str:
        self.canceled += names
        for name in names:
            self.waiting.pop(name, None)
        return ""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    def make(fate=lambda index: "do"):
        made = Cluster(Store(tmp_path / "s"), fate)
        monkeypatch.setattr(slurm, "_slurm", made)
        return made

    return make


def test_blocks_of_tasks_as_one_array(cluster):
    made, tasks = cluster(), first_phase(7, 10)
    statuses: list[PhaseStatus] = []
    runner = Slurm(partition="cpu", time="1:00:00", lines=["--account=x"], block=2, max_parallel=3, **FAST)
    results = run_all(tasks, made.store, runner, statuses.append)
    assert [sum(result.values()) for result in results] == [10] * 7
    assert len(made.scripts) == 1
    lines = made.scripts[0].splitlines()
    for option in ("array=0-3%3", "partition=cpu", "time=1:00:00", "account=x", "requeue", "open-mode=append"):
        assert f"#SBATCH --{option}" in lines
    assert not any(line.startswith("#SBATCH --mem") for line in lines)
    assert f"--memory {3 << 29}" in lines[-1]
    assert statuses[-1].done == 7


def test_elements_that_vanish_are_submitted_again(cluster):
    starts = Counter()

    def fate(index):
        starts[index] += 1
        return "lost" if starts[index] == 1 and index % 2 else "do"

    made, tasks = cluster(fate), first_phase(6, 10)
    run_all(tasks, made.store, Slurm(block=2, **FAST))
    assert len(made.scripts) == 2
    assert "--array=0-0%" in made.scripts[1]


def test_what_never_ends_well_is_given_up(cluster):
    made = cluster(lambda index: "lost")
    with refused("E-SLURM-GAVE-UP", task="made-0", tasks=3) as error:
        run_all(first_phase(3, 10), made.store, Slurm(**FAST))
    assert f"{made.store.root}/logs" in error.value.fix
    assert len(made.scripts) == 4


def test_held_elements_are_replaced(cluster):
    made = cluster(lambda index: "held" if len(made.scripts) == 1 else "do")
    run_all(first_phase(2, 10), made.store, Slurm(block=2, **FAST))
    assert "1_0" in made.canceled
    assert len(made.scripts) == 2


def test_an_error_comes_back_as_it_was_and_the_others_are_canceled(cluster):
    made = cluster(lambda index: "do" if index == 0 else "wait")
    made.fate = lambda index: "do" if index == 0 else "held"
    with refused("E-DRILL-REFUSED", kind="refuse") as error:
        run_all(first_phase(4, 10, faults={3: "refuse"}), made.store, Slurm(**FAST))
    assert error.value.rule == "a rule"
    assert {"1_1", "1_2", "1_3"} <= set(made.canceled)


def test_jobs_of_a_driver_that_died_are_waited_for(cluster):
    made, tasks = cluster(), first_phase(6, 10)
    phase = write_phase(tasks[:4], made.store, 2)
    made.sbatch("--parsable", str(_script(made.store, phase)))
    run_task(tasks[0], made.store)
    run_all(tasks, made.store, Slurm(block=2, **FAST))
    assert len(made.scripts) == 2  # the second has what the first had not
    assert read_phase(made.store, re.findall(r"ingot-(\w+)", made.scripts[1])[0]).tasks == tuple(tasks[4:])


def _script(store: Store, phase: TaskPhase) -> Path:
    path = store.root / "by-hand.sh"
    path.write_text(Slurm()._script(store, phase))
    return path


def test_slurm_without_an_answer_is_waited_for(cluster, monkeypatch):
    made, failures = cluster(), iter([True, True, False, True])

    def moody(command, *arguments):
        if command == "squeue" and next(failures, False):
            raise ResourceError("E-SLURM", "squeue failed")
        return made(command, *arguments)

    monkeypatch.setattr(slurm, "_slurm", moody)
    run_all(first_phase(2, 10), made.store, Slurm(**FAST))
    assert len(made.scripts) == 1
    monkeypatch.setattr(slurm, "_DEAF_SECONDS", 0.05)
    failures = iter([True] * 1000)
    with refused("E-SLURM-SILENT", command="squeue"):
        run_all(first_phase(2, 11), made.store, Slurm(**FAST))


def test_no_slurm_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("E-SLURM-MISSING", command="sbatch"):
        slurm._slurm("sbatch")


def test_real_processes_one_of_which_is_killed(tmp_path, monkeypatch):
    """The whole way: script, worker.py, its worker processes; an element is killed while it works."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_slurm.py")} {name} "$@"\n')
        path.chmod(0o755)
    (tmp_path / "kill").write_text("1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    store, tasks = Store(tmp_path / "s"), first_phase(4, 20, wait=0.005)
    run_all(tasks, store, Slurm(cpus=2, poll_seconds=0.05, settle_seconds=0.2))
    assert len(list(tmp_path.glob("job-*"))) == 2
    assert (store.root / "logs" / "1_0.log").read_text().endswith("block 0: all 2 tasks are done\n")
    inline = Store(tmp_path / "inline")
    run_all(tasks, inline, Inline())
    assert digest(store, tasks) == digest(inline, tasks)


def test_the_worker_by_hand(tmp_path, capsys):
    store, tasks = Store(tmp_path), first_phase(5, 10)
    phase = write_phase(tasks, store, 2)
    assert phase.blocks == 3
    assert worker.main([str(tmp_path), phase.name, "2", "--workers", "1"]) == 0
    assert store.finished_keys(task.key for task in tasks) == {tasks[4].key}
    assert worker.main([str(tmp_path), phase.name, "--all", "--workers", "2", "--memory", "1 GiB"]) == 0
    assert all(store.finished(task) for task in tasks)
    assert capsys.readouterr().out.count("done: made-") == 5
    with pytest.raises(SystemExit):
        worker.main([str(tmp_path), phase.name])


def test_the_worker_writes_down_what_is_wrong(tmp_path, capsys):
    store = Store(tmp_path)
    phase = write_phase(first_phase(1, 10, faults={1: "refuse"}), store, 1)
    assert worker.main([str(tmp_path), phase.name, "0", "--workers", "1"]) == DataError.exit_code
    error = first_error(store, [phase])
    assert isinstance(error, DataError)
    assert (error.rule, error.fix) == ("a rule", "a fix")
    write_phase(phase.tasks, store, 1)  # submitted again
    assert first_error(store, [phase]) is None
    assert worker.main([str(tmp_path), "0000", "0"]) == DataMissing.exit_code
    assert "phase 0000" in capsys.readouterr().err


def test_another_version_may_not_work_on_it(tmp_path):
    store = Store(tmp_path)
    phase = write_phase(first_phase(1, 1), store, 1)
    path = tmp_path / "phases" / f"{phase.name}.json"
    write_json(path, {"ingot": "0.0.0", "block": 1, "tasks": []})
    with refused("E-NODE-VERSION", found="0.0.0"):
        read_phase(store, phase.name)


def test_the_module_is_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ingot.data.tasks.worker", str(tmp_path), "x", "0"], capture_output=True, text=True
    )
    assert done.returncode == DataMissing.exit_code
    assert "phase x" in done.stderr
