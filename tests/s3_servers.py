"""The S3 servers of tests: our own, which is always there, and two real ones where they are installed."""

import importlib.metadata
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests import ceph, moto_server, s3_server


@dataclass(frozen=True)
class Server:
    """An S3 server. start: a context manager that has `environment`. missing: why it cannot be played; "" if it can.
    version: of what is installed."""

    start: Callable[[], Any]
    bucket: str
    missing: Callable[[], str]
    version: Callable[[], str]


def _of_ceph() -> str:
    found = subprocess.run(["radosgw", "--version"], capture_output=True, text=True, check=True).stdout
    return (re.search(r"version (\S+)", found) or [found, found.strip()])[1]


SERVERS = {
    "ceph": Server(ceph.CephGateway, ceph.BUCKET, ceph.missing, _of_ceph),
    "moto": Server(
        moto_server.MotoServer, moto_server.BUCKET, moto_server.missing, lambda: importlib.metadata.version("moto")
    ),
    "own": Server(s3_server.S3Server, s3_server.BUCKET, str, lambda: "(tests/s3_server.py)"),
}
