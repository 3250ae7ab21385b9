"""Rows of the remote tier: a store that fails in every way a store can, and a node that is lost with its disk."""

import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from unittest.mock import patch

from tests.s3_server import BUCKET, KEY, SECRET, Fault, S3Server

from ingot.drill.job import Ended, gone_within, marked_processes
from ingot.drill.oracles import Verdicts, read_trace
from ingot.errors import IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.places import open_store
from ingot.trainer.checkpoint.fence import LEASE
from ingot.trainer.checkpoint.manifest import MANIFEST, verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier

from .bench import Bench, options
from .row import INTERVAL, Row, drawn_mode, judge_recovered, random_of, resumed_from
from .times import NEW_DISK

STEP_OF_TENTH = ("train.global_batch=64",)  # a step of about 0.1 s, so that uploads run beside training
_WAY_OUT, _REFUSED, _REFUSED_CODE = "AWS_ACCESS_KEY_ID", "E-STORE-REFUSED", 3
_WRITES, _ALL = ("PUT *", "BEGIN *"), ("*",)
# The faults of RS13, each of them once; the counts are beyond the 4 repetitions of a request.
_TRANSIENT = (
    Fault(do="503", times=6),
    Fault(do="429", times=2, seconds=1.0),
    Fault(do="500", times=2),
    Fault(do="reset", call="PUT *rank-*"),
    Fault(do="reset", times=2),
    Fault(do="silent", seconds=1.0),
    Fault(do="lost-answer", call="PUT *manifest.json"),
    Fault(do="lost-answer", times=2),
    Fault(do="wrong-tag", call="PUT *rank-*", times=2),
    Fault(do="other-bytes", call="PUT *rank-*"),
    Fault(do="stale", call="LIST *checkpoints*", times=2, changes=3),
)
_OF_AN_UPLOAD = ("PUT *rank-*", "PUT *ledger*", "PUT *run.toml", "PUT *manifest.json", "HEAD *ledger*", "*")


def _script(random: Random) -> list[Fault]:
    """Return the transient faults, each from a random one of the requests of the first two or three uploads on. Those
    of any request are drawn for one kind that uploads make, or for all.

    The first 14 requests take the lease and list the store: a new run does not begin without an answer.
    """
    calls = [random.choice(_OF_AN_UPLOAD) if one.call == "*" else one.call for one in _TRANSIENT]
    return [
        replace(one, call=call, at=random.randrange(15, 45) if call == "*" else random.randrange(1, 4))
        for one, call in zip(_TRANSIENT, calls, strict=True)
    ]


@contextmanager
def _tier(url: str, folder: RunFolder, variables: dict[str, str]) -> Iterator[RemoteTier]:
    with patch.dict(os.environ, variables):
        yield RemoteTier(folder, open_store(url), RemoteCheckpoints(url=url))


def _stored_steps(url: str, folder: RunFolder, variables: dict[str, str]) -> list[int]:
    with _tier(url, folder, variables) as tier:
        return tier.steps()


def on_store(url: str, seed: int) -> list[str]:
    return options([*STEP_OF_TENTH, drawn_mode(seed), f'checkpoint.remote.url="{url}"'])


def request_of(call: str) -> str:
    """Return the kind of a request, for people: its method, and the kind of its object."""
    method, _, key = call.partition(" ")
    kinds = {
        f"/{LEASE}": "lease",
        f"/{MANIFEST}": "manifest",
        "/rank-": "tensors",
        "/ledger": "samples",
        "/run.toml": "run file",
        "/checkpoints": "checkpoints",
        "/weights": "weights",
    }
    return f"{method} {next((kind for part, kind in kinds.items() if part in key), 'objects')}"


def rs13(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Train beside a store with transient faults, begin where it denies every write or all, and lose the permission
    during a run."""
    url, random, name = f"s3://{BUCKET}/run", random_of("RS13", seed), f"faults-{seed}"
    bench.reference(*STEP_OF_TENTH)  # before the runs whose steps are compared with its
    with S3Server(*_script(random)) as server:
        ended, since = bench.train(name, *on_store(url, seed), env=server.environment), verdicts.findings
        failed, server.faults = server.failed[:], []
        where = f"transient faults ({len(failed)} requests)"
        kinds = {entry.partition(" ")[0] for entry in failed}
        verdicts.judge("o6", where, "" if len(kinds) >= 4 else f"of all faults only {sorted(kinds)} took place")
        judge_finished(bench, verdicts, name, where, ended, server)
        _came_of(verdicts, failed, "", since)
        verdicts.numbers |= {
            "requests_failed": float(len(failed)),
            "step_ratio": _step_seconds(bench.folder(name)) / _step_seconds(_reference_folder(bench)),
        }
    for calls in (_WRITES, _ALL):
        _denied_start(bench, f"denied-{seed}-{len(calls)}", verdicts, calls, seed)
    _denied_later(bench, f"denied-later-{seed}", verdicts, random, seed)


def _came_of(verdicts: Verdicts, failed: list[str], when: str, since: int) -> None:
    """Count the requests that failed (`S3Server.failed`) as cases: the run ended whole, and so is all in its store."""
    for do, _, call in (entry.partition(" at ") for entry in failed):
        verdicts.came_of(do + when, request_of(call), "whole", since)


def _reference_folder(bench: Bench) -> RunFolder:
    return bench.folder("-".join(["reference", "2", *STEP_OF_TENTH]))


def _step_seconds(folder: RunFolder) -> float:
    times = [event["time"] for event in read_events(folder.events, events.STEP)]
    return median(later - earlier for earlier, later in itertools.pairwise(times))


def judge_stored(
    bench: Bench, verdicts: Verdicts, name: str, where: str, url: str, server: S3Server, last: int | None = None
) -> None:
    """Judge the store after the run `name`: it has the checkpoint of step `last`, the last one of the log if that is
    None, and every one that it shows is whole."""
    folder, empty = bench.folder(name), bench.folder(f"{name}-fetched")
    bench.drop(empty.root.name)
    empty.checkpoints.mkdir(parents=True)
    last = bench.last_step(name) if last is None else last
    with _tier(url, empty, server.environment) as tier:
        steps = tier.steps()
        verdicts.judge("o6", where, "" if last in steps else f"step {last} is not among the stored steps {steps}")
        reported = [event["step"] for event in read_events(folder.events, events.CHECKPOINT_STORED)]
        kept = sorted({*reported, *steps})[-RemoteCheckpoints.keep :]  # an answer that was lost is not reported
        lost = sorted({*reported}.intersection(kept) - {*steps})
        verdicts.judge("o6", where, f"the steps {lost} were reported as stored" if lost else "")
        for step in steps:
            try:
                tier.fetch(step)
                verify_checkpoint(empty.checkpoint(step))
                verdicts.judge("o6", where, "")
            except IngotError as error:
                verdicts.judge("o6", where, f"stored step {step}: {error.found}")
    verdicts.numbers["stored"] = float(len(steps))


def _judge_secrets(bench: Bench, verdicts: Verdicts, name: str, where: str, ended: Ended) -> None:
    """Judge that no credential is in a file of the run or in its output."""
    root = bench.folder(name).root
    found = [path for path in root.rglob("*") if path.is_file() and _has_secret(path.read_bytes())]
    found += [Path("the output")] if _has_secret(ended.output.encode()) else []
    verdicts.judge("o6", where, f"a credential is in {', '.join(map(str, found))}" if found else "")


def _has_secret(data: bytes) -> bool:
    return KEY.encode() in data or SECRET.encode() in data


def judge_finished(
    bench: Bench, verdicts: Verdicts, name: str, where: str, ended: Ended, server: S3Server, faults: int = 1
) -> None:
    """Judge a run that was disturbed by its store `faults` times: all is as without a fault, also in the store."""
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(*STEP_OF_TENTH), faults=faults)
    judge_stored(bench, verdicts, name, where, f"s3://{BUCKET}/run", server)
    _judge_secrets(bench, verdicts, name, where, ended)


def _denied_start(bench: Bench, name: str, verdicts: Verdicts, calls: tuple[str, ...], seed: int) -> None:
    """Begin a run whose store answers 403 to `calls`, and give the same command again when it does not any more.

    A launcher that cannot write its lease to the store does not know whether another one trains the run.
    """
    where, url = f"403 from the start to {', '.join(calls)}", f"s3://{BUCKET}/run"
    since = verdicts.findings
    with S3Server(*_denials(calls)) as server:
        ended = bench.train(name, *on_store(url, seed), env=server.environment)
        verdicts.judge("o6", where, "something was stored" if server.objects else "")
        errors = ended.output.count("\n  rule: ")
        clear = errors == 1 and all(part in ended.output for part in (_REFUSED, url, _WAY_OUT))
        verdicts.judge("o6", where, "" if ended.code == _REFUSED_CODE and clear else f"{ended.code}: {ended.output}")
        begun = list(read_events(bench.folder(name).events, events.RUN_STARTED, events.STEP))
        verdicts.judge("o6", where, f"it began to train: {begun[0]}" if begun else "")
        _judge_secrets(bench, verdicts, name, where, ended)
        server.faults = []
        again = bench.train(name, *on_store(url, seed), env=server.environment)
        judge_finished(bench, verdicts, name, f"{where}, then permitted", again, server)
        _came_of(verdicts, server.failed, " from the start", since)


def _denied_later(bench: Bench, name: str, verdicts: Verdicts, random: Random, seed: int) -> None:
    """Take the permission away while a run trains, until some uploads and signs of life were refused, and give it back.

    Training goes on, an event names each upload that was refused, and the next one is whole.
    """
    calls, step, uploads = random.choice((_WRITES, _ALL)), random.randrange(1, 5), random.randrange(1, 3)
    where, url = f"403 from step {step} on to {', '.join(calls)}, {uploads} uploads", f"s3://{BUCKET}/run"
    since = verdicts.findings
    with S3Server() as server:
        process = bench.start(name, *on_store(url, seed), "--set", "launch.lease_seconds=2", env=server.environment)
        bench.wait_for_step(name, step, process)
        server.faults = _denials(calls)
        while process.poll() is None and not (
            len(_refused_uploads(bench, name)) >= uploads and any(f"/{LEASE}/" in call for call in server.failed)
        ):
            time.sleep(0.01)
        server.faults = []
        ended = bench.ended(process)
        reported = _refused_uploads(bench, name)
        steps = [event["step"] for event in reported]
        verdicts.judge("o6", where, "" if len(set(steps)) == len(steps) >= uploads else f"events for the steps {steps}")
        clear = all(
            event["code"] == _REFUSED and _WAY_OUT in event["fix"] and not event["retry_seconds"] for event in reported
        )
        verdicts.judge("o6", where, "" if clear else f"events {reported}")
        judge_finished(bench, verdicts, name, where, ended, server)
        _came_of(verdicts, server.failed, " later", since)


def _denials(calls: tuple[str, ...]) -> list[Fault]:
    return [Fault(do="403", call=call, times=10**6) for call in calls]


def _refused_uploads(bench: Bench, name: str) -> list[dict]:
    return list(read_events(bench.folder(name).events, events.CHECKPOINT_NOT_STORED))


def rs07(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill all processes of the job near a random step, remove its run folder, and give the same command again: with a
    folder as the store, and with an object store."""
    random = random_of("RS07", seed)
    with S3Server() as server:
        (bench.root / f"stored-{seed}").mkdir()
        for url in (f"file://{bench.root}/stored-{seed}", f"s3://{BUCKET}/run"):
            lost_node(bench, verdicts, f"lost-{seed}-{url[:2]}", url, random, server.environment, seed)


def lost_node(
    bench: Bench, verdicts: Verdicts, name: str, url: str, random: Random, variables: dict[str, str], seed: int
) -> None:
    """Lose the run `name` with its disk, continue it from the store `url`, and judge."""
    step, folder = random.randrange(2 * INTERVAL + 1, 20), bench.folder(name)
    where = f"{url.partition(':')[0]}, near step {step}"
    process = bench.start(name, *on_store(url, seed), env=variables)
    bench.wait_for_step(name, step, process)
    while process.poll() is None and not list(read_events(folder.events, events.CHECKPOINT_STORED)):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.1))  # somewhere in the next step
    injected = time.time()
    for pid in [process.pid, *marked_processes(folder.root)]:
        with suppress(ProcessLookupError):  # the kernel ends the ranks of a supervisor that is gone
            os.kill(pid, signal.SIGKILL)
    killed = bench.ended(process)
    verdicts.judge("o6", where, "" if killed.code == -signal.SIGKILL else f"exit code {killed.code} before the kill")
    gone_within(5, lambda: marked_processes(folder.root))
    before = read_trace(folder)
    shutil.rmtree(folder.root)
    newest = max(_stored_steps(url, folder, variables), default=0)
    ended = bench.train(name, *on_store(url, seed), env=variables)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    start = resumed_from(folder)
    verdicts.judge("o6", where, "" if start >= newest > 0 else f"from step {start}, the newest stored is {newest}")
    fetched = [event["step"] for event in read_events(folder.events, events.CHECKPOINT_FETCHED)]
    verdicts.judge("o6", where, "" if fetched == [start] else f"fetched the steps {fetched}, started from {start}")
    later = (event for event in read_events(folder.events, events.STEP) if event["step"] > max(before))
    verdicts.recover += [event["time"] - injected for event in itertools.islice(later, 1)]
    # What was trained after the newest stored checkpoint is done again: an upload may be some intervals late.
    late = -(-(max(before) - start) // INTERVAL)
    judge_recovered(bench, verdicts, name, where, bench.reference(*STEP_OF_TENTH), faults=max(late, 1), earlier=before)


ROWS = (
    Row("RS07", "SIGKILL of all processes of a job, and loss of its disk", rs07, limits=NEW_DISK),
    Row(
        "RS13",
        "object store: 403 at the start or later, 429, 500, 503, resets, silence, lost answers, wrong tags, late lists",
        rs13,
    ),
)
