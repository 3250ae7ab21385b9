"""The board of reliability: faults carried out on real runs, judged by oracles that are each defined once.

    python -m tests.board --rows RS09,RS10 --seeds 1

killpoints.c   a library for LD_PRELOAD: kills, losses of power and disk faults at the k-th call, from outside
bench.py       a tiny project, real runs of it with and without faults; launcher.py: attempts forked in half a second
ingot.drill    O1 to O8, jobs and the faults that any run can have: `ingot drill` has them for users
row.py         what rows share; rows_*.py: the rows; planted.py: a plug-in with the faults of programs
table.py       all lines as a table
docs/reliability.md has the results.
"""

from . import (
    rows_builds,
    rows_clock,
    rows_damage,
    rows_data,
    rows_disk,
    rows_hang,
    rows_health,
    rows_job,
    rows_launchers,
    rows_lease,
    rows_memory,
    rows_node,
    rows_partial,
    rows_slow,
    rows_soak,
    rows_store,
)
from .row import Row

_FILES = (
    rows_builds,
    rows_disk,
    rows_clock,
    rows_damage,
    rows_data,
    rows_hang,
    rows_health,
    rows_job,
    rows_launchers,
    rows_lease,
    rows_memory,
    rows_node,
    rows_partial,
    rows_slow,
    rows_soak,
    rows_store,
)
ALL: tuple[Row, ...] = tuple(sorted((row for file in _FILES for row in file.ROWS), key=lambda row: row.id))
# Rows of the design that nothing here carries out yet, and why. A row never disappears: it moves from here to a file.
_ELSEWHERE = "not on the board yet"
MISSING: dict[str, tuple[str, str]] = {
    "RD2": ("hostile crawl files", f"{_ELSEWHERE}: tests of extraction; the bound on memory is not measured"),
    "RS19": ("a wrong bit in a weight of one copy", "needs comparison of copies"),
    "RS20": ("a wrong bit in a gradient", "needs recomputation on another rank"),
    "RS21": ("a wrong bit in an activation or a moment", "needs recomputation on another rank"),
    "RS22": ("NaN once, NaN always", _ELSEWHERE),
    "RS23": ("a spike of the loss", "needs a policy for spikes"),
    "RS24": ("no progress", "needs a watch on the loss"),
    "RS25": ("a damaged data shard", f"{_ELSEWHERE}: tests/e2e/test_data_faults.py; no quarantine"),
    "RS29": ("a matrix of edits on resume", f"{_ELSEWHERE}: tests of docs/resume.md"),
    "RS31": ("the store or a log sink is killed", _ELSEWHERE),
}
