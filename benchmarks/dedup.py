"""Near-duplicates: quality on planted pairs, speed of signatures beside datasketch, and how time and memory grow.

DATA holds dedup_docs.jsonl.gz and dedup_truth.csv (pairs with their exact Jaccard similarity). datasketch runs in an
environment of its own and takes turns with ours; its time begins at the same text: lower, split, shingles, signature.
Growth is measured in one process per size on documents that are made up as they are needed: 64 shingles each, a quarter
of them versions of an earlier one, two in a hundred pages of a single template. CPU seconds throughout.

    python benchmarks/dedup.py DATA [--datasketch-python PYTHON] [--documents 100000,1000000] [--json FILE]
"""

import argparse
import csv
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.unit.data.dedup.search import find_duplicates

from ingot.data.dedup import bands, minhash
from ingot.data.dedup.bands import band_candidates, merge_candidates, unpack, write_bands
from ingot.data.dedup.clusters import clusters, slices, verify_pairs
from ingot.data.dedup.equal import firsts
from ingot.data.dedup.minhash import DedupRules, jaccard, shingle_set, shingles_reference, signature, signature_of
from ingot.data.dedup.substrings import RepeatedSpans, SubstringRules, cut, mark_repeated, write_windows
from ingot.storage import write_json

RULES = DedupRules()
SHINGLES = 64  # of a made-up document
FOLDER_DOCUMENTS = 1 << 18
DATASKETCH = """
import gzip, json, sys, time
from datasketch import MinHash
texts = [json.loads(line)["text"] for line in gzip.open(sys.argv[1])]
for line in sys.stdin:
    started = time.process_time()
    for text in texts:
        words = text.lower().split()
        grams = [" ".join(words[i : i + 5]).encode() for i in range(max(1, len(words) - 4))]
        MinHash(num_perm=128).update_batch(grams)
    print(time.process_time() - started, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with dedup_docs.jsonl.gz and dedup_truth.csv")
    parser.add_argument("--datasketch-python", help="the Python of an environment that has datasketch")
    parser.add_argument(
        "--documents", default="100000,1000000", help="sizes of the growth table (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of the speed table (default: 5)")
    parser.add_argument("--json", type=Path, help="write the results here instead of benchmarks/results")
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)  # one size, in a process of its own
    args = parser.parse_args()
    if args.grow:
        print(json.dumps(grow(args.grow)))
        return
    with gzip.open(args.data / "dedup_docs.jsonl.gz") as file:
        documents = {row["id"]: row["text"] for row in map(json.loads, file)}
    with (args.data / "dedup_truth.csv").open() as file:
        truth = [(a, b, float(similarity)) for a, b, similarity in list(csv.reader(file))[1:]]
    results = {
        "quality": quality(documents, truth),
        "speed": speed(list(documents.values()), args.data, args.datasketch_python, args.rounds),
        "big_buckets": big_buckets(),
        "equal_rows": equal_rows(),
        "substrings": substrings(list(documents.values())),
        "growth": [],
    }
    for name in ("quality", "speed", "big_buckets", "equal_rows", "substrings"):
        print(name)
        for key, value in results[name].items():
            print(f"  {key:56}{value}")
    for count in map(int, args.documents.split(",")):
        command = [sys.executable, __file__, str(args.data), "--grow", str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results["growth"].append(json.loads(done.stdout))
        print(results["growth"][-1], flush=True)
    if args.json:
        write_json(args.json, results)
    else:
        print(record("dedup", results, ["ingot", "numpy", "xxhash"]))


def quality(documents: dict[str, str], truth: list[tuple[str, str, float]]) -> dict[str, object]:
    """On the planted pairs; similarity is computed here once more, from words, without any of our hashes."""
    texts, number = list(documents.values()), {name: i for i, name in enumerate(documents)}
    words = [text.lower().split() for text in texts]
    grams = [{tuple(w[i : i + 5]) for i in range(max(1, len(w) - 4))} for w in words]

    def similarity(a: int, b: int) -> float:
        return len(grams[a] & grams[b]) / len(grams[a] | grams[b])

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_bands(np.array([signature_of(text, RULES) for text in texts]), RULES, work)
        duplicates = find_duplicates([work], lambda n: shingle_set(texts[n], RULES), RULES, work)
        candidates = pairs_of(work / "candidates.npy")
        verified = np.load(work / "verified-00000.npy")
    signatures = [signature_of(text, RULES).tobytes() for text in texts]
    first = [signatures.index(one) for one in signatures]  # copies are candidates of the first one only
    in_band = bucket_pairs(texts)
    kept = list(range(len(texts)))
    for row in duplicates.tolist():
        kept[row[0]] = row[1]
    true = [(number[a], number[b]) for a, b, j in truth if j >= RULES.jaccard]
    wrong = sum(similarity(int(row["document"]), int(row["like"])) < RULES.jaccard for row in duplicates)

    def recall(found: Iterable[bool]) -> float:
        return round(sum(found) / len(true), 4)

    def precision(pairs: Collection[tuple[int, int]]) -> float:
        return round(sum(similarity(*pair) >= RULES.jaccard for pair in pairs) / len(pairs), 4)

    return {
        "pairs at Jaccard >= 0.8": len(true),
        "recall, pairs that share a band": recall(tuple(sorted(pair)) in in_band for pair in true),
        "recall, candidates after the estimate": recall(
            first[a] == first[b] or tuple(sorted((first[a], first[b]))) in candidates for a, b in true
        ),
        "recall, pairs in one cluster": recall(kept[a] == kept[b] for a, b in true),
        "precision, pairs that share a band": precision(in_band),
        "precision, candidates after the estimate": precision(candidates),
        "precision, verified pairs": precision([(int(a), int(b)) for a, b, _ in verified.tolist()]),
        "dropped documents without a similar one": wrong,
        "dropped documents": len(duplicates),
    }


def pairs_of(path: Path) -> set[tuple[int, int]]:
    return set(zip(*(side.tolist() for side in unpack(np.load(path))), strict=True))


def bucket_pairs(texts: list[str]) -> set[tuple[int, int]]:
    """All pairs that share a band: what plain locality-sensitive hashing nominates."""
    signatures, found = np.array([signature_of(text, RULES) for text in texts]), set()
    for band in range(RULES.bands):
        buckets: dict[bytes, list[int]] = {}
        for row, part in enumerate(np.ascontiguousarray(signatures[:, band * RULES.rows : (band + 1) * RULES.rows])):
            bucket = buckets.setdefault(part.tobytes(), [])
            found.update((earlier, row) for earlier in bucket)
            bucket.append(row)
    return found


def speed(texts: list[str], data: Path, python: str | None, rounds: int) -> dict[str, object]:
    core = minhash._CORE
    plain = [signature_plain(text) for text in texts[:500]]
    identical = all((signature_of(text, RULES) == other).all() for text, other in zip(texts, plain, strict=False))
    seconds: dict[str, list[float]] = {"without the compiled core": []}
    if core is not None:
        seconds["with the compiled core"] = []
    other = None
    if python:
        seconds["datasketch update_batch"] = []
        command = [python, "-c", DATASKETCH, str(data / "dedup_docs.jsonl.gz")]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    for _ in range(rounds):
        for name, times in seconds.items():
            if name.startswith("datasketch") and other and other.stdin and other.stdout:
                other.stdin.write("go\n")
                times.append(float(other.stdout.readline()))
                continue
            started = time.process_time()
            for text in texts:
                signature_of(text, RULES) if name.startswith("with ") else signature_plain(text)
            times.append(time.process_time() - started)
    if other:
        other.communicate()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    found: dict[str, object] = {"equal with and without the core": identical if core else "not built"}
    for name, value in medians.items():
        found[f"documents per CPU second, {name}"] = round(len(texts) / value)
    for name, value in medians.items() if python else ():
        if not name.startswith("datasketch"):
            found[f"times datasketch, {name}"] = round(medians["datasketch update_batch"] / value, 1)
    return found


def signature_plain(text: str) -> np.ndarray:
    return minhash.signature_reference(shingles_reference(text, RULES.ngram), RULES.permutations)


def big_buckets(documents: int = 4000, own: int = 24, template: int = 120) -> dict[str, object]:
    """Measure the pairs that the limits of a bucket miss, against comparing all its pairs, in a hard case.

    Pages of one template, alike at about 0.71 through it, so that buckets hold thousands of pairs that look similar;
    every third page has a twin at 0.8 or more, anywhere.
    """
    random = np.random.default_rng(1)
    shared = random.integers(0, 2**63, template, dtype=np.uint64)
    sets = []
    for number in range(documents):
        page = random.integers(0, 2**63, own, dtype=np.uint64)
        if number % 3 == 0 and number:
            twin = sets[int(random.integers(0, number))]
            page[: own // 3 * 2] = np.setdiff1d(twin, shared)[: own // 3 * 2]
        sets.append(np.unique(np.concatenate((shared, page))))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_bands(np.array([signature(one) for one in sets]), RULES, work)
        found, spent, limit = [], [], bands.WINDOW
        for window in (limit, documents):
            bands.WINDOW, started = window, time.process_time()
            pairs = set()
            for band in range(RULES.bands):
                band_candidates(band, [work], RULES, work / "pairs.npy")
                pairs |= pairs_of(work / "pairs.npy")
            spent.append(round(time.process_time() - started, 2))
            found.append({pair for pair in pairs if jaccard(sets[pair[0]], sets[pair[1]]) >= RULES.jaccard})
        bands.WINDOW = limit
    return {
        "documents of one template": documents,
        "similar pairs, all pairs of each bucket compared": len(found[1]),
        "share found within the limits of a bucket": round(len(found[0]) / len(found[1]), 4),
        "CPU s within the limits, and without": spent,
    }


def equal_rows(rows: int = 4_000_000, parts: int = 16) -> dict[str, object]:
    """128-bit hashes of whole texts, three in ten of which came before, on one core."""
    numbers = np.arange(rows, dtype=np.uint64)
    draw = mixed(numbers)
    numbers = np.where(draw % np.uint64(10) < 3, draw % np.maximum(numbers, np.uint64(1)), numbers)
    keys = np.stack((mixed(numbers + np.uint64(1)), mixed(numbers + np.uint64(1 << 40))), axis=1)
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        for limit in (1 << 30, 64 << 20):
            started = time.process_time()
            found = firsts(np.array_split(keys, parts), Path(name) / "found.npy", limit_bytes=limit)
            spent = (time.process_time() - started) / rows * 1e6
            seconds[f"CPU s per million rows, {limit >> 20} MiB"] = round(spent, 2)
    return {"rows": rows, "equal an earlier one": len(found), **seconds}


def substrings(texts: list[str], partitions: int = 16) -> dict[str, object]:
    """All three steps on the documents of DATA as one file."""
    rules, megabytes, spent = SubstringRules(), sum(len(text.encode()) for text in texts) / 1e6, []
    with tempfile.TemporaryDirectory() as name:
        marked = [Path(name) / str(number) for number in range(partitions)]
        started = time.process_time()
        windows = write_windows(texts, rules, partitions, Path(name))
        spent.append(time.process_time() - started)
        started = time.process_time()
        for number, folder in enumerate(marked):
            folder.mkdir()
            mark_repeated(number, [Path(name)], folder)
        spent.append(time.process_time() - started)
        started = time.process_time()
        spans = RepeatedSpans(0, Path(name), marked, rules)
        left = [cut(text, spans.of(text)) for text in texts]
        spans.finish()
        spent.append(time.process_time() - started)
        stored = sum(path.stat().st_size for path in Path(name).rglob("*.npy"))
    return {
        "text MB, windows": (round(megabytes, 1), windows),
        "share of the text that is cut": round(1 - sum(len(t.encode()) for t in left) / 1e6 / megabytes, 3),
        "MB of text per CPU s: write, mark, cut": [round(megabytes / seconds, 1) for seconds in spent],
        "MB of files per MB of text": round(stored / 1e6 / megabytes, 2),
    }


# --- growth: made-up documents, a pure function of their number ------------------------------------------------------


def mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def origins(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for documents (uint64) the document that each is a version of (itself for most), and the percentage of its
    shingles that differ from it."""
    draw = mixed(numbers + np.uint64(1 << 40))
    version, template = draw % np.uint64(100) < 25, draw % np.uint64(100) >= 98
    origin = np.where(version, (draw >> np.uint64(20)) % np.maximum(numbers, np.uint64(1)), numbers)
    origin = np.where(template, np.uint64(0), origin)
    return origin, np.where(
        version, (draw >> np.uint64(8)) % np.uint64(25), np.where(template, np.uint64(5), np.uint64(0))
    )


def made_up(numbers: np.ndarray) -> np.ndarray:
    """Shingles uint64 [documents, SHINGLES]."""
    origin, percent = origins(numbers)
    place = np.arange(SHINGLES, dtype=np.uint64)
    own = mixed(numbers[:, None] * np.uint64(SHINGLES) + place + np.uint64(1 << 50))
    other = mixed(origin[:, None] * np.uint64(SHINGLES) + place + np.uint64(1 << 52))
    return np.where(own % np.uint64(100) < percent[:, None], own, other)


def set_of(number: int) -> np.ndarray:
    return np.unique(made_up(np.array([number], np.uint64))[0])


def grow(count: int) -> dict[str, object]:
    """The whole search over `count` documents; CPU seconds per step, peak memory of this process, bytes written."""
    seconds: dict[str, float] = {}
    last = time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[name], last = round(now - last, 2), now

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        work, folders = Path(name), []
        for start in range(0, count, FOLDER_DOCUMENTS):
            folders.append(work / f"folder-{len(folders):04d}")
            folders[-1].mkdir()
            stop = min(start + FOLDER_DOCUMENTS, count)
            rows = np.empty((stop - start, RULES.permutations), np.uint32)
            for first in range(start, stop, 1 << 12):
                block = made_up(np.arange(first, min(first + (1 << 12), stop), dtype=np.uint64))
                for row, one in enumerate(block, first - start):
                    rows[row] = signature(one)
            write_bands(rows, RULES, folders[-1])
        del rows, block
        lap("make up, signatures, band files")
        files = [work / f"band-{band:02d}.npy" for band in range(RULES.bands + 1)]
        for band, path in enumerate(files):
            band_candidates(band, folders, RULES, path)
        lap("candidates")
        candidates = work / "candidates.npy"
        found = merge_candidates(files, candidates)
        lap("merge")
        verified, compared, similar = [], 0, 0
        for number, (start, stop) in enumerate(slices(candidates, 4 << 20)):
            verified.append(work / f"verified-{number:03d}.npy")
            done = verify_pairs(candidates, set_of, RULES, verified[-1], start=start, stop=stop)
            compared, similar = compared + done.compared, similar + done.similar
        lap("verify")
        result = clusters(count, verified)
        duplicates = result.duplicates()
        lap("clusters")
        sizes = {
            "folders": sum(f.stat().st_size for folder in folders for f in folder.iterdir()),
            "pairs": sum(path.stat().st_size for path in (*files, candidates, *verified)),
        }
    total = sum(seconds.values())
    # Not ru_maxrss, which remembers the process that this one was forked from.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    return {
        "documents": count,
        "cpu_seconds": seconds,
        "cpu_seconds_per_million": round(total / count * 1e6, 1),
        "peak_gib": round(peak / 2**30, 2),
        "candidates": found,
        "compared": compared,
        "similar": similar,
        "dropped": len(duplicates),
        "recall": round(recall_of_versions(count, result.roots), 4),
        "bytes_per_document": {name: round(size / count, 1) for name, size in sizes.items()},
    }


def recall_of_versions(count: int, roots: np.ndarray) -> float:
    """Return the share of 20,000 documents similar to their original that are in its cluster."""
    numbers = np.unique(np.random.default_rng(1).integers(1, count, 200_000).astype(np.uint64))
    origin, _ = origins(numbers)
    numbers, origin = numbers[origin != numbers][:20_000], origin[origin != numbers][:20_000]
    alike = [
        jaccard(set_of(a), set_of(b)) >= RULES.jaccard for a, b in zip(numbers.tolist(), origin.tolist(), strict=True)
    ]
    return float((roots[numbers.astype(np.int64)] == roots[origin.astype(np.int64)])[alike].mean())


if __name__ == "__main__":
    main()
