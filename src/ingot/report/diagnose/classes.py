"""The classes of slow runs: which kind of wait or work takes so much of a step that it names the run."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.observe.scalars import axis_title
from ingot.report.diagnose.evidence import Cause, MeasuredSteps
from ingot.report.diagnose.waits import exposed_axes

# Cause -> its class, and the least share of a step with which a run is of it. Some communication is exposed in every
# layout, so it names the run only where it is a third; a loader that is in time makes no step wait.
_COMMUNICATION = "exposed collectives"
_CLASSES = {
    _COMMUNICATION: ("communication-bound", 0.3),
    "data stall": ("data-bound", 0.05),
    "small micro-batches": ("small products", 0.1),
    "host and launches": ("host-bound", 0.1),
    "pipeline bubble": ("bubble-bound", 0.1),
    "straggler": ("held up by a straggler", 0.1),
}


@dataclass(frozen=True, kw_only=True)
class SlowClass:
    """A class of slow runs. cause: that of causes.py. share: of a step. least: the share from which a run is of it."""

    name: str
    cause: str
    share: float
    least: float


def classes_of(measured: MeasuredSteps, causes: Sequence[Cause]) -> tuple[SlowClass, ...]:
    """Return the classes of a run, the largest share first; none for a run whose devices compute."""
    found = []
    for cause in causes:
        name, least = _CLASSES.get(cause.name, ("", 0.0))
        share = cause.seconds / measured.step_seconds
        if name and share >= least:
            if cause.name == _COMMUNICATION and (axes := exposed_axes(measured.exposed, measured.step_seconds)):
                name = f"{name} by {axis_title(axes[0])}"
            found.append(SlowClass(name=name, cause=cause.name, share=share, least=least))
    return tuple(sorted(found, key=lambda one: -one.share))
