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
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot import errors
from ingot.config import from_dict
from ingot.errors import ConfigError, IngotError, RunBusyError, RunFailed
from ingot.machine.processes import die_with_parent
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json

SUPERVISOR_VARIABLE = "INGOT_SUPERVISOR"  # process id of the supervisor, in the environment of its ranks
# Messages of Gloo, NCCL and the store (which is on rank 0) about a lost peer. Such an error is an echo: its cause is
# another rank's end.
_ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|NCCL|gloo|timed out waiting|socket timeout"
    r"|remote server shutdown",
    re.I,
)
_HANG = re.compile(r"timed out|timeout", re.I)
# Signals that a faulty program causes itself: the same signal at the same step is a bug, not an accident.
_SELF_INFLICTED = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class RankEnding:
    """The end of one rank. kind: "" for a normal end, otherwise the name of the exception's class.

    time: Unix seconds. code, found, rule, fix, facts: as in IngotError; for other exceptions, `found` is the message.
    """

    rank: int
    time: float
    kind: str = ""
    code: str = ""
    found: str = ""
    rule: str = ""
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

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


def is_about_a_peer(message: str) -> bool:
    """Return whether the message of an error is about another rank that was lost, or about the connection to it."""
    return bool(_ECHO.search(message))


@contextlib.contextmanager
def guarded(folder: RunFolder, rank: int) -> Iterator[None]:
    """Guard everything that a rank does: the rank dies when its launcher dies, and its ending is recorded."""
    die_with_parent()
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor and not Path(f"/proc/{supervisor}").exists():
        os._exit(1)  # the supervisor died before die_with_parent took effect
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RunBusyError):  # otherwise the folder is another attempt's
            _write(folder, _ending_of(rank, error))
        raise
    _write(folder, RankEnding(rank=rank, time=time.time()))


def _ending_of(rank: int, error: BaseException) -> RankEnding:
    """Describe the exception that ended a rank; SystemExit(0) is a normal end."""
    if isinstance(error, SystemExit) and not error.code:
        return RankEnding(rank=rank, time=time.time())
    kind, now = type(error).__name__, time.time()
    if isinstance(error, IngotError):
        about = {"code": error.code, "found": error.found, "rule": error.rule, "fix": error.fix}
        return RankEnding(rank=rank, time=now, kind=kind, **about, facts=_plain(error.facts))
    return RankEnding(rank=rank, time=now, kind=kind, found=str(error) or kind)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `facts` with numbers that are not finite as text: JSON has none, and a reader would drop the ending."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()}


def _write(folder: RunFolder, ending: RankEnding) -> None:
    write_json(folder.logs / f"rank-{ending.rank}.json", asdict(ending))


def read_endings(folder: RunFolder) -> dict[int, RankEnding]:
    """Read the endings recorded since `clear_endings`, by rank."""
    endings = {}
    for path in folder.logs.glob("rank-*.json"):
        with contextlib.suppress(ConfigError, ValueError, FileNotFoundError):  # not an ending, or just removed
            ending = from_dict(RankEnding, json.loads(path.read_text()))
            endings[ending.rank] = ending
    return endings


def clear_endings(folder: RunFolder) -> None:
    """Remove the endings of the last attempt."""
    for path in folder.logs.glob("rank-*.json"):
        path.unlink()


@dataclass(frozen=True, kw_only=True)
class JobIncident:
    """The early end of an attempt.

    rank: the rank that ended first, -1 if unknown. cause: a phrase for people ("was killed (SIGKILL)"). signature:
    equal for two incidents with the same cause; "" for accidents, which may repeat by chance. step: the last step in
    the log. error: the IngotError of a rank, if there is one.
    """

    rank: int
    cause: str
    signature: str
    step: int
    error: IngotError | None = None


def explain(
    ranks: int,
    endings: Mapping[int, RankEnding],
    dead: Sequence[int],
    exit_codes: Mapping[int, int],
    step: int,
    last_words: str,
    server_code: int | None = None,
) -> JobIncident:
    """Find the rank that ended first and the cause of its end. A pure function of its arguments.

    ranks: the number of ranks. endings: those that ranks recorded. dead: the ranks whose process was gone when the
    failure was detected, in any order. exit_codes: rank -> exit code, if the launcher reported one (negative: signal
    number). last_words: the last line of the launcher's log. server_code: the exit code of the fork server, None while
    it runs.
    """
    failures = sorted((e for e in endings.values() if e.kind), key=lambda e: e.time)
    for ending in failures:
        if error := ending.as_user_error():
            cause = error.found.splitlines()[0].rstrip(":") if error.found else error.code
            return JobIncident(rank=ending.rank, cause=cause, signature="", step=step, error=error)
    own = [ending for ending in failures if not ending.is_echo]
    silent = [rank for rank in (dead or sorted(exit_codes)) if rank not in endings]
    # If one rank failed on its own, another rank that is gone was most likely ended by the launcher (SIGTERM).
    killed = [r for r in silent if exit_codes.get(r, -signal.SIGTERM if own else 0) != -signal.SIGTERM]
    if killed or (silent and not own):
        first = (killed or silent)[0]
        name = _signal_name(exit_codes.get(first))
        signature = name if name in _SELF_INFLICTED or name.startswith("exit") else ""
        return JobIncident(rank=first, cause=_killed_by(name), signature=signature, step=step)
    if own:
        first_line = own[0].found.splitlines()[0] if own[0].found else ""
        cause = f"raised {own[0].kind}: {first_line}"
        return JobIncident(rank=own[0].rank, cause=cause, signature=_without_numbers(cause), step=step)
    hung = [rank for rank in range(ranks) if rank not in endings]
    if failures and failures[0].is_timeout and hung:
        return JobIncident(
            rank=hung[0], cause="hung: its peers waited for it until the timeout", signature="", step=step
        )
    if failures:
        return JobIncident(rank=failures[0].rank, cause="lost the connection to its peers", signature="", step=step)
    if (name := _signal_name(server_code)) == "SIGKILL":
        # Another process did this, such as the kernel when memory is short: it may happen twice at the same step.
        cause = f"lost its fork server, which was killed ({name}); dmesg shows whether memory was short"
        return JobIncident(rank=-1, cause=cause, signature="", step=step)
    cause = f"ended, and no rank reported a cause (last log line: {last_words})"
    return JobIncident(rank=-1, cause=cause, signature="launcher", step=step)


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return "" if exit_code is None else f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _killed_by(name: str) -> str:
    if not name:
        return "died without reporting an error"
    return f"was killed ({name})" if name.startswith(("SIG", "signal")) else f"ended with {name}"


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def refuse_restart(incidents: Sequence[JobIncident], max_restarts: int, log: Path) -> IngotError | None:
    """Return None if the job may start again after the last of `incidents`, otherwise the error that ends the run.

    log: the standard error of the last attempt.
    """
    last = incidents[-1]
    if last.error:
        return last.error
    who = f"rank {last.rank}" if last.rank >= 0 else "the job"
    same = [i for i in incidents[:-1] if (i.signature, i.step) == (last.signature, last.step)]
    if last.signature and same:
        return RunFailed(
            "E-RUN-REPEATS",
            f"{who} {last.cause} near step {last.step}, {len(same) + 1} times in a row",
            rule="the same failure at the same step is a bug, not an accident; starting again will not help",
            fix=f"fix the cause ({log} has the traceback); the same command then continues from the last checkpoint",
            rank=last.rank,
            step=last.step,
            cause=last.cause,
            times=len(same) + 1,
            log=str(log),
        )
    if len(incidents) > max_restarts:
        return RunFailed(
            "E-RUN-RESTARTS",
            f"{who} {last.cause} near step {last.step}, after {max_restarts} restarts",
            rule=f"a job is restarted at most launch.max_restarts = {max_restarts} times",
            fix=f"find the cause (see {log}); the same command continues from the last checkpoint",
            rank=last.rank,
            step=last.step,
            cause=last.cause,
            max_restarts=max_restarts,
        )
    return None
