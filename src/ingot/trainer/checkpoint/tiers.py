"""The tier that a run continues from: its local disk, or the store if its checkpoint comes first. No torch."""

import contextlib
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import NotStored, StoreRefused, StoreUnreachable
from ingot.trainer.checkpoint.fetch import Fetched, OnManifest, place_in_order
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.stored import StoredCheckpoints
from ingot.units import format_bytes, format_seconds


def fetch_newest(
    folder: RunFolder,
    tier: RemoteTier | None,
    log: Callable[..., None],
    say: Callable[[str], None],
    on_manifest: OnManifest = lambda manifest: None,
) -> Fetched | None:
    """Fetch the newest checkpoint from the store, if the local disk has none that is as new, report and return it.

    on_manifest: raises an error if the checkpoint with this manifest, which would be fetched, is not of this run.
    A store that does not answer, or refuses, is a warning if the run has a local checkpoint: a launcher has looked for
    its lease there, so this happens when ranks start again. Without one the error is raised: the run could have steps
    in the store, which training from step 0 would repeat.
    """
    if tier is None:
        return None
    try:
        fetched = tier.fetch_newest(partial(_report_refused, tier, log, say), on_manifest)
    except (StoreUnreachable, StoreRefused) as error:
        if not candidate_folders(folder.checkpoints):
            raise
        say(f"WARNING   {error.found}; the run continues from its local checkpoints")
        return None
    except (CheckpointError, NotStored) as error:  # neither tier has a sound one
        with contextlib.suppress(IngotError):  # a store that no longer answers must not hide the first error
            error.fix += _from_stored_weights(folder, tier)
        raise
    if fetched is not None:
        _report_fetched(tier, fetched, "the local disk has no checkpoint as new", log, say)
    return fetched


def _from_stored_weights(folder: RunFolder, tier: RemoteTier) -> str:
    """Return the commands that begin a new run from the newest weights in the store; "" if it has none."""
    steps = StoredCheckpoints(folder.weights, tier.store).steps()
    if not steps:
        return ""
    save = folder.weights.checkpoint(steps[0])
    fetch = f"ingot ckpt fetch {folder.root} --weights --step {steps[0]}"
    return f"; or begin a new run from the weights of step {steps[0]}: {fetch}, then init = {save} in its run file"


def fetch_instead(
    tier: RemoteTier | None,
    step: int,
    seen: Collection[int],
    following: Path | None,
    *,
    again: bool,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> tuple[int, list[str]]:
    """Fetch a checkpoint in place of the local one of `step`, which was refused: if `again`, the stored one of this
    step; else the next one in the store that a resume would try before `following`, the next local one.

    seen: the steps of the local ones that were refused or follow. Returns the step of what was fetched, 0 if nothing
    was, and why stored ones were refused, all of which is reported. A store that does not answer has nothing.
    """
    if tier is None:
        return 0, []
    reasons: list[str] = []

    def refused(step: int, error: IngotError) -> None:
        reasons.append(error.found)
        _report_refused(tier, log, say, step, error)

    try:
        if again and tier.fetch_again(step, refused):
            say(f"fetched   step {step} from {tier.url}, in place of the damaged one")
            return step, reasons
        fetched = tier.fetch_before(place_in_order(following) if following else None, seen, refused)
    except IngotError as error:
        say(f"WARNING   no checkpoint of {tier.url} is used: {error.found}")
        return 0, reasons
    if fetched is None:
        return 0, reasons
    _report_fetched(tier, fetched, "the local disk has no sound checkpoint as new", log, say)
    return fetched.step, reasons


def _report_refused(
    tier: RemoteTier, log: Callable[..., None], say: Callable[[str], None], step: int, error: IngotError
) -> None:
    log(events.CHECKPOINT_REFUSED, step=step, path=tier.url, reason=error.found)
    say(f"refused   {error.found}; trying the next older one")


def _report_fetched(
    tier: RemoteTier, fetched: Fetched, why: str, log: Callable[..., None], say: Callable[[str], None]
) -> None:
    log(events.CHECKPOINT_FETCHED, step=fetched.step, store=tier.url, bytes=fetched.bytes, seconds=fetched.seconds)
    size, seconds = format_bytes(fetched.bytes), format_seconds(fetched.seconds)
    say(f"fetched   step {fetched.step} from {tier.url}  {size}  {seconds}  {why}")


def require_empty(folder: RunFolder, tier: RemoteTier | None) -> None:
    """Raise ConfigError if the store holds checkpoints: a new run would continue from them. Weights alone count too: a
    new run would remove them, and has the same names for its own."""
    if tier is not None and (steps := tier.steps() or StoredCheckpoints(folder.weights, tier.store).steps()):
        raise ConfigError(
            "E-TIER-NOT-EMPTY",
            f"{tier.url} holds checkpoints up to step {steps[0]}",
            rule="a run that starts again has a place of its own in the store",
            fix="set checkpoint.remote.url to another place, or remove these checkpoints",
            store=tier.url,
            step=steps[0],
        )
