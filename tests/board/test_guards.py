"""The smallest case of the row of each guard, for tests/mutants/guards_off.py, which switches one guard off at a time:
`python -m tests.mutants switched-off`. The cases of the fence and of fsync are in test_rows.py."""

import pytest

from ingot.drill.fault import play
from ingot.drill.faults import faults_of
from ingot.drill.oracles import Verdicts
from ingot.drill.trial import Trial

from .bench import Bench
from .row import random_of
from .rows_damage import flip_of_samples
from .rows_hang import LONG, kills_without_progress
from .rows_stop import never_stops
from .rows_takeover import late_commit
from .test_rows import wrong

pytestmark = pytest.mark.slow
_TIMEOUT = (
    "launch.timeout_seconds=20"  # of collectives: without a watchdog, these end the attempt, and the test with it
)


@pytest.mark.row("RS03")
def test_a_stopped_rank_is_found(bench: Bench):
    settings, verdicts = (*LONG, _TIMEOUT), Verdicts()
    (fault,) = (one for one in faults_of("RS03") if one.id == "RS03")
    place = bench.root / "stopped-rank"
    with Trial(bench.drilled(*settings), place, random_of("RS03", 0), verdicts, name=fault.id) as trial:
        play(fault, trial, bench.reference(*settings))
    assert not wrong(verdicts)


@pytest.mark.row("RS10")
def test_a_wrong_bit_in_the_ledger_is_found(bench: Bench):
    verdicts = Verdicts()
    flip_of_samples(bench, 0, verdicts)
    assert not wrong(verdicts)


@pytest.mark.row("RS33")
def test_restarts_without_progress_wait_longer(bench: Bench):
    verdicts = Verdicts()
    kills_without_progress(bench, 0, verdicts)
    assert not wrong(verdicts)


@pytest.mark.row("RS28")
def test_a_run_that_never_stops_is_killed(bench: Bench):
    verdicts = Verdicts()
    never_stops(bench, 0, verdicts)
    assert not wrong(verdicts)


@pytest.mark.row("RS30 store")
def test_a_commit_that_reaches_the_store_late_is_refused(bench: Bench):
    pytest.importorskip("obstore")
    verdicts = Verdicts()
    late_commit(bench, 0, verdicts, published=True)
    assert not wrong(verdicts)
