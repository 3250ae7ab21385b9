"""The places of tensor files: the folder of the checkpoint, or the local disks of the nodes. No torch.

    RUN/checkpoints/step-00000400/manifest.json     in the run folder, which all nodes see
    RUN/disks.json                                  the name of the run on every disk
    DISK/NAME/step-00000400/rank-00001-0123456789abcdef.safetensors     on the node of rank 1

With `checkpoint.disks`, the manifest is the commit of a checkpoint, and nothing records where a file is: it is found by
its name, which has the hash of its content. So no file is ever replaced by another one, and a file that no manifest
lists is a leftover of a save that did not end. `{node}` in the name of a disk stands for the number of the node.
"""

import contextlib
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ingot.errors import CheckpointError, ConfigError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.run_folder import CHECKPOINTS, RunFolder
from ingot.schema.sealed import sealed, unsealed
from ingot.storage import atomic_file, fsync_dir
from ingot.toml import parse_toml
from ingot.trainer.mesh.environment import environment_number

NODE = "{node}"
_NAMES = "disks.json"
_RUNS, _INODE = "names", "inode"
_RUN_NAME = re.compile(r"[\w][\w.-]*")
_STEP = re.compile(r"step-\d{8,}")
_NAMED_AGAIN = "its files were found by their hashes; new ones get another name on the disks"
_kept: dict[Path, list[str]] = {}  # run folder -> its names on the disks, its own first (keep_names)


def with_hash(file: str, sha256: str) -> str:
    """Return the name of a file with this content, on a disk and in a store. With its content in its name, a file is
    never replaced by another one, however late it is written."""
    stem, dot, suffix = file.partition(".")
    return f"{stem}-{sha256[:16]}{dot}{suffix}"


def node() -> int | None:
    """Return the number of this node in its job, as torchrun gives it; None outside of a job."""
    if "GROUP_RANK" in os.environ:
        return environment_number("GROUP_RANK", 0)
    if "RANK" in os.environ:
        return environment_number("RANK", 0) // environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    return None


def local_rank() -> int:
    """Return the number of this process among those of the job on its node; 0 outside of a job."""
    return environment_number("LOCAL_RANK", 0)


def own_disks(disks: Iterable[str]) -> list[Path]:
    """Return the disks on which the ranks of this node write; a process outside of a job counts as node 0."""
    return [Path(disk.replace(NODE, str(node() or 0))) for disk in disks]


def require_disks(disks: Iterable[str]) -> None:
    """Raise ConfigError unless every disk of this node is a folder: one that is missing may be a disk that is not
    mounted, in whose place the files would fill the disk of the system."""
    for disk in own_disks(disks):
        if not disk.is_dir():
            raise ConfigError(
                "E-DISK-MISSING",
                f"checkpoint.disks names {disk}, which is no folder on node {node() or 0}",
                rule="each entry of checkpoint.disks is a folder that exists on every node",
                fix=f"mount the disk, or make the folder: mkdir -p {disk}",
                disk=str(disk),
                node=node() or 0,
            )


class Places:
    """The files of the checkpoint in the folder `checkpoint`, as this node sees them.

    striped: True if files may be on disks of nodes; a file that is not found may then be on another node.
    """

    def __init__(self, checkpoint: Path):
        self._checkpoint, self._folders = checkpoint, list[Path]()
        step, run = _STEP.search(checkpoint.name), checkpoint.parent.parent
        if step and checkpoint.absolute().parent.name == CHECKPOINTS:
            self._folders = [folder / step[0] for folder in _run_folders(run)]
        self.striped = bool(self._folders)

    def find(self, file: str, sha256: str) -> Path | None:
        """Return the path of a file, by its name and hash in the manifest; None if it is not on this node.

        If the run has no disks, the path in the folder of the checkpoint is returned, also if nothing is there.
        """
        inside = self._checkpoint / file
        if not self.striped or inside.is_file():
            return inside
        name = with_hash(file, sha256)
        return next((path for folder in self._folders if (path := folder / name).is_file()), None)

    def own_folder(self, number: int) -> Path | None:
        """Return the folder in which the process `number` of this node writes its file; None if that is the folder of
        the checkpoint. Raises CheckpointError if the run has no name of its own on the disks."""
        run = self._checkpoint.parent.parent
        disks = own_disks(disks_of(run)) if self.striped else []
        if not disks:
            return None
        step, (names, is_copy, damage) = _STEP.search(self._checkpoint.name), _names(run)
        assert step is not None
        if is_copy:  # these are names of other runs, which would remove the file
            raise CheckpointError(
                "E-CKPT-DISK-NAME",
                f"{run / _NAMES} {damage.removeprefix(_NAMES).strip() or 'is that of another run'}",
                rule="a run writes to disks of its nodes under a name that no other run has",
                fix="start the run again: it gets a new name, and keeps its files",
                path=str(run / _NAMES),
            )
        return disks[number % len(disks)] / names[0] / step[0]


def disks_of(run: Path) -> tuple[str, ...]:
    """Return `checkpoint.disks` of the run file in the folder `run`; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        status = (run / "run.toml").stat()
        return _disks_in(run / "run.toml", status.st_mtime_ns, status.st_ino, status.st_size)
    return ()


@lru_cache(maxsize=64)
def _disks_in(run_file: Path, *_version: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError, ConfigError, ValueError):  # a reader that needs the run file reports the damage
        settings = parse_toml(run_file.read_text(encoding="utf-8"), str(run_file)).get("checkpoint")
        disks = settings.get("disks", ()) if isinstance(settings, dict) else ()
        return tuple(disk for disk in disks if isinstance(disk, str)) if isinstance(disks, list) else ()
    return ()


def name_run(run: RunFolder, found: Iterable[str] = ()) -> str:
    """Give the run a name on the disks, unless it has one. Called before a file is written there, by one process.

    A copy of a run folder gets a name of its own: it reads the files of the original, and never removes them. So does a
    run whose record is damaged, with the names under which the disks of this node have its files, and those that other
    nodes have `found`. Returns what is wrong with that record; "" if nothing is.
    """
    names, is_copy, damage = _recorded(run.root)
    if names and not is_copy:
        return ""
    readable = re.sub(r"[^\w.-]", "_", run.root.absolute().name)[:40]
    earlier = dict.fromkeys([*names, *found])
    with atomic_file(run.root / _NAMES) as file:
        own = {_RUNS: [f"{readable}-{uuid.uuid4().hex[:12]}", *earlier], _INODE: os.fstat(file.fileno()).st_ino}
        file.write(json.dumps(sealed(own)).encode())
    return damage


def recorded_names(run: Path) -> tuple[list[str], str]:
    """Return the names of the run on the disks, its own first, and what is wrong with their record: the names are then
    those under which the disks of this node have its files."""
    names, _, damage = _recorded(run)
    return names, damage


def report_damage(run: RunFolder, damage: str, say: Callable[[str], None]) -> None:
    """Report that `name_run` found the record of the names damaged, in a line and in the event log."""
    say(f"WARNING   {damage}: {_NAMED_AGAIN}")
    with EventLog(run.events) as log:
        log.write(events.RECORD_DAMAGED, file=_NAMES, reason=damage, done=_NAMED_AGAIN)


def keep_names(run: Path, names: Sequence[str]) -> None:
    """Keep the names of the run, its own first, in this process: while a run trains, damage to their record sends no
    file to the folder of another run."""
    _kept[run.absolute()] = list(names)


def kept_names(run: Path) -> Sequence[str]:
    """Return the names of `keep_names`; none if it was not called."""
    return _kept.get(run.absolute(), ())


def _recorded(run: Path) -> tuple[list[str], bool, str]:
    """Return the names of the run on the disks, its own first; whether none of them is its own, because the record is a
    copy of another run's or damaged; and the damage."""
    try:
        with (run / _NAMES).open("rb") as file:
            record, inode = json.loads(file.read()), os.fstat(file.fileno()).st_ino
        if record.keys() != {_RUNS, _INODE}:  # those of an earlier version of ingot have no hash
            record = unsealed(record, {_RUNS, _INODE})
        names = [name for name in record[_RUNS] if isinstance(name, str) and _RUN_NAME.fullmatch(name)]
        return names, record[_INODE] != inode, ""
    except FileNotFoundError:
        return [], False, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _found_names(run), True, f"{_NAMES} is damaged ({error})"


def _found_names(run: Path) -> list[str]:
    """Return the names under which the disks of this node have files that the manifests of `run` list. The name of a
    file has the hash of its content, so a run that wrote the same file has the same bytes: they are read as well, and
    removed by that run alone."""
    found = set()
    for disk in _seen(disks_of(run)):
        for file in disk.glob("*/step-*/rank-*-*.*"):
            with contextlib.suppress(OSError):
                manifest = (run / CHECKPOINTS / file.parent.name / "manifest.json").read_bytes()
                if file.stem.rpartition("-")[2].encode() in manifest:
                    found.add(file.parent.parent.name)
    return sorted(name for name in found if _RUN_NAME.fullmatch(name))


def _names(run: Path) -> tuple[list[str], bool, str]:
    """Return what `_recorded` does, or what this process keeps."""
    kept = _kept.get(run.absolute())
    return (kept, False, "") if kept else _recorded(run)


def _run_folders(run: Path, *, own: bool = False) -> list[Path]:
    """Return the folders of the run on the disks that this node sees. A process outside of a job, such as a command,
    sees the folders of all nodes that are on its machine. own: only those whose files belong to this run alone."""
    disks = disks_of(run)
    if not disks:
        return []
    names, is_copy, _ = _names(run)
    return [disk / name for name in (names[: not is_copy] if own else names) for disk in _seen(disks)]


def _seen(disks: Iterable[str]) -> list[Path]:
    number, seen = node(), list[Path]()
    for disk in disks:
        if number is None and NODE in disk:
            pattern = glob.escape(disk).replace(NODE, "[0-9]*").lstrip("/")
            seen += sorted(Path("/").glob(pattern)) or own_disks([disk])
        else:
            seen += own_disks([disk])
    return seen


def make_folder(folder: Path) -> None:
    """Make the folder of a step on its disk, so that it survives a power loss. The disk itself must exist."""
    for one in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            one.mkdir()
            fsync_dir(one.parent)


def unlisted(run: RunFolder, kept: Mapping[str, Collection[str] | None]) -> list[Path]:
    """Return what the run has on the disks of this node that no checkpoint lists: folders of steps, and single files.

    kept: the name of each checkpoint's folder -> the files in it that stay (`with_hash`), or None if all do. A disk
    that fails is left alone.
    """
    found = []
    for folder in _run_folders(run.root, own=True):
        with contextlib.suppress(OSError):
            for step in sorted(path for path in folder.iterdir() if path.is_dir()):
                if step.name not in kept:
                    found.append(step)
                elif (names := kept[step.name]) is not None:
                    found += [path for path in sorted(step.iterdir()) if path.name not in names]
    return found


def sweep(run: RunFolder, kept: Mapping[str, Collection[str] | None]) -> list[str]:
    """Remove what `unlisted` returns, and return the names. Not called while a file is being written on this node."""
    removed = []
    for path in unlisted(run, kept):
        is_step = path.is_dir()
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if is_step else path.unlink()
            removed.append(path.name if is_step else f"{path.parent.name}/{path.name}")
    return removed
