"""Moves the constants of the time model from their priors as far as published steps ask for it.

Regularised Gauss-Newton in the logarithms of the constants, on the logarithms of step times: what is minimised is, with
r the residual of a row and k a constant,

    sum over families of  mean of weight(r) (r / NOISE)^2 x FAMILY_ROWS   +   sum of ((ln k - ln prior) / sigma)^2

so that every family weighs as FAMILY_ROWS independent rows do, however many it has: rows of one source share what is
wrong about it. Weights are Huber's (1964): beyond NOISE a row pulls no harder. The derivatives are taken once, by
finite differences at the priors, and kept (the chord method): residuals are always the model's own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ingot.planner.predict.time.constants import PRIOR, Constants
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.published.published import Subject

# Of one row, in logarithms: what is left of measurements that the model has seen is about 10%.
NOISE = 0.1
FAMILY_ROWS = 2
_DIFFERENCE = 0.05  # of a logarithm, for derivatives
_ROUNDS = 4
# Quantiles of the band that a plan prints: 80% of the residuals of families that a fit had not seen lie in it.
BAND = 0.1, 0.9

NAMES = tuple(f.name for f in fields(Constants))


def timed(subjects: Sequence[Subject]) -> list[Subject]:
    """Those with a measured step, on hardware that has a rate."""
    known = (s for s in subjects if s.measured.step_seconds is not None)
    return [s for s in known if s.cluster.peak_flops.get(s.run.train.precision)]


def residuals(subjects: Sequence[Subject], constants: Constants) -> np.ndarray:
    """ln(measured / predicted) of each."""
    return np.array([_residual(subject, constants) for subject in subjects])


def _residual(subject: Subject, constants: Constants) -> float:
    found = estimate(subject.run, subject.cluster, subject.software, constants)
    assert found is not None and subject.measured.step_seconds is not None
    return float(np.log(subject.measured.step_seconds / (found.seconds * subject.scale)))


def _logs(constants: Constants) -> np.ndarray:
    return np.log([getattr(constants, name) for name in NAMES])


def _constants(logs: np.ndarray) -> Constants:
    """Within their bounds."""
    limits = {f.name: f.metadata for f in fields(Constants)}
    values = zip(NAMES, np.exp(logs), strict=True)
    return Constants(**{n: float(np.clip(v, limits[n]["low"], limits[n]["high"])) for n, v in values})


@dataclass(frozen=True)
class Fit:
    """subjects: `timed` ones. Derivatives are computed once and serve every family that is left out."""

    subjects: tuple[Subject, ...]

    @cached_property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(subject.family for subject in self.subjects))

    @cached_property
    def _derivatives(self) -> np.ndarray:
        """Of the residuals by the logarithm of each constant, at the priors."""
        base, start = residuals(self.subjects, PRIOR), _logs(PRIOR)
        columns = []
        for index in range(len(NAMES)):
            moved = start.copy()
            moved[index] -= _DIFFERENCE
            constants = _constants(moved)
            change = _logs(constants)[index] - start[index]
            columns.append((residuals(self.subjects, constants) - base) / change)
        return np.stack(columns, axis=1)

    def all(self) -> Constants:
        return self._fit(np.ones(len(self.subjects), dtype=bool))

    def without(self, family: str) -> Constants:
        return self._fit(np.array([subject.family != family for subject in self.subjects]))

    def _fit(self, used: np.ndarray) -> Constants:
        own = [subject for subject, use in zip(self.subjects, used, strict=True) if use]
        if not own:
            return PRIOR
        rows = Counter(subject.family for subject in own)
        weight = np.array([FAMILY_ROWS / rows[subject.family] for subject in own]) / NOISE**2
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
        """By family: the constants fitted to all others."""
        return {family: self.without(family) for family in self.families}

    def band(self, left_out: dict[str, Constants]) -> tuple[float, float]:
        """Quantiles of measured over predicted, of families that were left out, each weighing alike."""
        ratios, weights = [], []
        for family, constants in left_out.items():
            own = [subject for subject in self.subjects if subject.family == family]
            ratios += list(np.exp(residuals(own, constants)))
            weights += [1 / len(own)] * len(own)
        order = np.argsort(ratios)
        reached = np.cumsum(np.array(weights)[order]) / sum(weights)
        low, high = (float(np.array(ratios)[order][np.searchsorted(reached, share)]) for share in BAND)
        return low, high


def fit(subjects: Sequence[Subject]) -> Constants:
    """To all `subjects` with a measured step."""
    return Fit(tuple(timed(subjects))).all()
