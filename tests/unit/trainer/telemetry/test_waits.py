"""The clocks separate computing from sleeping, and a summary names the rank with the most of each."""

import time

import numpy as np
import pytest

from ingot.trainer.telemetry.usage import KINDS, ThreadTime, Waits, summary, summary_by_axis


def test_a_sleeping_thread_is_blocked_and_a_busy_one_computes():
    before = ThreadTime.now()
    time.sleep(0.05)
    slept = Waits.of(ThreadTime.now().since(before), data=0.0, pipeline=0.0, collectives=0.0, reading=0.0)
    assert slept.blocked > 0.04 and slept.computing < 0.02

    before = ThreadTime.now()
    while time.thread_time() - before.computing < 0.05:
        pass
    busy = Waits.of(ThreadTime.now().since(before), data=0.0, pipeline=0.0, collectives=0.0, reading=0.0)
    assert busy.computing >= 0.05 and busy.blocked < 0.02 + busy.queued


def test_parts_add_up_to_the_wall_clock():
    passed = ThreadTime(wall=1.0, computing=0.5, queued=0.1)
    waits = Waits.of(passed, data=0.1, pipeline=0.04, collectives=0.01, reading=0.05)
    assert waits.blocked == pytest.approx(0.2)
    assert waits.row().sum() == pytest.approx(1.0)
    overlapping = Waits.of(passed, data=0.9, pipeline=0.0, collectives=0.0, reading=0.0)
    assert overlapping.blocked == 0.0  # clocks that tick at once never make it negative


def test_a_summary_is_per_step_and_names_the_rank():
    rows = np.zeros((3, len(KINDS)))
    rows[:, KINDS.index("data")] = 0.0, 0.8, 0.4
    found = summary(rows, KINDS, 4)
    assert found["data"] == {"mean": 0.1, "least": 0.0, "most": 0.2, "rank": 1}
    assert set(found) == set(KINDS)


def test_communication_is_by_axis_and_leaves_out_what_is_not_known():
    rows = np.array([[0.4, 0.8, 0.0, np.nan], [0.0, 1.6, 0.8, np.nan]])
    found = summary_by_axis(rows, ("tp", "world"), 4)
    assert found["tp"]["exposed"] == {"mean": 0.05, "least": 0.0, "most": 0.1, "rank": 0}
    assert found["tp"]["hidden"] == {"mean": 0.3, "least": 0.2, "most": 0.4, "rank": 1}
    assert found["world"] == {"exposed": {"mean": 0.1, "least": 0.0, "most": 0.2, "rank": 1}}
