"""Check the machines of a fleet against each other: `ingot doctor FOLDER --nodes N` on each of them.

The first to get a lock in the folder, which all see, leads: it asks every machine for its measurements, puts pairs
together for two rounds of sums over their links, and judges (fleet/rounds.py). All print the same result. No torch.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import ResourceError, RunBusyError
from ingot.machine.health.report import node_name
from ingot.trainer.fleet.probe import OwnMachine, Probe
from ingot.trainer.fleet.rounds import FleetResult, check_rounds, unique_name
from ingot.trainer.launch.link import LeaderAddress, Link, answer, dial, host_of, listen, own_host, signs_of_life
from ingot.trainer.resilience.lock import RunLock
from ingot.units import format_seconds

WAIT_SECONDS = 600.0  # for the other machines
_PATIENCE = 15.0  # without a sign of life, a machine counts as lost
_POLL_SECONDS = 0.02


def check_fleet(
    folder: Path,
    nodes: int,
    command: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    wait_seconds: float = WAIT_SECONDS,
) -> FleetResult:
    """Check this machine with `nodes` - 1 others, which call this with the same folder. command: see `probe_command`.
    seconds: of each measurement.

    Raises ResourceError if a machine does not come, or is lost.
    """
    address = folder / "doctor-leader.json"
    with Probe(command) as probe:
        ends = time.monotonic() + wait_seconds
        while True:
            try:
                with RunLock(folder / "doctor-lock"):
                    return _lead(address, nodes, probe, seconds, say, ends)
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
            messages = list(link.read())
            for message in messages:
                if "result" in message:
                    link.close("the check is over")
                    return from_dict(FleetResult, message["result"])
                if "ask" in message:
                    probe.ask(message["ask"])
            if (measured := probe.answer()) is not None:
                link.send(answer=measured)
            if not messages and _is_lost(link):
                raise _lost("the leader", link)
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
    """Another machine of the check. name: unique in the fleet. host: its address for the others."""

    def __init__(self, link: Link, name: str):
        self.link, self.name, self.host = link, name, ""

    def ask(self, request: dict[str, Any]) -> None:
        self.link.send(ask=request)

    def answer(self) -> dict[str, Any] | None:
        """Return its answer, None until it has come. Raises ResourceError if the machine is lost."""
        return self.next("answer")

    def next(self, kind: str) -> Any:
        """Return the next message of a kind, None until it has come. Raises ResourceError if the machine is lost."""
        for message in self.link.read():
            if kind in message:
                return message[kind]
        if _is_lost(self.link):
            raise _lost(self.name, self.link)
        return None


def _lead(
    address: Path, nodes: int, probe: Probe, seconds: float, say: Callable[[str], None], ends: float
) -> FleetResult:
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
                        others.append(_greet(arrived.get(timeout=_POLL_SECONDS), others))
                        say(f"{1 + len(others)} of {nodes} machines")
        here = own_host([other.link for other in others])
        for other in others:
            other.host = host_of(other.link, here)
        rounds = check_rounds([OwnMachine(node_name(), here, probe), *others], seconds, say)
        while True:
            try:
                next(rounds)
            except StopIteration as end:
                result = end.value
                break
            time.sleep(_POLL_SECONDS / 4)
        for other in others:
            other.link.send(result=asdict(result))
            other.link.finish(_PATIENCE)
        return result


def _greet(link: Link, others: Sequence[_Other]) -> _Other:
    """Return the machine at the other end of a connection. Raises ResourceError if it is lost."""
    found = _Other(link, "a machine")
    while (hello := found.next("hello")) is None:
        time.sleep(_POLL_SECONDS)
    found.name = unique_name(str(hello), {node_name(), *(other.name for other in others)})
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
