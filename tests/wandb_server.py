"""A stub of the server of Weights & Biases on loopback: as much of its GraphQL and file stream as an online run and
`wandb sync` of wandb 0.31 ask for. It keeps the rows of each run by their offsets, as the real one does."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


class WandbServer:
    """The stub, and all that it got. runs: the name of a run -> its rows by their offsets. about: the variables of the
    UpsertBucket calls of each run. exit_codes: of each run that is complete. asked: the operations, in order. keys: by
    the end of a path, the values of the header Authorization. url: its address."""

    def __init__(self, url: str):
        self.url = url
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.exit_codes: dict[str, int] = {}
        self.asked: list[str] = []
        self.keys: dict[str, set[str]] = {}

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of a run in the order of their offsets."""
        return [row for _, row in sorted(self.runs.get(run, {}).items())]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of GraphQL."""
        query, given = asked["query"], asked.get("variables") or {}
        operation = query.split("{")[0].split("(")[0].split()[-1]
        self.asked.append(operation)
        run, entity = str(given.get("name")), {"id": "e", "name": "me"}
        if operation == "Viewer":
            viewer = {"id": "v", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        if operation == "RunResumeStatus":
            bucket = self._bucket(run) if run in self.about else None
            return {"model": {"id": "p", "name": given.get("project"), "entity": entity, "bucket": bucket}}
        if operation == "UpsertBucket":
            is_new = run not in self.about
            self.about[run] = self.about.get(run, {}) | {name: one for name, one in given.items() if one is not None}
            project = {"id": "p", "name": given.get("project"), "entity": entity}
            return {"upsertBucket": {"bucket": self._bucket(run) | {"project": project}, "inserted": is_new}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}} if operation == "ServerFeaturesQuery" else {}

    def _bucket(self, run: str) -> dict[str, Any]:
        own, rows = self.about[run], self.rows(run)
        counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        tail = json.dumps([json.dumps(row) for row in rows[-1:]])
        return counts | {
            "id": "b", "name": run, "displayName": own.get("displayName", run), "description": "", "sweepName": None,
            "config": own.get("config", "{}"), "summaryMetrics": own.get("summaryMetrics", "{}"), "historyTail": tail,
            "eventsTail": "[]", "tags": [], "notes": "", "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """Take in a message of the file stream of a run."""
        history = (sent.get("files") or {}).get(HISTORY)
        for number, line in enumerate(history["content"] if history else ()):
            self.runs.setdefault(run, {})[history["offset"] + number] = json.loads(line)
        if sent.get("complete"):
            self.exit_codes[run] = sent["exitcode"]


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve the stub while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            server.keys.setdefault(self.path.split("/")[-1], set()).add(self.headers.get("Authorization", ""))
            found: dict[str, Any] = {}
            if self.path.endswith("/graphql"):
                found = {"data": server.answer(json.loads(body))}
            elif self.path.endswith("/file_stream"):
                server.stream(self.path.split("/")[-2], json.loads(body))
            self._send(json.dumps(found).encode())

        def do_PUT(self) -> None:
            self._body()
            self._send(b"")

        def do_GET(self) -> None:
            self._send(b"{}")

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = WandbServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
