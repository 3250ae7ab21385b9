"""The ends of ranks, the cause of an attempt's end, and whether another attempt can help. No torch.

A rank dies when its launcher dies, and records its ending in the run folder. A killed rank records nothing, from which
the supervisor concludes that the rank was killed. A restart does not always help: the same error at the same step is
not an accident, and a wrong setting stays wrong.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot import errors
from ingot.config import from_dict
from ingot.errors import ConfigError, IngotError, RunBusyError
from ingot.machine.processes import die_with_parent
from ingot.schema.run_folder import RunFolder
from ingot.storage import full_disk_named, write_json
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.resilience.collective_calls import CollectiveCall
from ingot.trainer.resilience.leaving import is_about_a_peer
from ingot.trainer.resilience.reports import calls_of_this_process

_HANG = re.compile(r"timed out|timeout", re.I)


@dataclass(frozen=True, kw_only=True)
class RankEnding:
    """The end of one rank. kind: "" for a normal end, otherwise the name of the exception's class.

    time: Unix seconds. code, found, rule, fix, facts: as in IngotError; for other exceptions, `found` is the message.
    collectives: the newest that a failed rank called (collective_calls.py).
    """

    rank: int
    time: float
    kind: str = ""
    code: str = ""
    found: str = ""
    rule: str = ""
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    collectives: tuple[CollectiveCall, ...] = ()

    @property
    def is_echo(self) -> bool:
        """True if the error is about a lost peer, not about this rank."""
        return bool(self.kind) and self.as_user_error() is None and is_about_a_peer(self.found)

    @property
    def is_timeout(self) -> bool:
        """True if this rank waited for a peer until a timeout."""
        return self.is_echo and bool(_HANG.search(self.found))

    def as_user_error(self) -> IngotError | None:
        """Return the IngotError to show instead of a restart; None for exceptions that a restart may resolve."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, IngotError):
            return kind(self.code or kind.kind, self.found, rule=self.rule, fix=self.fix, **self.facts)
        return None


@contextlib.contextmanager
def guarded(folder: RunFolder, rank: int) -> Iterator[None]:
    """Guard everything that a rank does: the rank dies when its launcher dies, and its ending is recorded."""
    die_with_parent()
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor and not Path(f"/proc/{supervisor}").exists():
        os._exit(1)  # the supervisor died before die_with_parent took effect
    try:
        with full_disk_named(folder.root):
            yield
    except BaseException as error:
        if not isinstance(error, RunBusyError):  # otherwise the folder is another attempt's
            with contextlib.suppress(OSError):  # the error matters more than its record, for which a disk may be full
                _write(folder, _ending_of(rank, error))
        raise
    with full_disk_named(folder.root):
        _write(folder, RankEnding(rank=rank, time=time.time()))


def _ending_of(rank: int, error: BaseException) -> RankEnding:
    """Describe the exception that ended a rank; SystemExit(0) is a normal end."""
    if isinstance(error, SystemExit) and not error.code:
        return RankEnding(rank=rank, time=time.time())
    kind, now = type(error).__name__, time.time()
    if isinstance(error, IngotError):
        about: dict[str, Any] = {"code": error.code, "found": error.found, "rule": error.rule, "fix": error.fix}
        return RankEnding(rank=rank, time=now, kind=kind, **about, facts=_plain(error.facts))
    calls: tuple[CollectiveCall, ...] = ()
    with contextlib.suppress(Exception):  # the report must not hide the error
        calls = calls_of_this_process()
    return RankEnding(rank=rank, time=now, kind=kind, found=str(error) or kind, collectives=calls)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `facts` with numbers that are not finite as text: JSON has none, and a reader would drop the ending."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()}


def _write(folder: RunFolder, ending: RankEnding) -> None:
    if SUPERVISOR_VARIABLE in os.environ and not folder.logs.is_dir():
        return  # the supervisor made it: the mount of the run folder is gone, and it will find that
    write_json(folder.logs / f"rank-{ending.rank}.json", asdict(ending))


def read_endings(folder: RunFolder, ranks: Iterable[int] | None = None) -> dict[int, RankEnding]:
    """Read the endings recorded since `clear_endings`, by rank. ranks: of these; None: of all."""
    endings = {}
    names = None if ranks is None else [folder.logs / f"rank-{rank}.json" for rank in ranks]
    for path in folder.logs.glob("rank-*.json") if names is None else names:
        with contextlib.suppress(ConfigError, ValueError, FileNotFoundError):  # not an ending, or just removed
            ending = from_dict(RankEnding, json.loads(path.read_text()))
            endings[ending.rank] = ending
    return endings


def clear_endings(folder: RunFolder) -> None:
    """Remove the endings of the last attempt, and what a rank left that was killed while it wrote one."""
    for pattern in ("rank-*.json", ".rank-*.json.*.tmp"):
        for path in folder.logs.glob(pattern):
            path.unlink()
