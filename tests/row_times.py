"""The rows of the board of reliability that a run of the tests has played, and their time, for the end of its output.

A test that plays a row, or a sample of its cases, has the marker `row`, with the ids of its rows.
"""

from collections.abc import Iterable

import pytest

PROPERTY = "row"  # of reports, also of those that come from another worker


def rows_line(reports: Iterable[pytest.TestReport]) -> str:
    """Return how many rows were played, and the sum of the seconds of their tests, with setup and teardown, as if they
    had run one after the other; "" without a row. Rows whose tests were all skipped are named apart."""
    played, skipped, seconds = set[str](), set[str](), 0.0
    for report in reports:
        rows = {value for name, value in report.user_properties if name == PROPERTY}
        if rows and report.skipped:
            skipped |= rows
        elif rows:
            seconds += report.duration
            played |= rows if report.when == "call" else set()
    skipped -= played
    if not played | skipped:
        return ""
    names = f": {', '.join(sorted(played))}" if played else ""
    without = f"; not played: {', '.join(sorted(skipped))}" if skipped else ""
    return f"board: {len(played)} rows, {seconds:.0f} s{names}{without}"
