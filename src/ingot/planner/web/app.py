"""The page's server: static files, and the planner under /api. It stores nothing, and requests cannot name files.

    GET /                     the page
    GET /api/options          models, devices, typical clusters
    GET /api/plan?STATE       a plan; moved=KEY names the setting that the user changed last
    GET /api/fixes?STATE      single changes with which the plan fits
    GET /api/search?STATE     the best layouts; keep=tp,pp leaves these settings unchanged
    GET /api/timeline?STATE   the simulated pipeline; window=step|start|end
    GET /api/compare?a=&b=    two plans, each a STATE
    GET /api/run.toml?STATE   the run file

STATE means the pairs KEY=VALUE of a link. Errors are JSON {found, rule, fix} with status 4xx. A few threads compute
plans; each search runs in its own process.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from ingot.planner.show.layout import layout_text
from ingot.planner.show.plans import format_days
from ingot.planner.web import answers
from ingot.planner.web.answers import PagePlan, model_of
from ingot.planner.web.choices import fixes, options
from ingot.planner.web.pictures import WINDOWS, picture
from ingot.planner.web.searching import best_layouts, read_keep
from ingot.planner.web.settings import FIELDS, PageSettings, read_settings
from ingot.planner.web.views import bubble, verdict, view
from ingot.schema.plan import Plan
from ingot.theory.failures import DAY_SECONDS
from ingot.units import format_bytes, format_count, format_seconds, format_usd
from ingot.web.design import STATIC as SHARED
from ingot.web.errors import error_handlers
from ingot.web.guards import LOOPBACK, SecurityHeaders

STATIC = Path(__file__).parent / "static"
_THREADS = 2
_MOST_WAITING = 16
_MOST_SEARCHES = 4  # each occupies one core


def make_app(hosts: tuple[str, ...] = LOOPBACK) -> Starlette:
    """Return the server application.

    hosts: the host names that requests may have ("*": any). Other names are refused, because a foreign web page could
    otherwise send its visitors' browsers here under its own host name (DNS rebinding).
    """
    desk = _WorkQueue()
    routes = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Mount("/shared", StaticFiles(directory=SHARED)),
        Route("/api/options", _json(desk, lambda request: options())),
        Route("/api/plan", _json(desk, _plan)),
        Route("/api/fixes", _json(desk, _fixes)),
        Route("/api/search", _search(desk)),
        Route("/api/timeline", _json(desk, _timeline)),
        Route("/api/compare", _json(desk, _compare)),
        Route("/api/run.toml", _run_file(desk)),
    ]
    middleware = [
        Middleware(SecurityHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=[h.strip("[]") for h in hosts]),
    ]
    handlers = error_handlers(
        "the planner failed on these settings; the terminal of `ingot plan --web` shows where",
        "report it with the link",
    )
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class _WorkQueue:
    """A limit on concurrent work: a few threads with a bounded queue, and a maximum number of searches."""

    def __init__(self):
        self._limiter: anyio.CapacityLimiter | None = None
        self._searches = 0

    @contextmanager
    def searching(self) -> Iterator[None]:
        if self._searches >= _MOST_SEARCHES:
            raise HTTPException(503, "too many searches are running; try again when one has ended")
        self._searches += 1
        try:
            yield
        finally:
            self._searches -= 1

    async def do(self, work: Callable, *arguments):
        if self._limiter is None:  # made here, because a limiter needs the running event loop
            self._limiter = anyio.CapacityLimiter(_THREADS)
        if self._limiter.statistics().tasks_waiting >= _MOST_WAITING:
            raise HTTPException(503, "too many requests are waiting; try again later")
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self._limiter)


def _json(desk: _WorkQueue, work: Callable[[Request], dict | list]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(await desk.do(work, request))

    return endpoint


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _pairs(request: Request, *other: str) -> list[tuple[str, str]]:
    """Return the (key, text) pairs of the query without the keys `other`, which are not settings."""
    return [(key, text) for key, text in request.query_params.multi_items() if key not in other]


def _settled(request: Request, *other: str) -> PageSettings:
    return answers.settled(read_settings(_pairs(request, *other)))


def _plan(request: Request) -> dict:
    moved = request.query_params.get("moved", "")
    if moved and moved not in FIELDS:
        raise UsageError(
            "E-PAGE-SETTING",
            f"moved={moved[:20]} is not a setting",
            rule=f"settings are {', '.join(FIELDS)}",
            fix="use the name of a setting",
            setting=moved[:20],
        )
    asked = read_settings(_pairs(request, "moved"))
    return view(answers.answer(answers.settled(asked, moved)), asked)


def _fixes(request: Request) -> list[dict]:
    asked = read_settings(_pairs(request))
    return fixes(answers.answer(answers.settled(asked)), asked)


def _timeline(request: Request) -> dict:
    window = request.query_params.get("window", WINDOWS[0])
    if window not in WINDOWS:
        raise UsageError(
            "E-PAGE-WINDOW",
            f"there is no window {window[:20]!r}",
            rule=f"windows are {', '.join(WINDOWS)}",
            fix=f"use window={WINDOWS[0]}",
            window=window[:20],
        )
    settings = _settled(request, "window")
    return picture(answers.answer(settings).run, answers.timeline_of(settings), window, instead=bool(settings.mfu))


def _compare(request: Request) -> dict:
    keys = sorted({key for key, _ in request.query_params.multi_items()})
    if keys != ["a", "b"]:
        raise UsageError(
            "E-PAGE-COMPARE",
            f"the keys of this comparison are {', '.join(keys)[:60] or 'missing'}",
            rule="a comparison has exactly two plans, a and b",
            fix="use a=STATE&b=STATE",
        )
    a, b = (_state_of(request.query_params[name]) for name in ("a", "b"))
    return comparison(answers.answer(a), answers.answer(b))


def _state_of(query: str) -> PageSettings:
    return answers.settled(read_settings(parse_qsl(query, keep_blank_values=True, max_num_fields=len(FIELDS))))


def _run_file(desk: _WorkQueue):
    async def endpoint(request: Request) -> Response:
        text = await desk.do(lambda: answers.run_file(_settled(request)))
        return Response(
            text,
            media_type="application/toml",
            headers={"Content-Disposition": 'attachment; filename="run.toml"'},
        )

    return endpoint


def _search(desk: _WorkQueue):
    async def endpoint(request: Request) -> Response:
        settings, keep = read_settings(_pairs(request, "keep")), read_keep(request.query_params.get("keep", ""))
        answers.settled(settings)  # reports errors of the settings before a process is started
        with desk.searching():
            found = await _while_open(request, settings, keep)
        return JSONResponse(found) if found is not None else Response(status_code=499)  # the client closed the request

    return endpoint


async def _while_open(request: Request, settings: PageSettings, keep: tuple[str, ...]) -> dict | None:
    """Return the result of a search. If the client closes the request, stop the search and return None."""
    outcome: list[dict | IngotError] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_until_closed, request, group)
        try:
            outcome.append(await best_layouts(settings, keep))
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


# -- two plans side by side --


@dataclass(frozen=True)
class _Figure:
    """A figure of a plan. better: -1 if smaller values are better, 1 if larger ones are, 0 if neither."""

    label: str
    text: str
    value: float
    better: int


def comparison(a: PagePlan, b: PagePlan) -> dict:
    """Return the rows of the comparison: first settings that differ, then figures with the change from a to b."""
    rows = [_row(label, x, y, "", 0) for label, x, y in _settings(a, b)]
    if a.plan and b.plan:
        rows += [_change(x, y) for x, y in zip(_figures(a, a.plan), _figures(b, b.plan), strict=True)]
    problems = {name: [m for _, m in found.problems] for name, found in (("a", a), ("b", b)) if found.problems}
    return {"rows": rows, "problems": problems}


def _settings(a: PagePlan, b: PagePlan) -> Iterator[tuple[str, str, str]]:
    """Yield (label, text for a, text for b) for each setting that differs."""
    for label, say in _WORDS.items():
        if say(a) != say(b):
            yield label, say(a), say(b)
    for key in _FORMS:
        before, after = getattr(a.settings, key), getattr(b.settings, key)
        if before != after:
            yield key.replace("_", " "), str(before) or "-", str(after) or "-"


_FORMS = ("micro_batch", "zero", "recompute", "schedule", "stages_per_rank", "context", "offload", "recipe")
_WORDS: dict[str, Callable[[PagePlan], str]] = {
    "model": lambda found: model_of(found.settings).name,
    "cluster": lambda found: found.cluster.name,
    "sequence": lambda found: f"{found.settings.seq:,} tokens",
    "batch": lambda found: f"{found.settings.batch:,} sequences",
    "tokens": lambda found: format_count(found.settings.tokens),
    "price": lambda found: f"${found.settings.price or found.cluster.usd_per_hour:g} per hour",
    "given MFU": lambda found: f"{found.settings.mfu:g}" if found.settings.mfu else "-",
    "given failures": lambda found: f"{found.settings.failures:g}" if found.settings.failures else "-",
    "layout": lambda found: layout_text(found.run),
}


def _figures(found: PagePlan, plan: Plan) -> list[_Figure]:
    speed = plan.tokens_per_step / plan.step_seconds if plan.step_seconds else 0.0
    days, usd = plan.total_seconds / DAY_SECONDS, plan.usd
    if plan.outlook:
        days = plan.outlook.days
        usd = sum(plan.outlook.usd_by_kind.values()) or usd
    exposed = sum(line.exposed_seconds for line in plan.communication.values())
    rows = [
        _Figure("memory per device", format_bytes(plan.total_memory_bytes), plan.total_memory_bytes, -1),
        _Figure("step", format_seconds(plan.step_seconds), plan.step_seconds, -1),
        _Figure("tokens/s", format_count(speed), speed, 1),
        _Figure("MFU", f"{plan.mfu or 0.0:.1%}", plan.mfu or 0.0, 1),
        _Figure("bubble", f"{bubble(plan):.1%}", bubble(plan), -1),
        _Figure("exposed communication", format_seconds(exposed), exposed, -1),
        _Figure("duration", format_days(days), days, -1),
        _Figure("cost", format_usd(usd) if usd else "-", usd, -1),
    ]
    fits = verdict(found.run, plan)["fits"]
    return [_Figure("fits", "yes" if fits else "no", float(fits), 1), *rows]


def _change(a: _Figure, b: _Figure) -> dict:
    change = ""
    if a.label != "fits" and a.value and b.value:
        ratio = b.value / a.value - 1
        change = f"{ratio:+.1%}" if abs(ratio) >= 5e-4 else "same"
    judged = 0 if a.value == b.value or change == "same" else (1 if b.value > a.value else -1) * a.better
    return _row(a.label, a.text, b.text, change, judged)


def _row(label: str, a: str, b: str, change: str, judged: int) -> dict:
    return {"label": label, "a": a, "b": b, "change": change, "judged": judged}
