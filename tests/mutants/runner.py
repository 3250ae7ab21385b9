"""Run the tests of mutants, each against a copy of the source with one change, and compare with what must happen.

The copy is the first entry in a virtual environment of its own, so that the processes that tests start import it too.
Nothing is written into the tree.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Literal

from .mutant import DoesNotApplyError, Mutant, changed_text

DEADLINE_SECONDS = 300.0  # for one mutant's tests
# A fault that every import or every call of a function shows is no slip that runs on in silence.
_NOT_SILENT = re.compile(
    r"^(?:E\s+)?((?:Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error): .*", re.MULTILINE
)
_RED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_GREEN = re.compile(r"^.*?\b[1-9]\d* passed\b", re.MULTILINE)

Outcome = Literal["killed", "survived", "does not apply", "invalid", "red without the change"]


@dataclass(frozen=True)
class Played:
    """The end of one run of pytest. code: its exit code; None if it was still running at the deadline."""

    code: int | None
    output: str
    seconds: float = 0.0

    @property
    def red_tests(self) -> list[str]:
        return _RED.findall(self.output)

    @property
    def is_green(self) -> bool:
        return self.code == 0 and bool(_GREEN.search(self.output))


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant. detail: the test that killed it, or the reason of another outcome."""

    mutant: Mutant
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_surprise(self) -> bool:
        return self.outcome != ("survived" if self.mutant.survives else "killed")


def judge(mutant: Mutant, played: Played) -> Result:
    """Return the result of a mutant whose tests are green without the change."""

    def result(outcome: Outcome, detail: str) -> Result:
        return Result(mutant, outcome, detail, played.seconds)

    if played.code == 0:
        return result("survived", mutant.survives)
    if played.code is None:
        return result("invalid", f"the tests ran for {played.seconds:.0f} s without an end")
    if error := _NOT_SILENT.search(played.output):
        return result("invalid", error[0].removeprefix("E").strip())
    if played.code != 1 or not played.red_tests:
        return result("invalid", f"pytest ended with exit code {played.code}: {_last_line(played.output)}")
    return result("killed", played.red_tests[0])


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


class MutantRunner:
    """The runs of pytest for mutants of the package `root`/src/`package`, at most `jobs` at a time."""

    def __init__(self, root: Path, package: str, jobs: int, deadline_seconds: float = DEADLINE_SECONDS):
        self.root, self.package, self.jobs, self.deadline_seconds = root, package, jobs, deadline_seconds

    def run(self, mutants: Sequence[Mutant], report: Callable[[str], None] = print) -> list[Result]:
        """Run each distinct set of tests once on the unchanged source, then each mutant. report: takes lines of
        progress. Returns the results in the order of `mutants`."""
        sets = list(dict.fromkeys(mutant.tests for mutant in mutants))
        report(f"{len(sets)} sets of tests on the unchanged source, each once")
        with ThreadPoolExecutor(self.jobs) as pool:
            unchanged = dict(zip(sets, pool.map(self._play_unchanged, sets), strict=True))
            for tests, played in unchanged.items():
                if not played.is_green:
                    report(f"red without a change: {' '.join(tests)}\n{played.output}")
            report(f"{len(mutants)} mutants")
            results = []
            for result in pool.map(lambda mutant: self._run(mutant, unchanged[mutant.tests]), mutants):
                mark = "  !!" if result.is_surprise else "    "
                report(f"{mark} {result.mutant.name}: {result.outcome} ({result.seconds:.1f} s) {result.detail}")
                results.append(result)
        return results

    def _run(self, mutant: Mutant, unchanged: Played) -> Result:
        try:
            text = changed_text(self.root / "src" / self.package, mutant)
        except DoesNotApplyError as error:
            return Result(mutant, "does not apply", str(error))
        if not unchanged.is_green:
            found = ", ".join(unchanged.red_tests) or _last_line(unchanged.output)
            return Result(mutant, "red without the change", found)
        return judge(mutant, self._play(mutant.tests, (mutant.file, text)))

    def _play_unchanged(self, tests: tuple[str, ...]) -> Played:
        return self._play(tests, None)

    def _play(self, tests: Iterable[str], change: tuple[str, str] | None) -> Played:
        """Run pytest on `tests` in an environment of its own. change: (file, its text), or None."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            python = make_environment(Path(scratch), self.root / "src", self.package, change)
            stop_early = [] if change is None else ["-x"]
            command = [python, "-m", "pytest", "-q", *stop_early, "-m", "not nightly", "-p", "no:cacheprovider"]
            command += [f"--basetemp={scratch}/tests", "--tb=short", *tests]
            quiet = {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": f"{scratch}/hypothesis"}
            log = Path(scratch) / "output"
            code = _run_to_deadline(command, self.root, os.environ | quiet, self.deadline_seconds, log)
            return Played(code, log.read_text(errors="replace"), time.monotonic() - started)


def make_environment(folder: Path, source: Path, package: str, change: tuple[str, str] | None) -> str:
    """Make a virtual environment in `folder` that imports a copy of `source` before everything else, and the packages
    of this interpreter after it. Returns the path of its Python.

    change: (file below the package, its new text), or None.
    """
    copy = folder / "src"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.egg-info"))
    if change is not None:
        file, text = copy / package / change[0], change[1]
        file.write_text(text, encoding="utf-8")
        # A compiled file is trusted if size and time of its source fit; the change may keep both.
        Path(cache_from_source(str(file))).unlink(missing_ok=True)
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    inside = next((folder / "venv" / "lib").glob("python*/site-packages"))
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (inside / "0-copy.pth").write_text(f"{copy}\n")
    (inside / "1-packages.pth").write_text("".join(f"{path}\n" for path in others))
    return str(folder / "venv" / "bin" / "python")


def _run_to_deadline(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float, output: Path
) -> int | None:
    """Run `command` with all its output in the file `output`, then end all processes that it left.

    Returns its exit code; None if it was ended at the deadline.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
