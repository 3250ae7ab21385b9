"""The settings of the guard: each step judged before its update, and damage of the state found (docs/guard.md)."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ingot.ranges import Factor, Positive, PositiveSteps, Queue, Range, Seconds, Share, Steps

Window = Annotated[int, Range(8, 1024)]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The guard of a run: which steps are spikes, and how training goes on after them. docs/guard.md has the source of
    each figure.

    preset: "off": only updates whose loss or gradient is not finite are skipped. "watch": spikes are reported. "guard":
      their updates are skipped, and after several in a row the run goes back, trains the steps again, passes their
      data, passes the step before them too, and lowers the learning rate, one after the other, until training is calm;
      a level that stays is accepted at last. "strict": in place of the last three, the run stops for a person.
    window: the healthy steps whose noise is the unit. level: the last of them, whose median a step is compared with.
      ready: fewer healthy steps are no basis for a spike.
    settle_steps: after the warm-up of the learning rate, so many steps are not judged by their size.
    sigmas: the deviations above the median that are a spike, of the loss or of the logarithm of the gradient norm.
    loss_spread, norm_spread: the smallest deviation, in nats and as a logarithm: a window may be very calm.
    corruption_factor: a gradient norm this many times the median, with a loss that is no spike, is suspected
      corruption.
    in_a_row: so many skipped steps, one after the other, make the run go back. skip_share: so does this part of the
      last `calm_steps` steps, and at least `in_a_row`, wherever they are. calm_steps: new trouble within these steps of
      the last one is the same trouble: the next measure is taken.
    proven_steps: a checkpoint has to have so many steps of training after it before the trouble, or the run goes back
      to an older one: what harmed the weights need not show at once. Retention keeps one that has them.
    lr_factor, clip_factor, lr_steps: by which factors the learning rate and the limit of the gradient norm
      (optim.clip_norm) are lowered, and for how many steps.
    retry: whether a step with a finding is computed once more, from the same batch and weights, before its update is
      skipped: "on", "off", or "auto": with preset "strict". The host waits for the device in each step then.
    ask_seconds: before the run stops for a person, it waits so long for an answer (`ingot guard RUN --take MEASURE`).
    hash_every: every so many steps, weights and optimizer state are hashed, and the hashes of copies of the same state
      are compared; 0: never, and a checkpoint is saved without it (trainer/integrity).
    max_damages: so often may the run go back because of damage, with all its attempts; 0: without a limit.
    exploded_ratio: a run ends at a log line whose last loss is more than this many times that of a uniform guess,
      ln(vocabulary), with every preset: such weights are not saved; 0: no such limit.
    sanity_every: before a full save this many steps after the last one, a fixed batch of held-out text is scored; 0:
      never. sanity_rise: if its loss rose by more than this, in nats per token, the checkpoint is suspect. sanity_gap:
      a batch whose loss is so many nats per token above that of the training batches is not like them, and judges no
      checkpoint; 0: they are not compared.
    recompute_every: in one of so many steps, each rank computes the gradients of another data rank too, and their
      hashes are compared; 0: never. Needs hash_every, and kernels that always add in the same order.

    The rest are alerts (trainer/guard/alerts.py), which are reported and change nothing; none with preset "off".

    loss_ratio, loss_ratio_window: a loss this many times the mean of so many steps before; 0: no such alert.
    norm_ratio: a gradient norm this many times both optim.clip_norm and its median; 0: no such alert.
    plateau_window: the fewest steps of a plateau, and an alert of a kind comes once in so many; 0: plateaus are not
      looked for. plateau_ratio: a plateau has this part of the loss before and more, in its later half; and a loss of
      this part of a uniform guess is none. plateau_sigmas: a fall of fewer standard errors is none.
    still_steps: so many updates without a change of the weights, or gradients that vanished, are an alert.
    dead_ratio: a gradient norm below this part of its median has vanished.
    scale_floor: the smallest loss scale of fp16 without an alert. scale_halvings, scale_window: so many halvings within
      so many steps are one.
    precision_every: every so many steps of a run in fp16 or bf16, the range of the gradient is measured by layer; 0:
      never. underflow_share, saturation_share: the shares of a layer that are too small, or nearly too large, for the
      training precision.
    """

    preset: Literal["off", "watch", "guard", "strict"] = "guard"
    window: Window = 128
    level: PositiveSteps = 16
    ready: PositiveSteps = 32
    settle_steps: Steps = 128
    sigmas: Positive = 6.0
    loss_spread: Positive = 0.02
    norm_spread: Positive = 0.15
    corruption_factor: Factor = 10.0
    in_a_row: PositiveSteps = 3
    skip_share: Share = 0.1
    calm_steps: PositiveSteps = 128
    proven_steps: Steps = 8
    lr_factor: Share = 0.5
    clip_factor: Share = 0.5
    lr_steps: PositiveSteps = 200
    retry: Literal["auto", "on", "off"] = "auto"
    ask_seconds: Seconds = 0.0
    hash_every: Steps = 20
    max_damages: Queue = 16
    exploded_ratio: Factor = 2.0
    sanity_every: Steps = 100
    sanity_rise: Positive = 0.3
    sanity_gap: Factor = 2.0
    recompute_every: Steps = 0
    loss_ratio: Factor = 2.0
    loss_ratio_window: Window = 100
    norm_ratio: Factor = 3.0
    plateau_window: Steps = 1000
    plateau_ratio: Share = 0.99
    plateau_sigmas: Positive = 2.5
    still_steps: PositiveSteps = 10
    dead_ratio: Share = 0.001
    scale_floor: Positive = 1.0
    scale_halvings: PositiveSteps = 6
    scale_window: PositiveSteps = 1000
    precision_every: Steps = 100
    underflow_share: Share = 0.5
    saturation_share: Share = 0.01

    @property
    def watches(self) -> bool:
        """True if steps are judged, and alerts are looked for."""
        return self.preset != "off"

    @property
    def acts(self) -> bool:
        """True if updates of spikes are skipped."""
        return self.preset in ("guard", "strict")

    @property
    def retries(self) -> bool:
        """True if a step with a finding is computed once more before its update is skipped."""
        return self.acts and (self.retry == "on" or (self.retry == "auto" and self.preset == "strict"))

    def loss_limit(self, vocab_size: int) -> float:
        """Return the loss in nats per token above which weights are useless; infinite if there is no such limit.
        vocab_size: of the model; below 2, its loss has no scale."""
        return self.exploded_ratio * math.log(vocab_size) if self.exploded_ratio and vocab_size > 1 else math.inf

    @property
    def most_skipped(self) -> int:
        """The number of skipped steps among the last `calm_steps` that makes the run go back."""
        return max(self.in_a_row, math.ceil(self.skip_share * self.calm_steps))

    def problems(self):
        if self.ready > self.window:
            yield "ready", f"is {self.ready}, but the window has {self.window} steps (guard.window)"
        if self.retry == "on" and not self.acts:
            yield "retry", f'is "on", but preset = "{self.preset}" skips no update; use "guard" or "strict"'
        if self.in_a_row < 2:
            yield "in_a_row", "is 1: a single bad batch needs no return to a checkpoint; use 2 or more"
        if self.lr_factor == 0:
            yield "lr_factor", "is 0: nothing would be learned in these steps"
        if self.clip_factor == 0:
            yield "clip_factor", "is 0, which would clip nothing; 1 keeps the limit"
        if self.recompute_every and not self.hash_every:
            yield "recompute_every", f"is {self.recompute_every}, but hash_every is 0: the hashes are compared together"
        if self.corruption_factor <= 1:
            yield "corruption_factor", f"is {self.corruption_factor:g}, must be above 1"
        if 0 < self.exploded_ratio <= 1:
            yield "exploded_ratio", f"is {self.exploded_ratio:g}, must be above 1; or 0: no such limit"
        if 0 < self.loss_ratio <= 1:
            yield "loss_ratio", f"is {self.loss_ratio:g}, must be above 1; or 0: no such alert"
        if 0 < self.plateau_window < 8:
            yield "plateau_window", f"is {self.plateau_window}, must be 8 or more; or 0: no such alert"
