from pathlib import Path

import pytest
from tests.expect import refused

from ingot.errors import DataError
from ingot.schema.launch import SAME, Launch
from ingot.trainer.resilience.incidents import JobIncident
from ingot.trainer.resilience.restarts import NO_PROGRESS, Restarts

LOG = Path("attempt-1.log")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def incident(step=7, signature="", **facts) -> JobIncident:
    return JobIncident(rank=1, kind="killed", cause="was killed (SIGKILL)", signature=signature, step=step, **facts)


def test_an_empty_log_shows_no_cause(clock, tmp_path):
    log = tmp_path / "runs" / "a" / "logs" / "attempt-1.log"
    log.parent.mkdir(parents=True)
    for text, shown in (("Traceback", f"see {log}"), ("", f"ingot status {tmp_path / 'runs' / 'a'}")):
        log.write_text(text)
        with refused("E-RUN-RESTARTS") as failed:
            Restarts(Launch(max_restarts=0), clock).wait_after(incident(1), log)
        assert shown in failed.value.fix


def test_accidents_use_up_the_budget_of_their_hour(clock):
    restarts = Restarts(Launch(max_restarts=3), clock)
    for step in range(1, 4):
        assert restarts.wait_after(incident(step), LOG) == 0.0  # each got farther
    assert (restarts.count, restarts.recent) == (3, 3)
    with refused("E-RUN-RESTARTS", max_restarts=3, kind="killed") as failed:
        restarts.wait_after(incident(4), LOG)
    assert failed.value.exit_code == 93
    clock.now = 3601.0
    assert restarts.wait_after(incident(5), LOG) == 0.0 and (restarts.count, restarts.recent) == (5, 1)
    with refused("E-RUN-RESTARTS"):
        Restarts(Launch(max_restarts=0), clock).wait_after(incident(), LOG)


def test_the_same_error_at_the_same_step_twice_more_is_a_bug(clock):
    restarts = Restarts(Launch(max_restarts=100), clock)
    for step in (7, 7, 9, 7, 9):
        restarts.wait_after(incident(step, "x"), LOG)  # at 7 twice, then it got farther
    with refused("E-RUN-REPEATS", times=SAME, log=str(LOG)):
        restarts.wait_after(incident(9, "x"), LOG)


@pytest.mark.parametrize("others", [((9, ""),), ((9, "y"),), ((8, "x"),)])
def test_another_failure_is_not_the_same(clock, others):
    restarts = Restarts(Launch(max_restarts=100), clock)
    for step, signature in ((9, "x"), *others, (9, "x")):
        restarts.wait_after(incident(step, signature), LOG)
    with refused("E-RUN-REPEATS", times=SAME):
        restarts.wait_after(incident(9, "x"), LOG)


def test_a_new_leader_counts_what_earlier_ones_had(clock):
    earlier = [(20.0, incident(9, "x")), (10.0, incident(9, "x"))]
    with refused("E-RUN-REPEATS", times=SAME):
        Restarts(Launch(max_restarts=100), clock, earlier).wait_after(incident(9, "x"), LOG)


def test_restarts_that_get_no_farther_wait_longer_and_end(clock):
    restarts = Restarts(Launch(max_restarts=100), clock)
    assert restarts.wait_after(incident(7), LOG) == 0.0
    assert [restarts.wait_after(incident(step), LOG) for step in (7, 5, 6)] == [1.0, 2.0, 4.0]
    assert restarts.wait_after(incident(8), LOG) == 0.0  # progress
    for _ in range(NO_PROGRESS):
        restarts.wait_after(incident(8), LOG)
    with refused("E-RUN-NO-PROGRESS", farthest=8, step=8):
        restarts.wait_after(incident(8), LOG)


def test_what_the_user_has_to_mend_is_handed_on(clock):
    error = DataError("E-SHARD-HASH", "block 3 differs", rule="as built", fix="copy it again")
    with pytest.raises(DataError) as raised:
        Restarts(Launch(), clock).wait_after(incident(error=error), LOG)
    assert raised.value is error


def test_a_hang_shows_its_stacks_and_the_setting(clock):
    restarts = Restarts(Launch(), clock)
    hang = incident(
        signature="hung",
        evidence=Path("incidents/0001"),
        setting="launch.watchdog_save",
        limit=90.0,
        limit_reason="auto",
    )
    for _ in range(SAME - 1):
        restarts.wait_after(hang, LOG)
    with refused("E-RUN-REPEATS") as failed:
        restarts.wait_after(hang, LOG)
    assert "incidents/0001" in failed.value.fix
    assert failed.value.fix.partition("time, ")[2].startswith(
        "raise launch.watchdog_save; the limit was 1 min 30 s: auto)"
    )
