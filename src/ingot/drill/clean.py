"""O7: what a run that has ended leaves: processes and the sockets at which they listen, shared memory, temporary files,
a damaged checkpoint. No torch."""

import os
from contextlib import suppress
from pathlib import Path

from ingot.drill.job import END_SECONDS, gone_within, processes_of
from ingot.drill.listening import listening
from ingot.errors import IngotError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint


def shared_memory() -> set[str]:
    """Return the names in /dev/shm, without folders: those are of programs that use it as a disk."""
    with suppress(OSError):
        return {path.name for path in Path("/dev/shm").iterdir() if not path.is_dir()}
    return set()


def left_running(place: Path) -> str:
    """Return which processes of jobs with run folders in `place` are left, and the sockets at which they listen, after
    the seconds that their end may take; "" if none is."""
    alive = gone_within(END_SECONDS, lambda: processes_of(place))
    sockets = sorted(address for pid in alive for address in listening(pid))
    found = f"processes {alive} are left" if alive else ""
    return f"{found}, and listen at {', '.join(sockets)}" if sockets else found


def o7(folder: RunFolder, temporary: Path, memory_before: set[str]) -> str:
    """Return what a run that has ended left; "" if nothing.

    temporary: its folder for temporary files. memory_before: the names in /dev/shm before it.
    """
    if found := left_running(folder.root):
        return found
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
