"""A run without a fault, trained for comparison. No torch."""

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ingot.drill.oracles import RunFacts, Verdicts, read_facts
from ingot.drill.trial import DrilledRun, DrillOutput, Trial
from ingot.errors import RunFailed

REFERENCE = "reference"  # the name of its folder
RECOMPUTED = "recomputed"  # the same, with kernels that always add in the same order


@dataclass(frozen=True)
class DrillReference:
    """The undisturbed run that all copies are compared with. seconds: that its command took."""

    run: DrilledRun
    facts: RunFacts
    seconds: float


def undisturbed(run: DrilledRun, root: Path, output: DrillOutput) -> tuple[RunFacts, float]:
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
