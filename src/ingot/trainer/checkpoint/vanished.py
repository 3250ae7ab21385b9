"""The proof that a run has saved checkpoints, from the files besides them: a run whose checkpoints vanished is stopped.

Without this check, a run whose checkpoint folder was removed, or whose volume is not mounted, would start at step 0 and
overwrite its ledger. No torch.
"""

import re

from ingot.errors import CheckpointError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders

_SEGMENT = re.compile(r"steps-(\d+)-(\d+)\.i64")


def saved_steps(folder: RunFolder) -> dict[str, int]:
    """Return the newest step that each record of the run shows as saved: {"events.jsonl": 40, "ledger": 40}.

    A record that shows no saved step is left out. The files of the checkpoints themselves are not read.
    """
    started, in_events = False, 0
    for event in read_events(folder.events, events.RUN_STARTED, events.CHECKPOINT):
        started = started or event["kind"] == events.RUN_STARTED
        step = event.get("from_step" if event["kind"] == events.RUN_STARTED else "step")
        in_events = max(in_events, step if isinstance(step, int) else 0)
    names = [path.name for path in folder.ledger.iterdir()] if folder.ledger.is_dir() else []
    segments = [(int(m[1]), int(m[2])) for name in names if (m := _SEGMENT.fullmatch(name))]
    # A segment is written before its checkpoint, so a run that was killed in its first save may have a segment and no
    # checkpoint; later segments follow a verified checkpoint. Without a log of the start, the first one counts, too.
    in_ledger = max((last for first, last in segments if first > 1 or not started), default=0)
    found = {folder.events.name: in_events, folder.ledger.name: in_ledger}
    return {name: step for name, step in found.items() if step > 0}


def require_checkpoints(folder: RunFolder, supervised: int = 0) -> None:
    """Raise CheckpointError if the run has saved a step, but no folder of a checkpoint is there.

    supervised: the newest step that the supervisor of this job saw saved; 0: none.
    """
    if candidate_folders(folder.checkpoints):
        return
    shown = saved_steps(folder) | ({"supervisor": supervised} if supervised else {})
    if not shown:
        return
    step, path = max(shown.values()), folder.checkpoints
    leftovers = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    state = f"has only {', '.join(leftovers)}" if leftovers else "is empty" if path.is_dir() else "does not exist"
    records = ", ".join(f"{name}: step {number}" for name, number in shown.items())
    raise CheckpointError(
        "E-CKPT-VANISHED",
        f"{folder.root} has saved step {step} ({records}), but {path} {state}",
        rule="a run that has saved a checkpoint never starts again from step 0 on its own; nothing was changed",
        fix="bring the checkpoints back (mount their volume, or restore a copy), then run the same command; or start "
        f"again and keep the old run aside: ingot train {folder.root} --fresh --archive",
        step=step,
        shown=shown,
        folder=str(path),
        exists=path.is_dir(),
        leftovers=leftovers,
    )
