"""An S3 server for tests, in memory, with faults by script: one bucket, path style, any credentials.

It enforces `If-None-Match: *`, compares each body with the hash that its client signed, and gives the tags of S3 (the
MD5 of an object; for a multipart upload the MD5 of the MD5s of its parts). Real stores fail as the faults do;
docs/design/checkpoints.md has the table.
"""

import hashlib
import re
import time
from typing import NamedTuple
from xml.sax.saxutils import escape, unescape

from tests.http_faults import Fault as Fault
from tests.http_faults import FaultyHandler, FaultyServer, changed, error_of, md5, xml_of

BUCKET = "bucket"
SECRET = "s3cr3t-of-the-tests"
KEY = "AKIA0123456789TESTS0"
_SHA256 = re.compile("[0-9a-f]{64}")


class Stored(NamedTuple):
    """An object. modified: as S3 prints it."""

    data: bytes
    tag: str
    modified: str


class S3Server(FaultyServer):
    """A server of the bucket BUCKET on a free port of this machine, from `with` to its end."""

    handler: "type[Handler]"

    def __init__(self, *faults: Fault, page: int = 1000):
        self.page = page
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, Stored]] = {}
        self.ended_uploads: dict[str, tuple[int, bytes, dict[str, str]]] = {}  # upload -> its answer
        self.history: list[dict[str, Stored]] = [{}]
        super().__init__(*faults)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds this server."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self.endpoint}

    def put(self, key: str, data: bytes, tag: str, *, new: bool) -> bool:
        """Store an object. Returns False if `new` and there is one."""
        with self.lock:
            if new and key in self.objects:
                return False
            self.objects[key] = Stored(data, tag, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
            self.history.append(dict(self.objects))
            return True

    def delete(self, key: str) -> None:
        with self.lock:
            self.objects.pop(key, None)
            self.history.append(dict(self.objects))

    def back_to(self, changes: int) -> None:
        """Return to the objects that there were after the first `changes` changes, also in late listings."""
        with self.lock:
            del self.history[changes + 1 :]
            self.objects = dict(self.history[changes])

    def listed(self, changes: int) -> dict[str, Stored]:
        """Return the objects as they were before the last `changes` changes."""
        with self.lock:
            return self.history[max(0, len(self.history) - 1 - changes)]


class Handler(FaultyHandler):
    s3: S3Server

    def _execute(self, call, bucket, key, query, body, fault):
        if bucket != BUCKET:
            return 404, error_of("NoSuchBucket"), {}
        signed = self.headers.get("x-amz-content-sha256", "")
        if _SHA256.fullmatch(signed) and signed != hashlib.sha256(body).hexdigest():
            return 400, error_of("XAmzContentSHA256Mismatch"), {}
        return getattr(self, f"_{call.partition(' ')[0].lower()}")(key, query, body, fault)

    def _get(self, key, query, body, fault):
        if key not in self.s3.objects:
            return 404, error_of("NoSuchKey"), {}
        found = self.s3.objects[key]
        headers = {"ETag": f'"{found.tag}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or len(found.data)), len(found.data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
            return 206, found.data[first : last + 1], headers
        return 200, found.data, headers

    def _head(self, key, query, body, fault):
        number, data, headers = self._get(key, query, body, fault)
        return number, b"", headers | {"Content-Length": str(len(data))}

    def _put(self, key, query, body, fault):
        data = changed(body) if fault and fault.do == "other-bytes" else body
        return self._store(key, data, md5(data))

    @property
    def only_new(self) -> bool:
        """The request stores its object only if there is none of that name."""
        return self.headers.get("If-None-Match") == "*"

    def _store(self, key, data, tag, answer=b""):
        if not self.s3.put(key, data, tag, new=self.only_new):
            return 412, error_of("PreconditionFailed"), {}
        return 200, answer, {"ETag": f'"{tag}"'}

    def _delete(self, key, query, body, fault):
        """Remove the objects that a list names, as the library of ingot asks even for one, or the one of the path."""
        keys = [unescape(one) for one in re.findall("<Key>(.*?)</Key>", body.decode())]
        for one in keys or [key]:
            self.s3.delete(one)
        return 200, xml_of("DeleteResult", "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)), {}

    def _begin(self, key, query, body, fault):
        upload = f"upload-{len(self.s3.calls)}"
        self.s3.uploads[upload] = {}
        return 200, xml_of("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"), {}

    def _part(self, key, query, body, fault):
        if (parts := self.s3.uploads.get(query["uploadId"])) is None:
            return 404, error_of("NoSuchUpload"), {}
        data = changed(body) if fault and fault.do == "other-bytes" else body
        parts[int(query["partNumber"])] = Stored(data, md5(data), "")
        return 200, b"", {"ETag": f'"{md5(data)}"'}

    def _end(self, key, query, body, fault):
        upload = query["uploadId"]
        if upload in self.s3.ended_uploads:  # as Ceph and moto answer the same request again
            return self.s3.ended_uploads[upload]
        if (parts := self.s3.uploads.get(upload)) is None:
            return 404, error_of("NoSuchUpload"), {}
        wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        if wanted != sorted(parts):
            return 400, error_of("InvalidPart"), {}
        tag = self.tag_of([parts[number] for number in wanted])
        del self.s3.uploads[upload]
        whole = b"".join(parts[number].data for number in wanted)
        answer = xml_of("CompleteMultipartUploadResult", f"<ETag>&quot;{tag}&quot;</ETag>")
        self.s3.ended_uploads[upload] = self._store(key, whole, tag, answer)
        return self.s3.ended_uploads[upload]

    @staticmethod
    def tag_of(parts: list[Stored]) -> str:
        return f"{md5(b''.join(bytes.fromhex(part.tag) for part in parts))}-{len(parts)}"

    def _abort(self, key, query, body, fault):
        self.s3.uploads.pop(query["uploadId"], None)
        return 204, b"", {}

    def _list(self, key, query, body, fault):
        objects = self.s3.listed(fault.changes if fault and fault.do == "stale" else 0)
        after, prefix = query.get("continuation-token", query.get("start-after", "")), query.get("prefix", "")
        names = sorted(name for name in objects if name.startswith(prefix) and name > after)
        page, rest = names[: self.s3.page], names[self.s3.page :]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{objects[name].modified}</LastModified>"
            f"<ETag>&quot;{objects[name].tag}&quot;</ETag><Size>{len(objects[name].data)}</Size></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        return 200, xml_of("ListBucketResult", f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{rows}{more}"), {}


S3Server.handler = Handler
