"""The quality filters: speed, and whether they decide as datatrove does.

Every document goes through each filter alone and through all of them in a row, here with the preset `fineweb`, and in
datatrove (its own environment, in a process beside this one) as its examples/fineweb.py runs them. Both get the same
texts. Seconds are CPU seconds; the two sides take turns.

    python benchmarks/filters.py [TEXTS ...] [--datatrove-python PYTHON] [--limit 1000] [--rounds 3] [--json]

TEXTS are JSONL files with a field "text" (also .gz) or WARC files, extracted by ingot. Without: docstrings of the
standard library. --json prints the figures as JSON instead of the table, with the documents decided differently.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from record import docstrings, record

from ingot.data.filters.c4 import C4
from ingot.data.filters.gopher import Gopher
from ingot.data.filters.quality import PRESETS, FineWeb, quality_stages
from ingot.data.filters.words import native
from ingot.schema.corpus import Document

FILTERS = ("gopher_repetition", "gopher", "c4", "fineweb", "all")

# Runs in datatrove's environment. Answers, for each line of the file argv[1], what each filter says, then the seconds.
DATATROVE = """
import hashlib, json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
from datatrove.utils.text import split_into_parts
filters = {"gopher_repetition": GopherRepetitionFilter(), "gopher": GopherQualityFilter(),
           "c4": C4QualityFilter(filter_no_terminal_punct=False), "fineweb": FineWebQualityFilter()}
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
def decide(steps, text):
    document = Document(text=text, id="")
    for name, step in steps:
        try:
            answer = step.filter(document)
        except ZeroDivisionError:
            answer = (False, "division by zero")
        if answer is not True:
            return name + "." + answer[1]
    return hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest()
decide(filters.items(), texts[0])
answers, seconds = {}, {}
for name in [*filters, "all"]:
    steps = list(filters.items()) if name == "all" else [(name, filters[name])]
    split_into_parts.cache_clear()
    started = time.process_time()
    answers[name] = [decide(steps, text) for text in texts]
    seconds[name] = time.process_time() - started
print("\\n" + json.dumps([answers, seconds]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="JSONL or WARC files (default: docstrings)")
    parser.add_argument("--datatrove-python", type=Path, help="Python of an environment with datatrove[processing]")
    parser.add_argument("--limit", type=int, default=1000, help="most documents per file (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    texts = [text for path in args.texts for text in itertools.islice(read_texts(path), args.limit)]
    texts = texts or docstrings(3_000_000)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    results: dict = {"documents": len(texts), "text_bytes": size, "compiled": native() is not None}
    sides: dict[str, Callable[[], tuple[dict, dict]]] = {name: lambda n=name: ours(texts, n) for name in PRESETS}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        file.flush()
        if args.datatrove_python:
            sides["datatrove"] = lambda: theirs(args.datatrove_python, file.name)
        answers, seconds = {}, {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                answers[name], taken = side()
                seconds[name].append(taken)
    for name, rounds in seconds.items():
        all_answers = answers[name]["all"]
        results[name] = {
            "seconds": {f: round(statistics.median(r[f] for r in rounds), 4) for f in rounds[0]},
            "kept": sum(map(is_kept, all_answers)),
            "dropped": dict(Counter(answer for answer in all_answers if not is_kept(answer)).most_common()),
        }
    results["web_to_fineweb"] = flips(answers["web"]["all"], answers["fineweb"]["all"])
    if args.datatrove_python:
        results["agreement"] = compare(answers["fineweb"], answers["datatrove"])
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        show(results, size)
    if args.datatrove_python and not args.texts:
        here = str(args.datatrove_python)
        sys.argv = ["PYTHON" if part == here else part for part in sys.argv]  # the record says how, not where
        record("filters", results, ["ingot"])


def read_texts(path: Path) -> Iterator[str]:
    if ".warc" in path.name:
        from ingot.data.extract.html import Extract
        from ingot.data.sources.warc import read_warc

        extract = Extract()
        for document, drop in read_warc(path, "benchmark"):
            if drop is None and extract(document) is None:
                yield document.text
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def ours(texts: list[str], preset: str) -> tuple[dict, dict]:
    """Return the verdict of every filter of `preset` on every text, and CPU seconds. Both Gophers of datatrove are one
    here."""
    rules = PRESETS[preset]
    stages = [stage for stage in quality_stages(rules).values() if stage]
    alone = {"all": stages}
    if preset == "fineweb":
        repetition = replace(rules.gopher, enabled=False), rules.gopher_repetition
        quality = rules.gopher, replace(rules.gopher_repetition, enabled=False)
        alone = {
            "gopher_repetition": [Gopher(*repetition, words=rules.words)],
            "gopher": [Gopher(*quality, words=rules.words)],
            "c4": [C4(rules.c4, words=rules.words)],
            "fineweb": [FineWeb(rules.fineweb, words=rules.words)],
        } | alone
    answers, seconds = {}, {}
    for name, run in alone.items():
        documents = [Document(id="", url="", source="", file="", record_id="", text=text) for text in texts]
        started = time.process_time()
        drops = [next((drop for stage in run if (drop := stage(document))), None) for document in documents]
        seconds[name] = time.process_time() - started
        answers[name] = [d.rule if d else sha256(document.text) for d, document in zip(drops, documents, strict=True)]
    return answers, seconds


def theirs(python: Path, path: str) -> tuple[dict, dict]:
    done = subprocess.run([python, "-c", DATATROVE, path], stdout=subprocess.PIPE, check=True, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_kept(answer: str) -> bool:
    """An answer is the hash of the text that is left, or the dotted name of a rule."""
    return "." not in answer


def flips(web: list[str], fineweb: list[str]) -> dict[str, int]:
    """Count the documents that only one of the two presets keeps, by the rule of the other."""
    found: Counter = Counter()
    for one, other in zip(web, fineweb, strict=True):
        if is_kept(one) and not is_kept(other):
            found[f"kept by web, {other} in fineweb"] += 1
        elif is_kept(other) and not is_kept(one):
            found[f"{one} in web, kept by fineweb"] += 1
    return dict(found.most_common())


def compare(mine: dict, others: dict) -> dict:
    """Per filter: shares of documents with the same fate, and with the same fate and text, and those that differ."""
    found = {}
    for name in FILTERS:
        pairs = list(zip(mine[name], others[name], strict=True))
        found[name] = {
            "same_fate": sum(is_kept(a) == is_kept(b) for a, b in pairs) / len(pairs),
            "same_text": sum(a == b or not (is_kept(a) or is_kept(b)) for a, b in pairs) / len(pairs),
            "differ": [(i, *pair) for i, pair in enumerate(pairs) if is_kept(pair[0]) != is_kept(pair[1])],
        }
    return found


def show(results: dict, size: int) -> None:
    documents = results["documents"]
    print(f"{documents:,} documents, {size / 1e6:.2f} MB, compiled core: {'yes' if results['compiled'] else 'no'}")
    for name in [*PRESETS, "datatrove"]:
        if name not in results or name == "none":
            continue
        part = results[name]
        print(f"\n{name}: keeps {part['kept']:,}")
        for step, seconds in part["seconds"].items():
            rate, per = size / 1e6 / max(seconds, 1e-9), seconds / documents * 1e3
            same = results["agreement"][step] if name == "datatrove" else {}
            agreement = f"  same fate {same['same_fate']:.2%}, same text {same['same_text']:.2%}" if same else ""
            print(f"  {step:20}{rate:9.2f} MB/s {per:9.3f} ms per document{agreement}")
    print("\nweb and fineweb decide differently:")
    for which, count in results["web_to_fineweb"].items():
        print(f"  {count:6,}  {which}")
    if "datatrove" in results:
        times = results["datatrove"]["seconds"]["all"] / results["fineweb"]["seconds"]["all"]
        print(f"\nall filters: {times:.0f} times as fast as datatrove")


if __name__ == "__main__":
    main()
