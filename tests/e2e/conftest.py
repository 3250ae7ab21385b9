"""A tiny token folder and run file, and real `ingot train` processes on them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ingot.config import to_dict
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_bytes, write_json

VOCAB, EOT, BLOCK_BYTES = 64, 0, 4096
WRITER = b"ingot.trainer.checkpoint.writer"
RUN_FILE = """name = "tiny"
seed = 7

[model]
vocab_size = 64
d_model = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
d_ffn = 64
max_seq_len = 32

[data]
tokens = "tokens"

[train]
steps = 120
seq_len = 32
global_batch = 8
micro_batch = 2
precision = "fp32"
device = "cpu"

[parallel]
dp_shard = 2

[checkpoint]
mode = "sync"
every_steps = 20

[watch]
log_every = 2
"""


def write_tokens(folder: Path, tokens: int = 60_000, shards: int = 1) -> None:
    """A token folder with shards of a random walk over the vocabulary, in documents of 100 tokens."""
    folder.mkdir(parents=True)
    steps = np.random.default_rng(3).integers(-2, 3, tokens)
    ids = (1 + np.cumsum(steps) % (VOCAB - 1)).astype("<u2")
    ids[99::100] = EOT
    names = ["walk"] if shards == 1 else [f"walk-{number}" for number in range(shards)]
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=VOCAB,
        eot_id=EOT,
        tokenizer_sha256="0" * 64,
        corpus_sha256="0" * 64,
        split="train",
        block_bytes=BLOCK_BYTES,
        seed=0,
        shards=tuple(_write_shard(folder, name, own) for name, own in zip(names, np.split(ids, shards), strict=True)),
    )
    write_json(folder / "manifest.json", to_dict(manifest))


def _write_shard(folder: Path, name: str, ids: np.ndarray) -> Shard:
    index = np.zeros(len(ids) // 100, DOCUMENT_DTYPE)
    index["start"], index["tokens"] = np.arange(len(index)) * 100, 100
    data = ids.tobytes()
    blocks = range(0, len(data), BLOCK_BYTES)
    digests = b"".join(hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in blocks)
    for suffix, content in (("tokens", data), ("blocks", digests), ("documents", index.tobytes())):
        (folder / f"{name}.{suffix}").write_bytes(content)
    return Shard(
        name=name,
        source="walk",
        tokens=len(ids),
        documents=len(index),
        text_bytes=len(ids),
        blocks_sha256=sha256_bytes(digests),
        documents_sha256=sha256_bytes(index.tobytes()),
    )


@dataclass
class Project:
    """A folder with tokens and run.toml, and `ingot` on it."""

    root: Path

    @property
    def run_file(self) -> Path:
        return self.root / "run.toml"

    def start(self, out: str, *options: str, within: Sequence[str] = (), **variables: str) -> subprocess.Popen:
        """Start `ingot train`. within: the beginning of the command, for a program that starts it elsewhere."""
        command = [sys.executable, "-m", "ingot.cli.main", "train", str(self.run_file), "--out", str(self.root / out)]
        return subprocess.Popen(
            [*within, *command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A job started with & in a script ignores Ctrl-C, and so would its children; a user's terminal does not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )

    def train(self, out: str, *options: str, code: int = 0, **variables: str) -> str:
        """Run to the end; the output. Fails unless it exits with `code`."""
        return ended(self.start(out, *options, **variables), code)

    def ingot(self, *arguments: str, code: int = 0) -> str:
        """Run another verb to its end; the output. Fails unless it exits with `code`."""
        command = [sys.executable, "-m", "ingot.cli.main", *arguments]
        return ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), code)

    def folder(self, out: str) -> RunFolder:
        return RunFolder(self.root / out)

    def facts(self, out: str) -> dict[int, tuple[float, float, float]]:
        """step -> (loss, gradient norm, learning rate), the latest where a step was redone."""
        log = read_events(self.folder(out).events, events.STEP)
        return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in log}

    def rank_pid(self, out: str, rank: int) -> int:
        started = [e for e in read_events(self.folder(out).events, events.RANK_STARTED) if e["rank"] == rank]
        return started[-1]["pid"]

    def wait_for_step(self, out: str, step: int, process: subprocess.Popen, seconds: float = 60) -> int:
        """Wait until a progress line of at least `step` is in the log; the step it shows."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = max((e["step"] for e in read_events(self.folder(out).events, events.PROGRESS)), default=0)
            if seen >= step:
                return seen
            if process.poll() is not None:
                pytest.fail(f"ended before step {step}:\n{process.communicate()[0]}")
            time.sleep(0.02)
        process.kill()
        pytest.fail(f"step {step} was not reached in {seconds} s:\n{process.communicate()[0]}")


def ended(process: subprocess.Popen, code: int, seconds: float = 300) -> str:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(5)
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"did not end within {seconds} s:\n{process.communicate()[0]}")
    if process.returncode != code:
        pytest.fail(f"exit code {process.returncode}, expected {code}:\n{output}")
    return output


def workers_of(folder: RunFolder) -> list[int]:
    """The living processes of the fork server and the ranks of the run, and the writers of the ranks."""
    return _processes(folder, b"ingot.trainer.main") + writers_of(folder)


def writers_of(folder: RunFolder) -> list[int]:
    """The living processes that write the checkpoints of the run's ranks."""
    return _processes(folder, WRITER)


def _processes(folder: RunFolder, module: bytes) -> list[int]:
    """The living processes of a module that carry the run's folder on their command line."""
    name, found = str(folder.root).encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = Path(f"/proc/{entry.name}/cmdline").read_bytes()
            except OSError:
                continue
            if module in line and name in line:
                found.append(int(entry.name))
    return found


def writer_of(rank_pid: int) -> int:
    """The process that writes the checkpoints of a rank."""
    children = Path(f"/proc/{rank_pid}/task/{rank_pid}/children").read_text().split()
    (found,) = [int(pid) for pid in children if WRITER in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@contextmanager
def paused(folder: RunFolder):
    """Within the context, the ranks of the run are stopped."""
    workers = workers_of(folder)
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("project")
    write_tokens(root / "tokens")
    (root / "run.toml").write_text(RUN_FILE)
    return Project(root)
