"""The messages between the leader of a job and its other nodes: values as plain ones, and back. No torch.

A node: `hello` (host, pid, started, facts), `ready` (its imports are done), `rank` (code, ago, ending, facts), `done`
(an attempt; facts), `ended` (an attempt; kept), `watch` (its hang, or null), `answers` (to a question; beats, states,
calls, with_stacks, deaf), `signal` (its name), `health` (a finding: health.py), `checked` (a request of a check;
answer).

The leader: `accepted` (epoch, until_step) or `refused` (why), `start` (attempt, log, first, world, host, port,
overrides), `end` (an attempt; failed, keep), `ask` (a question; place), `check` (a number; request: fleet/measure.py,
null: the check is over), `bye` (result, error).
"""

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ingot
from ingot.schema.run import RunConfig
from ingot.trainer.launch.evidence import Answers
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.resilience.collective_calls import as_json, from_json
from ingot.trainer.resilience.heartbeat import Beat, Phase


def own_facts(config: RunConfig) -> dict[str, str]:
    """Return what has to be equal on all nodes of a job: versions, and the settings of the training."""
    return {
        "ingot": ingot.__version__,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "settings": config.training_sha256(),
        "launch.nodes": str(config.launch.nodes),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first fact in which a node differs, in words; "" if there is none."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            return f"its {name} is {str(theirs.get(name))[:40]}, the leader's {value[:40]}"
    return ""


def beat_values(beat: Beat) -> dict[str, Any]:
    """Return a heartbeat with the age of its phase in place of the moment, which another machine's clock does not
    know."""
    return asdict(beat) | {"phase": int(beat.phase), "since": time.monotonic() - beat.since}


def beat_from(values: Mapping[str, Any]) -> Beat:
    """Return the heartbeat that `beat_values` described, in times of this machine."""
    since, longest = time.monotonic() - float(values["since"]), tuple(map(float, values["longest"]))
    return Beat(**{**values, "phase": Phase(values["phase"]), "since": since, "longest": longest})


def hang_values(hang: Hang | None) -> dict[str, Any] | None:
    """Return a hang as plain values."""
    if hang is None:
        return None
    beats = {str(rank): beat_values(beat) for rank, beat in hang.beats.items()}
    return asdict(hang) | {"beats": beats, "suspects": sorted(hang.suspects)}


def hang_from(values: Mapping[str, Any] | None) -> Hang | None:
    """Return the hang that `hang_values` described."""
    if values is None:
        return None
    beats = {int(rank): beat_from(beat) for rank, beat in values["beats"].items()}
    return Hang(**{**values, "beats": beats, "suspects": frozenset(values["suspects"])})


def answers_values(beats: Mapping[int, Beat], answers: Answers) -> dict[str, Any]:
    """Return the answers of ranks, with their heartbeats, as plain values."""
    return {
        "beats": {str(rank): beat_values(beat) for rank, beat in beats.items()},
        "states": {str(rank): state for rank, state in answers.states.items()},
        "calls": {str(rank): None if calls is None else as_json(calls) for rank, calls in answers.calls.items()},
        "with_stacks": sorted(answers.with_stacks),
        "deaf": {str(rank): why for rank, why in answers.deaf.items()},
    }


def answers_from(values: Mapping[str, Any]) -> tuple[dict[int, Beat], Answers]:
    """Return what `answers_values` described."""
    beats = {int(rank): beat_from(beat) for rank, beat in values["beats"].items()}
    calls = {int(rank): None if one is None else from_json(one) for rank, one in values["calls"].items()}
    states = {int(rank): str(state) for rank, state in values["states"].items()}
    deaf = {int(rank): str(why) for rank, why in values["deaf"].items()}
    return beats, Answers(states, calls, set(map(int, values["with_stacks"])), deaf)
