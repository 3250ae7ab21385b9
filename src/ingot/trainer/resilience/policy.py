"""What the loop asks about every step: keep its update, and what to do next.

A policy sees a step twice. Before the update, `veto` decides on the device, without waiting, whether the update is
skipped. After it, `verdict` says how to go on; the facts stay on the device until a policy reads them. All ranks must
reach the same verdict, so a rule uses what is the same on all of them: the gradient norm, and what was read.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ingot.errors import RunFailed
from ingot.schema.run_folder import RunFolder
from ingot.trainer.mesh.collectives import any_rank, mean_over_ranks

VETOES_IN_A_ROW = 50  # a loss scale halves with each: after 50, 2^-34 of 2^16 is left, and the fault lies elsewhere


class Verdict(enum.Enum):
    """SKIP: this step's update was vetoed, go on and say so. ROLL_BACK: go on from the newest checkpoint.

    STOP: save and end, as on request.
    """

    CONTINUE = enum.auto()
    SKIP = enum.auto()
    ROLL_BACK = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True)
class Reading:
    """The facts of a step as numbers, the same on every rank. loss: nats per token, mean over the global batch."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Facts:
    """A step as it is known without waiting for it. Scalars on the device.

    loss: of the tokens that this rank reads, known on ranks that hold the last pipeline stage. grad_norm: global,
    before clipping. skipped: whether the update was vetoed; None if nothing can be.
    readers: the global ranks whose losses make the loss of the step, each of other tokens and all of equally many;
    None: all.
    experts: float64 [L, E + 3], what the routers of the whole batch saw (parallel/balance.py); None without experts.
    line: at a log line, all steps since the line before, which were read for it; empty between lines.
    """

    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor | None = None
    readers: Sequence[int] | None = None
    line: Sequence[Reading] = ()
    experts: Tensor | None = None

    def read(self) -> Reading:
        """The host waits for the step, unless it was read for a log line. Collective."""
        return self.line[-1] if self.line else read_steps([self])[0]


def read_steps(steps: Sequence[Facts]) -> list[Reading]:
    """The numbers of `steps`: one transfer from the device, which the host waits for, and one collective."""
    kept = torch.zeros((), dtype=torch.bool, device=steps[0].loss.device)
    columns = (
        [s.loss for s in steps],
        [s.grad_norm for s in steps],
        [kept if s.skipped is None else s.skipped.reshape(()) for s in steps],
    )
    # With parameters on the host the norm is there, too.
    facts_of_steps = [torch.stack(column).double().to(kept.device) for column in columns]
    losses, norms, skipped = torch.stack(facts_of_steps).cpu().numpy()
    losses = mean_over_ranks(losses, steps[0].readers)
    return [
        Reading(facts.step, float(loss), float(norm), bool(was_skipped))
        for facts, loss, norm, was_skipped in zip(steps, losses, norms, skipped, strict=True)
    ]


class Policy(Protocol):
    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Whether to skip the update of this step: a bool scalar on the device, or None for never. Must not wait.

        Called on every rank, after gradients were reduced and before the update. grad_norm is the same on all ranks,
        loss is not (Facts); the answer must be.
        """
        ...

    def verdict(self, facts: Facts) -> Verdict:
        """What to do after this step; any other than CONTINUE is acted on at once. The same on every rank.

        Called on every rank after every step. Nothing is saved before it was heard. Raises RunFailed to give up.
        """
        ...


class Unwatched:
    """Goes on whatever happens: for benchmarks and traces, which have no run folder."""

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        return None

    def verdict(self, facts: Facts) -> Verdict:
        return Verdict.CONTINUE


class DefaultPolicy:
    """Stop on request; give up at the first loss or gradient norm that is not finite. Reads at log lines only.

    scaled_loss: with a dynamic loss scale (fp16), gradients overflow now and then: such a step is skipped, and only
    VETOES_IN_A_ROW of them in a row are a failure.
    """

    def __init__(self, folder: RunFolder, *, scaled_loss: bool = False):
        self.folder, self.scaled_loss = folder, scaled_loss
        self._vetoes = 0  # in a row, up to the last line

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        return ~torch.isfinite(grad_norm) if self.scaled_loss else None

    def verdict(self, facts: Facts) -> Verdict:
        if not facts.line:
            return Verdict.CONTINUE
        for reading in facts.line:
            self._judge(reading)
        # Ranks that read the file at different moments agree.
        stop = any_rank(self.folder.stop_request.exists())
        return Verdict.STOP if stop else Verdict.CONTINUE

    def _judge(self, reading: Reading) -> None:
        """Raise RunFailed for a step after which nothing may be saved."""
        self._vetoes = self._vetoes + 1 if reading.skipped else 0
        values = f"loss {reading.loss} and gradient norm {reading.grad_norm} at step {reading.step}"
        if self._vetoes >= VETOES_IN_A_ROW:
            raise RunFailed(
                f"{values}, the {self._vetoes}th step in a row that was skipped",
                rule="gradients that stay not finite at every loss scale are not an overflow",
                fix="lower optim.lr, or set train.precision = 'bf16', then run the same command: it continues from the "
                "last checkpoint",
            )
        if not reading.skipped and not reading.is_finite:
            raise RunFailed(
                values,
                rule="training stops at the first value that is not finite; no such weights were saved",
                fix="lower optim.lr, raise schedule.warmup_steps or set optim.clip_norm, then run "
                "the same command: it continues from the last checkpoint",
            )
