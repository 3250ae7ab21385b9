"""The row of sinks: whatever becomes of trackers, of their feed and of the live page, the run has the bits of the
undisturbed one, and steps that are no slower than the noise of undisturbed ones explains."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median

from tests.live_page import LivePage
from tests.step_noise import longest_median, machine_is_shared_fairly, step_seconds

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
    """Sinks that hang, wait for 30 s, die and fill a disk, and one that is killed at a random step; the feed of a sink
    is killed; and so is a live page, after it hung. Undisturbed runs are played between them. No step of a disturbed
    run may be longer than the longest of an undisturbed one by _HANG_SECONDS, and its median step, unless the machine
    has too much other work, no longer than their noise explains (tests/step_noise.py)."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "bad_sinks.py", lab / "bad_sinks.py")
    random, own = random_of("RS31 sinks", seed), (*_SETTINGS, drawn_mode(seed))
    cases = {
        f"bad-sinks-{seed}": (_TABLES, "sink_process", {name: [reason] for name, (_, reason) in _BAD.items()}),
        f"no-feed-{seed}": (("sinks.jsonl={close_seconds=60.0}",), "feed", {}),
    }
    undisturbed: list[list[float]] = []
    disturbed: list[tuple[str, list[float]]] = []
    is_fair = machine_is_shared_fairly()
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
        undisturbed.append(step_seconds(bench.folder(calm)))
        disturbed.append((where, step_seconds(folder)))
        _record(verdicts, calm, undisturbed[-1])
        _record(verdicts, name, disturbed[-1][1])
    disturbed.append(_with_page(bench, seed, own, verdicts))
    is_fair = is_fair and machine_is_shared_fairly()
    longest, noise = max(map(max, undisturbed)), longest_median(undisturbed)
    for where, steps in disturbed:
        waited = max(steps) > longest + _HANG_SECONDS
        verdicts.judge("o6", where, f"a step took {max(steps):.1f} s" if waited else "")
        slow = is_fair and median(steps) > noise
        found = f"a step takes {median(steps):.3f} s, and up to {noise:.3f} s is noise"
        verdicts.judge("o6", where, found if slow else "")
    verdicts.numbers |= {"noise_ms": 1000 * noise, "noise_judged": int(is_fair)}


def _record(verdicts: Verdicts, name: str, steps: list[float]) -> None:
    words = name.rpartition("-")[0]
    verdicts.numbers |= {f"{words}_ms": 1000 * median(steps), f"{words}_most_ms": 1000 * max(steps)}


def _with_page(bench: Bench, seed: int, settings: tuple[str, ...], verdicts: Verdicts) -> tuple[str, list[float]]:
    """Train beside a live page that is read, hangs, and is killed at a random step. Returns the case, for people, and
    the seconds of its steps."""
    random, name = random_of("RS31 sinks page", seed), f"page-{seed}"
    process, folder = bench.start(name, *options(settings)), bench.folder(name)
    bench.wait_for_step(name, 5, process)
    with LivePage(folder.root) as page:
        shown = next(page.messages())["head"]["step"]
        page.send(signal.SIGSTOP)
        stopped_at = max((event["step"] for event in read_events(folder.events, events.STEP)), default=0)
        bench.wait_for_step(name, min(stopped_at + random.randrange(10, 40), 150), process)
        page.send(signal.SIGKILL)
        page.process.wait()
    step = max(event["step"] for event in read_events(folder.events, events.STEP))
    where = f"{name}: the page hung after step {stopped_at}, and was killed after step {step}"
    verdicts.judge("o6", where, "" if shown else "the page showed no step")
    ended = bench.ended(process)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(*_SETTINGS))
    steps = step_seconds(folder)
    _record(verdicts, name, steps)
    return where, steps


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


ROWS = (
    Row("RS31 sinks", "sinks hang, wait 30 s, die, have a full disk or are killed; their feed is killed", rs31_sinks),
)
