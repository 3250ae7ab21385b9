"""The row of sinks: whatever becomes of trackers and of their feed, the run has the bits of the undisturbed one."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median

from ingot.drill.job import DEADLINE_SECONDS, marked_processes
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .bench import Bench, options
from .row import Row, drawn_mode, judge_recovered, random_of

_SETTINGS = ("train.steps=160", "train.global_batch=64")  # some seconds, so that sinks are there before its end
# name -> the settings of its table, and the reason of its first trouble. `jsonl` is killed from outside.
_BAD = {
    "hangs": ("timeout_seconds=1.0, close_seconds=0.5", "hung"),
    "sleeps": ("close_seconds=0.5", "hung"),  # at the end: half a minute is less than its limit
    "dies": ("close_seconds=0.5", "ended"),
    "full": ("close_seconds=0.5", "raised"),
    "jsonl": ("close_seconds=60.0", "ended"),
}
_TABLES = (
    'plugins.modules=["bad_sinks"]',
    'plugins.folder="lab"',
    *(f"sinks.{name}={{{table}}}" for name, (table, _) in _BAD.items()),
)
_HANG_SECONDS = 10.0  # less than what a sink waits, and more than any step


def rs31_sinks(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Sinks that hang, wait for 30 s, die and fill a disk, and one that is killed at a random step; and the feed of a
    sink is killed. Beside that a pair of undisturbed runs, whose steps the disturbed ones are compared with."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "bad_sinks.py", lab / "bad_sinks.py")
    random, own = random_of("RS31 sinks", seed), (*_SETTINGS, drawn_mode(seed))
    cases = {
        f"bad-sinks-{seed}": (_TABLES, "sink_process", {name: [reason] for name, (_, reason) in _BAD.items()}),
        f"no-feed-{seed}": (("sinks.jsonl={close_seconds=60.0}",), "feed", {}),
    }
    for name, (tables, module, wanted) in cases.items():
        ended = bench.train(calm := f"calm-{name}", *options(own))  # one before each: other work may come and go
        verdicts.judge("o6", calm, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        process, folder = bench.start(name, *options((*own, *tables))), bench.folder(name)
        bench.wait_for_step(name, random.randrange(20, 80), process)
        where = _kill(folder, module, verdicts, name)
        ended = bench.ended(process)
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        lines = [line for line in ended.output.splitlines() if line.startswith("sink")]
        reasons: dict[str, list[str]] = {}
        for event in read_events(folder.events, events.SINK_FAILED):
            reasons.setdefault(event["sink"], []).append(event["reason"])
        verdicts.judge("o6", where, "" if reasons == wanted else f"troubles {reasons}")
        verdicts.judge("o6", where, "" if len(lines) == max(len(wanted), 1) else f"lines {lines}")
        verdicts.judge("o6", where, _lost(folder))
        judge_recovered(bench, verdicts, name, where, bench.reference(*_SETTINGS))
        steps = {of: _steps(bench.folder(of)) for of in (calm, name)}
        waited = max(steps[name]) > max(steps[calm]) + _HANG_SECONDS
        verdicts.judge("o6", where, f"a step took {max(steps[name]):.1f} s" if waited else "")
        for of, own_steps in steps.items():
            words = of.rpartition("-")[0]
            verdicts.numbers |= {f"{words}_ms": 1000 * median(own_steps), f"{words}_most_ms": 1000 * max(own_steps)}


def _kill(folder: RunFolder, module: str, verdicts: Verdicts, name: str) -> str:
    """Kill the process of `jsonl`, or the feed, when the sink has got something. Returns the case, for people."""
    state, deadline = folder.sinks / "jsonl.json", time.monotonic() + DEADLINE_SECONDS
    while not (state.exists() and state.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    last = {"sink_process": "jsonl", "feed": str(folder.root)}[module]
    pids = [
        pid
        for pid in marked_processes(folder.root)
        if (words := _words(pid)) and words[-1] == last and f"ingot.observe.{module}" in words
    ]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    step = max((event["step"] for event in read_events(folder.events, events.STEP)), default=0)
    where = f"{name}: {module} killed after step {step}"
    verdicts.judge("o6", where, "" if len(pids) == 1 else f"{len(pids)} processes to kill")
    return where


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def _lost(folder: RunFolder) -> str:
    """Return which steps the sink `jsonl` has not, or has with other losses; "" if it has all of them."""
    rows = map(json.loads, (folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines())
    sent = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    trained = {event["step"]: event["loss"] for event in read_events(folder.events, events.STEP)}
    wrong = [step for step, loss in trained.items() if sent.get(step) != loss]
    return f"the sink lacks steps {wrong[:5]}" if wrong else ""


def _steps(folder: RunFolder) -> list[float]:
    """Return the seconds between the steps of a run."""
    times = [event["time"] for event in read_events(folder.events, events.STEP)]
    return [after - before for before, after in itertools.pairwise(times)]


ROWS = (
    Row("RS31 sinks", "sinks hang, wait 30 s, die, have a full disk or are killed; their feed is killed", rs31_sinks),
)
