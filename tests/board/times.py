"""The times of a row, judged by the medians of its seeds: against its limits, and against the board that is recorded.

A busy machine makes any run slow, so only seeds that began on a quiet one count. The average load does not show that:
the board itself makes much of it. Programs that want a core before a row starts its own are those of others.

Machines described in the same words, and one machine on two days, differ by a factor of three. So each line has the
time of a fixed piece of work, and times on record are compared after that factor. The limits are absolute.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

BUSY = 0.5  # programs of others per core, from which on no time is judged
_SAMPLES, _APART = 5, 0.02  # s
_WORK = 200_000  # additions: about 10 ms
_FACTOR, _LEAST = 2.0, 0.25  # a median has become worse if it is that many times the recorded one, and by that many s
_WORDS = {"detect": "detected", "recover": "trained again", "after": "trained again after its detection"}


@dataclass(frozen=True)
class Limits:
    """The longest medians that a row may have, in seconds; None: there is no limit. detect: O4. recover: O5. after:
    from the first to the second."""

    detect: float | None = None
    recover: float | None = None
    after: float | None = None


NO_LIMITS = Limits()
# The goals for this toy run. They are several times what a quiet machine needs.
CRASH = Limits(detect=1.0, recover=6.0)
NEW_DISK = Limits(recover=15.0)
WARM = Limits(detect=1.0, after=2.5)  # a warm spare, or a partial restart


def load_now() -> dict[str, float]:
    """Return the average load of the last minute, the programs of others that want a core now, per core, and the
    milliseconds of a fixed piece of work in Python."""
    counts = []
    for _ in range(_SAMPLES):
        counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)  # without this process
        time.sleep(_APART)
    others = max(median(counts), 0) / len(os.sched_getaffinity(0))
    return {"load": round(os.getloadavg()[0], 1), "others": round(others, 2), "work_ms": _work_ms()}


def _work_ms() -> float:
    """Return the least CPU time of several rounds: what interrupts a round only adds to it."""
    times = []
    for _ in range(_SAMPLES):
        began = time.process_time()
        sum(number & 7 for number in range(_WORK))
        times.append(time.process_time() - began)
    return round(1000 * min(times), 2)


def quiet(lines: Sequence[Mapping]) -> list[Mapping]:
    """Return the lines of seeds that began on a quiet machine. Lines of an earlier board do not show it."""
    return [line for line in lines if line.get("others", BUSY) < BUSY]


def too_slow(limits: Limits, lines: Sequence[Mapping], recorded: Sequence[Mapping]) -> list[str]:
    """Return what is wrong with the times of a row; none if no seed began on a quiet machine.

    lines: of the row, of all seeds. recorded: of the same row on the recorded board. They count if the machine is
    described in the same words and both boards have the time of the fixed work, whatever the load was.
    """
    judged = quiet(lines)
    if not judged:
        return []
    ours, wrong = _medians(judged), []
    for name, limit in asdict(limits).items():
        if limit is not None and name not in ours:
            wrong.append(f"no seed shows when it was {_WORDS[name]}, whose limit is {limit:g} s")
        elif limit is not None and ours[name] > limit:
            wrong.append(
                f"{_WORDS[name]} after {ours[name]:.2f} s, the median of {len(judged)}; the limit is {limit:g} s"
            )
    machines = {line.get("machine") for line in judged}
    comparable = [line for line in recorded if line.get("machine") in machines and "work_ms" in line]
    with_work = [line for line in judged if "work_ms" in line]
    if not comparable or not with_work:
        return wrong
    slower = median(line["work_ms"] for line in with_work) / median(line["work_ms"] for line in comparable)
    before = {name: seconds * max(slower, 1.0) for name, seconds in _medians(comparable).items()}
    for name in ("detect", "recover"):
        if name in ours and name in before and ours[name] > max(_FACTOR * before[name], before[name] + _LEAST):
            found = f"{_WORDS[name]} after {ours[name]:.2f} s, the median of {len(judged)}"
            times = f", on a machine {slower:.1f} times as slow" if slower > 1 else ""
            wrong.append(
                f"{found}; more than {_FACTOR:g} times the {before[name] / max(slower, 1.0):.2f} s on record{times}"
            )
    return wrong


def not_judged(limits: Limits, lines: Sequence[Mapping]) -> str:
    """Return how many seeds of a row with limits count for no time, and why; "" if all do."""
    lacking = len(lines) - len(quiet(lines))
    if not lacking or limits == NO_LIMITS:
        return ""
    busy = [line["others"] for line in lines if line.get("others", 0) >= BUSY]
    why = f"up to {max(busy):g} other programs per core" if busy else "no load on record"
    return f"times of {lacking} seeds not judged: {why}"


def _medians(lines: Sequence[Mapping]) -> dict[str, float]:
    """Return the medians of those times that lines have, by the names of their limits."""
    values: dict[str, list[float]] = {}
    for line in lines:
        seen, back = line["detect_s"], line["recover_s"]
        after = None if seen is None or back is None else back - seen
        for name, value in (("detect", seen), ("recover", back), ("after", after)):
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: median(found) for name, found in values.items()}
