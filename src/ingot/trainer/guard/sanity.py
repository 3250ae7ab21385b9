"""The loss of a fixed batch of held-out text at saves: weights that lost what they had learned are not taken for sound.

Losses of the training batches are judged in each step, but a run may follow a harmed model to a new level. The batch is
the same at each save, so its losses differ by what was learned between. No torch.
"""

import math
from dataclasses import replace

from ingot.schema.checkpoint import Health
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SanityState

SANITY_ROWS = 8  # of the held-out text, evenly apart: all of it is scored by evaluations, and costs its time
_DOUBTED_IN_A_ROW = 2  # then it is the new level: the data, or the batch itself, explain it


class SanityJudge:
    """The losses of the batch at saves, and the judgment by them.

    state: of the newest checkpoint, and what the next one keeps. reason: the doubt about the weights of the last step
    that was judged; "" if there is none.
    """

    def __init__(self, guard: Guard, state: SanityState):
        self.guard = guard
        self.restore(state)

    def restore(self, state: SanityState) -> None:
        """Go on as after the checkpoint that has `state`."""
        self.state, self.reason = state, ""

    def due(self, step: int) -> bool:
        """Return whether the batch is scored before `step` is saved; in doubt, it is at each save."""
        return self.state.doubted > 0 or step >= self.state.step + self.guard.sanity_every

    def judge(self, step: int, loss: float) -> str:
        """Take in the loss of the batch, in nats per token, and return what to warn of; "" if nothing.

        A loss that rose by more than `sanity_rise` makes the checkpoint suspect. After two of them in a row it is the
        new level. A batch whose loss is not finite then, or at the first save, judges nothing.
        """
        before, self.reason = self.state.loss, ""
        risen = before is not None and not loss <= before + self.guard.sanity_rise
        if risen and self.state.doubted < _DOUBTED_IN_A_ROW:
            self.reason = (
                f"the loss of held-out text is {loss:.4g} at step {step}, and was {before:.4g} at step "
                f"{self.state.step}"
            )
            self.state = replace(self.state, doubted=self.state.doubted + 1)
            return f"{self.reason}: the checkpoint is suspect"
        finite = math.isfinite(loss)
        self.state = SanityState(step=step, loss=loss if finite else None)
        if not finite:
            return f"the loss of held-out text is {loss} at step {step}: it cannot show whether weights are sound"
        return f"the loss of held-out text is {loss:.4g} at step {step}: this is the level now" if risen else ""

    def health(self, judged: Health) -> Health:
        """Return the health of the weights, by the last judgment and that of the policy, `judged`."""
        return Health(state="suspect", reason=self.reason, by="held-out text") if self.reason else judged
