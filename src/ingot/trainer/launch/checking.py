"""The check of a job's machines before its ranks start: all that have joined, spares too, against each other. No torch.

The leader asks the launchers over their connections, each launcher asks its own process (fleet/probe.py), and nothing
waits: a request to stop, a lost machine or a lost lease ends the check like a wait for machines.
"""

import contextlib
import itertools
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ingot.events import EventLog
from ingot.machine.health.report import HealthReport, HealthVerdict, node_name
from ingot.machine.health.rules import HealthFinding
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.fleet.judge import Unfit
from ingot.trainer.fleet.probe import OwnMachine, Probe, probe_command
from ingot.trainer.fleet.rounds import FleetResult, Rounds, check_rounds, unfit_error, unique_name
from ingot.trainer.launch.health import Sickness, record_finding, write_drained
from ingot.trainer.launch.link import host_of, own_host
from ingot.trainer.launch.nodes import Node

# Machines that are lost in a check would be lost in training: there, their losses use the budget of restarts.
_MOST_BEGINNINGS = 3
_numbers = itertools.count(1)  # of the requests to other machines


class NodeProbe:
    """The process that measures this machine for the leader, and the messages about it. It has to be closed."""

    def __init__(self, folder: RunFolder, launch: Launch):
        self._folder, self._launch = folder, launch
        self._probe: Probe | None = None
        self._log: Any = None
        self._number = 0

    def open(self) -> Probe:
        """Return the process; its errors go to the folder of the logs, or are shown if no file can be made there."""
        if self._probe is None:
            with contextlib.suppress(OSError):  # the measurement of the disk has the same trouble, and reports it
                self._folder.logs.mkdir(parents=True, exist_ok=True)
                self._log = (self._folder.logs / f"check-{node_name()}.log").open("ab")
            self._probe = Probe(probe_command(self._folder.root, self._launch.check_seconds), self._log)
        return self._probe

    def take(self, number: int, request: dict[str, Any] | None) -> None:
        """Take in a request of the leader; None: the check is over."""
        self._number = number
        if request is None:
            self.close()
        else:
            self.open().ask(request)

    def answer(self) -> dict[str, Any] | None:
        """Return the message for the leader, None until there is one."""
        found = self._probe.answer() if self._probe else None
        return None if found is None else {"checked": self._number, "answer": found}

    def fileno(self) -> int:
        """The file descriptor that can be read when an answer is there; -1 if nothing is asked."""
        return self._probe.fileno() if self._probe else -1

    def close(self) -> None:
        """End the process."""
        if self._probe is not None:
            self._probe.close()
            if self._log is not None:
                self._log.close()
            self._probe = self._log = None


class _OtherMachine:
    """Another machine of the job as a member of a check (fleet/rounds.py)."""

    def __init__(self, node: Node, name: str, host: str):
        self.node, self.name, self.host = node, name, host
        self._number = 0

    def ask(self, request: dict[str, Any]) -> None:
        self._number = next(_numbers)
        self.node.link.send(check=self._number, request=request)

    def answer(self) -> dict[str, Any] | None:
        number, found = self.node.checked or (0, None)
        return found if number == self._number else None


class MachineCheck:
    """The check of this machine and of the nodes that have joined, before an attempt. It has to be closed.

    seconds: that it took so far, until it was over.
    """

    def __init__(self, folder: RunFolder, launch: Launch, say: Callable[[str], None]):
        self._folder, self._launch = folder, launch
        self._say: Callable[[str], None] = lambda line: say(f"check     {line}")
        self._probe = NodeProbe(folder, launch)
        self._others: list[_OtherMachine] = []
        self._rounds: Rounds | None = None
        self._result: FleetResult | None = None
        self._beginnings, self._began, self._waits_since = 0, 0.0, 0.0
        self.seconds = 0.0

    @property
    def has_begun(self) -> bool:
        return self._rounds is not None

    def waited(self, seconds: float) -> bool:
        """Return whether so long has passed since the first call, or since a machine was lost: then those that are
        ready are checked."""
        self._waits_since = self._waits_since or time.monotonic()
        return time.monotonic() > self._waits_since + seconds

    def goes_on(self, present: Sequence[Node] = ()) -> bool:
        """Begin the check, or go on with it, without waiting. Returns False when it is over.

        present: the nodes that are ready. Without one that takes part, it ends, and the next call begins it again; one
        that joins meanwhile takes part in the next check.
        """
        if not self._beginnings:
            self._began = time.monotonic()
        if lost := [other.name for other in self._others if other.node not in present]:
            self.close()
            self._others, self._waits_since = [], 0.0
            if self._beginnings == _MOST_BEGINNINGS:
                self._say(f"{', '.join(lost)} left, as others did before; the ranks start without a check")
                return self._end()
            return True
        if self._rounds is None:
            self._begin(present)
        assert self._rounds is not None
        try:
            next(self._rounds)
        except StopIteration as end:
            self._result = end.value
            return self._end()
        return True

    def _begin(self, present: Sequence[Node]) -> None:
        self._beginnings += 1
        here, names, self._others = own_host(node.link for node in present), {node_name()}, []
        for node in present:
            name = unique_name(node.host, names)
            names.add(name)
            self._others.append(_OtherMachine(node, name, host_of(node.link, here)))
        own = OwnMachine(node_name(), here, self._probe.open())
        self._rounds = check_rounds([own, *self._others], self._launch.check_seconds, self._say)

    def _end(self) -> bool:
        self.close()
        self.seconds = time.monotonic() - self._began
        return False

    def conclude(self, own: Sickness, is_enough: Callable[[int], bool], present: Sequence[Node] = ()) -> None:
        """Record the result, and take unfit machines for sick: the job goes on without them, as after any fault.

        own: the sickness of this machine. is_enough: returns whether the run goes on with so many machines. present:
        the nodes that have joined. Raises NodeUnhealthy if too few are sound. If none is, none is drained: what they
        share may be the cause.
        """
        if self._result is None:
            return
        hosts = {node_name(): (node_name(), own)}
        hosts |= {other.name: (other.node.host, other.node.sickness) for other in self._others}
        found = [(one, self._finding(one, hosts[one.node][0])) for one in self._result.unfit]
        with EventLog(self._folder.events) as log:
            log.write(events.FLEET_CHECK, **asdict(self._result))
            for _, finding in found:
                record_finding(finding, log.write, self._say)
        drained = [(one, finding) for one, finding in found if finding.verdict >= HealthVerdict.DRAIN]
        sound = 1 + len(present) - len({one.node for one, _ in drained})
        if drained and not is_enough(sound):
            for _, finding in drained if sound else ():
                write_drained(self._folder, finding)
            raise unfit_error(
                [one for one, _ in drained],
                "repair or replace the machines above; a sound machine that other programs used is free again without "
                f"its line in {self._folder.drained}; to train on them all the same, --set launch.on_bad_health=warn",
            )
        for one, finding in drained:
            hosts[one.node][1].take(finding)
        if not found:
            self._say(f"{len(hosts)} machine{'s are' if len(hosts) > 1 else ' is'} sound")

    def _finding(self, unfit: Unfit, host: str) -> HealthFinding:
        # ingot needs no clock, and an operator can set one while the run trains. The run folder is on storage that all
        # machines share and measure at once: a slow one may have come last.
        harmless = (
            self._launch.on_bad_health == "warn" or unfit.check == "clock" or (unfit.check == "disk" and unfit.slow)
        )
        words = f"{unfit.check}: {unfit.words}"
        report = HealthReport(kind="unfit", device=unfit.check, words=unfit.words, node=host)
        return HealthFinding(HealthVerdict.WARN if harmless else HealthVerdict.DRAIN, report, words)

    def fileno(self) -> int:
        """The file descriptor that can be read when this machine has an answer; -1 if nothing is asked."""
        return self._probe.fileno()

    def wait(self, seconds: float) -> None:
        """Wait for an answer of this machine, at most so long."""
        select.select([self] if self.fileno() >= 0 else [], [], [], seconds)

    def close(self) -> None:
        """End the processes that measure. That of a machine that is gone ends with its launcher."""
        self._probe.close()
        for other in self._others:
            other.node.link.send(check=next(_numbers), request=None)
        self._rounds = None
