"""What the loop asks at every log line: go on, stop on request, or give up. All ranks get the same answer."""

import math
from collections.abc import Sequence

from ingot.dist.collectives import any_rank
from ingot.errors import RunFailed
from ingot.schema.layout import RunFolder


class Verdict:
    """The verdicts for the run in `folder`."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def stop_requested(self) -> bool:
        """Whether any rank sees the stop request. Collective: ranks that read the file at different moments agree."""
        return any_rank(self.folder.stop_request.exists())

    def require_finite(self, steps: Sequence[int], losses: Sequence[float], grad_norms: Sequence[float]) -> None:
        """Raise RunFailed at the first step whose global loss or gradient norm is not finite.

        Asked before anything is saved, so the newest checkpoint is from before that step. The values are the same on
        all ranks, so all raise.
        """
        for step, loss, norm in zip(steps, losses, grad_norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunFailed(
                    f"loss {loss} and gradient norm {norm} at step {step}",
                    rule="training stops at the first value that is not finite; no such weights were saved",
                    fix="lower optim.lr, raise schedule.warmup_steps or set optim.clip_norm, then run "
                    "the same command: it continues from the last checkpoint",
                )
