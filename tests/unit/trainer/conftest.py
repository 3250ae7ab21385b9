"""Token folders and run files of a few kilobytes, with a real tokenizer."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from ingot.config import to_dict, to_toml
from ingot.plugins.callback import CALLBACKS, CallbackPart
from ingot.plugins.registry import MAIN
from ingot.schema.arch import Arch
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Checkpoint, Data, Evaluate, Optim, RunConfig, Schedule, Train, WatchSettings
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_bytes, write_atomic, write_json
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

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
    "mould",
    "café",
    "☃",
    "weight",
    "pour",
    "cool",
    "ring",
)


def documents(count: int, seed: int) -> list[str]:
    """Sentences with some order in them, so that a model has something to learn."""
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        start = int(random.integers(len(WORDS)))
        words = [WORDS[(start + step * 3) % len(WORDS)] for step in range(int(random.integers(5, 40)))]
        texts.append(" ".join(words).capitalize() + ".")
    return texts


def write_tokens(folder: Path, encoder, texts: dict[str, list[str]], split: str) -> TokenManifest:
    """A token folder with one shard per source, in the format of schema/tokens.py."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, block_bytes = [], 1 << 12
    for source, own in texts.items():
        ids = [np.append(encoder.encode(text), encoder.eot_id).astype("<u2") for text in own]
        starts = np.cumsum([0, *map(len, ids)])
        index = [
            (start, len(part), n.to_bytes(16, "little"))
            for n, (start, part) in enumerate(zip(starts, ids, strict=False))
        ]
        data = np.concatenate(ids).tobytes()
        blocks = range(0, len(data), block_bytes)
        digests = b"".join(hashlib.sha256(data[at : at + block_bytes]).digest() for at in blocks)
        rows = np.array(index, dtype=DOCUMENT_DTYPE).tobytes()
        for ending, content in (("tokens", data), ("blocks", digests), ("documents", rows)):
            write_atomic(folder / f"{source}.{ending}", content)
        shards.append(
            Shard(
                name=source,
                source=source,
                tokens=int(starts[-1]),
                documents=len(own),
                text_bytes=sum(len(text.encode()) for text in own),
                blocks_sha256=sha256_bytes(digests),
                documents_sha256=sha256_bytes(rows),
            )
        )
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=encoder.vocab_size,
        eot_id=encoder.eot_id,
        tokenizer_sha256=encoder.sha256,
        corpus_sha256="0" * 64,
        split=split,
        block_bytes=block_bytes,
        seed=1,
        heldout_fraction=0.1,
        shard_bytes=1 << 20,
        shards=tuple(shards),
    )
    write_json(folder / "manifest.json", to_dict(manifest))
    return manifest


@pytest.fixture(scope="session")
def token_folders(tmp_path_factory) -> Path:
    """tokens/{train,heldout} and tokens/tokenizer.json, two sources."""
    root = tmp_path_factory.mktemp("tokens")
    train = {"metal": documents(120, 1), "stone": documents(40, 2)}
    tokenizer = train_bpe([t for texts in train.values() for t in texts], 300, root / "tokenizer.json")
    encoder = load_encoder(tokenizer)
    write_tokens(root / "train", encoder, train, "train")
    write_tokens(root / "heldout", encoder, {"metal": documents(4, 3), "stone": documents(2, 4)}, "heldout")
    return root


@pytest.fixture
def make_run(tmp_path, token_folders):
    """make_run(name, steps=..., ...) -> RunFolder with its run.toml; keywords go to the section that has them."""

    def make(name: str = "run", **changes) -> RunFolder:
        sections = {
            "train": {"steps": 12, "seq_len": 16, "global_batch": 4, "micro_batch": 1, "precision": "fp32"},
            "optim": {"lr": 5e-3},
            "parallel": {"dp_shard": 1},
            "checkpoint": {"every_steps": 5, "keep": 2, "mode": "sync"},
            "watch": {"log_every": 3},
            "evaluate": {"prompts": ("Stone",), "sample_tokens": 8},
            "data": {
                "tokens": str(token_folders / "train"),
                "heldout": str(token_folders / "heldout"),
                "tokenizer": str(token_folders / "tokenizer.json"),
            },
        }
        for key, value in changes.items():
            if key == "guard":
                sections[key] = value
                continue
            section = next((s for s, fields in KNOWN.items() if key in fields), None)
            assert section, key
            sections[section][key] = value
        arch = Arch(
            vocab_size=300, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, d_ffn=48, max_seq_len=64
        )
        config = RunConfig(
            name=name,
            model=arch,
            data=Data(**sections["data"]),
            train=Train(**sections["train"]),
            optim=Optim(**sections["optim"]),
            schedule=Schedule(warmup_steps=2),
            parallel=Parallel(**sections["parallel"]),
            checkpoint=Checkpoint(**sections["checkpoint"]),
            watch=WatchSettings(**sections["watch"]),
            evaluate=Evaluate(**sections["evaluate"]),
            guard=Guard(**sections.get("guard", {})),
        )
        folder = RunFolder(tmp_path / name)
        write_atomic(folder.config, to_toml(config))
        return folder

    return make


@pytest.fixture
def register():
    """`register(cls)` makes a class, or any other factory, the callback "probe" of this process and of its forks."""

    def add(make, pieces: int = 0):
        CALLBACKS.register(CallbackPart(name="probe", make=make, pieces=pieces))
        return make

    yield add
    CALLBACKS.forget(MAIN)


KNOWN = {
    "train": {"steps", "seq_len", "global_batch", "micro_batch", "precision"},
    "optim": {"lr", "clip_norm"},
    "parallel": {"pp", "dp_replicate", "dp_shard", "tp", "zero", "recompute"},
    "checkpoint": {
        "disks",
        "every",
        "every_steps",
        "keep",
        "mode",
        "remote",
        "weights_every",
        "replicas",
        "weights_keep",
    },
    "watch": {"log_every"},
    "evaluate": {"prompts", "max_tokens"},
    "data": {
        "tokens",
        "heldout",
        "tokenizer",
        "mask_documents",
        "skip",
        "quarantine",
        "on_damage",
        "max_quarantined",
        "filter",
    },
}
