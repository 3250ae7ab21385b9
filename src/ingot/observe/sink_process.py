"""The process of one sink: `python -m ingot.observe.sink_process RUN NAME`, started and ended by `feed`.

It reads the run's event log, also what was written before it started, and calls the sink. It answers on standard output
with a line of JSON while it lives, and at its first trouble; "end" on standard input lets it read the rest and close.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ingot.errors import IngotError
from ingot.events import NewEvents
from ingot.machine.processes import die_with_parent
from ingot.observe.patience import LogPlace, PatientCalls, RunEnds, SinkCall
from ingot.observe.run_id import run_id_of
from ingot.observe.scalars import scalars_of
from ingot.observe.sink_state import MOST_TRIED, SinkStateFile
from ingot.plugins.load import load_plugins
from ingot.plugins.registry import options_of, resolve
from ingot.plugins.sink import SINKS, Sink, SinkLimits, SinkPlace, split_limits
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run

LOOK_SECONDS = 0.5  # between two looks at the log
_ADDRESS = re.compile(r"\b(\w[\w+.-]*)://[^\s'\"<>)]+")  # addresses may hold passwords and keys
_MOST_BYTES = 1 << 22  # of the log that one look reads
END = b"end\n"
_BEGINS = (events.RUN_STARTED, events.ROLLED_BACK)
_MOST_TRIES = 3  # processes that a call may end, before it is left out

Answer = Callable[[Mapping[str, Any]], None]
Wait = Callable[[float], bool]


class EventDelivery:
    """The events of a run on their way to its sink. answer: called with {"alive": True} now and then between calls, and
    with {"raised": words} at the first error of a call in this process. wait: as of PatientCalls."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, sink: Sink, states: SinkStateFile, answer: Answer, wait: Wait
    ):
        self._config, self._sink, self._states, self._answer = config, sink, states, answer
        self._folder = folder
        self.state = state = states.read()
        self._events = NewEvents(folder.events, position=state.position, most_bytes=_MOST_BYTES)
        self._at = LogPlace(state.position, state.begun, 0)
        self._given = state.done  # by earlier processes: calls of the first event
        self._tries = {(position, done): tries for position, done, tries in state.tried}  # of earlier processes
        self._calls = PatientCalls(self._begin, self._note, wait)
        self._calls.sent, self._calls.left_out = state.sent, state.left_out
        self._opened = -1
        self._raised = False
        self._answered_at = float("-inf")

    @property
    def is_whole(self) -> bool:
        """True if no call of what was read waits."""
        return self._calls.first_held is None

    def look(self) -> bool:
        """Give the sink the events since the last call, or a part of many. Returns whether there were any. Raises
        RunEnds."""
        found = self._events.read_at()
        for position, event in found:
            self._give(position, event)
        return bool(found)

    def _give(self, position: int, event: Mapping[str, Any]) -> None:
        begun = self._at.begun + (event["kind"] in _BEGINS)
        attempt = max(begun - 1, 0)
        self._live()
        if attempt != self._opened:  # what this raises ends the process: the event is given to the next one
            self._sink.open(run_id_of(self._folder, self._config), attempt, public_settings(self._config))
            self._opened = attempt
        given, self._given = self._given, 0
        for number, (method, call) in enumerate(self._calls_of(event)):
            self._at = self._at._replace(done=number)
            if number < given:
                continue
            tries = self._tries.get(place := (self._at.position, number), 0)
            if tries < _MOST_TRIES:
                is_empty = getattr(type(self._sink), method, None) is getattr(Sink, method)
                self._calls.give(SinkCall(method, call, self._at, is_empty))
            elif tries == _MOST_TRIES:
                self._calls.left_out += 1
                self._tries[place] = tries + 1  # another process may come here again, and counts it no more
        if len(self._tries) >= MOST_TRIED:  # no more of them can be recorded before a call that is held
            self._calls.decide(0.0)
        self._at = LogPlace(position, begun, 0)
        self._record()

    def _calls_of(self, event: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the calls that an event is, always in the same order, each with the name of its method."""
        step = event.get("step")
        if isinstance(step, int):
            values, tokens = self._numbers(step, event)
            if values:
                yield "scalars", lambda: self._sink.scalars(step, tokens, values)
            if event["kind"] == events.SAMPLE:
                yield "text", lambda: self._sink.text(step, f"sample/{event['prompt']}", str(event["text"]))
        else:
            step = None
        facts = {key: value for key, value in event.items() if key not in ("kind", "step")}
        yield "event", lambda: self._sink.event(event["kind"], step, facts)

    def _begin(self, place: LogPlace) -> None:
        self._live()
        self._record(place)

    def _live(self) -> None:
        """Give a sign of life, unless there was one just now."""
        if (now := time.monotonic()) > self._answered_at + LOOK_SECONDS / 2:
            self._answered_at = now
            self._answer({"alive": True})

    def _record(self, begun: LogPlace | None = None) -> None:
        """Record the counts, and the first place whose call has not been decided. begun: the place of a call that may
        end this process."""
        state, calls = self.state, self._calls
        state.position, state.begun, state.done = min(self._at, calls.first_held or self._at)
        state.sent, state.left_out = calls.sent, calls.left_out
        first, tries = (state.position, state.done), self._tries
        if begun is not None:
            place = begun.position, begun.done
            tries = tries | {place: tries.get(place, 0) + 1}
        state.tried = [[*place, number] for place, number in sorted(tries.items()) if place >= first][-MOST_TRIED:]
        self._states.write(state)

    def _numbers(self, step: int, event: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """Return the numbers of an event, and the tokens of its step. An event that is not as it should be, such as one
        of another version, costs its numbers, and not those after it."""
        try:
            values = scalars_of(event)
            return values, int(values.get("train/tokens", step * self._config.tokens_per_step))
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            self._calls.left_out += 1
            self.report(error)
            return {}, 0

    def _note(self, error: Exception) -> None:
        """Take in the error of a call, which did return: it does not count as one that ends processes."""
        self._record()
        self.report(error)

    def report(self, error: Exception) -> None:
        """Answer with the first error of a call."""
        if not self._raised:
            self._raised = True
            self._answer({"raised": described(error)})

    def close(self, seconds: float) -> None:
        """Close the sink, which has `seconds` for that."""
        self._answer({"alive": True})
        self._calls.finish()
        self._record()
        try:
            self._sink.close(seconds)
        except Exception as error:
            self.report(error)


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run for trackers: of alerts the limits alone, and none of sinks. The addresses of both
    may hold passwords."""

    def is_public(name: str, value: Any) -> bool:
        section, _, rest = name.partition(".")
        is_limit = "." not in rest and isinstance(value, int | float) and not isinstance(value, bool)
        return section != "sinks" and (section != "alerts" or is_limit)

    return {name: value for name, value in config.settings().items() if is_public(name, value)}


def described(error: BaseException) -> str:
    """Return an error in one line."""
    words = f"{error.found}; {error.fix}" if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
    return _ADDRESS.sub(r"\1://...", " ".join(words.split()))[:300]


def make_sink(folder: RunFolder, config: RunConfig, name: str) -> tuple[Sink, SinkLimits]:
    """Return the sink of a table [sinks.NAME] with its limits. Raises ConfigError, or what the sink itself raises."""
    if name not in SINKS:
        load_plugins(config.plugins.modules, folder.root / config.plugins.folder)
    part, (limits, own) = SINKS[name], split_limits(config.sinks[name])
    place = SinkPlace(run=folder.root, own=folder.sinks / name)
    place.own.mkdir(parents=True, exist_ok=True)
    return resolve(part.make)(place, options_of(part, own)), SinkLimits(**limits)


def main(root: str, name: str) -> int:
    """Serve the sink `name` of the run in folder `root` until standard input says that the run ends."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may signal all processes of a job: the feed decides
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to the log
    ends = _RunEnd()
    threading.Thread(target=_wait_for_end, args=(sys.stdin.buffer, ends), daemon=True).start()

    def answer(fact: Mapping[str, Any]) -> None:
        answers.write(json.dumps(fact).encode() + b"\n")
        answers.flush()

    folder, whole = RunFolder(Path(root)), True
    try:
        config = recorded_run(folder.config)
        sink, limits = make_sink(folder, config, name)
        pauses = _Pauses(ends, limits.close_seconds / 2, answer)
        states = SinkStateFile(folder.sinks / f"{name}.json")
        delivery = EventDelivery(folder, config, sink, states, answer, pauses.wait)
        while True:
            ending = ends.is_set()
            if not delivery.look():
                if ending:
                    break
                ends.wait(LOOK_SECONDS)
            answer({"alive": True})
    except RunEnds:
        whole = False
    except Exception as error:
        traceback.print_exc()
        answer({"refused": described(error)})
        return 1
    delivery.close(max(limits.close_seconds - ends.seconds_since, 0.0))
    answer({"closed": True, "whole": whole and delivery.is_whole})
    return 0


class _RunEnd(threading.Event):
    """Set when the feed says that the run ends."""

    _at = 0.0

    def set(self) -> None:
        self._at = time.monotonic()
        super().set()

    @property
    def seconds_since(self) -> float:
        """The seconds since it was set."""
        return time.monotonic() - self._at


class _Pauses:
    """The pauses between the attempts of a call. seconds: that attempts may go on after the run has ended."""

    def __init__(self, ends: threading.Event, seconds: float, answer: Answer):
        self._ends, self._seconds, self._answer = ends, seconds, answer
        self._last: float | None = None

    def wait(self, seconds: float) -> bool:
        """Wait, with signs of life, and not for long once the run has ended. Returns whether its time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._ends.is_set():
            self._answer({"alive": True})
            self._ends.wait(min(left, LOOK_SECONDS))
        if not self._ends.is_set():
            return False
        now = time.monotonic()
        self._last = now + self._seconds if self._last is None else self._last
        self._answer({"alive": True})
        time.sleep(min(LOOK_SECONDS, max(self._last - now, 0.0)))
        return now >= self._last


def _wait_for_end(requests: IO[bytes], ends: threading.Event) -> None:
    if requests.readline() != END:
        os._exit(1)  # the feed is gone
    ends.set()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of libraries, and the one that reads, end with it
