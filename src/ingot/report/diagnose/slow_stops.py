"""Causes between steps: saving, evaluating, starting again after faults. All of them are in every event log."""

import math
from collections.abc import Iterator

from ingot.report.diagnose.slow_case import Case, Cause
from ingot.report.diagnose.slow_remedies import Remedy
from ingot.theory.failures import PUBLISHED_RATES, daly_interval, first_order_overhead, job_mttf_seconds
from ingot.units import format_seconds


def checkpoint_stall(case: Case) -> Iterator[Cause]:
    found, every = case.measured, case.run.checkpoint.every_steps
    if not found.saves:
        return
    each = found.save_seconds_each
    evidence = f"{found.saves} checkpoints, one every {every} steps, each stops training for {format_seconds(each)}"
    yield Cause(
        name="checkpoint stall",
        seconds=found.save_seconds,
        source="measured",
        evidence=evidence,
        remedies=tuple(_other_interval(case, each, longer=True)),
    )


def restarts(case: Case) -> Iterator[Cause]:
    found = case.measured
    if not found.restarts:
        return
    causes = ", ".join(dict.fromkeys(incident.cause or "unknown" for incident in case.facts.incidents))
    evidence = f"{found.restarts} faults ({causes}); {found.redone_steps} steps were done again"
    mend = Remedy(
        text="mend what made ranks fail: ingot report has each fault",
        settings={},
        seconds=found.restart_seconds,
        reason="all of it, without faults",
    )
    shorter = _other_interval(case, found.save_seconds_each, longer=False) if found.saves else ()
    yield Cause(
        name="restarts",
        seconds=found.restart_seconds,
        source="measured",
        evidence=evidence,
        remedies=(mend, *shorter),
    )


def _other_interval(case: Case, stall: float, *, longer: bool) -> Iterator[Remedy]:
    """Daly's interval, if it lies on the wanted side of the run's own and costs less, lost work counted in."""
    step, every = case.measured.step_seconds, case.run.checkpoint.every_steps
    mttf, known = _mttf(case)
    wanted = max(min(round(daly_interval(mttf, stall) / step), case.run.train.steps), 1)
    now, then = (first_order_overhead(mttf, stall, steps * step) for steps in (every, wanted))
    if (wanted > every) != longer or wanted == every or then >= now:
        return
    yield Remedy(
        text=f"checkpoint.every_steps = {wanted}",
        settings={"checkpoint.every_steps": wanted},
        seconds=(now - then) * step,
        reason=f"Daly's interval for a fault every {format_seconds(mttf)} ({known}), work to do again counted in",
    )


def _mttf(case: Case) -> tuple[float, str]:
    """Mean seconds between faults, and how they are known."""
    if case.measured.restarts:
        return max(case.facts.active_seconds, 1.0) / case.measured.restarts, "as in this log"
    plan = case.facts.plan
    if plan and plan.outlook and plan.outlook.failures:
        return plan.outlook.days * 86_400 / plan.outlook.failures, "as the plan has it"
    rate = PUBLISHED_RATES["llama3"]
    nodes = math.ceil(case.run.parallel.world_size / (1 if case.on_cpu else rate.devices_per_node))
    return job_mttf_seconds(1 if case.on_cpu else nodes, rate.per_node_day), f"{rate.per_node_day:.2%} per node and day"


def evaluation(case: Case) -> Iterator[Cause]:
    found, every, tokens = case.measured, case.run.evaluate.every_steps, case.run.evaluate.max_tokens
    if not found.evaluations or not every:
        return
    remedy = Remedy(
        text=f"evaluate.every_steps = {2 * every} (or evaluate.max_tokens = {tokens // 2})",
        settings={"evaluate.every_steps": 2 * every},
        seconds=found.evaluate_seconds / 2,
        reason="half as often, or half as many tokens, takes half the time",
    )
    yield Cause(
        name="evaluation",
        seconds=found.evaluate_seconds,
        source="measured",
        evidence=f"{found.evaluations} evaluations of held-out text, one every {every} steps",
        remedies=(remedy,),
    )
