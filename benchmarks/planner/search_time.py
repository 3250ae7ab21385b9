"""The time of a search on one core, and its result.

python benchmarks/planner/search_time.py [NAME ...]
    writes results/planner_search_time.json; processor seconds, which a busy machine stretches less than the clock's
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record

from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.search.candidates import Candidate
from ingot.planner.search.search import search
from ingot.schema.run import Data, RunConfig, Train

# Model, sequences per step, their tokens, cluster.
CASES = {
    "8b on a node": ("llama3-8b", 128, 8192, "8xh100"),
    "70b on 1,024": ("llama3-70b", 1024, 8192, "128x8xh100"),
    "671b on 1,024": ("moe-671b", 4096, 4096, "128x8xh100"),
    "70b on 1,152, racks": ("llama3-70b", 1152, 8192, "16x72xgb200"),
    "8b, 128k tokens, on 64": ("llama3-8b", 64, 131_072, "8x8xh100"),
    "405b on 16,384": ("llama3-405b", 2048, 8192, "2048x8xh100"),
    "671b on 16,384": ("moe-671b", 16_384, 4096, "2048x8xh100"),
    "8b on a slice of 64 TPUs": ("llama3-8b", 256, 8192, "v5p-128"),
    "0.6b on a card": ("qwen3-0.6b", 64, 2048, "rtx4090"),
}
_SHOWN = (
    "tp",
    "cp",
    "context",
    "pp",
    "schedule",
    "stages_per_rank",
    "ep",
    "dp_shard",
    "dp_replicate",
    "zero",
    "recompute",
)


def run_of(model: str, global_batch: int, seq_len: int, **changes) -> RunConfig:
    arch = load_model(model).arch
    arch = replace(arch, max_seq_len=max(arch.max_seq_len, seq_len), **changes)
    train = Train(steps=1000, seq_len=seq_len, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="search", model=arch, data=Data(tokens="tokens"), train=train)


def shown(candidate: Candidate) -> str:
    """Return the settings that differ from plain data parallelism."""
    parallel = candidate.run.parallel
    idle = {"schedule": "1f1b", "context": "auto", "recompute": "none"}
    values = {name: getattr(parallel, name) for name in _SHOWN}
    shown_settings = [f"{name}={value}" for name, value in values.items() if value not in (idle.get(name), 0, 1)]
    return " ".join([*shown_settings, f"micro_batch={candidate.run.train.micro_batch}"])


def measure(name: str) -> dict[str, object]:
    model, batch, seq_len, cluster = CASES[name]
    run, devices = run_of(model, batch, seq_len), load_cluster(cluster)
    started = time.process_time()
    found = search(run, devices)
    spent, best = time.process_time() - started, found.best[0]
    return {
        "processor_seconds": round(spent, 2),
        "considered": found.considered,
        "fitting": found.fitting,
        "best": shown(best),
        "step_seconds": round(best.step_seconds, 3),
        "mfu": round(best.mfu, 3),
        "memory_gib": round(best.memory_bytes / 2**30, 1),
    }


if __name__ == "__main__":
    results = {}
    for case in sys.argv[1:] or CASES:
        results[case] = measure(case)
        print(case, results[case], flush=True)
    if len(results) == len(CASES):
        print(record("planner_search_time", results, ()))
