"""Alerts from the losses, gradient norms and loss scales of many steps, at log lines, on the host.

Ratio rules are the ones that many know: a loss of twice its rolling mean, a norm of three times the clip limit. A
plateau needs more: late in a healthy run, the loss falls by less than one percent in any window of a fixed length. A
power law falls by the same part of itself whenever the number of steps doubles, so the window is the last half of all
steps, and its two halves are compared in standard errors of their medians. Where those could not show even half of the
fall of the window before, there is no alert.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import numpy as np

from ingot.plugins.callback import StepNumbers
from ingot.schema.alert import EXPLOSION, LOSS_RATIO, LOSS_SCALE, PLATEAU, UNIFORM, VANISHED, Alert
from ingot.schema.guard import Guard

_BLOCKS = 1024  # as many numbers represent the losses of a run, however long it is
_GROWTH = 1.25  # a plateau is looked for again when the run has this many times the steps
_MEDIAN_ERROR = math.sqrt(math.pi / 2)  # the standard error of a median, by that of a mean, of normal values
_NOISE = 1.4826 / math.sqrt(2)  # as in step_judge.py: from the median absolute deviation of differences


class Trends:
    """The trends of a run.

    clip_norm: the limit of the gradient norm, 0: none. vocab_size: of the model. settled_after: up to this step, a
    large norm is no explosion: in and after the warm-up, norms of healthy runs are several times their median, too.
    """

    def __init__(self, guard: Guard, *, clip_norm: float, vocab_size: int, settled_after: int = 0):
        self.guard, self._settled_after = guard, settled_after
        self._norm_limit = guard.norm_ratio * clip_norm
        self._guess = math.log(vocab_size) if vocab_size > 1 else math.inf
        self._curve = _Curve()
        self._forget()

    def _forget(self, step: int = 0) -> None:
        """Begin again after `step`; the curve stays up to there."""
        self._last, self._seen = step, 0
        self._losses: deque[float] = deque(maxlen=self.guard.loss_ratio_window)
        self._norms: deque[float] = deque(maxlen=self.guard.loss_ratio_window)
        self._scales: deque[tuple[int, float]] = deque()
        self._vanished = self._vanished_since = 0
        self._next_plateau = self._next_guess = 0
        self._curve.cut(step)

    def take_up(self, losses: Iterable[tuple[int, float]], step: int) -> None:
        """Continue after `step`, with (step, loss) of earlier steps in order, not necessarily all."""
        for at, loss in losses:
            if at <= step and math.isfinite(loss):
                self._curve.add(at, loss)
        self._forget(step)

    def line(self, line: Sequence[StepNumbers], scale: float | None = None) -> list[Alert]:
        """Take in the steps of a log line, and return what they show. scale: the loss scale after them, in fp16."""
        if line[0].step <= self._last:  # the run went back
            self._forget(line[0].step - 1)
        found: dict[str, Alert] = {}
        enough = len(self._norms) >= self.guard.ready
        typical = median(self._norms) if enough else 0.0
        for numbers in line:
            if not numbers.passed and numbers.is_finite:
                for alert in (self._loss(numbers), self._norm(numbers, typical)):
                    if alert is not None:
                        found.setdefault(alert.alert, alert)
        self._last, self._seen = line[-1].step, self._seen + len(line)
        for alert in (self._plateau(), self._uniform_guess(), self._scale(scale)):
            if alert is not None:
                found[alert.alert] = alert
        return list(found.values())

    def _loss(self, numbers: StepNumbers) -> Alert | None:
        ratio = numbers.loss / fmean(self._losses) if len(self._losses) >= self.guard.ready else 0.0
        if not numbers.skipped:
            self._losses.append(max(numbers.loss, 1e-30))
            self._curve.add(numbers.step, numbers.loss)
        if not self.guard.loss_ratio or ratio <= self.guard.loss_ratio:
            return None
        return _alert(LOSS_RATIO, numbers.step, numbers.step, ratio, self.guard.loss_ratio)

    def _norm(self, numbers: StepNumbers, typical: float) -> Alert | None:
        """typical: the median of the norms up to the line before; 0: there are too few."""
        step, norm = numbers.step, numbers.grad_norm
        if norm == 0 or norm < self.guard.dead_ratio * typical:
            self._vanished += 1
            self._vanished_since = self._vanished_since or step
            if self._vanished < self.guard.still_steps:
                return None
            part = norm / typical if typical else 0.0
            return _alert(VANISHED, step, self._vanished_since, part, self.guard.dead_ratio)
        self._vanished = self._vanished_since = 0
        if not numbers.skipped:
            self._norms.append(norm)
        limit = max(self._norm_limit, self.guard.norm_ratio * typical)  # the norm of some runs is always that large
        if not self._norm_limit or not typical or norm <= limit or step <= self._settled_after:
            return None
        return _alert(EXPLOSION, step, step, norm, limit)

    def _plateau(self) -> Alert | None:
        guard, step = self.guard, self._last
        if not guard.plateau_window or step < max(2 * guard.plateau_window, self._next_plateau):
            return None
        self._next_plateau = max(step + guard.plateau_window // 2, int(step * _GROWTH))
        now, before = self._curve.fall(step // 2, step), self._curve.fall(step // 4, step // 2)
        if now is None:
            return None
        # Half of the fall of the window before, or of what the ratio asks for, would be twice as clear as no fall is.
        expected = max(before.fall if before else 0.0, (1 - guard.plateau_ratio) * now.first) / 2
        falls = now.second < guard.plateau_ratio * now.first or now.fall > guard.plateau_sigmas * now.error
        if falls or expected < 2 * guard.plateau_sigmas * now.error:
            return None
        return _alert(PLATEAU, step, step // 2 + 1, now.second / now.first, guard.plateau_ratio)

    def _uniform_guess(self) -> Alert | None:
        window, step = self.guard.plateau_window, self._last
        if not window or step < max(window, self._next_guess):
            return None
        self._next_guess = step + window
        losses = self._curve.since(step - window)
        part = float(np.median(losses)) / self._guess if len(losses) else 0.0
        if part < self.guard.plateau_ratio:
            return None
        return _alert(UNIFORM, step, step - window + 1, part, self.guard.plateau_ratio)

    def _scale(self, scale: float | None) -> Alert | None:
        guard, step = self.guard, self._last
        if scale is None or self._seen < guard.ready:  # the first steps look for the scale
            return None
        self._scales.append((step, scale))
        while self._scales[0][0] <= step - guard.scale_window:
            self._scales.popleft()
        largest = max(one for _, one in self._scales)
        limit = max(guard.scale_floor, largest / 2**guard.scale_halvings)
        if scale < guard.scale_floor or scale <= largest / 2**guard.scale_halvings:
            since = next(at for at, one in self._scales if one == largest)
            return _alert(LOSS_SCALE, step, since, scale, limit)
        return None


def _alert(kind: str, step: int, since: int, value: float, limit: float) -> Alert:
    return Alert(alert=kind, step=step, since=since, value=value, limit=limit)


class _Fall:
    """The medians of the two halves of a window, and the standard error of their difference."""

    def __init__(self, first: np.ndarray, second: np.ndarray):
        self.first, self.second = float(np.median(first)), float(np.median(second))
        self.fall = self.first - self.second
        changes = np.concatenate([np.diff(first), np.diff(second)])
        noise = _NOISE * float(np.median(np.abs(changes - np.median(changes))))
        self.error = _MEDIAN_ERROR * noise * math.sqrt(1 / len(first) + 1 / len(second))


class _Curve:
    """The losses of a run as means of blocks of equally many steps; a block has twice as many when there are too many
    blocks."""

    def __init__(self) -> None:
        self._last, self._size, self._open = 0, 1, list[float]()
        self._steps, self._means = list[int](), list[float]()  # the last step of each block, and its mean

    def add(self, step: int, loss: float) -> None:
        """Take in a step. One that was there before replaces it, and all after it."""
        if step <= self._last:
            self.cut(step - 1)
        self._last = step
        self._open.append(loss)
        if len(self._open) < self._size:
            return
        self._steps.append(step)
        self._means.append(fmean(self._open))
        self._open.clear()
        if len(self._steps) == _BLOCKS:
            self._size *= 2
            self._steps = self._steps[1::2]
            self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]

    def cut(self, step: int) -> None:
        """Drop what comes after `step`."""
        if step >= self._last:
            return
        self._last = step
        self._open.clear()
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._means.pop()

    def since(self, step: int) -> np.ndarray:
        """Return the means of the blocks after `step`."""
        return np.asarray(self._means[bisect_right(self._steps, step) :])

    def fall(self, first: int, last: int) -> _Fall | None:
        """Return the fall between the halves of the steps first+1..last; None if too many of them are not known."""
        begin, middle, end = (bisect_right(self._steps, step) for step in (first, (first + last) // 2, last))
        halves = np.asarray(self._means[begin:middle]), np.asarray(self._means[middle:end])
        is_whole = begin < end and self._steps[begin] <= first + (last - first) // 4
        return _Fall(*halves) if is_whole and min(map(len, halves)) >= 4 else None
