"""The rounds of a check of machines: each alone, then the links of pairs, twice; and what they found. No torch.

Nothing here waits: a check is a generator, which yields while answers are missing. So the caller can look after its
connections, its lease and requests to stop in the meantime.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ingot.config import from_dict
from ingot.errors import NodeUnhealthy
from ingot.trainer.fleet.judge import Measured, Unfit, best_link, first_pairs, judge, judge_links, second_pairs
from ingot.trainer.fleet.probe import FAILED
from ingot.units import format_seconds

ANSWER_SECONDS = 300.0  # for one request, imports included, and for 20 devices the seconds of each
_DEVICES = 20
_IMPORT_SECONDS = 3.0  # of the process that measures, as announced
Rounds = Generator[None, None, "FleetResult"]


class FleetMember(Protocol):
    """A machine of a check. name: unique in it. host: its address for the others."""

    name: str
    host: str

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request (fleet/measure.py) to the process that measures the machine."""
        ...

    def answer(self) -> dict[str, Any] | None:
        """Return the answer; None until it has come. See Probe.answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The link of a pair of machines in a round, 1 or 2. rate: in bytes per second; 0 if no sum came over it."""

    first: str
    second: str
    round: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """The result of a check. seconds: that it took."""

    fleet: tuple[Measured, ...]
    links: tuple[MeasuredLink, ...]
    unfit: tuple[Unfit, ...]
    seconds: float

    def link(self, node: str) -> float:
        """Return the best rate of a machine's links, in bytes per second; 0 if it was alone."""
        return best_link([{(link.first, link.second): link.rate} for link in self.links], node)

    def require_sound(self) -> None:
        """Raise NodeUnhealthy if a machine is unfit."""
        if self.unfit:
            raise unfit_error(
                self.unfit, "repair or leave out the machines above, or run the check again if other programs used them"
            )


def unfit_error(unfit: Sequence[Unfit], fix: str) -> NodeUnhealthy:
    """Return the error that names machines that should not train, and why."""
    return NodeUnhealthy(
        "E-NODES-UNFIT",
        "\n".join(f"{one.node}: {one.check}: {one.words}" for one in unfit),
        rule="machines of a run compute right, and none is much slower than the others",
        fix=fix,
        unfit=[asdict(one) for one in unfit],
    )


def check_rounds(members: Sequence[FleetMember], seconds: float, say: Callable[[str], None]) -> Rounds:
    """Check machines against each other. Yields while answers are missing, and returns the result.

    members: the first is the machine whose clock the others are compared with. seconds: of each measurement, to
    announce how long a round takes.
    """
    began, unfit = time.monotonic(), list[Unfit]()
    limit = ANSWER_SECONDS + 2 * _DEVICES * seconds
    estimate = format_seconds(2 * seconds + _IMPORT_SECONDS)
    say(f"computation, memory and disk of {_machines(len(members))}: about {estimate} if they are idle")
    found = yield from _ask({member.name: (member, {"do": "machine"}) for member in members}, limit)
    sound = _without_failed(members, found, unfit)
    others = [member for member in sound if member is not members[0]]
    clocks = yield from _ask({member.name: (member, {"do": "clock"}) for member in others}, limit)
    measured = [
        from_dict(Measured, {"node": member.name, "clock": _ahead(clocks.get(member.name)), **found[member.name].value})
        for member in sound
    ]
    names, rounds = [member.name for member in sound], list[Mapping[tuple[str, str], float]]()
    by_name = {member.name: member for member in sound}
    pairs = first_pairs(names)
    while pairs and len(rounds) < 2:
        say(f"links of {len(pairs)} pair{'s' * (len(pairs) > 1)}: about {format_seconds(seconds + 1)}")
        rounds.append((yield from _round(by_name, pairs, limit)))
        pairs = second_pairs(names, rounds[0])
    return FleetResult(
        fleet=tuple(measured),
        links=tuple(
            MeasuredLink(first=first, second=second, round=number, rate=rate)
            for number, one in enumerate(rounds, 1)
            for (first, second), rate in one.items()
        ),
        unfit=(*unfit, *judge(measured), *judge_links(rounds)),
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The answer of a machine. halfway: the time in seconds of this machine's clock, between request and answer."""

    value: dict[str, Any]
    halfway: float

    @property
    def failed(self) -> str:
        return str(self.value.get(FAILED, ""))


def _ask(
    asked: Mapping[str, tuple[FleetMember, dict[str, Any]]], limit: float
) -> Generator[None, None, dict[str, _Answer]]:
    """Ask machines at the same time. asked: machine and request by name. A machine that does not answer within `limit`
    seconds has failed."""
    began, ends, found = time.time(), time.monotonic() + limit, dict[str, _Answer]()
    for member, request in asked.values():
        member.ask(request)
    while len(found) < len(asked):
        for name, (member, _) in asked.items():
            if name not in found and (value := member.answer()) is not None:
                found[name] = _Answer(value=value, halfway=(began + time.time()) / 2)
        if time.monotonic() > ends:
            silent = {FAILED: f"its measurement gave no answer for {limit:.0f} s"}
            found |= {name: _Answer(value=silent, halfway=0.0) for name in asked if name not in found}
        if len(found) < len(asked):
            yield
    return found


def _without_failed(
    members: Sequence[FleetMember], found: Mapping[str, _Answer], unfit: list[Unfit]
) -> list[FleetMember]:
    """Return the machines with an answer, and add the others to `unfit`."""
    unfit += [
        Unfit(node=member.name, check="measurement", words=found[member.name].failed)
        for member in members
        if found[member.name].failed
    ]
    return [member for member in members if not found[member.name].failed]


def _ahead(clock: _Answer | None) -> float:
    """Return how far a clock is ahead of this machine's, in seconds; 0 if it is not known."""
    return float(clock.value["clock"]) - clock.halfway if clock and not clock.failed else 0.0


def _round(
    members: Mapping[str, FleetMember], pairs: Sequence[tuple[str, str]], limit: float
) -> Generator[None, None, dict[tuple[str, str], float]]:
    """Measure the links of pairs: at the same time, as ranks use them, but each machine in one at a time."""
    rates: dict[tuple[str, str], float] = {}
    while left := [pair for pair in pairs if pair not in rates]:
        busy, now = set[str](), list[tuple[str, str]]()
        for pair in left:
            if not busy & set(pair):
                busy |= set(pair)
                now.append(pair)
        opened = yield from _ask({first: (members[first], {"do": "open"}) for first, _ in now}, limit)
        asked = {}
        for first, second in now:
            if opened[first].failed:
                rates[first, second] = 0.0
                continue
            link = {"do": "link", "host": members[first].host, "port": opened[first].value["port"]}
            asked |= {first: (members[first], link | {"rank": 0}), second: (members[second], link | {"rank": 1})}
        answers = yield from _ask(asked, limit)
        rates |= {pair: float(answers[pair[0]].value.get("link", 0.0)) for pair in now if pair not in rates}
    return rates


def _machines(count: int) -> str:
    return "this machine" if count == 1 else f"{count} machines, at the same time"


def unique_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, with a number if another machine of the check has it: launchers of one machine may share one."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found
