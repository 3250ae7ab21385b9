"""What would make a plan fit, or a plan faster: every single change of a control, tried."""

from dataclasses import dataclass, replace

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.step_time import step_seconds
from ingot.planner.web.answers import Answer, cluster_of, run_of, software_of
from ingot.planner.web.choices import steps_away, words_of
from ingot.planner.web.state import State, words
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.units import format_bytes, format_seconds

_SHOWN = 3


@dataclass(frozen=True)
class _Tried:
    key: str
    value: int | str
    state: State
    memory_bytes: float
    seconds: float


def fixes(found: Answer, asked: State) -> list[dict]:
    """The changes after which the plan fits, those that cost least time first. Empty when no single one is enough.
    asked: the settings of the link, which stay open where it leaves them open."""
    cluster = cluster_of(found.state.cluster)
    tried = []
    for key, value, state in steps_away(found.state):
        run, _ = run_of(state)
        needed = _needed(run, cluster, software_of(state))
        if needed <= rank_memory_bytes(cluster, run.parallel.world_size):
            tried.append(_Tried(key, value, state, needed, _seconds(run, cluster, software_of(state))))
    best: dict[str, _Tried] = {}
    for one in sorted(tried, key=lambda t: (t.seconds, t.memory_bytes)):
        best.setdefault(one.key, one)
    return [_shown(one, found, asked) for one in list(best.values())[:_SHOWN]]


def _needed(run: RunConfig, cluster: Cluster, software: Software) -> float:
    return sum(term.value for term in memory_bill(run, cluster, software).values())


def _seconds(run: RunConfig, cluster: Cluster, software: Software) -> float:
    return sum(term.value for term in (step_seconds(run, cluster, software) or {}).values())


def _shown(one: _Tried, found: Answer, asked: State) -> dict:
    now = found.plan.step_seconds if found.plan else 0.0
    slower = f", {one.seconds / now - 1:+.0%} step time" if now and one.seconds else ""
    return {
        "text": words_of(one.key, one.value),
        "effect": f"{format_bytes(one.memory_bytes)}, {format_seconds(one.seconds)} a step{slower}",
        "words": words(replace(one.state, seq=asked.seq, batch=asked.batch, tokens=asked.tokens)),
    }
