"""The board of reliability: faults carried out on real runs, judged by oracles that are each defined once.

    python -m tests.board --rows RS09,RS10 --seeds 1

killpoints.c   a library for LD_PRELOAD: kills, losses of power and disk faults at the k-th call, from outside
bench.py       a tiny project, real runs of it with and without faults; launcher.py: attempts forked in half a second
ingot.drill    O1 to O8, jobs and the faults that any run can have: `ingot drill` has them for users
hosts.py       emulated hosts in network namespaces, joined by switch.py, whose links can fail
row.py         what rows share; rows_*.py: the rows, planted.py: a plug-in with the faults of programs
times.py       limits of the times of rows, judged by the medians of their seeds
table.py       all lines as a table, and the cases of some rows
docs/reliability.md has the results.
"""

from importlib import import_module
from pkgutil import iter_modules

from .row import Row

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__) if file.name.startswith("rows_")]
ALL: tuple[Row, ...] = tuple(sorted((row for file in _FILES for row in file.ROWS), key=lambda row: row.id))
# Rows of the design that nothing here carries out yet: their faults, and why. A row never disappears: it moves to a
# file.
MISSING: dict[str, tuple[str, str]] = {}
