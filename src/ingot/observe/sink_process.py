"""The process of one sink: `python -m ingot.observe.sink_process RUN NAME`, started and ended by `feed`.

It reads the run's event log, also what was written before it started, and calls the sink. It answers on standard output
with a line of JSON while it lives, and at its first trouble; "end" on standard input lets it read the rest and close.
"""

import hashlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ingot.errors import IngotError
from ingot.events import NewEvents
from ingot.machine.processes import die_with_parent
from ingot.observe.scalars import scalars_of
from ingot.observe.sink_state import SinkStateFile
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

Answer = Callable[[Mapping[str, Any]], None]


class EventDelivery:
    """The events of a run on their way to its sink. answer: called with {"alive": True} before and after each event,
    and with {"raised": words} at the first error of a call in this process."""

    def __init__(self, folder: RunFolder, config: RunConfig, sink: Sink, states: SinkStateFile, answer: Answer):
        self._config, self._sink, self._states, self._answer = config, sink, states, answer
        self.state = states.read()
        self._events = NewEvents(folder.events, position=self.state.position, most_bytes=_MOST_BYTES)
        self._folder = folder
        self._opened = -1
        self._raised = False

    def look(self) -> bool:
        """Give the sink the events since the last call, or a part of many. Returns whether there were any."""
        found = self._events.read_at()
        for position, event in found:
            self._give(position, event)
        return bool(found)

    def _give(self, position: int, event: Mapping[str, Any]) -> None:
        state, calls = self.state, []
        begun = state.begun + (event["kind"] in _BEGINS)
        attempt = max(begun - 1, 0)
        self._answer({"alive": True})
        if attempt != self._opened:  # what this raises ends the process: the event is given to the next one
            self._sink.open(run_id_of(self._folder, self._config), attempt, public_settings(self._config))
            self._opened = attempt
        step = event.get("step")
        if isinstance(step, int):
            values, tokens = self._numbers(step, event)
            if values:
                calls.append(lambda: self._sink.scalars(step, tokens, values))
            if event["kind"] == events.SAMPLE:
                calls.append(lambda: self._sink.text(step, f"sample/{event['prompt']}", str(event["text"])))
        facts = {key: value for key, value in event.items() if key not in ("kind", "step")}
        calls.append(lambda: self._sink.event(event["kind"], step, facts))
        state.position, state.begun, state.pending = position, begun, len(calls)
        self._states.write(state)
        for call in calls:
            state.pending -= 1
            try:
                call()
                state.sent += 1
            except Exception as error:
                state.left_out += 1
                self.report(error)
        self._states.write(state)

    def _numbers(self, step: int, event: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """Return the numbers of an event, and the tokens of its step. An event that is not as it should be, such as one
        of another version, costs its numbers, and not those after it."""
        try:
            values = scalars_of(event)
            return values, int(values.get("train/tokens", step * self._config.tokens_per_step))
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            self.state.left_out += 1
            self.report(error)
            return {}, 0

    def report(self, error: Exception) -> None:
        """Answer with the first error of a call."""
        if not self._raised:
            self._raised = True
            self._answer({"raised": described(error)})

    def close(self, seconds: float) -> None:
        """Close the sink, which has `seconds` for that."""
        self._answer({"alive": True})
        try:
            self._sink.close(seconds)
        except Exception as error:
            self.report(error)


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run for trackers, without those of sinks and alerts: addresses may hold passwords."""
    private = ("sinks.", "alerts.")
    return {name: value for name, value in config.settings().items() if not f"{name}.".startswith(private)}


def run_id_of(folder: RunFolder, config: RunConfig) -> str:
    """Return the name of a run for trackers: the same for the life of its folder, and no other run has it."""
    with folder.events.open("rb") as log:
        first = log.readline()
    return f"{config.name}-{hashlib.sha256(first).hexdigest()[:8]}"


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
    ends = threading.Event()
    threading.Thread(target=_wait_for_end, args=(sys.stdin.buffer, ends), daemon=True).start()

    def answer(fact: Mapping[str, Any]) -> None:
        answers.write(json.dumps(fact).encode() + b"\n")
        answers.flush()

    folder = RunFolder(Path(root))
    try:
        config = recorded_run(folder.config)
        sink, limits = make_sink(folder, config, name)
        delivery = EventDelivery(folder, config, sink, SinkStateFile(folder.sinks / f"{name}.json"), answer)
        while True:
            ending = ends.is_set()
            if not delivery.look():
                if ending:
                    break
                ends.wait(LOOK_SECONDS)
            answer({"alive": True})
    except Exception as error:
        traceback.print_exc()
        answer({"refused": described(error)})
        return 1
    delivery.close(limits.close_seconds)
    answer({"closed": True})
    return 0


def _wait_for_end(requests: IO[bytes], ends: threading.Event) -> None:
    if requests.readline() != END:
        os._exit(1)  # the feed is gone
    ends.set()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of libraries, and the one that reads, end with it
