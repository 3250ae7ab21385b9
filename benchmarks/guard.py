"""The cost of judging each step (trainer/guard), its false verdicts on healthy runs, and the spikes that it finds.

Cost: the CPU seconds of a judgment, relative to those of the step in which it is made, on one process; medians of
steps in which both are measured. The alerts are played on a log line of ten steps, and the range of the gradient is
measured in each of these steps; both are counted by the step, as often as a run with the defaults does them.

False verdicts: runs of a small model on real tokens, one per seed, with [guard] preset = "watch", which reports all
that it finds and changes nothing; then one with a warm-up of a tenth of its steps, whose data change in the middle from
one source to all. Everything that is found in them is a false verdict, except in the steps after the change.

Spikes: the same runs with the preset and all figures of the default, in which four steps each are spoiled
(planted_spikes.py): targets of other tokens, eight tokens again and again, tokens without a rule, and fifty times the
learning rate. Each has to be found in its step; the rate, which no loss shows before it has acted, in the next one.

    ingot quickstart --out demo
    python benchmarks/guard.py --tokens demo/data/tokens/train [--steps 2000] [--seeds 5] [--first-seed 0]
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from intervals import ratio_in_percent
from record import record

from ingot import train
from ingot.config import to_toml
from ingot.events import read_events
from ingot.planner.request.presets import load_model
from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.plugins import Plugins
from ingot.schema.run import Checkpoint, Data, Optim, RunConfig, Schedule, Train
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.build import build_parts
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.step import train_step

_SPIKED_STEPS = 1_400
_SPIKES = ("shuffled", "rate", "repeated", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="a token folder of real text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--parts", default="cost,healthy,spikes", help="some of them")
    args = parser.parse_args()
    tokens, parts = args.tokens.resolve(), args.parts.split(",")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    found: dict[str, object] = {}
    if "cost" in parts:
        found["cost"] = cost()
        print(found["cost"])
    if "spikes" in parts:
        found["spikes"] = {seed: spikes(run_of(tokens, _SPIKED_STEPS, seed, preset="guard"), seed) for seed in seeds}
        print(found["spikes"])
    if "healthy" in parts:
        found["steps"] = args.steps
        found["healthy runs"] = {seed: findings(run_of(tokens, args.steps, seed)) for seed in seeds}
        print(found["healthy runs"])
        changing = findings(run_of(tokens, args.steps, seeds.stop, warmup=args.steps // 10), change=True)
        found["with warm-up and another mixture"] = changing
        print(changing)
    record("guard", found, ["torch"])


def cost(rounds: int = 60) -> dict[str, object]:
    """Return the CPU seconds of a step and of all that the guard adds, and their ratio with its interval."""
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
    added = [seconds[part] for part in ("judgment", "alerts", "range")]
    return medians | ratio_in_percent(added, seconds["step"])


def run_of(tokens: Path, steps: int, seed: int, *, warmup: int = 50, preset: str = "watch") -> RunConfig:
    """Return a run of a small model."""
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
        checkpoint=Checkpoint(mode="sync", every_steps=100, weights_every=""),
        guard=replace(Guard(hash_every=0), preset=preset),
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


def spikes(run: RunConfig, seed: int) -> dict[str, object]:
    """Train `run` with spoiled steps. Returns what each of them was, and everything that was found."""
    planted = {500 + 250 * number + 13 * seed: kind for number, kind in enumerate(_SPIKES)}
    os.environ["SPIKES"] = " ".join(f"{step}:{kind}" for step, kind in planted.items())
    plugins = Plugins(modules=("planted_spikes",), folder=str(Path(__file__).parent))
    found = findings(replace(run, plugins=plugins, callbacks={"planted_spikes": {}}))
    at = {one["step"]: one["found"] for one in found if "found" in one}
    caught = {kind: step + (kind == "rate") in at for step, kind in planted.items()}
    return {"planted": planted, "caught": caught, "found": found}


if __name__ == "__main__":
    main()
