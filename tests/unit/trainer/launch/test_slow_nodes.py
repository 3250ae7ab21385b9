"""Slow nodes of a job: launchers of this machine, whose ranks are reported as slow by the test."""

import json
import os
import signal
import time

import pytest
from tests.unit.trainer.launch import test_nodes

from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.trainer.launch.slow_nodes import SlowNodes, SlowRank

cluster = test_nodes.cluster
_LONG = 30.0
SLOW = {"host": "h", "phase": "compute", "factor": 2.0, "since": 7, "seconds": 1.0, "ended": False, "slowdown": 1.9}


def report(cluster, rank: int, **changes) -> None:
    """Report a rank as slow, once rank 0 of the newest attempt has begun."""
    ends, began = time.monotonic() + _LONG, []
    while not began or began.count(events.RANK_STARTED) > began.count(events.RUN_STARTED):
        assert time.monotonic() < ends
        found = read_events(cluster.folder.events, events.RANK_STARTED, events.RUN_STARTED)
        began = [event["kind"] for event in found if event.get("rank", 0) == 0]
    with EventLog(cluster.folder.events) as log:
        log.write(events.STRAGGLER, step=90, rank=rank, **SLOW | changes)


def health(cluster, count: int) -> list[tuple[str, str]]:
    """Wait for `count` findings about slow nodes. Returns the name and the verdict of each."""
    ends = time.monotonic() + _LONG
    while len(found := list(read_events(cluster.folder.events, events.HEALTH))) < count:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return [(event["node"], event["verdict"]) for event in found]


def codes(cluster) -> dict[str, object]:
    return {name: code for name, (_, code) in cluster.ends().items()}


def test_a_slow_node_is_drained_and_a_spare_takes_its_place_once(cluster):
    for name in "abcd":
        cluster.start(name)
    before = cluster.attempt(0)
    report(cluster, 0, slowdown=None)  # slow, but not for long
    report(cluster, 1)
    after = cluster.attempt(1)
    assert [before[rank]["pid"] == after[rank]["pid"] for rank in (0, 1)] == [False, False]
    assert health(cluster, 1) == [("node-b", "drain")]
    report(cluster, 1)  # the spare is slow, too
    assert health(cluster, 2) == [("node-b", "drain"), ("node-c", "warn")]
    cluster.finish()
    assert codes(cluster) == {"a": 0, "b": "E-NODE-UNHEALTHY", "c": 0, "d": 0}
    assert cluster.planned() == ["node-b is drained: rank 1 takes 2.0 times as long as its peers since step 7"]
    assert list(json.loads(cluster.folder.drained.read_text())) == ["node-b"] and not cluster.faults()


@pytest.mark.slow
def test_the_slow_machine_of_the_leader_is_drained_and_another_one_leads(cluster):
    for name in "abc":
        cluster.start(name)
    cluster.attempt(0)
    report(cluster, 0)
    cluster.wait_for("leads", 2)
    cluster.finish()
    assert codes(cluster) == {"a": "E-NODE-UNHEALTHY", "b": 0, "c": 0} and not cluster.faults()


def test_a_slow_node_that_nothing_can_replace_stays_until_a_spare_joins(cluster):
    for name in "ab":
        cluster.start(name)
    cluster.attempt(0)
    report(cluster, 1)
    assert health(cluster, 1) == [("node-b", "warn")]
    time.sleep(0.3)
    assert not cluster.planned() and len(health(cluster, 1)) == 1
    cluster.start("c")
    cluster.attempt(1)
    cluster.finish()
    assert codes(cluster) == {"a": 0, "b": "E-NODE-UNHEALTHY", "c": 0}


@pytest.mark.parametrize(("slowdown", "leaves"), [(2.5, True), (1.9, False)])
def test_a_run_goes_on_with_fewer_nodes_if_that_is_faster(cluster, slowdown, leaves):
    """One rank alone takes twice as long as two."""
    for name in "ab":
        cluster.start(name, min_ranks=1, shrink_seconds=0.1)
    cluster.attempt(0)
    report(cluster, 1, slowdown=slowdown)
    assert health(cluster, 1) == [("node-b", "drain" if leaves else "warn")]
    if leaves:
        cluster.attempt(1, ranks=1)
    cluster.finish()
    assert codes(cluster)["b"] == ("E-NODE-UNHEALTHY" if leaves else 0)
    assert len(cluster.planned()) == leaves


def test_a_run_that_stops_drains_no_slow_node(cluster):
    for name in "abc":
        cluster.start(name, watchdog_seconds=_LONG)
    pids = [event["pid"] for event in cluster.attempt(0).values()]
    report(cluster, 1, slowdown=None)  # rank 0 has begun
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # its save takes long
    cluster.kill("a", signal.SIGTERM)
    ends = time.monotonic() + _LONG
    while not cluster.folder.stop_request.exists():
        assert time.monotonic() < ends
        time.sleep(0.01)
    report(cluster, 1)
    time.sleep(0.6)  # three looks of the leader
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert codes(cluster) == {"a": 10, "b": 10, "c": 10} and not health(cluster, 0)


def test_a_place_counts_as_slow_by_its_work_for_a_day(cluster):
    now = time.time()
    with cluster.folder.events.open("a") as log:
        for ago, device in ((90_000, "rank 3"), (100, "rank 4")):
            drained = {"report": "slow", "verdict": "drain", "device": device, "time": now - ago}
            log.write(json.dumps({"kind": events.HEALTH, **drained}) + "\n")
    nodes = SlowNodes(cluster.folder, ranks=2)
    found = [nodes.judge(SlowRank(2, 2.0, 1, 2.0), "n", "").verdict.name]
    cluster.folder.events.unlink()  # it is not read again at each look
    found += [nodes.judge(SlowRank(rank, 2.0, 1, 2.0), "n", "").verdict.name for rank in (3, 5, 7)]
    assert found == ["DRAIN", "WARN", "WARN", "DRAIN"]
