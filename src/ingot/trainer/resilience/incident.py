"""Why an attempt ended, and whether another one can help. Pure functions of what was seen.

"Do not restart" is a verdict, too: the same error at the same step is not bad luck, and a wrong setting does not mend
itself.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import IngotError, RunFailed
from ingot.trainer.resilience.rank import RankEnding

# Signals by which a program ends itself: repeating at the same step means a bug, not an accident.
_SELF_INFLICTED = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class Incident:
    """The end of an attempt before its time.

    rank: that went first, -1 if unknown. cause: for people ("was killed (SIGKILL)"). signature: what must be equal for
    two incidents to be the same, "" for accidents that may repeat. step: last one seen in the log.
    error: set when a rank said what the user has to do.
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
) -> Incident:
    """Name the rank that went first.

    endings: word that ranks left. dead: ranks whose process was gone when the trouble was noticed, in no order.
    exit_codes: by rank, as far as the launcher reported them (negative: signal number). last_words: of its log.
    """
    failures = sorted((e for e in endings.values() if e.kind), key=lambda e: e.time)
    for ending in failures:
        if error := ending.as_user_error():
            return Incident(rank=ending.rank, cause=error.found, signature="", step=step, error=error)
    own = [ending for ending in failures if not ending.is_echo]
    silent = [rank for rank in (dead or sorted(exit_codes)) if rank not in endings]
    # Beside a rank that failed by itself, one that is gone was most likely ended by the launcher (SIGTERM).
    killed = [r for r in silent if exit_codes.get(r, -signal.SIGTERM if own else 0) != -signal.SIGTERM]
    if killed or (silent and not own):
        first = (killed or silent)[0]
        name = _signal_name(exit_codes.get(first))
        signature = name if name in _SELF_INFLICTED or name.startswith("exit") else ""
        return Incident(rank=first, cause=_killed_by(name), signature=signature, step=step)
    if own:
        first_line = own[0].found.splitlines()[0] if own[0].found else ""
        cause = f"raised {own[0].kind}: {first_line}"
        return Incident(rank=own[0].rank, cause=cause, signature=_without_numbers(cause), step=step)
    hung = [rank for rank in range(ranks) if rank not in endings]
    if failures and failures[0].is_timeout and hung:
        return Incident(rank=hung[0], cause="hung: its peers waited for it in vain", signature="", step=step)
    if failures:
        return Incident(rank=failures[0].rank, cause="lost the connection to its peers", signature="", step=step)
    return Incident(rank=-1, cause=f"ended without a rank: {last_words}", signature="launcher", step=step)


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return "" if exit_code is None else f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _killed_by(name: str) -> str:
    if not name:
        return "died without a word"
    return f"was killed ({name})" if name.startswith(("SIG", "signal")) else f"ended with {name}"


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def refuse_restart(incidents: Sequence[Incident], max_restarts: int, log: Path) -> IngotError | None:
    """None if the job may start again after the last of `incidents`, else the error that ends the run for good.

    log: what the last attempt wrote to standard error.
    """
    last = incidents[-1]
    if last.error:
        return last.error
    who = f"rank {last.rank}" if last.rank >= 0 else "the job"
    same = [i for i in incidents[:-1] if (i.signature, i.step) == (last.signature, last.step)]
    if last.signature and same:
        return RunFailed(
            f"{who} {last.cause} near step {last.step}, {len(same) + 1} times in a row",
            rule="the same failure at the same step is a bug, not an accident; starting again will not help",
            fix=f"mend the cause ({log} has the traceback); the same command then continues from the last checkpoint",
        )
    if len(incidents) > max_restarts:
        return RunFailed(
            f"{who} {last.cause} near step {last.step}, after {max_restarts} restarts",
            rule=f"launch.max_restarts = {max_restarts}",
            fix=f"find the cause ({log}); the same command continues from the last checkpoint",
        )
    return None
