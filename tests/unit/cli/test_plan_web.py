"""`ingot plan --web`: the way to the page."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from tests.expect import reported

from ingot.cli.main import main

pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")


@pytest.fixture
def started():
    """`started(*options)`: the page in a process of its own, and its first line."""
    processes = []

    def start(*options):
        command = [
            sys.executable,
            "-c",
            "import sys; from ingot.cli.main import main; sys.exit(main())",
            "plan",
            "--web",
        ]
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_page_is_served_here_alone_until_it_is_interrupted(started):
    process, answer = started("--model", "llama3-70b", "--cluster", "16x8xh100", "--tp", "8", "--tokens", "1.5T")
    assert answer["url"].startswith(f"http://127.0.0.1:{answer['port']}/?")
    assert "tp=8" in answer["url"]
    with urllib.request.urlopen(answer["url"], timeout=30) as page:
        assert b"ingot planner" in page.read()
    query = answer["url"].partition("?")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{answer['port']}/api/plan?{query}", timeout=30) as page:
        assert json.load(page)["state"]["tokens"] == 1_500_000_000_000
    elsewhere = socket.socket()
    elsewhere.settimeout(1)
    with pytest.raises(OSError):
        elsewhere.connect((_other_address(), answer["port"]))
    elsewhere.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    assert process.stderr.read() == ""


def _other_address() -> str:
    """Return the network address of this machine; skip the test if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no address but its own")
    if address.startswith("127."):
        pytest.skip("this machine has no address but its own")
    return address


@pytest.mark.parametrize(
    ("options", "code", "facts"),
    [
        (["--port", "80"], "E-WEB-OPTION-ALONE", {}),
        (["--web", "--port", "65536"], "E-OPTION-RANGE", {"option": "port", "value": 65536}),
        (["--web", "--host", "nowhere.invalid"], "E-WEB-HOST", {"host": "nowhere.invalid"}),
        (["--web", "--host", "a..b"], "E-WEB-HOST", {"host": "a..b"}),
        (["--web", "--model", "gpt-17", "--port", "0"], "E-MODEL-UNKNOWN", {"given": "gpt-17"}),
        (["--web", "--cluster", "8xh1000", "--port", "0"], "E-DEVICE-UNKNOWN", {"given": "h1000"}),
        (["--web", "--run", "run.toml", "--port", "0"], "E-WEB-OPTION", {"options": ["--run"]}),
        (["--web", "--pin", "async_tp=true", "--port", "0"], "E-WEB-OPTION", {"options": ["--pin"]}),
    ],
)
def test_what_it_cannot_do_is_refused_at_once(options, code, facts, capsys):
    assert main(["plan", *options, "--json"]) == 2
    reported(capsys.readouterr().out, code, **facts)


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["plan", "--web", "--port", str(taken.getsockname()[1])]) == 3
    assert "E-WEB-PORT" in capsys.readouterr().err


def test_without_the_part_it_says_which_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["plan", "--web", "--port", "0", "--json"]) == 3
    reported(capsys.readouterr().out, "E-PART-MISSING", package="starlette", part="web")


def test_the_page_needs_no_torch():
    code = "import sys, ingot.planner.web.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=60).returncode == 0
