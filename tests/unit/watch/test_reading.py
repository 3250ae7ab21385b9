"""The reading of a long log while pages ask: answers come first."""

import anyio
import pytest
from tests.watched import WatchedRun

from ingot.watch import live
from ingot.watch.live import LiveRun

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")


def test_a_long_log_is_read_on_when_the_answers_are_made(tmp_path, monkeypatch):
    from ingot.watch.web import hub as module

    monkeypatch.setattr(live, "_READ_BYTES", 5000)
    monkeypatch.setattr(module, "_READ_SECONDS", 60.0)
    monkeypatch.setattr(module, "_OPENING_SECONDS", 60.0)
    hub = module.Hub([run := LiveRun(WatchedRun().write(tmp_path / "run"))])

    async def play() -> float:
        async with anyio.create_task_group() as group:
            hub.page_opens()
            with hub.answering(), anyio.fail_after(20):
                group.start_soon(hub.pump)
                while not run.unread:
                    await anyio.sleep(0.01)
                await anyio.sleep(0.1)
                left = run.unread
            with anyio.fail_after(20):
                while run.unread:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        return left

    left = anyio.run(play)
    assert left > 0.9  # one look of 5,000 bytes, however long the answer takes
    assert run.last_step == 400


def test_requests_count_as_answers_and_a_stream_of_events_does_not(tmp_path):
    from ingot.watch.web.app import make_app

    app = make_app([LiveRun(WatchedRun(ended=20).write(tmp_path / "run"))], token="t")
    (middleware,) = [own for own in app.user_middleware if "hub" in own.kwargs]
    hub, seen = middleware.kwargs["hub"], []
    hub.page_opens()

    async def answer(scope, receive, send) -> None:
        seen.append(hub.is_opening)

    for path in ("/api/events", "/", "/api/chart"):
        anyio.run(middleware.cls(answer, hub=hub), {"type": "http", "path": path}, None, None)
    assert seen == [False, True, True]


def test_only_a_page_that_opens_keeps_the_reader_waiting(tmp_path, monkeypatch):
    from starlette.testclient import TestClient

    from ingot.watch.web import hub as module
    from ingot.watch.web.app import make_app

    monkeypatch.setattr(module, "_AFTER_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(module, "_OPENING_SECONDS", 60.0)
    app = make_app([LiveRun(WatchedRun(ended=20).write(tmp_path / "run"))], token="t")
    (hub,) = [own.kwargs["hub"] for own in app.user_middleware if "hub" in own.kwargs]
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.get("/")
        client.get("/api/runs", headers={"authorization": "Bearer t"})
        assert not hub.is_opening  # the first request had no token
        client.get("/?token=t")
        assert hub.is_opening
