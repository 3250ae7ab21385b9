"""Changes of settings or data on the way of a run: which there are, whether the user accepted them, and since when they
hold. No torch.

The launcher records what the user accepted, for the newest checkpoint. Which checkpoint the run really continues from
is known only after the ranks verified one: rank 0 then corrects the record, by which later readers know the settings
and tokens of every step.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ingot.errors import ConfirmationNeeded
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.accepted import AcceptedChanges, read_accepted, write_accepted
from ingot.schema.changes import SKIP, ChangeClass, SettingChange, changes_updates
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import setting_changes, settings_sha256
from ingot.schema.run_folder import RunFolder
from ingot.schema.step_ranges import StepSpan, merged, parse_step_range

DATA = "data.tokens"  # the token stream: its fingerprint is compared, not its path
_SHOWN_DIGITS = 12


class OtherData(SettingChange):
    """A change of the token stream. (A change of its path alone is free.)"""

    @property
    def kind(self) -> ChangeClass:
        return ChangeClass.OTHER_NUMBERS


def changes_since(
    manifest: CheckpointManifest, settings: Mapping[str, Any], data_fingerprint: str
) -> list[SettingChange]:
    """Return what differs between a checkpoint and the flat `settings` with their data; of all classes."""
    changes = setting_changes(manifest.settings, settings)
    if manifest.data_fingerprint != data_fingerprint:
        changes = [change for change in changes if change.key != DATA]
        before, after = manifest.data_fingerprint[:_SHOWN_DIGITS], data_fingerprint[:_SHOWN_DIGITS]
        changes.append(OtherData(DATA, before, after))
    return changes


def alters_steps_after(step: int, change: SettingChange) -> bool:
    """Return whether a change has an effect on the steps after `step`: data.skip may name earlier ones alone."""
    if change.key != SKIP:
        return not change.kind.is_free
    before, after = (merged(_spans(value), step) for value in (change.before, change.after))
    return before != after


def past_steps(step: int, change: SettingChange) -> list[StepSpan]:
    """Return the steps up to `step` that a change of data.skip adds or takes away; none for another setting."""
    if change.key != SKIP:
        return []
    before, after = (set(_spans(value)) for value in (change.before, change.after))
    return merged(StepSpan(one.first, min(one.last, step)) for one in before ^ after if one.first <= step)


def _spans(value: Any) -> list[StepSpan]:
    return [parse_step_range(one) for one in value] if isinstance(value, list | tuple) else []


def last_change(manifest: CheckpointManifest, changes: Iterable[SettingChange]) -> int:
    """Return the step after which the newest accepted change of the updates holds; 0: there is none.

    manifest: of the checkpoint that training continues from. changes: since it.
    """
    if any(changes_updates(one.key) for one in changes):
        return manifest.step
    return last_recorded_change(manifest.accepted or ())


def last_recorded_change(records: Iterable[AcceptedChanges]) -> int:
    """Return the step after which the newest change of the updates in `records` holds; 0: there is none."""
    return max((one.step for one in records if any(map(changes_updates, one.changes))), default=0)


def record_for(
    step: int, settings: Mapping[str, Any], data_fingerprint: str, changes: Iterable[SettingChange]
) -> AcceptedChanges:
    """Return the record of those `changes` that need confirmation."""
    confirmed = {change.key: (change.before, change.after) for change in changes if not change.kind.is_free}
    confirmed = {key: tuple(json.loads(json.dumps(values))) for key, values in confirmed.items()}  # as it is read back
    return AcceptedChanges(
        step=step, config_sha256=settings_sha256(settings), data_fingerprint=data_fingerprint, changes=confirmed
    )


def require_accepted(
    folder: RunFolder, manifest: CheckpointManifest, settings: Mapping[str, Any], data_fingerprint: str
) -> None:
    """Raise ConfirmationNeeded unless checkpoint `manifest` has the settings and data of the run, or the user accepted
    them. The launcher has compared and recorded them; this is the last check before weights are loaded."""
    changes = [c for c in changes_since(manifest, settings, data_fingerprint) if not c.kind.is_free]
    if not changes:
        return
    now = (settings_sha256(settings), data_fingerprint)
    if now not in [(one.config_sha256, one.data_fingerprint) for one in read_accepted(folder.accepted)]:
        what = "data" if [c.key for c in changes] == [DATA] else "settings"
        raise ConfirmationNeeded(
            "E-RUN-CHANGED",
            f"the run's {what} differ from those of its checkpoint at step {manifest.step}",
            rule="a changed setting must be confirmed with --accept-change",
            fix="run `ingot train`, which shows the changed keys and the flags that accept them",
            step=manifest.step,
            changed=what,
        )


def record_resumed(
    folder: RunFolder,
    manifest: CheckpointManifest,
    settings: Mapping[str, Any],
    data_fingerprint: str,
    log: Callable[..., None],
) -> None:
    """Record that the run continues from checkpoint `manifest` with these settings and data. Only rank 0 calls this.

    The records are then those of the checkpoint, and the change from it to now: records of later steps go, whose steps
    are trained again. A change that the event log does not have yet is logged.
    """
    records = read_accepted(folder.accepted)
    earlier = manifest.accepted
    if earlier is None:  # a checkpoint of an earlier version of ingot
        earlier = [one for one in records if one.step < manifest.step]
    now = record_for(manifest.step, settings, data_fingerprint, changes_since(manifest, settings, data_fingerprint))
    valid = [*earlier, *([now] if now.changes else [])]
    if valid != records:
        write_accepted(folder.accepted, valid)
    if not now.changes:
        return
    logged = {e.get("key"): (e.get("step"), e.get("new")) for e in read_events(folder.events, events.SETTING_CHANGED)}
    for key, (before, after) in now.changes.items():
        if logged.get(key) != (now.step, after):
            log(events.SETTING_CHANGED, key=key, old=before, new=after, step=now.step)
