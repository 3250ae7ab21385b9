"""O7: what a run that has ended leaves: processes, shared memory, temporary files, a damaged checkpoint. No torch."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ingot.errors import IngotError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    with suppress(OSError):
        return {path.name for path in Path("/dev/shm").iterdir()}
    return set()


def o7(folder: RunFolder, temporary: Path, memory_before: set[str], alive: Iterable[int]) -> str:
    """Return what a run that has ended left; "" if nothing.

    temporary: its folder for temporary files. memory_before: the names in /dev/shm before it. alive: its processes that
    still live.
    """
    if alive := list(alive):
        return f"processes {alive} are left"
    if new := [name for name in shared_memory() - memory_before if not _in_use(f"/dev/shm/{name}")]:
        return f"shared memory {sorted(new)} is left"  # one in use is of another program: ours have ended
    if files := [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]:
        return f"temporary files {files} are left"
    if files := leftovers(folder):
        return f"{files} are left in the run folder"
    candidates = candidate_folders(folder.checkpoints)
    if not candidates:
        return "there is no checkpoint"
    try:
        verify_checkpoint(candidates[0])
    except IngotError as error:
        return f"the last checkpoint is damaged: {error.found}"
    return ""


def leftovers(folder: RunFolder) -> list[str]:
    """Return what saves and atomic writes leave in a run folder if they are killed."""
    names = [str(path.relative_to(folder.root)) for path in folder.root.rglob("*") if _is_temporary(path.name)]
    return sorted(names + ([folder.stop_request.name] if folder.stop_request.exists() else []))


def _is_temporary(name: str) -> bool:
    return name.startswith((".saving-", ".removed-")) or name.endswith(".tmp")


def _in_use(path: str) -> bool:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if path in Path(f"/proc/{entry.name}/maps").read_text():
                    return True
                if any(str(link.readlink()) == path for link in Path(f"/proc/{entry.name}/fd").iterdir()):
                    return True
    return False
