"""Writes WARC/1.0 files as crawlers do: one gzip member per record (ISO 28500), so that readers can start anywhere."""

import base64
import gzip
import hashlib
import uuid
from typing import IO

_COMPRESSION = 6


class WarcWriter:
    """Appends records to an open binary file.

    Reproducible: `date` is the one time of all records, and record ids are UUIDv5 of (file name, position, URL).
    """

    def __init__(self, file: IO[bytes], name: str, date: str):
        self._file, self._name, self._date = file, name, date
        self._count = 0
        fields = "software: ingot quickstart\r\nformat: WARC File Format 1.0\r\nrobots: obey\r\n"
        self._warcinfo = self._write("warcinfo", fields.encode(), "application/warc-fields", {"WARC-Filename": name})

    def response(self, url: str, address: str, message: bytes) -> None:
        """`message`: the HTTP response as it came over the wire."""
        _, _, payload = message.partition(b"\r\n\r\n")
        headers = {
            "WARC-Target-URI": url,
            "WARC-Warcinfo-ID": self._warcinfo,
            "WARC-IP-Address": address,
            "WARC-Block-Digest": _digest(message),
            "WARC-Payload-Digest": _digest(payload),
        }
        self._write("response", message, "application/http; msgtype=response", headers)

    def _write(self, kind: str, block: bytes, content_type: str, headers: dict[str, str]) -> str:
        seed = f"{self._name}\0{self._count}\0{headers.get('WARC-Target-URI', '')}"
        record_id = f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, seed)}>"
        lines = {"WARC-Type": kind, "WARC-Date": self._date, "WARC-Record-ID": record_id, **headers}
        lines |= {"Content-Type": content_type, "Content-Length": str(len(block))}
        head = "WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
        self._file.write(gzip.compress(head.encode() + block + b"\r\n\r\n", _COMPRESSION, mtime=0))
        self._count += 1
        return record_id


def _digest(data: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(data, usedforsecurity=False).digest()).decode()
