"""The server of the live page: static files, and runs under /api. It is read-only, and requests cannot name files.

    GET /                     the page; with token=TOKEN, the way in
    GET /api/runs             the runs with their states, and the charts and questions that there are
    GET /api/chart?key=KEY    a chart; runs=0,2: of these runs; first, last: steps; pixels: its width; in the answer,
                              versions: of the runs, as in events, to see which events it has
    GET /api/chapters?run=0   the chapters of a run
    GET /api/events           server-sent events: what is new, as it comes

Errors are JSON {found, rule, fix} with status 4xx or 5xx. Two threads make answers; equal requests at the same time get
the same answer, so that many pages cost as much as one.
"""

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from ingot.errors import UsageError
from ingot.watch.chapters import chapters
from ingot.watch.charts import chart
from ingot.watch.drawn import QUESTIONS
from ingot.watch.kinds import CHARTS
from ingot.watch.live import LiveRun
from ingot.watch.web.as_json import chapters_json, chart_json, encoded
from ingot.watch.web.hub import MOST_PAGES, Hub
from ingot.web.design import STATIC as SHARED
from ingot.web.errors import error_handlers
from ingot.web.guards import LOOPBACK, OnlyHere, SecurityHeaders, TokenGate

STATIC = Path(__file__).parent / "static"
_EVENTS = "/api/events"
_THREADS = 2
_MOST_WAITING = 64
_KEPT_ANSWERS = 256
_LEAST_PIXELS, _MOST_PIXELS, _PIXEL_STEP = 100, 8000, 100
_MOST_STEP = 10**15


def make_app(
    runs: Sequence[LiveRun], *, token: str, cookie: str = "ingot-watch", hosts: Sequence[str] = LOOPBACK
) -> Starlette:
    """Return the server application for `runs`. Only who has `token` gets anything. cookie: the name of the cookie that
    holds it. hosts: the host names that requests may have (ingot/web/guards.py)."""
    hub = Hub(runs)
    answers = _Answers(hub)

    @contextlib.asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(hub.pump)
            yield
            group.cancel_scope.cancel()

    async def events(request: Request) -> Response:
        if hub.pages >= MOST_PAGES:
            raise HTTPException(503, f"{MOST_PAGES:,} pages are open; close some, and load this one again")
        return StreamingResponse(hub.listen(), media_type="text/event-stream")

    async def page(request: Request) -> Response:
        hub.page_opens()
        return FileResponse(STATIC / "index.html")

    routes = [
        Route("/", page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Mount("/shared", StaticFiles(directory=SHARED)),
        Route("/api/runs", answers.endpoint(_runs)),
        Route("/api/chart", answers.endpoint(_chart)),
        Route("/api/chapters", answers.endpoint(_chapters)),
        Route(_EVENTS, events),
    ]
    middleware = [
        Middleware(_AnswersFirst, hub=hub),
        Middleware(SecurityHeaders),
        Middleware(OnlyHere, hosts=hosts),
        Middleware(TokenGate, token=token, cookie=cookie),
    ]
    handlers = error_handlers(
        "the page failed to read this run; the terminal of `ingot watch --web` shows where",
        "report it with the traceback",
    )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=running)
    app.state.end_streams = hub.end
    return app


class _AnswersFirst:
    """Middleware that reports to the hub that an answer is being made; a stream of events is none."""

    def __init__(self, app: ASGIApp, hub: Hub):
        self._app, self._hub = app, hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _EVENTS:
            with self._hub.answering():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@dataclass
class _Making:
    """An answer that is being made. answer: None until then, and if that fails."""

    ended: anyio.Event
    answer: bytes | None = None


class _Answers:
    """Makes answers in a few threads, each once for all requests that are equal while nothing has changed."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self._limiter: anyio.CapacityLimiter | None = None
        self._kept: OrderedDict[tuple, bytes] = OrderedDict()  # of one version
        self._kept_version: tuple[int, ...] = ()
        self._made: dict[tuple, _Making] = {}

    def endpoint(self, work: Callable[[Hub, Request], object]):
        """Return the endpoint whose answer is the JSON of what `work` returns."""

        async def answer(request: Request) -> Response:
            version = self._hub.version
            if version != self._kept_version:
                self._kept.clear()
                self._kept_version = version
            key = (request.url.path, request.url.query, version)
            found = self._kept.get(key)
            while found is None and (making := self._made.get(key)):
                await making.ended.wait()
                found = making.answer
            if found is None:
                found = await self._make(key, work, request)
            return Response(found, media_type="application/json")

        return answer

    async def _make(self, key: tuple, work: Callable[[Hub, Request], object], request: Request) -> bytes:
        if self._limiter is None:  # made here, because a limiter needs the running event loop
            self._limiter = anyio.CapacityLimiter(_THREADS)
        if self._limiter.statistics().tasks_waiting >= _MOST_WAITING:
            raise HTTPException(503, "too many requests are waiting; try again later")
        self._made[key] = making = _Making(anyio.Event())
        try:
            made = await anyio.to_thread.run_sync(lambda: encoded(work(self._hub, request)), limiter=self._limiter)
            making.answer = made
            if key[-1] == self._kept_version:
                self._kept[key] = made
            while len(self._kept) > _KEPT_ANSWERS:
                self._kept.popitem(last=False)
            return made
        finally:
            del self._made[key]
            making.ended.set()


def _runs(hub: Hub, request: Request) -> dict:
    found = []
    for number, run in enumerate(hub.runs):
        with run.lock:
            found.append(hub.head(number) | {"version": run.version})
    kinds = {key: {"title": kind.title, "unit": kind.unit, "question": kind.question} for key, kind in CHARTS.items()}
    return {"runs": found, "questions": QUESTIONS, "kinds": kinds, "charts": hub.keys()}


def _chart(hub: Hub, request: Request) -> dict:
    asked = request.query_params
    numbers = [_number("runs", word, 0, len(hub.runs) - 1) for word in asked.get("runs", "0").split(",")][:100]
    order = list(dict.fromkeys(numbers))
    runs = [hub.runs[number] for number in order]
    first = _number("first", asked.get("first", "1"), 0, _MOST_STEP)
    last = _number("last", asked["last"], 0, _MOST_STEP) if "last" in asked else None
    pixels = _number("pixels", asked.get("pixels", "1000"), 1, _MOST_PIXELS)
    pixels = max(-(-pixels // _PIXEL_STEP) * _PIXEL_STEP, _LEAST_PIXELS)
    with hub.locked(order):
        found = chart(runs, key := asked.get("key", ""), first, last, pixels)
        versions = {str(number): hub.runs[number].version for number in order}
    if found is None:
        raise UsageError(
            "E-WATCH-CHART",
            f"there is no chart {key[:40]!r}",
            rule="/api/runs lists the keys of charts",
            fix="use one of them",
            key=key[:40],
        )
    answer = chart_json(found)
    for part in (*answer["lines"], *answer["bands"], *answer["marks"]):
        part["run"] = order[part["run"]]
    return answer | {"versions": versions}


def _chapters(hub: Hub, request: Request) -> list[dict]:
    run = hub.runs[_number("run", request.query_params.get("run", "0"), 0, len(hub.runs) - 1)]
    with run.lock:
        return chapters_json(chapters(run))


def _number(name: str, text: str, least: int, most: int) -> int:
    """Return the number of a query. Raises UsageError for another text."""
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise UsageError(
        "E-WATCH-NUMBER",
        f"{name}={text[:20]} is not a number that {name} can be",
        rule=f"{name} is a whole number from {least:,} to {most:,}",
        fix=f"use {name}={least}",
        name=name,
        given=text[:20],
    )
