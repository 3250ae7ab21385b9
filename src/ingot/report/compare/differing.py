"""The settings in which runs differ, and what limits a comparison of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.planner.show.layout import degrees_text
from ingot.report.compare.curves import Axis, ComparedRun
from ingot.schema.changes import ChangeClass, class_of
from ingot.units import counted

_OTHER_NUMBERS, _SAME_BITS, MACHINE = ChangeClass.OTHER_NUMBERS, ChangeClass.SAME_BITS, "machine"
# Settings whose values are paths relative to the run folder. The code of plug-ins is compared, not its place.
_PATHS = ("init", "data.tokens", "data.heldout", "data.tokenizer", "parallel.offload_folder")
_ORDER = (ChangeClass.REFUSED, _OTHER_NUMBERS, ChangeClass.SAME_MATHEMATICS, MACHINE, _SAME_BITS)
_OF_SAMPLES = ("seed", "train.seq_len", "train.global_batch")
_DIGITS = 12  # of a hash


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """A setting, or a fact about the machine, in which runs differ. kind: the class of its change, as in
    schema/changes.py ("same bits": no number depends on it), or "machine". values: one per run; None: not set."""

    key: str
    kind: str
    values: list[Any]


def differing_settings(runs: list[ComparedRun]) -> list[SettingDifference]:
    """Return what differs between runs: first what changes the numbers of a run, at last what changes none."""
    found = []
    for tables, is_machine in (
        ([_settings(run) for run in runs], False),
        ([dict(_machine(run)) for run in runs], True),
    ):
        for key in sorted({key for table in tables for key in table}):
            values = [table.get(key) for table in tables]
            if any(value != values[0] for value in values[1:]):
                kind = MACHINE if is_machine else str(class_of(key))
                found.append(SettingDifference(key=key, kind=kind, values=values))
    return sorted(found, key=lambda one: _ORDER.index(one.kind))


def _settings(run: ComparedRun) -> dict[str, Any]:
    values = run.config.settings()
    for key in _PATHS:
        if isinstance(value := values.get(key), str) and value:
            values[key] = str((run.path / value).resolve())
    return {key: value for key, value in values.items() if key != "name"}


def _machine(run: ComparedRun) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the ranks, the machine, the data and the versions of the last attempt."""
    start = run.data.starts[-1] if run.data.starts else {}
    for name, key in (("ranks", "world_size"), ("device", "device"), ("parameters", "parameters")):
        if start.get(key) is not None:
            yield name, start[key]
    if isinstance(layout := start.get("layout"), Mapping) and layout:
        yield "layout", degrees_text(layout)
    if isinstance(data := start.get("data_fingerprint"), str):
        yield "data", data[:_DIGITS]
    for table in ("hardware", "versions"):
        for key, value in start[table].items() if isinstance(start.get(table), Mapping) else ():
            yield f"{table}.{key}", value


def same_tokens(runs: list[ComparedRun]) -> bool | None:
    """Return whether the runs have the same tokenizer: by the tokens that they were trained on, the hash in their token
    folders, or the size of the vocabulary; None if that is not known."""
    trained_on = {_fingerprint(run) for run in runs}
    if len(trained_on) == 1 and None not in trained_on:
        return True
    if all(run.tokens for run in runs):
        return len({run.tokens.tokenizer_sha256 for run in runs if run.tokens}) == 1
    if len({run.config.model.vocab_size for run in runs}) > 1:
        return False
    paths = {(run.path / run.config.data.tokens).resolve() for run in runs}
    return True if len(paths) == 1 else None


def same_samples(a: ComparedRun, b: ComparedRun) -> bool:
    """Return whether two runs saw the same samples in the same steps: they have the same tokens, seed and batches."""
    if (trained_on := _fingerprint(a)) is None or trained_on != _fingerprint(b):
        return False
    first, second = _settings(a), _settings(b)
    keys = [
        key
        for key in first.keys() | second.keys()
        if key in _OF_SAMPLES or (key.startswith("data.") and not class_of(key).is_free)
    ]
    return all(first.get(key) == second.get(key) for key in keys)


def _fingerprint(run: ComparedRun) -> str | None:
    """Return the hash of the tokens that the run was trained on, from its log."""
    found = run.data.starts[-1].get("data_fingerprint") if run.data.starts else None
    return found if isinstance(found, str) and found else None


def notes_of(runs: list[ComparedRun], same: bool | None, by: Axis) -> list[str]:
    """Return sentences about what limits the comparison. same: as `same_tokens`."""
    notes = []
    if same is False:
        bits = all(run.bytes_per_token for run in runs)
        notes.append(
            "The runs have different tokenizers: their losses per token cannot be compared. "
            + ("Compare bits per byte." if bits else "Their logs lack bits per byte, too.")
        )
        if by == "tokens":
            notes.append("Tokens of different tokenizers have different lengths: equal tokens are not equal text.")
    elif same is None:
        notes.append("The token folders cannot be read: if the tokenizers differ, the losses cannot be compared.")
    if len({_heldout(run) for run in runs if run.heldout}) > 1:
        notes.append("The held-out texts differ: their bits per byte can only be compared with care.")
    for number, run in enumerate(runs):
        letter = letter_of(number)
        for event in run.data.changed_settings:
            old, new = (setting_text(event.get(name)) for name in ("old", "new"))
            notes.append(f"{letter} changed {event.get('key')} from {old} to {new} after step {event['step']:,.0f}.")
        if run.data.headless:
            step = run.data.headless["step"]
            notes.append(f"The log of {letter} lacks its start: its training time counts from step {step:,}.")
        infinite = sum(not math.isfinite(event["loss"]) for event in run.data.steps.values())
        if infinite:
            notes.append(f"{letter}: left out {counted(infinite, 'step')} whose loss is not finite.")
        if run.data.unreadable_events:
            notes.append(f"{letter}: left out {counted(run.data.unreadable_events, 'event')} that cannot be read.")
    return notes


def _heldout(run: ComparedRun) -> tuple:
    manifest = run.heldout
    assert manifest is not None
    return manifest.corpus_sha256, manifest.seed, manifest.heldout_fraction


def letter_of(number: int) -> str:
    """Return the letter of a run by its number, from 0: A, B, ..., Z, A1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def setting_text(value: Any) -> str:
    """Return a value of a setting for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Path | str):
        return str(value) or '""'
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value)) or "none"
    return str(value)
