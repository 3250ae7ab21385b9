"""One real `ingot train` in which the trouble that alerts are for is planted, each at its steps: it reaches a webhook
once, with its evidence and the next command, and its end does, too.

The disk is the one thing that is only pretended: the process of alerts reads 0 free bytes while a file is there.
"""

import json
import re
import time

import pytest
from tests.frozen import frozen
from tests.unit.observe.conftest import plan_of
from tests.unit.observe.servers import Receiver, http_server

from ingot.config import to_dict
from ingot.events import read_events
from ingot.observe.alerts import kinds
from ingot.schema import events
from ingot.schema.alert_record import FIRED, RESOLVED
from ingot.storage import write_json
from ingot.theory.rules import load_run

from .conftest import RUN_FILE, Project, ended, write_tokens, writers_of

STEPS = 320
JUNK, NAN = 28, 32
SLOW, HELD, DRIFTS, JUMP = range(40, 52), range(83, 89), range(94, 99), 110
# The processes that write checkpoints are stopped after the one of step SAVED, so that the next one is late. The one
# after it must not be: steps are long until the alert is there.
SAVED, LATE = 200, range(225, 240)
# A calm step takes CALM_SECONDS and what the machine needs; of a slow one, and of one that is held in a collective,
# the rest is far larger. The limits are between them: a busy machine may need ten times as long.
CALM_SECONDS, SLOW_SECONDS, HELD_SECONDS, LATE_SECONDS, LIMIT_SECONDS = 0.03, 0.7, 0.2, 0.2, 0.4
PLANTED = f"""
import math, time
from pathlib import Path
import numpy as np
import torch
from ingot.drill.planted import change_steps, with_tokens
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer import run as trainer_run
from ingot.trainer.loader.order import Order
from ingot.trainer.mesh.waiting import WaitClock
from ingot.theory.flops import train_flops_per_token

SLOW, HELD, DRIFTS, LATE = {SLOW}, {HELD}, {DRIFTS}, {LATE}

class Planted(StepCallback):
    def __init__(self, run, options):
        self.rank, self.pieces, self.vocab, self.step = run.rank, run.pieces, run.config.model.vocab_size, 0
        self.batch_size, self.waited = run.config.train.global_batch, False
        change_steps(batch=self.on_batch, before_norm=self.on_norm)
        samples, wait, now = Order.samples, WaitClock.time, time.time

        def drifting(order, first, count):
            ids = samples(order, first, count)
            if first // self.batch_size + 1 in DRIFTS:  # the sampler draws from the second source only
                ids = int(order.windows.ends[0]) + ids % int(order.windows.counts[1])
            return ids

        def held(clock, function, *args, **kwargs):
            def slowly(*args, **kwargs):
                if self.step in HELD and not self.waited:
                    self.waited = True
                    time.sleep({HELD_SECONDS})
                return function(*args, **kwargs)
            return wait(clock, slowly, *args, **kwargs)

        def peak(config, place):  # of a device on which a calm step has a usual MFU
            of_token = train_flops_per_token(config.model, config.train.seq_len)
            return of_token * config.tokens_per_step / {CALM_SECONDS / 2}

        Order.samples, WaitClock.time, trainer_run.total_peak = drifting, held, peak
        time.time = lambda: now() + (7200 if self.step >= {JUMP} else 0)  # a machine that slept for two hours

    def on_batch(self, batch):
        self.step, self.waited = batch.step, False
        if batch.step != {JUNK}:
            return batch
        shape = (*batch.inputs.shape[:-1], batch.inputs.shape[-1] + 1)
        return with_tokens(batch, torch.full(shape, self.vocab - 1))

    def on_norm(self, step):
        if step == {NAN}:
            self.pieces[0].grad.fill_(math.nan)

    def on_gradients(self, step):
        slow = {SLOW_SECONDS} if step in SLOW and self.rank == 1 else {LATE_SECONDS} if step in LATE else 0
        time.sleep(slow or {CALM_SECONDS})

CALLBACKS.register(CallbackPart(name="planted", make=Planted))
"""
FULL_DISK = """
import os, sys
if "ingot.observe.alerts" in sys.orig_argv:
    from ingot.observe.alerts import sink

    sink._DISK_SECONDS, statvfs = 0.2, os.statvfs

    def planted(path):
        found = list(statvfs(path))
        if os.path.exists(os.environ["DISK_FULL"]):
            found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    os.statvfs = planted
"""
SETTINGS = f"""
[callbacks.planted]
[plugins]
modules = ["planted"]
folder = "."

[evaluate.background]
every = ""

[guard]
settle_steps = 8
window = 16
ready = 8
calm_steps = 16
norm_ratio = 0.0

[launch]
straggler_factor = 2.0

[alerts]
mfu_target = 0.45
mfu_least = {CALM_SECONDS / 2 / LIMIT_SECONDS}
throughput_least = {CALM_SECONDS / LIMIT_SECONDS}
communication_most = 0.5
goodput_least = 0.5
goodput_seconds = 4
checkpoint_intervals = 1.5
silent_seconds = 3600
webhook = {{ url_env = "HOOK" }}
"""
# kind -> the step of its command, and a part of its evidence
EXPECTED = {
    kinds.SPIKE: (JUNK, rf"step {JUNK}: .*spike.*its update was skipped"),
    kinds.NOT_FINITE: (NAN, rf"step {NAN}: .*not finite.*its update was skipped"),
    kinds.STRAGGLER: (None, r"rank 1 on .* times as long as its peers \(compute\)"),
    kinds.LOW_MFU: (None, r"the MFU is .*% \(a fault of .*\) in 3 log lines in a row, below 4%; the target is 45%"),
    kinds.THROUGHPUT: (None, r"tokens/s in 3 log lines in a row are .* that the plan predicts"),
    kinds.COMMUNICATION: (None, r"every rank waits in collectives for .*, above 50%"),
    kinds.MIX_DRIFT: (None, r"source dive has 100.0% of the samples, and its weight is 10.0%"),
    kinds.RUN_SILENT: (None, rf"no event for 2 h, after step {JUMP - 1} "),
    kinds.GOODPUT: (None, r"steps that count took .*, below 50%"),
    kinds.DISK: (None, r"has 0 B free, and the next checkpoint needs"),
    kinds.CHECKPOINT_OLD: (None, r"the newest checkpoint is \d+ steps old, and one is due every 20 steps"),
}
AGAIN = set(EXPECTED) - {kinds.DISK}  # which are in the log


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("alerts")
    write_tokens(root / "tokens", shards=2)
    manifest = json.loads((root / "tokens/manifest.json").read_text())
    manifest["shards"][1]["source"] = "dive"
    (root / "tokens/manifest.json").write_text(json.dumps(manifest))
    (root / "planted.py").write_text(PLANTED)
    (root / "site").mkdir()
    (root / "site/sitecustomize.py").write_text(FULL_DISK)
    text = RUN_FILE
    for before, after in {
        "steps = 120": f"steps = {STEPS}",
        'tokens = "tokens"': 'tokens = "tokens"\nweights = { walk = 0.9, dive = 0.1 }',
        'mode = "sync"': 'mode = "async"\nweights_every = ""',
        "log_every = 2": "log_every = 1",
    }.items():
        assert before in text
        text = text.replace(before, after)
    (root / "run.toml").write_text(text + SETTINGS)
    plan = plan_of(load_run(root / "run.toml"), CALM_SECONDS)
    write_json(root / "plan.json", to_dict(plan))
    return Project(root)


@pytest.mark.slow
def test_each_trouble_of_a_run_reaches_people_once_and_so_does_its_end(project: Project):
    full, site = project.root / "full", str(project.root / "site")
    with http_server(200) as server:
        process = project.start("run", HOOK=server.url, DISK_FULL=str(full), PYTHONPATH=site)
        folder = project.folder("run")
        project.wait_for_step("run", JUMP + 10, process, seconds=240)
        full.touch()
        wait_for(server, kinds.DISK, process)
        full.unlink()
        while not any(event["step"] == SAVED for event in read_events(folder.events, events.CHECKPOINT)):
            assert process.poll() is None
            time.sleep(0.02)
        with frozen(*writers_of(folder)):
            wait_for(server, kinds.CHECKPOINT_OLD, process)
        output = ended(process, 0)
    records = [one for _, body, _ in server.got for one in body["alerts"]]
    fired = [one for one in records if one["state"] == FIRED]
    assert sorted(one["kind"] for one in fired) == sorted(EXPECTED), [one["evidence"] for one in fired]
    for one in fired:
        step, evidence = EXPECTED[one["kind"]]
        assert re.search(evidence, one["evidence"]), one
        first = step if step is not None else one["step"] if one["since"] is None else one["since"]
        assert one["next"] == kinds.KINDS[one["kind"]].next(str(folder.root), first), one
    over = {one["kind"]: one["evidence"] for one in records if one["state"] == RESOLVED}
    assert sorted(over) == sorted(EXPECTED)
    assert not [evidence for evidence in over.values() if "the run has finished" in evidence], over
    assert f"step {STEPS}/{STEPS}" in output
    again = json.loads(project.ingot("alerts", str(folder.root), "--json", "--replay"))
    assert {one["kind"] for one in again["alerts"]} == AGAIN and all(one["over"] for one in again["alerts"])


def wait_for(server: Receiver, kind: str, process) -> None:
    """Wait until an alert of this kind has reached the webhook."""
    deadline = time.monotonic() + 60
    while not any(one["kind"] == kind for _, body, _ in list(server.got) for one in body["alerts"]):
        assert process.poll() is None and time.monotonic() < deadline, kind
        time.sleep(0.05)
