"""python -m tests.mutants: every mutant, a table, and exit code 1 unless each one is killed by its tests.

python -m tests.mutants                          all mutants
python -m tests.mutants rotary zero              only mutants whose name contains one of these words
python -m tests.mutants --write docs/mutants.md  all mutants, and the table between the markers of that page
python -m tests.mutants rotary --json a.jsonl    a part of the mutants today, and
python -m tests.mutants --lines a.jsonl --write docs/mutants.md  the rest later: what the file has is not run again
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path

import ingot

from . import ALL, AREAS
from .mutant import Mutant
from .runner import MutantRunner, Result

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- begin: written by python -m tests.mutants -->", "<!-- end: written by python -m tests.mutants -->"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run the mutants of ingot.")
    parser.add_argument("names", nargs="*", help="run only mutants whose name contains one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table between the markers of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line of JSON per mutant to this file")
    parser.add_argument("--lines", type=Path, nargs="+", default=[], metavar="FILE", help="take the results they have")
    args = parser.parse_args(arguments)
    mutants = [mutant for mutant in ALL if not args.names or any(part in mutant.name for part in args.names)]
    if not mutants:
        parser.error(f"no mutant has a name with {' or '.join(args.names)}")
    if args.write and len(mutants) < len(ALL):
        parser.error("a page gets the table of all mutants: leave out the names")
    started = time.monotonic()
    recorded = read_lines(mutants, args.lines)
    left = [mutant for mutant in mutants if mutant.name not in recorded]

    def report(line: str) -> None:
        print(line, flush=True)

    def keep(result: Result) -> None:  # at once: a run of an hour may be interrupted
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line_of(result)) + "\n")

    runner = MutantRunner(ROOT, ingot.__name__, max(args.jobs, 1))
    ran = runner.run(left, report, keep if args.json else None) if left else []
    results = [*recorded.values(), *ran]
    surprises = [result for result in results if result.is_surprise]
    summary = (
        f"{summary_of(results)}; {len(ran)} in {(time.monotonic() - started) / 60:.1f} minutes, {args.jobs} at a time"
    )
    print(f"\n{table_of(results)}\n\n{summary}; {len(surprises)} surprises")
    for result in surprises:
        print(f"  {result.mutant.name}: {result.outcome}: {result.detail}")
    if args.write:
        write(
            args.write, f"`python -m tests.mutants` until {date.today()}: {summary_of(results)}.\n\n{table_of(results)}"
        )
    return 1 if surprises else 0


def line_of(result: Result) -> dict:
    """Return what `read_lines` needs, for a file of JSON lines."""
    found = {"outcome": result.outcome, "detail": result.detail, "seconds": round(result.seconds, 1)}
    return {"name": result.mutant.name, "mutant": identity(result.mutant)} | found | {"date": str(date.today())}


def read_lines(mutants: Iterable[Mutant], files: Iterable[Path]) -> dict[str, Result]:
    """Return mutant -> its newest recorded result; mutants that have changed since then are left out."""
    lines = [json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()]
    known = {(line["name"], line["mutant"]): line for line in lines}
    found = {mutant: known.get((mutant.name, identity(mutant))) for mutant in mutants}
    return {
        mutant.name: Result(mutant, line["outcome"], line["detail"], line["seconds"])
        for mutant, line in found.items()
        if line
    }


def identity(mutant: Mutant) -> str:
    """Return a hash of the change and its tests."""
    return sha256(json.dumps([mutant.file, mutant.before, mutant.after, mutant.tests]).encode()).hexdigest()[:12]


def summary_of(results: Sequence[Result]) -> str:
    outcomes = [result.outcome for result in results]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return f"{len(results)} mutants: {counts}"


def table_of(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown, by area."""
    by_name = {result.mutant.name: result for result in results}
    lines = ["| area | mutant | fault | killed by | s |", "|---|---|---|---|---|"]
    for area, mutants in AREAS.items():
        for result in (by_name[mutant.name] for mutant in mutants if mutant.name in by_name):
            detail = f"`{result.detail.removeprefix('tests/')}`" if result.outcome == "killed" else result.detail
            found = detail if result.outcome == "killed" else f"{result.outcome}: {detail}"
            what = result.mutant.what.replace("|", r"\|")
            lines.append(f"| {area} | {result.mutant.name} | {what} | {found} | {result.seconds:.0f} |")
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
