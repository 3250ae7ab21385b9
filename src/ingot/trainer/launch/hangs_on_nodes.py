"""Hangs of a job on several nodes: found from the watchdogs of all nodes, and examined with the answers of all ranks.

No torch.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.evidence import QUESTION_SECONDS, Answers, examine, incident_of, question, waits_for
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.nodes import Node
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.resilience.heartbeat import Beat
from ingot.trainer.resilience.incidents import JobIncident

_POLL_SECONDS = 0.02
_ANSWER_SECONDS = QUESTION_SECONDS + 3.0  # to a question about a hang: also for its way, and slow machines


class HangsOnNodes:
    """The hangs of a job, as its leader finds them.

    here: the ranks of this node. members: returns the other nodes of the attempt. poll: takes in the messages of all
    nodes. wait: waits for the next ones, at most so many seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        here: JobHere,
        *,
        members: Callable[[], Sequence[Node]],
        poll: Callable[[], None],
        wait: Callable[[float], None],
    ):
        self._folder, self._here = folder, here
        self._members, self._poll, self._wait = members, poll, wait
        self._asked_at, self._questions = -math.inf, 0

    def find(self) -> Hang | None:
        """Return the hang of an attempt that has started, if there is one: see RunningJob.hang."""
        here = [self._here.overdue()] if self._here.beats() else []  # ranks that have all ended wait for nobody
        found = [*here, *(node.hang for node in self._members() if not node.done)]
        if not (hangs := [hang for hang in found if hang]):
            return None
        certain = all(hang and not hang.suspects for hang in found)
        latest = max(hangs, key=lambda hang: hang.limit)
        if not certain and time.monotonic() < self._asked_at + latest.limit:
            return None
        self._asked_at = time.monotonic()
        suspects = frozenset(rank for hang in hangs for rank in hang.suspects or hang.beats)
        beats, answers = self._ask(None)
        if not certain and not (waits_for(beats, answers) or {-1}) <= suspects:
            return None
        seconds = time.monotonic() - max(beat.since for beat in beats.values())
        return Hang(beats, seconds, latest.limit, latest.setting, reason=latest.reason)

    def examine(self, hang: Hang, step: int) -> JobIncident:
        """Return the incident of a hang, with its evidence in the run folder."""
        return incident_of(hang, *examine(hang, self._folder, lambda _, place: self._ask(place)[1]), step)

    def _ask(self, place: Path | None) -> tuple[dict[int, Beat], Answers]:
        """Ask the ranks of all nodes what they do. Returns their heartbeats, with times of this node, and answers."""
        self._questions += 1
        members = [node for node in self._members() if not node.done]
        for node in members:
            node.link.send(ask=self._questions, place=None if place is None else place.name)
        beats = self._here.beats()
        own = question(beats, place)
        states, calls, stacks = dict(own.states), dict(own.calls), set(own.with_stacks)
        deaf = dict(own.deaf)
        ends = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < ends and any(self._unanswered(node) for node in members):
            self._poll()
            self._wait(_POLL_SECONDS)
        for node in members:
            if node.answered and node.answered[0] == self._questions:
                beats |= node.answered[1]
                found = node.answered[2]
                states |= found.states
                calls |= found.calls
                stacks |= set(found.with_stacks)
                deaf |= found.deaf
        return beats, Answers(states, calls, stacks, deaf)

    def _unanswered(self, node: Node) -> bool:
        return not node.link.closed and (node.answered is None or node.answered[0] != self._questions)
