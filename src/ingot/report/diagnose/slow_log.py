"""What a run's event log says of the time of its steps: means per step, the first interval of each attempt aside."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ingot.report.facts import Facts, is_finite


@dataclass(frozen=True)
class Spread:
    """Seconds per step over ranks; rank: the one with the most."""

    mean: float
    least: float
    most: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds are per step. step_seconds: without saving, evaluating, faults and the first interval of each attempt,
    in which things are compiled and connected; first_seconds: what those took longer, all together.

    steps: that counted. intervals: log lines behind the figures. waits: by kind (telemetry/waits.py); empty in logs
    from before there were such events. bursts: share of all waiting for data that the worst tenth of the lines holds.
    longest_wait_seconds: for data, of one line in all. fastest_seconds: a step of the fastest line.
    save_seconds, evaluate_seconds: of those that come again and again. restart_seconds: lost to faults, with the work
    that was done again. device, host: of the last attempt.
    """

    steps: int
    intervals: int
    step_seconds: float
    fastest_seconds: float
    first_seconds: float
    data_seconds: float
    waits: dict[str, Spread] = field(default_factory=dict)
    bursts: float = 0.0
    longest_wait_seconds: float = 0.0
    saves: int = 0
    save_seconds: float = 0.0
    save_seconds_each: float = 0.0
    evaluations: int = 0
    evaluate_seconds: float = 0.0
    untimed_evaluations: int = 0
    restarts: int = 0
    redone_steps: int = 0
    restart_seconds: float = 0.0
    device: str = ""
    host: str = ""

    @property
    def clock_seconds(self) -> float:
        """Of one step with its share of everything that interrupts steps."""
        return self.step_seconds + self.save_seconds + self.evaluate_seconds + self.restart_seconds


def measure(facts: Facts) -> Measured | None:
    """None when the log has no line of progress yet."""
    lines = _intervals(facts)
    if not lines:
        return None
    first = {min((step for step in lines if step > start["from_step"]), default=0) for start in facts.starts}
    steady = [step for step in lines if step not in first] or list(lines)
    each = {step: facts.progress[step] for step in steady}
    counted = sum(lines[step] for step in steady)
    mean = sum(lines[step] * event["step_seconds"] for step, event in each.items()) / counted
    waiting = {step: _data_wait(facts, step, lines[step]) for step in steady}
    done = max(facts.last_step - facts.starts[0]["from_step"], 1) if facts.starts else counted
    start = facts.starts[-1] if facts.starts else {}
    hardware = start.get("hardware")
    return Measured(
        steps=counted,
        intervals=len(steady),
        step_seconds=mean,
        fastest_seconds=min(event["step_seconds"] for event in each.values()),
        first_seconds=sum(
            max(facts.progress[s]["step_seconds"] - mean, 0.0) * lines[s] for s in lines if s not in steady
        ),
        data_seconds=sum(lines[step] * seconds for step, seconds in waiting.items()) / counted,
        bursts=_bursts([lines[step] * seconds for step, seconds in waiting.items()]),
        longest_wait_seconds=max(lines[step] * seconds for step, seconds in waiting.items()),
        waits=_waits(facts, {step: lines[step] for step in steady}),
        device=str(start.get("device", "")),
        host=str(hardware.get("host", "")) if isinstance(hardware, dict) else "",
        **_interruptions(facts, done, mean),
    )


def _intervals(facts: Facts) -> dict[int, int]:
    """Step of a progress line -> how many steps it tells of. A line whose steps took no time is damaged."""
    starts = sorted({start["from_step"] for start in facts.starts})

    def timed(step: int) -> bool:
        return step in facts.progress and facts.progress[step]["step_seconds"] > 0

    borders = sorted({*facts.progress, *starts, 0})
    return {step: step - before for before, step in pairwise(borders) if timed(step)}


def _data_wait(facts: Facts, step: int, steps: int) -> float:
    """Of the rank that waited most; older logs know the first rank only. 0 where a GPU was more than a step behind its
    host when the line ended: it had work while the host waited for data."""
    waits, seconds = facts.waits.get(step, {}), facts.progress[step]["step_seconds"]
    behind, spread = _spread(waits.get("reading")), _spread(waits.get("data"))
    if behind and behind.least * steps > seconds:
        return 0.0
    return spread.most if spread else facts.progress[step]["data_wait_seconds"]


def _bursts(seconds: list[float]) -> float:
    worst = sorted(seconds, reverse=True)[: -(-len(seconds) // 10)]
    return sum(worst) / sum(seconds) if sum(seconds) > 0 else 0.0


def _waits(facts: Facts, lines: dict[int, int]) -> dict[str, Spread]:
    """Means over the lines that have them."""
    found: dict[str, list[tuple[int, Spread]]] = {}
    for step, steps in lines.items():
        for kind, values in facts.waits.get(step, {}).items():
            if spread := _spread(values):
                found.setdefault(kind, []).append((steps, spread))
    return {kind: _mean(spreads) for kind, spreads in found.items()}


def _mean(spreads: list[tuple[int, Spread]]) -> Spread:
    total = sum(steps for steps, _ in spreads)
    mean, least, most = (
        sum(steps * getattr(spread, name) for steps, spread in spreads) / total for name in ("mean", "least", "most")
    )
    ranks = [spread.rank for _, spread in spreads]
    return Spread(mean, least, most, max(set(ranks), key=ranks.count))


def _spread(values) -> Spread | None:
    if not isinstance(values, dict) or not all(is_finite(values.get(k)) for k in ("mean", "least", "most", "rank")):
        return None
    return Spread(values["mean"], values["least"], values["most"], int(values["rank"]))


def _interruptions(facts: Facts, done: int, step_seconds: float) -> dict[str, Any]:
    """What stops the steps again and again, per step that was done. A run saves and evaluates once at its end, too."""
    every = facts.run.checkpoint.every_steps if facts.run else 1
    saves = [event["stall_seconds"] for event in facts.checkpoints if event["step"] % every == 0]
    last = facts.finished["step"] if facts.finished else 0
    between = [event for event in facts.evaluations if event["step"] != last]
    timed = [event["seconds"] for event in between if is_finite(event.get("seconds"))]
    back = [incident for incident in facts.incidents if incident.recover_seconds is not None]
    redone = sum(incident.redone_steps or 0 for incident in back)
    lost = sum(incident.recover_seconds or 0.0 for incident in back) + redone * step_seconds
    return {
        "saves": len(saves),
        "save_seconds": sum(saves) / done,
        "save_seconds_each": sum(saves) / max(len(saves), 1),
        "evaluations": len(between),
        "evaluate_seconds": sum(timed) / done,
        "untimed_evaluations": len(between) - len(timed),
        "restarts": len(back),
        "redone_steps": redone,
        "restart_seconds": lost / done,
    }
