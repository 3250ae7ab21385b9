"""The supervisor and its fork server, with ranks that act by a script instead of training."""

import errno
import os
import signal
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused, uninterrupted

from ingot.errors import DataError, NodeUnhealthy, RunBusyError
from ingot.events import read_events
from ingot.machine.health.report_file import ReportFile
from ingot.schema import events
from ingot.schema.fallbacks import Fallback, Fallbacks
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.launch.folder_watch import FolderWatch
from ingot.trainer.launch.health import HealthWatch
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.local import LocalJob
from ingot.trainer.launch.outcome import EventLogReader
from ingot.trainer.launch.running import PlannedRestart
from ingot.trainer.launch.supervise import supervise
from ingot.trainer.resilience.start_times import Ordered

RANK = """
import json, os, signal, sys, time
from pathlib import Path
from ingot.errors import DataError, RunFailed
from ingot.events import EventLog
from ingot.trainer.resilience.endings import guarded
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat
from ingot.trainer.resilience.reports import Reports
from ingot.schema.run_folder import RunFolder

folder, deeds = RunFolder(Path(sys.argv[1])), sys.argv[2].split(",")
rank, attempt = int(os.environ["RANK"]), int(os.environ["INGOT_ATTEMPT"])
deed = deeds[min(attempt, len(deeds) - 1)]
log = EventLog(folder.events)
with guarded(folder, rank):
    log.write("rank_started", rank=rank, pid=os.getpid(), start=os.environ["INGOT_START"])
    log.write("progress", step=6)
    time.sleep(0.3)
    if deed in ("stop", "glance"):
        deadline = time.monotonic() + (15 if deed == "stop" else 0)
        while not folder.stop_request.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if rank == 0:
            if folder.stop_request.exists():
                log.write("stopped", step=8, reason=json.loads(folder.stop_request.read_text())["reason"])
            else:
                log.write("finished", step=8)
    elif deed == "save":  # asked to stop, it takes a second to write a checkpoint
        while not folder.stop_request.exists():
            time.sleep(0.02)
        saving = folder.checkpoints / ".saving-step-00000008"
        if rank == 0:
            saving.mkdir(parents=True)
            time.sleep(1)
            saving.rename(folder.checkpoint(8))
            log.write("checkpoint", step=8)
            log.write("stopped", step=8)
        while not folder.checkpoint(8).exists():
            time.sleep(0.02)
    elif deed == "fail":  # when it is asked to save
        while not folder.stop_request.exists():
            time.sleep(0.02)
        raise ValueError("no space left")
    elif deed == "save for restart":  # it was asked before the signal came
        while not folder.stop_request.exists():
            time.sleep(0.02)
        time.sleep(1)
        if rank == 0:
            log.write("stopped", step=8, reason="restart")
    elif deed in ("finish", "upload"):
        if rank == 0:
            log.write("checkpoint_refused", step=8, path="p", reason="damaged")
            log.write("run_started", from_step=6)
            log.write("finished", step=9)
        time.sleep(1.0 if deed == "upload" else 0)
    elif deed == "leave":  # it waits in the end of its groups
        heartbeat = open_heartbeat(rank)
        if rank == 0:
            log.write("finished", step=9)
        heartbeat.enter(Phase.LEAVE, 9)
        time.sleep(25 if rank == 1 else 0)
    elif rank == 1 and deed == "forget":  # its checkpoint and the log of it are gone when it is killed
        log.write("checkpoint", step=6)
        time.sleep(0.7)  # longer than between two looks of the supervisor
        os.truncate(folder.events, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and deed == "memory":
        raise MemoryError(f"of {os.environ['INGOT_OVERRIDES']}")
    elif deed in ("pass", "again", "roll back"):
        facts = {} if deed == "roll back" else {"measure": deed}
        raise RunFailed("E-ROLLBACK-NO-CHECKPOINT", "no checkpoint yet", **facts)
    elif rank == 1 and deed == "bug":
        raise ValueError(f"index {attempt} is out of range")
    elif rank == 1 and deed == "data":
        raise DataError("E-SHARD-HASH", "block 3 differs", rule="as built", fix="copy it again", block=3)
    elif deed == "hang":  # after a step, in the next one
        reports = Reports()
        heartbeat = open_heartbeat(rank, reports.stacks, reports.collectives)
        for step in (6, 7):
            heartbeat.enter(Phase.STEP, step)
        time.sleep(25)
    elif rank == 1 and deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(25)
"""


class Planned(JobHere):
    """A job that wants each restart in `planned` as soon as its ranks have made a step, `worse` when they are asked to
    stop, and, if it is `late`, another one when it has finished."""

    def __init__(self, folder, job, settings, planned, worse, late, layouts):
        super().__init__(folder, job, settings, layouts=layouts)
        self._worse, self._late = worse, late
        self._events, self._planned, self._now = folder.events, list(planned), None

    def start(self, attempt, *args, **options):
        self._now, self._steps = None, _steps(self._events)
        super().start(attempt, *args, **options)

    def planned_restart(self, slow):
        if self._planned and self._now is None and _steps(self._events) >= self._steps + self.job.processes:
            self._now = self._planned.pop(0)
            return self._now
        if self._worse and self._folder.stop_request.exists():
            return self._worse
        return self._now or (GROWS if self._late and any(read_events(self._events, events.FINISHED)) else None)


def _steps(path: Path) -> int:
    return len(list(read_events(path, events.PROGRESS)))


@pytest.fixture
def act(tmp_path):
    """`act("kill,finish")`: two ranks; rank 1 is killed in the first attempt, both finish in the second."""
    (tmp_path / "fake_rank.py").write_text(RANK)
    folder = RunFolder(tmp_path / "run")
    printed: list[str] = []

    def run(
        deeds: str,
        began: float | None = None,
        lease=None,
        planned=(),
        worse=None,
        late=False,
        health=None,
        fallbacks=None,
        watched=False,
        **launch,
    ):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        job = Job(module="fake_rank", arguments=(str(folder.root), deeds), processes=2, env={"PYTHONPATH": path})
        settings = Launch(**launch)
        running = Planned(folder, job, settings, planned, worse, late, Layouts(folder, settings, fallbacks))
        if health:
            running = JobHere(folder, job, settings, health=health)
        options = {"lease": lease, "began": began, "say": printed.append}
        if not watched:
            return supervise(folder, running, settings, **options)
        with FolderWatch(folder.root, settings) as watch:
            return supervise(folder, running, settings, watch=watch, **options)

    run.folder, run.printed = folder, printed
    return run


def test_starts_again_after_a_kill(act):
    outcome = act("kill,finish")
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (0, 9, 1)
    (line,) = act.printed  # rank 0 reports what it refuses
    assert "rank 1 was killed (SIGKILL) near step 6; restarting from step 0 (1 of 3)" in line
    (fault,) = read_events(act.folder.events, events.FAULT)
    assert (fault["rank"], fault["step"]) == (1, 6)
    assert len(list(act.folder.logs.glob("attempt-*.log"))) == 2


def test_a_rank_without_memory_starts_again_with_less(act):
    """Each time with the same error at the same step, which is no bug of the program then, and more often than restarts
    are left: a change of the layout is none of them."""
    own = Fallback(nodes=1, ranks=2, memory_bytes=9)
    smaller = tuple(
        replace(own, overrides=(f"train.micro_batch={size}",), memory_bytes=size) for size in (8, 7, 6, 5, 4, 2)
    )
    facts = {"run_sha256": "", "cluster_sha256": "", "own": own, "available_bytes": 9, "bills": ({"weights": 5},)}
    found = Fallbacks(**facts, less_memory=smaller)
    deeds = ",".join(["memory"] * 6 + ["finish"])
    assert act(deeds, fallbacks=found, on_oom="adapt", max_restarts=0).restarts == 6
    causes = [e["cause"] for e in read_events(act.folder.events, events.FAULT)]
    assert causes[:2] == ["raised MemoryError: of []", 'raised MemoryError: of ["train.micro_batch=8"]']
    assert "goes on with train.micro_batch=7 near step 6" in act.printed[1] and "of 0)" not in act.printed[1]
    with refused("E-RUN-MEMORY", rank=1, bytes={"weights": 5}, overrides=["train.micro_batch=8"]):
        act("memory", fallbacks=found)


def test_a_measure_before_the_first_checkpoint_begins_again(act):
    """The guard takes each once, so this is no restart of the budget; what no measure is for is not tried again."""
    assert act("again,pass,finish", max_restarts=0).restarts == 2
    assert [e["adapted"] for e in read_events(act.folder.events, events.RESTART)] == [True, True]
    with refused("E-ROLLBACK-NO-CHECKPOINT"):
        act("roll back,finish")


def test_a_rank_knows_how_long_its_job_was_gone(act, monkeypatch):
    monkeypatch.setattr("ingot.trainer.resilience.restarts._FIRST_WAIT", 0.5)
    act("kill,kill,finish")
    starts = [Ordered.of_text(e["start"]) for e in read_events(act.folder.events, events.RANK_STARTED) if not e["rank"]]
    first, second, third = starts
    assert (first.detect, first.kill, first.gone_at) == (None, None, None)
    for found in (second, third):
        assert found.detect is not None and 0 < found.detect < 5  # since the kernel ended the rank
        assert found.kill is not None and 0 < found.kill < 20  # rank 0 slept
        assert found.gone_at is not None and found.ordered_at is not None
    assert third.ordered_at - third.gone_at >= 0.5 > second.ordered_at - second.gone_at


def test_a_hang_is_as_old_as_the_newest_heartbeat(act):
    act("hang,finish", watchdog_seconds=0.3)
    newest = [e["start"] for e in read_events(act.folder.events, events.RANK_STARTED)][-1]
    (fault,) = read_events(act.folder.events, events.FAULT)
    assert Ordered.of_text(newest).detect == fault["seconds"] >= 0.3


def test_a_hang_is_found_written_down_and_ended(act, monkeypatch):
    """Three times at the same step: it is no accident."""
    monkeypatch.setattr("ingot.trainer.resilience.restarts._FIRST_WAIT", 0.0)
    with refused("E-RUN-REPEATS", step=7, times=3):
        act("hang", watchdog_seconds=0.3)
    faults = list(read_events(act.folder.events, events.FAULT))
    assert [(e["detected_by"], e["step"], e["evidence"]) for e in faults] == [
        ("watchdog", 7, f"incidents/{number:04}") for number in (1, 2, 3)
    ]
    assert all(0.3 <= e["limit"] <= e["seconds"] < 25 for e in faults) and "(stacks in " in act.printed[0]
    assert all(e["limit_reason"].startswith("launch.watchdog_seconds = 0.3") for e in faults)
    assert "fake_rank.py" in (act.folder.incidents / "0001" / "rank-1.stacks").read_text()


def test_a_stop_during_the_wait_for_a_restart_starts_nothing(act, monkeypatch):
    monkeypatch.setattr("ingot.trainer.resilience.restarts._FIRST_WAIT", 20.0)

    def work():
        while len(list(read_events(act.folder.events, events.RESTART))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    thread.start()
    outcome = act("kill")
    thread.join()
    assert (outcome.exit_code, outcome.restarts) == (10, 2) and outcome.seconds < 15
    assert "in 20 s (2 of 3)" in act.printed[1]


def test_a_run_folder_that_vanishes_ends_the_job(act, monkeypatch):
    """The files stay open, as after the end of a mount, and the path shows another folder. Not only the look after the
    end of the attempt finds that."""
    require = FolderWatch.require
    monkeypatch.setattr(FolderWatch, "require", lambda watch, **options: bool(options) or require(watch))

    def work():
        while len(list(read_events(act.folder.events, events.PROGRESS))) < 2:
            time.sleep(0.02)
        act.folder.root.rename(act.folder.root.with_name("aside"))
        act.folder.root.mkdir()

    thread = threading.Thread(target=work)
    thread.start()
    with refused("E-RUN-FOLDER-LOST", run=str(act.folder.root), why="another folder is there"):
        act("wait", watched=True)
    thread.join()
    assert list(act.folder.root.iterdir()) == []


def test_a_folder_that_is_lost_with_its_ranks_is_the_cause(act, monkeypatch):
    """Ranks that cannot write end first. No restart helps, and none is tried."""
    monkeypatch.setattr(FolderWatch, "_touch", _read_only)
    with refused("E-RUN-FOLDER-LOST", why=os.strerror(errno.EROFS)):
        act("kill", watched=True)
    assert not list(read_events(act.folder.events, events.FAULT))


def _read_only(watch):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_an_error_of_the_file_system_is_one_of_the_run_folder(act, monkeypatch):
    def read(reader):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(reader.path))

    monkeypatch.setattr(EventLogReader, "read", read)
    with pytest.raises(OSError, match="events"):  # the folder itself answers
        act("wait", watched=True)
    monkeypatch.setattr(FolderWatch, "_touch", _read_only)
    with refused("E-RUN-FOLDER-LOST", run=str(act.folder.root)) as lost:
        act("wait", watched=True)
    assert str(act.folder.events) in lost.value.facts["why"]


def test_a_rank_that_does_not_leave_a_finished_job_costs_no_more_than_the_watchdog(act):
    outcome = act("leave", watchdog_seconds=0.3)
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (0, 9, 0) and outcome.seconds < 15
    assert not list(read_events(act.folder.events, events.FAULT))


GROWS, BROKEN = PlannedRestart("a node came back"), PlannedRestart("memory is broken", save=False)


def test_memory_that_turns_out_broken_while_ranks_save_ends_that(act):
    outcome = act("hang,finish", planned=(GROWS,), worse=BROKEN)
    assert (outcome.exit_code, outcome.restarts) == (0, 0) and outcome.seconds < 15
    assert [e["reason"] for e in read_events(act.folder.events, events.PLANNED_RESTART)] == [BROKEN.reason]


def test_broken_memory_is_not_saved_either_when_the_run_is_asked_to_stop(act):
    thread = send(act, signal.SIGTERM)
    outcome = act("hang,finish", worse=BROKEN)
    thread.join()
    assert (outcome.exit_code, outcome.restarts) == (10, 0) and outcome.seconds < 15
    assert [e["reason"] for e in read_events(act.folder.events, events.STOPPED)] == ["SIGTERM"]


def test_a_run_that_has_finished_is_not_started_again(act):
    """A request would end the wait for its uploads."""
    outcome = act("upload,hang", late=True)
    assert (outcome.exit_code, outcome.step) == (0, 9)
    assert not act.printed and not list(read_events(act.folder.events, events.PLANNED_RESTART))


def test_the_fault_of_the_only_machine_ends_the_run_after_a_save(act, tmp_path):
    reports, settings = tmp_path / "reports", Launch()
    health = HealthWatch(settings, act.printed.append, [ReportFile(reports)])
    reports.write_text('{"kind": "link_lost", "device": "eth0"}\n{"kind": "xid", "code": 74, "device": "GPU 0"}\n')
    with closing(health), pytest.raises(NodeUnhealthy) as error:
        act("stop", health=health)
    assert (error.value.code, error.value.facts["reason"]) == ("E-NODE-UNHEALTHY", "GPU 0: XID 74")
    assert [e["reason"] for e in read_events(act.folder.events, events.STOPPED)] == ["drain"]
    assert any("GPU 0: XID 74" in line and "saving" in line for line in act.printed)


def test_a_planned_restart_is_no_failure(act):
    """Ranks save, end and start again, as often as that is planned; where the memory is broken, they do not save."""
    outcome = act("stop,stop,hang,finish", planned=(GROWS, GROWS, BROKEN), max_restarts=0)
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (0, 9, 0)
    assert [e["reason"] for e in read_events(act.folder.events, events.STOPPED)] == ["restart", "restart"]
    reasons = [e["reason"] for e in read_events(act.folder.events, events.PLANNED_RESTART)]
    assert reasons == [GROWS.reason, GROWS.reason, BROKEN.reason]
    assert [line[9:] for line in act.printed] == 2 * [
        "a node came back; saving after this step, then starting again"
    ] + ["memory is broken; starting again from what was saved before"]


def test_a_failure_during_a_planned_restart_is_a_failure(act):
    """The request of the attempt before does not stop the next one."""
    outcome = act("fail,glance", planned=(GROWS,))
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (0, 8, 1)


def test_a_request_to_stop_counts_more_than_a_planned_restart(act):

    def work():
        while not act.folder.stop_request.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    thread.start()
    outcome = act("save for restart,finish", planned=(GROWS,))
    thread.join()
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (10, 8, 0)
    assert [e["reason"] for e in read_events(act.folder.events, events.STOPPED)] == ["restart", "SIGTERM"]


class LostLease:
    """A lease that another launcher has taken while the ranks run."""

    epoch = 3

    def __init__(self, saving: Path):
        self._saving = saving

    @property
    def lost(self):
        return RunBusyError("E-LEASE-LOST", "taken", rule="one launcher", fix="stop") if self._saving.exists() else None

    def require(self) -> None:
        if self.lost:
            raise self.lost


def test_a_launcher_that_lost_its_run_takes_its_unfinished_saves_away_and_no_others(act):
    own, other = (act.folder.checkpoints / f".saving-step-00000008.{epoch}" for epoch in (3, 4))
    thread = threading.Thread(target=lambda: (time.sleep(0.5), other.mkdir(parents=True), own.mkdir()))
    thread.start()
    with refused("E-LEASE-LOST"):
        act("stop", lease=LostLease(own))
    thread.join()
    assert other.exists() and not own.exists()


def test_signals_to_a_launcher_that_lost_its_run_are_left_for_what_it_does_next(tmp_path):
    """The launcher may lead, or follow, again."""

    class Lost(JobHere):
        def start(self, *_, **__):
            os.kill(os.getpid(), signal.SIGUSR1)
            raise RunBusyError("E-RUN-BUSY", "taken", rule="one launcher", fix="wait")

    folder, received = RunFolder(tmp_path / "run"), [signal.SIGTERM]
    job = Lost(folder, Job(module="json.tool", arguments=(), processes=1), Launch())
    with refused("E-RUN-BUSY"):
        supervise(folder, job, Launch(), received=received, say=print)
    assert received == [signal.SIGTERM, signal.SIGUSR1]


def test_a_start_has_its_own_time(tmp_path):
    """Heartbeats of the last attempt say nothing about this one."""
    job = Job(module="json.tool", arguments=("--help",), processes=1)
    running = LocalJob(job, stdout=subprocess.DEVNULL)
    try:
        running.start(attempt=0, log=tmp_path / "first.log")
        running.end_attempt()
        before = time.monotonic()
        running.start(attempt=1, log=tmp_path / "second.log")
        assert running.heartbeats.read(0).since >= before
    finally:
        running.close()


def test_checkpoints_that_vanish_between_attempts_end_the_run(act):
    """The supervisor remembers what it saw saved, although the log of it is gone as well."""
    with refused("E-CKPT-VANISHED", step=6, shown={"supervisor": 6}):
        act("forget,finish")
    assert not list(read_events(act.folder.events, events.RESTART))


def test_the_same_error_three_times_is_not_tried_again(act, monkeypatch):
    monkeypatch.setattr("ingot.trainer.resilience.restarts._FIRST_WAIT", 0.0)
    log, cause = str(act.folder.logs / "attempt-3.log"), "raised ValueError: index 2 is out of range"
    with refused("E-RUN-REPEATS", rank=1, step=6, times=3, cause=cause, log=log) as failed:
        act("bug")
    assert failed.value.exit_code == 93
    assert len(list(read_events(act.folder.events, events.RESTART))) == 2
    assert "index 2 is out of range" in (act.folder.logs / "attempt-3.log").read_text()


def test_what_the_user_has_to_mend_is_not_tried_again(act):
    with refused("E-SHARD-HASH", block=3) as caught:
        act("data")
    assert isinstance(caught.value, DataError) and caught.value.fix == "copy it again"
    assert not list(read_events(act.folder.events, events.RESTART))


def test_the_budget_of_restarts_ends(act):
    with refused("E-RUN-RESTARTS", max_restarts=0):
        act("kill", max_restarts=0)


def send(act, *numbers, during=None):
    """Start a thread that signals this process when the ranks run, and again when the path `during` exists."""

    def work():
        while not any(read_events(act.folder.events, events.PROGRESS)):
            time.sleep(0.02)
        for position, number in enumerate(numbers):
            while position and during and not during.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), number)
            time.sleep(0.4)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_becomes_a_stop_request(act, number):
    before = signal.getsignal(number)
    thread = send(act, number)
    outcome = act("stop")
    thread.join()
    assert (outcome.exit_code, outcome.step, outcome.finished) == (10, 8, False)
    assert "saving first" in act.printed[0] and number.name in act.printed[0]
    assert not act.folder.stop_request.exists()
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_the_time_limit_counts_over_all_attempts(act):
    """A rank is killed in the first attempt. The second one is asked to stop long before an hour has passed in it."""
    outcome = act("kill,stop", began=time.monotonic() - 3596, stop_after="1h")
    assert (outcome.exit_code, outcome.restarts) == (10, 1)
    assert any("launch.stop_after" in line for line in act.printed)


def test_ranks_that_do_not_stop_are_killed_at_the_end_of_the_grace(act):
    thread = send(act, signal.SIGTERM, signal.SIGTERM)
    outcome = act("sleep", grace="1s")
    thread.join()
    assert any("launch.grace is over" in line for line in act.printed)
    assert (outcome.exit_code, outcome.step, outcome.saved_step) == (10, 6, 0)
    ((stopped),) = read_events(act.folder.events, events.STOPPED)
    assert (stopped["step"], stopped["saved_step"], stopped["reason"]) == (6, 0, "SIGTERM")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_kill_ranks_that_write_a_checkpoint(act, second):
    thread = send(act, signal.SIGTERM, second, during=act.folder.checkpoints / ".saving-step-00000008")
    with uninterrupted():
        outcome = act("save")
    thread.join()
    assert (outcome.exit_code, outcome.step, outcome.saved_step) == (10, 8, 8)
    assert act.folder.checkpoint(8).exists()


@pytest.mark.parametrize(("deed", "count"), [("sleep", 2), ("save", 3)])
def test_ctrl_c_ends_a_run_that_saves_nothing_and_its_third_one_every_run(act, deed, count):
    during = act.folder.checkpoints / ".saving-step-00000008" if deed == "save" else None
    thread = send(act, *[signal.SIGINT] * count, during=during)
    with pytest.raises(KeyboardInterrupt, match="step 0 is the newest checkpoint"):
        act(deed)
    thread.join()
    assert not act.folder.checkpoint(8).exists() and not act.folder.stop_request.exists()
    ((stopped),) = read_events(act.folder.events, events.STOPPED)
    assert (stopped["saved_step"], stopped["reason"]) == (0, "SIGINT")


@pytest.fixture
def job(tmp_path):
    """`job(code, ranks)`: a LocalJob whose ranks run `code`; all its processes end with the test."""
    jobs = []

    def make(code: str, ranks: int = 1, preload: tuple[str, ...] = ()) -> LocalJob:
        (tmp_path / "rank_of_test.py").write_text(code)
        env = {"PYTHONPATH": str(tmp_path)}
        jobs.append(LocalJob(Job(module="rank_of_test", arguments=(), processes=ranks, env=env, preload=preload)))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()
        assert not each.processes()


def attempt(job: LocalJob, log: Path, number: int = 0) -> dict[int, int]:
    """Run one attempt to its end; the exit codes."""
    job.start(attempt=number, log=log)
    while job.running():
        time.sleep(0.01)
    job.end_attempt()
    return job.exit_codes


def test_exit_codes_are_reported_as_python_would_exit(job, tmp_path):
    code = """
import os, signal, sys
rank = int(os.environ["RANK"])
if rank == 1:
    sys.exit(7)
if rank == 2:
    raise ValueError("a bug")
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert attempt(job(code, 4), tmp_path / "log") == {0: 0, 1: 7, 2: 1, 3: -9}
    assert (tmp_path / "log").read_text().endswith("ValueError: a bug\n")


def test_a_fork_server_that_is_stopped_before_its_ranks_begin_is_killed(job, tmp_path):
    """No rank is there whose heartbeat would show it."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(3)")
    running = job("", preload=("slow_module",))
    running.start(attempt=0, log=tmp_path / "log")
    (server,) = running.processes()
    os.kill(server, signal.SIGSTOP)
    ends = time.monotonic() + 10
    while running.running() and time.monotonic() < ends:
        running.wait(0.05)
    assert running.server_code == -signal.SIGKILL and not running.exit_codes


def test_a_rank_that_is_stopped_before_its_module_runs_ends_with_its_server(job, tmp_path):
    """Also if the server is killed, as by the kernel when the launcher is: nobody is left who could end the rank."""
    code = f"import os, signal\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nos.kill(os.getpid(), 19)"
    running = job(code)
    running.start(attempt=0, log=tmp_path / "log")
    ends = time.monotonic() + 10
    while len(running.processes()) < 2 or not (tmp_path / "pid").exists():
        assert time.monotonic() < ends
        time.sleep(0.01)
    rank = int((tmp_path / "pid").read_text())
    (server,) = (pid for pid in running.processes() if pid != rank)
    os.kill(server, signal.SIGKILL)
    while Path(f"/proc/{rank}").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    assert not Path(f"/proc/{rank}").exists()


def test_a_stopped_fork_server_is_replaced(job, tmp_path):
    running = job("")
    running.start(attempt=0, log=tmp_path / "first.log")
    running.end_attempt()
    (server,) = running.processes()
    os.kill(server, signal.SIGSTOP)
    running.start(attempt=1, log=tmp_path / "second.log")
    while running.running():
        running.wait(0.05)
    assert running.exit_codes == {0: 0} and server not in running.processes()


def test_attempts_share_a_fork_server_which_imports_once(job, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        "import os, time\ntime.sleep(0.3)\nwith open('imports', 'a') as f: f.write('x')\n"
    )
    code = """
import json, os, slow_to_import
imported = json.loads(os.environ["INGOT_START"])["imported"]
print(f"imported {imported}\\n{os.environ['INGOT_ATTEMPT']} {os.getppid()}", file=open(2, "w"))
"""
    running = job(code, 2, preload=("slow_to_import", "a_module_that_is_missing"))
    monkeypatch.chdir(tmp_path)
    seen, imported = [], []
    for number in (0, 1):
        log = tmp_path / f"log-{number}"
        assert attempt(running, log, number) == {0: 0, 1: 0}
        text = log.read_text()
        assert "No module named 'a_module_that_is_missing'" in text  # the cause, should a rank need it
        seen += [line for line in text.splitlines() if line[:1].isdigit()]
        imported += [float(line.split()[1]) for line in text.splitlines() if line.startswith("imported")]
    server = seen[0].split()[1]
    assert seen == [f"0 {server}"] * 2 + [f"1 {server}"] * 2
    assert (tmp_path / "imports").read_text() == "x"
    assert min(imported[:2]) >= 0.3 > max(imported[2:])  # the time of that is known to the ranks
    os.kill(int(server), signal.SIGKILL)  # the next attempt has a new one
    while running.processes():
        running.running()
    assert running.last_words() == f"1 {server}"
    assert attempt(running, tmp_path / "log-2", 2) == {0: 0, 1: 0}
    assert server not in (tmp_path / "log-2").read_text()


def test_a_fork_server_that_is_killed_without_a_word_has_a_cause(job, tmp_path):
    running = job("import time; time.sleep(60)")
    running.start(attempt=0, log=tmp_path / "log")
    assert running.running() and running.last_words() == ""
    running.kill()
    assert not running.running()
    assert running.last_words() == "the fork server was killed (signal 9)"


def test_ranks_that_ignore_signals_and_their_children_end_with_the_attempt(job, tmp_path):
    code = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready", file=open(2, "w"))
time.sleep(60)
"""
    running = job(code, 2)
    running.start(attempt=0, log=tmp_path / "log")
    while (tmp_path / "log").read_text().count("ready") < 2:
        time.sleep(0.01)
    assert len(running.processes()) == 5
    running.end_attempt()
    assert len(running.processes()) == 1 and running.exit_codes == {0: -9, 1: -9}


def test_a_job_listens_on_the_loopback_address_only(job, tmp_path):
    code = """
import time, torch, torch.distributed as dist
from ingot.trainer.mesh.start import start
place = start("cpu", 20)
t = torch.ones(1); dist.all_reduce(t)
print("joined", place.rank, place.attempt, t.item(), file=open(2, "w"))
time.sleep(60)
"""
    running = job(code, 2, preload=("torch",))
    running.job.env["GLOO_SOCKET_IFNAME"] = "lo"  # as training_job sets it
    running.start(attempt=3, log=tmp_path / "log")
    while (tmp_path / "log").read_text().count("joined") < 2:
        assert running.running(), (tmp_path / "log").read_text()
        time.sleep(0.05)
    assert sorted((tmp_path / "log").read_text().split("\n")[:2]) == ["joined 0 3 2.0", "joined 1 3 2.0"]
    addresses = listening(running.processes())
    assert addresses and set(addresses) <= {"0100007F", "00000000000000000000000001000000"}


def listening(pids: list[int]) -> list[str]:
    """The local addresses, in hexadecimal, of the TCP sockets on which these processes listen."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(str(entry.readlink()))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().split("\n")[1:]]
    return [row[1].split(":")[0] for row in rows if row and row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
