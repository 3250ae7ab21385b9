"""Real builds with faults: the same bytes as undisturbed, and no hang. Processes are killed at random instants, ten
times; and the disk is full in every phase, one after the other (on a file system in memory, in a namespace)."""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGES, FILES, KILLS = 120, 6, 10
WORDS = (
    "the people water house river which would about there their other could these first after where right think great "
    "through before little under never found those while might something always together important children have with"
)
MAIN = "import sys; from ingot.cli.main import main; sys.exit(main())"


def write_crawl(folder: Path) -> list[str]:
    pick, paths = random.Random(0), []
    for number in range(FILES):
        paths.append(folder / f"crawl-{number}.warc.gz")
        with paths[-1].open("wb") as file:
            for page in range(PAGES):
                lines = ["The " + " ".join(pick.choices(WORDS.split(), k=14)) + " and that of it." for _ in range(12)]
                if page % 5 == 0:
                    same = "The same story is told by the people of that house with few words."  # words: ok
                    lines = [same for _ in lines]
                body = "".join(f"<p>{line}</p>" for line in lines)
                block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body><article>{body}</article>"
                head = (
                    f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number}-{page}>\r\n"
                    f"WARC-Target-URI: http://site{page % 7}.example/{number}/{page}\r\n"
                    f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
                )
                file.write(gzip.compress((head + block + "\r\n\r\n").encode(), mtime=0))
    return [str(path) for path in paths]


def start(crawl: list[str], out: Path, workers: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-c", MAIN, "data", "build", *crawl, "--out", str(out), "--vocab-size", "300"]
    return subprocess.Popen(
        [*command, "--workers", str(workers), "-q"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def family(driver: int) -> list[int]:
    """The driver and everything that it started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat[0] != "Z":
            parents[int(folder.name)] = int(stat[1])
    found = [driver]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return [process for process in found if process in parents]


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def problem_of_kills(root: Path, pick: random.Random, wanted: int) -> str:
    """Build the same crawl again and again until `wanted` of its processes were killed at random instants. Return what
    differs from an undisturbed build, or is left; "" if nothing."""
    crawl, kills, builds = write_crawl(root), 0, 0
    undisturbed = start(crawl, root / "undisturbed")
    began = time.monotonic()
    assert undisturbed.wait(120) == 0, undisturbed.communicate()[0].decode()
    seconds = time.monotonic() - began
    expected = snapshot(root / "undisturbed")
    while kills < wanted:
        out = root / f"build-{builds}"
        builds += 1
        driver = start(crawl, out)
        while driver.poll() is None or driver.returncode == -signal.SIGKILL:
            if driver.returncode == -signal.SIGKILL:  # as a person would: the same command again
                driver.communicate()
                driver = start(crawl, out)
            try:
                driver.wait(pick.uniform(0.1, seconds / 2) if kills < wanted else 120)
            except subprocess.TimeoutExpired:
                if kills == wanted:
                    return f"{out.name} hangs"
                if alive := family(driver.pid):
                    os.kill(pick.choice(alive), signal.SIGKILL)
                    kills += 1
        if driver.returncode:
            return f"{out.name} ended with {driver.returncode}: {driver.communicate()[0].decode()}"
        if snapshot(out) != expected:
            return f"{out.name} has other bytes"
        if left := family(driver.pid)[1:]:
            return f"processes {left} are left"
    return f"files are left: {left}" if (left := sorted(path.name for path in root.glob(".*"))) else ""


@pytest.mark.slow
def test_ten_kills_leave_no_trace(tmp_path):
    assert problem_of_kills(tmp_path, random.Random(1), KILLS) == ""


PHASES = ["hashing", "reading", "URLs", "comparing", "repeated spans", "writing", "tokenizer", "encoding", "shards"]

# Arguments: where the file system is to be, the folder of the undisturbed build, crawl files.
ON_A_SMALL_DISK = """
import os, subprocess, sys
from pathlib import Path
from ingot.data.build import corpus_build as build
from ingot.data.build import shards
from ingot.data.tasks.local import Local
from ingot.data.build.prepare import prepare
from ingot.data.build.recipe import load_recipe
from ingot.data.sources.input import Input

place, undisturbed, *crawl = map(Path, sys.argv[1:])
inputs, recipe, seen = [Input(location=str(path)) for path in crawl], load_recipe(None, ["substrings.enabled=true"]), []
build.require_free = shards.require_free = lambda *_: None

def resize(kilobytes):
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", "none", place], check=True)

def fill(fraction, text):
    phase = text.partition(":")[0]
    if phase not in seen:
        seen.append(phase)
        disk = os.statvfs(place)
        resize((disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024 + 4)

def prepared(out, progress=None):
    with Local(2) as runner:
        prepare(inputs, out, recipe, vocab_size=300, runner=runner, progress=progress)
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "seconds.json"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}

expected = prepared(undisturbed)
for _ in range(20):
    resize(50_000)
    try:
        found = prepared(place / "out", fill)
    except Exception as error:
        print(f"{seen[-1]}: {type(error).__name__} {error}".replace("\\n", " "))
    else:
        break
print("same bytes" if found == expected else "DIFFERENT", sorted(p.name for p in place.rglob(".*")))
"""


@pytest.mark.slow
def test_a_full_disk_in_every_phase(tmp_path):
    crawl, place = write_crawl(tmp_path), tmp_path / "disk"
    place.mkdir()
    run = f'mount -t tmpfs -o size=50m none "{place}" && exec "$@"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", f'mount -t tmpfs none "{place}"'], capture_output=True).returncode:
        pytest.skip("needs user namespaces")
    program = [sys.executable, "-c", ON_A_SMALL_DISK, str(place), str(tmp_path / "undisturbed"), *crawl]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, "sh", *program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    *failures, last = done.stdout.splitlines()
    assert last == "same bytes []"
    assert [line.partition(":")[0] for line in failures] == PHASES
    assert all("ResourceError the disk" in line or "OSError [Errno 28]" in line for line in failures), failures
