"""moto's server on loopback for tests: an S3 in memory, of the package `moto` (the extra of that name).

It keeps all objects in the memory of its process, so it can be frozen, but a killed one has lost everything.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from tests.frozen import frozen

from ingot.machine.processes import die_with_parent

BUCKET, KEY, SECRET = "bucket", "AKIA0123456789TESTS0", "s3cr3t-of-the-tests"
_START_SECONDS = 180.0  # on a busy machine


def missing() -> str:
    """Return why this machine cannot play moto; "" if it can."""
    absent = [name for name in ("moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(absent)} (pip install 'ingot[moto]')" if absent else ""


NEEDED = pytest.mark.skipif(bool(missing()), reason=missing())


class MotoServer:
    """A server with the bucket BUCKET. A context manager."""

    def __enter__(self) -> "MotoServer":
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._endpoint = f"http://127.0.0.1:{found.getsockname()[1]}"
        port = self._endpoint.rpartition(":")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env=os.environ | self.environment,
        )
        try:
            self._make_bucket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)  # also one that is stopped
        self._process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds it."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self._endpoint}

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which it is stopped: connections stay open, and nothing answers."""
        return frozen(self._process.pid)

    def _make_bucket(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert self._process.poll() is None, f"moto ended with code {self._process.returncode}"
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self._endpoint}/{BUCKET}", method="PUT")).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"moto is not ready after {_START_SECONDS:.0f} s"
                time.sleep(0.1)
