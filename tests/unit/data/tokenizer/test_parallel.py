"""Encoding processes end with the build that started them."""

import subprocess
import sys
import time
from pathlib import Path

from ingot.data.tokenizer.bpe import train_bpe

SCRIPT = """
import multiprocessing, sys, time
from pathlib import Path
from ingot.data.tokenizer.encoder import load_encoder
from ingot.data.tokenizer.parallel import encode_documents

def documents():
    while True:
        yield "web", {"id": "0" * 32, "text": "some words and more " * 50_000}

if __name__ == "__main__":
    for _ in encode_documents(documents(), load_encoder(Path(sys.argv[1])), 2):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)
"""


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_when_the_build_is_killed(tmp_path):
    tokenizer = train_bpe(["some words and more"], 260, tmp_path / "tokenizer.json")
    (tmp_path / "build.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "build.py"), str(tokenizer)]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    workers = build.stdout.readline().split()
    assert len(workers) == 2
    assert all(map(runs, workers))
    build.kill()
    build.wait()
    build.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, workers))
