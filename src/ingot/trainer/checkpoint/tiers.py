"""The tier that a run continues from: its local disk, or the store if that has a newer checkpoint. No torch."""

from collections.abc import Callable

from ingot.errors import ConfigError, IngotError
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import StoreUnreachable
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.stored import StoredCheckpoints
from ingot.units import format_bytes, format_seconds


def fetch_newest(
    folder: RunFolder, tier: RemoteTier | None, log: Callable[..., None], say: Callable[[str], None]
) -> None:
    """Fetch the newest checkpoint from the store, if the local disk has none that is as new, and report it.

    A store that does not answer is a warning if the run has a local checkpoint. Without one the error is raised: the
    run could have steps in the store, which training from step 0 would repeat.
    """
    if tier is None:
        return
    try:
        fetched = tier.fetch_newest()
    except StoreUnreachable as error:
        if not candidate_folders(folder.checkpoints):
            raise
        say(f"WARNING   {error.found}; the run continues from its local checkpoints")
        return
    if fetched is None:
        return
    for step, reason in fetched.refused.items():
        log(events.CHECKPOINT_REFUSED, step=step, path=tier.url, reason=reason)
        say(f"refused   {reason}; trying the next older one")
    log(events.CHECKPOINT_FETCHED, step=fetched.step, store=tier.url, bytes=fetched.bytes, seconds=fetched.seconds)
    say(
        f"fetched   step {fetched.step} from {tier.url}  {format_bytes(fetched.bytes)}  "
        f"{format_seconds(fetched.seconds)}  the local disk has no checkpoint as new"
    )


def fetch_again(tier: RemoteTier | None, step: int, say: Callable[[str], None]) -> bool:
    """Replace the damaged local checkpoint of `step` by the one in the store. Returns whether the store had a sound
    one."""
    if tier is None:
        return False
    try:
        if step not in tier.steps():
            return False
        tier.fetch(step, whole=False)
    except IngotError as error:
        say(f"WARNING   the checkpoint of step {step} in {tier.url} is not used: {error.found}")
        return False
    say(f"fetched   step {step} from {tier.url}, in place of the damaged one")
    return True


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
