"""Reports about the machine of a copy, in the file of a site's monitor (launch.health_file). No torch.

A machine with a fault leaves its run. A copy has no other one, so it ends, and the same command goes on.
"""

import json
from collections.abc import Callable
from pathlib import Path

from ingot.drill.fault import DrillFault
from ingot.drill.guarded import with_settings
from ingot.drill.trial import DrilledRun, Trial
from ingot.errors import NodeUnhealthy
from ingot.schema import events

_DEVICE = "memory INGOT_DRILL"  # no machine has it
_UNHEALTHY = frozenset({NodeUnhealthy.exit_code})


def health_file(root: Path) -> Path:
    """Return the file of reports, beside the run folder `root` of a copy."""
    return root.with_name(f"{root.name}.health")


def _watched(run: DrilledRun, place: Path) -> DrilledRun:
    return with_settings(run, {"launch.health_file": str(health_file(place)), "launch.on_bad_health": "drain"})


def _report(trial: Trial, kind: str, what: str, *, quiet: bool = False) -> None:
    trial.injects(f"the machine reports {what}", quiet=quiet, found_by=events.HEALTH)
    with health_file(trial.folder.root).open("a") as file:
        file.write(json.dumps({"kind": kind, "device": _DEVICE}) + "\n")


def _warned(trial: Trial) -> None:
    _report(trial, "machine_check", "a machine check", quiet=True)


def _leaves(kind: str, what: str) -> Callable[[Trial], None]:
    return lambda trial: _report(trial, kind, what)


def _reported(kind: str, verdict: str, saves: bool) -> Callable[[Trial], str]:
    """Return the judge of a report. saves: whether the run saves before it ends."""

    def expects(trial: Trial) -> str:
        found = [(e["report"], e["verdict"]) for e in trial.found(events.HEALTH) if e["device"] == _DEVICE]
        if found != [(kind, verdict)]:
            return f"reports {found}, not one {kind} with the verdict {verdict}"
        reasons = [event["reason"] for event in trial.found(events.STOPPED)]
        if reasons.count("drain") != saves:
            return f"it saved and stopped for {reasons}, {'not' if saves else 'also'} for the drain of the machine"
        faults = [event["cause"] for event in trial.found(events.FAULT)]
        return f"a fault was reported: {faults}" if faults else ""

    return expects


MACHINE_FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        id="RS36",
        injects="the machine finds wrong memory before a program does: it saves and stops; the same command again",
        inject=_leaves("ecc_scrubbed", "wrong memory that no program has read"),
        expects=_reported("ecc_scrubbed", "drain", saves=True),
        codes=_UNHEALTHY,
        intervals=0,
        soaks=False,
        prepare=_watched,
    ),
    DrillFault(
        id="RS36 memory",
        injects="a program has read wrong memory: it stops, and saves nothing; the same command again",
        inject=_leaves("ecc_uncorrected", "wrong memory that a program has read"),
        expects=_reported("ecc_uncorrected", "discard", saves=False),
        codes=_UNHEALTHY,
        soaks=False,
        prepare=_watched,
    ),
    DrillFault(
        id="RS36 warning",
        injects="a report that is only worth a warning: the run goes on",
        inject=_warned,
        expects=_reported("machine_check", "warn", saves=False),
        intervals=0,
        soaks=False,
        prepare=_watched,
    ),
)
