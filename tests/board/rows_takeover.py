"""Rows of two machines that share an object store and nothing else: one is suspended, and the other takes the run over.

Each has a run folder of its own, so only the store can refuse the first one when it goes on.
"""

import itertools
import os
import signal
import time

from tests.s3_server import BUCKET, Fault, S3Server

from ingot.drill.job import DEADLINE_SECONDS, Ended, marked_processes
from ingot.drill.oracles import Trace, Verdicts, read_trace
from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.checkpoint.fence import LEASE

from .bench import Bench
from .row import INTERVAL, Row, judge_recovered, random_of, resumed_from
from .rows_lease import BUSY, LEASE_OF_SECONDS, go_on
from .rows_store import STEP_OF_TENTH, judge_stored, on_store

_URL = f"s3://{BUCKET}/run"
_COMMIT = 2 * INTERVAL  # the step of the checkpoint whose commit comes late
_LOST = ("E-LEASE-LOST", "E-TIER-OTHER")  # of an upload that is refused


def rs30_store(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Suspend a job at a random step, and in its commit; let another take over its store, and the first one go on."""
    _in_a_step(bench, seed, verdicts)
    for published in (True, False):
        late_commit(bench, seed, verdicts, published=published)


def _in_a_step(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    step = random_of("RS30 store", seed).randrange(INTERVAL + 1, 3 * INTERVAL)
    name, where = f"taken-{seed}", f"suspended near step {step}"
    with S3Server() as server:
        process = bench.start(name, *_settings(seed), env=server.environment)
        bench.wait_for_step(name, step, process)
        while process.poll() is None and not _uploads(bench, name, events.CHECKPOINT_STORED):
            time.sleep(0.01)
        suspended = _suspend(bench, name)
        second = bench.train(f"{name}-second", *_settings(seed), env=server.environment)
        verdicts.judge("o6", where, "" if second.code == 0 else f"exit code {second.code}: {second.output[-500:]}")
        there = _checkpoints(server)
        go_on([pid for pid in suspended if pid != process.pid])  # the launcher, which looks at the lease, comes later
        _judge_refused_upload(bench, verdicts, name, where)
        go_on([process.pid])
        _judge_first(verdicts, where, bench.ended(process))
        _judge_same(verdicts, where, there, _checkpoints(server))
        _judge_second(bench, verdicts, f"{name}-second", where, server, read_trace(bench.folder(name)))


def late_commit(bench: Bench, seed: int, verdicts: Verdicts, *, published: bool) -> None:
    """Suspend a job while its last request of an upload, which stores the manifest, is on its way to the store. It
    arrives after another job has published its checkpoint of the same step, or before that, if not `published`."""
    name = f"late-commit-{seed}-{published}"
    where = f"suspended in the commit of step {_COMMIT}, {'after' if published else 'before'} that of the other job"
    until = _COMMIT if published else _COMMIT - 1
    with S3Server(Fault(do="late", call=f"PUT *checkpoints/step-{_COMMIT:08d}/manifest.json")) as server:
        process = bench.start(name, *_settings(seed), env=server.environment)
        held = server.held.wait(DEADLINE_SECONDS)
        verdicts.judge("o6", where, "" if held else "no commit reached the store")
        suspended = _suspend(bench, name)
        second = bench.train(f"{name}-second", *_settings(seed), "--until-step", str(until), env=server.environment)
        verdicts.judge("o6", where, "" if second.code == 10 else f"exit code {second.code}: {second.output[-500:]}")
        there = _checkpoints(server)
        server.released.set()
        server.executed.wait(DEADLINE_SECONDS)
        changed = sorted({key for key, _ in there.items() ^ _checkpoints(server).items()})
        late = [] if published else [f"run/checkpoints/step-{_COMMIT:08d}/manifest.json"]
        verdicts.judge("o6", where, "" if changed == late else f"its commit changed {changed} instead of {late}")
        go_on(suspended)
        _judge_first(verdicts, where, bench.ended(process))
        third = bench.train(f"{name}-second", *_settings(seed), env=server.environment)
        verdicts.judge("o6", where, "" if third.code == 0 else f"exit code {third.code}: {third.output[-500:]}")
        back = resumed_from(bench.folder(f"{name}-second"))
        verdicts.judge("o6", where, "" if back == until else f"the other job went on from {back} instead of {until}")
        _judge_second(bench, verdicts, f"{name}-second", where, server, read_trace(bench.folder(name)))


def _settings(seed: int) -> list[str]:
    return [*on_store(_URL, seed), "--set", LEASE_OF_SECONDS]


def _checkpoints(server: S3Server) -> dict[str, bytes]:
    """Return the objects of the store, without signs of life."""
    with server.lock:
        return {key: one.data for key, one in server.objects.items() if f"/{LEASE}/" not in key}


def _suspend(bench: Bench, name: str) -> list[int]:
    """Stop all processes of the run `name`, and return their ids."""
    pids = marked_processes(bench.folder(name).root)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def _uploads(bench: Bench, name: str, kind: str) -> list[dict]:
    return [event for event in read_events(bench.folder(name).events, kind) if event["what"] == "full"]


def _judge_refused_upload(bench: Bench, verdicts: Verdicts, name: str, where: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and not _uploads(bench, name, events.CHECKPOINT_NOT_STORED):
        time.sleep(0.01)
    refused = _uploads(bench, name, events.CHECKPOINT_NOT_STORED)
    right = refused and all(event["code"] in _LOST and not event["retry_seconds"] for event in refused)
    verdicts.judge("o6", where, "" if right else f"the uploads of the first job: {refused}")


def _judge_first(verdicts: Verdicts, where: str, first: Ended) -> None:
    fine = first.code == BUSY and "E-LEASE-LOST" in first.output
    verdicts.judge("o6", where, "" if fine else f"the first job ended with {first.code}: {first.output[-500:]}")


def _judge_same(verdicts: Verdicts, where: str, before: dict[str, bytes], after: dict[str, bytes]) -> None:
    changed = sorted({key for key, _ in before.items() ^ after.items()})
    verdicts.judge("o6", where, f"the first job changed {changed} in the store" if changed else "")


def _judge_second(bench: Bench, verdicts: Verdicts, name: str, where: str, server: S3Server, earlier: Trace) -> None:
    """Judge the job that took over, which has ended. earlier: the trace of the first one."""
    log = read_events(bench.folder(name).events, events.RUN_STARTED)
    start = next((event["from_step"] for event in itertools.islice(log, 1)), 0)
    begun = {step: times for step, times in earlier.items() if step <= start}  # later steps were trained by both
    reference = bench.reference(*STEP_OF_TENTH)
    judge_recovered(bench, verdicts, name, where, reference, earlier=begun)
    judge_stored(bench, verdicts, name, where, _URL, server)


ROWS = (Row("RS30 store", "a suspended job goes on after another took over its object store", rs30_store),)
