"""`ingot watch`: the way to the live page."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from tests.expect import reported
from tests.watched import WatchedRun

from ingot.cli.main import main
from ingot.schema.run_folder import RunFolder

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")


@pytest.fixture
def run(tmp_path):
    return WatchedRun(ended=120, back=None).write(tmp_path / "run")


@pytest.fixture
def serve(run):
    """Start the page in a process of its own, after the lines `before`: (process, address, token)."""
    processes = []

    def start(before: str = ""):
        code = f"import sys\n{before}\nfrom ingot.cli.main import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "watch", str(run), "--web", "--port", "0", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        answer = json.loads(process.stdout.readline())
        assert answer["url"].startswith(f"http://127.0.0.1:{answer['port']}/?token=")
        base, _, token = answer["url"].partition("/?token=")
        return process, base, token

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def served(serve):
    return serve()


def ask(base: str, path: str, token: str = ""):
    request = urllib.request.Request(f"{base}{path}", headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, timeout=60)


def test_the_page_is_served_with_its_token_until_it_is_interrupted(served):
    process, base, token = served
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(base, "/api/runs")
    assert refused.value.code == 401
    with ask(base, "/api/events", token) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.readline() == b"retry: 2000\n"
        with ask(base, "/api/runs", token) as page:
            assert json.load(page)["runs"][0]["name"] == "demo"
        process.send_signal(signal.SIGINT)  # while a page listens
        assert process.wait(120) == 0
    assert process.stderr.read() == ""


_SLOW = """
import time
import ingot.watch.web.app as app
from ingot.cli.terminal import Terminal
app.chapters = lambda run: time.sleep(120) or []
Terminal.say = lambda terminal, text="": text.startswith("ended") and print(text, flush=True)  # with --json, too
"""


@pytest.mark.slow
def test_an_answer_that_takes_long_does_not_keep_an_interrupted_page(serve):
    process, base, token = serve(_SLOW)
    asking = threading.Thread(target=_ask_in_vain, args=(base, token), daemon=True)
    asking.start()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    lines = process.stdout.read().splitlines()
    assert process.stderr.read() == "" and lines == ["ended     before an answer to the page was ready"]


def _ask_in_vain(base: str, token: str) -> None:
    with contextlib.suppress(OSError):
        ask(base, "/api/chapters?run=0", token)


@pytest.mark.slow
def test_five_hundred_pages_hear_of_a_new_step(served, run):
    _, base, token = served
    host, _, port = base.removeprefix("http://").partition(":")
    head = f"GET /api/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    with contextlib.ExitStack() as held:
        pages = [held.enter_context(socket.create_connection((host, int(port)), timeout=120)) for _ in range(500)]
        for page in pages:
            page.sendall(head)
        for page in pages:
            read_until(page, b"retry: 2000")
        step = {"kind": "step", "time": 1.79e9, "step": 121, "loss": 2.25, "grad_norm": 1.0, "lr": 0.1}
        with RunFolder(run).events.open("a") as file:
            file.write(json.dumps(step) + "\n")
        for page in pages:
            read_until(page, b'"step":121')
        with ask(base, "/api/runs", token) as answer:
            assert json.load(answer)["runs"][0]["step"] == 121


def read_until(page: socket.socket, wanted: bytes) -> None:
    found = b""
    while wanted not in found:
        added = page.recv(1 << 16)
        assert added, found[-500:]
        found += added


def test_without_web_it_shows_the_state(run, capsys):
    run = run.rename(run.with_name("my run"))
    assert main(["watch", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "demo" in shown and "step 120 of 600" in shown and f"ingot watch '{run}' --web" in shown


@pytest.mark.parametrize(
    ("options", "status", "code", "facts"),
    [
        (["nowhere"], 2, "E-RUN-FOLDER", {"run": "nowhere"}),
        (["nowhere", "--web"], 2, "E-RUN-FOLDER", {"run": "nowhere"}),
        (["nowhere", "--port", "80"], 2, "E-WEB-OPTION-ALONE", {}),
        (["nowhere", "--every", "60"], 2, "E-WATCH-EVERY", {"option": "--json"}),
        (["nowhere", "--every", "60", "--web"], 2, "E-WATCH-EVERY", {"option": "--web"}),
        (["nowhere"] * 51, 2, "E-WATCH-RUNS", {"runs": 51}),
    ],
)
def test_what_it_cannot_show_is_refused(options, status, code, facts, capsys):
    assert main(["watch", *options, "--json"]) == status
    reported(capsys.readouterr().out, code, **facts)
