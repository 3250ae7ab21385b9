"""`ingot watch`: the way to the live page."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from tests.expect import reported
from tests.watched import WatchedRun

from ingot.cli.main import main

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return WatchedRun(ended=120, back=None).write(tmp_path_factory.mktemp("watch") / "run")


def test_the_page_is_served_with_its_token_until_it_is_interrupted(run):
    code = "import sys; from ingot.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(run), "--web", "--port", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        answer = json.loads(process.stdout.readline())
        assert answer["url"].startswith(f"http://127.0.0.1:{answer['port']}/?token=")
        base, _, token = answer["url"].partition("/?token=")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/api/runs", timeout=30)
        assert refused.value.code == 401
        asked = urllib.request.Request(f"{base}/api/events", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=30) as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            assert events.readline() == b"retry: 2000\n"
            asked = urllib.request.Request(f"{base}/api/runs", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(asked, timeout=30) as page:
                assert json.load(page)["runs"][0]["name"] == "demo"
            process.send_signal(signal.SIGINT)  # while a page listens
            assert process.wait(120) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_without_web_it_shows_the_state(run, capsys):
    assert main(["watch", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "demo" in shown and "step 120/600" in shown and "--web" in shown


@pytest.mark.parametrize(
    ("options", "status", "code", "facts"),
    [
        (["nowhere"], 2, "E-RUN-FOLDER", {"run": "nowhere"}),
        (["nowhere", "--web"], 2, "E-RUN-FOLDER", {"run": "nowhere"}),
        (["nowhere", "--port", "80"], 2, "E-WEB-OPTION-ALONE", {}),
        (["nowhere"] * 51, 2, "E-WATCH-RUNS", {"runs": 51}),
    ],
)
def test_what_it_cannot_show_is_refused(options, status, code, facts, capsys):
    assert main(["watch", *options, "--json"]) == status
    reported(capsys.readouterr().out, code, **facts)
