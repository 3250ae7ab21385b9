"""The time of a restart from the restarts of an earlier run."""

import pytest
from tests.expect import refused

import ingot
from ingot.events import EventLog
from ingot.planner.request.restarts import measured_restart
from ingot.schema import events
from ingot.schema.run_folder import RunFolder


@pytest.fixture
def measured(tmp_path):
    """Write the starts of a run: totals in seconds, the first one without a fault before it."""

    def write(*totals: float):
        with_log = EventLog(RunFolder(tmp_path).events)
        for attempt, total in enumerate(totals):
            phases = {"kill": 0.5 if attempt else None}
            with_log.write(events.START_TIMES, attempt=attempt, seconds=phases, total_seconds=total)
        with_log.close()
        return tmp_path

    return write


def test_the_median_of_the_restarts_without_the_first_start(measured):
    found = measured_restart(measured(900.0, 30.0, 200.0, 50.0))
    assert found.value == 50.0 and "median of 3 restarts" in found.formula


@pytest.mark.parametrize("totals", [(), (12.0,)])
def test_a_run_without_a_restart_is_refused(measured, totals):
    run = measured(*totals)
    with refused("E-RESTART-UNMEASURED", run=str(run)):
        measured_restart(run)


def test_a_plan_counts_the_measured_restarts(measured):
    question = {"params": "7b", "tokens": "1T", "cluster": "128x8xh100", "top": 1}
    run = measured(900.0, 40.0)
    assumed, found = ingot.plan(**question).best.plan, ingot.plan(**question, restart_from=run).best.plan
    assert (assumed.outlook.restart_seconds, found.outlook.restart_seconds) == (600.0, 40.0)
    assert found.outlook.goodput > assumed.outlook.goodput
    assert "outlook.restart" in found.formulas and "outlook.restart" not in assumed.formulas
    with refused("E-RESTART-TWICE", run=str(run)):
        ingot.plan(**question, restart_from=run, assumptions=["restart_seconds=10min", "spares=3"])
