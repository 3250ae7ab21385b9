"""The folder of a drill as it is now, for `ingot status`: what it is, its result, and the runs in it. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from ingot.drill.copied import RESULT, lock_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import is_locked


@dataclass(frozen=True, kw_only=True)
class DrillState:
    """The state of a drill.

    state: "running", "finished", or "interrupted" (it has no result). faults: how many it played. red: the rows that
    failed. runs: the folders of the copies that are there: while it runs, the undisturbed run and the one that is
    broken now; afterwards those of red rows.
    """

    folder: Path
    state: str
    faults: int
    red: tuple[str, ...]
    runs: tuple[Path, ...]


def is_drill(root: Path) -> bool:
    """Return whether a drill made the folder `root`."""
    return (root / RESULT).is_file()


def read_drill(root: Path) -> DrillState:
    """Return the state of the drill in the folder `root`, which is one."""
    try:
        result = json.loads((root / RESULT).read_bytes())
        rows, red = list(result["rows"]), tuple(str(row) for row in result["red"])
        state = "finished"
    except (OSError, ValueError, KeyError, TypeError):  # written when it ends
        rows, red, state = [], (), "interrupted"
    return DrillState(
        folder=root,
        state="running" if is_locked(lock_of(root)) else state,
        faults=sum(sum(row["faults"].values()) if isinstance(row.get("faults"), dict) else 1 for row in rows),
        red=red,
        runs=tuple(path for path in sorted(root.iterdir()) if RunFolder(path).config.is_file()),
    )
