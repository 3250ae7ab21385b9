"""The rows of the board of reliability that a run of the tests has played, and their time, for the end of its output.

A test that plays a row, or a sample of its cases, has the marker `row`, with the ids of its rows.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

PROPERTY = "row"  # of reports, also of those that come from another worker


def rows_line(reports: Iterable[pytest.TestReport]) -> str:
    """Return how many rows were played, and for how long: the seconds of their tests, with setup and teardown, as if
    they had run one after the other, and those of the worker that had most of them; "" without a row. Rows whose tests
    were all skipped are named apart."""
    played, skipped, seconds = set[str](), set[str](), Counter[str]()
    for report in reports:
        rows = {value for name, value in report.user_properties if name == PROPERTY}
        if rows and report.skipped:
            skipped |= rows
        elif rows:
            seconds[getattr(report, "worker_id", "")] += report.duration
            played |= rows if report.when == "call" else set()
    skipped -= played
    if not played | skipped:
        return ""
    names = f": {', '.join(sorted(played))}" if played else ""
    without = f"; not played: {', '.join(sorted(skipped))}" if skipped else ""
    most = f" ({max(seconds.values()):.0f} s on one of {len(seconds)} workers)" if len(seconds) > 1 else ""
    return f"board: {len(played)} rows, {sum(seconds.values()):.0f} s{most}{names}{without}"
