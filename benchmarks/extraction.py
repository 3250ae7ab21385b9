"""Extraction of main content: quality on marked pages and CPU time per page, `fast` and `accurate` beside trafilatura.

DATA holds crawl files (warc/*.warc.gz), truth_warc.jsonl (which record is which page) and gold_extraction.jsonl.gz:
texts marked by people (Zyte's article extraction benchmark), texts of Readability's test pages, and strings that must
or must not be found (trafilatura's evaluation). Scores:

- zyte, readability: precision and recall of runs of four words, as multisets, averaged over pages; F1 of the averages.
- snippets: F1 over all strings; one that must not be found and is, is a false positive.

Each score is given for all pages and for two halves (by a hash of the page's key): the rules of `accurate` were made on
half A. Every page goes through every method in turn, so that a busy spell hits all alike. Time is CPU time from the
decoded page to the cleaned text. trafilatura (fast=True) runs in an interpreter that has it; the first pages do not
count.

    python benchmarks/extraction.py [DATA] [--trafilatura-python PYTHON] [--json PATH]
"""

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from record import record

from ingot.data.extract import accurate, html
from ingot.data.extract.html import ExtractRules, clean_text, decode_page, extract_text
from ingot.data.extract.page import parse_page
from ingot.data.sources.warc import read_warc
from ingot.storage import write_json

WARM_UP = 5
KINDS = {"full_text": "zyte", "full_text_readability": "readability", "snippets": "snippets"}

# Reads pages, answers with CPU seconds and text: a line with the number of bytes, then those bytes.
WORKER = """
import json, logging, sys, time, trafilatura
logging.disable(logging.CRITICAL)
while header := sys.stdin.buffer.readline():
    page = sys.stdin.buffer.read(int(header)).decode()
    started = time.process_time()
    try:
        text = trafilatura.extract(page, fast=True, include_comments=False) or ""
    except Exception:  # a page that it cannot take has no text, as with every method here
        text = ""
    answer = json.dumps([time.process_time() - started, text, trafilatura.__version__]).encode()
    sys.stdout.buffer.write(b"%d\\n%b" % (len(answer), answer))
    sys.stdout.buffer.flush()
"""


class Trafilatura:
    """trafilatura in a process of its own."""

    def __init__(self, python: str):
        self.process = subprocess.Popen([python, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.version = ""

    def __call__(self, page: str) -> tuple[float, str]:
        assert self.process.stdin and self.process.stdout
        body = page.encode("utf-8", "replace")
        self.process.stdin.write(b"%d\n%b" % (len(body), body))
        self.process.stdin.flush()
        header = self.process.stdout.readline()
        if not header:
            raise SystemExit("the interpreter of --trafilatura-python ended: has it trafilatura?")
        seconds, text, self.version = json.loads(self.process.stdout.read(int(header)))
        return seconds, text


def timed(function: Callable[[str], str]) -> Callable[[str], tuple[float, str]]:
    def run(page: str) -> tuple[float, str]:
        started = time.process_time()
        text = function(page)
        return time.process_time() - started, text

    return run


def load(data: Path) -> dict[str, tuple[bytes, str, dict]]:
    """Key -> (raw page, charset of the header, gold)."""
    with gzip.open(data / "gold_extraction.jsonl.gz", "rt", encoding="utf-8") as file:
        gold = {row["id"]: row for row in map(json.loads, file)}
    rows = map(json.loads, (data / "truth_warc.jsonl").read_text(encoding="utf-8").splitlines())
    keys = {row["record_id"]: row["key"] for row in rows if row["kind"] == "real"}
    pages = {}
    for path in sorted((data / "warc").glob("*-0*.warc.gz")):
        for document, drop in read_warc(path, "web"):
            key = keys.get(document.record_id)
            if drop is None and key in gold:
                pages[key] = (document.raw, document.charset, gold[key])
    return pages


def four_words(text: str) -> Counter:
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3)))


def f1(precision: float, recall: float) -> dict[str, float]:
    value = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"f1": round(value, 4), "precision": round(precision, 3), "recall": round(recall, 3)}


def shingle_score(texts: Sequence[tuple[str, dict]]) -> dict[str, float]:
    precision, recall = 0.0, 0.0
    for text, gold in texts:
        expected, got = four_words(gold["gold"]), four_words(text) if text else Counter()
        common = sum((expected & got).values())
        precision += common / max(sum(got.values()), 1)
        recall += common / max(sum(expected.values()), 1)
    return f1(precision / len(texts), recall / len(texts))


def one_line(text: str) -> str:
    """Cleaned (soft hyphens go), with single spaces."""
    return " ".join(clean_text(text).split())


def snippet_score(texts: Sequence[tuple[str, dict]]) -> dict[str, float]:
    found = missed = wrong = 0
    for text, gold in texts:
        text = one_line(text)
        hits = sum(one_line(snippet) in text for snippet in gold["must"])
        found, missed = found + hits, missed + len(gold["must"]) - hits
        wrong += sum(one_line(snippet) in text for snippet in gold["must_not"])
    return f1(found / max(found + wrong, 1), found / max(found + missed, 1))


def scores(texts: dict[str, str], pages: dict[str, tuple[bytes, str, dict]]) -> dict:
    result = {}
    for kind, name in KINDS.items():
        score = snippet_score if kind == "snippets" else shingle_score
        for half, keys in {
            "": list(pages),
            " A": [k for k in pages if in_a(k)],
            " B": [k for k in pages if not in_a(k)],
        }.items():
            chosen = [(texts[key], pages[key][2]) for key in keys if pages[key][2]["kind"] == kind]
            if chosen:
                result[name + half] = {"pages": len(chosen)} | score(chosen)
    return result


def in_a(key: str) -> bool:
    return hashlib.blake2b(key.encode()).digest()[0] % 2 == 0


def stages(pages: dict[str, tuple[bytes, str, dict]]) -> dict[str, dict[str, float]]:
    """CPU milliseconds per page of each step of the two methods."""
    rules, spent = ExtractRules(), {"fast": Counter(), "accurate": Counter()}

    def lap(method, step, function, *arguments):
        started = time.process_time_ns()
        result = function(*arguments)
        spent[method][step] += time.process_time_ns() - started
        return result

    for raw, charset, _ in pages.values():
        page, _ = lap("fast", "decode", decode_page, raw, charset)
        tree = lap("fast", "parse", html.HTMLTree.parse, page)
        lap("fast", "check depth", html.check_depth, page, tree, rules.max_depth, rules.max_work)
        text = lap("fast", "extract", html.tree_text, tree)
        lap("fast", "clean", clean_text, text)
        lap("accurate", "decode", decode_page, raw, charset)
        rows = lap("accurate", "parse", lambda page=page: parse_page(page.encode("utf-8", "replace")))
        text = lap("accurate", "extract", accurate.main_text, rows)
        lap("accurate", "clean", clean_text, text)
    return {
        method: {step: round(nanoseconds / 1e6 / len(pages), 3) for step, nanoseconds in steps.items()}
        for method, steps in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=os.environ.get("INGOT_TEST_DATA"), help="folder of pages")
    parser.add_argument(
        "--trafilatura-python",
        default=os.environ.get("TRAFILATURA_PYTHON"),
        help="an interpreter that has trafilatura (default: $TRAFILATURA_PYTHON, or this one)",
    )
    parser.add_argument("--json", type=Path, help="write the results there and not to benchmarks/results")
    args = parser.parse_args()
    if args.data is None:
        parser.error("DATA is not given and INGOT_TEST_DATA is not set")
    pages = load(args.data)
    methods: dict[str, Callable[[str], tuple[float, str]]] = {
        method: timed(partial(extract_text, rules=ExtractRules(method=method))) for method in ("fast", "accurate")
    }
    python = args.trafilatura_python or (sys.executable if importlib.util.find_spec("trafilatura") else None)
    peer = Trafilatura(python) if python else None
    if peer:
        methods["trafilatura"] = peer
    texts: dict[str, dict[str, str]] = {name: {} for name in methods}
    seconds = dict.fromkeys(methods, 0.0)
    for number, (key, (raw, charset, _)) in enumerate(pages.items()):
        page = decode_page(raw, charset)[0]
        for name, method in methods.items():
            spent, texts[name][key] = method(page)
            seconds[name] += spent if number >= WARM_UP else 0.0
    results: dict[str, object] = {
        "pages": len(pages),
        "megabytes": round(sum(len(raw) for raw, _, _ in pages.values()) / 1e6, 1),
        "cpu_ms_per_page": {name: round(seconds[name] / (len(pages) - WARM_UP) * 1e3, 3) for name in methods},
        "scores": {name: scores(texts[name], pages) for name in methods},
        "stages_ms_per_page": stages(pages),
    }
    if peer:
        results["trafilatura"] = peer.version
        results["times_trafilatura"] = {
            name: round(seconds["trafilatura"] / seconds[name], 2) for name in ("fast", "accurate")
        }
    show(results)
    if args.json:
        write_json(args.json, results)
    else:
        print(record("extraction", results, ["ingot", "resiliparse", "numpy"]))


def show(results: dict) -> None:
    columns = list(next(iter(results["scores"].values())))
    print(f"{results['pages']} pages, {results['megabytes']} MB; F1")
    print(f"{'':13}{'ms/page':>9}" + "".join(f"{column:>15}" for column in columns))
    for name, row in results["scores"].items():
        values = "".join(f"{row[column]['f1']:15.4f}" for column in columns)
        print(f"{name:13}{results['cpu_ms_per_page'][name]:9.2f}{values}")
    for method, steps in results["stages_ms_per_page"].items():
        print(f"{method}: " + ", ".join(f"{step} {value} ms" for step, value in steps.items()))
    if "times_trafilatura" in results:
        print(f"times as fast as trafilatura {results['trafilatura']}: {results['times_trafilatura']}")


if __name__ == "__main__":
    main()
