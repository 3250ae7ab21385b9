"""The live page in a real browser: one question per screen, zoom, keyboard, a telephone, the dark, hostile texts."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.watched import HOSTILE, WatchedRun
from tests.web.seen import SeenPage

from ingot.schema.run_folder import RunFolder

from .conftest import WIDE

PHONE = {"width": 400, "height": 860}
TOKEN = "a-token-of-the-test"
QUESTIONS = ("learning", "fast", "healthy", "cost")


class Servers:
    """Starts pages of runs, each in a thread."""

    def __init__(self):
        self._started = []

    def __call__(self, *roots: Path) -> str:
        """Start the page of these runs and return its address, with the token."""
        import uvicorn

        from ingot.watch.live import LiveRun
        from ingot.watch.web.app import make_app

        listening = socket.create_server(("127.0.0.1", 0))
        app = make_app([LiveRun(root) for root in roots], token=TOKEN)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        self._started.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the page's server does not start"
            time.sleep(0.02)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/?token={TOKEN}"

    def stop(self) -> None:
        for server, thread in self._started:
            server.should_exit = True
            thread.join(10)
        self._started.clear()


@pytest.fixture
def serve(browser):
    servers = Servers()
    yield servers
    servers.stop()


class WatchVisit(SeenPage):
    """A window with the live page."""

    def open(self, question: str = "learning") -> None:
        self.page.goto(self.address)
        self.ask(question)

    def ask(self, question: str) -> None:
        """Show a question, and wait until its charts and chapters are there."""
        self.page.click(f"#questions a[href='#{question}']")
        self.page.wait_for_selector(f"#questions a[href='#{question}'][aria-current=page]")
        self.page.wait_for_selector("#chapters section")
        self.until(
            "[...document.querySelectorAll('#charts figure:not([hidden]) .plot')]"
            ".every((box) => box.querySelector('canvas'))"
        )

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. (Playwright's own waits need eval, which the page forbids.)"""
        deadline = time.monotonic() + 30
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(50)

    def turn(self, *, away: bool) -> None:
        """Turn to another tab, or back to this one."""
        self.page.evaluate(
            """(hidden) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            away,
        )

    def picture(self, name: str) -> None:
        if folder := os.environ.get("INGOT_SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.fixture
def visit_runs(browser):
    """`visit_runs(address, viewport, **options)` opens a fresh window. At its end nothing may have been complained of,
    and nothing asked of other hosts."""
    visits = []

    def start(address: str, viewport=WIDE, **options) -> WatchVisit:
        context = browser.new_context(viewport=viewport, **options)
        visits.append((context, WatchVisit(context.new_page(), address)))
        return visits[-1][1]

    yield start
    for context, seen in visits:
        context.close()
        assert not seen.complaints
        assert not [url for url in seen.requests if not url.startswith(seen.address.partition("/?")[0])]


@pytest.mark.parametrize(("name", "viewport"), [("wide", WIDE), ("phone", PHONE)])
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_question_fits_its_screen(serve, visit_runs, tmp_path, name, viewport, scheme):
    seen = visit_runs(serve(WatchedRun().write(tmp_path / "run")), viewport, color_scheme=scheme)
    seen.open()
    assert "token" not in seen.page.url
    for question in QUESTIONS:
        seen.ask(question)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == viewport["width"], question
        assert seen.page.locator("#charts figure:visible").count() >= 1, question
        seen.picture(f"watch-{question}-{name}-{scheme}")
    assert seen.page.locator("#trouble *").count() == 0


def test_what_happens_is_shown_without_a_reload(serve, visit_runs, tmp_path):
    root = WatchedRun(ended=200, back=None).write(tmp_path / "run")
    seen = visit_runs(serve(root))
    seen.open()
    seen.page.wait_for_selector("#connection[data-state=on]")
    assert "step 200 of 600" in seen.page.inner_text("#subtitle")
    more = [event for event in WatchedRun(ended=260, back=None).events() if event.get("step", 0) > 200]
    with RunFolder(root).events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in more)
    seen.until("document.getElementById('subtitle').innerText.includes('step 260 of 600')")
    shown = f"{WatchedRun().loss(260):.4f}"
    seen.until(f"document.getElementById('tiles').innerText.includes('{shown}')")
    back = {"kind": "rolled_back", "time": 1.78e9, "from_step": 260, "to_step": 220, "reason": "guard", "why": "",
            "passed_over": []}  # fmt: skip
    with RunFolder(root).events.open("a") as file:
        file.write(json.dumps(back) + "\n")
    seen.page.wait_for_selector("#chart-loss .legend:has-text('rolled back')")
    seen.ask("healthy")
    assert "rolled back to the checkpoint of step 220" in seen.page.inner_text("#chapter-incidents")


def test_what_comes_while_a_chart_is_asked_for_is_not_lost(serve, visit_runs, tmp_path):
    root = WatchedRun(ended=200, back=None).write(tmp_path / "run")
    seen = visit_runs(serve(root))
    held = []
    seen.page.route("**/api/chart?key=speed**", lambda route: held.append((route, route.fetch())))
    seen.page.goto(f"{seen.address}#fast")
    seen.page.wait_for_selector("#connection[data-state=on]")
    while not held:
        seen.page.wait_for_timeout(20)
    log = RunFolder(root).events
    more = [event for event in WatchedRun(ended=210, back=None, slow=None).events() if event.get("step", 0) > 200]
    log.write_text(log.read_text() + "".join(json.dumps(event) + "\n" for event in more))
    seen.until("document.getElementById('subtitle').innerText.includes('step 210 of 600')")
    for route, answer in held:
        assert answer.json()["lines"][0]["x"][-1] == 200
        route.fulfill(response=answer)
    newest = next(event["tokens_per_second"] for event in reversed(more) if event["kind"] == "progress")
    seen.until(f"document.querySelector('#chart-speed .last').textContent === '{newest / 1000:.2f}k'")


def test_a_hidden_page_holds_no_connection_and_catches_up(serve, visit_runs, tmp_path):
    root = WatchedRun(ended=200, back=None).write(tmp_path / "run")
    address = serve(root)
    hidden, other = visit_runs(address), visit_runs(address)
    for seen in (hidden, other):
        seen.open()
        seen.page.wait_for_selector("#connection[data-state=on]")
    hidden.turn(away=True)
    hidden.page.wait_for_selector("#connection[data-state=wait]")
    with RunFolder(root).events.open("a") as file:
        more = WatchedRun(ended=260, back=None, slow=None).events()
        file.writelines(json.dumps(event) + "\n" for event in more if event.get("step", 0) > 200)
    other.until("document.getElementById('subtitle').innerText.includes('step 260')")
    assert "step 200" in hidden.page.inner_text("#subtitle")
    hidden.turn(away=False)
    hidden.until("document.getElementById('subtitle').innerText.includes('step 260')")
    hidden.page.wait_for_selector("#connection[data-state=on]")


def test_a_page_that_is_refused_says_why_and_tries_again(serve, visit_runs, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.watch.web.app.MOST_PAGES", 0)
    seen = visit_runs(serve(WatchedRun().write(tmp_path / "run")))
    seen.page.clock.install()
    seen.page.goto(seen.address)
    seen.page.wait_for_selector("#trouble :text('0 pages are open')")
    monkeypatch.setattr("ingot.watch.web.app.MOST_PAGES", 1000)
    seen.page.clock.fast_forward(11_000)
    seen.page.wait_for_selector("#connection[data-state=on]")
    seen.until("!document.getElementById('trouble').innerText")
    assert all("503" in text for text in seen.complaints)
    seen.complaints.clear()  # the browser itself logs an answer of status 503


def test_zoom_asks_for_every_point_and_keys_move_the_cursor(serve, visit_runs, tmp_path):
    seen = visit_runs(serve(WatchedRun().write(tmp_path / "run")))
    seen.open()
    box = seen.page.locator("#chart-loss .u-over").bounding_box()
    y = box["y"] + box["height"] / 2
    seen.page.mouse.move(box["x"] + box["width"] * 0.4, y)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    with seen.page.expect_response(lambda answer: "key=loss" in answer.url and "last=" in answer.url) as answer:
        seen.page.mouse.up()
    chart = answer.value.json()
    raw = next(line for line in chart["lines"] if line["style"] == "raw")
    assert raw["x"] == list(range(raw["x"][0], raw["x"][-1] + 1)) and 70 <= len(raw["x"]) <= 90
    assert seen.page.locator("#spans [data-own]").count() == 1
    seen.page.focus("#chart-loss .plot")
    seen.page.keyboard.press("ArrowLeft")
    assert "step" in seen.page.inner_text("#chart-loss .tip")
    seen.page.keyboard.press("Escape")
    seen.page.wait_for_selector("#spans [data-own]", state="detached")
    seen.until("document.querySelector('#chart-loss .plot').ariaLabel.includes('steps 1 to 400')")
    seen.page.focus("#chart-loss .plot")
    seen.page.keyboard.press("Home")
    seen.page.wait_for_selector("#chart-loss .tip:visible")
    for key in ["PageDown"] * 12 + ["ArrowRight"] * 9:
        seen.page.keyboard.press(key)
    assert "step 250: fault: rank 1 was killed (SIGKILL)" in seen.page.inner_text("#chart-loss .tip")


def test_several_runs_are_compared_and_one_is_chosen(serve, visit_runs, tmp_path):
    roots = [
        WatchedRun(name=name, level=level, back=None).write(tmp_path / name)
        for name, level in (("small", 3.4), ("medium", 3.0), ("large", 2.6))
    ]
    seen = visit_runs(serve(*roots))
    seen.open()
    assert seen.page.locator("#runs tbody tr").count() == 3
    legend = seen.page.inner_text("#chart-loss .legend")
    *lines, note = [line for line in legend.split("\n") if line]
    assert lines == ["small", "held-out loss", "medium", "large"] and note.startswith("no expected loss for 1.25M")
    seen.page.click("#runs button:has-text('large')")
    assert "large" in seen.page.inner_text("#subtitle")
    seen.picture("watch-several")


def test_texts_of_a_run_are_never_markup(serve, visit_runs, tmp_path):
    seen = visit_runs(serve(WatchedRun(hostile=True).write(tmp_path / "run")))
    seen.page.on("dialog", lambda dialog: seen.complaints.append(f"dialog {dialog.message}"))
    seen.open()
    for question in QUESTIONS:
        seen.ask(question)
        seen.page.evaluate("document.querySelectorAll('#chapters details').forEach((one) => (one.open = true))")
        assert seen.page.locator("main img, main script").count() == 0
    seen.ask("learning")
    assert HOSTILE in seen.page.inner_text("#chapters")
    assert seen.page.locator(".legend li", has_text="onerror").count() >= 1


def test_a_page_without_the_token_shows_nothing(serve, browser, tmp_path):
    address = serve(WatchedRun().write(tmp_path / "run")).partition("?")[0]
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(address)
    assert answer.status == 401
    assert "demo" not in page.content()
    context.close()


def test_the_page_says_when_the_server_is_gone(serve, browser, tmp_path):
    context = browser.new_context()
    seen = WatchVisit(context.new_page(), serve(WatchedRun().write(tmp_path / "run")))
    seen.open()
    seen.page.wait_for_selector("#connection[data-state=on]")
    serve.stop()
    seen.page.wait_for_selector("#connection[data-state=off]")
    assert "trying again" in seen.page.inner_text("#connection")
    context.close()
