"""Make the golden run of an older commit: `PYTHONPATH=OLD/src python tests/golden/make_old.py FOLDER NAME`.

OLD is a checkout of the commit. FOLDER gets tokens/ unless it is there, and NAME/: a run on two ranks, stopped after 4
of its 6 steps, with expected.json: the loss and gradient norm of every step of the same run when nothing stops it. It
has experts if NAME is "experts". The code of any commit since the first run folders can run this script.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from ingot.config import to_dict
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_bytes, write_json

STEPS, STOP, TOKENS, DOCUMENT = 6, 4, 600, 30
RUN = """name = "{name}"
seed = 7

[model]
vocab_size = 64
d_model = 16
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 8
d_ffn = 24
max_seq_len = 32
{experts}
[data]
tokens = "../tokens"

[train]
steps = 6
seq_len = 16
global_batch = 4
micro_batch = 1
precision = "fp32"
device = "cpu"

[optim]
lr = 0.005

[schedule]
warmup_steps = 2

[parallel]
dp_shard = 2

[checkpoint]
every_steps = 4
keep = 1

[watch]
log_every = 1
"""
EXPERTS = """
[model.moe]
num_experts = 4
top_k = 2
d_expert = 8
bias_rate = 0.001
"""


def write_tokens(folder: Path) -> None:
    """Write one shard of a random walk over the vocabulary."""
    folder.mkdir(parents=True)
    steps = np.random.default_rng(3).integers(-2, 3, TOKENS)
    ids = (1 + np.cumsum(steps) % 63).astype("<u2")
    ids[DOCUMENT - 1 :: DOCUMENT] = 0
    index = np.zeros(TOKENS // DOCUMENT, DOCUMENT_DTYPE)
    index["start"], index["tokens"] = np.arange(len(index)) * DOCUMENT, DOCUMENT
    digests = hashlib.sha256(ids.tobytes()).digest()
    for suffix, content in (("tokens", ids.tobytes()), ("blocks", digests), ("documents", index.tobytes())):
        (folder / f"walk.{suffix}").write_bytes(content)
    shard = Shard(
        name="walk",
        source="walk",
        tokens=TOKENS,
        documents=len(index),
        text_bytes=TOKENS,
        blocks_sha256=sha256_bytes(digests),
        documents_sha256=sha256_bytes(index.tobytes()),
    )
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=64,
        eot_id=0,
        tokenizer_sha256="0" * 64,
        corpus_sha256="0" * 64,
        split="train",
        block_bytes=4096,
        seed=0,
        shards=(shard,),
    )
    write_json(folder / "manifest.json", to_dict(manifest))


def ingot(*arguments: str | Path, code: int = 0) -> None:
    command = [sys.executable, "-m", "ingot.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main(folder: Path, name: str) -> None:
    if not (folder / "tokens").exists():
        write_tokens(folder / "tokens")
    run = folder / name
    run.mkdir()
    (run / "run.toml").write_text(RUN.format(name=name, experts=EXPERTS if name == "experts" else ""))
    ingot("train", run / "run.toml", "--out", folder / "whole", "-q")
    events = map(json.loads, (folder / "whole" / "events.jsonl").read_text().splitlines())
    expected = [[e["loss"], e["grad_norm"]] for e in events if e["kind"] == "step"]
    shutil.rmtree(folder / "whole")
    ingot("train", run / "run.toml", "--out", run, "--until-step", STOP, "-q", code=10)
    shutil.rmtree(run / "logs", ignore_errors=True)
    (run / "lock").unlink()
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace(socket.gethostname(), "host"))
    (run / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
