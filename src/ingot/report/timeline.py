"""The timeline of a run in words: what its guards found, what was decided, and where training went on.

Found are bad steps, damage of the state, damaged data and weights in doubt; decided are measures, skipped updates,
passed data and roll-backs. Events of other kinds are not in it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.schema import events as kinds
from ingot.schema.alert import alert_of
from ingot.schema.alert import described as alert_text
from ingot.schema.guard_record import described, deviations_text, measure_of, retrained_text, retried_text
from ingot.schema.step_ranges import steps_text
from ingot.units import counted

_SHOWN_RANGES = 8  # of the steps that one entry names
_SIGNS = {
    "own_hash": "its state changed between two updates",
    "minority": "its copy differs from most others, which are equal",
    "undecided": "its copy differs from another one: one of the ranks with such an entry is damaged",
    "recomputed": "it computed other gradients of the same tokens than another rank: one of the ranks with such an "
    "entry is damaged",
    "recomputed_alone": "it computed other gradients of the same tokens than other ranks, which agree",
}
_VERDICTS = {
    "transient": "the damage of {} was transient: the same steps show none when trained again",
    "persistent": "the damage of {} is persistent: it came again when the same steps were trained again",
    "other": "{} was damaged when the steps were trained again: nothing is known of the first damage",
}


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """Something that a guard found, or that was decided because of it. time: Unix seconds. step: where it was found or
    decided. kind: of its event. text: a sentence for people, without the step."""

    time: float
    step: int
    kind: str
    text: str


def entry_of(event: Mapping[str, Any]) -> TimelineEntry | None:
    """Return the entry of an event; None if it has none. Raises KeyError, TypeError or ValueError if the event lacks
    what its kind has."""
    if (describe := _TEXTS.get(event["kind"])) is None or (text := describe(event)) is None:
        return None
    steps = event.get("steps")
    step = steps[0] if steps else event[_STEP_OF.get(event["kind"], "step")]
    return TimelineEntry(time=float(event["time"]), step=int(step), kind=event["kind"], text=text)


def timeline(events: Iterable[Mapping[str, Any]]) -> Iterator[TimelineEntry]:
    """Yield the entries of the events of a log, in order. Findings of steps one after the other are one entry, with
    the skipped updates of these steps, and so are passed data."""
    row: list[Mapping[str, Any]] = []  # events that make one entry
    for event in events:
        if row and _continues(row, event):
            row += [event] if event["kind"] == row[0]["kind"] else []
            continue
        if row:
            yield _of_row(row)
        if event["kind"] == kinds.SKIPPED and row and row[0]["kind"] == kinds.FINDING:
            found = {one["step"] for one in row}
            event = {**event, "steps": [step for step in event["steps"] if step not in found]}
        row = [event] if event["kind"] in (kinds.FINDING, kinds.PASSED) else []
        if not row and (entry := entry_of(event)):
            yield entry
    if row:
        yield _of_row(row)


def _continues(row: Sequence[Mapping[str, Any]], event: Mapping[str, Any]) -> bool:
    """Return whether an event belongs to the same entry as those of `row`."""
    kind = event["kind"]
    if row[0]["kind"] == kinds.PASSED:
        return kind == kinds.PASSED and event["steps"][0] == row[-1]["steps"][-1] + 1
    if kind == kinds.SKIPPED:
        return {*event["steps"]} <= {one["step"] for one in row}
    return kind == kinds.FINDING and event["step"] == row[-1]["step"] + 1


def _of_row(row: Sequence[Mapping[str, Any]]) -> TimelineEntry:
    if row[0]["kind"] == kinds.FINDING:
        return _of_findings(row)
    whole = {**row[0], "steps": [step for event in row for step in event["steps"]]}
    return TimelineEntry(
        time=float(row[0]["time"]), step=int(whole["steps"][0]), kind=kinds.PASSED, text=_passed(whole)
    )


def _of_findings(row: Sequence[Mapping[str, Any]]) -> TimelineEntry:
    worst = max(row, key=size_of)
    own = entry_of({**worst, "skipped": False})
    assert own is not None
    skipped = [one["step"] for one in row if one.get("skipped")]
    text = own.text
    if len(row) > 1:
        found = ", ".join(dict.fromkeys(kind for one in row for kind in one["found"]))
        text = f"the guard found {found} in {_steps([one['step'] for one in row])}; the largest in step "
        text += f"{worst['step']:,}: {own.text.partition('; ')[2]}"
    if skipped:
        text += f"; skipped {'its update' if len(row) == 1 else 'the updates of ' + _steps(skipped)}"
    return replace(own, time=float(row[0]["time"]), step=int(row[0]["step"]), text=text)


def size_of(finding: Mapping[str, Any]) -> tuple[float, int]:
    """Return a key that orders `finding` events by the size of the trouble, then by step."""
    infinite = any("not finite" in kind for kind in finding["found"])  # its deviations have no meaning
    return math.inf if infinite else max(finding["loss_sigmas"], finding["norm_sigmas"]), finding["step"]


def _finding(event: Mapping[str, Any]) -> str:
    sizes = deviations_text(event["found"], event["loss_sigmas"], event["norm_sigmas"])
    text = f"the guard found {', '.join(event['found'])}; loss {event['loss']:.4g}{sizes[0]}"
    text += f", gradient norm {event['grad_norm']:.4g}{sizes[1]}"
    return text + ("; skipped its update" if event.get("skipped") else "")


def _damaged(event: Mapping[str, Any]) -> str:
    what = "gradients" if event["sign"].startswith("recomputed") else "state"
    where = event["tensor"] and f": tensor {event['tensor']}"
    if event.get("bit") is not None:
        where += f", bit {event['bit']} of element {event['element']:,} flipped"
    text = f"the hashes of the {what} found damage of rank {event['rank']:d} on {event['host']}{where}"
    return f"{text}; {_SIGNS[event['sign']]}"


def _replayed(event: Mapping[str, Any]) -> str:
    ranks = (" and " if event["named"] else " or ").join(f"rank {rank}" for rank in event["ranks"])
    return _VERDICTS[event["verdict"]].format(ranks)


def _rolled_back(event: Mapping[str, Any]) -> str:
    back, again = event["to_step"], event["from_step"] - event["to_step"]
    text = f"rolled back to the checkpoint of step {back:,}"
    if event.get("why"):
        reasons: dict[str, list[int]] = {}
        for one in event.get("passed_over", ()):
            reasons.setdefault(str(one["reason"]), []).append(int(one["step"]))
        others = [f"; not {_each(steps)}: {reason}" for reason, steps in reasons.items()]
        text += f", because {event['why']}{''.join(others)}"
    return f"{text}; {again:,} {'step' if again == 1 else 'steps'} trained again"


def _passed(event: Mapping[str, Any]) -> str:
    return f"passed the data of {_steps(event['steps'])}"


def _skipped(event: Mapping[str, Any]) -> str:
    steps = event["steps"]
    return f"skipped the {'update' if len(steps) == 1 else 'updates'} of {_steps(steps)}"


def _quarantined(event: Mapping[str, Any]) -> str:
    windows = event["windows"]
    return f"left out {counted(windows, 'window')} of the data: {event['found']}"


def _listed(event: Mapping[str, Any]) -> str:
    documents = event["documents"]
    return f"left out {counted(event['windows'], 'window')} with {counted(documents, 'document')} of {event['path']}"


def _metrics_lost(event: Mapping[str, Any]) -> str:
    what = "the rest of the attempt is not recorded" if event["ended"] else "more may follow"
    return f"metrics of rank {event['rank']}: {counted(event['rows'], 'row')} dropped, {what}: {event['reason']}"


def _sanity(event: Mapping[str, Any]) -> str | None:
    if not event["suspect"]:
        return None
    return f"held-out text has a loss of {event['loss']:.4g}: the checkpoint of this step is suspect"


def _each(steps: Sequence[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(f'{step:,}' for step in steps)}"


def _steps(steps: Sequence[int]) -> str:
    ranges = steps_text(steps).split(", ")
    more = f" and {len(ranges) - _SHOWN_RANGES} more" if len(ranges) > _SHOWN_RANGES else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(ranges[:_SHOWN_RANGES])}{more}"


def _rewound(event: dict) -> str:
    steps = ", ".join(map(str, event["set_aside"]))
    aside = f"; newer ones are set aside by the user: steps {steps}, in {event['folder']}" if steps else ""
    return f"by command, the run goes back to the checkpoint of step {event['step']}{aside}"


_TEXTS = {
    kinds.FINDING: _finding,
    kinds.SKIPPED: _skipped,
    kinds.PASSED: _passed,
    kinds.GUARD: lambda event: f"guard: {described(measure_of(event))}",
    kinds.GUARD_REPLAYED: lambda event: f"guard: {retrained_text(event['first'], event['last'], event['verdict'])}",
    kinds.ALERT: lambda event: f"alert: {alert_text(alert_of(event))}",
    kinds.QUARANTINED: _quarantined,
    kinds.LISTED: _listed,
    kinds.METRICS_LOST: _metrics_lost,
    kinds.SANITY: _sanity,
    kinds.RETRIED: lambda event: f"computed again: {retried_text(event)}",
    kinds.STATE_DAMAGED: _damaged,
    kinds.STATE_REPLAYED: _replayed,
    kinds.ROLLED_BACK: _rolled_back,
    kinds.REWOUND: _rewound,
}
KINDS = frozenset(_TEXTS)
_STEP_OF = {kinds.GUARD: "last", kinds.GUARD_REPLAYED: "last", kinds.ROLLED_BACK: "from_step"}
