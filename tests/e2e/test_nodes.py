"""Real `ingot train` launchers of a run on two nodes and a spare: one has another version, or its link goes down."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from ingot.errors import ConfigError, NodeUnhealthy
from ingot.events import read_events
from ingot.machine.health.kernel_log import KERNEL_LOG
from ingot.schema import events

from .conftest import Project, ended

pytestmark = pytest.mark.slow
_OPTIONS = [word for one in ("launch.nodes=2", "train.steps=20000") for word in ("--set", one)]
_PREEMPTED = 10
# Each makes a launcher report another version; the code that runs is the same.
_OTHER_VERSIONS = {
    "torch": """
import importlib.metadata

found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.9" if name == "torch" else found(name)
""",
    "ingot": """
import ingot

ingot.__version__ = "0.0.9"
""",
}


def _until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class _Launchers:
    """The launchers of the run `out`. The first that is started leads."""

    def __init__(self, project: Project, out: str):
        self.project, self.out = project, out
        self.started: list[subprocess.Popen] = []

    def start(self, node: str, **variables: str) -> subprocess.Popen:
        launcher = self.project.start(self.out, *_OPTIONS, SLURMD_NODENAME=node, **variables)
        self.started.append(launcher)
        return launcher

    def joins(self, node: str, **variables: str) -> subprocess.Popen:
        """Start a launcher, and wait until it leads the run or has joined it."""
        launcher = self.start(node, **variables)
        _until(lambda: node in [e["host"] for e in self.log(events.NODE) if e["action"] in ("leads", "joined")])
        return launcher

    def log(self, *kinds: str) -> list[dict]:
        return list(read_events(self.project.folder(self.out).events, *kinds))

    def trains(self) -> None:
        """Wait for ten more steps."""
        step = self.project.wait_for_step(self.out, 0, self.started[0])
        self.project.wait_for_step(self.out, step + 10, self.started[0])


@pytest.fixture
def launchers(project, request) -> Iterator[_Launchers]:
    found = _Launchers(project, request.node.name[:20])
    yield found
    for one in found.started:
        if one.poll() is None:
            one.kill()
            one.communicate()


def test_a_spare_with_another_version_is_refused_by_name_and_the_run_goes_on(launchers, tmp_path):
    leader, second = launchers.joins("node-a"), launchers.joins("node-b")
    launchers.trains()
    for package, plant in _OTHER_VERSIONS.items():
        folder = tmp_path / package
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(plant)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        output = ended(launchers.start(f"node-{package}", PYTHONPATH=path), ConfigError.exit_code)
        assert "E-NODE-DIFFERS" in output and f"its {package} is 0.0.9, the leader's " in output
    launchers.trains()
    leader.send_signal(signal.SIGTERM)
    shown = ended(leader, _PREEMPTED)
    ended(second, _PREEMPTED)
    for package in _OTHER_VERSIONS:
        assert f"node-{package} is refused: its {package} is 0.0.9, the leader's " in shown
    assert [e["host"] for e in launchers.log(events.NODE) if e["action"] == "joined"] == ["node-b"]
    assert not launchers.log(events.FAULT, events.RESTART, events.PLANNED_RESTART)


@pytest.fixture
def interface() -> Iterator[str]:
    """A network interface of this machine that no other run uses: all of them read the kernel's log."""
    if os.geteuid() or not os.access(KERNEL_LOG, os.W_OK):
        pytest.skip(f"only root may write to the kernel's log, where there is one ({KERNEL_LOG})")
    name = f"link{os.getpid()}"
    try:
        subprocess.run(["ip", "tuntap", "add", name, "mode", "tap"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network interface can be made here: {getattr(error, 'stderr', '') or error}")
    yield name
    subprocess.run(["ip", "link", "delete", name], check=True)


def test_a_link_that_is_down_in_the_log_of_this_kernel_drains_the_machine_that_uses_it(launchers, interface):
    """Only one of the three launchers uses it, as its environment shows; the others show a warning."""
    leader = launchers.joins("node-a")
    second = launchers.joins("node-b", NCCL_SOCKET_IFNAME=f"={interface}")
    spare = launchers.joins("node-c")
    launchers.trains()
    KERNEL_LOG.write_text(f"ingot-test 0000:ff:1f.0 {interface}: NIC Link is Down\n")
    assert "E-NODE-UNHEALTHY" in ended(second, NodeUnhealthy.exit_code)
    _until(lambda: len(launchers.log(events.RUN_STARTED)) == 2)
    leader.send_signal(signal.SIGTERM)
    for one in (leader, spare):
        ended(one, _PREEMPTED)
    found = {e["node"]: e["verdict"] for e in launchers.log(events.HEALTH) if interface in e["device"]}
    assert found.pop("node-b") == "drain" and set(found.values()) <= {"warn"}
    kinds = (events.RUN_STARTED, events.PLANNED_RESTART, events.FAULT)
    assert [e["kind"] for e in launchers.log(*kinds)] == [kinds[0], kinds[1], kinds[0]]
