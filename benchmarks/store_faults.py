"""Runs whose store fails, on every S3 server that this machine has: what was sent again, what was lost, and the steps.

    python benchmarks/store_faults.py [--servers ceph moto own] [--rounds 3] [--quick] [--write]

Each run has one rank, saves in the background every 4 steps, and uploads through a proxy that plays one kind of fault
(tests/fault_proxy.py). Ceph is killed and frozen too, and moto frozen. A run has to end with the bits of an undisturbed
one, and every checkpoint that the server shows is fetched past the proxy and verified: `lost` counts what is wrong.
step_ratio: the median step of the run over that of a run without a store in the same round, whose servers and proxy
take no time of the two cores; fault "none" shows what these take alone. --quick: short runs of short steps, whose
times are not compared: for a machine that other work keeps busy, and for .ci/nightly. A server that is not installed is
named, and not played. --write: results/store_faults.json, and the table in docs/reliability.md. Exit code 1 if anything
is lost.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.board.__main__ import PAGE, commit, write
from tests.board.bench import Bench
from tests.board.row import judge_recovered, mode_of
from tests.board.rows_store import STEP_OF_TENTH, judge_stored
from tests.fault_proxy import FaultProxy
from tests.http_faults import Fault
from tests.s3_servers import SERVERS

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

NONE, NAME = "none", "store servers"
AWAY_SECONDS = 3.0
_QUICK = ("train.steps=12",)
# The faults of requests: those that a run makes are single ones, because its files are below the size of a part.
FAULTS: dict[str, tuple[Fault, ...]] = {
    NONE: (),
    "503 with Retry-After": (Fault(do="503", call="PUT *", at=6, times=6, seconds=1),),
    "429 with Retry-After": (Fault(do="429", call="PUT *", at=6, times=6, seconds=1),),
    "500": (Fault(do="500", call="PUT *", at=6, times=6),),
    "reset in a body": (Fault(do="reset", call="PUT *rank-*", times=2), Fault(do="reset", call="PUT *manifest.json")),
    "no answer": (Fault(do="silent", call="PUT *rank-*", seconds=2),),
    "lost answer": (Fault(do="lost-answer", call="PUT *manifest.json"), Fault(do="lost-answer", call="PUT *rank-*")),
    "request twice": (Fault(do="twice", call="PUT *checkpoints*", times=4),),
    "wrong bit": (Fault(do="wrong-bit", call="PUT *rank-*", times=2),),
    "wrong tag": (Fault(do="wrong-tag", call="HEAD *rank-*", times=2),),
    "late listing": (Fault(do="stale", call="LIST *checkpoints*", at=2, times=3, changes=3),),
}


def _cut_off(server: Any, proxy: FaultProxy) -> None:
    proxy.stop()
    time.sleep(AWAY_SECONDS)
    proxy.start()


def _killed(server: Any, proxy: FaultProxy) -> None:
    server.kill()
    time.sleep(AWAY_SECONDS)
    server.start()


def _frozen(server: Any, proxy: FaultProxy) -> None:
    with server.frozen():
        time.sleep(AWAY_SECONDS)


# What happens to a whole server while a run uploads, and the servers that it can happen to.
OUTAGES: dict[str, tuple[Callable[[Any, FaultProxy], None], tuple[str, ...]]] = {
    "cut off": (_cut_off, tuple(SERVERS)),
    "killed": (_killed, ("ceph",)),
    "frozen": (_frozen, ("ceph", "moto")),
}


@dataclass(frozen=True)
class Played:
    """A run beside one fault. struck, again: the requests that the fault struck, and those of them that were asked
    again. wrong: what was lost or differs."""

    struck: int
    again: int
    sent_bytes: int
    step_seconds: float
    wrong: tuple[str, ...]


def main() -> int:
    """Play, and print a line for each server and fault. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    absent = {name: reason for name in args.servers if (reason := SERVERS[name].missing())}
    for name, reason in absent.items():
        print(f"{name}: NOT PLAYED: {reason}", flush=True)
    load, plain, settings = os.getloadavg()[0], list[float](), _QUICK if args.quick else STEP_OF_TENTH
    runs: dict[tuple[str, str], list[Played]] = defaultdict(list)
    with Bench() as bench:
        for number in range(args.rounds):
            plain += [] if args.quick else [_plain(bench, number)]
            for name in (name for name in args.servers if name not in absent):
                _play_server(bench, name, number, settings, runs)
    faults = {key: _line(found, plain) for key, found in runs.items()}
    for (name, fault), line in faults.items():
        print(f"{name:5} {fault:22} {json.dumps(line)}")
    lost = sum(line["lost"] for line in faults.values())
    if args.write:
        servers = {
            name: {
                "version": SERVERS[name].version(),
                "faults": {fault: line for (of, fault), line in faults.items() if of == name},
            }
            for name in args.servers
            if name not in absent
        }
        found = {"commit": commit(), "rounds": args.rounds, "load_before": round(load, 1)}
        print(record("store_faults", found | {"servers": servers, "absent": absent}, packages=["torch", "obstore"]))
        how = "`: short runs, whose times are not compared" if args.quick else "`"
        command = " ".join(["`python benchmarks/store_faults.py", *sys.argv[1:]]) + how
        about = f"{command}; {time.strftime('%Y-%m-%d')}, commit {commit()}, load {load:.0f}"
        missing = "".join(f" Not played: {name}, which {reason}." for name, reason in absent.items())
        write(f"{about}, rounds: {args.rounds}.{missing}\n\n{_table(servers)}", NAME, "benchmarks/store_faults.py")
        print(PAGE)
    return 1 if lost else 0


def _plain(bench: Bench, number: int) -> float:
    """Return the median seconds of a step of a run without a store."""
    name = f"plain-{number}"
    ended = bench.attempt(name, *STEP_OF_TENTH, mode_of("async"))
    assert ended.code == 0, ended.output
    return _step_seconds(bench.folder(name))


def _play_server(
    bench: Bench, name: str, number: int, settings: tuple[str, ...], runs: dict[tuple[str, str], list[Played]]
) -> None:
    with SERVERS[name].start() as server:
        for fault, script in FAULTS.items():
            runs[name, fault].append(_play(bench, name, server, f"{fault}-{number}", settings, script))
        for fault, (outage, servers) in OUTAGES.items():
            if name in servers:
                runs[name, fault].append(_play(bench, name, server, f"{fault}-{number}", settings, (), outage))


def _play(
    bench: Bench,
    name: str,
    server: Any,
    fault: str,
    steps: tuple[str, ...],
    script: tuple[Fault, ...],
    outage: Callable[[Any, FaultProxy], None] | None = None,
) -> Played:
    run, verdicts = f"{name}-{fault}".replace(" ", "-"), Verdicts()
    url = f"s3://{SERVERS[name].bucket}/{run}"
    settings = (*steps, mode_of("async"), f'checkpoint.remote.url="{url}"')
    reference = bench.reference(*steps, ranks=1)
    with FaultProxy(server.environment, *map(replace, script)) as proxy:
        with ThreadPoolExecutor(1) as other:
            training = other.submit(bench.attempt, run, *settings, env=proxy.environment)
            # In this thread: a daemon that a thread has started ends with that thread.
            while outage is not None and not training.done():
                if any(call.startswith("PUT ") and "rank-" in call for call in list(proxy.calls)):
                    outage(server, proxy)
                    break
                time.sleep(0.005)
            attempt = training.result()
        verdicts.judge("o6", run, "" if attempt.code == 0 else f"exit code {attempt.code}: {attempt.output[-500:]}")
        struck = len(proxy.failed) or int(outage is not None and any("rank-" in call for call in proxy.calls))
        verdicts.judge("o6", run, "" if struck or not (script or outage) else "the fault did not take place")
        again = proxy.repeated()
    judge_recovered(bench, verdicts, run, run, reference)
    judge_stored(bench, verdicts, run, run, url, server)
    wrong = tuple(one for found in verdicts.wrong.values() for one in found)
    played = Played(struck, again, proxy.bytes_sent, _step_seconds(bench.folder(run)), wrong)
    print(run, played, flush=True)
    for left in (run, f"{run}-fetched"):
        bench.drop(left)
    return played


def _step_seconds(folder: RunFolder) -> float:
    times = [event["time"] for event in read_events(folder.events, events.STEP)]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _line(found: list[Played], plain: list[float]) -> dict[str, Any]:
    ratios = [one.step_seconds / other for one, other in zip(found, plain, strict=False)]  # none of quick runs
    return {
        "requests_struck": sum(one.struck for one in found),
        "asked_again": sum(one.again for one in found),
        "sent_bytes": sum(one.sent_bytes for one in found),
        "lost": sum(len(one.wrong) for one in found),
        "wrong": [wrong for one in found for wrong in one.wrong],
        "step_ratio": round(statistics.median(ratios), 3) if ratios else None,
    }


def _table(servers: dict[str, dict[str, Any]]) -> str:
    text = [
        "| server | fault | requests struck | asked again | MB sent | lost | step time, of one without a store |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, server in servers.items():
        for fault, line in server["faults"].items():
            numbers = (
                f"{line['requests_struck']} | {line['asked_again']} | {line['sent_bytes'] / 1e6:.1f} | {line['lost']}"
            )
            ratio = "" if line["step_ratio"] is None else f"{line['step_ratio']:.2f}"
            text.append(f"| {name} {server['version']} | {fault} | {numbers} | {ratio} |")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
