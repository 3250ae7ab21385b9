"""Copies with quiet faults: their settings, with which the guard can act in a few steps, and the undisturbed run that
shows what it would find there without a fault. No torch."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from ingot.drill.oracles import RunFacts, Verdicts, o1, o2, o3, read_facts
from ingot.drill.plan import STAYS, FaultPlan, folder_of
from ingot.drill.trial import DrilledRun, DrillOutput, Trial
from ingot.drill.undisturbed import RECOMPUTED, REFERENCE, DrillReference, undisturbed
from ingot.errors import RunFailed
from ingot.events import read_events
from ingot.machine.facts import find_gpus
from ingot.schema import events
from ingot.schema.quarantine_record import Quarantined, write_quarantine
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.step_ranges import spans_of
from ingot.storage import write_atomic
from ingot.toml import toml_value
from ingot.units import format_seconds

READY = 6  # healthy steps before a spike can be judged
WARM_UP = 4
_PROVEN = 1
_LEAST_SIGMAS = 0.001  # reports how far each healthy step is from those before it
_MARGIN = 1.5  # above the largest distance of a healthy step
_NAME = "ingot_drill"
_PLUGIN = f"""from ingot.plugins.callback import CALLBACKS, CallbackPart

CALLBACKS.register(CallbackPart(name="{_NAME}", make="ingot.drill.planted:PlantedFaults"))
"""


def with_settings(run: DrilledRun, values: Mapping[str, Any]) -> DrilledRun:
    """Return the run with other settings. values: "section.key" -> value."""
    config = run.config
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    given = tuple(f"{key}={toml_value(value)}" for key, value in values.items())
    return replace(run, config=config, settings=(*run.settings, *given))


def planted(run: DrilledRun, place: Path) -> DrilledRun:
    """Return the run of the copy in the folder `place` with the callback that plants faults, and write its plug-in.

    The folder of the plug-in is in PYTHONPATH, because the run may have plug-ins in a folder of its own.
    """
    folder, path = folder_of(place), run.variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{_NAME}.py", _PLUGIN)
    modules = toml_value([*run.config.plugins.modules, _NAME])
    return replace(
        run,
        settings=(*run.settings, f"plugins.modules={modules}", f"callbacks.{_NAME}={{}}"),
        variables={**run.variables, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), path)))},
    )


def hashes_in_each_step(config: RunConfig) -> dict[str, Any]:
    """Return the settings with which the state is hashed in each step."""
    return {"guard.hash_every": 1}


def _by_size(config: RunConfig) -> dict[str, Any]:
    """Return the settings with which steps are judged by their size, and trouble ends, within a few steps."""
    guard = config.guard
    return {
        "guard.ready": min(guard.ready, READY),
        "guard.settle_steps": 0,
        "guard.calm_steps": guard.in_a_row,
        "guard.proven_steps": min(guard.proven_steps, _PROVEN),
        "guard.hash_every": min(guard.hash_every, 1),
        "schedule.warmup_steps": min(config.schedule.warmup_steps, WARM_UP),
    }


def facts_with(reference: DrillReference, values: Mapping[str, Any], root: Path, output: DrillOutput) -> RunFacts:
    """Return the facts of the undisturbed run with the settings `values` of a fault.

    They change no bits on a CPU. On GPUs, ranks that compute gradients twice (guard.recompute_every) use kernels that
    always add in the same order, so the run is trained once more with them. Raises RunFailed if it fails.
    """
    is_new = values.get("guard.recompute_every") and not reference.run.config.guard.recompute_every
    if not is_new or not find_gpus():
        return reference.facts
    facts, seconds = undisturbed(with_settings(reference.run, values), root / RECOMPUTED, output)
    output.say(f"\nrecomputed the undisturbed run once more in {format_seconds(seconds)}: its kernels are others here")
    return facts


def train_guarded(reference: DrillReference, root: Path, output: DrillOutput) -> DrillReference:
    """Train the undisturbed run with the settings of faults that are found by the size of a step. Returns it.

    It reports how far healthy steps are from those before, and a spike has to be farther than all of them. Raises
    RunFailed if it fails, or if the settings of the guard change its bits although it
    did nothing.
    """
    config, place = reference.run.config, root / "guarded"
    run = with_settings(reference.run, _by_size(config))
    # Without measures there is no second try, and a run with one of them would be refused.
    watched = with_settings(run, {"guard.preset": "watch", "guard.retry": "off", "guard.sigmas": _LEAST_SIGMAS})
    facts, seconds = undisturbed(planted(watched, place), place, output)
    found = list(read_events(RunFolder(place).events, events.FINDING))
    largest = max((max(one["loss_sigmas"], one["norm_sigmas"]) for one in found), default=0.0)
    values = {"guard.sigmas": max(config.guard.sigmas, float(math.ceil(_MARGIN * largest)))}
    guarded = with_settings(run, values)
    changed = differences(config, guarded.config)
    own = list(read_events(RunFolder(root / REFERENCE).events, events.SKIPPED, events.ROLLED_BACK))
    other_bits = bool(own) or any(not one.startswith("guard.") for one in changed)
    theirs = reference.facts
    difference = o1(facts.trace, theirs.trace) or o2(facts.state, theirs.state) or o3(facts.samples, theirs.samples)
    if difference and not other_bits:
        raise RunFailed(
            "E-DRILL-UNSTEADY",
            f"the undisturbed run and the same with other settings of the guard differ: {difference}",
            rule="without a fault, settings of the guard change no bits; otherwise nothing can be compared",
            fix="use operations with a fixed order of sums: the same number of threads, fixed kernels, no atomic adds",
            run=str(root),
        )
    why = "the guard acted in the first one" if own else "the warm-up is shorter"
    bits = f"a run of its own, because {why}" if other_bits else "with the same bits"
    output.say(
        f"\nguarded    the undisturbed run once more in {format_seconds(seconds)}, for the faults that the guard finds "
        f"by the size of a step; {bits}\n"
        f"  changed    {', '.join(changed) or 'nothing'}\n"
        f"  healthy    steps are up to {largest:.1f} deviations above those before"
    )
    return DrillReference(replace(guarded, step_seconds=reference.run.step_seconds), facts, seconds)


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the settings that differ, each as "key = value"."""
    old, new = before.settings(), after.settings()
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key} = {toml_value(new[key]) if key in new else 'its default'}" for key in keys]


def directed_place(root: Path) -> Path:
    """Return the folder of the second copy of a trial in the folder `root`."""
    return root.with_name(f"{root.name}-directed")


def directed_to_skip(trial: Trial, record: Sequence[Quarantined] = ()) -> RunFacts | None:
    """Train a second copy that is directed to skip from its start the steps that, by the ledger, changed no weights in
    the first one. Returns its facts; None if it failed.

    Documents that were planted in the data of steps are in its data too, and steps without a learning rate have none.
    It has no other fault. record: of damaged data, from its start; the tokens have to be whole.
    """
    place = directed_place(trial.folder.root)
    untrained = sorted(read_facts(trial.folder).untrained)
    run = with_settings(trial.run, {"data.skip": [*map(str, spans_of(untrained))]})
    plan, own = FaultPlan(place), trial.plan
    for number, fault in enumerate(own.faults()):
        if fault.kind in STAYS and (start := own.starts().get(number)) is not None:
            plan.start(plan.add(fault), start)
    if record:
        place.mkdir()
        write_quarantine(RunFolder(place).quarantine, record)
    return trained_directed(trial, replace(run, variables=_own_plugin(run, trial.folder.root, place)), place)


def _own_plugin(run: DrilledRun, old: Path, new: Path) -> dict[str, str]:
    """Return the variables of a run with the plug-in in the folder of another copy."""
    folder_of(new).mkdir(exist_ok=True)
    write_atomic(folder_of(new) / f"{_NAME}.py", _PLUGIN)
    path = run.variables["PYTHONPATH"].replace(str(folder_of(old)), str(folder_of(new)), 1)
    return {**run.variables, "PYTHONPATH": path}


def trained_directed(trial: Trial, run: DrilledRun, place: Path) -> RunFacts | None:
    """Train the second copy of a trial in the folder `place`. Returns its facts; None if it failed. It has to find
    nothing, and its state has to stay whole."""
    name = f"{trial.name}, directed"
    trial.output.say("  directed   a second copy is directed to do the same from its start")
    with Trial(run, place, Random(0), Verdicts(), output=trial.output, name=name) as other:
        other.start()
        if (code := other.finish()) != run.done_code:
            trial.judge("o6", f"the directed run ended with exit code {code}: {other.last_words()}")
            return None
        found = other.found(events.FINDING, events.STATE_DAMAGED, events.QUARANTINED, events.FAULT, events.ROLLED_BACK)
        kinds = sorted({event["kind"] for event in found})
        trial.judge("o6", f"the directed run had trouble of its own: {kinds}" if kinds else "")
    return read_facts(RunFolder(place))
