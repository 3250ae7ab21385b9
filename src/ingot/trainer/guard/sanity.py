"""The loss of a fixed batch of held-out text at saves: weights that lost what they had learned are not taken for sound.

Losses of the training batches are judged in each step, but a run may follow a harmed model to a new level. The batch is
the same at each save, so its losses differ by what was learned between. No torch.
"""

import math
from dataclasses import dataclass, replace

from ingot.schema.checkpoint import Health
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SanityState

SANITY_ROWS = 8  # of the held-out text, evenly apart: all of it is scored by evaluations, and costs its time
MOST_REPEATED, NGRAM = 0.5, 8  # ordinary text repeats a few percent of its 8-grams
_DOUBTED_IN_A_ROW = 2  # then it is the new level: the data, or the batch itself, explain it


@dataclass(frozen=True)
class SanityBatch:
    """The facts of the fixed batch. identity: of its tokens. repeated: the share of its n-grams that occurred in it
    before."""

    identity: str
    repeated: float = 0.0


class SanityJudge:
    """The losses of the batch at saves, and the judgment by them.

    state: of the newest checkpoint, and what the next one keeps. batch: the one that is scored. reason: the doubt about
    the weights of the last step that was judged; "" if there is none.
    """

    def __init__(self, guard: Guard, state: SanityState, batch: SanityBatch):
        self.guard, self._batch = guard, batch
        self.restore(state)

    def restore(self, state: SanityState) -> None:
        """Go on as after the checkpoint that has `state`."""
        if state.batch not in ("", self._batch.identity):  # losses of another batch are no measure
            state = SanityState()
        if state.unfit_gap and state.unfit_gap != self.guard.sanity_gap:  # a verdict by another limit
            state = SanityState(step=state.step)
        self.state, self.reason = replace(state, batch=self._batch.identity), ""

    def due(self, step: int) -> bool:
        """Return whether the batch is scored before `step` is saved; in doubt, it is at each save."""
        return self.state.doubted > 0 or step >= self.state.step + self.guard.sanity_every

    def judge(self, step: int, loss: float, training: float | None = None) -> str:
        """Take in the loss of the batch, in nats per token, and return what to warn of; "" if nothing.

        training: the mean loss of the training batches of the last steps; None: it is not known.
        A loss that rose by more than `sanity_rise` makes the checkpoint suspect. After two of them in a row it is the
        new level. A batch whose loss is not finite then, or at the first save, judges nothing. One that repeats itself,
        or whose loss is far above that of the training batches twice in a row, judges nothing from then on: harm of the
        weights raises both. It has to be twice, because a line may have a single step with an easy batch; and not to
        have risen at the first time. It is scored all the same, at its interval.
        """
        before, self.reason = self.state.loss, ""
        if self.state.unfit:
            self.state = replace(self.state, step=step)
            return ""
        unlike = self._unlike(loss, training)
        unfit = self._repeated() or (unlike if self.state.unlike else "")
        risen = before is not None and not loss <= before + self.guard.sanity_rise
        if risen and not unfit and self.state.doubted < _DOUBTED_IN_A_ROW:
            self.reason = (
                f"the loss of held-out text is {loss:.4g} at step {step}, and was {before:.4g} at step "
                f"{self.state.step}"
            )
            self.state = replace(self.state, doubted=self.state.doubted + 1, unlike=False)
            return f"{self.reason}: the checkpoint is suspect"
        finite = math.isfinite(loss)
        own = SanityState(step=step, batch=self._batch.identity)
        if unfit:
            gap = 0.0 if self._repeated() else self.guard.sanity_gap
            self.state = replace(own, unfit=unfit, unfit_gap=gap)
            return f"{unfit}: it judges no checkpoint"
        self.state = replace(own, loss=loss if finite else None, unlike=bool(unlike))
        if not finite:
            return f"the loss of held-out text is {loss} at step {step}: it cannot show whether weights are sound"
        return f"the loss of held-out text is {loss:.4g} at step {step}: this is the level now" if risen else ""

    def _repeated(self) -> str:
        """Return how much of the batch repeats itself, if it is too much to judge weights; "" if not."""
        if self._batch.repeated <= MOST_REPEATED:
            return ""
        return (
            f"{self._batch.repeated:.0%} of the {NGRAM}-grams of the fixed batch of held-out text come again "
            f"(limit {MOST_REPEATED:.0%})"
        )

    def _unlike(self, loss: float, training: float | None) -> str:
        """Return how far the loss is above that of the training batches, if it is too far; "" if not. A loss that is
        not finite is treated elsewhere."""
        gap = self.guard.sanity_gap
        if gap and training is not None and math.isfinite(loss) and loss > training + gap:
            return (
                f"the fixed batch of held-out text has a loss of {loss:.4g}, more than guard.sanity_gap ({gap:g}) "
                f"above the {training:.4g} of the training batches"
            )
        return ""

    def health(self, judged: Health) -> Health:
        """Return the health of the weights, by the last judgment and that of the policy, `judged`."""
        return Health(state="suspect", reason=self.reason, by="held-out text") if self.reason else judged
