"""The agreement of all ranks to stop, and to save, after the same step."""

import math
import time

from ingot.trainer.mesh.collectives import largest_of_ranks
from ingot.trainer.resilience.stop_requests import REASONS, StopRequest, StopRequests

# Ranks vote after every step, or about this often if steps are shorter: a vote took 1.2 ms (median, two Gloo ranks on
# two cores with a load of 8), and one that is read a step later still 0.8 ms.
VOTE_SECONDS = 0.2


class StopVote:
    """The vote of all ranks on whether to stop after a step. No rank waits for its device.

    Ranks see signals and clocks at different times, so one rank's request is a vote, and what counts is the result of a
    collective, which is the same on all ranks. Votes are after the same steps on all ranks, also in a pipeline: after
    log lines and every VOTE_SECONDS, by the slowest rank's time of a step up to the last line; before the first line,
    after every step.

    requests: those to this rank.
    """

    def __init__(self, requests: StopRequests):
        self.requests = requests
        self._line_at, self._steps = time.monotonic(), 0  # the time of the last log line, and the steps since
        self._every = 1  # steps; the same number on all ranks

    def after_step(self, *, at_line: bool, due: int = 0) -> tuple[StopRequest | None, int]:
        """Vote if it is time, and return the request by which the run stops after this step, and what is due on the
        clock of rank 0 (trainer/save_schedule.py). Collective.

        due: on rank 0, the bits of the saves that are due; 0 on others. All ranks get the bits of rank 0.
        at_line: the step has a log line. Between lines the host may be ahead of its device, so only lines measure the
        time of a step. The deadline is the earliest of all ranks, on the clock of this machine.
        """
        self._steps += 1
        if not at_line and self._steps % self._every:
            return None, 0
        now, request = time.monotonic(), self.requests.current()
        own_seconds = (now - self._line_at) / self._steps if at_line else 0.0
        reason = 0 if request is None else 1 + REASONS.index(request.reason)
        left = math.inf if request is None else request.deadline - now
        reason, negative_left, step_seconds, agreed = largest_of_ranks(reason, -left, own_seconds, due)
        if at_line:
            self._every = max(int(VOTE_SECONDS / max(step_seconds, 1e-6)), 1)
            self._line_at, self._steps = now, 0
        stop = StopRequest(REASONS[int(reason) - 1], time.monotonic() - negative_left) if reason else None
        return stop, int(agreed)
