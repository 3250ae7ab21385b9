"""The page's server: static files, and the planner behind /api. It keeps nothing, and reads no file for a request.

    GET /                     the page
    GET /api/options          models, devices, typical clusters
    GET /api/plan?STATE       a plan; moved=KEY says which setting was moved last
    GET /api/fixes?STATE      single changes with which it fits
    GET /api/search?STATE     the best layouts; keep=tp,pp: of those with these settings
    GET /api/timeline?STATE   the simulated pipeline; window=step|start|end
    GET /api/compare?a=&b=    two plans, each a STATE
    GET /api/run.toml?STATE   the run file

Errors are JSON {found, rule, fix} with status 4xx. Work is done in threads, a few at a time; a search in a process.
"""

import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ingot.errors import IngotError, UsageError
from ingot.planner.web import answers
from ingot.planner.web.compare import comparison
from ingot.planner.web.fixes import fixes
from ingot.planner.web.options import options
from ingot.planner.web.pictures import WINDOWS, picture
from ingot.planner.web.protect import Headers
from ingot.planner.web.searching import best_layouts, read_keep
from ingot.planner.web.state import FIELDS, State, read_state
from ingot.planner.web.views import view

STATIC = Path(__file__).parent / "static"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_THREADS = 2
_MOST_WAITING = 16
_MOST_SEARCHES = 4  # each has a core of its own


def make_app(hosts: tuple[str, ...] = LOOPBACK) -> Starlette:
    """hosts: names under which browsers may ask for it ("*": any); others could be pages that aim at this machine."""
    desk = _Desk()
    routes = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/options", _json(desk, lambda request: options())),
        Route("/api/plan", _json(desk, _plan)),
        Route("/api/fixes", _json(desk, _fixes)),
        Route("/api/search", _search(desk)),
        Route("/api/timeline", _json(desk, _timeline)),
        Route("/api/compare", _json(desk, _compare)),
        Route("/api/run.toml", _run_file(desk)),
    ]
    middleware = [Middleware(Headers), Middleware(TrustedHostMiddleware, allowed_hosts=[h.strip("[]") for h in hosts])]
    handlers = {IngotError: _refused, HTTPException: _no_such_thing, Exception: _broken}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]


class _Desk:
    """Work for threads: a few at a time, and a queue that does not grow without end; and as few searches."""

    def __init__(self):
        self._limiter: anyio.CapacityLimiter | None = None
        self._searches = 0

    @contextmanager
    def searching(self) -> Iterator[None]:
        if self._searches >= _MOST_SEARCHES:
            raise HTTPException(503, "too many searches are under way; try again when one has ended")
        self._searches += 1
        try:
            yield
        finally:
            self._searches -= 1

    async def do(self, work: Callable, *arguments):
        if self._limiter is None:  # it belongs to the event loop, which runs by now
            self._limiter = anyio.CapacityLimiter(_THREADS)
        if self._limiter.statistics().tasks_waiting >= _MOST_WAITING:
            raise HTTPException(503, "too many requests wait already")
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self._limiter)


def _json(desk: _Desk, work: Callable[[Request], dict | list]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(await desk.do(work, request))

    return endpoint


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _pairs(request: Request, *besides: str) -> list[tuple[str, str]]:
    return [(key, text) for key, text in request.query_params.multi_items() if key not in besides]


def _settled(request: Request, *besides: str) -> State:
    return answers.settled(read_state(_pairs(request, *besides)))


def _plan(request: Request) -> dict:
    moved = request.query_params.get("moved", "")
    if moved and moved not in FIELDS:
        raise UsageError("moved is no setting", rule=f"settings are {', '.join(FIELDS)}")
    asked = read_state(_pairs(request, "moved"))
    return view(answers.answer(answers.settled(asked, moved)), asked)


def _fixes(request: Request) -> list[dict]:
    asked = read_state(_pairs(request))
    return fixes(answers.answer(answers.settled(asked)), asked)


def _timeline(request: Request) -> dict:
    window = request.query_params.get("window", WINDOWS[0])
    if window not in WINDOWS:
        raise UsageError(f"there is no window {window[:20]!r}", rule=f"windows are {', '.join(WINDOWS)}")
    state = _settled(request, "window")
    return picture(answers.answer(state).run, answers.timeline_of(state), window, instead=bool(state.mfu))


def _compare(request: Request) -> dict:
    if {key for key, _ in request.query_params.multi_items()} != {"a", "b"}:
        raise UsageError("a comparison has two plans", rule="a=STATE&b=STATE")
    a, b = (_state_of(request.query_params[name]) for name in ("a", "b"))
    return comparison(answers.answer(a), answers.answer(b))


def _state_of(query: str) -> State:
    return answers.settled(read_state(parse_qsl(query, keep_blank_values=True, max_num_fields=len(FIELDS))))


def _run_file(desk: _Desk):
    async def endpoint(request: Request) -> Response:
        text = await desk.do(lambda: answers.run_file(_settled(request)))
        return Response(
            text,
            media_type="application/toml",
            headers={"Content-Disposition": 'attachment; filename="run.toml"'},
        )

    return endpoint


def _search(desk: _Desk):
    async def endpoint(request: Request) -> Response:
        state, keep = read_state(_pairs(request, "keep")), read_keep(request.query_params.get("keep", ""))
        answers.settled(state)  # what is wrong with it is said before a process is started
        with desk.searching():
            found = await _while_open(request, state, keep)
        return JSONResponse(found) if found is not None else Response(status_code=499)  # nobody reads it

    return endpoint


async def _while_open(request: Request, state: State, keep: tuple[str, ...]) -> dict | None:
    """What a search finds, which ends with its request: a page that has moved on closes it."""
    outcome: list[dict | IngotError] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_until_closed, request, group)
        try:
            outcome.append(await best_layouts(state, keep))
        except IngotError as error:
            outcome.append(error)
        group.cancel_scope.cancel()
    if outcome and isinstance(outcome[0], IngotError):
        raise outcome[0]
    return outcome[0] if outcome else None  # type: ignore[return-value]


async def _until_closed(request: Request, group) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    group.cancel_scope.cancel()


async def _refused(request: Request, error: IngotError) -> Response:
    return JSONResponse({"found": error.found, "rule": error.rule, "fix": error.fix}, status_code=400)


async def _no_such_thing(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"found": str(error.detail), "rule": "", "fix": ""}, status_code=error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    """The page gets no traceback; the terminal does."""
    traceback.print_exception(error, file=sys.stderr)
    found = "the planner failed on these settings; the terminal of `ingot plan --web` shows where"
    return JSONResponse({"found": found, "rule": "", "fix": "report it with the link"}, status_code=500)
