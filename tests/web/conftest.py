"""A real browser on the real page: Chromium, driven by Playwright, at two widths.

Skipped where the browser or the parts are missing; `.ci/run` installs both. INGOT_CHROMIUM: its path, when it is
elsewhere. INGOT_SCREENSHOTS: a folder for pictures to look at.
"""

import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.web.seen import SeenPage

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync",
          "--disable-component-update", "--no-first-run")  # fmt: skip


def _chromium() -> str:
    """Return the path of Chromium, or skip with the reason; INGOT_REQUIRE_CHROMIUM turns the skip into a failure."""
    pytest.importorskip("playwright", reason="needs playwright: pip install 'ingot[test]'")
    pytest.importorskip("uvicorn", reason="needs the part web: pip install 'ingot[web]'")
    path = os.environ.get("INGOT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        (pytest.fail if os.environ.get("INGOT_REQUIRE_CHROMIUM") else pytest.skip)(
            "needs Chromium: apt install chromium"
        )
    return path


@pytest.fixture(scope="session")
def address():
    """The address of a server on this machine, in a thread, for the whole session."""
    _chromium()
    import uvicorn

    from ingot.planner.web.app import make_app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the page's server does not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = server.force_exit = True  # without waiting for connections that a browser left open
    thread.join(10)


@pytest.fixture(scope="module")  # its event loop runs in this thread: it ends before other tests start theirs
def browser():
    path = _chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=list(_QUIET))
        yield running
        running.close()


class Visit(SeenPage):
    """A window with the planner's page."""

    def open(self, query: str = "") -> None:
        self.page.goto(f"{self.address}/?{query}")
        self.settle()

    def settle(self) -> None:
        """Waits until a plan is shown and nothing is asked any more."""
        self.page.wait_for_selector("body:not(.asking) #plan[aria-busy=false]")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def picture(self, name: str, whole: bool = False) -> None:
        if folder := os.environ.get("INGOT_SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=whole)


@pytest.fixture
def visit(browser, address):
    """`visit(viewport=WIDE, **options)` opens a fresh window. At its end nothing may have been complained of, and
    nothing asked of other hosts."""
    visits = []

    def start(viewport=WIDE, **options) -> Visit:
        context = browser.new_context(viewport=viewport, **options)
        visits.append((context, Visit(context.new_page(), address)))
        return visits[-1][1]

    yield start
    for context, seen in visits:
        context.close()
        assert not seen.complaints
        assert not [url for url in seen.requests if not url.startswith(address)]
