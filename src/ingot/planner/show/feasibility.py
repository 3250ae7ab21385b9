"""The feasibility of a run as text, for the first lines of `ingot check`."""

from collections.abc import Iterator

from ingot.planner.run.advice import degrees
from ingot.planner.run.feasibility import Feasibility
from ingot.planner.show.plans import labelled
from ingot.units import format_bytes, format_seconds

_KEPT_TOGETHER = "\u00a0"  # a space at which no line is broken


def feasibility_lines(found: Feasibility) -> Iterator[str]:
    """Yield the lines: does the run fit, how long is a step, what does it wait for, what would help most."""
    yield from labelled("fits", _memory(found))
    yield from labelled("step", _time(found))
    waits = ", ".join(f"{line} {format_seconds(seconds)}" for line, seconds in found.exposed)
    if found.plan.step_seconds and found.run.parallel.world_size > 1:
        yield from labelled("exposed", f"communication per step that nothing hides: {waits or 'none'}")
    yield from (line.replace(_KEPT_TOGETHER, " ") for line in labelled("change", _change(found)))


def _memory(found: Feasibility) -> str:
    if not found.has_devices:
        cluster = found.plan.cluster
        return (
            f"no: {found.run.parallel.world_size:,} ranks need as many devices, {cluster.name} has {cluster.devices:,}"
        )
    needed, there = found.plan.total_memory_bytes, found.available_bytes
    kind, size = found.largest
    margin = f"{format_bytes(abs(there - needed))} {'left' if found.fits else 'too much'}"
    shares = f"{format_bytes(needed)} of {format_bytes(there)} on the fullest rank, {margin}"
    return f"{'yes' if found.fits else 'no'}: {shares}; most of it is {kind}, {format_bytes(size)}"


def _time(found: Feasibility) -> str:
    plan = found.plan
    if not plan.step_seconds:
        return "unknown: no speed of this machine is known; ingot doctor --bench measures it"
    band = f" ({format_seconds(plan.step_seconds_low)} to {format_seconds(plan.step_seconds_high)})"
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu else ""
    bubble = f"; pipeline ranks wait {plan.bubble:.1%} of it" if plan.bubble else ""
    return f"{format_seconds(plan.step_seconds)}{band if plan.step_seconds_high else ''}{mfu}{bubble}"


def _change(found: Feasibility) -> str:
    if not found.has_devices:
        return f"lower {degrees(found.run.parallel)}, or use a larger cluster"
    if found.fits and not found.plan.step_seconds:
        return "none is proposed: what helps most depends on the speed, which ingot doctor --bench measures"
    if not found.change:
        return "no change of a single setting is " + ("faster and fits" if found.fits else "enough to make it fit")
    after, now = found.change.candidate, found.plan.step_seconds
    time = ""
    if now and after.step_seconds:
        time = f"{format_seconds(after.step_seconds)} per step ({after.step_seconds / now - 1:+.0%}), "
    fits = "" if after.memory_bytes <= found.available_bytes else ", still too much"
    settings = " ".join(f"--set{_KEPT_TOGETHER}{override}" for override in found.overrides)
    return f"what helps most: {settings}: {time}{format_bytes(after.memory_bytes)}{fits}"
