import signal
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.errors import DataError, RunFailed
from ingot.trainer.resilience.endings import JobIncident, RankEnding, explain, refuse_restart

LOST = "Connection closed by peer [127.0.0.1]:3899"
HUNG = "gloo: Timed out waiting 5000ms for recv operation to complete"
LOG = Path("attempt-1.log")


def failed(rank: int, found: str, kind: str = "RuntimeError", time: float = 1.0) -> RankEnding:
    return RankEnding(rank=rank, time=time, kind=kind, found=found)


def find(endings, dead=(), exit_codes=None, ranks=3, last_words="boom") -> JobIncident:
    return explain(ranks, {e.rank: e for e in endings}, list(dead), exit_codes or {}, 7, last_words)


def test_a_killed_rank_is_named_though_its_peers_complained():
    incident = find([failed(0, LOST), failed(2, LOST)], dead=[0, 1, 2], exit_codes={1: -9, 0: 1, 2: 1})
    assert (incident.rank, incident.cause, incident.step) == (1, "was killed (SIGKILL)", 7)


def test_peers_that_the_launcher_ended_are_not_the_cause():
    incident = find([], dead=[0, 1], exit_codes={0: -signal.SIGTERM, 1: -signal.SIGSEGV})
    assert (incident.rank, incident.cause) == (1, "was killed (SIGSEGV)")


@pytest.mark.parametrize("exit_codes", [{0: -signal.SIGTERM}, {}])
def test_a_rank_that_failed_by_itself_is_the_cause_though_the_launcher_ended_another(exit_codes):
    incident = find([failed(1, "index 3 is out of range", "IndexError")], dead=[0, 1], exit_codes=exit_codes)
    assert (incident.rank, incident.cause) == (1, "raised IndexError: index 3 is out of range")


def test_a_rank_may_die_without_a_known_exit_code():
    assert find([failed(0, LOST)], dead=[1]).cause == "died without reporting an error"


def test_the_first_real_error_is_the_cause():
    incident = find(
        [failed(0, LOST, time=2), failed(1, "index 9 is out of range", "IndexError", time=1), failed(2, LOST, time=3)],
        dead=[0, 1, 2],
    )
    assert (incident.rank, incident.cause) == (1, "raised IndexError: index 9 is out of range")


def test_the_silent_rank_of_a_timeout_hung():
    incident = find([failed(0, HUNG), failed(2, HUNG)], dead=[0])
    assert (incident.rank, incident.cause) == (1, "hung: its peers waited for it until the timeout")


def test_what_the_user_has_to_mend_is_handed_on():
    incident = find([failed(0, LOST, time=1), failed(2, "block 3 differs", "DataError", time=2)], dead=[0, 2])
    assert isinstance(incident.error, DataError) and incident.rank == 2
    assert refuse_restart([incident], 3, LOG) is incident.error
    several = find([failed(0, "none of 2 can be used:\n  a\n  b", "CheckpointError")], dead=[0])
    assert several.cause == "none of 2 can be used" and several.error.found.endswith("b")  # one line in log and status


def test_ranks_that_never_started_show_the_last_line():
    incident = find([], last_words="No module named torch")
    assert incident.rank == -1 and "No module named torch" in incident.cause
    assert refuse_restart([incident], 3, LOG) is None
    assert isinstance(refuse_restart([incident, incident], 3, LOG), RunFailed)


def test_a_killed_fork_server_is_an_accident():
    """Twice at the same step: the kernel kills it when memory is short, which is no bug of the program."""
    killed = explain(2, {}, [], {}, 7, "a warning", -signal.SIGKILL)
    assert "fork server" in killed.cause and killed.signature == ""
    assert refuse_restart([killed, killed], 3, Path("log")) is None
    failed = explain(2, {}, [], {}, 7, "No module named torch", 1)
    with refused("E-RUN-REPEATS"):
        raise refuse_restart([failed, failed], 3, Path("log"))


def test_a_rank_that_left_without_starting_is_named():
    assert find([], exit_codes={1: 1}).cause == "ended with exit code 1"


def incident(cause="was killed (SIGKILL)", signature="", step=7) -> JobIncident:
    return JobIncident(rank=1, cause=cause, signature=signature, step=step)


def test_accidents_use_up_the_budget():
    assert refuse_restart([incident()] * 3, 3, LOG) is None
    refusal = refuse_restart([incident()] * 4, 3, LOG)
    assert isinstance(refusal, RunFailed) and refusal.exit_code == 93
    assert (refusal.code, refusal.facts["max_restarts"]) == ("E-RUN-RESTARTS", 3)
    assert isinstance(refuse_restart([incident()], 0, LOG), RunFailed)


def test_the_same_error_at_the_same_step_is_a_bug():
    bug = incident("raised ValueError: x", "raised ValueError: x")
    refusal = refuse_restart([bug, bug], 3, LOG)
    assert isinstance(refusal, RunFailed) and refusal.code == "E-RUN-REPEATS"
    assert (refusal.facts["times"], refusal.facts["log"]) == (2, str(LOG))
    assert refuse_restart([bug, incident("raised ValueError: x", "raised ValueError: x", step=9)], 3, LOG) is None
    assert refuse_restart([bug, incident()], 3, LOG) is None


@pytest.mark.parametrize("address", ["0x7f12", "0x9a01"])
def test_addresses_and_numbers_do_not_make_errors_different(address):
    one = find([failed(0, f"bad tensor at {address}, element 17")])
    two = find([failed(0, "bad tensor at 0xffff, element 4")])
    assert one.signature == two.signature != ""
