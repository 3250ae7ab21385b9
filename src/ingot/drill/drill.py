"""`ingot drill` as a function: break copies of a run on purpose, and compare each with an undisturbed one. No torch.

First the run trains undisturbed, twice: a few steps, which show how long one takes, and then all steps of the drill,
which give R. Every fault has a copy of its own.
"""

import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from ingot.drill.copied import RESULT, DrillCopy, with_interval
from ingot.drill.faults import FAULTS, DrillFault, faults_of, play
from ingot.drill.oracles import RunFacts, Verdicts, o1, read_facts
from ingot.drill.trial import DrilledRun, DrillOutput, Trial
from ingot.errors import EXIT_OK, RunFailed, UsageError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.units import format_seconds

EXIT_DIFFERS = 1
LEAST_STEPS = 12
_PROBE_STEPS = 8
_FEWEST = 24  # steps of a copy
_COPY_SECONDS = 6.0  # of an undisturbed copy, besides its start
NONE_LEFT_OUT: Mapping[str, str] = {}


@dataclass(frozen=True)
class DrillReference:
    """The undisturbed run that all copies are compared with. seconds: that its command took."""

    run: DrilledRun
    facts: RunFacts
    seconds: float


def chosen_faults(rows: Sequence[str] = (), *, smoke: bool = False) -> list[DrillFault]:
    """Return the faults of these rows of the board, or of the short drill, or all.

    rows: each is the whole id of a fault; with "+" after it, the variants of the row come too. Raises UsageError for a
    row that has none here.
    """
    asked = {row: _asked(row) for row in rows}
    if unknown := [row for row, faults in asked.items() if not faults]:
        known = ", ".join(dict.fromkeys(fault.id.split()[0] for fault in FAULTS))
        raise UsageError(
            "E-DRILL-ROW",
            f"--rows {unknown[0]}: no such row",
            rule=f"the rows that work on any run are {known}",
            fix="`ingot drill --list` shows them; the other rows of the board run in the tests of ingot",
            row=unknown[0],
        )
    if rows:
        return list(dict.fromkeys(fault for faults in asked.values() for fault in faults))
    return [fault for fault in FAULTS if fault.smoke or not smoke]


def _asked(row: str) -> list[DrillFault]:
    return faults_of(row[:-1]) if row.endswith("+") else [fault for fault in FAULTS if fault.id == row]


def train_reference(
    copy: DrillCopy, output: DrillOutput, *, steps: int = 0, seconds: float = _COPY_SECONDS
) -> DrillReference:
    """Train the undisturbed run. steps: its number of steps; 0: as many as take `seconds`.

    Raises UsageError for too few steps, RunFailed if the run fails, or if training it twice gives other bits.
    """
    of_run = copy.config.train.steps
    if min(steps or of_run, of_run) < LEAST_STEPS:
        raise UsageError(
            "E-DRILL-STEPS",
            f"--steps {steps} are too few" if steps else f"the run has {of_run} steps",
            rule=f"a drill needs at least {LEAST_STEPS} steps, with several checkpoints between them",
            fix="give more with --steps N, or a longer run with --set train.steps=N",
            steps=steps or of_run,
        )
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(copy.root / "compiled")}
    copy = with_interval(copy, _PROBE_STEPS)
    probe = DrilledRun(run_file=copy.run_file, config=copy.config, until=_PROBE_STEPS, variables=variables)
    first, _ = _undisturbed(probe, copy.root / "probe", output)
    step = _step_seconds(RunFolder(copy.root / "probe"))
    steps = min(steps or max(round(seconds / step), _FEWEST), of_run)
    copy = with_interval(copy, steps)
    run = DrilledRun(
        run_file=copy.run_file,
        config=copy.config,
        until=steps if steps < of_run else None,
        variables=variables,
        step_seconds=step,
    )
    facts, took = _undisturbed(run, copy.root / "reference", output)
    step = _step_seconds(RunFolder(copy.root / "reference"))
    common = {number: facts.trace[number] for number in first.trace}
    if found := o1(first.trace, common):
        raise RunFailed(
            "E-DRILL-UNSTEADY",
            f"two undisturbed runs differ: {found}",
            rule="without a fault, a run that is trained twice gives the same bits; otherwise nothing can be compared",
            fix="use operations with a fixed order of sums: the same number of threads, fixed kernels, no atomic adds",
            run=str(copy.root),
        )
    shutil.rmtree(copy.root / "probe")
    output.say(
        f"reference  {steps} steps of {run.ranks} rank{'s' * (run.ranks > 1)} in {format_seconds(took)}, "
        f"{format_seconds(step)} a step, a checkpoint every {run.interval}; "
        f"the first {len(common)} steps twice, with the same bits"
    )
    return DrillReference(replace(run, step_seconds=step), facts, took)


def _undisturbed(run: DrilledRun, root: Path, output: DrillOutput) -> tuple[RunFacts, float]:
    """Train a run without a fault. Returns its facts, and how long that took."""
    began = time.monotonic()
    with Trial(run, root, Random(0), Verdicts(), output=output, name=root.name) as trial:
        trial.start()
        code = trial.finish()
        if code != run.done_code:
            raise RunFailed(
                "E-DRILL-REFERENCE",
                f"the undisturbed run ended with exit code {code}:\n{trial.last_words()}",
                rule="a drill compares with a run that trains without a fault",
                fix=f"repair it first: ingot train {run.run_file} --out {root}; its output is in {trial.printed}",
                exit_code=code,
            )
    return read_facts(trial.folder), time.monotonic() - began


def _step_seconds(folder: RunFolder) -> float:
    """Return the median time of a step that follows another one in an attempt."""
    log = read_events(folder.events, events.STEP, events.RUN_STARTED)
    pairs = [(a, b) for a, b in itertools.pairwise(log) if a["kind"] == b["kind"] == events.STEP]
    return max(median([b["time"] - a["time"] for a, b in pairs]), 0.001)


def drill(copy: DrillCopy, faults: Sequence[DrillFault], output: DrillOutput, *, steps: int = 0, seed: int = 0) -> dict:
    """Break a copy of the run with each fault. Returns the result as plain values; they are in its `drill.json` too.

    steps: see `train_reference`, whose errors this raises. seed: of ranks, times and places.
    """
    began = time.monotonic()
    reference = train_reference(copy, output, steps=steps)
    lines, left_out = [], {}
    for fault in faults:
        if reason := fault.needs(copy.config):
            left_out[fault.id] = reason
            output.say(f"\n{fault.id:<14}  {fault.injects}\n  left out   {reason}")
            continue
        lines.append(_play_one(fault, reference, copy.root, output, seed))
    return write_result(copy, reference, lines, left_out, seed=seed, began=began)


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
        shutil.rmtree(copy.root / "reference")
    return result


def _play_one(fault: DrillFault, reference: DrillReference, root: Path, output: DrillOutput, seed: int) -> dict:
    """Play a fault on a fresh copy. Returns its line; the copy stays if it is red."""
    verdicts, began = Verdicts(), time.monotonic()
    place = root / fault.id.replace(" ", "-")
    output.say(f"\n{fault.id:<14}  {fault.injects}")
    random = Random(f"{fault.id} {seed}")
    with Trial(reference.run, place, random, verdicts, output=output, name=fault.id) as trial:
        play(fault, trial, reference.facts)
    seconds = time.monotonic() - began
    newest = trial.recoveries[-1] if trial.recoveries else None
    line = verdicts.as_json(fault.id, seed) | {
        "injects": fault.injects,
        "injected": trial.where,
        "detected_by": newest.by if newest else "",
        "cause": newest.cause if newest else "",
        "evidence": "" if not verdicts.wrong else str(place),
        "seconds": round(seconds, 1),
    }
    output.say(f"  judged     {judgment(line)}   {format_seconds(seconds)}")
    for finding in line["wrong"]:
        output.say(f"  wrong      {finding}")
    if verdicts.wrong:
        output.say(f"  evidence   {place}, {trial.printed}; the undisturbed run is {root / 'reference'}")
    else:
        for suffix in ("", ".tmp", ".log", ".damaged"):
            _remove(root / f"{place.name}{suffix}")
    return line


def judgment(line: dict) -> str:
    """Return what the oracles found of a fault, in words."""
    redone = line["redone_steps"]
    parts = [
        f"{redone} step{'s' * (redone != 1)} done again",
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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
