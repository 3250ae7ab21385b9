"""The agreement of all ranks to stop after the same step."""

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.resilience.stop_requests import REASONS, StopRequest, StopRequests

# Ranks wait for each other's answer in a run with steps at least this long: the exchange took 0.3 ms (median, two Gloo
# ranks that share two busy cores). In a run with shorter steps they read it one step later, when it has long arrived.
LONG_STEP_SECONDS = 0.2


@dataclass
class _Pending:
    """A vote under way: the work that fills `votes` with the largest values of all ranks."""

    work: dist.Work
    votes: Tensor

    def read(self) -> list[float]:
        self.work.wait()
        return self.votes.tolist()


class StopVote:
    """The vote of all ranks after every step on whether to stop. No rank waits for its device.

    Ranks see signals and clocks at different times, so one rank's request is a vote, and what counts is the result of a
    collective, which is the same on all ranks. Collectives are in the order of the steps, also in a pipeline: every
    rank ends every step. Until the time of a step is known, ranks wait for the result after every step.
    """

    def __init__(self, requests: StopRequests):
        self._requests = requests
        self._pending: _Pending | None = None
        self._line_at, self._steps, self._step_seconds = time.monotonic(), 0, 0.0
        self._waits = True

    def after_step(self, *, at_line: bool) -> StopRequest | None:
        """Vote after a step, and return the request by which the run stops after this step. Collective.

        at_line: the step has a log line. Between lines the host may be ahead of its device, so only lines measure the
        time of a step. The deadline is the earliest of all ranks, on the clock of this machine.
        """
        self._steps += 1
        if at_line:
            now = time.monotonic()
            self._step_seconds = (now - self._line_at) / self._steps
            self._line_at, self._steps = now, 0
        if self._pending is not None and (agreed := self._take(self._pending.read())):
            self._pending = None
            return agreed
        self._pending = self._cast()
        if not self._waits:
            return None
        pending, self._pending = self._pending, None
        return self._take(pending.read())

    def _cast(self) -> _Pending:
        request = self._requests.current()
        reason = 0 if request is None else 1 + REASONS.index(request.reason)
        left = math.inf if request is None else request.deadline - time.monotonic()
        votes = torch.tensor([reason, -left, self._step_seconds], dtype=torch.float64)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None  # None is for ranks outside the group
        return _Pending(work, votes)

    def _take(self, votes: list[float]) -> StopRequest | None:
        reason, negative_left, step_seconds = votes
        if step_seconds > 0.0:
            self._waits = step_seconds >= LONG_STEP_SECONDS
        if reason == 0:
            return None
        return StopRequest(REASONS[int(reason) - 1], time.monotonic() - negative_left)

    def close(self) -> None:
        """Wait for a vote under way, which no one reads any more. Collective."""
        if self._pending is not None:
            self._pending.read()
            self._pending = None
