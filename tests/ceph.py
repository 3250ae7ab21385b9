"""A Ceph object gateway on loopback for tests: one monitor, one storage daemon in memory and one gateway (RGW).

The programs are those of the packages ceph-mon, ceph-osd, ceph-common and radosgw of a distribution. Nothing of it is
reachable from outside, and no daemon outlives the process that started it.
"""

import base64
import contextlib
import hashlib
import hmac
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.frozen import frozen

from ingot.machine.processes import die_with_parent

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
BUCKET, KEY, SECRET = "bucket", "AKIA0123456789TESTS0", "s3cr3t-of-the-tests"
_START_SECONDS = 180.0  # of each daemon, on a busy machine
_CONF = """[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{monitor}
ms_bind_msgr2 = false
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
mon_data_avail_crit = 1
mon_data_avail_warn = 1
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
osd_class_update_on_start = false
osd_objectstore = memstore
memstore_device_bytes = 2147483648
osd_class_load_list = *
osd_class_default_list = *
log_file = {folder}/$name.log
admin_socket =
pid_file =
run_dir = {folder}
keyring = {folder}/keyring
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
rgw_enable_usage_log = false
rgw_thread_pool_size = 32
"""


def missing() -> str:
    """Return why this machine cannot play Ceph; "" if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs Ceph: {', '.join(absent)} not found (packages ceph-mon, ceph-osd, ceph-common, radosgw)" * bool(
        absent
    )


NEEDED = pytest.mark.skipif(bool(missing()), reason=missing())


class CephGateway:
    """A Ceph cluster of one node with a gateway, and the bucket BUCKET in it. A context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ceph-"))
        self._port = _free_port()
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "CephGateway":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons.values()):
            with contextlib.suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGKILL)  # also one that is stopped
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    secret_variable = "AWS_SECRET_ACCESS_KEY"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds the gateway."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self._endpoint}

    def kill(self) -> None:
        """End the gateway with SIGKILL. What it acknowledged is in the storage daemon."""
        self._daemons["radosgw"].kill()
        self._daemons["radosgw"].wait()

    def start(self) -> None:
        """Start the gateway, again if it was killed, and wait until it answers."""
        self._run("radosgw", "-n", "client.rgw", "-f")
        self._wait("radosgw", self._answers)

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the gateway is stopped: connections stay open, and nothing answers."""
        return frozen(self._daemons["radosgw"].pid)

    def uploads(self) -> list[str]:
        """Return the ids of the multipart uploads that were begun and have not ended."""
        return re.findall("<UploadId>(.*?)</UploadId>", self._ask("GET", "?uploads").decode())

    @property
    def _endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        own, monitor = self.folder, _free_port()
        for name in ("mon", "osd", "rgw"):
            (own / name).mkdir()
        (own / "keyring").touch()
        fsid = str(uuid.uuid4())
        text = _CONF.format(fsid=fsid, folder=own, monitor=monitor, gateway=self._port)
        (own / "ceph.conf").write_text(text)
        self._call(
            "monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{monitor}]", "--fsid", fsid, f"{own}/monmap"
        )
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{own}/monmap", "--keyring", f"{own}/keyring")
        self._run("ceph-mon", "-i", "a", "-f")
        number = str(uuid.uuid4())
        self._call("ceph", "osd", "new", number, "0")
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", number)
        self._run("ceph-osd", "-i", "0", "-f")
        self._call("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
        self._wait("ceph-osd", lambda: "1 up" in self._call("ceph", "osd", "stat"))
        self.start()
        user = ("--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret-key={SECRET}")
        self._call("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        self._ask("PUT", "")

    def _call(self, program: str, *arguments: str) -> str:
        """Run a program of Ceph to its end, and return its output."""
        ended = subprocess.run(
            [program, *self._configured(program), *arguments], capture_output=True, text=True, timeout=_START_SECONDS
        )
        assert ended.returncode == 0, f"{program} {' '.join(arguments)}: {ended.stderr[-500:]}"
        return ended.stdout

    def _run(self, program: str, *arguments: str) -> None:
        """Start a daemon of Ceph."""
        with (self.folder / f"{program}.out").open("ab") as out:
            self._daemons[program] = subprocess.Popen(
                [program, *self._configured(program), *arguments],
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _configured(self, program: str) -> list[str]:
        return [] if program == "monmaptool" else ["-c", str(self.folder / "ceph.conf")]

    def _wait(self, program: str, is_ready: Callable[[], bool]) -> None:
        deadline, daemon = time.monotonic() + _START_SECONDS, self._daemons[program]
        while not is_ready():
            out = (self.folder / f"{program}.out").read_text(errors="replace")[-500:]
            assert daemon.poll() is None, f"{program} ended with code {daemon.returncode}: {out}"
            assert time.monotonic() < deadline, f"{program} is not ready after {_START_SECONDS:.0f} s: {out}"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self._endpoint, timeout=5).close()
        except OSError:
            return False
        return True

    def _ask(self, method: str, query: str) -> bytes:
        """Send a request about the bucket, signed by version 2 of S3's rules, which need no library."""
        date = formatdate(usegmt=True)
        signed = hmac.new(SECRET.encode(), f"{method}\n\n\n{date}\n/{BUCKET}{query}".encode(), hashlib.sha1).digest()
        request = urllib.request.Request(f"{self._endpoint}/{BUCKET}{query}", method=method)
        request.add_header("Date", date)
        request.add_header("Authorization", f"AWS {KEY}:{base64.b64encode(signed).decode()}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
