"""The alerts of a run: what many steps show that no single one does. They are reported, and change nothing.

At log lines, the rules read what the line has on the host anyway, and a few more numbers: some elements of the
weights, the loss scale, and how much of each layer's gradient the training precision cannot hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ingot.events import read_events
from ingot.plugins.callback import StepNumbers
from ingot.plugins.piece import ParameterShard
from ingot.schema import events
from ingot.schema.alert import ACTIVATIONS, SATURATION, UNCHANGED, UNDERFLOW, Alert
from ingot.schema.run import RunConfig
from ingot.trainer.guard.gradient_range import GradientRange, LayerRange
from ingot.trainer.guard.trends import Trends
from ingot.trainer.guard.weights import WeightProbe

# Of optim.lr: below it, an update may be less than the spacing of float32 at the size of each element that is compared.
_SMALL = 1e-6
LOW_PRECISION = {"fp16": torch.float16, "bf16": torch.bfloat16}


class AlertWatch:
    """The alerts of all ranks, found on rank 0. An alert of the same kind comes once in guard.plateau_window steps.

    gradient_range: None where nothing is measured. loss_scale: returns it, in fp16. log: writes an event. is_first:
    this is rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        shards: Sequence[ParameterShard],
        gradient_range: GradientRange | None,
        loss_scale: Callable[[], float] | None,
        log: Callable[..., None],
        *,
        is_first: bool,
    ):
        self.guard, self._range, self._scale, self._log = config.guard, gradient_range, loss_scale, log
        self._peak, self._probe = config.optim.lr, WeightProbe(shards)
        trends = Trends(
            config.guard,
            clip_norm=config.optim.clip_norm,
            vocab_size=config.model.vocab_size,
            settled_after=config.settled_after,
        )
        self._trends = trends if is_first else None
        self._reported: dict[str, int] = {}

    def take_up(self, path: Path, step: int) -> None:
        """Continue after `step`, with the losses in the event log `path` since settings changed for the last time."""
        if self._trends is None or not step:
            return
        losses: dict[int, float] = {}
        for event in read_events(path, events.PROGRESS, events.SETTING_CHANGED):
            if event["kind"] == events.SETTING_CHANGED:
                losses.clear()
            elif event["loss"] is not None:  # of a trained step
                losses[event["step"]] = event["loss"]
        self._trends.take_up(sorted(losses.items()), step)

    def unchanged(self, line: Sequence[StepNumbers], lr: float) -> tuple[int, int]:
        """Return how many updates in a row changed no weights of this rank, and the step of the first. lr: of the last
        step; updates at the end of a schedule that falls to 0 are too small to count."""
        return self._probe.look(line if lr == 0 or lr >= _SMALL * self._peak else ())

    def line(
        self,
        line: Sequence[StepNumbers],
        lr: float,
        unchanged: np.ndarray,
        *,
        damaged: bool = False,
        measured: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> list[Alert]:
        """Return the alerts of a log line, on rank 0. Collective. lr: of its last step. unchanged: what the method of
        this name returned, [ranks, 2]. damaged: the numbers of this line are of no use. measured: (step, its numbers by
        name) of the measured layers (telemetry/layer_sizes.py)."""
        ranges = self._range.read() if self._range else []
        if self._trends is None or damaged:
            return []
        scale = self._scale() if self._scale else None
        found = [*self._trends.line(line, scale), *self._unchanged(line[-1].step, lr, unchanged)]
        finite = {numbers.step for numbers in line if numbers.is_finite}
        found += [alert for step, values in measured for alert in self._saturated(step, values)]
        for step, layers in ranges:
            self._log(
                events.GRADIENT_RANGE,
                step=step,
                loss_scale=scale,
                layers=[one.layer for one in layers],
                underflow=[round(one.underflow, 6) for one in layers],
                saturation=[round(one.saturation, 6) for one in layers],
            )
            if step in finite:  # an overflow is skipped, and the loss scale follows it
                found += self._out_of_range(step, layers)
        return [alert for alert in found if self._is_new(alert)]

    def _unchanged(self, step: int, lr: float, unchanged: np.ndarray) -> Iterator[Alert]:
        still = [rank for rank, (updates, _) in enumerate(unchanged) if updates >= self.guard.still_steps]
        if still:
            yield Alert(
                alert=UNCHANGED,
                step=step,
                since=int(unchanged[still, 1].min()),
                value=float(unchanged[still, 0].max()),
                limit=self.guard.still_steps,
                places=() if len(still) == len(unchanged) else tuple(f"rank {rank}" for rank in still),
                cause="the learning rate is 0" if lr == 0 else "",
            )

    def _out_of_range(self, step: int, layers: Sequence[LayerRange]) -> Iterator[Alert]:
        small = sorted((one.underflow, one.layer) for one in layers if one.underflow > self.guard.underflow_share)
        large = sorted((one.saturation, one.layer) for one in layers if one.saturation > self.guard.saturation_share)
        for kind, found, limit in (
            (UNDERFLOW, small, self.guard.underflow_share),
            (SATURATION, large, self.guard.saturation_share),
        ):
            if found:
                places = tuple(layer for _, layer in reversed(found))
                yield Alert(alert=kind, step=step, since=step, value=found[-1][0], limit=limit, places=places)

    def _saturated(self, step: int, values: Mapping[str, float]) -> Iterator[Alert]:
        """Yield the alert of layers whose hidden states the training precision can hardly hold."""
        shares = [(share, name) for name, share in values.items() if name.endswith("/activation_saturation")]
        limit = self.guard.saturation_share
        if large := sorted((share, f"blocks.{name.split('/')[1]}") for share, name in shares if share > limit):
            places = tuple(layer for _, layer in reversed(large))
            yield Alert(alert=ACTIVATIONS, step=step, since=step, value=large[-1][0], limit=limit, places=places)

    def _is_new(self, alert: Alert) -> bool:
        last = self._reported.get(alert.alert)
        every = max(self.guard.plateau_window, self.guard.loss_ratio_window)
        is_new = last is None or not last <= alert.step < last + every  # before it: the run went back
        if is_new:
            self._reported[alert.alert] = alert.step
        return is_new
