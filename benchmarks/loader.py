"""Tokens per second from warm pages into int64 batches of 64 windows on one core, and start-up with 10,000 shards.

Ours: the order (permutation in chunks) and the reader (memory maps, blocks whose hash was checked before). Beside it
two loops in the style of common trainers, over an index that was shuffled and kept in memory beforehand: one memory map
per shard, `.astype(int64)` per window, then stacked; and the same copied straight into the batch. They check nothing.
Runs alternate; the figures are medians. Targets: 100 million tokens/s, start-up within 0.5 s.

    python benchmarks/loader.py [--tokens 64000000] [--rounds 7]
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from record import alternate, medians, record

from ingot.config import to_dict
from ingot.data.lineage.verify import block_digests
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes, write_json
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader

BATCH = 64  # windows
BATCHES = 200  # per run
START_SHARDS = 10_000


def write_tokens(folder: Path, shards: int, tokens: int, *, on_disk: bool = True) -> None:
    """A token folder of uniform random tokens; only its manifest when not `on_disk`."""
    rng, entries = np.random.default_rng(0), []
    folder.mkdir()
    for number in range(shards):
        name, blocks, index = f"web-{number:05d}", b"", np.zeros(1, DOCUMENT_DTYPE)
        if on_disk:
            rng.integers(1, 50_000, tokens, dtype=np.uint16).tofile(folder / f"{name}.tokens")
            blocks = block_digests(folder / f"{name}.tokens", 1 << 20)
            index["tokens"] = tokens
            (folder / f"{name}.blocks").write_bytes(blocks)
            (folder / f"{name}.documents").write_bytes(index.tobytes())
        entries.append(
            Shard(
                name=name,
                source="web",
                tokens=tokens,
                documents=1,
                text_bytes=4 * tokens,
                blocks_sha256=sha256_bytes(blocks),
                documents_sha256=sha256_bytes(index.tobytes()),
            )
        )
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=50_000,
        eot_id=0,
        tokenizer_sha256="",
        corpus_sha256="",
        split="train",
        block_bytes=1 << 20,
        seed=0,
        shards=tuple(entries),
    )
    write_json(folder / MANIFEST, to_dict(manifest))


def warm_reading(folder: Path, seq_len: int, rounds: int) -> dict[str, float]:
    """Million tokens (of windows, seq_len each) per second, by way of reading."""
    manifest = read_token_manifest(folder)
    order, reader = Order(manifest, seq_len, seed=1), TokenReader(folder, seq_len, manifest=manifest)
    reader.read(np.arange(order.epoch_windows))  # pages are warm and every block is verified
    shuffled = np.random.default_rng(0).permutation(order.epoch_windows)
    shards, starts = order.locate(shuffled)
    maps = [np.memmap(folder / f"{shard.name}.tokens", np.uint16, "r") for shard in manifest.shards]
    batch = np.empty((BATCH, seq_len + 1), np.int64)
    position = {"ours": 0, "theirs": 0}

    def ours() -> None:
        for _ in range(BATCHES):
            reader.read(order.samples(position["ours"], BATCH), out=batch)
            position["ours"] += BATCH

    def next_rows():
        rows = np.arange(position["theirs"], position["theirs"] + BATCH) % len(shuffled)
        position["theirs"] += BATCH
        return zip(shards[rows], starts[rows], strict=True)

    def stacked() -> None:
        for _ in range(BATCHES):
            np.stack([maps[shard][start : start + seq_len + 1].astype(np.int64) for shard, start in next_rows()])

    def copied() -> None:
        for _ in range(BATCHES):
            for row, (shard, start) in enumerate(next_rows()):
                batch[row] = maps[shard][start : start + seq_len + 1]

    functions = {"ingot": ours, "memmap, astype, stack": stacked, "memmap into the batch": copied}
    seconds = medians(alternate(functions, rounds))
    tokens = BATCHES * BATCH * seq_len
    return {name: round(tokens / value / 1e6, 1) for name, value in seconds.items()}


def start_up(folder: Path) -> float:
    """Seconds from nothing to the first samples of a folder's order and an open reader."""
    started = time.perf_counter()
    manifest = read_token_manifest(folder)
    order, reader = Order(manifest, 2048, seed=1), TokenReader(folder, 2048, manifest=manifest)
    order.locate(order.step(1, BATCH))
    assert reader.windows.count == order.epoch_windows
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64_000_000, help="tokens on disk (default: 64 million)")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default: 7)")
    args = parser.parse_args()
    results: dict = {"windows_per_batch": BATCH, "tokens_on_disk": args.tokens, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder, "warm"), 8, args.tokens // 8)
        for seq_len in (2048, 512):
            rates = warm_reading(Path(folder, "warm"), seq_len, args.rounds)
            results[f"million_tokens_per_second_{seq_len}"] = rates
            for name, rate in rates.items():
                print(f"seq_len {seq_len:5}  {name:24}{rate:8.1f} M tokens/s")
        write_tokens(Path(folder, "many"), START_SHARDS, 500_000_000, on_disk=False)
        times = sorted(start_up(Path(folder, "many")) for _ in range(5))
        results["start_up_seconds"] = {
            "shards": START_SHARDS,
            "median": round(times[2], 3),
            "worst": round(times[4], 3),
        }
        print(f"start-up with {START_SHARDS:,} shards: {times[2]:.3f} s (worst of 5: {times[4]:.3f})")
    print(record("loader", results, ["ingot", "numpy"]))


if __name__ == "__main__":
    main()
