"""Jobs on several nodes: each node is a forked launcher of this machine, whose rank acts without torch."""

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from ingot.errors import IngotError, RunBusyError
from ingot.events import read_events
from ingot.machine.health.report_file import ReportFile
from ingot.report.faults import FaultReader, FaultRecord
from ingot.schema import events
from ingot.schema.fallbacks import Fallback, Fallbacks
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch import local, node
from ingot.trainer.launch.health import HealthWatch
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.leading import leading
from ingot.trainer.launch.link import LeaderAddress, dial
from ingot.trainer.launch.node import follow, lead_or_follow
from ingot.trainer.launch.nodes import Nodes
from ingot.trainer.launch.outcome import JobResult
from ingot.trainer.launch.supervise import supervise
from ingot.trainer.launch.watchdog import state_of
from ingot.trainer.resilience.lock import RunLock, is_locked
from ingot.trainer.resilience.start_times import FIRST

_LONG = 30.0  # seconds that nothing takes here
FACTS = {"torch": "2", "settings": "a" * 64}
FALLBACKS = Fallbacks(
    run_sha256="",
    cluster_sha256="",
    own=Fallback(nodes=2, ranks=2),
    available_bytes=0,
    bills=({},),
    fewer_nodes=(
        Fallback(nodes=2, ranks=2, overrides=("parallel.dp_shard=2", "launch.nodes=2")),
        Fallback(nodes=1, ranks=1, overrides=("parallel.dp_shard=1", "launch.nodes=1")),
    ),
)
# A rank of each node. It writes down its place, makes a step, and waits: for a request to stop, for the file "finish",
# or for "RANK.fail" with the way to fail.
RANK = """
import json, os, sys, time
from pathlib import Path
from ingot.errors import DataError
from ingot.events import EventLog
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.again import forget, open_line
from ingot.trainer.resilience.endings import guarded
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat
from ingot.trainer.resilience.leaving import PeerLost
from ingot.trainer.resilience.reports import Reports
folder = RunFolder(Path(sys.argv[1]))

def work(rank):
    log = EventLog(folder.events)
    heartbeat = open_heartbeat(int(os.environ["LOCAL_RANK"]), reports.stacks, reports.collectives)
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "INGOT_ATTEMPT")
    place = {name: os.environ[name] for name in (*names, "GLOO_SOCKET_IFNAME")}
    place |= {"args": sys.argv[2:], "server": os.getppid(), "overrides": os.environ["INGOT_OVERRIDES"]}
    attempt = int(os.environ["INGOT_ATTEMPT"])
    log.write("rank_started", rank=rank, pid=os.getpid(), host="", attempt=attempt, place=place)
    if rank == 0:
        log.write("run_started", from_step=0, attempt=attempt, world_size=int(os.environ["WORLD_SIZE"]))
        log.write("progress", step=1 + attempt)
    heartbeat.enter(Phase.STEP, 1)
    fail = folder.root / f"{rank}.fail"
    while not (folder.stop_request.exists() or (folder.root / "finish").exists()):
        how = fail.read_text() if fail.exists() else ""
        if how == "data":
            raise DataError("E-SHARD-HASH", "block 3 differs", rule="as built", fix="copy it again", block=3)
        if how == "die":
            fail.unlink()
            os.kill(os.getpid(), 9)
        if how == "lose":
            fail.unlink()
            raise PeerLost("connection closed by peer")
        if how != "hang":
            heartbeat.enter(Phase.STEP, 2)
        time.sleep(0.02)
    reason = json.loads(folder.stop_request.read_text())["reason"] if folder.stop_request.exists() else ""
    time.sleep(0.4 if reason else 0)  # a save
    if rank == 0:
        log.write("finished" if (folder.root / "finish").exists() else "stopped", step=2, reason=reason)
    return reason in ("restart", "drain")

line, reports = open_line(), None
while True:
    try:
        with guarded(folder, int(os.environ["RANK"])):
            reports = reports or Reports()
            again = work(int(os.environ["RANK"]))
        if line is None or not again:
            break
    except PeerLost as error:
        if line is None:
            raise
        forget(error)
    line.start_again()
"""


class Cluster:
    """Launchers in processes of their own, all with one run folder."""

    def __init__(self, root: Path):
        self.folder, self.root = RunFolder(root / "run"), root
        self.folder.logs.mkdir(parents=True)
        self.launchers: dict[str, multiprocessing.Process] = {}
        self.out = {}

    def start(self, name: str, facts=FACTS, **launch) -> None:
        """Start the launcher `name`, and wait until it leads, has joined, or has ended."""
        count = len(self.nodes("leads")) + len(self.nodes("joined"))
        receive, send = multiprocessing.Pipe(duplex=False)
        settings = Launch(**{"nodes": 2, "watchdog_seconds": 0.5, **launch})
        arguments = (name, settings, facts, send)
        process = multiprocessing.get_context("fork").Process(target=self._launch, args=arguments)
        process.start()
        send.close()
        self.launchers[name], self.out[name] = process, receive
        while process.is_alive() and len(self.nodes("leads")) + len(self.nodes("joined")) == count:
            time.sleep(0.01)

    def _launch(self, name: str, launch: Launch, facts, send) -> None:
        os.environ["SLURMD_NODENAME"] = f"node-{name}"
        signal.signal(signal.SIGTERM, lambda *_: None)  # a launcher that has only just started has no handler yet
        lines: list[str] = []
        folder, root = self.folder, self.root
        health = HealthWatch(launch, lines.append, [ReportFile(self.reports(name))])

        def job_of(terms) -> Job:
            path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
            arguments = (str(folder.root), json.dumps(terms))
            preload = ("slow_import",) if (root / "slow_import.py").exists() else ()
            return Job(
                module="rank_of_node", arguments=arguments, processes=1, env={"PYTHONPATH": path}, preload=preload
            )

        def lead(signals: PendingSignals) -> JobResult:
            terms = {"epoch": 3, "until_step": None}
            with RunLock(folder.lock):
                if any(read_events(folder.events, events.FINISHED)):
                    return JobResult(exit_code=0, step=2, saved_step=0, restarts=0, seconds=0.0, run=folder.root)
                here = JobHere(folder, job_of(terms), launch, health=health)
                layouts = Layouts(folder, launch, FALLBACKS if launch.min_ranks else None)
                more = {"terms": terms, "facts": facts, "signals": signals, "say": lines.append}
                with leading(folder, here, launch, layouts, **more) as job:
                    result = supervise(folder, job, launch, received=signals.received, say=lines.append)
                    job.part(result.facts())
                    return result

        def join(signals: PendingSignals) -> JobResult:
            return follow(folder, launch, facts, job_of, signals=signals, say=lines.append, health=health)

        try:
            with PendingSignals() as signals:
                result = lead_or_follow(lead, join, folder, launch, signals)
            send.send((lines, result.exit_code))
        except (IngotError, KeyboardInterrupt) as error:
            send.send((lines, getattr(error, "code", "interrupted")))
        os._exit(0)

    def reports(self, name: str) -> Path:
        """The file of the health reports of the launcher `name`."""
        return self.root / f"{name}.health"

    def report(self, name: str, **report) -> None:
        with self.reports(name).open("a") as file:
            file.write(json.dumps(report) + "\n")

    def planned(self) -> list[str]:
        return [event["reason"] for event in read_events(self.folder.events, events.PLANNED_RESTART)]

    def nodes(self, action: str) -> list[dict]:
        return [event for event in self.all_nodes() if event["action"] == action]

    def all_nodes(self) -> list[dict]:
        return list(read_events(self.folder.events, events.NODE))

    def wait_for(self, action: str, count: int) -> None:
        ends = time.monotonic() + _LONG
        while len(self.nodes(action)) < count:
            assert time.monotonic() < ends
            time.sleep(0.01)

    def attempt(self, number: int, ranks: int = 2) -> dict[int, dict]:
        """Wait for the start of `ranks` ranks in attempt `number`. Returns the event of each."""
        ends = time.monotonic() + _LONG
        while True:
            assert time.monotonic() < ends
            found = {e["rank"]: e for e in read_events(self.folder.events, events.RANK_STARTED)}
            found = {rank: e for rank, e in found.items() if e["place"]["INGOT_ATTEMPT"] == str(number)}
            if len(found) == ranks:
                return found
            time.sleep(0.01)

    def fail(self, rank: int, how: str) -> None:
        (self.folder.root / f"{rank}.fail").write_text(how)

    def finish(self) -> None:
        (self.folder.root / "finish").touch()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.launchers[name].pid, number)

    def ends(self) -> dict[str, tuple[list[str], object]]:
        """Wait for all launchers. Returns what each printed, and its exit code or the code of its error."""
        found = {}
        for name, process in self.launchers.items():
            process.join(_LONG)
            assert not process.is_alive(), name
            try:
                found[name] = self.out[name].recv()
            except EOFError:
                found[name] = [], "killed"
        return found

    def found(self) -> list[FaultRecord]:
        """The faults as the report has them."""
        reader = FaultReader()
        for event in read_events(self.folder.events):
            reader.see(event)
        return reader.found

    def faults(self) -> list[tuple]:
        return [(e["rank"], e["failure"]) for e in read_events(self.folder.events, events.FAULT)]


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "rank_of_node.py").write_text(RANK)
    made = Cluster(tmp_path)
    yield made
    for process in made.launchers.values():
        if process.is_alive():
            process.kill()
            process.join()
    for event in read_events(made.folder.events, events.RANK_STARTED):
        while state_of(event["pid"]) not in "-Z":  # the kernel ends the ranks of a launcher that was killed
            time.sleep(0.01)


def test_every_node_starts_its_share_and_ends_with_the_result_of_the_leader(cluster):
    cluster.start("a", nodes=3)
    cluster.start("b", nodes=3)
    address = json.loads(cluster.folder.leader.read_text())
    assert cluster.folder.leader.stat().st_mode & 0o777 == 0o600 and len(address["key"]) == 64
    cluster.start("c", nodes=3)
    ranks = cluster.attempt(0, 3)
    places = [ranks[rank]["place"] for rank in range(3)]
    assert {(p["WORLD_SIZE"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in places} == {("3", "0", "1")}
    assert len({(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in places}) == 1
    assert all(p["GLOO_SOCKET_IFNAME"] and json.loads(p["args"][0])["epoch"] == 3 for p in places)
    cluster.finish()
    ended = cluster.ends()
    assert {name: code for name, (_, code) in ended.items()} == {"a": 0, "b": 0, "c": 0}
    assert any("1 of 3" in line for line in ended["a"][0])
    assert {(e["address"], e["leader_address"]) for e in cluster.nodes("joined")} == {("127.0.0.1", "127.0.0.1")}
    assert not cluster.folder.leader.exists() and not cluster.faults()
    assert {path.name for path in cluster.folder.logs.glob("attempt-1*")} == {
        "attempt-1.log",
        "attempt-1.node-1.log",
        "attempt-1.node-2.log",
    }


@pytest.mark.parametrize("lost", [0, 1])
def test_the_rank_of_another_node_keeps_its_process(cluster, lost):
    for name in "ab":
        cluster.start(name, restart="partial")
    before = cluster.attempt(0)
    cluster.fail(lost, "die")
    cluster.fail(1 - lost, "lose")
    after = cluster.attempt(1)
    cluster.finish()
    assert [code for _, code in cluster.ends().values()] == [0, 0]
    assert [event["kept"] for event in read_events(cluster.folder.events, events.RESTART)] == [1]
    assert [before[rank]["pid"] == after[rank]["pid"] for rank in (lost, 1 - lost)] == [False, True]
    assert before[0]["place"]["MASTER_PORT"] != after[1]["place"]["MASTER_PORT"] == after[0]["place"]["MASTER_PORT"]


def test_a_rank_of_another_node_that_loses_its_connection_keeps_its_process(cluster, monkeypatch):
    """That rank counts as failed, but has left in good order. Rank 0 does not notice the loss."""
    monkeypatch.setattr(local, "LEAVE_SECONDS", 0.3)
    for name in "ab":
        cluster.start(name, restart="partial")
    before = cluster.attempt(0)
    cluster.fail(1, "lose")
    after = cluster.attempt(1)
    cluster.finish()
    assert [code for _, code in cluster.ends().values()] == [0, 0]
    assert [event["rank"] for event in read_events(cluster.folder.events, events.FAULT)] == [1]
    assert [before[rank]["pid"] == after[rank]["pid"] for rank in (0, 1)] == [False, True]


def test_the_rank_of_another_node_keeps_its_process_when_one_is_drained(cluster):
    for name in "abc":
        cluster.start(name, restart="partial")
    before = cluster.attempt(0)
    cluster.report("b", kind="xid", code=79, device="GPU 3", words="planted")
    after = cluster.attempt(1)
    cluster.finish()
    assert {name: code for name, (_, code) in cluster.ends().items()} == {"a": 0, "b": "E-NODE-UNHEALTHY", "c": 0}
    assert [event["kept"] for event in read_events(cluster.folder.events, events.PLANNED_RESTART)] == [1]
    assert [before[rank]["pid"] == after[rank]["pid"] for rank in (0, 1)] == [True, False]


def test_a_spare_takes_the_place_of_a_lost_node(cluster):
    for name in "abc":
        cluster.start(name)
    before = cluster.attempt(0)
    cluster.kill("b")
    after = cluster.attempt(1)
    assert before[1]["pid"] != after[1]["pid"]
    cluster.finish()
    ended = cluster.ends()
    assert {name: code for name, (_, code) in ended.items()} == {"a": 0, "b": "killed", "c": 0}
    assert cluster.faults() == [(1, "node")]
    assert any("waits as a spare" in line for line in ended["a"][0])


def test_a_spare_that_is_missing_is_reported_until_it_waits(cluster):
    settings = {"spares": 1, "shrink_seconds": 0.2}

    def reported(count: int) -> list[tuple[int, int]]:
        ends = time.monotonic() + _LONG
        while len(found := list(read_events(cluster.folder.events, events.SPARES))) < count:
            assert time.monotonic() < ends
            time.sleep(0.01)
        return [(event["waiting"], event["wanted"]) for event in found]

    for name in ("a", "b"):
        cluster.start(name, **settings)
    assert reported(1) == [(0, 1)]
    cluster.start("c", **settings)
    assert reported(2) == [(0, 1), (1, 1)]
    cluster.kill("c")
    assert reported(3) == [(0, 1), (1, 1), (0, 1)]
    cluster.finish()
    lines = cluster.ends()["a"][0]
    assert sum("spares: 0 of 1 (launch.spares)" in line for line in lines) == 2


def test_a_node_that_is_lost_without_a_spare_is_waited_for(cluster):
    cluster.start("a")
    cluster.start("b")
    cluster.attempt(0)
    cluster.kill("b")
    ends = time.monotonic() + _LONG
    while not cluster.faults():
        assert time.monotonic() < ends
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(list(read_events(cluster.folder.events, events.RANK_STARTED))) == 2
    cluster.start("again")
    cluster.attempt(1)
    cluster.finish()
    assert cluster.ends()["again"][1] == 0


def test_another_node_leads_when_the_leader_is_lost(cluster):
    for name in "abc":
        cluster.start(name)
    cluster.attempt(0)
    cluster.kill("a")
    ends = time.monotonic() + _LONG
    while len(cluster.nodes("leads")) < 2 or len(list(read_events(cluster.folder.events, events.RANK_STARTED))) < 4:
        assert time.monotonic() < ends
        time.sleep(0.01)
    cluster.finish()
    ended = cluster.ends()
    assert {code for name, (_, code) in ended.items() if name != "a"} == {0}
    assert any("the leader is gone" in line for line in ended["b"][0])
    (fault,) = read_events(cluster.folder.events, events.FAULT)
    assert (fault["rank"], fault["failure"], fault["step"], fault["detected_by"]) == (0, "node", 1, "supervisor")
    assert f"node-a (process {cluster.launchers['a'].pid})" in fault["cause"] and 0 <= fault["seconds"] < _LONG
    assert next((event["host"], event["node"]) for event in cluster.nodes("lost")) == ("node-a", 0)
    assert fault["code"] == ""
    (found,) = cluster.found()  # the next leader counts its attempts from 0, too
    assert (found.recovered, found.by_command) == (True, False) and found.gap_seconds < _LONG


def test_a_leader_that_no_node_reaches_lets_another_one_lead(cluster):
    """The leader has the lock, so no other node can find out whether the rest of them reach each other."""
    for name in "ab":
        cluster.start(name, node_seconds=0.5)
    cluster.attempt(0)
    cluster.kill("b")
    cluster.wait_for("steps_down", 1)
    for name in "cd":
        cluster.start(name, node_seconds=5.0)
    cluster.wait_for("leads", 2)
    cluster.attempt(0)
    assert [event["host"] for event in cluster.nodes("leads")] == ["node-a", "node-c"]
    cluster.wait_for("joined", 3)  # node-a, too
    cluster.finish()
    ended = cluster.ends()
    assert {code for name, (_, code) in ended.items() if name != "b"} == {0}
    assert any("leads no longer" in line for line in ended["a"][0])
    assert {(one.recovered, one.by_command) for one in cluster.found()} == {(True, False)}  # the job of node-a goes on


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_signal_to_a_leader_that_has_stepped_down_stops_the_run(cluster, number):
    for name in "ab":
        cluster.start(name, node_seconds=0.3)
    ranks = cluster.attempt(0)
    cluster.kill("b")
    cluster.wait_for("steps_down", 1)
    cluster.kill("a", number)
    assert cluster.ends()["a"][1] == 10
    (stopped,) = read_events(cluster.folder.events, events.STOPPED)
    assert (stopped["reason"], stopped["saved_step"]) == (number.name, 0)
    assert {state_of(ranks[0]["pid"]), state_of(ranks[0]["place"]["server"])} <= {"-", "Z"}
    assert not (
        cluster.folder.leader.exists() or cluster.folder.stop_request.exists() or is_locked(cluster.folder.lock)
    )


def test_a_signal_to_a_node_that_waits_while_another_one_leads_ends_that_node(cluster, tmp_path):
    """The others get a signal of their own, from the scheduler or the terminal."""

    def lead(signals):
        signals.catch()
        os.kill(os.getpid(), signal.SIGTERM)
        return RunLock(cluster.folder.lock)

    with RunLock(cluster.folder.lock), PendingSignals() as signals:
        result = lead_or_follow(lead, pytest.fail, cluster.folder, Launch(node_wait_seconds=0.3), signals)
    assert result.exit_code == 10 and not list(read_events(cluster.folder.events, events.STOPPED))


@pytest.mark.slow
def test_a_leader_that_nobody_replaces_leads_again_and_stays(cluster, monkeypatch):
    monkeypatch.setattr(node, "_STEPPED_DOWN_SECONDS", 0.3)
    for name in "ab":
        cluster.start(name, node_seconds=0.3, node_wait_seconds=2.0)
    cluster.attempt(0)
    cluster.kill("b")
    assert cluster.ends()["a"][1] == "E-NODES-MISSING"
    assert [event["action"] for event in cluster.all_nodes()] == ["leads", "joined", "lost", "steps_down", "leads"]


def test_a_leader_to_which_no_node_has_come_yet_stays(cluster):
    cluster.start("a", node_seconds=0.1, node_wait_seconds=1.0)
    assert cluster.ends()["a"][1] == "E-NODES-MISSING"
    assert [event["action"] for event in cluster.all_nodes()] == ["leads"]


def test_a_node_with_another_version_is_refused_and_the_others_go_on(cluster):
    cluster.start("a")
    cluster.start("other", facts=FACTS | {"torch": "3"})
    cluster.start("b")
    cluster.attempt(0)
    cluster.finish()
    ended = cluster.ends()
    assert {name: code for name, (_, code) in ended.items()} == {"a": 0, "b": 0, "other": "E-NODE-DIFFERS"}
    assert any("torch is 3" in line for line in ended["a"][0])


def test_nodes_that_do_not_come_end_the_wait(cluster):
    cluster.start("a", node_wait_seconds=0.3)
    assert cluster.ends()["a"][1] == "E-NODES-MISSING"


def test_a_run_goes_on_with_fewer_nodes_and_with_more_again(cluster):
    """Only when it has waited for another node; the node that joins then takes part after a save."""
    settings = {"min_ranks": 1, "shrink_seconds": 0.3, "grow_seconds": 600}
    cluster.start("a", **settings)
    cluster.start("b", **settings)
    assert {e["place"]["overrides"] for e in cluster.attempt(0).values()} == {"[]"}
    cluster.kill("b")
    (alone,) = cluster.attempt(1, 1).values()
    assert alone["place"]["WORLD_SIZE"] == "1"
    assert json.loads(alone["place"]["overrides"]) == ["parallel.dp_shard=1", "launch.nodes=1"]
    (lost,) = read_events(cluster.folder.events, events.FAULT)
    assert alone["time"] - lost["time"] >= 0.3
    cluster.start("c", **settings)
    assert {e["place"]["overrides"] for e in cluster.attempt(2).values()} == {"[]"}
    (planned,) = read_events(cluster.folder.events, events.PLANNED_RESTART)
    assert planned["reason"] == "2 nodes are there, and the run is trained on 1"
    cluster.finish()
    ended = cluster.ends()
    assert {name: code for name, (_, code) in ended.items()} == {"a": 0, "b": "killed", "c": 0}
    assert cluster.faults() == [(1, "node")]
    layouts = [(e["nodes"], e["ranks"], e["reason"]) for e in read_events(cluster.folder.events, events.LAYOUT)]
    assert layouts == [(1, 1, "nodes"), (2, 2, "")]
    assert any("goes on with 1 of 2: parallel.dp_shard=1 launch.nodes=1" in line for line in ended["a"][0])


def test_the_next_leader_waits_for_the_lost_one_no_longer_than_for_a_node(cluster):
    settings = {"min_ranks": 1, "shrink_seconds": 0.2}
    cluster.start("a", **settings)
    cluster.start("b", **settings)
    cluster.attempt(0)
    cluster.kill("a")
    ends = time.monotonic() + _LONG
    while not list(read_events(cluster.folder.events, events.LAYOUT)):
        assert time.monotonic() < ends
        time.sleep(0.01)
    cluster.finish()
    assert cluster.ends()["b"][1] == 0


def test_training_goes_on_while_a_node_that_joined_imports(cluster):
    settings = {"min_ranks": 1, "node_wait_seconds": 0.1}
    cluster.start("a", **settings)
    cluster.attempt(0, 1)
    waits = "while not Path(__file__).with_name('go').exists():\n    time.sleep(0.01)\n"
    (cluster.root / "slow_import.py").write_text(f"import time\nfrom pathlib import Path\n{waits}")
    cluster.start("b", **settings)
    time.sleep(0.5)
    assert not list(read_events(cluster.folder.events, events.STOPPED))
    (cluster.root / "go").touch()
    cluster.attempt(1)
    cluster.finish()
    assert {code for _, code in cluster.ends().values()} == {0}


def test_a_node_of_a_high_number_gets_a_place_among_fewer(cluster):
    settings = {"nodes": 3, "min_ranks": 1, "shrink_seconds": 0.2}
    for name in "abc":
        cluster.start(name, **settings)
    cluster.attempt(0, 3)
    cluster.kill("b")
    found = cluster.attempt(1)
    assert {found[rank]["place"]["WORLD_SIZE"] for rank in (0, 1)} == {"2"}
    cluster.finish()
    assert {name: code for name, (_, code) in cluster.ends().items()} == {"a": 0, "b": "killed", "c": 0}


def test_the_first_start_waits_for_all_nodes_before_it_goes_on_with_fewer(cluster):
    cluster.start("a", min_ranks=1, shrink_seconds=0.1, node_wait_seconds=1.0)
    (alone,) = cluster.attempt(0, 1).values()
    (leads,) = cluster.nodes("leads")
    assert alone["time"] - leads["time"] >= 0.9
    cluster.finish()
    assert cluster.ends()["a"][1] == 0


@pytest.mark.parametrize(
    ("number", "order"),
    [(signal.SIGTERM, "ab"), pytest.param(signal.SIGINT, "ab", marks=pytest.mark.slow), (signal.SIGINT, "ba")],
)
def test_a_signal_to_every_node_is_one_request_to_stop(cluster, number, order):
    """A scheduler sends one. A second Ctrl-C would end the ranks without a save."""
    cluster.start("a")
    cluster.start("b")
    cluster.attempt(0)
    for name in order:
        cluster.kill(name, number)
        time.sleep(0.1)  # until it has reached the leader
    ended = cluster.ends()
    assert {code for _, code in ended.values()} == {10}
    assert sum("saving first" in line for line in ended["a"][0]) == 1


def test_a_request_to_stop_ends_the_wait_for_nodes(cluster):
    cluster.start("a")
    ends = time.monotonic() + _LONG
    while cluster.launchers["a"].is_alive():
        assert time.monotonic() < ends
        cluster.kill("a", signal.SIGTERM)
        time.sleep(0.05)
    assert cluster.ends()["a"][1] == 10


def test_the_error_of_a_rank_is_that_of_every_node(cluster):
    cluster.start("a")
    cluster.start("b")
    cluster.attempt(0)
    cluster.fail(1, "data")
    assert {code for _, code in cluster.ends().values()} == {"E-SHARD-HASH"}
    assert cluster.faults() == [(1, "data")]


def test_a_rank_that_is_killed_on_another_node_is_started_again_there(cluster):
    cluster.start("a")
    cluster.start("b")
    cluster.attempt(0)
    cluster.fail(1, "die")
    cluster.attempt(1)
    cluster.finish()
    assert {code for _, code in cluster.ends().values()} == {0}
    assert cluster.faults() == [(1, "killed")] and not cluster.nodes("lost")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fork_server_that_is_killed_is_a_lost_rank_on_every_node(cluster, rank):
    cluster.start("a")
    cluster.start("b")
    os.kill(cluster.attempt(0)[rank]["place"]["server"], signal.SIGKILL)
    cluster.attempt(1)
    cluster.finish()
    assert {code for _, code in cluster.ends().values()} == {0}
    assert cluster.faults() == [(rank, "killed")] and not cluster.nodes("lost")


def test_a_leader_that_returns_leaves_the_address_of_the_next_one(cluster):
    settings = {"terms": {}, "facts": FACTS, "say": print, "record": lambda kind, **facts: None}
    first, second = (Nodes(cluster.folder, Launch(), **settings) for _ in range(2))
    address = cluster.folder.leader.read_text()
    first.release()
    assert cluster.folder.leader.read_text() == address
    second.release()
    assert not cluster.folder.leader.exists()


def test_one_that_connects_and_is_silent_keeps_no_node_out(cluster):
    settings = {"terms": {}, "facts": FACTS, "say": print, "record": lambda kind, **facts: None}
    nodes = Nodes(cluster.folder, Launch(nodes=2), **settings)
    address = LeaderAddress.read(cluster.folder.leader)
    with socket.create_connection(("127.0.0.1", address.port)):
        ends = time.monotonic() + 4.0  # a handshake may take five seconds
        link = dial(address)
        assert link is not None
        link.send(hello={"host": "b", "pid": 7, "started": 1.0, "facts": FACTS})
        while not nodes.present():
            assert time.monotonic() < ends
            assert not list(nodes.poll())
            time.sleep(0.01)
    link.close("the test is over")
    nodes.release()


def test_a_node_that_gave_up_before_it_was_heard_does_no_harm(cluster):
    """The leader was busy for longer than the node waits, and reads its greeting when the connection is over."""
    recorded = []
    settings = {"terms": {}, "facts": FACTS, "say": print, "record": lambda kind, **facts: recorded.append(facts)}
    nodes = Nodes(cluster.folder, Launch(nodes=2), **settings)
    link = dial(LeaderAddress.read(cluster.folder.leader))
    link.send(hello={"host": "b", "pid": 7, "started": 1.0, "facts": FACTS})
    link.close("it waits no longer")
    while nodes._arrived.empty():
        time.sleep(0.01)
    assert not list(nodes.poll()) and not nodes.links()
    assert [facts["action"] for facts in recorded] == ["leads"] and not list(nodes.gone())
    nodes.release()


def test_a_hang_is_one_of_all_nodes_and_each_gives_its_evidence(cluster):
    cluster.start("a")
    cluster.start("b")
    cluster.attempt(0)
    cluster.fail(1, "hang")
    time.sleep(1.2)
    assert not cluster.faults()  # rank 0 makes progress
    cluster.fail(0, "hang")
    cluster.attempt(1)
    for rank in (0, 1):
        (cluster.folder.root / f"{rank}.fail").unlink()
    cluster.finish()
    cluster.ends()
    assert cluster.faults()[0][1] == "hang"
    place = cluster.folder.incidents / "0001"
    assert {path.name for path in place.iterdir()} == {"rank-0.stacks", "rank-1.stacks", "hang.json"}
    assert "rank_of_node.py" in (place / "rank-1.stacks").read_text()
    assert json.loads((place / "hang.json").read_text())["state"].keys() == {"0", "1"}


def test_a_stopped_rank_of_one_node_is_a_hang_whatever_the_others_do(cluster):
    cluster.start("a")
    cluster.start("b")
    os.kill(cluster.attempt(0)[1]["pid"], signal.SIGSTOP)
    cluster.attempt(1)
    cluster.finish()
    cluster.ends()
    ((fault),) = read_events(cluster.folder.events, events.FAULT)
    assert (fault["rank"], fault["failure"]) == (1, "hang") and "SIGSTOP" in fault["cause"]


def test_a_silent_node_is_lost(cluster):
    """The launcher is stopped, and so may be the whole machine. It learns that when it goes on."""
    for name in "abc":
        cluster.start(name, node_seconds=2.0)
    cluster.attempt(0)
    cluster.kill("b", signal.SIGSTOP)
    try:
        cluster.attempt(1)
    finally:
        cluster.kill("b", signal.SIGCONT)
    cluster.finish()
    ended = cluster.ends()
    assert cluster.faults() == [(1, "node")] and {code for _, code in ended.values()} == {0}
    assert "gives no sign of life" in cluster.nodes("lost")[0]["reason"]


@pytest.mark.slow
def test_a_start_that_takes_longer_than_a_silence_may_is_no_loss(cluster, monkeypatch):
    honest = JobHere.start

    def start(self, attempt, before=FIRST, name="", share=None, overrides=()):
        time.sleep(1.5 if share and share.first else 0.0)  # imports from a slow disk
        honest(self, attempt, before, name, share, overrides)

    monkeypatch.setattr(JobHere, "start", start)
    for name in "ab":
        cluster.start(name, node_seconds=1.0)
    cluster.attempt(0)
    cluster.finish()
    assert {code for _, code in cluster.ends().values()} == {0}
    assert not cluster.nodes("lost") and not cluster.faults()


def test_a_run_that_something_else_holds_stays_busy(cluster):
    folder, launch = cluster.folder, Launch(node_wait_seconds=0.1)
    with RunLock(folder.lock), pytest.raises(RunBusyError):
        lead_or_follow(lambda _: RunLock(folder.lock), pytest.fail, folder, launch, PendingSignals())


@pytest.mark.parametrize(("code", "saves"), [(79, 1), (48, 0)])
def test_a_machine_with_a_fault_is_drained_and_a_spare_takes_its_place(cluster, code, saves):
    """After a double-bit error nothing is saved."""
    for name in "abc":
        cluster.start(name)
    before = cluster.attempt(0)
    cluster.report("b", kind="xid", code=code, device="GPU 3", words="planted")
    after = cluster.attempt(1)
    assert before[1]["pid"] != after[1]["pid"]
    cluster.launchers["b"].join(_LONG)
    assert cluster.out["b"].recv()[1] == "E-NODE-UNHEALTHY"
    cluster.start("b")  # the same machine again
    cluster.finish()
    ended = cluster.ends()
    assert {name: code for name, (_, code) in ended.items()} == {"a": 0, "b": "E-NODE-UNHEALTHY", "c": 0}
    assert not cluster.faults() and cluster.planned() == [f"node-b is drained: GPU 3: XID {code}: planted"]
    assert len(list(read_events(cluster.folder.events, events.STOPPED))) == saves
    (drained,) = cluster.nodes("drained")
    assert (drained["host"], drained["node"]) == ("node-b", 1) and not cluster.nodes("lost")
    assert json.loads(cluster.folder.drained.read_text()) == {"node-b": f"GPU 3: XID {code}: planted"}
    assert any(f"health    node-b: GPU 3: XID {code}: planted" in line for line in ended["a"][0])


def test_the_machine_of_the_leader_is_drained_and_another_one_leads(cluster):
    for name in "abc":
        cluster.start(name)
    cluster.attempt(0)
    cluster.report("a", kind="ecc_uncorrected", device="memory DIMM_A1")
    ends = time.monotonic() + _LONG
    while len(cluster.nodes("leads")) < 2 or len(list(read_events(cluster.folder.events, events.RANK_STARTED))) < 4:
        assert time.monotonic() < ends
        time.sleep(0.01)
    cluster.finish()
    assert {name: code for name, (_, code) in cluster.ends().items()} == {"a": "E-NODE-UNHEALTHY", "b": 0, "c": 0}
    assert list(json.loads(cluster.folder.drained.read_text())) == ["node-a"]
    assert not cluster.faults() and not cluster.found()  # the leader parted: it was not lost


def test_a_spare_with_a_fault_leaves_and_nothing_starts_again(cluster):
    for name in "abc":
        cluster.start(name)
    cluster.attempt(0)
    cluster.report("c", kind="row_remap_failure", device="GPU 0")
    cluster.launchers["c"].join(_LONG)
    cluster.finish()
    assert {name: code for name, (_, code) in cluster.ends().items()} == {"a": 0, "b": 0, "c": "E-NODE-UNHEALTHY"}
    assert not cluster.planned() and not cluster.faults()


def test_a_fault_is_only_reported_where_the_user_wants_that(cluster):
    cluster.start("a")
    cluster.start("b", on_bad_health="warn")
    cluster.attempt(0)
    cluster.report("b", kind="xid", code=79, words="planted")
    cluster.report("a", kind="temperature", device="GPU 1", words="slow")
    ends = time.monotonic() + _LONG
    while len(list(read_events(cluster.folder.events, events.HEALTH))) < 2:
        assert time.monotonic() < ends
        time.sleep(0.01)
    cluster.finish()
    assert {code for _, code in cluster.ends().values()} == {0} and not cluster.planned()
    found = {(e["node"], e["report"], e["verdict"]) for e in read_events(cluster.folder.events, events.HEALTH)}
    assert found == {("node-a", "temperature", "warn"), ("node-b", "xid", "warn")}
