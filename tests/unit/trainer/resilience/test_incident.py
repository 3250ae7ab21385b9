import signal
from dataclasses import replace

import pytest

from ingot.errors import DataError
from ingot.trainer.resilience.collective_calls import CollectiveCall
from ingot.trainer.resilience.endings import RankEnding
from ingot.trainer.resilience.incidents import AttemptEnd, JobIncident, explain

LOST = "Connection closed by peer [127.0.0.1]:3899"
HUNG = "gloo: Timed out waiting 5000ms for recv operation to complete"
CALL = CollectiveCall(
    group="0", ranks=(0, 1), number=12, operation="all_reduce", sizes=((5,),), dtype="Float", finished=False
)


def failed(rank: int, found: str, kind: str = "RuntimeError", time: float = 1.0) -> RankEnding:
    return RankEnding(rank=rank, time=time, kind=kind, found=found)


def find(endings, dead=(), exit_codes=None, ranks=3, last_words="boom", **facts) -> JobIncident:
    return explain(
        AttemptEnd(
            ranks=ranks,
            endings={e.rank: e for e in endings},
            dead=list(dead),
            exit_codes=exit_codes or {},
            step=7,
            last_words=last_words,
            **facts,
        )
    )


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


def test_an_abort_for_a_wrong_size_is_a_bug():
    log = "terminate called\n  what():  [pair.cc:456] op.preamble.length <= op.nbytes. 20 vs 12. Received data size\n"
    peer = replace(failed(0, LOST), collectives=(CALL,))
    incident = find([peer], [1], {1: -signal.SIGABRT}, ranks=2, log=log)
    assert incident.rank == 1 and incident.error is not None and incident.error.code == "E-COLLECTIVES-DIFFER"
    assert "(20 vs 12 bytes)" in incident.cause and "rank 0 called all_reduce [5] Float, number 12" in incident.cause


def test_errors_after_different_collectives_are_a_bug():
    other = replace(CALL, operation="broadcast")
    endings = [replace(failed(0, LOST), collectives=(CALL,)), replace(failed(1, LOST), collectives=(other,))]
    incident = find(endings, dead=[0, 1], ranks=2)
    assert incident.error is not None and "rank 1 called broadcast [5]" in incident.error.found
    same = find([replace(ending, collectives=(CALL,)) for ending in endings], dead=[0, 1], ranks=2)
    assert same.error is None and same.cause == "lost the connection to its peers"


def test_what_the_user_has_to_mend_is_handed_on():
    incident = find([failed(0, LOST, time=1), failed(2, "block 3 differs", "DataError", time=2)], dead=[0, 2])
    assert isinstance(incident.error, DataError) and incident.rank == 2
    assert incident.kind == "data"
    several = find([failed(0, "none of 2 can be used:\n  a\n  b", "CheckpointError")], dead=[0])
    assert several.cause == "none of 2 can be used" and several.error.found.endswith("b")  # one line in log and status


def test_the_numbers_of_a_step_end_an_attempt_there_and_other_errors_at_the_last_step():
    """An error of a checkpoint names the step of the checkpoint."""
    exploded = replace(failed(0, "loss 9", "RunFailed"), code="E-LOSS-EXPLODED", facts={"step": 1})
    refused = replace(failed(0, "cut", "CheckpointError"), code="E-CKPT-SIZE", facts={"step": 1})
    found = [find([ending], dead=[0]) for ending in (exploded, refused, failed(0, "x", "ValueError"))]
    assert [(one.step, one.at_step) for one in found] == [(7, 1), (7, 7), (7, 7)]


def test_ranks_that_never_started_show_the_last_line():
    incident = find([], last_words="No module named torch")
    assert incident.rank == -1 and "No module named torch" in incident.cause
    assert (incident.signature, incident.kind) == ("launcher", "job")  # not tried for ever


def test_a_killed_fork_server_is_an_accident():
    """Twice at the same step: the kernel kills it when memory is short, which is no bug of the program."""
    killed = find([], server_code=-signal.SIGKILL)
    assert "fork server" in killed.cause and (killed.signature, killed.kind) == ("", "killed")
    assert find([], server_code=-signal.SIGKILL, oom_kills=1).kind == "memory"
    assert find([], last_words="No module named torch", server_code=1).signature == "launcher"


def test_a_rank_that_left_without_starting_is_named():
    assert find([], exit_codes={1: 1}).cause == "ended with exit code 1"


@pytest.mark.parametrize(
    ("incident", "kind"),
    [
        ({"dead": [1], "exit_codes": {1: -signal.SIGKILL}}, "killed"),
        ({"dead": [1], "exit_codes": {1: -signal.SIGKILL}, "oom_kills": 1}, "memory"),
        ({"dead": [1], "exit_codes": {1: -signal.SIGSEGV}, "oom_kills": 1}, "crash"),
        ({"dead": [1], "exit_codes": {1: 1}}, "crash"),
        ({"endings": [failed(1, "CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError")]}, "memory"),
        ({"endings": [failed(1, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8")]}, "memory"),
        ({"endings": [failed(1, "x", "ValueError")]}, "bug"),
        ({"endings": [replace(failed(1, "x", "RunFailed"), code="E-LOSS-NOT-FINITE")]}, "numerics"),
        ({"endings": [replace(failed(1, "x", "RunFailed"), code="E-CALLBACK")]}, "bug"),
        ({"endings": [replace(failed(1, "x", "RunFailed"), code="E-STATE-DAMAGED")]}, "node"),
        ({"endings": [replace(failed(1, "x", "StoreUnreachable"), code="E-STORE-UNREACHABLE")]}, "disk"),
        ({"endings": [failed(1, "x", "ResourceError")]}, "disk"),
        ({"endings": [failed(1, "x", "ConfigError")]}, "settings"),
        ({"endings": [failed(0, HUNG), failed(2, HUNG)]}, "hang"),
        ({"endings": [failed(0, LOST)]}, "job"),
    ],
)
def test_every_failure_has_a_kind(incident, kind):
    assert find(**{"endings": [], **incident}).kind == kind


@pytest.mark.parametrize("address", ["0x7f12", "0x9a01"])
def test_addresses_and_numbers_do_not_make_errors_different(address):
    one = find([failed(0, f"bad tensor at {address}, element 17")])
    two = find([failed(0, "bad tensor at 0xffff, element 4")])
    assert one.signature == two.signature != ""
