"""The tensor files of checkpoints that are not on this machine, if files are on disks of nodes (places.py). No torch.

The event log says which machine wrote a file: each rank logs its host when it starts. A file that this machine wrote,
and that is on none of its disks, is lost, or its disk is not mounted; all others are elsewhere.
"""

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, files_elsewhere
from ingot.trainer.checkpoint.places import disks_of

_RANK = re.compile(r"rank-(\d+)\.")
_NAMED = 3  # files in a text


@dataclass(frozen=True, kw_only=True)
class AbsentFiles:
    """The files of one checkpoint that are not on this machine.

    every: the number of files of the checkpoint. lost: those that this machine wrote. elsewhere: file -> the host that
    wrote it, "" if no record shows it. disks: `checkpoint.disks` of the run.
    """

    every: int
    lost: tuple[str, ...]
    elsewhere: Mapping[str, str]
    disks: tuple[str, ...]

    @property
    def number(self) -> int:
        return len(self.lost) + len(self.elsewhere)

    @property
    def summary(self) -> str:
        """The number of absent files, in words."""
        return f"{self.number} of {self.every} tensor files are not on this machine"

    @property
    def text(self) -> str:
        """A text with the absent files, and where they should be."""
        parts = []
        if self.lost:
            parts.append(f"this machine wrote {_few(self.lost)} to its disks ({', '.join(self.disks)})")
        hosts = sorted({host for host in self.elsewhere.values() if host})
        if self.elsewhere:
            where = f"written on {', '.join(hosts)}" if hosts else "on disks of other nodes"
            parts.append(f"not checked here: {_few(self.elsewhere)}, {where}")
        return f"{self.summary}: {'; '.join(parts)}"


def absent_files(folder: RunFolder, listed: Iterable[ListedCheckpoint]) -> dict[int, AbsentFiles]:
    """Return the step of each checkpoint in `listed` that has files which are not on this machine -> these files."""
    disks = disks_of(folder.root)
    if not disks:
        return {}
    hosts, here, found = _hosts(folder), socket.gethostname(), {}
    for one in listed:
        names = files_elsewhere(one.path, one.manifest) if one.manifest else []
        if one.manifest is None or not names:
            continue
        wrote = {name: _host_of(name, hosts.get(one.step, {})) for name in names}
        found[one.step] = AbsentFiles(
            every=len(one.manifest.files),
            lost=tuple(name for name, host in wrote.items() if host == here),
            elsewhere={name: host for name, host in wrote.items() if host != here},
            disks=disks,
        )
    return found


def _hosts(folder: RunFolder) -> dict[int, dict[int, str]]:
    """Return the step of each logged save -> rank -> the host on which it ran then."""
    hosts: dict[int, str] = {}
    saved: dict[int, dict[int, str]] = {}
    shared = False  # whether a save has these hosts: it keeps them when ranks start again elsewhere
    for event in read_events(folder.events, events.RANK_STARTED, events.CHECKPOINT):
        step, rank = event.get("step"), event.get("rank")
        if isinstance(step, int):
            saved[step], shared = hosts, True
        elif isinstance(rank, int):
            hosts, shared = dict(hosts) if shared else hosts, False
            hosts[rank] = str(event.get("host", ""))
    return saved


def _host_of(name: str, hosts: Mapping[int, str]) -> str:
    match = _RANK.match(name)
    return hosts.get(int(match[1]), "") if match else ""


def _few(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_NAMED]) + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
