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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Literal

from .mutant import DoesNotApplyError, Mutant, changed_text

DEADLINE_SECONDS = 300.0  # for one mutant's tests; four times as long for all tests on the unchanged source
# A fault that every import or every call of a function shows is no slip that runs on in silence.
_NOT_SILENT = re.compile(
    r"^(?:E\s+)?((?:Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error): .*", re.MULTILINE
)
_RED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
_GREEN = re.compile(r"^PASSED (.+)$", re.MULTILINE)

Outcome = Literal["killed", "survived", "does not apply", "invalid", "red without the change"]


@dataclass(frozen=True)
class Played:
    """The end of one run of pytest. code: its exit code; None if it was still running at the deadline."""

    code: int | None
    output: str
    seconds: float = 0.0

    @property
    def red_tests(self) -> dict[str, str]:
        """The red tests, each with the first line of what it found."""
        return dict(_RED.findall(self.output))

    @property
    def green_tests(self) -> list[str]:
        return _GREEN.findall(self.output)

    def trouble_with(self, test: str) -> str:
        """Return why `test`, a file or node id, did not pass here; "" if it did. A skipped test did not pass."""
        if red := [found for found in self.red_tests if _is_part(found, test)]:
            return ", ".join(red)
        if self.code not in (0, 1):
            return f"pytest ended with exit code {self.code}: {_last_line(self.output)}"
        return "" if any(_is_part(found, test) for found in self.green_tests) else f"no test of {test} ran"


def _is_part(found: str, test: str) -> bool:
    return found == test or found.startswith((f"{test}::", f"{test}["))


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant. detail: the test that killed it, or the reason of another outcome. found: the first line
    of what that test found."""

    mutant: Mutant
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    found: str = ""

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
    test, found = next(iter(played.red_tests.items()))
    return Result(mutant, "killed", test, played.seconds, found)


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


class MutantRunner:
    """The runs of pytest for mutants of the package `root`/src/`package`, at most `jobs` at a time."""

    def __init__(self, root: Path, package: str, jobs: int, deadline_seconds: float = DEADLINE_SECONDS):
        self.root, self.package, self.jobs, self.deadline_seconds = root, package, jobs, deadline_seconds

    def run(
        self,
        mutants: Sequence[Mutant],
        report: Callable[[str], None] = print,
        keep: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Run all tests of the mutants once on the unchanged source, then each mutant. report: takes lines of progress.
        keep: takes each result. Returns the results in the order of `mutants`."""
        with ThreadPoolExecutor(self.jobs) as pool:
            trouble = self._play_unchanged(mutants, pool, report)
            report(f"{len(mutants)} mutants")
            results = []
            for result in pool.map(lambda mutant: self._run(mutant, trouble), mutants):
                mark = "!!" if result.is_surprise else "  "
                line = f"{mark} {result.mutant.name}: {result.outcome} ({result.seconds:.1f} s) {result.detail}"
                report(f"{line}: {result.found}" if result.found else line)
                results.append(result)
                if keep:
                    keep(result)
        return results

    def _play_unchanged(
        self, mutants: Sequence[Mutant], pool: ThreadPoolExecutor, report: Callable[[str], None]
    ) -> dict[str, str]:
        """Return test -> why it does not pass on the unchanged source, for the tests that do not."""
        by_file: dict[str, list[str]] = {}
        for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
            by_file.setdefault(test.partition("::")[0], []).append(test)
        files = list(by_file.values())
        shares = [[test for tests in files[number :: self.jobs] for test in tests] for number in range(self.jobs)]
        report(f"the tests of {len(files)} files on the unchanged source, each once")
        found: dict[str, str] = {}
        shares = [share for share in shares if share]
        for share, played in zip(shares, pool.map(lambda share: self._play(share, None), shares), strict=True):
            troubles = {test: played.trouble_with(test) for test in share}
            found |= {test: trouble for test, trouble in troubles.items() if trouble}
            report(f"{len(played.green_tests)} passed in {played.seconds:.0f} s")
            if any(troubles.values()):
                report(played.output)
        return found

    def _run(self, mutant: Mutant, trouble: Mapping[str, str]) -> Result:
        try:
            text = changed_text(self.root / "src" / self.package, mutant)
        except DoesNotApplyError as error:
            return Result(mutant, "does not apply", str(error))
        if found := [trouble[test] for test in mutant.tests if test in trouble]:
            return Result(mutant, "red without the change", ", ".join(found))
        return judge(mutant, self._play(mutant.tests, (mutant.file, text)))

    def _play(self, tests: Iterable[str], change: tuple[str, str] | None) -> Played:
        """Run pytest on `tests` in an environment of its own. change: (file, its text), or None."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            python = make_environment(Path(scratch), self.root / "src", self.package, change)
            how = ["-rap"] if change is None else ["-x"]
            command = [python, "-m", "pytest", "-q", *how, "-m", "not nightly", "-p", "no:cacheprovider"]
            command += [f"--basetemp={scratch}/tests", "--tb=short", *tests]
            # CI: pytest prints whole messages. Hypothesis uses the same examples every time.
            quiet = {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": f"{scratch}/hypothesis", "CI": "1"}
            log = Path(scratch) / "output"
            deadline = self.deadline_seconds * (4 if change is None else 1)
            code = _run_to_deadline(command, self.root, os.environ | quiet, deadline, log)
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
