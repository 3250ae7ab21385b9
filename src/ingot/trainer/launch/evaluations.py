"""Evaluation in the background of a run that trains: a thread of the launcher starts a process for each save that is
due, ends it at its limits, and writes its results to the event log (docs/design/evaluation.md). No torch."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ingot.errors import IngotError, UsageError, missing_part
from ingot.events import EventLog, NewEvents, read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, SaveKind
from ingot.schema.evaluate import BPB
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.background_eval.due import KINDS, DueEvaluation, is_better, value_of
from ingot.trainer.background_eval.process import GONE, REASON
from ingot.trainer.checkpoint.manifest import grade_of_doubt
from ingot.trainer.checkpoint.pins import pinned_steps
from ingot.trainer.launch.retain import pin_checkpoint, unpin_checkpoint
from ingot.trainer.launch.stopping import report

_PROCESS = "ingot.trainer.background_eval.process"
_LOOK_SECONDS = 1.0  # between two looks at the event log
_POLL_SECONDS = 0.2  # between two looks whether the job has ended, during an evaluation
_PAUSE_SECONDS = 60.0  # after an error
_CLOSE_SECONDS = 5.0
_TRIES = 3  # with saves that were removed while they were read, and with a process that does not start


def has_work(config: RunConfig) -> bool:
    """Return whether the run evaluates anything in the background."""
    evaluate = config.evaluate
    is_given = config.data.heldout or (evaluate.prompts and config.data.tokenizer) or evaluate.background.tasks
    return evaluate.background.interval is not None and bool(is_given)


def require_lm_eval(config: RunConfig) -> None:
    """Raise MissingPartError if the run has tasks, and lm-eval is not installed."""
    if has_work(config) and config.evaluate.background.tasks and find_spec("lm_eval") is None:
        raise missing_part("lm_eval", "eval")


class _Finished(NamedTuple):
    """An evaluation whose process has ended: the results stay, whatever fails after it.

    saved_at: the time of the event of the save. results: the answers of the process. seconds: how long it took.
    """

    step: int
    kind: SaveKind
    path: Path
    saved_at: float | None
    results: list[dict[str, Any]]
    seconds: float


class BackgroundEvaluations:
    """The evaluations of a run in the background, from now on until `close`. The caller holds the run's lock.

    ranks: of the run on this machine. say: called with a line per evaluation, in a thread.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, *, ranks: int, say: Callable[[str], None]):
        self._folder, self._config, self._ranks, self._say = folder, config, ranks, say
        self._settings = config.evaluate.background
        self._due = DueEvaluation(self._settings)
        self._log: NewEvents | None = None
        self._trouble = ""  # the last error of the thread, which is reported once
        self._failures = (0, 0)  # the step of the last save whose process did not start, and how often
        self._finished: _Finished | None = None  # an evaluation whose events are not made yet
        # Events that are not in the log yet: the step, the time of its save, the kind and the fields.
        self._unwritten: list[tuple[int, float | None, str, dict[str, Any]]] = []
        self._pins_wait_until = -math.inf  # of time.monotonic
        self._ends = threading.Event()
        self._lock = threading.Lock()  # of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="ingot-evaluations", daemon=True)
        if has_work(config):
            self._thread.start()

    def close(self) -> None:
        """End an evaluation that runs, and the thread. One that waits for the run folder is left to it; it writes
        nothing any more."""
        self._ends.set()
        # A process that does not start, as from a mount that hangs, holds the lock; the kernel ends it with this one.
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._kill()
            self._lock.release()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    # -- the thread --

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            try:
                self._read_log()
                self._log_unwritten()
                self._evaluate_if_due()
                self._settle_pins()
            except Exception as error:  # the thread must not end: the folder may answer again
                self._report_trouble("evaluation in the background failed", error)
                self._ends.wait(_PAUSE_SECONDS)

    def _report_trouble(self, what: str, error: Exception) -> None:
        """Report an error, once as long as no other one follows it."""
        text = f"{what}: {type(error).__name__}: {error.found if isinstance(error, IngotError) else error}"
        if text != self._trouble and not self._ends.is_set():
            report(self._say, f"{text}; trying again every minute")
        self._trouble = text

    def _read_log(self) -> None:
        if self._log is None:
            path = self._folder.events
            position = path.stat().st_size if path.exists() else 0
            for event in read_events(path, *KINDS):  # a line at a time: the log may be long
                self._take(event)
            whole = _end_of_line(path, position)
            self._log = NewEvents(path, *KINDS, position=whole)
        for event in self._log.read():
            self._take(event)

    def _take(self, event: dict) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # an event of a version that wrote other fields
            self._due.take(event)

    def _evaluate_if_due(self) -> None:
        for tries_left in range(_TRIES - 1, -1, -1):
            if self._finished is None and not self._evaluate_next():
                return
            one = self._finished
            assert one is not None
            results = one.results
            self._read_log()
            if GONE in results[-1] and tries_left:
                self._finished = None
                continue
            if one.path.exists() and grade_of_doubt(one.path):
                results = [{REASON: "a trouble began before it was saved"}]
            try:
                found = self._events_of(one, results)
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # the same next time
                results = [{REASON: f"its answers cannot be used: {type(error).__name__}: {error}"}]
                found = self._events_of(one, results)
            self._finished = None
            self._log_all(one.step, one.saved_at, found)
            return

    def _evaluate_next(self) -> bool:
        """Evaluate the save that is due. Returns False if none is, or the job ends."""
        found = self._due.find(self._folder, time.time())
        self._report_unusable()
        if found is None or self._ends.is_set():
            return False
        step, kind, path = found
        began, saved_at = time.monotonic(), self._due.saved_at(step)
        try:
            results = self._evaluate(path, step)
        except Exception as error:  # as without memory for a process, or room for its log
            self._failures = (step, self._failures[1] + 1 if self._failures[0] == step else 1)
            if self._failures[1] < _TRIES:
                raise
            results = [{REASON: f"it failed {_TRIES} times: {type(error).__name__}: {error}"}]
        self._finished = _Finished(step, kind, path, saved_at, results, time.monotonic() - began)
        return not self._ends.is_set()

    def _report_unusable(self) -> None:
        """Log and report the saves that are due and cannot be used."""
        while self._due.unusable:
            one = self._due.unusable.pop(0)
            report(self._say, f"evaluation of step {one.step} is left out: {one.reason}")
            facts = {"step": one.step, "what": one.kind, "code": one.code, "reason": one.reason}
            self._log_all(one.step, self._due.saved_at(one.step), [(events.EVALUATION_SKIPPED, facts)])

    def _tokens(self) -> int:
        """Return how many tokens of held-out text an evaluation scores; 0: it is to be chosen."""
        of_run, size = self._config.evaluate, self._due.size or {}
        now = {
            "share": self._settings.share,
            "max_tokens": of_run.max_tokens,
            "every": self._settings.every,
            "heldout": self._config.data.heldout,
        }
        if not self._settings.share:
            return of_run.max_tokens
        return size["tokens"] if now.items() <= size.items() else 0

    def _evaluate(self, path: Path, step: int) -> list[dict[str, Any]]:
        """Evaluate a save in a process. Returns its answers, the last one with REASON or GONE."""
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        limits = self._tokens(), self._due.interval_seconds(step)
        command = _command(self._folder.root.absolute(), path.absolute(), self._ranks, *limits)
        with (self._folder.logs / "evaluation.log").open("wb") as errors:
            with self._lock:
                if self._ends.is_set():
                    return [{REASON: "the job ended"}]
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for the launcher; and all that it starts can be killed with it
                )
            output, is_late = self._follow(self._process)
        answers = [answer for line in output.split(b"\n") if (answer := _answer(line)) is not None]
        if not answers or not ({REASON, GONE} & answers[-1].keys()):
            answers.append({REASON: _ended(self._process.returncode, self._settings.seconds if is_late else 0.0)})
        return answers

    def _follow(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """Wait for the end of a process, and kill what it started as soon as it has ended. Returns its standard output,
        and whether its time was over."""
        assert process.stdout is not None
        end, is_late, output = time.monotonic() + self._settings.seconds, False, bytearray()
        with process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)
            while not _has_ended(process):
                is_late = is_late or time.monotonic() > end
                if is_late or self._ends.is_set():
                    with self._lock:
                        self._kill()
                output += _available(pipe.fileno())
                time.sleep(_POLL_SECONDS)
            with self._lock:
                self._kill()  # no other group has its number as long as nobody has waited for it
                process.wait()
            return bytes(output + _available(pipe.fileno())), is_late

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- results --

    def _events_of(self, one: _Finished, results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """Report the results of an evaluation, and return their events. results: to be taken for those of `one`."""
        step, kind, (*found, last) = one.step, one.kind, results
        reason = last.get(REASON, "the save was removed while it was read")
        by_kind = {result["kind"]: result for result in found}
        evaluation, tasks = by_kind.get(events.EVALUATION), by_kind.get(events.TASK_SCORES)
        seconds = round(one.seconds, 3)
        end = {"step": step, "what": kind, "seconds": seconds, "reason": reason, "void": False, "best": None}
        if self._due.saved_at(step) == one.saved_at:
            end["best"] = self._best(step, kind, evaluation, tasks)
            if size := by_kind.get(events.EVALUATION_SIZED):
                report(self._say, _size_line(size))
            if line := _line(evaluation, tasks):
                report(self._say, f"held-out  step {step}, in the background: {line}")
            if reason:
                report(self._say, f"evaluation of step {step} failed: {reason}; the run goes on")
        facts = [(result.pop("kind"), {"step": step} | result | {"background": True}) for result in found]
        return [*facts, (events.BACKGROUND_EVALUATION, end)]

    def _log_all(self, step: int, saved_at: float | None, found: list[tuple[str, dict[str, Any]]]) -> None:
        """Log events of the save of `step`, which was logged at `saved_at`. Those for which there is no room now are
        logged later, each once; before that nothing else is evaluated. Raises OSError and ResourceError."""
        self._unwritten += [(step, saved_at, kind, facts) for kind, facts in found]
        self._log_unwritten()

    def _log_unwritten(self) -> None:
        if not self._unwritten or self._ends.is_set():
            return
        with EventLog(self._folder.events) as log:
            while self._unwritten:
                step, saved_at, kind, facts = self._unwritten[0]
                is_void = self._due.saved_at(step) != saved_at  # there may be another save of this step now
                if is_void and kind == events.BACKGROUND_EVALUATION:
                    facts |= {"reason": "the run went back to a step before it", "void": True, "best": None}
                if not is_void or kind == events.BACKGROUND_EVALUATION:
                    log.write(kind, **facts)
                self._unwritten.pop(0)
        self._read_log()

    # -- the best checkpoint --

    def _best(
        self, step: int, kind: SaveKind, evaluation: dict[str, Any] | None, tasks: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return what the log has of a best checkpoint before its pin is set; None if this one is not the best."""
        metric, best = self._settings.keep_best, self._due.best
        found = value_of(metric, evaluation, tasks) if kind == FULL and metric else None
        if found is None or not math.isfinite(found[0]):
            return None
        value, lower = found
        if best is not None and not is_better(value, best[1], lower=lower):
            of_best, of_this = self._due.scored.get(best[0]), (evaluation or {}).get("tokens")
            if metric != BPB or of_best in (None, of_this):
                return None  # otherwise the best one was scored on other text, and is not comparable any more
        of_a_user = step in pinned_steps(self._folder) and step not in self._due.ours
        return {"metric": metric, "value": value, "pinned": not of_a_user}

    def _settle_pins(self) -> None:
        """Pin the best checkpoint, and unpin those that were the best before. The log has had this intent since the
        evaluation, so a launcher that was killed in between leaves it to the next one; and it is tried again as long as
        the disk or the store does not answer. Evaluations do not wait for it."""
        best = self._due.wanted
        if best is None or self._ends.is_set() or time.monotonic() < self._pins_wait_until:
            return
        root, reason, unpinned = self._folder.root, "", sorted(self._due.ours - {best.step})
        try:
            if best.pinned:
                pin_checkpoint(root, best.step)
            for step in unpinned:
                with contextlib.suppress(UsageError):  # a user has removed the pin
                    unpin_checkpoint(root, step)
        except UsageError as error:
            reason, unpinned = error.found, []
        except (IngotError, OSError) as error:
            self._pins_wait_until = time.monotonic() + _PAUSE_SECONDS
            self._report_trouble("the pins of the best checkpoint are not set", error)
            return
        what = f"is not pinned: {reason}" if reason else f"is pinned: {best.metric} {best.value:.4f}"
        report(self._say, f"best      step {best.step} {what}")
        facts = asdict(best) | {"pinned": best.pinned and not reason, "unpinned": unpinned, "reason": reason}
        self._log_all(best.step, self._due.saved_at(best.step), [(events.BEST_CHECKPOINT, facts)])


def _command(run: Path, save: Path, ranks: int, tokens: int, seconds: float) -> list[str]:
    words = map(str, (run, save, os.getpid(), ranks, tokens, seconds))
    return [sys.executable, "-P", "-m", _PROCESS, *words]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended. Nobody has waited for it: its number stays its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _available(pipe: int) -> bytes:
    """Return what can be read now from a pipe that does not block."""
    found = bytearray()
    with contextlib.suppress(BlockingIOError):
        while data := os.read(pipe, 1 << 16):
            found += data
    return bytes(found)


def _end_of_line(path: Path, position: int) -> int:
    """Return the end of the last whole line in the first `position` bytes of a log."""
    if not position:
        return 0
    with path.open("rb") as file:
        while position > 0:
            begin = max(position - 65536, 0)
            file.seek(begin)
            if (at := file.read(position - begin).rfind(b"\n")) >= 0:
                return begin + at + 1
            position = begin
    return 0


def _answer(line: bytes) -> dict[str, Any] | None:
    """Return the answer in a line; None for one that is torn."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _ended(code: int, seconds: float) -> str:
    if seconds:
        return f"it was not done after {seconds:g} s (evaluate.background.seconds)"
    how = f"was killed (signal {-code})" if code < 0 else f"exited with code {code}"
    return f"its process {how}; see logs/evaluation.log"


def _size_line(size: dict[str, Any]) -> str:
    """Return the line on how much text evaluations of this run score."""
    return f"held-out  in the background: up to {size['tokens']:,} tokens each time ({size['reason']})"


def _line(evaluation: dict[str, Any] | None, tasks: dict[str, Any] | None) -> str:
    """Return the results for people: bits per byte, and the first metric of each task."""
    parts = [f"bpb {evaluation['bpb']:.3f}  unigram {evaluation['unigram_bpb']:.3f}"] if evaluation else []
    for task, scores in (tasks or {"scores": {}})["scores"].items():
        for metric, value in list(scores.items())[:1]:
            parts.append(f"{task} {metric} {value:.3f}")
    return "  ".join(parts)
