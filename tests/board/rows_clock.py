"""A row of clocks that jump by an hour, and of two nodes whose clocks differ."""

import json
import time
from itertools import pairwise
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.errors import RunBusyError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from . import killpoints
from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_launchers import SETTINGS, Launchers

_STEPS = SETTINGS[:1]
_WATCHED = (*_STEPS, "launch.watchdog_seconds=3", "launch.lease_seconds=4")
_HOUR, _SKEW = 3600, 5
_CLOCK = Path(__file__).with_name("clock.c")
_LONGEST_SECONDS = _HOUR / 2  # what no step, no wait and no rest of such a run can take


def rs32(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Move the clock of a run by an hour, forth and back, and start a second launcher then; train on two nodes of which
    one is ahead."""
    random = random_of("RS32", seed)
    for case, seconds in (("forth", _HOUR), ("back", -_HOUR)):
        name, step = f"clock-{case}-{seed}", random.randrange(9, 60)
        where, jump = f"{case} at step {step}", bench.root / f"{name}.jump"
        run = bench.start(name, *options(_WATCHED), env=_clock(bench) | {"BOARD_JUMP": str(jump)})
        bench.wait_for_step(name, step, run)
        _write(jump, seconds)
        second = bench.train(name, *options(_WATCHED))  # its clock is right
        refused = second.code == RunBusyError.exit_code
        verdicts.judge("o6", where, "" if refused else f"a second launcher was not refused: {second.code}")
        ended = bench.ended(run)
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        _judge_log(bench.folder(name), verdicts, where)
        last = [e["time"] for e in read_events(bench.folder(name).events)][-1] - time.time()
        verdicts.judge("o6", where, "" if abs(last - seconds) < _HOUR / 2 else f"the clock did not jump: {last} s")
        status = bench.ingot("status", str(bench.root / name), "--json")
        verdicts.judge("o6", where, "" if status.code == 0 else f"status: {status.output[-300:]}")
        judge_recovered(bench, verdicts, name, where, bench.reference(*_STEPS))
    name, where = f"clock-skew-{seed}", f"a skew of {_SKEW} s"
    with Launchers(bench, name) as nodes:
        nodes.start(1)
        nodes.start(1, env=_clock(bench) | {"BOARD_SKEW": str(_SKEW if seed % 2 else -_SKEW)})
        codes = nodes.ends(without=-1)
        verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
        _judge_log(nodes.folder, verdicts, where)
    judge_recovered(bench, verdicts, name, where, bench.reference(*_STEPS))


def _judge_log(folder: RunFolder, verdicts: Verdicts, where: str) -> None:
    """Judge that nothing counted as a fault, that events are in the order of the steps, and that no duration jumped."""
    log = list(read_events(folder.events))
    wrong = [e for e in log if e["kind"] in (events.FAULT, events.RESTART)]
    wrong += [e for e in log if e["kind"] == events.NODE and e["action"] == "lost" and e["reason"] != "it ended"]
    verdicts.judge("o6", where, f"events {wrong}" if wrong else "")
    steps = [e["step"] for e in log if e["kind"] == events.STEP]
    verdicts.judge("o6", where, "" if all(b == a + 1 for a, b in pairwise(steps)) else f"steps {steps}")
    for event in log:
        for field in ("eta_seconds", "step_seconds", "data_wait_seconds", "stall_seconds", "write_seconds", "seconds"):
            value = event.get(field)
            if isinstance(value, int | float) and not 0 <= value < _LONGEST_SECONDS:
                verdicts.judge("o6", where, f"{field} {value} in {json.dumps(event)[:200]}")


def _clock(bench: Bench) -> dict[str, str]:
    """Return the environment of processes whose clock can be wrong."""
    library = killpoints.build(bench.root, _CLOCK)
    return {"LD_PRELOAD": f"{bench.interposer}:{library}"}


def _write(jump: Path, seconds: int) -> None:
    partial = jump.with_suffix(".partial")
    partial.write_text(f"{seconds}\n")
    partial.rename(jump)


ROWS = (Row("RS32", "the clock jumps by an hour; the clocks of two nodes differ by 5 s", rs32),)
