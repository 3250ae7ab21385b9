"""The sink of W&B against a stub of its server: an online run, its second process, and `wandb sync`."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wandb_server import WandbServer, wandb_server

from ingot.schema.run_folder import RunFolder

from .planted import PlantedRun
from .test_trackers import fed, needs

KEY = "0123456789abcdef" * 3
LOSSES = [(1, 2.0, 0), (2, "inf", 0), (2, 3.0, 1), (3, 2.5, 1)]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The stub, which the processes that a test starts find by their environment."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with wandb_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("HOME", str(tmp_path))  # no settings and no key of a user
        yield found


def losses(server: WandbServer, run: str) -> list[tuple]:
    rows = [row for row in server.rows(run) if "train/loss" in row]
    return [(row["train/step"], row["train/loss"], row["run/attempt"]) for row in rows]


def expect_private(server: WandbServer, run: str) -> None:
    """Expect the key in its header, and no name of this machine, of a repository or of a commit."""
    own = {"Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()}
    assert server.keys["graphql"] == server.keys["file_stream"] == own
    about = server.about[run]
    assert not [name for name in ("host", "repo", "commit") if about.get(name)]


@needs("wandb")
def test_an_online_run_reaches_its_server_and_another_process_continues_it(tmp_path, server):
    folder = fed(tmp_path, "wandb")  # mode = "online" is the default
    (run,) = server.about
    assert run.startswith("x-") and server.about[run]["displayName"] == "x"
    assert losses(server, run) == LOSSES and server.exit_codes == {run: 0}
    config = json.loads(server.about[run]["config"])
    assert config["train.steps"]["value"] == 10
    assert any(row.get("sample/Once") == "upon a time" for row in server.rows(run))
    expect_private(server, run)
    assert server.about[run]["program"] == "ingot"  # and not the path of the process
    assert server.keys.keys() == {"graphql", "file_stream"}  # and no logs or metrics of W&B's client
    again(folder)
    assert losses(server, run) == [*LOSSES, (4, 2.25, 1)] and [*server.about] == [run]


def again(folder: RunFolder) -> None:
    """Feed the sink with another step, in a process of its own."""
    PlantedRun(folder).line(4, loss=2.25)
    command = [sys.executable, "-P", "-m", "ingot.observe.feed", str(folder.root)]
    assert subprocess.run(command, input=b"end\n", stdout=subprocess.PIPE, timeout=400).stdout == b""


@needs("wandb")
def test_wandb_sync_sends_an_offline_run(tmp_path, server):
    folder = fed(tmp_path, "wandb", "mode = 'offline'")
    assert not server.asked
    (path,) = folder.sinks.rglob("run-*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    command = [str(wandb), "sync", str(path.parent)]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout
    (run,) = server.about
    assert losses(server, run) == LOSSES
    expect_private(server, run)
