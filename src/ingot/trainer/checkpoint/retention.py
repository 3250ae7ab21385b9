"""Which checkpoint folders stay: the newest few. No torch.

Everything is renamed before it is removed, so that half a removal is no checkpoint.
"""

import shutil

from ingot.schema.run_folder import RunFolder
from ingot.storage import fsync_dir
from ingot.trainer.checkpoint.manifest import candidate_folders, is_finished

SAVING = ".saving-"  # a folder with this prefix was never a checkpoint
REMOVED = ".removed-"  # ... and one with this prefix is none any more


def publish(folder: RunFolder, step: int) -> None:
    """Make the complete temporary folder of `step` the checkpoint of that step."""
    path = folder.checkpoint(step)
    if path.exists():  # a checkpoint of this step that did not verify, which is why the step was made again
        aside = path.with_name(REMOVED + path.name)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    path.with_name(SAVING + path.name).rename(path)
    fsync_dir(path.parent)


def prune(folder: RunFolder, step: int, keep: int) -> None:
    """Remove what is older than the newest `keep` whole checkpoints, that of `step`, just saved, being the newest.

    A folder of a later step was refused when this run resumed (a flipped bit keeps its size): it counts for nothing,
    or it would push out the checkpoints that can be used.
    """
    whole = 0
    for path in candidate_folders(folder.checkpoints):
        if int(path.name.removeprefix("step-")) > step:
            continue
        if whole >= keep:
            path.rename(path.with_name(REMOVED + path.name))
        else:
            whole += path == folder.checkpoint(step) or is_finished(path)
    remove_leftovers(folder)


def remove_leftovers(folder: RunFolder) -> list[str]:
    """Remove what killed saves and prunes left. Only for the owner of the run's lock, while nothing is being saved."""
    removed = []
    for prefix in (SAVING, REMOVED):
        for path in sorted(folder.checkpoints.glob(prefix + "*")):
            shutil.rmtree(path)
            removed.append(path.name)
    return removed
