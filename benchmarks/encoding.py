"""Encoding speed on one core: ingot's encoder beside `tokenizers`, same vocabulary, same ids. Target: at least 5x.

Text: the docstrings of the standard library. Every function returns the ids of all documents; the first round checks
that they are equal. Runs alternate; the figures are medians.

    python benchmarks/encoding.py [--vocab-size 32768] [--megabytes 3] [--rounds 5]
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import argparse
import tempfile
from pathlib import Path

import numpy as np
from record import alternate, docstrings, medians, record
from tokenizers import Tokenizer

from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

BATCH = 256  # documents per call of encode_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=32_768, help="tokens (default: 32768)")
    parser.add_argument("--megabytes", type=float, default=3, help="text to encode (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: 5)")
    args = parser.parse_args()
    texts = docstrings(int(args.megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        path = train_bpe(texts, args.vocab_size, Path(folder) / "tokenizer.json")
        encoder, reference = load_encoder(path), Tokenizer.from_file(str(path))
        reference.encode_special_tokens = True  # as ours: special tokens in a text are text

    def batched(encode):
        batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
        return np.concatenate([e.ids for batch in batches for e in encode(batch, add_special_tokens=False)])

    functions = {
        "ingot encode_batch": lambda: np.concatenate(encoder.encode_batch(texts)),
        "tokenizers encode_batch": lambda: batched(reference.encode_batch),
        "tokenizers encode_batch_fast": lambda: batched(reference.encode_batch_fast),
    }
    ids = [function() for function in functions.values()]
    identical = all(np.array_equal(ids[0], other) for other in ids[1:])
    seconds = medians(alternate(functions, args.rounds))
    best_other = min(value for name, value in seconds.items() if not name.startswith("ingot"))
    results = {
        "engine": encoder.engine,
        "identical_ids": identical,
        "documents": len(texts),
        "text_bytes": size,
        "tokens": len(ids[0]),
        "vocab_size": encoder.vocab_size,
        "rounds": args.rounds,
        "megabytes_per_second": {name: round(size / 1e6 / value, 2) for name, value in seconds.items()},
        "times_encode_batch": round(seconds["tokenizers encode_batch"] / seconds["ingot encode_batch"], 2),
        "times_best_of_tokenizers": round(best_other / seconds["ingot encode_batch"], 2),
    }
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {len(ids[0]):,} tokens, engine {encoder.engine}")
    for name, value in results["megabytes_per_second"].items():
        print(f"{name:30}{value:8.2f} MB/s")
    print(f"ids identical: {identical}; {results['times_encode_batch']}x encode_batch (target 5x)")
    print(record("encoding", results, ["ingot", "tokenizers", "tiktoken", "numpy"]))
    if not identical:
        raise SystemExit("ids differ")


if __name__ == "__main__":
    main()
