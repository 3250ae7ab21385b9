"""The place where rows run: a tiny project, real runs of it with and without faults, and the undisturbed runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tests.e2e.conftest import RUN_FILE, write_tokens

from ingot.drill.clean import shared_memory
from ingot.drill.job import DEADLINE_SECONDS, RUN_VARIABLE, Ended, TrainingJob, ended, marked_processes, send
from ingot.drill.oracles import RunFacts, read_facts
from ingot.drill.trial import DrilledRun
from ingot.events import read_events
from ingot.machine.processes import parent_of
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_bytes
from ingot.theory.rules import load_run

from . import killpoints

ROOT = Path(__file__).parents[2]
_REPLACED = {"steps = 120": "steps = 24", "every_steps = 20": "every_steps = 4", "log_every = 2": "log_every = 1"}
STEP_SECONDS = 0.02  # of the bench's run with two ranks, about
_LONGEST = 200
ONE_RANK = ("parallel.dp_shard=1",)


class Bench:
    """A folder with tokens and a run file of two ranks, 24 steps and a checkpoint every 4 steps.

    A context manager: its end ends the launcher and removes the folder.
    """

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="board-")).resolve()
        write_tokens(self.root / "tokens")
        text = RUN_FILE
        for before, after in _REPLACED.items():
            assert before in text
            text = text.replace(before, after)
        self.run_file = self.root / "run.toml"
        self.run_file.write_text(text)
        self.memory_before = shared_memory()
        self._launcher: subprocess.Popen | None = None
        self._references: dict[tuple[str, ...], RunFacts] = {}
        self.all_points = 0  # how many crash points are played at once by rows that take all; 0: they take a sample

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            assert self._launcher.stdin is not None
            self._launcher.stdin.close()
            self._launcher.wait(DEADLINE_SECONDS)
        shutil.rmtree(self.root, ignore_errors=True)

    @cached_property
    def interposer(self) -> Path:
        return killpoints.build(self.root)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def temporary(self, name: str) -> Path:
        """The folder for temporary files of the processes of the run `name`."""
        path = self.root / f"{name}.tmp"
        path.mkdir(exist_ok=True)
        return path

    def drilled(self, *settings: str) -> DrilledRun:
        """Return the run with these settings, for a drill."""
        config = load_run(self.run_file, settings)
        own = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(self.interposer), "BOARD_TOP": str(os.getpid())}
        return DrilledRun(
            run_file=self.run_file,
            config=config,
            settings=settings,
            variables=own,
            step_seconds=STEP_SECONDS,
            hang_seconds=1.0,
        )

    def job(self, name: str, *options: str, env: dict[str, str] | None = None) -> TrainingJob:
        """Return the job of the run `name`."""
        own = self.drilled().variables | (env or {})
        return TrainingJob(self.run_file, self.folder(name), self.temporary(name), options, own)

    def start(self, name: str, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen:
        """Start `ingot train` on the run `name`."""
        return self.job(name, *options, env=env).start()

    def train(self, name: str, *options: str, env: dict[str, str] | None = None) -> Ended:
        """Run `ingot train` to its end."""
        return self.ended(self.start(name, *options, env=env))

    def ended(self, process: subprocess.Popen) -> Ended:
        """Wait for the end of a process."""
        return ended(process)

    def ingot(self, *arguments: str) -> Ended:
        """Run another verb to its end."""
        command = [sys.executable, "-m", "ingot.cli.main", *arguments]
        return self.ended(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        )

    def attempt(
        self,
        name: str,
        *settings: str,
        until: int | None = None,
        accept: Sequence[str] = (),
        env: dict[str, str] | None = None,
        ranks: int = 1,
        restarts: int = 0,
    ) -> Ended:
        """Train the run `name` in processes forked from one that has imported everything (launcher.py).

        settings: as "a.b=c". until: the step to stop after. accept: keys of confirmed changes.
        env: more variables, a fault for example. ranks: 1 or 2. restarts: how often two ranks are started again.
        """
        launcher = self._started_launcher()
        assert launcher.stdin is not None and launcher.stdout is not None
        log = self.root / f"{name}.log"
        order = {
            "run_file": str(self.run_file),
            "out": str(self.root / name),
            "settings": [*(ONE_RANK if ranks == 1 else ()), *settings],
            "ranks": ranks,
            "restarts": restarts,
            "until": until,
            "accept": list(accept),
            "env": self.job(name, env=env).environment(),
            "log": str(log),
        }
        began = time.monotonic()
        launcher.stdin.write(json.dumps(order) + "\n")
        launcher.stdin.flush()
        answer = json.loads(launcher.stdout.readline())
        return Ended(answer["code"], log.read_text(errors="replace"), time.monotonic() - began)

    def kill_attempt(self, name: str) -> None:
        """Kill the attempt of the run `name` that is under way, and all processes that it has started."""
        assert self._launcher is not None
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        attempt = [pid for pid in pids if parent_of(pid) == self._launcher.pid]
        send(signal.SIGKILL, [*marked_processes(self.folder(name).root), *attempt])

    def _started_launcher(self) -> subprocess.Popen:
        if self._launcher is None:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "tests.board.launcher"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(self.interposer)}
                | {RUN_VARIABLE: ""},  # it outlives the row that needs it first
            )
        return self._launcher

    def copy(self, base: str, name: str) -> RunFolder:
        """Copy the folder of the run `base` to that of `name`, which is replaced."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        shutil.copytree(self.root / base, self.root / name)
        return self.folder(name)

    def drop(self, name: str) -> None:
        """Remove the folder of a run that is no longer needed."""
        shutil.rmtree(self.root / name, ignore_errors=True)

    def base(self, until: int, *settings: str) -> str:
        """Return the name of an undisturbed run with one rank that stopped after step `until`; made once."""
        name = "-".join(["base", str(until), *settings]).replace("/", "_")
        if not self.folder(name).events.exists():
            ended = self.attempt(name, *settings, until=until)
            assert ended.code == 10, ended.output
        return name

    def reference(self, *settings: str, ranks: int = 2) -> RunFacts:
        """Return the facts of the undisturbed run R with these settings; it runs once. ranks: 1 or 2."""
        key = (str(ranks), *settings)
        if key not in self._references:
            name = "-".join(["reference", *key])
            if len(name) > _LONGEST:  # a file system has names of 255 bytes
                name = f"reference-{sha256_bytes(name.encode())[:16]}"
            options = [word for setting in settings for word in ("--set", setting)]
            ended = self.train(name, *options) if ranks == 2 else self.attempt(name, *settings)
            assert ended.code == 0, ended.output
            self._references[key] = read_facts(self.folder(name))
        return self._references[key]

    def last_step(self, name: str) -> int:
        """Return the last step in the event log of the run; 0 without one."""
        return max((event["step"] for event in read_events(self.folder(name).events, events.STEP)), default=0)

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen) -> None:
        """Wait until `step` is in the event log of the run, or the process ends."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if self.last_step(name) >= step:
                return
            time.sleep(0.01)


def options(settings: Sequence[str]) -> list[str]:
    """Return settings as options of `ingot train`."""
    return [word for setting in settings for word in ("--set", setting)]
