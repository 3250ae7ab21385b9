"""Which checkpoint a user means by a path."""

from pathlib import Path

from ingot.errors import CheckpointError, UsageError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """The run folder and the checkpoint that `path` names: a run folder means its newest one.

    Raises UsageError when `path` is neither a run folder nor a checkpoint in one, CheckpointError when there is none.
    """
    folder = RunFolder(path)
    if folder.config.is_file():
        candidates = candidate_folders(folder.checkpoints)
        if not candidates:
            raise CheckpointError(f"{path} has no checkpoint yet", fix=f"ingot train {path}")
        return folder, candidates[0]
    run = RunFolder(path.resolve().parent.parent)
    if run.config.is_file() and path.resolve().parent == run.checkpoints.resolve() and path.is_dir():
        return run, path
    raise UsageError(
        f"{path} is neither a run folder nor a checkpoint in one",
        rule="a run folder has run.toml, its checkpoints lie in checkpoints/step-*",
        fix="name the folder that ingot train wrote",
    )
