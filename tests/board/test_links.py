"""Emulated hosts, the faults of their links, and cases of the row: `.ci/nightly board` plays all of them."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from ingot.drill.oracles import Verdicts

from .bench import ROOT, Bench
from .hosts import Hosts, missing
from .rows_links import rs31_links
from .test_rows import wrong

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
_SERVE = (
    "import socket; s = socket.create_server(('', 5000)); print('ready', flush=True)\nwhile 1: s.accept()[0].close()"
)
_CALL = "import socket, sys; socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).close()"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(2, tmp_path / "hosts") as hosts:
        yield hosts


def calls(hosts: Hosts, seconds: float) -> bool:
    """Return whether host 1 reaches a program on host 0 within `seconds`."""
    call = [sys.executable, "-c", _CALL, hosts.addresses[0], str(seconds)]
    return subprocess.run(hosts.command(1, call), capture_output=True).returncode == 0


@pytest.fixture
def served(hosts):
    """Hosts, the first of which answers."""
    command = hosts.command(0, [sys.executable, "-c", _SERVE])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline()
        yield hosts
        server.kill()


def test_hosts_have_names_boots_and_shared_memory_of_their_own(hosts):
    assert [hosts.run(host, "hostname").strip() for host in (0, 1)] == ["host-0", "host-1"]
    boots = {hosts.run(host, "cat", "/proc/sys/kernel/random/boot_id") for host in (0, 1)}
    assert len(boots) == 2
    hosts.run(1, "touch", "/dev/shm/left")
    assert hosts.shared_memory() == ["left"]


@pytest.mark.parametrize("fault", ["cut", "hole"])
def test_a_link_is_cut_and_whole_again(served, fault):
    assert calls(served, 10)
    getattr(served, fault)(1)
    assert not calls(served, 0.5)
    while fault == "cut" and "NO-CARRIER" not in served.run(1, "ip", "link", "show", "eth0"):
        time.sleep(0.05)  # the kernel looks at carriers once a second
    served.repair(1)
    assert calls(served, 10)


def test_a_link_is_late(served):
    served.degrade(1, delay=0.4)  # there and back, at both ends of the cable of host 1
    assert not calls(served, 0.5) and calls(served, 10)


def test_a_link_loses_all_packets(served):
    served.degrade(1, loss=1.0)
    assert not calls(served, 0.5)


def test_nothing_of_the_hosts_is_left(tmp_path):
    with Hosts(1, tmp_path / "hosts") as hosts:
        process = subprocess.Popen(hosts.command(0, ["sleep", "infinity"]))
        (pid,) = hosts._pids
    assert not (tmp_path / "hosts").exists()
    assert subprocess.run(["nsenter", "--target", str(pid), "--net", "true"], capture_output=True).returncode
    process.kill()
    process.wait()


@pytest.mark.row("RS31 links")
@pytest.mark.parametrize("case", ["gap", "spare", "two-leaders"])
def test_a_case_of_the_row(bench: Bench, case: str):
    verdicts = Verdicts()
    rs31_links(bench, 0, verdicts, [case])
    assert not wrong(verdicts)


@pytest.mark.nightly
def test_the_doctor_finds_the_host_with_a_slow_link(tmp_path):
    """The slow end of one pair is not known before each of the two has got another partner."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    doctor = [sys.executable, "-P", "-m", "ingot.cli.main", "doctor", str(folder), "--nodes", "4", "--json"]
    with Hosts(4, tmp_path / "hosts") as hosts, ExitStack() as ends:
        hosts.degrade(2, rate=5e6)
        started = []
        for host in range(4):
            one = subprocess.Popen(hosts.command(host, doctor), stdout=subprocess.PIPE, text=True, cwd=ROOT)
            ends.callback(one.kill)
            started.append(one)
        answers = [one.communicate(timeout=300)[0] for one in started]
    for text in answers:
        unfit = json.loads(text.splitlines()[-1])["facts"]["unfit"]
        assert [one["node"] for one in unfit if one["check"] == "link"] == ["host-2"]
