"""Build the library of disk faults (killpoints.c), and name the environment in which a process has one of them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ingot.schema.run_folder import RunFolder

SOURCE = Path(__file__).with_name("killpoints.c")
KEEPER = "ingot-keeper-"  # the names of the sockets of keepers begin with it


def missing() -> str:
    """Return why the library cannot be built here; "" if it can."""
    if os.uname().sysname != "Linux":
        return "reads paths of open files in /proc, which only Linux has"
    return "" if shutil.which("cc") else "needs a C compiler named cc"


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Compile a library into `folder` unless it is there. Returns its path."""
    library = folder / f"{source.stem}.so"
    if not library.exists():
        flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def fault(folder: RunFolder, do: str, k: int = 0, *, who: str, log: Path | None = None, **more: object) -> dict:
    """Return the variables for fault `do` at call `k` on the checkpoints and the ledger of a run (see killpoints.c).

    who: "rank" or "writer", with ":1" that of rank 1. log: the file that gets the counted calls. more: other variables,
    without their prefix.
    """
    variables = {"DO": do, "K": k, "WHO": who, "BELOW": f"{folder.checkpoints}:{folder.ledger}", **more}
    if log is not None:
        variables["LOG"] = log
    return {f"BOARD_{name.upper()}": str(value) for name, value in variables.items()}


def read_calls(log: Path) -> list[tuple[str, str]]:
    """Return the counted calls of a log, in order, as (name, path)."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(name, path) for name, _, path in (line.partition(" ") for line in lines)]


def file_of(path: str) -> str:
    """Return the kind of file that a counted call is about, for people."""
    if path.startswith(KEEPER):
        return "keeper"
    folder, name = path.rsplit("/", 2)[1:]
    if folder.startswith(".removed-") or name.startswith(".removed-"):
        return "old checkpoint"
    if "ledger" in (folder, name):
        return "samples"
    if "/disk-" in path and not name.startswith(("rank-", ".rank-")):
        return "folder on a disk"
    kinds = {".saving-": "folder of the save", "step-": "checkpoint", "rank-": "tensors", ".rank-": "tensors"}
    kind = next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), "folder of checkpoints")
    return "manifest" if "manifest.json" in name else kind


def place_of(call: tuple[str, str]) -> str:
    """Return a counted call for people: the kind of its file, and its name."""
    return f"{file_of(call[1])}: {call[0]}"


def after_renames(calls: Sequence[tuple[str, str]]) -> list[int]:
    """Return the numbers of the calls right after each rename, and of the last call: what has to be durable by then
    must be on the disk."""
    return sorted(
        {n + 2 for n, (name, _) in enumerate(calls) if name == "rename" and n + 2 <= len(calls)} | {len(calls)}
    )
