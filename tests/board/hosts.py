"""Emulated hosts on this machine, whose links can be cut, black-holed, lossy and slow (switch.py)."""

import functools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ingot.machine.processes import die_with_parent

ROOT = Path(__file__).parents[2]
_TOOLS = ("ip", "unshare", "nsenter")
_NETWORK = "10.77.0"


@functools.cache
def missing() -> str:
    """Return why hosts cannot be emulated here; "" if they can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    if lacking := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"needs {', '.join(lacking)} (of iproute2 and util-linux)"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"needs /dev/net/tun ({error.strerror})"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Hosts named host-0, host-1 and so on, all with the files of this machine and one network. A context manager,
    whose end ends all their processes and removes their folders.

    count: their number. folder: for their files, which must not exist.
    """

    def __init__(self, count: int, folder: Path):
        self.names = [f"host-{number}" for number in range(count)]
        self.addresses = [f"{_NETWORK}.{number + 1}" for number in range(count)]
        self.folder = folder

    def __enter__(self) -> "Hosts":
        self.folder.mkdir()
        places = [f"{name}={address}" for name, address in zip(self.names, self.addresses, strict=True)]
        self._switch = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-m", "tests.board.switch", str(self.folder), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=die_with_parent,
        )
        self._hosts: list[int] = []
        try:
            self._pids: list[int] = self._answer()["pids"]
            self._hosts += [os.pidfd_open(pid) for pid in self._pids]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._switch.stdin is not None and self._switch.stdout is not None
        with suppress(BrokenPipeError):
            self._switch.stdin.close()
        self._switch.wait()
        for host in self._hosts:  # the end of the switch kills them, a moment later
            select.select([host], [], [])
            os.close(host)
        self._switch.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return `command` so that it runs on a host. It stays one process, with the id that its parent sees."""
        return ["nsenter", "--target", str(self._pids[host]), "--net", "--uts", "--mount", "--", *command]

    def run(self, host: int, *command: str) -> str:
        """Run a command on a host to its end. Returns what it printed."""
        return subprocess.run(self.command(host, command), check=True, capture_output=True, text=True).stdout

    def hide_locks(self, file: Path) -> None:
        """Give each host a `file` of its own, as a file system without locks does as far as locks go."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        for host, name in enumerate(self.names):
            own = self.folder / name / file.name
            own.touch()
            self.run(host, "mount", "--bind", str(own), str(file))

    def shared_memory(self) -> list[str]:
        """Return the names in the shared memory of all hosts."""
        return [name for host in range(len(self.names)) for name in self.run(host, "ls", "-A", "/dev/shm").split()]

    def cut(self, host: int) -> None:
        """Take the cable out: the host sees that."""
        self._order(host, carrier=False)

    def hole(self, host: int) -> None:
        """Lose all packets from and to a host; nobody sees anything else."""
        self._order(host, hole=True)

    def degrade(self, host: int, *, loss: float = 0.0, delay: float = 0.0, rate: float = 0.0) -> None:
        """Make the link of a host lossy (share of the packets), late (seconds each way), slow (bytes per second)."""
        self._order(host, loss=loss, delay=delay, rate=rate)

    def repair(self, host: int) -> None:
        """Make the link of a host whole again."""
        self._order(host, carrier=True, hole=False, loss=0.0, delay=0.0, rate=0.0)

    def _order(self, host: int, **order: object) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps({"host": host, **order}) + "\n")
        self._switch.stdin.flush()
        self._answer()

    def _answer(self) -> dict:
        assert self._switch.stdout is not None
        if not (line := self._switch.stdout.readline()):
            raise RuntimeError("the switch of the emulated hosts has ended")
        return json.loads(line)
