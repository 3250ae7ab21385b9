"""A switch between emulated hosts: each is a network namespace with its own name, boot, shared memory and /tmp.

`python -m tests.board.switch FOLDER NAME...` runs as root, in a network namespace of its own (`unshare --net`). It
prints one line of JSON, {"pids": [...]}: a process of each host, whose namespaces `nsenter` enters. Then each line of
its standard input is an order, which it answers with a line: {"host": 1, "loss": 0.1}.

Links are disturbed here, packet by packet, because not every kernel has netem or nftables: `loss` (a share of the
packets, by a seeded generator), `delay` (seconds, in each direction), `rate` (bytes per second, 0: no limit; packets
that wait for more than half a second are lost), `hole` (all packets are lost in silence), `carrier` (False: the cable
is out). They hold for packets that a host sends and for those that it gets.

Nothing outlives this process: it ends with the one that started it, each host ends with it, and a namespace with its
last process.
"""

import fcntl
import heapq
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ingot.machine.processes import die_with_parent

_TUNSETIFF, _TUNSETCARRIER = 0x400454CA, 0x400454E2  # of linux/if_tun.h
_TAP, _WITHOUT_HEADER = 0x0002, 0x1000
_MOST_BYTES = 66_000  # of a packet
_MOST_WAIT = 0.5  # seconds of a packet in front of a slow link
_AT_ONCE = 64  # packets that are read from a host before the next one has its turn
# Processes of a host share nothing with this machine but its files. By the `boot_id`, ingot knows which processes are
# on one machine.
_HOST = """
set -e
hostname "$1"
ip link set lo up
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs none /dev/shm
echo ready
exec sleep infinity
"""


@dataclass
class _Cable:
    """The link of a host. busy_until: when its line is free for the next packet [s of time.monotonic()]."""

    tap: int
    loss: float = 0.0
    delay: float = 0.0
    rate: float = 0.0
    hole: bool = False
    carrier: bool = True
    busy_until: float = 0.0


class _Switch:
    """Forwards packets between the `cables`."""

    def __init__(self, cables: list[_Cable]):
        self._cables, self._random = cables, Random(0)
        self._known: dict[bytes, int] = {}  # hardware address -> host
        self._waiting: list[tuple[float, int, int, bytes]] = []  # when, number, host, packet
        self._number = 0
        self._selector = selectors.DefaultSelector()
        for host, cable in enumerate(cables):
            self._selector.register(cable.tap, selectors.EVENT_READ, host)
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        """Forward packets and obey orders until the standard input is closed."""
        while True:
            self._deliver()
            patience = max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else None
            for key, _ in self._selector.select(patience):
                if key.data is not None:
                    self._read(key.data)
                elif not (line := sys.stdin.readline()):
                    return
                else:
                    self._obey(json.loads(line))

    def _obey(self, order: dict) -> None:
        cable = self._cables[order.pop("host")]
        if "carrier" in order:
            fcntl.ioctl(cable.tap, _TUNSETCARRIER, struct.pack("i", order["carrier"]))
        for name, value in order.items():
            setattr(cable, name, value)
        print("{}", flush=True)

    def _read(self, host: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._cables[host].tap, _MOST_BYTES)
            except OSError:  # nothing more is there, or the cable is out
                return
            self._known[packet[6:12]] = host
            to = self._known.get(packet[:6])
            for other in range(len(self._cables)) if to is None else [to]:
                if other != host:
                    self._forward(host, other, packet)

    def _forward(self, host: int, other: int, packet: bytes) -> None:
        now = at = time.monotonic()
        for cable in (self._cables[host], self._cables[other]):
            if cable.hole or not cable.carrier or self._random.random() < cable.loss:
                return
            if cable.rate:
                free = max(at, cable.busy_until) + len(packet) / cable.rate
                if free - now > _MOST_WAIT:
                    return
                at = cable.busy_until = free
            at += cable.delay
        self._number += 1
        heapq.heappush(self._waiting, (at, self._number, other, packet))
        self._deliver()

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(self._waiting)
            try:
                os.write(self._cables[other].tap, packet)
            except OSError:  # its cable is out, or its queue is full
                continue


def _host(folder: Path, name: str, address: str) -> tuple[_Cable, int]:
    """Start a host. Returns its cable, and the process that keeps its namespaces."""
    own = folder / name
    own.mkdir()
    (own / "boot_id").write_text(f"{own}\n".replace(" ", "_"))
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", _HOST, "sh", name, str(own)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the host {name} did not start")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode()[:15], _TAP | _WITHOUT_HEADER))
    pid = str(process.pid)
    inside = ["nsenter", "--target", pid, "--net", "ip"]
    for command in (
        ["ip", "link", "set", name, "netns", pid],
        [*inside, "link", "set", name, "name", "eth0"],
        [*inside, "addr", "add", f"{address}/24", "dev", "eth0"],
        [*inside, "link", "set", "eth0", "up"],
    ):
        subprocess.run(command, check=True)
    return _Cable(tap), process.pid


def main(folder: Path, hosts: list[tuple[str, str]]) -> None:
    """Be the switch of `hosts`, each with its address, until the standard input is closed. folder: for their files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that uses the hosts
    started = [_host(folder, name, address) for name, address in hosts]
    print(json.dumps({"pids": [pid for _, pid in started]}), flush=True)
    _Switch([cable for cable, _ in started]).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [tuple(one.split("=", 1)) for one in sys.argv[2:]])
