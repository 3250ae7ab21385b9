"""`ingot drill` as a function: break copies of a run on purpose, and compare each with an undisturbed one. No torch.

First the run trains undisturbed, twice: a few steps, which show how long one takes, and then all steps of the drill,
which give R. Every fault has a copy of its own.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from ingot.drill.copied import RESULT, DrillCopy
from ingot.drill.fault import DrillFault, play
from ingot.drill.guarded import differences, facts_with, train_guarded
from ingot.drill.oracles import Verdicts
from ingot.drill.reference import train_reference
from ingot.drill.trial import DrillOutput, Trial
from ingot.drill.undisturbed import RECOMPUTED, REFERENCE, DrillReference
from ingot.errors import EXIT_OK
from ingot.schema.run import RunConfig
from ingot.schema.step_ranges import spans_of
from ingot.storage import write_json
from ingot.units import format_seconds

EXIT_DIFFERS = 1
NONE_LEFT_OUT: Mapping[str, str] = {}
_SUFFIXES = ("", ".tmp", ".log", ".damaged", ".planted", ".tokens", ".health")  # of what a copy has


def drill(copy: DrillCopy, faults: Sequence[DrillFault], output: DrillOutput, *, steps: int = 0, seed: int = 0) -> dict:
    """Break a copy of the run with each fault. Returns the result as plain values; they are in its `drill.json` too.

    steps: see `train_reference`, whose errors this raises. seed: of ranks, times and places.
    """
    began = time.monotonic()
    reference = train_reference(copy, output, steps=steps)
    lines, left_out, guarded = [], {}, None
    config = copied_steps(reference)
    for fault in faults:
        if reason := fault.needs(config):
            left_out[fault.id] = reason
            output.say(f"\n{fault.id:<14}  {fault.injects}\n  left out   {reason}")
            continue
        if fault.by_size and guarded is None:
            guarded = train_guarded(reference, copy.root, output)
        own = guarded if guarded is not None and fault.by_size else reference
        own = replace(own, facts=facts_with(own, fault.settings(config), copy.root, output))
        lines.append(_play_one(fault, own, copy.root, output, seed))
    return write_result(copy, reference, lines, left_out, seed=seed, began=began)


def copied_steps(reference: DrillReference) -> RunConfig:
    """Return the settings of the run as if it ended with the last step of its copies."""
    config = reference.run.config
    return replace(config, train=replace(config.train, steps=reference.run.steps))


def write_result(
    copy: DrillCopy,
    reference: DrillReference,
    lines: Sequence[dict],
    left_out: Mapping[str, str] = NONE_LEFT_OUT,
    *,
    seed: int,
    began: float,
) -> dict:
    """Write the result of a drill or a soak to its folder, whose undisturbed run goes if all is equal. Returns it.

    lines: of Verdicts.as_json. left_out: row -> why the run cannot have it. began: in seconds of time.monotonic().
    """
    red = [line["id"] for line in lines if not line["passed"]]
    result = {
        "folder": str(copy.root),
        "steps": reference.run.steps,
        "step_seconds": round(reference.run.step_seconds, 4),
        "seed": seed,
        "rows": list(lines),
        "left_out": dict(left_out),
        "red": red,
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": EXIT_DIFFERS if red else EXIT_OK,
    }
    write_json(copy.root / RESULT, result)
    if not red:
        for name in (REFERENCE, RECOMPUTED, "guarded"):
            remove_copy(copy.root / name)
    return result


def _play_one(fault: DrillFault, reference: DrillReference, root: Path, output: DrillOutput, seed: int) -> dict:
    """Play a fault on a fresh copy. Returns its line; the copy stays if it is red."""
    verdicts, began = Verdicts(), time.monotonic()
    place = root / fault.id.replace(" ", "-")
    output.say(f"\n{fault.id:<14}  {fault.injects}")
    random = Random(f"{fault.id} {seed}")
    run = fault.prepare(reference.run, place)
    if changed := differences(reference.run.config, run.config):
        output.say(f"  changed    {', '.join(changed)}")
    with Trial(run, place, random, verdicts, output=output, name=fault.id) as trial:
        play(fault, trial, reference.facts)
    seconds = time.monotonic() - began
    newest = trial.recoveries[-1] if trial.recoveries else None
    line = verdicts.as_json(fault.id, seed) | {
        "injects": fault.injects,
        "injected": trial.where,
        "detected_by": newest.by if newest else "",
        "cause": newest.cause if newest else "",
        "skipped_steps": [*map(str, spans_of(verdicts.untrained))],
        "directed": fault.directed is not None,
        "evidence": "" if not verdicts.wrong else str(place),
        "seconds": round(seconds, 1),
    }
    output.say(f"  judged     {judgment(line)}   {format_seconds(seconds)}")
    for finding in line["wrong"]:
        output.say(f"  wrong      {finding}")
    if verdicts.wrong:
        compared = f"{place.name}-directed" if fault.directed else "guarded" if fault.by_size else "reference"
        output.say(f"  evidence   {place}, {trial.printed}; compared with {root / compared}")
    else:
        remove_copy(place)
        remove_copy(root / f"{place.name}-directed")
    return line


def judgment(line: dict) -> str:
    """Return what the oracles found of a fault, in words."""
    redone, skipped = line["redone_steps"], ", ".join(line.get("skipped_steps", []))
    parts = [
        f"{redone} step{'s' * (redone != 1)} done again",
        *([f"skipped step{'s' * (not skipped.isdigit())} {skipped}"] if skipped else []),
        _word("bits", [line["o1"], line["o2"]]),
        _word("ledger", [line["o3"]]),
        {True: "nothing left", False: "something is left", None: "leftovers not looked for"}[line["o7"]],
    ]
    return f"{' · '.join(parts)} · {'ok' if line['passed'] else 'RED'}"


def _word(what: str, states: Sequence[bool | None]) -> str:
    if None in states:
        return f"{what} not compared"
    return f"{what} equal" if all(states) else f"{what} DIFFER"


def result_rows(result: dict) -> list[list[str]]:
    """Return the table of a drill: row, fault, seconds to detect and to recover, steps redone, bits, ledger, result."""

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def yes(*states: bool | None) -> str:
        return "-" if None in states else "yes" if all(states) else "NO"

    rows = [
        [
            *(line["id"], line["injects"], seconds(line["detect_s"]), seconds(line["recover_s"])),
            *(str(line["redone_steps"]), yes(line["o1"], line["o2"]), yes(line["o3"])),
            "ok" if line["passed"] else "RED",
        ]
        for line in result["rows"]
    ]
    return rows + [[name, reason, "", "", "", "", "", "left out"] for name, reason in result["left_out"].items()]


def remove_copy(place: Path) -> None:
    """Remove the run folder of a copy, and what is beside it."""
    for suffix in _SUFFIXES:
        _remove(place.with_name(f"{place.name}{suffix}"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
