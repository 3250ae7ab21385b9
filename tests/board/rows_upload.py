"""Rows of uploads that are cut off: the run is killed at each request to its store; the store, while a run uploads."""

import shutil
import signal
import time

from tests.s3_server import BUCKET, Fault, S3Server

from ingot.drill.job import END_SECONDS, gone_within, marked_processes
from ingot.drill.oracles import Verdicts, read_trace
from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.checkpoint.manifest import MANIFEST

from .bench import Bench
from .row import INTERVAL, Row, judge_recovered, mode_of, random_of, resumed_from
from .rows_store import STEP_OF_TENTH, judge_finished, judge_stored, on_store, request_of

_SAVED, _DURING = 4, 8  # steps of the checkpoint that the store has, and of the one whose upload is cut off
_SEEDS = 5  # as many seeds have all requests together
_URL = f"s3://{BUCKET}/run"
_SETTINGS = (mode_of("async"), f'checkpoint.remote.url="{_URL}"')
_DEEDS = {"kill-before": "killed before it", "kill-after": "killed after it"}
_DOWN_STEPS = 2 * INTERVAL  # that a run trains while its store is down: there is a save among them


def rs13_killed(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill a run at every fifth request to its store, those of this seed, before and after the store has executed it;
    remove its disk, and give the same command again."""
    base = f"stored-base-{seed}"
    with S3Server() as server:
        ended = bench.attempt(base, *_SETTINGS, until=_SAVED, env=server.environment)
        assert ended.code == 10, ended.output
        stored = len(server.history) - 1
        before = len(server.calls)
        bench.copy(base, "counted")
        ended = bench.attempt("counted", *_SETTINGS, until=_DURING, env=server.environment)
        assert ended.code == 10, ended.output
        count = len(server.calls) - before
        for k in range(1 + seed % _SEEDS, count + 1, _SEEDS):
            for do in _DEEDS:
                server.back_to(stored)
                _killed_at(bench, verdicts, server, base, do, k)
        verdicts.numbers["requests"] = float(count)


def _killed_at(bench: Bench, verdicts: Verdicts, server: S3Server, base: str, do: str, k: int) -> None:
    name, since = f"{base}-{do}-{k}", verdicts.findings
    folder = bench.copy(base, name)
    begun = len(server.calls)
    server.faults, server.kill = [Fault(do=do, at=k)], lambda: bench.kill_attempt(name)
    killed = bench.attempt(name, *_SETTINGS, until=_DURING, env=server.environment)
    server.faults, made = [], server.calls[begun:]
    if killed.code == 10 and len(made) < k:
        return  # threads share requests out in another way each time: this time, it needed fewer
    call = made[k - 1]
    where = f"{_DEEDS[do]}: request {k}, {call}"
    verdicts.judge("o6", where, "" if killed.code == -signal.SIGKILL else f"exit code {killed.code}: {killed.output}")
    gone_within(END_SECONDS, lambda: marked_processes(folder.root))
    earlier = read_trace(folder)
    committed = max(int(key.split("step-")[1][:8]) for key in server.objects if key.endswith(f"/{MANIFEST}"))
    shutil.rmtree(folder.root)
    judge_stored(bench, verdicts, name, where, _URL, server, committed)
    ended = bench.attempt(name, *_SETTINGS, env=server.environment)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-500:]}")
    start = resumed_from(folder)
    fetched = [event["step"] for event in read_events(folder.events, events.CHECKPOINT_FETCHED)]
    right = fetched == [start] == [committed]
    verdicts.judge("o6", where, "" if right else f"fetched {fetched}, went on from {start}: the store had {committed}")
    judge_recovered(bench, verdicts, name, where, bench.reference(ranks=1), faults=2, earlier=earlier)
    judge_stored(bench, verdicts, name, where, _URL, server)
    verdicts.came_of(_DEEDS[do], request_of(call), f"step {start}", since)
    for left in (name, f"{name}-fetched"):
        bench.drop(left)


def rs31_store(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill the store at a random request of a run; start it again when the run has trained, saved, and reported that
    the store is away."""
    random, name, since = random_of("RS31 store", seed), f"store-{seed}", verdicts.findings
    folder, last = bench.folder(name), max(bench.reference(*STEP_OF_TENTH).trace)
    k = random.randrange(18, 36)  # the requests before record the attempt: a new run does not begin without an answer
    with S3Server(Fault(do="kill-before", at=k)) as server:
        server.kill = server.stop
        process = bench.start(name, *on_store(_URL, seed), env=server.environment)
        while process.poll() is None and not server.failed:
            time.sleep(0.01)
        if not server.failed:
            ended = bench.ended(process)
            verdicts.judge("o6", name, f"it ended with {ended.code} before request {k}: {ended.output[-300:]}")
            return
        away = bench.last_step(name)
        wanted, where = min(away + _DOWN_STEPS, last), f"away from request {k}, step {away} on"
        bench.wait_for_step(name, wanted, process)
        reached = bench.last_step(name)
        verdicts.judge("o6", where, "" if reached >= wanted else f"without the store it reached step {reached}")
        while process.poll() is None and not list(read_events(folder.events, events.CHECKPOINT_NOT_STORED)):
            time.sleep(0.01)
        server.start()
        ended, reported = bench.ended(process), list(read_events(folder.events, events.CHECKPOINT_NOT_STORED))
        again = reported and all(one["code"] == "E-STORE-UNREACHABLE" and one["retry_seconds"] for one in reported)
        verdicts.judge("o6", where, "" if again else f"events of uploads {reported}")
        judge_finished(bench, verdicts, name, where, ended, server)
        verdicts.came_of("store killed", request_of(server.failed[0].partition(" at ")[2]), "whole", since)


ROWS = (
    Row("RS13 killed", "SIGKILL at every request to the store, before and after it; loss of the disk", rs13_killed),
    Row("RS31 store", "the store is killed while a run uploads, and is back after two saves", rs31_store),
)
