"""The line about the rows of the board at the end of a run of the tests."""

import pytest
from tests.row_times import PROPERTY, rows_line


def report(*rows, when="call", seconds=1.0, outcome="passed", **worker):
    return pytest.TestReport(
        nodeid="test",
        location=("file", 0, "test"),
        keywords={},
        outcome=outcome,
        longrepr=None,
        when=when,
        duration=seconds,
        user_properties=[("other", "RS99"), *((PROPERTY, row) for row in rows)],
        **worker,
    )


def test_rows_are_named_once_with_the_time_of_all_their_tests():
    assert rows_line([report(), report(when="setup")]) == ""
    played = [report("RS09", when="setup", seconds=2.0), report("RS09", seconds=3.0, outcome="failed"), report("RS01")]
    played += [report("RS09", "RS10", when="teardown", seconds=0.5), report("RS09", "RS01"), report(seconds=9.0)]
    assert rows_line(played) == "board: 2 rows, 8 s: RS01, RS09"
    skipped = [report("RS31", when="setup", outcome="skipped"), report("RS01", when="setup", outcome="skipped")]
    assert rows_line(played + skipped) == "board: 2 rows, 8 s: RS01, RS09; not played: RS31"
    assert rows_line(skipped) == "board: 0 rows, 0 s; not played: RS01, RS31"
    apart = [report("RS02", worker_id="gw0"), *(report("RS03", worker_id="gw1") for _ in range(3))]
    assert rows_line(apart) == "board: 2 rows, 4 s (3 s on one of 2 workers): RS02, RS03"
