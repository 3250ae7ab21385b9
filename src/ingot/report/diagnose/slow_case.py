"""A cause of slow steps, and what causes are told from."""

from dataclasses import dataclass
from typing import Literal

from ingot.report.diagnose.slow_log import Measured
from ingot.report.diagnose.slow_remedies import Prospect, Remedy
from ingot.report.facts import Facts
from ingot.schema.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Cause:
    """seconds: per step. source: whether they were measured, or are the planner's."""

    name: str
    seconds: float
    source: Literal["measured", "planned"]
    evidence: str
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class Case:
    """prospect: None without a plan for the machine that the run ran on."""

    facts: Facts
    measured: Measured
    run: RunConfig
    prospect: Prospect | None

    @property
    def on_cpu(self) -> bool:
        return self.measured.device == "cpu"

    @property
    def pace(self) -> float:
        """Measured seconds of a step for one planned; 0 without a plan."""
        prospect = self.prospect
        return self.measured.step_seconds / prospect.seconds if prospect and prospect.seconds else 0.0

    def planned(self, part: str) -> tuple[float, str] | None:
        """Seconds of a part of the planned step, in the measure of the real one, and its formula."""
        term = self.prospect.terms.get(part) if self.prospect else None
        return (term.value * self.pace, term.formula) if term else None
