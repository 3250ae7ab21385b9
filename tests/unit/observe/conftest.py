"""A run as its events show it, line by line, and the rules of alerts on it."""

from dataclasses import replace

import pytest

from ingot.observe.alerts.rules import AlertRules
from ingot.planner.request.presets import load_model
from ingot.schema import events
from ingot.schema.alert_record import AlertRecord
from ingot.schema.alerting import Alerts
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import Checkpoint, Cost, Data, RunConfig, Train

START = 1_780_000_000.0
RUN_DIR = "runs/demo"
HOSTILE = "<script>alert('x')</script>\x1b[31m\u202e\nBcc: <!channel>"


def run_of(alerts: Alerts = Alerts(), **changes) -> RunConfig:  # noqa: B008
    train = Train(steps=100_000, seq_len=8, global_batch=4, micro_batch=2, device="cuda")
    return RunConfig(
        name="demo",
        model=load_model("tiny").arch,
        data=Data(tokens="t", weights={"web": 3.0, "books": 1.0}),
        train=train,
        parallel=Parallel(dp_shard=2),
        checkpoint=Checkpoint(every_steps=100),
        cost=Cost(usd_per_hour=10.0),
        alerts=alerts,
    ) if not changes else replace(run_of(alerts), **changes)  # fmt: skip


def plan_of(run: RunConfig, step_seconds: float, high: float = 0.0) -> Plan:
    return Plan(
        run_sha256="0" * 64,
        cluster=Cluster(name="c", device="cuda", memory_bytes=1),
        parameters=1,
        flops_per_token=6.0,
        tokens_per_step=run.tokens_per_step,
        steps=run.train.steps,
        memory_bytes={"weights": 1},
        step_seconds=step_seconds,
        step_seconds_low=step_seconds / 2 if high else 0.0,
        step_seconds_high=high,
        checkpoint_bytes=1,
    )


class History:
    """A run that writes a log line every 10 steps of a second. events: those so far. records: what the rules gave."""

    def __init__(self, run: RunConfig, plan: Plan | None = None):
        self.run, self.rules = run, AlertRules(run, plan, RUN_DIR)
        self.time, self.step = START, 0
        self.events: list[dict] = []
        self.records: list[AlertRecord] = []
        self.start()

    def event(self, kind: str, **fields) -> list[AlertRecord]:
        self.events.append({"kind": kind, "time": self.time, **fields})
        found = self.rules.take(self.events[-1])
        self.records += found
        return found

    def start(self, from_step: int = 0) -> list[AlertRecord]:
        self.step = from_step
        return self.event(events.RUN_STARTED, from_step=from_step, world_size=2, device="cuda", attempt=0)

    def line(self, seconds: float = 1.0, **changes) -> list[AlertRecord]:
        """A log line of 10 steps of `seconds`, with a checkpoint where one is due."""
        waits = changes.pop("collectives", 0.05 * seconds)
        saves, axes = changes.pop("saves", True), changes.pop("axes", {})
        self.step, self.time = self.step + 10, self.time + 10 * seconds
        facts = {"tokens_per_second": self.run.tokens_per_step / seconds, "step_seconds": seconds, "mfu": 0.45,
                 "cost_usd": 0.0, "eta_seconds": 3600.0} | changes  # fmt: skip
        found = self.event(events.PROGRESS, step=self.step, steps=self.run.train.steps, loss=3.0, **facts)
        uses = {"least": waits, "mean": waits, "most": waits, "rank": 0}
        found += self.event(events.WAITS, step=self.step, steps=10, collectives=uses, axes=axes)
        if saves and self.step % (self.run.checkpoint.every_steps or 10**9) == 0:
            facts = {"bytes": 1000, "stall_seconds": 0.1, "write_seconds": 1.0, "path": "x"}
            found += self.event(events.CHECKPOINT, step=self.step, **facts)
        return found

    def lines(self, number: int, **changes) -> list[AlertRecord]:
        return [record for _ in range(number) for record in self.line(**changes)]


@pytest.fixture
def history():
    """`history(alerts=..., plan=..., **changes of the run)`: a run that has just started."""

    def begin(*, alerts: Alerts = Alerts(), plan: Plan | None = None, **changes) -> History:  # noqa: B008
        return History(run_of(alerts, **changes), plan)

    return begin
