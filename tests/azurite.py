"""Azurite, Microsoft's emulator of Azure's blob storage, on loopback for tests (npm package `azurite`).

Nothing of it is reachable from outside, and it does not outlive the process that started it.
"""

import base64
import contextlib
import hashlib
import hmac
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.frozen import frozen

from ingot.machine.processes import die_with_parent

PROGRAM = "azurite-blob"
CONTAINER = "container"
# The account that every Azurite has, as its documentation says: no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_SECONDS = 180.0  # on a busy machine
_VERSION = "2021-08-06"  # of the protocol


def missing() -> str:
    """Return why this machine cannot play Azure; "" if it can."""
    return f"needs {PROGRAM} on the PATH (npm package azurite)" if shutil.which(PROGRAM) is None else ""


NEEDED = pytest.mark.skipif(bool(missing()), reason=missing())


class Azurite:
    """A blob store with the container CONTAINER. A context manager."""

    def __enter__(self) -> "Azurite":
        self.folder = Path(tempfile.mkdtemp(prefix="azurite-"))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        try:
            self.start()
            self._ask("PUT", "restype:container", f"/{CONTAINER}?restype=container")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    secret_variable = "AZURE_STORAGE_ACCOUNT_KEY"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds it."""
        endpoint = f"{self._address}/{ACCOUNT}"
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }

    def start(self) -> None:
        """Start it, again if it was killed, and wait until it answers. What it acknowledged is in its folder."""
        out, place = self.folder / "out", ["--blobHost", "127.0.0.1", "--blobPort", str(self._port)]
        rest = ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        with out.open("ab") as file:
            self._process = subprocess.Popen(
                [PROGRAM, "--location", str(self.folder), *place, *rest],
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            printed = out.read_text(errors="replace")[-500:]
            assert self._process.poll() is None, f"{PROGRAM} ended with code {self._process.returncode}: {printed}"
            assert time.monotonic() < deadline, f"{PROGRAM} is not ready after {_START_SECONDS:.0f} s: {printed}"
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which it is stopped: connections stay open, and nothing answers."""
        return frozen(self._process.pid)

    def uploads(self) -> list[str]:
        """Return the names of the objects of which parts have arrived, and whose upload has not ended."""
        listed = self._ask(
            "GET",
            "comp:list\ninclude:uncommittedblobs\nrestype:container",
            f"/{CONTAINER}?restype=container&comp=list&include=uncommittedblobs",
        ).decode()
        return re.findall(r"<Name>([^<]*)</Name><Properties>(?:(?!</Properties>).)*<Content-Length>0<", listed)

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self._address, timeout=5).close()
        except urllib.error.HTTPError:  # it refuses a request without a signature
            return True
        except OSError:
            return False
        return True

    def _ask(self, method: str, parameters: str, path: str) -> bytes:
        """Send a request without a body, signed with the account's key ("Authorize with Shared Key" of the REST API).

        parameters: those of the query in `path`, as the rules write them.
        """
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{ACCOUNT}/{ACCOUNT}{path.partition('?')[0]}\n{parameters}"
        text = f"{method}{12 * chr(10)}{lines}{resource}"
        signed = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
        request = urllib.request.Request(f"{self._address}/{ACCOUNT}{path}", method=method, headers=headers)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{signed}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
