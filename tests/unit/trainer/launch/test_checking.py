"""Checks of a job's machines before ranks start: launchers of this machine, with machines by given numbers."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.expect import refused
from tests.fake_machines import GOOD, fake_machines
from tests.unit.trainer.launch import test_nodes

from ingot.events import EventLog, read_events
from ingot.machine.health.links import NetworkLinks
from ingot.machine.health.report import node_name
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.fleet import rounds
from ingot.trainer.launch import checking, health
from ingot.trainer.launch.handover import STARTED, earlier_job
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.leading import record_lost_leader

Cluster, cluster = test_nodes.Cluster, test_nodes.cluster
_LONG = 30.0
CHECKED = {"check_every": 1}
WRONG = {"wrong": {"memory": 3}}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """`plant(b={...})`: the machines that are not sound, by the letter of the launcher. Nothing is measured before
    `go()`."""
    command = fake_machines(tmp_path / "machines", {})
    monkeypatch.setattr(checking, "probe_command", lambda folder, seconds: command)

    def make(**changes):
        waits = {f"node-{letter}": {"waits": "go"} | changes.get(letter, {}) for letter in "abcd"}
        (tmp_path / "machines" / "machines.json").write_text(json.dumps(waits))

    make()
    return make


@pytest.fixture
def go(tmp_path):
    return (tmp_path / "machines" / "go").touch


def _wait(ready) -> None:
    ends = time.monotonic() + _LONG
    while not ready():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _asked(cluster: Cluster, letter: str) -> bool:
    return (cluster.root / "machines" / f"node-{letter}.asked").exists()


def _checks(folder: RunFolder) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Return the machines of each check, and which were unfit for what."""
    return [
        ([one["node"] for one in event["fleet"]], [(one["node"], one["check"]) for one in event["unfit"]])
        for event in read_events(folder.events, events.FLEET_CHECK)
    ]


def _codes(cluster: Cluster) -> dict[str, object]:
    return {name: code for name, (_, code) in cluster.ends().items()}


def test_an_unfit_machine_is_drained_before_the_first_start(cluster, plant, go):
    """A machine that joins in the middle of the check takes the place."""
    plant(b=WRONG)
    for name in "ab":
        cluster.start(name, **CHECKED)
    _wait(lambda: _asked(cluster, "b"))
    cluster.start("c", **CHECKED)
    assert not list(read_events(cluster.folder.events, events.RANK_STARTED))
    go()
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": "E-NODE-UNHEALTHY", "c": 0}
    assert _checks(cluster.folder) == [(["node-a", "node-b"], [("node-b", "memory")])]
    assert list(json.loads(cluster.folder.drained.read_text())) == ["node-b"]
    (found,) = read_events(cluster.folder.events, events.HEALTH)
    assert (found["node"], found["report"], found["device"], found["verdict"]) == ("node-b", "unfit", "memory", "drain")


def test_spares_are_checked_after_a_restart(cluster, plant, go):
    """Every second one here. No rank keeps its process, with the memory of a device."""
    go()
    for name in "abc":
        cluster.start(name, check_every=2, restart="partial")
    for attempt in (0, 1):
        cluster.attempt(attempt)
        plant(c={"rates": GOOD | {"matmul": 40.0}})
        cluster.fail(1, "die")
        cluster.fail(0, "lose")
    cluster.attempt(2)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": 0, "c": "E-NODE-UNHEALTHY"}
    assert _checks(cluster.folder)[1:] == [(["node-a", "node-b", "node-c"], [("node-c", "matmul")])]
    kept = [event["kept"] for event in read_events(cluster.folder.events, events.RESTART)]
    assert kept[:2] == [1, 0]  # on a busy machine, rank 0 may hear of its loss in the next attempt only


def test_the_run_ends_if_too_few_machines_are_sound(cluster, plant, go):
    go()
    plant(b=WRONG)
    for name in "ab":
        cluster.start(name, **CHECKED)
    assert _codes(cluster) == {"a": "E-NODES-UNFIT", "b": "E-NODES-UNFIT"}
    assert list(json.loads(cluster.folder.drained.read_text())) == ["node-b"]
    assert not list(read_events(cluster.folder.events, events.RANK_STARTED))


def test_nothing_is_drained_if_no_machine_is_sound(cluster, plant, go):
    go()
    plant(a=WRONG, b=WRONG)
    for name in "ab":
        cluster.start(name, **CHECKED)
    assert _codes(cluster) == {"a": "E-NODES-UNFIT", "b": "E-NODES-UNFIT"} and not cluster.folder.drained.exists()


def test_the_run_goes_on_with_the_layout_for_sound_machines(cluster, plant, go):
    go()
    plant(b=WRONG)
    for name in "ab":
        cluster.start(name, **CHECKED, min_ranks=1, shrink_seconds=0.1)
    cluster.attempt(0, 1)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": "E-NODE-UNHEALTHY"}


def test_an_unfit_machine_of_the_leader_is_drained_and_the_next_one_checks_nothing(cluster, plant, go):
    plant(a=WRONG)
    for name in "abc":
        cluster.start(name, **CHECKED)
    go()
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": "E-NODE-UNHEALTHY", "b": 0, "c": 0} and len(_checks(cluster.folder)) == 1


def test_unfit_machines_are_reported_only_where_the_user_wants_that(cluster, plant, go):
    """Wrong clocks always: no number depends on them."""
    go()
    plant(b=WRONG | {"ahead": 60.0})
    for name in "ab":
        cluster.start(name, **CHECKED, on_bad_health="warn" if name == "a" else "drain")
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": 0}
    found = [(e["node"], e["device"], e["verdict"]) for e in read_events(cluster.folder.events, events.HEALTH)]
    clocks = [("node-a", "clock", "warn"), ("node-b", "clock", "warn")]
    assert sorted(found) == sorted([*clocks, ("node-b", "memory", "warn")])


def test_a_wrong_clock_drains_no_machine(cluster, plant, go):
    go()
    plant(b={"ahead": 60.0})
    for name in "ab":
        cluster.start(name, **CHECKED)
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": 0} and len(list(read_events(cluster.folder.events, events.HEALTH))) == 2


@pytest.mark.slow
def test_a_check_begins_again_when_a_machine_is_lost_in_it(cluster, plant, go):
    """However long it took: the wait for another one begins with the loss."""
    for name in "ab":
        cluster.start(name, **CHECKED, node_wait_seconds=3.0)
    _wait(lambda: _asked(cluster, "b"))
    time.sleep(3.0)
    assert cluster.launchers["a"].is_alive()
    cluster.kill("b")
    _wait(lambda: cluster.nodes("lost"))
    cluster.start("d", **CHECKED)
    _wait(lambda: _asked(cluster, "d") or not cluster.launchers["a"].is_alive())
    go()
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": "killed", "d": 0} and not cluster.faults()
    assert _checks(cluster.folder) == [(["node-a", "node-d"], [])]


def test_a_run_that_begins_with_fewer_machines_checks_those(cluster, plant, go):
    """The leader has waited for the others, and does not wait again after the check."""
    go()
    cluster.start("a", **CHECKED, min_ranks=1, node_wait_seconds=0.3, shrink_seconds=_LONG)
    cluster.attempt(0, 1)
    cluster.finish()
    assert _codes(cluster) == {"a": 0} and _checks(cluster.folder) == [(["node-a"], [])]


def test_machines_that_are_lost_in_every_check_are_left_to_the_budget_of_restarts(cluster, plant, go):
    cluster.start("a", **CHECKED)
    for name in "bcd":
        cluster.start(name, **CHECKED)
        _wait(lambda letter=name: _asked(cluster, letter))
        cluster.kill(name)
        _wait(lambda: len(cluster.nodes("lost")) == len(cluster.launchers) - 1)
    cluster.start("e", **CHECKED)
    cluster.attempt(0)
    cluster.finish()
    assert cluster.ends()["e"][1] == 0 and not _checks(cluster.folder)


def test_machines_that_import_are_not_measured_yet(cluster, plant, go):
    go()
    waits = "while not Path(__file__).with_name('go').exists():\n    time.sleep(0.01)\n"
    (cluster.root / "slow_import.py").write_text(f"import time\nfrom pathlib import Path\n{waits}")
    for name in "ab":
        cluster.start(name, **CHECKED)
    time.sleep(0.5)
    assert not _asked(cluster, "a") and not _asked(cluster, "b")
    (cluster.root / "go").touch()
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {"a": 0, "b": 0} and len(_checks(cluster.folder)) == 1


@pytest.mark.slow
def test_a_link_to_the_other_machines_is_one_that_the_run_uses(cluster, monkeypatch):
    """A fault of it drains the machine: of the leader, and of another one."""
    monkeypatch.setattr(health, "read_links", lambda: NetworkLinks(interfaces={"lo": ""}, adapters={}, uppers={}))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "other7")
    for name in "abc":
        cluster.start(name)
    cluster.attempt(0)
    cluster.report("b", kind="link_lost", device="lo")
    cluster.attempt(1)
    cluster.report("a", kind="link_lost", device="lo")
    _wait(lambda: len(cluster.nodes("leads")) == 2)
    cluster.finish()
    assert set(json.loads(cluster.folder.drained.read_text())) == {"node-a", "node-b"}
    cluster.start("d")  # in the place of the second one
    assert {name: code for name, code in _codes(cluster).items() if name in "cd"} == {"c": 0, "d": 0}


def test_a_request_to_stop_ends_a_check_and_its_processes(cluster, plant):
    for name in "ab":
        cluster.start(name, **CHECKED)
    _wait(lambda: _asked(cluster, "a") and _asked(cluster, "b"))
    cluster.kill("b", signal.SIGTERM)
    assert _codes(cluster) == {"a": 10, "b": 10} and not _checks(cluster.folder)
    _wait(lambda: not _measuring(cluster.root))


def _measuring(root: Path) -> list[str]:
    """Return the processes that measure a machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{root}/machines/probe.py".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_machine_whose_measurement_hangs_is_unfit(cluster, plant, monkeypatch):
    monkeypatch.setattr(rounds, "ANSWER_SECONDS", -78.5)  # 80 s are for the devices
    plant(a={"waits": "machines.json"}, c={"waits": "machines.json"})
    for name in "ab":
        cluster.start(name, **CHECKED)
    assert _codes(cluster) == {"a": "E-NODES-UNFIT", "b": "E-NODES-UNFIT"}
    assert _checks(cluster.folder) == [(["node-a"], [("node-b", "measurement")])]


@pytest.mark.parametrize(("letter", "sound"), ["ab", "ba"])
def test_a_machine_whose_measurement_does_not_start_is_unfit(cluster, plant, go, monkeypatch, letter, sound):
    command, missing = checking.probe_command(Path(), 0.0), [str(cluster.root / "no-python")]
    monkeypatch.setattr(checking, "probe_command", lambda *_: missing if node_name() == f"node-{letter}" else command)
    for name in "ab":
        cluster.start(name, **CHECKED)
    _wait(lambda: _asked(cluster, sound))
    cluster.start("c", **CHECKED)
    go()
    cluster.attempt(0)
    cluster.finish()
    assert _codes(cluster) == {letter: "E-NODE-UNHEALTHY", sound: 0, "c": 0}
    ((_, unfit),) = _checks(cluster.folder)
    assert unfit == [(f"node-{letter}", "measurement")]
    (found,) = read_events(cluster.folder.events, events.HEALTH)
    assert "did not start" in found["words"] and missing[0] in found["words"]


def test_a_check_needs_no_log_of_its_measurements(alone, tmp_path):
    """The disk of a machine may be full: the measurement finds that."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "check-node-a.log").mkdir()
    assert alone(rates={})["check"] > 0


@pytest.fixture
def alone(tmp_path, plant, go, monkeypatch):
    """`alone(...)`: a job on one machine with these changes, and what its rank got from the launcher in the second
    attempt, before which the machine is checked."""
    monkeypatch.setenv("SLURMD_NODENAME", "node-a")
    place = tmp_path / "start.json"
    (tmp_path / "fake_rank.py").write_text(
        f"import os, pathlib; pathlib.Path({str(place)!r}).write_text(os.environ['INGOT_START'])"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = Job(module="fake_rank", arguments=(), processes=1, env={"PYTHONPATH": path})
    go()

    def make(**changes) -> dict:
        plant(a=changes)
        running = JobHere(RunFolder(tmp_path / "run"), job, Launch())
        try:
            running.start(0)
            while running.running():
                running.wait(0.05)
            running.end_attempt()
            assert running.lost_ranks() == [0]
            running.start(1, check=True)
            assert not running.started
            while running.running():
                assert running.started or not (running.lost_ranks() or running.hang())
                running.wait(0.05)
            return json.loads(place.read_text())
        finally:
            running.close()

    return make


def test_one_machine_is_checked_for_wrong_results_alone(alone, tmp_path):
    with refused(
        "E-NODES-UNFIT", unfit=[{"node": "node-a", "check": "matmul", "words": "1 wrong results", "slow": False}]
    ):
        alone(wrong={"matmul": 1})
    assert not RunFolder(tmp_path / "run").drained.exists()


def test_the_time_of_a_check_is_a_phase_of_the_start(alone):
    start = alone(rates={})
    assert start["check"] > 0 and start["ordered_at"] is not None


def _log(folder: RunFolder, *lines: tuple[str, dict]) -> None:
    log = EventLog(folder.events)
    for kind, facts in lines:
        log.write(kind, **facts)
    log.close()


def _node(action: str, host: str = "", pid: int = 7, started: float = 0.0) -> tuple[str, dict]:
    own = {"host": node_name(), "pid": os.getpid(), "started": STARTED}
    other = {"host": host, "pid": pid, "started": started or float(ord(host[:1] or "a"))}
    return events.NODE, {"action": action} | (other if host else own)


RESTART = events.RESTART, {"step": 4, "signature": "x"}
BEGAN = events.RUN_STARTED, {"from_step": 0}


@pytest.mark.parametrize(
    ("lines", "restarts", "is_checked"),
    [
        ([_node("leads", "a"), _node("joined"), RESTART], 1, False),
        ([_node("leads", "a"), _node("joined"), BEGAN, RESTART], 1, True),
        ([_node("leads", "a"), RESTART, _node("joined", "b"), _node("leads", "b"), _node("joined"), RESTART], 2, False),
        # Another command later: a budget of its own.
        ([_node("leads", "a"), RESTART, BEGAN, _node("leads", "b"), _node("joined")], 0, False),
        ([_node("leads", "a"), _node("joined"), RESTART, _node("leads", "b"), RESTART], None, None),
        # A process id that is used again: a new launcher begins a job of its own, and this one was not the other one.
        ([_node("leads", "a"), RESTART, _node("leads", "a", started=9.0), _node("joined")], 0, False),
        ([_node("leads", "a"), _node("joined", node_name(), os.getpid()), RESTART], None, None),
        # A host that has another name now.
        ([_node("leads", "a"), _node("joined", "before", os.getpid(), STARTED), RESTART], 1, False),
        ([_node("joined", "b"), RESTART, _node("leads", "c", started=98.0), _node("joined")], 1, False),
        ([RESTART], None, None),
        # The same command after an end; and in a container that was started again, with the same name and process id.
        ([_node("joined"), RESTART, (events.FINISHED, {}), _node("leads", "b"), _node("joined")], 0, False),
        ([_node("joined"), RESTART, (events.STOPPED, {"reason": "SIGTERM"})], None, None),
        ([_node("joined"), RESTART, (events.STOPPED, {"reason": "restart"})], 1, False),
        ([(events.NODE, {k: v for k, v in _node("joined")[1].items() if k != "started"}), RESTART], None, None),
        # A change of the layout for lack of memory.
        ([_node("joined"), (events.RESTART, RESTART[1] | {"adapted": True})], 1, False),
    ],
)
def test_the_next_leader_knows_the_job_of_the_one_before(tmp_path, lines, restarts, is_checked):
    folder = RunFolder(tmp_path)
    _log(folder, *lines)
    found = earlier_job(folder)
    if restarts is None:
        assert found is None
    else:
        assert found is not None and (len(found.restarts), found.is_checked) == (restarts, is_checked)
        assert all((one.step, one.signature) == (4, "x") and 0 <= age < 60 for age, one in found.restarts)


def test_the_next_leader_has_the_restarts_that_are_left(cluster):
    for name in "abc":
        cluster.start(name, max_restarts=1)
    cluster.attempt(0)
    cluster.fail(1, "die")
    cluster.attempt(1)
    cluster.kill("a")
    _wait(lambda: len(list(read_events(cluster.folder.events, events.RANK_STARTED))) == 6)
    cluster.fail(1, "die")
    assert _codes(cluster) == {"a": "killed", "b": "E-RUN-RESTARTS", "c": "E-RUN-RESTARTS"}


@pytest.mark.parametrize(("action", "lost"), [("drained", []), ("lost", [("a", 7, 97.0)])])
def test_the_next_leader_records_a_lost_one_unless_it_is_there_under_another_name(tmp_path, action, lost):
    folder = RunFolder(tmp_path)
    _log(folder, _node("leads", "a"), BEGAN, _node(action, "renamed", started=97.0))
    with EventLog(folder.events) as log:
        record_lost_leader(folder, log.write, lambda line: None)
    written = list(read_events(folder.events, events.NODE))[2:]
    assert [(event["host"], event["pid"], event["started"]) for event in written] == lost
