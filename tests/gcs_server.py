"""Google Cloud Storage for tests: its XML protocol, as far as it differs from that of S3 (tests/s3_server.py).

By https://cloud.google.com/storage/docs/xml-api/reference-headers: a token in place of a signature, generations of
objects, `x-goog-if-generation-match: 0` for an object that must be new, and objects in parts whose tags are no hashes.
"""

import zlib

from tests.s3_server import Handler, S3Server, Stored, error_of

TOKEN = "t0k3n-of-the-tests"


class _GoogleHandler(Handler):
    def _serve(self, call, bucket, key, query, fault) -> None:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            super()._serve(call, bucket, key, query, fault)
        else:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(401, error_of("AuthenticationRequired"))

    @property
    def only_new(self) -> bool:
        return self.headers.get("x-goog-if-generation-match") == "0"

    @staticmethod
    def tag_of(parts: list[Stored]) -> str:
        return f"CJ{len(parts)}EAE="

    def _answer(self, number: int, body: bytes = b"", headers: dict | None = None, *, half: bool = False) -> None:
        headers = dict(headers or {})
        if "ETag" in headers:
            headers["x-goog-generation"] = str(zlib.crc32(headers["ETag"].encode()))
        super()._answer(number, body, headers, half=half)


class GoogleServer(S3Server):
    """A server of the bucket `s3_server.BUCKET` on a free port, from `with` to its end."""

    handler = _GoogleHandler
    secret_variable = "GOOGLE_BEARER_TOKEN"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds this server."""
        return {"GOOGLE_BASE_URL": super().environment["AWS_ENDPOINT_URL"], self.secret_variable: TOKEN}
