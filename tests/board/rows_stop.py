"""The row of requests to stop: signals to a run that saves and stops, and to one that never does."""

import time

from ingot.drill.clean import left_running
from ingot.drill.job import DEADLINE_SECONDS
from ingot.drill.oracles import Verdicts

from .bench import Bench, options
from .row import Row, drilled, judge_recovered, random_of
from .rows_hang import DEAF, planted_settings

_GRACE, _LATE = 2.0, 10.0  # s; a busy machine may be late, but the watchdog comes after a minute alone
_STUBBORN = (f"launch.grace={_GRACE:g}s", "launch.watchdog_seconds=60", "launch.timeout_seconds=120")
_PREEMPTED = 10


def rs28(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Ask a run to stop by one signal, by others, by two; and a run of which one rank never stops, because it waits for
    ever and takes no signals: it is killed from outside when `launch.grace` is over."""
    drilled("RS28", "train.steps=60")(bench, seed, verdicts)
    never_stops(bench, seed, verdicts)


def never_stops(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Ask a run to stop whose ranks wait for one that never stops; then continue it."""
    random, name = random_of("RS28 never", seed), f"never-{seed}"
    fault, settings = f"wait {random.randrange(2)} {random.randrange(9, 40)} on_update", planted_settings(bench)
    where, env = f"SIGTERM while ranks {fault}", DEAF | {"BOARD_FAULT": fault}
    process = bench.start(name, *options((*settings, *_STUBBORN)), env=env)
    planted, deadline = bench.root / f"{name}.planted", time.monotonic() + DEADLINE_SECONDS
    while not planted.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    ended = bench.ended(process)
    right = (
        ended.code == _PREEMPTED and "launch.grace" in ended.output and _GRACE - 0.1 < ended.seconds < _GRACE + _LATE
    )
    found = f"exit code {ended.code} after {ended.seconds:.1f} s: {ended.output[-300:]}"
    verdicts.judge("o6", where, "" if right else found)
    verdicts.judge("o7", where, left_running(bench.folder(name).root))
    verdicts.numbers["killed_s"] = max(ended.seconds, verdicts.numbers.get("killed_s", 0.0))
    again = bench.train(name, *options(settings), env=env)
    verdicts.judge("o6", where, "" if again.code == 0 else f"exit code {again.code}: {again.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(*settings))


ROWS = (Row("RS28", "SIGTERM, SIGINT, SIGUSR1, SIGTERM twice; SIGTERM to a run that never stops", rs28),)
