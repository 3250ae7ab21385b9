"""Make the golden artifacts with the installed version of ingot: `python tests/golden/make.py FOLDER`.

FOLDER gets data/ (corpus, tokenizer, tokens), one folder per run, stopped after 4 of its 6 steps, and expected.json
with the loss and gradient norm of every step of the same runs when nothing stops them.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

STEPS, STOP = 6, 4
WORDS = (
    "stone",
    "iron",
    "copper",
    "ingot",
    "molten",
    "bar",
    "stamp",
    "furnace",
    "flame",
    "ore",
    "slag",
    "café",
    "weight",
    "pour",
    "cool",
    "ring",
    "the",
    "of",
    "and",
)
DENSE = """
[model]
vocab_size = 300
d_model = 16
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 8
d_ffn = 24
max_seq_len = 32
"""
EXPERTS = (
    DENSE
    + """
[model.moe]
num_experts = 4
top_k = 2
d_expert = 8
"""
)
BIASED = EXPERTS + "bias_rate = 0.001\n"
RUN = """name = "{name}"
seed = 7
{model}
[data]
tokens = "../data/tokens/train"
heldout = "../data/tokens/heldout"
tokenizer = "../data/tokens/tokenizer.json"

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
{parallel}

[checkpoint]
every_steps = 4
keep = 1

[watch]
log_every = 1
"""
RUNS = {
    "dense-1-rank": (DENSE, "dp_shard = 1"),
    "dense-2-ranks": (DENSE, "dp_shard = 2"),
    "experts-1-rank": (BIASED, "dp_shard = 1"),
    "experts-2-ranks": (EXPERTS, "dp_shard = 2\nep = 2"),
}


def ingot(*arguments: str | Path, code: int = 0) -> None:
    command = [sys.executable, "-m", "ingot.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def write_documents(path: Path) -> None:
    pick = random.Random(1)
    lines = []
    for number in range(60):
        text = " ".join(pick.choices(WORDS, k=pick.randint(20, 60))).capitalize() + "."
        lines.append(json.dumps({"id": str(number), "url": f"https://site{number % 5}.example/{number}", "text": text}))
    path.write_text("\n".join(lines) + "\n")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    documents = folder / "documents.jsonl"
    write_documents(documents)
    options = ("--preset", "none", "--vocab-size", "300", "--set", "language.enabled=false", "--workers", "1")
    ingot("data", "build", documents, "--out", folder / "data", *options)
    expected = {}
    for name, (model, parallel) in RUNS.items():
        run = folder / name
        run.mkdir()
        (run / "run.toml").write_text(RUN.format(name=name, model=model, parallel=parallel))
        ingot("train", run / "run.toml", "--out", folder / "whole", "-q")
        events = map(json.loads, (folder / "whole" / "events.jsonl").read_text().splitlines())
        expected[name] = [[e["loss"], e["grad_norm"]] for e in events if e["kind"] == "step"]
        shutil.rmtree(folder / "whole")
        ingot("train", run / "run.toml", "--out", run, "--until-step", STOP, "-q", code=10)
        shutil.rmtree(run / "logs", ignore_errors=True)
        (run / "lock").unlink()
        log = run / "events.jsonl"
        log.write_text(log.read_text().replace(socket.gethostname(), "host"))
    documents.unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
