"""The agreement of ranks to stop, and what asks for it."""

import math
import time

import pytest
from tests.own_time import own_time

import ingot.trainer.resilience.stop_vote as stop_vote_module
from ingot.schema.launch import Launch
from ingot.trainer.resilience.stop_requests import REASONS, REQUESTED, TIME_LIMIT, StopRequest, StopRequests
from ingot.trainer.resilience.stop_vote import StopVote


@pytest.mark.parametrize(("step_seconds", "noticed_after"), [((0.01, 0.03), 6), ((0.3, 0.01), 1), ((0.015, 0.0), 13)])
@pytest.mark.parametrize("asked", [(1,), (0, 1)])
def test_all_ranks_stop_after_the_same_step(fork_ranks, monkeypatch, step_seconds, noticed_after, asked):
    """The step time of the slowest rank decides: every 6 steps of 0.03 s, after every step of 0.3 s."""
    now = [0.0]
    own_time(monkeypatch, stop_vote_module, monotonic=lambda: now[0])

    def train(rank, ranks):
        requests = StopRequests()
        vote = StopVote(requests)
        for step in range(1, 11):
            now[0] += step_seconds[rank]
            assert vote.after_step(at_line=step == 10) == (None, 0)
        if rank in asked:
            requests.ask("SIGTERM")
        found = ((step, vote.after_step(at_line=False)[0]) for step in range(1, 99))
        return next((step, request.reason) for step, request in found if request)

    assert fork_ranks(train, 2) == [(noticed_after, "SIGTERM")] * 2


def test_until_the_first_line_a_request_is_noticed_after_the_same_step(fork_ranks):
    def train(rank, ranks):
        requests = StopRequests()
        vote = StopVote(requests)
        before, _ = vote.after_step(at_line=False)
        if rank == 1:
            requests.ask("SIGUSR1")
        return before, vote.after_step(at_line=False)[0].reason

    assert fork_ranks(train, 2) == [(None, "SIGUSR1")] * 2


def test_the_earliest_deadline_counts(fork_ranks):
    def train(rank, ranks):
        requests = StopRequests(launch=Launch(grace="1h" if rank else "2h"))
        requests.ask("SIGTERM")
        return StopVote(requests).after_step(at_line=True)[0].deadline - time.monotonic()

    assert all(3500 < left <= 3600 for left in fork_ranks(train, 2))


def test_a_request_in_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "stop-request"
    assert StopRequest.read(path) is None and StopRequests(path).current() is None
    for reason in REASONS:
        for request in (StopRequest(reason, 12.5), StopRequest(reason)):
            request.write(path)
            assert StopRequest.read(path) == StopRequests(path).current() == request
    for other in ("", "stop", "3", '{"reason": "whim", "deadline": 1}', '{"reason": []}'):
        path.write_text(other)
        assert StopRequest.read(path) == StopRequest(REQUESTED)


def test_the_first_request_counts(tmp_path):
    requests = StopRequests(launch=Launch(grace="1h"))
    first = requests.ask("SIGUSR1")
    assert requests.ask("SIGTERM") is requests.current() is first and first.reason == "SIGUSR1"
    assert math.isinf(StopRequests().ask("SIGTERM").deadline)


def test_the_time_limit_counts_from_the_start_of_the_launcher():
    launch, now = Launch(stop_after="1h", grace="10min"), time.monotonic()
    assert StopRequests(launch=launch, began=now - 3500).current() is None
    assert StopRequests(launch=launch).current() is None  # the supervisor counts
    request = StopRequests(launch=launch, began=now - 3601).current()
    assert request.reason == TIME_LIMIT and 590 < request.deadline - now < 610
