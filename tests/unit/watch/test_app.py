"""The server of the live page: what it answers, what it refuses, and what it sends to pages that listen."""

import hashlib
import json
import re
from pathlib import Path
from typing import ClassVar

import anyio
import pytest
from tests.watched import WatchedRun

import ingot.watch.web
from ingot.schema.run_folder import RunFolder
from ingot.watch.live import LiveRun

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")
pytest.importorskip("httpx2", reason="needs httpx2, which asks the server")

TOKEN = "a-token-of-the-test"
STATIC = Path(ingot.watch.web.__file__).parent / "static"
VENDORED = {  # name -> SHA-256, of uPlot 1.6.32
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("watch")
    return [
        WatchedRun().write(folder / "a"),
        WatchedRun(name="b", back=None, metrics=False).write(folder / "b"),
    ]


@pytest.fixture
def stranger(roots):
    """A client without the token."""
    from starlette.testclient import TestClient

    from ingot.watch.web.app import make_app

    app = make_app([LiveRun(root).read_all() for root in roots], token=TOKEN, hosts=("127.0.0.1", "localhost"))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(stranger):
    stranger.get(f"/?token={TOKEN}")
    return stranger


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger):
    answer = stranger.get(f"/?token={TOKEN}", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert stranger.get("/").status_code == 200
    assert stranger.get("/api/runs").status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/shared/base.css", "/api/runs", "/api/chart?key=loss",
                                  "/api/chapters", "/api/events", "/nowhere"])  # fmt: skip
@pytest.mark.parametrize("wrong", [{}, {"authorization": "Bearer nonsense"}, {"cookie": f"other={TOKEN}"},
                                   {"cookie": "ingot-watch=\u00e4"}])  # fmt: skip
def test_without_the_token_there_is_nothing(stranger, path, wrong):
    answer = stranger.get(path, headers={name: value.encode() for name, value in wrong.items()})
    assert answer.status_code == 401
    assert "token" in answer.json()["found"]
    assert "demo" not in answer.text


def test_a_wrong_token_in_the_address_is_refused(stranger):
    for token in ("", "nonsense", TOKEN[:-1], TOKEN + "x", "%ff"):
        assert stranger.get(f"/?token={token}", follow_redirects=False).status_code == 401
    assert stranger.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 400),
        ({"host": "127.0.0.1.evil.example"}, 400),
        ({"host": "localhost:8738"}, 200),
        ({"host": "192.168.7.9:8738"}, 200),
        ({"host": "[::1]:8738"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
    ],
)
def test_other_sites_are_kept_out(client, headers, status):
    assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}", **headers}).status_code == status


def test_the_page_is_read_only(client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


def test_every_answer_has_the_security_headers(client):
    for path in ("/", "/static/main.js", "/api/runs", "/nowhere"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_runs_charts_and_chapters(client):
    found = client.get("/api/runs").json()
    assert [run["name"] for run in found["runs"]] == ["demo", "b"]
    assert list(found["questions"]) == ["learning", "fast", "healthy", "cost"]
    chart = client.get("/api/chart?key=loss&runs=1&pixels=300").json()
    assert {line["run"] for line in chart["lines"]} == {1}
    chart = client.get("/api/chart?key=loss&runs=1,0&first=100&last=120").json()
    assert {line["run"] for line in chart["lines"]} == {0, 1}
    assert all(100 <= step <= 120 for line in chart["lines"] for step in line["x"])
    anchors = {chapter["anchor"] for chapter in client.get("/api/chapters?run=0").json()}
    assert {"ranks", "incidents"} <= anchors


@pytest.mark.parametrize(
    "query",
    ["key=nonsense", "key=loss&runs=2", "key=loss&runs=", "key=loss&runs=-1", "key=loss&first=x",
     "key=loss&last=99999999999999999999", "key=loss&pixels=0", "key=loss&pixels=1e9", "key=loss&runs=\u0663"],
)  # fmt: skip
def test_wrong_questions_are_refused(client, query):
    answer = client.get(f"/api/chart?{query}")
    assert answer.status_code == 400
    assert set(answer.json()) == {"found", "rule", "fix"}


def test_files_beside_the_page_are_not_served(client):
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/shared/../guards.py", "/events.jsonl"):
        assert client.get(path).status_code == 404


def test_a_failure_shows_no_traceback(client, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr("ingot.watch.web.app.chapters", broken)
    answer = client.get("/api/chapters")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret of the machine" in capsys.readouterr().err


def test_nothing_of_the_page_points_elsewhere_or_writes_markup():
    own = [file for file in STATIC.iterdir() if file.name not in VENDORED and not file.name.startswith("LICENSE")]
    assert {file.name for file in own} >= {"index.html", "main.js", "charts.js", "blocks.js", "page.css"}
    for file in own:
        text = re.sub(r"^\s*//.*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not re.search(r"(https?:)?//[a-z]", text.replace("http://www.w3.org/2000/svg", "")), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
        assert not re.search(r"<[^>]+\son\w+=|<style|style=", text), file


def test_uplot_is_the_one_that_was_published():
    for name, digest in VENDORED.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (STATIC / "LICENSE-uPlot").read_text()
    assert not re.search(r"innerHTML|\beval\(|new Function|document\.write", (STATIC / "uPlot.iife.min.js").read_text())


def test_every_script_and_style_is_there(client):
    wanted = re.findall(r'(?:src|href)="(/[^"]+)"', client.get("/").text)
    for script in STATIC.glob("*.js"):
        text = script.read_text(encoding="utf-8")
        wanted += [f"/static/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        wanted += re.findall(r'from "(/shared/[^"]+)"', text)
    assert len(wanted) > 10
    for path in wanted:
        assert client.get(path).status_code == 200, path


# -- events --


def news(hub) -> dict:
    message = hub.look()
    assert message.startswith(b"data: ") and message.endswith(b"\n\n")
    return json.loads(message[6:])


def test_pages_get_what_is_new(tmp_path):
    from ingot.watch.web.hub import Hub

    root = WatchedRun(ended=100, back=None, slow=None).write(tmp_path / "run")
    hub = Hub([LiveRun(root).read_all()])
    assert news(hub)["runs"][0]["again"] is True
    assert hub.look() == b""
    step = {"kind": "step", "time": 1.78e9, "step": 101, "loss": float("nan"), "grad_norm": 1.0, "lr": 0.1}
    with RunFolder(root).events.open("a") as file:
        file.write(json.dumps(step) + "\n")
    (own,) = news(hub)["runs"]
    assert own["again"] is False
    assert own["new"] == {"steps": {"step": [101], "loss": [None], "grad_norm": [1.0], "lr": [0.1]}}
    assert own["head"]["step"] == 101
    with RunFolder(root).events.open("a") as file:
        file.writelines(json.dumps({**step, "step": 102 + n}) + "\n" for n in range(600))
    assert news(hub)["runs"][0]["again"] is True


def test_a_look_that_fails_is_shown_by_its_run_and_the_others_go_on(roots, monkeypatch, capsys):
    from ingot.watch.web.hub import Hub

    hub = Hub([LiveRun(root).read_all() for root in roots])
    hub.look()
    with monkeypatch.context() as patch:
        patch.setattr(hub.runs[0], "refresh", lambda: 1 / 0)
        hub.runs[1].version += 1
        first, second = news(hub)["runs"]
        assert "ZeroDivisionError" in first["head"]["note"] and first["head"]["step"] == 400
        assert second["run"] == 1 and second["head"]["figures"]
        assert hub.head(0)["note"] == first["head"]["note"]  # also for a page that opens now
        assert "1 / 0" in capsys.readouterr().err
        assert hub.look() == b"" and capsys.readouterr().err == ""  # reported once
    (own,) = news(hub)["runs"]
    assert own["again"] is True and own["version"] >= first["version"] and own["head"]["note"] == ""


def test_the_pump_goes_on_after_a_look_that_failed(roots, monkeypatch, capsys):
    from ingot.watch.web import hub as module

    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    hub = module.Hub([LiveRun(roots[0])])
    looks = iter([RuntimeError("of the test"), RuntimeError("of the test"), b"data: 1\n\n"])

    def look() -> bytes:
        found = next(looks, b"")
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(hub, "look", look)

    async def play() -> list[bytes]:
        page = hub.listen()
        found = [await anext(page)]
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(hub.pump)
                found += [await anext(page), await anext(page)]
                group.cancel_scope.cancel()
        return found

    _, trouble, message = anyio.run(play)
    assert trouble.startswith(b"event: trouble\n") and b"RuntimeError" in trouble
    assert message == b"data: 1\n\n"
    assert capsys.readouterr().err.count("RuntimeError: of the test") == 1


def test_an_unread_rest_that_cannot_be_read_is_no_busy_loop(roots, monkeypatch):
    from ingot.watch.web import hub as module

    hub = module.Hub([LiveRun(roots[0])])
    looks = []
    monkeypatch.setattr(hub, "look", lambda: looks.append(1) or b"")
    monkeypatch.setattr(LiveRun, "unread", 0.5)

    async def play() -> None:
        with anyio.move_on_after(0.5):
            await hub.pump()

    anyio.run(play)
    assert len(looks) == 1


def test_all_threads_take_the_locks_of_runs_in_one_order(roots):
    from starlette.requests import Request

    from ingot.watch.web.app import _chart
    from ingot.watch.web.hub import Hub

    hub = Hub([LiveRun(root).read_all() for root in roots])
    for number, run in enumerate(hub.runs):
        run.lock = SeenLock(run.lock, number)
    SeenLock.taken.clear()
    found = _chart(hub, Request({"type": "http", "query_string": b"key=loss&runs=1,0"}))
    assert SeenLock.taken == [0, 1]
    assert found["versions"] == {"0": hub.runs[0].version, "1": hub.runs[1].version}
    hub.keys()
    assert SeenLock.taken == [0, 1, 0, 1]


class SeenLock:
    """A lock that notes when it is taken."""

    taken: ClassVar[list[int]] = []

    def __init__(self, lock, number: int):
        self._lock, self._number = lock, number

    def acquire(self) -> None:
        self.taken.append(self._number)
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error) -> None:
        self.release()


def test_one_message_goes_to_every_page_and_slow_pages_are_let_go(tmp_path):
    from ingot.watch.web import hub as module

    hub = module.Hub([LiveRun(WatchedRun(ended=10, back=None, slow=None).write(tmp_path / "run"))])

    async def play() -> None:
        pages = [hub.listen() for _ in range(500)]
        for page in pages:
            await anext(page)
        assert hub.pages == 500
        hub._send(b"data: 1\n\n")
        assert {await anext(page) for page in pages[1:]} == {b"data: 1\n\n"}
        for _ in range(module._WAITING_MESSAGES):
            hub._send(b"data: 2\n\n")
            for page in pages[1:]:
                await anext(page)
        assert hub.pages == 499  # the first one has read nothing
        for page in pages:
            await page.aclose()
        assert hub.pages == 0

    anyio.run(play)


def test_more_pages_than_the_limit_are_refused_clearly(client, monkeypatch):
    monkeypatch.setattr("ingot.watch.web.app.MOST_PAGES", 0)
    answer = client.get("/api/events")
    assert answer.status_code == 503
    assert "pages are open" in answer.json()["found"]


def test_equal_requests_at_the_same_time_are_answered_once(roots, monkeypatch):
    from starlette.requests import Request

    from ingot.watch.web.app import _Answers
    from ingot.watch.web.hub import Hub

    made = []
    answers = _Answers(Hub([LiveRun(roots[0]).read_all()]))
    endpoint = answers.endpoint(lambda hub, request: made.append(1) or {"a": 1})
    scope = {"type": "http", "method": "GET", "path": "/api/runs", "query_string": b"", "headers": [],
             "server": ("127.0.0.1", 80), "scheme": "http"}  # fmt: skip

    async def play() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(500):
                group.start_soon(endpoint, Request(scope))

    anyio.run(play)
    assert made == [1]


def test_answers_of_older_versions_are_not_kept(roots):
    from starlette.requests import Request

    from ingot.watch.web.app import _Answers
    from ingot.watch.web.hub import Hub

    hub = Hub([LiveRun(roots[0]).read_all()])
    answers = _Answers(hub)
    endpoint = answers.endpoint(lambda hub, request: hub.version)
    scope = {"type": "http", "method": "GET", "path": "/api/runs", "query_string": b"", "headers": [],
             "server": ("127.0.0.1", 80), "scheme": "http"}  # fmt: skip

    async def play() -> None:
        for _ in range(3):
            hub.runs[0].version += 1
            await endpoint(Request(scope))
            assert list(answers._kept.values()) == [f"[{hub.runs[0].version}]".encode()]

    anyio.run(play)
