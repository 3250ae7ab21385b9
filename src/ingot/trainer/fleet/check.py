"""Check the machines of a fleet against each other: `ingot doctor FOLDER --nodes N` on each of them.

The first to get a lock in the folder, which all see, leads: it asks every machine for its measurements, puts pairs
together for two rounds of sums over their links, and judges. All print the same result. No torch here: a machine is
measured in a process of its own (fleet/measure.py), which may hang or crash.
"""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import NodeUnhealthy, ResourceError, RunBusyError
from ingot.machine.health.report import node_name
from ingot.trainer.fleet.judge import Measured, Unfit, best_link, first_pairs, judge, judge_links, second_pairs
from ingot.trainer.launch.link import LeaderAddress, Link, answer, dial, listen, signs_of_life
from ingot.trainer.resilience.lock import RunLock
from ingot.units import format_seconds

WAIT_SECONDS = 600.0  # for the other machines
_PATIENCE = 15.0  # without a sign of life, a machine counts as lost
_ANSWER_SECONDS = 300.0  # for one measurement
_POLL_SECONDS = 0.02
Pairs = Mapping[tuple[str, str], float]


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The link of a pair of machines in a round, 1 or 2. rate: in bytes per second."""

    first: str
    second: str
    round: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """The result of a check."""

    fleet: tuple[Measured, ...]
    links: tuple[MeasuredLink, ...]
    unfit: tuple[Unfit, ...]

    def link(self, node: str) -> float:
        """Return the best rate of a machine's links, in bytes per second; 0 if it was alone."""
        return best_link([{(link.first, link.second): link.rate} for link in self.links], node)

    def require_sound(self) -> None:
        """Raise NodeUnhealthy if a machine is unfit."""
        if self.unfit:
            lines = [f"{one.node}: {one.check}: {one.words}" for one in self.unfit]
            raise NodeUnhealthy(
                "E-NODES-UNFIT",
                "\n".join(lines),
                rule="machines of a run compute right, and none is much slower than the others",
                fix="repair or leave out the machines above, or run the check again if other programs used them",
                unfit=[asdict(one) for one in self.unfit],
            )


class Probe:
    """The process that measures this machine. command: that is run. A context manager, which ends it."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return its answer to a request. Raises ResourceError if it has none within _ANSWER_SECONDS."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
                line = self._process.stdout.readline()
        if not line:
            raise ResourceError(
                "E-PROBE-SILENT",
                f"the measurement of {node_name()} gave no answer to {request['do']!r}",
                rule=f"a measurement takes less than {_ANSWER_SECONDS:.0f} s",
                fix="see what it printed above; a device that hangs or crashes here is not fit for training",
                node=node_name(),
            )
        return json.loads(line)


def probe_command(folder: Path, seconds: float) -> list[str]:
    """Return the command that measures a machine, each thing for some seconds."""
    return [sys.executable, "-P", "-m", "ingot.trainer.fleet.measure", str(folder), str(seconds)]


def check_fleet(
    folder: Path, nodes: int, command: Sequence[str], say: Callable[[str], None], wait_seconds: float = WAIT_SECONDS
) -> FleetResult:
    """Check this machine with `nodes` - 1 others, which call this with the same folder. command: see `probe_command`.

    Raises ResourceError if a machine does not come, is lost, or cannot be measured.
    """
    address = folder / "doctor-leader.json"
    with Probe(command) as probe:
        ends = time.monotonic() + wait_seconds
        while True:
            try:
                with RunLock(folder / "doctor-lock"):
                    return _lead(address, nodes, probe, say, ends)
            except RunBusyError:
                place = LeaderAddress.read(address)
                if (link := dial(place) if place else None) is not None:
                    return _follow(link, probe, say)
            if time.monotonic() > ends:
                raise _missing(nodes, 0)
            time.sleep(_POLL_SECONDS)


def _missing(nodes: int, joined: int) -> ResourceError:
    return ResourceError(
        "E-NODES-MISSING",
        f"{nodes - joined} of {nodes} machines have not joined the check",
        rule="every machine gives the same command, and sees the same folder",
        fix="run the command on all machines, or lower --nodes",
        missing=nodes - joined,
        nodes=nodes,
    )


# -- a machine that follows --


def _follow(link: Link, probe: Probe, say: Callable[[str], None]) -> FleetResult:
    say("joined the check; the machine that began it shows what happens, and all show the result")
    link.send(hello=node_name(), pid=os.getpid())
    with signs_of_life(lambda: [link], _PATIENCE):
        while True:
            messages = list(link.read())  # before its silence is judged: a measurement takes longer
            if not messages and _is_lost(link):
                raise _lost("the leader", link)
            for message in messages:
                if "result" in message:
                    link.close("the check is over")
                    return from_dict(FleetResult, message["result"])
                if "clock" in message:
                    link.send(clock=time.time())
                elif "ask" in message:
                    link.send(answer=probe.ask(**message["ask"]))
            time.sleep(_POLL_SECONDS)


def _is_lost(link: Link) -> bool:
    """Return whether the other end has closed the connection, or was silent for too long at the last read."""
    return bool(link.closed) or link.silent() > _PATIENCE


def _lost(who: str, link: Link) -> ResourceError:
    return ResourceError(
        "E-NODES-MISSING",
        f"{who} left the check: {link.closed or 'it gives no sign of life'}",
        rule="a check needs all of its machines until its end",
        fix="see what that machine printed; then run the check again",
    )


# -- the machine that leads --


class _Other:
    """Another machine of the check. name: unique in the fleet."""

    def __init__(self, link: Link, name: str):
        self.link, self.name = link, name

    def send(self, **message: Any) -> None:
        self.link.send(**message)

    def next(self, kind: str) -> Any:
        """Wait for a message of this kind. Raises ResourceError if the machine is lost."""
        ends = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < ends:
            for message in self.link.read():
                if kind in message:
                    return message[kind]
            if _is_lost(self.link):
                break
            time.sleep(_POLL_SECONDS / 10)
        raise _lost(self.name, self.link)


def _lead(address: Path, nodes: int, probe: Probe, say: Callable[[str], None], ends: float) -> FleetResult:
    others: list[_Other] = []
    with signs_of_life(lambda: [other.link for other in others], _PATIENCE):
        with contextlib.ExitStack() as listening:
            if nodes > 1:
                arrived = listening.enter_context(_listening(address))
                left = format_seconds(max(ends - time.monotonic(), 0.0))
                say(f"1 of {nodes} machines; give the same command on the others, within {left}")
                while len(others) < nodes - 1:
                    if time.monotonic() > ends:
                        raise _missing(nodes, 1 + len(others))
                    with contextlib.suppress(queue.Empty):
                        link = arrived.get(timeout=_POLL_SECONDS)
                        hello = _Other(link, "a machine").next("hello")
                        names = {node_name(), *(other.name for other in others)}
                        others.append(_Other(link, _unique(str(hello), names)))
                        say(f"{1 + len(others)} of {nodes} machines")
        result = _Check(probe, others, say).run()
        for other in others:
            other.send(result=asdict(result))
            other.link.finish(_PATIENCE)
        return result


def _unique(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[queue.SimpleQueue[Link]]:
    """Let others connect during the block. Returns the queue of those that know the key in the file `path`."""
    listener, address = listen()
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()

    def accept() -> None:
        with contextlib.suppress(OSError):  # the block is over
            while True:
                connected, _ = listener.accept()
                if (link := answer(connected, address.key)) is not None:
                    arrived.put(link)

    threading.Thread(target=accept, name="ingot-doctor", daemon=True).start()
    address.write(path)
    try:
        yield arrived
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            listener.shutdown(2)
        listener.close()


class _Check:
    """The check of the leader's machine and `others`."""

    def __init__(self, probe: Probe, others: Sequence[_Other], say: Callable[[str], None]):
        self._probe, self._others, self._say = probe, {other.name: other for other in others}, say
        self._own = node_name()

    def run(self) -> FleetResult:
        self._say("computation, memory and disk of all machines, at the same time")
        for other in self._others.values():
            other.send(ask={"do": "machine"})
        measured = [self._measured(self._own, self._probe.ask(do="machine"), 0.0)]
        answers = {other.name: other.next("answer") for other in self._others.values()}
        measured += [self._measured(name, found, self._clock(self._others[name])) for name, found in answers.items()]
        nodes, rounds = [self._own, *self._others], list[Pairs]()
        if len(nodes) > 1:
            rounds.append(self._round(first_pairs(nodes)))
            if pairs := second_pairs(nodes, rounds[0]):
                rounds.append(self._round(pairs))
        return FleetResult(
            fleet=tuple(measured),
            links=tuple(
                MeasuredLink(first=first, second=second, round=number, rate=rate)
                for number, one in enumerate(rounds, 1)
                for (first, second), rate in one.items()
            ),
            unfit=(*judge(measured), *judge_links(rounds)),
        )

    def _measured(self, node: str, found: Mapping[str, Any], clock: float) -> Measured:
        return from_dict(Measured, {"node": node, "clock": clock, **found})

    def _clock(self, other: _Other) -> float:
        """Return how far another machine's clock is ahead: by its answer, halfway between question and answer."""
        began = time.time()
        other.send(clock=True)
        theirs = float(other.next("clock"))
        return theirs - (began + time.time()) / 2

    def _round(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Measure the link of each pair, one after the other: they may share switches."""
        self._say(f"links of {len(pairs)} pairs")
        return {pair: self._link(*pair) for pair in pairs}

    def _link(self, first: str, second: str) -> float:
        port = self._ask(first, do="open")["port"]
        host = self._host(first)
        link = {"do": "link", "host": host, "port": port}
        if second == self._own:
            self._others[first].send(ask=link | {"rank": 0})
            self._probe.ask(**link, rank=1)
            return float(self._others[first].next("answer")["link"])
        self._others[second].send(ask=link | {"rank": 1})
        rate = float(self._ask(first, **link, rank=0)["link"])
        self._others[second].next("answer")
        return rate

    def _ask(self, node: str, **request: Any) -> dict[str, Any]:
        if node == self._own:
            return self._probe.ask(**request)
        self._others[node].send(ask=request)
        return self._others[node].next("answer")

    def _host(self, node: str) -> str:
        """Return the address at which the others reach a machine: that of its connection to the leader."""
        if node != self._own:
            return self._others[node].link.other_host
        return next(iter(self._others.values())).link.own_host
