"""The check of a folder of torch.distributed.checkpoint that is made before torch is imported, and its errors."""

from pathlib import Path

from ingot.errors import CheckpointError

METADATA = ".metadata"


def require_metadata(folder: Path) -> None:
    """Raise CheckpointError if `folder` has no metadata, or does not exist."""
    if not (folder / METADATA).is_file():
        missing = f"there is no file {METADATA}" if folder.is_dir() else "there is no such folder"
        raise refused_folder(folder, "E-DCP-READ", missing, file=METADATA)


def refused_folder(folder: Path, code: str, found: str, **facts: object) -> CheckpointError:
    """Return the error for a folder that is damaged or cannot be read safely. found: what is wrong with it."""
    return CheckpointError(
        code,
        f"{folder}: {found}",
        rule="a folder of torch.distributed.checkpoint is read without executing what its pickles name, and only if "
        "every byte of every tensor is there once",
        fix="copy the folder again; or save the weights again with torch.distributed.checkpoint.save, in torch's own "
        "format and as float32, bfloat16 or float16; or let the system that wrote them write safetensors files",
        path=str(folder),
        **facts,
    )
