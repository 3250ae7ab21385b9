"""Partial restarts: ranks that lose a peer keep their processes. The ranks act by a script, without torch."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.launch import local
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.local import LEAVE_SECONDS, LocalJob
from ingot.trainer.launch.running import PlannedRestart
from ingot.trainer.launch.supervise import supervise

# Each attempt has a deed per rank, and rank 1 reports a step. "wait": until a peer has gone, which is then lost.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ingot.events import EventLog, read_events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.again import forget, open_line
from ingot.trainer.resilience.endings import guarded
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL, PeerLost, install_leaving, with_peers

folder, attempts = RunFolder(Path(sys.argv[1])), [deeds.split(",") for deeds in sys.argv[2].split(";")]

def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

def work():
    rank, attempt = int(os.environ["RANK"]), int(os.environ["INGOT_ATTEMPT"])
    deed, step = attempts[attempt][rank].rstrip("+"), 6 + attempts[attempt][rank].count("+")
    log = EventLog(folder.events)
    store = os.environ.get("INGOT_STORE_FD")
    log.write("rank_started", rank=rank, pid=os.getpid(), attempt=attempt, port=os.environ["MASTER_PORT"],
              server=os.getppid(),
              listens=bool(store) and os.path.realpath(f"/proc/self/fd/{store}").find("socket") >= 0)
    heartbeat = open_heartbeat(rank)
    heartbeat.enter(Phase.STEP, step)
    os.write(2, f"attempt {attempt} rank {rank}\\n".encode())  # a whole line, not the pieces of print
    while len([e for e in read_events(folder.events, "rank_started") if e["attempt"] == attempt]) < len(attempts[0]):
        time.sleep(0.01)
    peers = [e["pid"] for e in read_events(folder.events, "rank_started") if e["attempt"] == attempt]
    log.write("progress", step=step)
    if deed == "die":
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "fail":
        raise ValueError("index is out of range")
    elif deed == "parent":  # its child does not concern its peers
        subprocess.Popen(["sleep", "25"])
    elif deed == "compute":  # it does not look for its peers
        with with_peers():
            time.sleep(25)
    elif deed == "late":
        signal.signal(LEAVE_SIGNAL, ordered)
        time.sleep(1)
    elif deed == "stuck":
        time.sleep(25)
    elif deed == "finish":
        if rank == 0:
            log.write("finished", step=9)
        return False
    elif deed == "save":
        while not folder.stop_request.exists():
            time.sleep(0.01)
        if rank == 0:
            log.write("stopped", step=step, reason="restart")
        return True
    deadline = time.monotonic() + 20
    while deed != "lose" and time.monotonic() < deadline and not any(map(gone, peers)):
        time.sleep(0.01)
    raise PeerLost("connection closed by peer")

line, ordered = open_line(), signal.getsignal(LEAVE_SIGNAL)  # that of the fork server
install_leaving()
while True:
    try:
        with guarded(folder, int(os.environ["RANK"])):
            again = work()
        if line is None or not again:
            break
    except PeerLost as error:
        if line is None:
            raise
        forget(error)
    line.start_again()
    if attempts[int(os.environ["INGOT_ATTEMPT"])][0] == "gone":
        os._exit(3)
"""


class Planned(JobHere):
    """A job that wants the restart `planned` once its first attempt has made a step."""

    def __init__(self, folder, job, settings, planned):
        super().__init__(folder, job, settings)
        self._planned = planned

    def start(self, attempt, *args, **options):
        self._is_first = attempt == 0
        super().start(attempt, *args, **options)

    def planned_restart(self, slow):
        return self._planned if self._is_first and any(read_events(self._folder.events, events.PROGRESS)) else None


@pytest.fixture
def act(tmp_path):
    """`act("wait,die;finish,finish")`: two ranks; rank 1 is killed in the first attempt, both finish in the second."""
    (tmp_path / "rank_again.py").write_text(RANK)
    folder = RunFolder(tmp_path / "run")
    printed: list[str] = []

    def run(deeds: str, restart="partial", planned=None, **launch):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        ranks = len(deeds.partition(";")[0].split(","))
        job = Job(module="rank_again", arguments=(str(folder.root), deeds), processes=ranks, env={"PYTHONPATH": path})
        settings = Launch(restart=restart, watchdog_seconds=0.5, **launch)
        running = JobHere(folder, job, settings) if planned is None else Planned(folder, job, settings, planned)
        return supervise(folder, running, settings, say=printed.append)

    run.folder, run.printed = folder, printed
    return run


def pids(act, attempt: int) -> dict[int, int]:
    started = read_events(act.folder.events, events.RANK_STARTED)
    return {event["rank"]: event["pid"] for event in started if event["attempt"] == attempt}


def kept(act) -> list[int]:
    return [event["kept"] for event in read_events(act.folder.events, events.RESTART)]


@pytest.mark.parametrize("lost", [0, 2])
def test_only_the_lost_rank_gets_a_new_process(act, lost):
    first = ",".join("die" if rank == lost else "wait" for rank in range(3))
    outcome = act(f"{first};finish,finish,finish")
    before, after = pids(act, 0), pids(act, 1)
    assert (outcome.exit_code, outcome.restarts, kept(act)) == (0, 1, [2])
    assert {rank for rank in before if before[rank] != after[rank]} == {lost}
    assert "; 2 ranks keep their processes" in act.printed[0]
    started = [e for e in read_events(act.folder.events, events.RANK_STARTED) if e["attempt"] == 1]
    assert len({event["port"] for event in started}) == 1 and [e["rank"] for e in started if e["listens"]] == [0]
    log = (act.folder.logs / "attempt-2.log").read_text()
    assert all(f"attempt 1 rank {rank}" in log for rank in range(3))


def test_a_rank_keeps_its_children(act):
    outcome = act("parent,die;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1])
    assert pids(act, 0)[0] == pids(act, 1)[0]


def test_a_rank_that_ends_while_it_waits_is_not_lost_again(act, tmp_path):
    """The end is that of the attempt that it has left."""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = (str(act.folder.root), "wait,die;finish,finish")
    running = LocalJob(
        Job(module="rank_again", arguments=arguments, processes=2, env={"PYTHONPATH": path}), partial=True
    )
    try:
        running.start(attempt=0, log=act.folder.logs / "first.log")
        while running.running():
            running.wait(0.05)
        running.end_attempt([1], keep=True)
        os.kill(running.left[0], signal.SIGKILL)
        time.sleep(0.3)
        running.start(attempt=1, log=act.folder.logs / "second.log")
        while running.running():
            running.wait(0.05)
        assert running.exit_codes == {0: 0, 1: 0}
    finally:
        running.close()


def test_a_stopped_rank_is_the_only_one_that_is_replaced(act):
    outcome = act("wait,stop;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1])
    assert [event["rank"] for event in read_events(act.folder.events, events.FAULT)] == [1]
    assert pids(act, 0)[0] == pids(act, 1)[0]


def test_a_rank_that_does_not_leave_its_peers_is_replaced(act, monkeypatch):
    monkeypatch.setattr(local, "LEAVE_SECONDS", 0.5)
    outcome = act("wait,die,stuck;finish,finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1])
    assert pids(act, 0)[0] == pids(act, 1)[0] and pids(act, 0)[2] != pids(act, 1)[2]
    assert outcome.seconds < 15


def test_a_rank_that_does_not_notice_the_loss_is_asked_to_leave(act):
    outcome = act("die,compute;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1])
    assert pids(act, 0)[1] == pids(act, 1)[1] and outcome.seconds < LEAVE_SECONDS


def test_a_rank_without_the_handler_survives_the_order_to_leave(act):
    """A rank may be at its start. Here it leaves later, when it notices the loss."""
    outcome = act("die,late;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1])


@pytest.mark.slow
def test_a_second_failure_at_the_same_step_replaces_all(act, monkeypatch):
    """The cause may be in a process that is kept. Here no rank ends: rank 0 loses its connection."""
    monkeypatch.setattr(local, "LEAVE_SECONDS", 0.3)
    outcome = act("lose,wait;lose,wait;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1, 0])
    assert not set(pids(act, 1).values()) & set(pids(act, 2).values())
    assert len({event["server"] for event in read_events(act.folder.events, events.RANK_STARTED)}) == 1


def test_a_failure_at_a_later_step_replaces_the_lost_rank_alone(act):
    outcome = act("wait,die;die+,wait+;finish,finish")
    assert (outcome.exit_code, kept(act)) == (0, [1, 1])
    assert pids(act, 0)[0] == pids(act, 1)[0] and pids(act, 1)[1] == pids(act, 2)[1]


def test_a_rank_that_ends_on_its_way_back_is_a_lost_rank(act):
    outcome = act("wait,die;gone,wait;finish,finish")
    assert (outcome.exit_code, outcome.restarts) == (0, 2)
    assert [event["rank"] for event in read_events(act.folder.events, events.FAULT)] == [1, 0]


def test_an_error_that_is_no_accident_ends_the_ranks_that_wait(act, monkeypatch):
    monkeypatch.setattr("ingot.trainer.resilience.restarts._FIRST_WAIT", 0.0)
    with refused("E-RUN-REPEATS", rank=1):
        act("wait,fail;wait,fail;wait,fail")
    assert not any(Path(f"/proc/{pid}").exists() for attempt in (0, 1, 2) for pid in pids(act, attempt).values())


def test_ranks_that_saved_for_a_planned_restart_keep_their_processes(act):
    outcome = act("save,save;finish,finish", planned=PlannedRestart("2 nodes are there"))
    assert (outcome.exit_code, outcome.restarts) == (0, 0)
    assert [event["kept"] for event in read_events(act.folder.events, events.PLANNED_RESTART)] == [2]
    assert pids(act, 0) == pids(act, 1)


def test_ranks_whose_memory_is_not_trusted_are_replaced(act):
    outcome = act("compute,compute;finish,finish", planned=PlannedRestart("memory of GPU 3 is wrong", save=False))
    assert (outcome.exit_code, outcome.restarts) == (0, 0)
    assert [event["kept"] for event in read_events(act.folder.events, events.PLANNED_RESTART)] == [0]
    assert not set(pids(act, 0).values()) & set(pids(act, 1).values())


def test_by_default_all_ranks_are_replaced(act):
    outcome = act("wait,die;finish,finish", restart="full")
    assert (outcome.exit_code, kept(act)) == (0, [0])
    assert not set(pids(act, 0).values()) & set(pids(act, 1).values())


def test_by_default_all_ranks_are_replaced_in_a_planned_restart(act):
    outcome = act("save,save;finish,finish", restart="full", planned=PlannedRestart("2 nodes are there"))
    assert [event["kept"] for event in read_events(act.folder.events, events.PLANNED_RESTART)] == [0]
    assert outcome.exit_code == 0 and not set(pids(act, 0).values()) & set(pids(act, 1).values())
