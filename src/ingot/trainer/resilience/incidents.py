"""The early ends of attempts: which rank failed first, what kind of failure it was, and of what cause. No torch."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.errors import IngotError, RunFailed
from ingot.trainer.resilience.collective_calls import find_blame
from ingot.trainer.resilience.endings import RankEnding
from ingot.trainer.resilience.failure_kinds import Kind, kind_of_code, kind_of_error

_MEMORY = re.compile(r"out of memory|can.?t allocate memory|cannot allocate memory|OutOfMemoryError|MemoryError", re.I)
# Gloo, before it aborts the process: two ranks called collectives of different sizes.
_DIFFERENT_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<sizes>\d+ vs \d+)")
# Signals that a faulty program causes itself: the same signal at the same step is a bug, not an accident.
_SELF_INFLICTED = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class JobIncident:
    """The early end of an attempt.

    rank: the rank that ended first, -1 if unknown. kind: what failed: the program ("crash" with a signal of its
    own, "bug" with an exception), "killed" from outside, "hang", "memory", "data", "disk", "numerics", "settings",
    a "node", or the "job" as a whole. cause: a phrase for people ("was killed (SIGKILL)"). signature: equal for two
    incidents with the same cause; "" for accidents, which may repeat by chance. step: the last step in the log.
    error: the IngotError of a rank, if there is one. detected_by: "supervisor" if ranks ended, "watchdog" if they
    hung; then `evidence` is the folder with what the ranks were doing, `seconds` the time without progress, `limit`
    how long it may take [s], `setting` the one that the limit follows from, and `limit_reason` how. adapted: the next
    attempt has another layout, or another measure of the guard, with which this cannot repeat, so it is no restart of
    the budget.
    """

    rank: int
    kind: Kind
    cause: str
    signature: str = ""
    step: int
    error: IngotError | None = None
    detected_by: str = "supervisor"
    evidence: Path | None = None
    seconds: float | None = None
    setting: str = ""
    limit: float | None = None
    limit_reason: str = ""
    adapted: bool = False

    @property
    def at_step(self) -> int:
        """The step whose numbers ended the attempt, which can be before the last one in the log; else that one."""
        of_error = self.error.facts.get("step") if self.error and self.kind == "numerics" else None
        return of_error if isinstance(of_error, int) else self.step


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """All that is known when an attempt has failed.

    ranks: the number of ranks. endings: those that ranks recorded. dead: the ranks whose process was gone when the
    failure was detected, in any order. exit_codes: rank -> exit code, if the launcher reported one (negative: signal
    number). step: the last step in the log. last_words: the last line of the launcher's log, and log its end.
    server_code: the exit code of the fork server, None while it runs. oom_kills: how many processes the kernel killed
    on this machine, during the attempt, because memory was short.
    """

    ranks: int
    endings: Mapping[int, RankEnding]
    dead: Sequence[int] = ()
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    step: int
    last_words: str = ""
    log: str = ""
    server_code: int | None = None
    oom_kills: int = 0

    @property
    def failures(self) -> list[RankEnding]:
        """The endings of ranks that failed, oldest first."""
        return sorted((ending for ending in self.endings.values() if ending.kind), key=lambda ending: ending.time)


def explain(end: AttemptEnd) -> JobIncident:
    """Find the rank that ended first and the cause of its end. A pure function of its argument."""
    return _error(end) or _difference(end) or _own_end(end) or _echo(end) or _end_of_the_job(end)


def _error(end: AttemptEnd) -> JobIncident | None:
    """Return the incident of a rank that ended with an error of ingot."""
    for ending in end.failures:
        if error := ending.as_user_error():
            cause = error.found.splitlines()[0].rstrip(":") if error.found else error.code
            return JobIncident(rank=ending.rank, kind=kind_of_error(error), cause=cause, step=end.step, error=error)
    return None


def _difference(end: AttemptEnd) -> JobIncident | None:
    """Return the incident of ranks that called different collectives, by their records or because Gloo ended one."""
    failures = end.failures
    blame = find_blame({ending.rank: ending.collectives for ending in failures})
    if blame and blame.mismatch:
        error = differing(blame.words)
        return JobIncident(rank=blame.ranks[0], kind="bug", cause=blame.words, step=end.step, error=error)
    if not (sizes := _DIFFERENT_SIZES.search(end.log)):
        return None
    aborted = next((rank for rank, code in end.exit_codes.items() if code == -signal.SIGABRT), -1)
    peer = next((ending for ending in failures if ending.collectives), None)
    called = " and ".join(call.words() for call in peer.collectives[-2:]) if peer else ""
    other = f"; last, rank {peer.rank} called {called}" if peer else ""
    words = f"aborted in a collective to which a peer sent more than it expects ({sizes['sizes']} bytes){other}"
    error = differing(f"rank {aborted} {words}")
    return JobIncident(rank=aborted, kind="bug", cause=words, step=end.step, error=error)


def _own_end(end: AttemptEnd) -> JobIncident | None:
    """Return the incident of a rank that was killed, or raised an exception that is not about a lost peer."""
    own = [ending for ending in end.failures if not ending.is_echo]
    silent = [rank for rank in (end.dead or sorted(end.exit_codes)) if rank not in end.endings]
    # If one rank failed on its own, another rank that is gone was most likely ended by the launcher (SIGTERM).
    killed = [r for r in silent if end.exit_codes.get(r, -signal.SIGTERM if own else 0) != -signal.SIGTERM]
    if killed or (silent and not own):
        return _killed(end, (killed or silent)[0])
    if own:
        first_line = own[0].found.splitlines()[0] if own[0].found else ""
        cause = f"raised {own[0].kind}: {first_line}"
        # A store that does not answer has a code, and is no error of the user: a restart may help.
        kind = kind_of_code(own[0].code) or ("memory" if _MEMORY.search(cause) else "bug")
        signature = _without_numbers(cause)
        return JobIncident(rank=own[0].rank, kind=kind, cause=cause, signature=signature, step=end.step)
    return None


def _killed(end: AttemptEnd, rank: int) -> JobIncident:
    name = _signal_name(end.exit_codes.get(rank))
    own = name in _SELF_INFLICTED or name.startswith("exit")
    cause = _killed_by(name)
    kind: Kind = "crash" if own else "killed"
    if name == "SIGKILL" and end.oom_kills:
        cause, kind = f"{cause}: the kernel had no memory left", "memory"
    return JobIncident(rank=rank, kind=kind, cause=cause, signature=name if own else "", step=end.step)


def _echo(end: AttemptEnd) -> JobIncident | None:
    """Return the incident of which only peers know: they lost the connection to a rank, or waited until a timeout."""
    failures = end.failures
    hung = [rank for rank in range(end.ranks) if rank not in end.endings]
    if failures and failures[0].is_timeout and hung:
        cause = "hung: its peers waited for it until the timeout"
        return JobIncident(rank=hung[0], kind="hang", cause=cause, step=end.step)
    if failures:
        cause = "lost the connection to its peers"
        return JobIncident(rank=failures[0].rank, kind="job", cause=cause, step=end.step)
    return None


def _end_of_the_job(end: AttemptEnd) -> JobIncident:
    """Return the incident of which no rank knows."""
    if (name := _signal_name(end.server_code)) == "SIGKILL":
        # Another process did this, such as the kernel when memory is short: it may happen twice at the same step.
        short = "the kernel had no memory left" if end.oom_kills else "dmesg shows whether memory was short"
        cause = f"lost its fork server, which was killed ({name}); {short}"
        return JobIncident(rank=-1, kind="memory" if end.oom_kills else "killed", cause=cause, step=end.step)
    cause = f"ended, and no rank reported a cause (last log line: {end.last_words})"
    return JobIncident(rank=-1, kind="job", cause=cause, signature="launcher", step=end.step)


def differing(words: str, evidence: Path | None = None) -> RunFailed:
    """Return the error of ranks that called different collectives. words: which rank called which."""
    where = f" ({evidence} has the stacks of all ranks)" if evidence else ""
    return RunFailed(
        "E-COLLECTIVES-DIFFER",
        words,
        rule="all ranks of a group call the same collectives in the same order; starting again will not help",
        fix=f"find where the ranks take different ways{where}: most often a branch on something that only one rank "
        "knows, in a plug-in",
    )


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
