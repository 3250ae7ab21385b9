"""The cost of judging each step (trainer/guard), and its false verdicts on healthy runs.

Cost: the CPU seconds of a judgment, relative to those of the step in which it is made, on one process; medians of
steps in which both are measured. The alerts are played on a log line of ten steps, and the range of the gradient is
measured in each of these steps; both are counted by the step, as often as a run with the defaults does them.

False verdicts: runs of a small model on real tokens, one per seed, with [guard] preset = "watch", which reports all
that it finds and changes nothing; then one with a warm-up of a tenth of its steps, whose data change in the middle from
one source to all. Everything that is found in them is a false verdict, except in the steps after the change.

    ingot quickstart --out demo
    python benchmarks/guard.py --tokens demo/data/tokens/train [--steps 2000] [--seeds 5]
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from record import record

from ingot import train
from ingot.config import to_toml
from ingot.events import read_events
from ingot.planner.request.presets import load_model
from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.run import Checkpoint, Data, Optim, RunConfig, Schedule, Train
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.build import build_parts
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="a token folder of real text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    tokens = args.tokens.resolve()
    found: dict[str, object] = {"cost": cost()}
    print(found["cost"])
    healthy = {seed: findings(run_of(tokens, args.steps, seed)) for seed in range(args.seeds)}
    changing = findings(run_of(tokens, args.steps, args.seeds, warmup=args.steps // 10), change=True)
    found |= {"steps": args.steps, "healthy runs": healthy, "with warm-up and another mixture": changing}
    print(found)
    record("guard", found, ["torch"])


def cost(rounds: int = 60) -> dict[str, float]:
    """Return the CPU seconds of a step and of a judgment, and their ratio in percent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tiny = load_model("tiny")
    settings = Train(
        steps=10**6,
        seq_len=tiny.train.seq_len,
        global_batch=tiny.train.global_batch,
        micro_batch=tiny.train.global_batch,
        precision="fp32",
    )
    run = RunConfig(name="cost", model=tiny.arch, data=Data(tokens="made up"), train=settings)
    parts = build_parts(run, torch.device("cpu"), Path())
    judge = parts.step_judge
    assert judge is not None
    measured = GradientRange(
        parts.model.shards, tiny.arch.num_layers, torch.bfloat16, 1, tied=tiny.arch.tied_embeddings
    )
    watch = AlertWatch(run, parts.model.shards, measured, None, lambda *_, **__: None, is_first=True)
    seconds: dict[str, list[float]] = {"step": [], "judgment": [], "alerts": [], "range": []}
    for step in range(1, rounds + 1):
        ids = torch.randint(0, tiny.arch.vocab_size, (1, settings.global_batch, settings.seq_len + 1))
        batch = SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
        began = time.process_time()
        result = train_step(parts, batch, 1e-4)
        between = time.process_time()
        judged = judge.judge(result.loss, result.grad_norm)
        judge.add(result.loss, result.grad_norm, judged[0] > 0)
        if step > 5:  # the first steps allocate
            seconds["step"].append(between - began)
            seconds["judgment"].append(time.process_time() - between)
        first, loss, norm = 10 * step, float(result.loss), float(result.grad_norm)
        line = [StepNumbers(first + i, loss, norm, skipped=False) for i in range(10)]
        for shard in parts.model.shards:
            shard.grad = torch.ones_like(shard.value)
        began = time.process_time()
        measured.look(step)
        between = time.process_time()
        watch.line(line, 1e-4, np.array([watch.unchanged(line, 1e-4)]))
        if step > 5:
            seconds["range"].append((between - began) / run.guard.precision_every)
            seconds["alerts"].append((time.process_time() - between) / len(line))
    dist.destroy_process_group()
    medians = {part: statistics.median(each) for part, each in seconds.items()}
    rest = sum(medians[part] for part in ("judgment", "alerts", "range"))
    return medians | {"percent": round(100 * rest / medians["step"], 3)}


def run_of(tokens: Path, steps: int, seed: int, *, warmup: int = 50) -> RunConfig:
    """Return a run of a small model, which only watches."""
    tiny, manifest = load_model("tiny"), read_token_manifest(tokens)
    arch = replace(
        tiny.arch, vocab_size=manifest.vocab_size, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, d_ffn=176
    )
    return RunConfig(
        name=f"healthy-{seed}",
        seed=seed,
        model=replace(arch, head_dim=16, max_seq_len=128),
        data=Data(tokens=str(tokens)),
        train=Train(steps=steps, seq_len=128, global_batch=16, micro_batch=16, precision="fp32"),
        optim=Optim(lr=3e-3),
        schedule=Schedule(warmup_steps=warmup),
        checkpoint=Checkpoint(mode="sync", every_steps=steps, weights_every=""),
        guard=Guard(preset="watch", hash_every=0),
    )


def findings(run: RunConfig, *, change: bool = False) -> list[dict]:
    """Train `run`, and return what its guard found. change: train the first half on its first source alone."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(to_toml(run))
        if change:
            first = read_token_manifest(Path(run.data.tokens)).sources[0]
            train(file, out, overrides=[f"data.weights.{first}=1.0"], until_step=run.train.steps // 2)
            train(file, out, accept=["data.weights"])
        else:
            train(file, out)
        keys = ("step", "found", "loss", "loss_sigmas", "norm_sigmas", "alert", "value", "limit")
        found = read_events(out / "events.jsonl", events.FINDING, events.ALERT)
        return [{key: event[key] for key in keys if key in event} for event in found]


if __name__ == "__main__":
    main()
