"""When the next log line of a run is late."""

_LATE_LINES = 5.0  # a run makes no progress if its newest line is older than this many lines take
_LEAST_SECONDS = 3.0


def late_after_seconds(log_every: int, step_seconds: float) -> float:
    """Return the seconds after a log line of `log_every` steps from which on the next one is late."""
    return max(_LATE_LINES * log_every * step_seconds, _LEAST_SECONDS)
