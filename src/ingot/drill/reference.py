"""The undisturbed run of a drill: how long a step takes, how many steps the copies have, and R. No torch."""

import itertools
import os
import shutil
from dataclasses import replace
from statistics import median

from ingot.drill.copied import DrillCopy, with_interval
from ingot.drill.oracles import o1
from ingot.drill.trial import DrilledRun, DrillOutput
from ingot.drill.undisturbed import REFERENCE, DrillReference, undisturbed
from ingot.errors import RunFailed, UsageError
from ingot.events import read_events
from ingot.machine.facts import usable_cores
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.train import most_ranks
from ingot.trainer.mesh.start import threads_per_rank
from ingot.units import format_seconds

LEAST_STEPS = 12
_PROBE_STEPS = 8
_FEWEST = 24  # steps of a copy
_COPY_SECONDS = 6.0  # of an undisturbed copy, besides its start


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
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(copy.root / "compiled"), **threads_of(copy.config)}
    copy = with_interval(copy, _PROBE_STEPS)
    probe = DrilledRun(run_file=copy.run_file, config=copy.config, until=_PROBE_STEPS, variables=variables)
    first, _ = undisturbed(probe, copy.root / "probe", output)
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
    facts, took = undisturbed(run, copy.root / REFERENCE, output)
    step = _step_seconds(RunFolder(copy.root / REFERENCE))
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


def threads_of(config: RunConfig) -> dict[str, str]:
    """Return the variable with the threads of a rank if all ranks are on one node. Copies on two have as many: bits
    depend on that."""
    name = "OMP_NUM_THREADS"
    return {name: os.environ.get(name) or str(threads_per_rank(most_ranks(config.parallel), usable_cores()))}


def _step_seconds(folder: RunFolder) -> float:
    """Return the median time of a step that follows another one in an attempt."""
    log = read_events(folder.events, events.STEP, events.RUN_STARTED)
    pairs = [(a, b) for a, b in itertools.pairwise(log) if a["kind"] == b["kind"] == events.STEP]
    return max(median([b["time"] - a["time"] for a, b in pairs]), 0.001)
