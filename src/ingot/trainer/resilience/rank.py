"""What a rank owes its supervisor: to die with it, and to leave word how it ended. No torch.

A rank that was killed leaves no word; that is how the supervisor knows.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot import errors
from ingot.config import from_dict
from ingot.errors import ConfigError, IngotError
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json

SUPERVISOR_VARIABLE = "INGOT_SUPERVISOR"  # process id of the supervisor, in the environment of its ranks
_PR_SET_PDEATHSIG = 1
# How Gloo, NCCL and the store complain about a peer. Such an error is the echo of another rank's end.
_ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|NCCL|gloo|timed out waiting|socket timeout", re.I
)
_HANG = re.compile(r"timed out|timeout", re.I)


@dataclass(frozen=True, kw_only=True)
class RankEnding:
    """How one rank ended. kind is "" for a normal end, else the exception's class; exit_code is that of the class.

    time: Unix seconds. found, rule, fix: as in IngotError; other exceptions have their message in `found`.
    """

    rank: int
    time: float
    kind: str = ""
    found: str = ""
    rule: str = ""
    fix: str = ""

    @property
    def is_echo(self) -> bool:
        """An error about a lost peer, not about this rank."""
        return bool(self.kind) and self.as_user_error() is None and bool(_ECHO.search(self.found))

    @property
    def is_timeout(self) -> bool:
        return self.is_echo and bool(_HANG.search(self.found))

    def as_user_error(self) -> IngotError | None:
        """The error to show instead of starting again: what an IngotError says does not go away by itself."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, IngotError):
            return kind(self.found, rule=self.rule, fix=self.fix)
        return None


@contextlib.contextmanager
def guarded(folder: RunFolder, rank: int) -> Iterator[None]:
    """Around everything a rank does: it dies when its launcher dies, and its ending is written down."""
    die_with_parent()
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor and not Path(f"/proc/{supervisor}").exists():
        os._exit(1)  # it died before the line above could notice
    try:
        yield
    except BaseException as error:
        _write(folder, _ending_of(rank, error))
        raise
    _write(folder, RankEnding(rank=rank, time=time.time()))


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _ending_of(rank: int, error: BaseException) -> RankEnding:
    if isinstance(error, SystemExit) and not error.code:
        return RankEnding(rank=rank, time=time.time())
    if isinstance(error, IngotError):
        words = {"found": error.found, "rule": error.rule, "fix": error.fix}
    else:
        words = {"found": str(error) or type(error).__name__}
    return RankEnding(rank=rank, time=time.time(), kind=type(error).__name__, **words)


def _write(folder: RunFolder, ending: RankEnding) -> None:
    write_json(folder.logs / f"rank-{ending.rank}.json", asdict(ending))


def read_endings(folder: RunFolder) -> dict[int, RankEnding]:
    """The endings written since `clear_endings`, by rank."""
    endings = {}
    for path in folder.logs.glob("rank-*.json"):
        with contextlib.suppress(ConfigError, ValueError, FileNotFoundError):  # not ours, or gone this moment
            ending = from_dict(RankEnding, json.loads(path.read_text()))
            endings[ending.rank] = ending
    return endings


def clear_endings(folder: RunFolder) -> None:
    for path in folder.logs.glob("rank-*.json"):
        path.unlink()
