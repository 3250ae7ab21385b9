"""A mount of this machine that can vanish, in a mount namespace of its own (mount.py serves it)."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ingot.machine.processes import die_with_parent

_SERVER = Path(__file__).with_name("mount.py")
_TOOLS = ("unshare", "nsenter", "umount")


@functools.cache
def missing() -> str:
    """Return why nothing can be mounted here; "" if it can."""
    if os.geteuid():
        return "needs root, for mount namespaces"
    if lacking := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"needs {', '.join(lacking)} (of util-linux)"
    try:
        with tempfile.TemporaryDirectory() as folder, Mounted(Path(folder, "disk"), Path(folder, "point")):
            return ""
    except OSError as error:
        return f"needs file systems in user space (FUSE) and mount namespaces: {error}"


class Mounted:
    """The folder `disk` mounted at `point`, for commands that run in its namespace; elsewhere `point` is an empty
    folder. Both are made. A context manager; its end is that of the mount. Raises OSError if it cannot be mounted."""

    def __init__(self, disk: Path, point: Path):
        self._disk, self._point = disk, point

    def __enter__(self) -> "Mounted":
        for folder in (self._disk, self._point):
            folder.mkdir(exist_ok=True)
        self._server = subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-I", str(_SERVER), str(self._disk), str(self._point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        try:
            self._answer("mounted")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._server.stdin, self._server.stdout, self._server.stderr):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def command(self, command: Sequence[str]) -> list[str]:
        """Return `command` so that it sees the mount. It stays one process, with the id that its parent sees."""
        return ["nsenter", "--target", str(self._server.pid), "--mount", "--", *command]

    def order(self, words: str) -> None:
        """Let it fail, or heal: see mount.py."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"{words}\n")
        self._server.stdin.flush()
        self._answer("done")

    def detach(self) -> None:
        """Take the mount away from its path. Files that are open stay so."""
        subprocess.run(self.command(["umount", "--lazy", str(self._point)]), check=True)

    def kill(self) -> None:
        """Kill the server: the mount stays, and every access fails."""
        self._server.kill()
        self._server.wait()

    def _answer(self, expected: str) -> None:
        assert self._server.stdout is not None and self._server.stderr is not None
        if self._server.stdout.readline().strip() != expected:
            raise OSError(self._server.stderr.read().strip().rpartition("\n")[2] or "the server has ended")
