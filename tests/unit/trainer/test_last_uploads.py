"""The end of a run that waits for its last uploads: what it says, and what ends the wait."""

import math
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer import save
from ingot.trainer.checkpoint.uploader import Progress, Uploader
from ingot.trainer.resilience.stop_requests import StopRequest, StopRequests
from ingot.trainer.save import finish_uploads

URL, LONG = "s3://bucket/run", 30.0
STUCK = """echo '{"left": 2097152}'; exec sleep 60"""


def finish(root, script, requests, *, stopped=False, deadline=math.inf, rank=0, disks=()):
    """Wait for an uploader process that runs `script`; "": this rank has none. Returns (seconds, lines)."""
    uploader, lines = Uploader(RunFolder(root / "run"), 1) if script else None, []
    if uploader:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        uploader._process = subprocess.Popen(["sh", "-c", script], **pipes)
        uploader._reader = threading.Thread(target=uploader._read, args=(uploader._process.stdout,), daemon=True)
        uploader._reader.start()
    checkpoint = SimpleNamespace(remote=SimpleNamespace(url=URL), disks=disks)
    trainer = SimpleNamespace(
        uploader=uploader,
        stop_vote=SimpleNamespace(requests=requests),
        config=SimpleNamespace(checkpoint=checkpoint, launch=Launch()),
        folder=RunFolder(Path("runs/demo")),
        place=SimpleNamespace(is_first=rank == 0),
        log=lambda **event: None,
        event_log=SimpleNamespace(write=lambda **event: None),
        say=lines.append,
    )
    began = time.monotonic()
    try:
        finish_uploads(trainer, deadline, stopped=stopped)
    finally:
        if uploader:
            uploader.close()
    return time.monotonic() - began, lines


@pytest.fixture
def wait(tmp_path, monkeypatch):
    """`wait(script, requests)`: `finish` on a run's only rank, which reports soon that it waits."""
    monkeypatch.setattr(save, "_SILENT_SECONDS", 0.1)
    return lambda *args, **kwargs: finish(tmp_path, *args, **kwargs)


@pytest.mark.parametrize(
    ("left_out", "text"),
    [("", ""), (', "left_out": [5]', "1 older left out (step 5)"), (', "left_out": [5, 10]', "5 to 10")],
)
def test_the_line_of_an_upload_names_the_checkpoints_that_it_overtook(wait, left_out, text):
    about = (
        '"kind": "checkpoint_stored", "what": "full", "step": 20, "store": "s3://bucket/run", "bytes": 9, "seconds": 1'
    )
    _, (line,) = wait(f"""echo '{{{about}{left_out}}}'""", StopRequests())
    assert line.startswith("stored    step 20 ") and text in line and ("left out" in line) == bool(text)


@pytest.mark.parametrize("why", ["Ctrl-C", "launch.stop_after"])
def test_the_wait_is_announced_and_ends_with_a_request(wait, why):
    requests = StopRequests()
    if why == "Ctrl-C":
        requests = StopRequests(None, Launch(grace="10m"))
        threading.Timer(0.5, requests.ask, ("SIGINT",)).start()
    else:
        requests = StopRequests(None, Launch(stop_after="10s"), time.monotonic() - 9.5)
    seconds, lines = wait(STUCK, requests)
    announced, left_out = lines
    assert 0.4 < seconds < LONG and requests.is_ending
    assert "2.0 MiB left to send" in announced and URL in announced and "Ctrl-C" in announced
    assert left_out.endswith("ingot ckpt push runs/demo")


def test_a_scheduler_leaves_the_wait_its_grace(wait):
    requests = StopRequests()
    requests._first = StopRequest("SIGTERM", time.monotonic() + 1.5)
    assert 0.4 < wait(STUCK, requests)[0] < LONG


def test_the_request_by_which_the_run_stopped_does_not_end_the_wait(wait):
    requests = StopRequests()
    requests.ask("SIGINT")
    _, lines = wait("exec sleep 0.5", requests, stopped=True)
    (announced,) = lines
    assert announced.startswith("uploads") and "left to send" not in announced
    assert wait(STUCK, requests, stopped=True, deadline=time.monotonic() + 1.2)[0] < LONG


def test_a_short_wait_is_silent(wait, monkeypatch):
    monkeypatch.setattr(save, "_SILENT_SECONDS", LONG)
    assert wait("true", StopRequests())[1] == []


def on_a_node(rank, ranks, root, scripts, seconds_to_stop):
    """Wait as one of the nodes that upload their own files. Requests to stop arrive on rank 0 alone."""
    requests = StopRequests(None, Launch(grace="10m"))
    if rank == 0 and seconds_to_stop:
        threading.Timer(seconds_to_stop, requests.ask, ("SIGINT",)).start()
    return finish(root, scripts[rank], requests, rank=rank, disks=("/nvme0",))


def test_a_request_on_the_first_node_ends_the_wait_of_all_nodes(fork_ranks, tmp_path):
    scripts = ["true", "", STUCK]  # rank 1 is the second one of the first node, and uploads nothing
    waits = fork_ranks(on_a_node, 3, tmp_path, scripts, 0.5)
    assert all(0.4 < seconds < LONG for seconds, _ in waits)
    assert waits[0][1][-1].endswith("ingot ckpt push runs/demo")  # though all files of rank 0 are in the store


def test_no_node_ends_before_the_uploads_of_all_have_ended(fork_ranks, tmp_path):
    waits = fork_ranks(on_a_node, 3, tmp_path, ["true", "", "exec sleep 0.6"], 0.0)
    assert all(0.5 < seconds < LONG for seconds, _ in waits)
    assert waits[0][1] == []


def test_progress_is_what_is_left_of_the_last_upload():
    answers = []
    progress = Progress(answers.append)
    progress.begin("uploading", 10)
    for size in (3, 3):
        progress.add(size)
    assert answers == [{"left": 10}]  # not more often than twice a second
    progress.begin("uploading", 5)  # another attempt
    progress.add(5)
    assert answers[-1] == {"left": 0}
