"""Run folders as training leaves them, for tests and measurements of what shows runs: of any length, with incidents."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ingot.config import to_dict, to_toml
from ingot.schema.alert_record import AlertRecord
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import Cost, Data, RunConfig, Schedule, Train
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json

START = 1_780_000_000.0
HOSTILE = "<img src=x onerror=alert(1)><script>alert('x')</script>"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """A run to write. ended: the last step so far. back: (from, to) of a roll-back, or none. slow: a rank that is slow
    at the end. hostile: texts of the run are markup. log_every: steps per log line."""

    name: str = "demo"
    steps: int = 600
    ended: int = 400
    log_every: int = 10
    ranks: int = 4
    back: tuple[int, int] | None = (250, 200)
    slow: int | None = 2
    hostile: bool = False
    metrics: bool = True
    level: float = 3.0

    def write(self, root: Path) -> Path:
        """Write the run into the folder `root`."""
        folder = RunFolder(root)
        root.mkdir(parents=True)
        folder.config.write_text(to_toml(self.config()))
        write_json(folder.plan, to_dict(self.plan()))
        with folder.events.open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in self.events())
        folder.alerts.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in self.alerts()))
        if self.metrics:
            self.write_metrics(folder.metrics)
        return root

    def config(self) -> RunConfig:
        arch = Arch(
            vocab_size=4096, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=344,
            max_seq_len=512,
        )  # fmt: skip
        return RunConfig(
            name=self.name,
            model=arch,
            data=Data(tokens="../tokens"),
            train=Train(steps=self.steps, seq_len=256, global_batch=16, micro_batch=4),
            parallel=Parallel(dp_shard=self.ranks),
            schedule=Schedule(warmup_steps=min(60, self.steps // 4)),
            cost=Cost(usd_per_hour=2.0),
        )

    def plan(self) -> Plan:
        return Plan(
            run_sha256="0" * 64,
            cluster=Cluster(name="c", device="cpu", devices_per_node=self.ranks, memory_bytes=8 << 30),
            parameters=1_233_536, flops_per_token=7.2e6, tokens_per_step=4096, steps=self.steps,
            memory_bytes={"weights": 5 * MIB, "activations": 300 * MIB},
            step_seconds=0.1, step_seconds_low=0.08, step_seconds_high=0.13, mfu=0.42, checkpoint_bytes=14 * MIB,
            usd=12.0,
        )  # fmt: skip

    def loss(self, step: int) -> float:
        noise = math.sin(step * 12.9898) * 0.08
        return self.level + 6 * math.exp(-step / 60) + noise

    def text(self, words: str) -> str:
        return words + HOSTILE if self.hostile else words

    def events(self) -> Iterator[dict]:
        """Yield the events of the log."""
        yield self.started(START, 0, 0)
        clock, step, back = START, 0, self.back
        while step < self.ended:
            step += 1
            clock += 0.1
            yield {"kind": "step", "time": clock, "step": step, "loss": self.loss(step), "grad_norm": 0.8 + 1 / step,
                   "lr": 3e-4 * min(step / 60, 1.0)}  # fmt: skip
            if step % self.log_every == 0:
                yield from self.line(clock, step)
            if step % 100 == 0:
                yield {"kind": "checkpoint", "time": clock, "step": step, "bytes": 14 * MIB, "stall_seconds": 0.05,
                       "snapshot_seconds": None, "write_seconds": 0.4, "verify_seconds": 0.1, "path": "x"}  # fmt: skip
                yield self.evaluation(clock, step)
                yield {"kind": "sample", "time": clock, "step": step, "prompt": self.text("Once"),
                       "text": self.text(" upon a time")}  # fmt: skip
            if back and step == back[0]:
                cause = self.text("was killed (SIGKILL)")
                yield {"kind": "fault", "time": clock, "rank": 1, "failure": "killed", "cause": cause, "step": step,
                       "detected_by": "supervisor"}  # fmt: skip
                yield {"kind": "restart", "time": clock + 1, "attempt": 1, "of": 3, "wait_seconds": 1.0, "kept": 0}
                clock += 4
                yield self.started(clock, 1, back[1])
                step, back = back[1], None
        if self.slow is not None:
            yield {"kind": "straggler", "time": clock, "step": step, "rank": self.slow, "host": self.text("node-7"),
                   "phase": "compute", "factor": 2.1, "since": step - 40, "seconds": 0.08, "ended": False,
                   "slowdown": None}  # fmt: skip

    def started(self, clock: float, attempt: int, from_step: int) -> dict:
        return {
            "kind": "run_started", "time": clock, "run": self.name, "attempt": attempt, "world_size": self.ranks,
            "layout": {"dp_shard": self.ranks}, "device": "cpu", "precision": "bf16", "parameters": 1_233_536,
            "flops_per_token": 7.2e6, "peak_flops": None, "versions": {"ingot": "0.1.0"}, "hardware": {"cores": 4},
            "from_step": from_step, "config_sha256": "9a" * 32, "data_fingerprint": "5f" * 32,
        }  # fmt: skip

    def line(self, clock: float, step: int) -> Iterator[dict]:
        loss = self.loss(step)
        yield {
            "kind": "progress", "time": clock, "step": step, "steps": self.steps, "loss": loss, "bpb": loss / 2.4,
            "grad_norm": 0.9, "lr": 3e-4, "tokens": step * 4096,
            "tokens_per_second": 40_960 * (1 + 0.02 * math.sin(step)), "mfu": 0.38 + 0.01 * math.sin(step),
            "data_wait_seconds": 0.001, "step_seconds": 0.1,
            "eta_seconds": (self.steps - step) * 0.1, "cost_usd": step * 1e-4, "peak_memory_bytes": 290 * MIB,
        }  # fmt: skip
        uses = {"data": 0.002, "pipeline": 0.0, "collectives": 0.02, "reading": 0.01, "computing": 0.06,
                "queued": 0.004, "blocked": 0.004}  # fmt: skip
        waits = {use: {"mean": own, "least": own / 2, "most": own * 2, "rank": 1} for use, own in uses.items()}
        spreads = {part: {"mean": own, "least": own / 2, "most": own * 2, "rank": 1}
                   for part, own in {"exposed": 0.015, "hidden": 0.03 + 0.01 * math.sin(step)}.items()}  # fmt: skip
        none = {part: {"mean": 0.0, "least": 0.0, "most": 0.0, "rank": 0} for part in spreads}
        axes = {"dp_shard": spreads, "cp": none, "world": {**none, "exposed": spreads["exposed"]}}
        yield {"kind": "waits", "time": clock, "step": step, "steps": self.log_every, **waits, "axes": axes}
        yield {
            "kind": "metrics",
            "time": clock,
            "step": step,
            "by": "noise",
            "values": {self.text("tokens"): 1.0 * step},
        }

    def evaluation(self, clock: float, step: int) -> dict:
        def part(bpb: float, tokens: int) -> dict:
            return {"bpb": bpb, "loss": bpb * 2.4, "tokens": tokens, "unigram_bpb": 2.83}

        bpb = (self.loss(step) + 0.1) / 2.4
        sources = {self.text("web"): part(bpb - 0.02, 20_000), "books": part(bpb + 0.2, 6_000)}
        return {"kind": "evaluation", "time": clock, "step": step, **part(bpb, 26_000), "by_source": sources,
                "seconds": 0.2}  # fmt: skip

    def alerts(self) -> list[AlertRecord]:
        first = AlertRecord(
            id="a1", kind="straggler", subject=f"rank {self.slow}", severity="warning", state="fired",
            time=START + 30, began=START + 20, step=300, since=280, value=2.1, limit=1.3,
            evidence=self.text("rank 2 takes 2.1 times as long as its peers"), next="ingot explain slow runs/demo",
        )  # fmt: skip
        spike = replace(
            first, id="a2", kind="spike", subject="", step=120, since=120, evidence="loss 9.1", time=START + 12
        )
        return [spike, first, replace(spike, state="resolved", time=START + 15)]

    def write_metrics(self, metrics: Path) -> None:
        """Write the numbers of the last steps of every rank, and the loss of all."""
        lineage = lineage_folder(metrics, 1, 1)
        lineage.mkdir(parents=True)
        facts = {"line_steps": self.log_every}
        run = TableWriter(lineage / "run", ["train/loss", "train/grad_norm", "run/goodput"], facts)
        for step in range(1, self.ended + 1):
            numbers = {"train/loss": self.loss(step), "train/grad_norm": 0.8 + 1 / step, "run/goodput": 0.93}
            run.add(step, START + step * 0.1, numbers)
            if step % 4096 == 0:
                run.flush()
        run.close()
        names = ("perf/step_seconds", "perf/wait_seconds", "perf/forward_seconds", "perf/backward_seconds",
                 "perf/optimizer_seconds", "data/wait_seconds", "memory/peak_bytes",
                 "perf/dp_shard/exposed_seconds")  # fmt: skip
        own = np.array([0.1, 0.03, 0.02, 0.04, 0.008, 0.001, 290.0 * MIB, 0.015])
        for rank in range(self.ranks):
            factor = np.array([1, 0.1, 2.1, 2.1, 1.05, 1, 1, 0.1]) if rank == self.slow else 1 + 0.01 * rank
            writer = TableWriter(lineage / f"rank-{rank:05}", list(names), facts)
            for step in range(max(self.ended - 20, 1), self.ended + 1):
                values = dict(zip(names, (own * factor).tolist(), strict=True))
                writer.add(step, START + step * 0.1, values)
            writer.close()
