"""A proxy on loopback that puts the faults of tests/http_faults.py in front of a real S3 server, whatever it is.

It forwards what it gets byte for byte, with the client's signature: the server gets torn bodies, wrong bits, requests
that come twice, and those that its client has given up. No server can be ordered to be late with its listings or to
store other bytes: for "stale" the proxy gives an earlier answer to the same listing, and "other-bytes" is "wrong-bit".
"""

import http.client
from urllib.parse import urlsplit

from tests.http_faults import Fault, FaultyHandler, FaultyServer, changed, xml_of

_CHANGES = ("PUT", "END", "DELETE")
_OF_A_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
_SECONDS = 120.0  # without an answer of the server


class FaultProxy(FaultyServer):
    """A proxy in front of the S3 server with the client's variables `variables`, from `with` to its end.

    bytes_sent: of the bodies that the server got, also in part.
    """

    handler: "type[_Proxy]"

    def __init__(self, variables: dict[str, str], *faults: Fault):
        self._variables = variables
        address = urlsplit(variables["AWS_ENDPOINT_URL"])
        assert address.hostname and address.port
        self.server = (address.hostname, address.port)
        self.bytes_sent = self.changes = 0
        self.listings: dict[str, list[tuple[int, bytes]]] = {}  # path -> (changes before it, its answer), in order
        super().__init__(*faults)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds the server through this proxy."""
        return self._variables | {"AWS_ENDPOINT_URL": self.endpoint}

    def repeated(self) -> int:
        """Return how many of the requests that a fault struck were asked again."""
        asked = {call: self.calls.count(call) for call in self.calls}
        struck = [entry.partition(" at ")[2] for entry in self.failed]
        return sum(min(struck.count(call), asked[call] - 1) for call in {*struck})


class _Proxy(FaultyHandler):
    s3: FaultProxy

    def _execute(self, call, bucket, key, query, body, fault):
        do, is_listing = fault.do if fault else "", call.startswith("LIST ")
        if do == "stale" and is_listing:
            return 200, self._listed_before(fault.changes), {"Content-Type": "application/xml"}
        number, answer, headers = self._asked(changed(body) if do == "other-bytes" else body)
        with self.s3.lock:
            if is_listing and number == 200:
                self.s3.listings.setdefault(self.path, []).append((self.s3.changes, answer))
            self.s3.changes += call.partition(" ")[0] in _CHANGES and number < 300
        return number, answer, headers

    def _listed_before(self, changes: int) -> bytes:
        """Return the newest answer to this listing from before the last `changes` changes; without one, that there was
        nothing."""
        with self.s3.lock:
            known = self.s3.listings.get(self.path, ())
            old = [answer for before, answer in known if before <= self.s3.changes - changes]
        return old[-1] if old else xml_of("ListBucketResult", "<IsTruncated>false</IsTruncated>")

    def _asked(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Send the request on. Returns the answer of the server: its status, body and headers."""
        link = self._sent(body)
        try:
            found = link.getresponse()
            answer = found.read()
        except http.client.HTTPException as error:
            raise ConnectionResetError from error
        finally:
            link.close()
        headers = {name: value for name, value in found.getheaders() if name.lower() not in _OF_A_HOP}
        if self.command == "HEAD":
            headers["Content-Length"] = found.getheader("Content-Length") or "0"
        return found.status, answer, headers

    def _sent(self, body: bytes) -> http.client.HTTPConnection:
        """Open a connection to the server, and send the request with `body`, which may be a part of it."""
        link = http.client.HTTPConnection(*self.s3.server, timeout=_SECONDS)
        link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "connection":
                link.putheader(name, value)
        link.endheaders(body or None)
        with self.s3.lock:
            self.s3.bytes_sent += len(body)
        return link

    def _torn(self, half: bytes) -> None:
        self._sent(half).close()


FaultProxy.handler = _Proxy
