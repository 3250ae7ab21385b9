"""The fit of the time model's constants to published step times; constants stay near their priors.

The method is regularized Gauss-Newton in the logarithms of the constants, on the logarithms of step times. With r the
residual of a row and k a constant, the fit minimizes

    sum over families of  mean of weight(r) (r / NOISE)^2 x FAMILY_ROWS   +   sum of ((ln k - ln prior) / sigma)^2

Each family (the rows of one source) weighs as much as FAMILY_ROWS independent rows, however many rows it has, because
the rows of one source share its errors. Weights are Huber's (1964): beyond NOISE, the pull of a row no longer grows.
Derivatives are computed once, by finite differences at the priors, and reused in all rounds (the chord method);
residuals are recomputed with the full time model in each round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ingot.planner.predict.time.constants import PRIOR, Constants
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.published.run import PublishedRun

# Noise of one row's step time, in logarithms: the rows that the fit uses have residuals of about 10%.
NOISE = 0.1
FAMILY_ROWS = 2
_DIFFERENCE = 0.05  # finite difference for derivatives, in the logarithm of a constant
_ROUNDS = 4
# Quantiles of the error band that a plan prints. Each family's residuals are those of a fit without this family; the
# band holds 80% of them.
ERROR_BAND = 0.1, 0.9

NAMES = tuple(f.name for f in fields(Constants))


def timed(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the runs that have a measured step time, on hardware with a known peak rate at the run's precision."""
    known = (s for s in runs if s.measured.step_seconds is not None)
    return [s for s in known if s.cluster.peak_flops.get(s.run.train.precision)]


def residuals(runs: Sequence[PublishedRun], constants: Constants) -> np.ndarray:
    """Return ln(measured / predicted) of each run."""
    return np.array([_residual(run, constants) for run in runs])


def _residual(run: PublishedRun, constants: Constants) -> float:
    found = estimate(run.run, run.cluster, run.software, constants)
    assert found is not None and run.measured.step_seconds is not None
    return float(np.log(run.measured.step_seconds / (found.seconds * run.scale)))


def _logs(constants: Constants) -> np.ndarray:
    return np.log([getattr(constants, name) for name in NAMES])


def _constants(logs: np.ndarray) -> Constants:
    """Return the constants with the logarithms `logs`, clipped to their bounds."""
    limits = {f.name: f.metadata for f in fields(Constants)}
    values = zip(NAMES, np.exp(logs), strict=True)
    return Constants(**{n: float(np.clip(v, limits[n]["low"], limits[n]["high"])) for n, v in values})


@dataclass(frozen=True)
class Fit:
    """Fits to runs that `timed` returned. The derivatives are computed once, and used for all fits: to all runs, and to
    the runs without each family."""

    runs: tuple[PublishedRun, ...]

    @cached_property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.family for run in self.runs))

    @cached_property
    def _derivatives(self) -> np.ndarray:
        """The derivatives of the residuals by the logarithms of the constants, at the priors: [runs, constants]."""
        base, start = residuals(self.runs, PRIOR), _logs(PRIOR)
        columns = []
        for index in range(len(NAMES)):
            moved = start.copy()
            moved[index] -= _DIFFERENCE
            constants = _constants(moved)
            change = _logs(constants)[index] - start[index]
            columns.append((residuals(self.runs, constants) - base) / change)
        return np.stack(columns, axis=1)

    def all(self) -> Constants:
        return self._fit(np.ones(len(self.runs), dtype=bool))

    def without(self, family: str) -> Constants:
        return self._fit(np.array([run.family != family for run in self.runs]))

    def _fit(self, used: np.ndarray) -> Constants:
        own = [run for run, use in zip(self.runs, used, strict=True) if use]
        if not own:
            return PRIOR
        rows = Counter(run.family for run in own)
        weight = np.array([FAMILY_ROWS / rows[run.family] for run in own]) / NOISE**2
        prior, slope = _logs(PRIOR), self._derivatives[used]
        tight = 1 / np.array([f.metadata["sigma"] for f in fields(Constants)]) ** 2
        logs = prior
        for _ in range(_ROUNDS):
            off = residuals(own, _constants(logs))
            pull = weight * np.minimum(1.0, NOISE / np.maximum(np.abs(off), 1e-9))
            hessian = slope.T @ (pull[:, None] * slope) + np.diag(tight)
            gradient = slope.T @ (pull * off) + tight * (logs - prior)
            logs = _logs(_constants(logs - np.linalg.solve(hessian, gradient)))
        return _constants(logs)

    def left_out(self) -> dict[str, Constants]:
        """Return, for each family, the constants fitted to all other families."""
        return {family: self.without(family) for family in self.families}

    def error_band(self, left_out: dict[str, Constants]) -> tuple[float, float]:
        """Return the ERROR_BAND quantiles of measured / predicted step time. Families have equal weight.

        left_out: the constants with which each family is predicted, fitted to the other families.
        """
        ratios, weights = [], []
        for family, constants in left_out.items():
            own = [run for run in self.runs if run.family == family]
            ratios += list(np.exp(residuals(own, constants)))
            weights += [1 / len(own)] * len(own)
        order = np.argsort(ratios)
        reached = np.cumsum(np.array(weights)[order]) / sum(weights)
        low, high = (float(np.array(ratios)[order][np.searchsorted(reached, share)]) for share in ERROR_BAND)
        return low, high


def fit(runs: Sequence[PublishedRun]) -> Constants:
    """Return the constants fitted to all runs with a measured step."""
    return Fit(tuple(timed(runs))).all()
