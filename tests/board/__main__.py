"""python -m tests.board: the rows, one line of JSON per row and seed; exit code 1 if one is red, or slow (times.py).

python -m tests.board                              all rows with five seeds
python -m tests.board --workers 2                  the same, two rows at a time
python -m tests.board --rows RS09,RS10 --seeds 1   some rows, with seed 0
python -m tests.board --write                      all rows, and the tables in docs/reliability.md
python -m tests.board --rows RS09 --write          some rows, and the tables of their cases there
python -m tests.board --rows "RS09 disks" --seeds 1 --all-points   all crash points of a row that samples them
python -m tests.board --rows RS09 --json a.jsonl   a part of the rows today, and
python -m tests.board --lines a.jsonl --write      the rest later: what the file has is not played again
python -m tests.board --lines a.jsonl --seeds 0 --write            the tables of what the file has
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue

from ingot.drill.oracles import Verdicts

from . import ALL, MISSING, killpoints
from .bench import ROOT, Bench
from .row import Row, carry_out
from .table import CASES, RESTORES, cases_of, restores_of, table_of, with_all_points
from .times import NO_LIMITS, load_now, too_slow

PAGE = ROOT / "docs" / "reliability.md"
_LOOK_SECONDS = 0.2
RECORD = ROOT / "benchmarks" / "results" / "board.jsonl"  # the lines of the table in PAGE


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.board", description="Run the board of reliability.")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="only these rows, as RS09,RS10")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to this number, exclusive (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="rows played at a time (default: %(default)s)")
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables of {PAGE.name} whose rows are asked for"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines of JSON to this file as well")
    parser.add_argument(
        "--lines",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="take the rows and seeds that these files have",
    )
    parser.add_argument(
        "--all-points",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="rows that sample crash points (RS09 disks, ...) take all of them, N at a time (default: 1)",
    )
    args = parser.parse_args(arguments)
    if reason := killpoints.missing():
        parser.error(reason)
    if unknown := set(args.rows or ()) - {row.id for row in ALL}:
        parser.error(f"{', '.join(sorted(unknown))}: not a row that runs; those are {', '.join(r.id for r in ALL)}")
    rows = [row for row in ALL if not args.rows or row.id in args.rows]
    ids = {row.id for row in rows}
    if args.write and (parts := [(name, of) for name, of in CASES.items() if ids & {*of} and not ids >= {*of}]):
        name, of = parts[0]
        wanted = f"the table {name!r} has {', '.join(of)}"
        parser.error(f"--write: {wanted}: ask for all, those of before with --lines")
    lines = [line for file in args.lines for line in _read(file) if line["id"] in ids]
    known = {(line["id"], line["seed"]) for line in lines}
    not_played = {row.id: reason for row in rows if (reason := row.missing())}
    for name, reason in not_played.items():
        print(f"{name}: not played: {reason}", file=sys.stderr)
    about, began = own(), time.monotonic()
    seeds_of = {row.id: [seed for seed in range(args.seeds) if (row.id, seed) not in known] for row in rows}
    to_play = [(row, seed) for row in rows if row.id not in not_played for seed in seeds_of[row.id]]
    for line in play_all(to_play, args.workers, args.all_points):
        lines.append(line | about)
        text = json.dumps(lines[-1])
        print(text, flush=True)
        if args.json:  # at once: a run of an hour may be interrupted
            with args.json.open("a") as file:
                file.write(text + "\n")
    minutes = sum(line["seconds"] for line in lines) / 60
    played = f", {(time.monotonic() - began) / 60:.1f} minutes by {args.workers} workers" if args.workers > 1 else ""
    slow = _slow_rows(rows, lines)
    red = sorted({line["id"] for line in lines if not line["passed"]} | slow.keys())
    more = " or more" if any(line["seed"] >= args.seeds for line in lines) else ""
    seeds = f"{args.seeds} seeds{more}" if args.seeds else "the recorded seeds"
    seeds += f" in {minutes:.1f} minutes"
    names = f" ({', '.join(red)})" if red else ""
    without = f", {len(not_played)} not played" if not_played else ""
    summary = f"{len(rows)} rows with {seeds}: {len(red)} red{names}, {len(MISSING)} missing{without}{played}"
    table = table_of(lines, slow)
    print(f"\n{table}\n\n{summary}")
    if args.write:
        if not args.rows:
            write(f"{played_on(lines)}: {summary}.\n\n{table}")
            if restoring := [line for line in lines if "restores" in line]:
                write(f"{played_on(restoring)}.\n\n{restores_of(restoring)}", RESTORES)
        for name, of in CASES.items():
            found = with_all_points([line for line in lines if line["id"] in of and "outcomes" in line])
            if {line["id"] for line in found} == {*of}:  # a row that was not played would be lost from the table
                names = ", ".join(sorted({line["id"] for line in found}))
                seeds = ", ".join(map(str, sorted({line["seed"] for line in found})))
                write(f"{played_on(found)}: {names}, seeds {seeds}.\n\n{cases_of(found)}", name)
    return 1 if red else 0


def play_all(to_play: list[tuple[Row, int]], workers: int, all_points: int) -> Iterator[dict]:
    """Play rows with their seeds, in a number of processes. Yields the lines as they come. One process plays all seeds
    of a row, whose undisturbed runs serve them; if it ends, those that it has not played are red. Rows whose times have
    limits are played before the others, with none beside them."""
    if workers > 1 and (timed := [one for one in to_play if one[0].limits != NO_LIMITS]):
        yield from play_all(timed, 1, all_points)
        to_play = [one for one in to_play if one[0].limits == NO_LIMITS]
    if workers == 1:
        with Bench() as bench:
            bench.all_points = all_points
            yield from (play(bench, row, seed) for row, seed in to_play)
        return
    seeds: dict[str, list[int]] = {}
    for row, seed in to_play:
        seeds.setdefault(row.id, []).append(seed)
    context = get_context("fork")
    with context.Manager() as manager, ProcessPoolExecutor(workers, context) as pool:
        lines: Queue[dict] = manager.Queue()
        playing = {pool.submit(play_row, name, of, all_points, lines): name for name, of in seeds.items()}
        while playing or not lines.empty():
            try:
                line = lines.get(timeout=_LOOK_SECONDS)
            except Empty:
                for done in [one for one in playing if one.done() and lines.empty()]:
                    name, error = playing.pop(done), done.exception()
                    yield from (red_line(name, seed, error) for seed in seeds[name] if error)
                continue
            seeds[line["id"]].remove(line["seed"])
            yield line


def play_row(name: str, seeds: list[int], all_points: int, lines: "Queue[dict]") -> None:
    """Play the row `name` with these seeds on a bench of its own, and put each line into `lines` at once."""
    row = next(row for row in ALL if row.id == name)
    with Bench() as bench:
        bench.all_points = all_points
        for seed in seeds:
            lines.put(play(bench, row, seed))


def red_line(name: str, seed: int, error: BaseException) -> dict:
    """Return the line of a row that was not played, because its process ended with an error."""
    verdicts = Verdicts()
    verdicts.judge("o6", "the process of the row", repr(error))
    return verdicts.as_json(name, seed) | {"seconds": 0.0}


def play(bench: Bench, row: Row, seed: int) -> dict:
    """Play a row with a seed. Returns its line; an error of the row itself makes it red. The line has the load of the
    machine without the row, before it and after it: the higher one."""
    before = load_now()
    verdicts, began = Verdicts(), time.monotonic()
    try:
        carry_out(bench, row, seed, verdicts)
    except Exception:
        verdicts.judge("o6", "the row itself", traceback.format_exc(limit=-3))
    line = verdicts.as_json(row.id, seed) | {"seconds": round(time.monotonic() - began, 1)}
    return line | before | {"others": max(before["others"], load_now()["others"])}


def _read(file: Path) -> list[dict]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def _slow_rows(rows: Sequence[Row], lines: Sequence[dict]) -> dict[str, list[str]]:
    """Return what is wrong with the times of rows, by the ids of those with findings."""
    recorded = _read(RECORD)
    own, earlier = ({row.id: [one for one in of if one["id"] == row.id] for row in rows} for of in (lines, recorded))
    found = {row.id: too_slow(row.limits, own[row.id], earlier[row.id]) for row in rows}
    return {name: wrong for name, wrong in found.items() if wrong}


def own() -> dict[str, str]:
    """Return what each line of this run of the board has in common."""
    return {"commit": commit(), "date": str(date.today()), "machine": machine()}


def machine() -> str:
    """Describe this machine: cores and system."""
    return f"{len(os.sched_getaffinity(0))} cores, {os.uname().sysname} {os.uname().machine}"


def commit() -> str:
    """Return the commit of the working tree, "unknown" outside a repository."""
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def played_on(lines: list[dict]) -> str:
    """Describe when, where and with which commits lines were played."""
    on, machines, commits = (sorted({line[key] for line in lines}) for key in ("date", "machine", "commit"))
    return f"`python -m tests.board` on {' and '.join(on)}, {' and '.join(machines)}, commit {' and '.join(commits)}"


def write(text: str, name: str = "", program: str = "-m tests.board") -> None:
    """Write the text between the markers of a table of the page: of all rows, or one of `program` by its name."""
    what = f"{name}, written by python {program}" if name else f"written by python {program}"
    begin, end = f"<!-- begin: {what} -->", f"<!-- end: {what} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
