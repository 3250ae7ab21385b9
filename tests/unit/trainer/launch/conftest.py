"""A project without a trainer: a run file, the manifest of its tokens, and checkpoints that have manifests only."""

from pathlib import Path

import pytest
from tests import checkpoints

import ingot.trainer.launch.train as launch_train
from ingot.config import to_dict
from ingot.events import EventLog
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest
from ingot.storage import write_json
from ingot.theory.rules import load_run
from ingot.trainer.launch.outcome import JobResult
from ingot.trainer.resilience.lock import is_locked

RUN_FILE = """name = "demo"
[model]
vocab_size = 64
d_model = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
d_ffn = 64
[data]
tokens = "tokens"
[train]
steps = 100
seq_len = 32
global_batch = 8
micro_batch = 2
device = "cpu"
"""


def write_token_manifest(folder: Path, vocab_size: int = 64, seed: int = 0) -> TokenManifest:
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=vocab_size,
        eot_id=0,
        tokenizer_sha256="0" * 64,
        corpus_sha256="0" * 64,
        split="train",
        block_bytes=4096,
        seed=seed,
        shards=(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "manifest.json", to_dict(manifest))
    return manifest


def write_checkpoint(folder: RunFolder, step: int, config: RunConfig, data_fingerprint: str) -> None:
    hashes = {"config_sha256": config.training_sha256(), "data_fingerprint": data_fingerprint}
    checkpoints.write_checkpoint(folder, step, config.settings(), **hashes)


@pytest.fixture
def run_file(tmp_path) -> Path:
    write_token_manifest(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path / "run.toml"


@pytest.fixture
def config(run_file) -> RunConfig:
    return load_run(run_file)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "demo")


@pytest.fixture
def jobs(monkeypatch):
    """Catch what would be started."""
    started = []

    def supervise(folder, running, launch, **options):
        assert is_locked(folder.lock)
        started.append(running.job)
        running.close()
        EventLog(folder.events).write("run_started", from_step=0)
        return JobResult(exit_code=0, step=100, saved_step=100, restarts=0, seconds=1.0, run=folder.root)

    monkeypatch.setattr(launch_train, "supervise", supervise)
    return started
