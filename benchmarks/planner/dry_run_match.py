"""The planner's formulas beside the dry run of the real program: tensor bytes at the peak of every pipeline rank and at
every moment, FLOPs, and bytes sent per axis.

Nothing is fitted: a case that differs shows a wrong formula. Needs no GPU; a case takes seconds.

    python benchmarks/planner/dry_run_match.py [--only NAME]
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record

from ingot.planner.predict.memory.peak_memory import position_bill
from ingot.planner.request.presets import load_model
from ingot.rehearse.dryrun import dry_run, role
from ingot.rehearse.dryrun.dry_run import compare
from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions

DENSE = replace(load_model("llama3-8b").arch, num_layers=16, max_seq_len=65536)
WIDE = replace(load_model("llama3-70b").arch, num_layers=16)
SPARSE = replace(load_model("qwen3-30b-a3b").arch, num_layers=8)
CAPPED = replace(
    load_model("mixtral-8x7b").arch,
    num_layers=8,
    moe=Moe(num_experts=8, top_k=2, d_expert=14336, capacity_factor=1.25, overflow="fallback", z_loss=1e-3),
)
LATENT = replace(load_model("moe-671b").arch, num_layers=8)


def run_of(arch: Arch = DENSE, batch: tuple[int, int, int] = (1, 4, 4096), **settings: Any) -> RunConfig:
    """batch: sequences of a micro-batch, micro-batches of a step, tokens of a sequence."""
    precision, masked = settings.pop("precision", "bf16"), settings.pop("masked", False)
    layout, (sequences, micro_batches, seq_len) = Parallel(**settings), batch
    in_step = sequences * micro_batches * layout.data_ranks
    train = Train(steps=2, seq_len=seq_len, global_batch=in_step, micro_batch=sequences, precision=precision)
    data = Data(tokens="", mask_documents=masked)
    return RunConfig(name="traced", model=arch, data=data, train=train, parallel=layout)


CASES = {
    "8B, DDP over 8": run_of(dp_replicate=8),
    "8B, one GPU's worth, offload to the host": run_of(batch=(1, 2, 4096), dp_shard=8, zero=1, offload="cpu"),
    "8B, ZeRO-1 over 8": run_of(dp_shard=8, zero=1),
    "8B, ZeRO-1, one micro-batch": run_of(batch=(4, 1, 4096), dp_shard=8, zero=1),
    "8B, ZeRO-2, bf16 gradients": run_of(dp_shard=8, zero=2, grads="bf16"),
    "8B, ZeRO-3 over 8": run_of(batch=(2, 1, 4096), dp_shard=8, zero=3),
    "8B, ZeRO-3, accumulation": run_of(dp_shard=64, zero=3),
    "8B, ZeRO-3, units of 4, kept gathered": run_of(dp_shard=8, zero=3, unit_layers=4, reshard=False),
    "8B, ZeRO-3, 2 ahead, selective": run_of(
        batch=(4, 1, 4096), dp_shard=64, zero=3, prefetch=2, recompute="selective"
    ),
    "8B, HSDP, full recompute": run_of(batch=(8, 1, 4096), dp_replicate=4, dp_shard=8, zero=3, recompute="full"),
    "8B, ZeRO-3, parameters on the host": run_of(
        batch=(2, 1, 4096), dp_shard=8, zero=3, offload="cpu", offload_parameters=True, recompute="full"
    ),
    "8B, every 2nd block recomputed, masked": run_of(
        batch=(1, 2, 8192), dp_shard=16, zero=3, recompute="full", recompute_every=2, masked=True
    ),
    "8B in fp32, ZeRO-1": run_of(batch=(1, 2, 2048), dp_shard=8, zero=1, precision="fp32"),
    "70B, tp 8 and sequences, ZeRO-1": run_of(WIDE, tp=8, dp_shard=4, zero=1),
    "70B, tp 8 without sequences, selective": run_of(
        WIDE, tp=8, sequence=False, dp_shard=4, zero=1, recompute="selective"
    ),
    "70B, tp 8, ZeRO-3, full": run_of(WIDE, (4, 1, 8192), tp=8, dp_shard=16, zero=3, recompute="full"),
    "70B, 1F1B": run_of(WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=2, zero=1, schedule="1f1b"),
    "70B, GPipe, full recompute": run_of(WIDE, (1, 8, 4096), pp=4, tp=4, zero=1, schedule="gpipe", recompute="full"),
    "70B, interleaved over 2 stages": run_of(
        WIDE, (1, 8, 4096), pp=4, tp=4, dp_shard=4, zero=1, schedule="interleaved", stages_per_rank=2
    ),
    "70B, interleaved over 4 stages, ZeRO-2": run_of(
        WIDE, (1, 8, 4096), pp=4, tp=4, dp_shard=4, zero=2, schedule="interleaved", stages_per_rank=4
    ),
    "70B, looped breadth first, ZeRO-3": run_of(
        WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=4, zero=3, schedule="looped_bfs", recompute="full"
    ),
    "70B, ZB-H1": run_of(WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=2, zero=1, schedule="zb_h1"),
    "70B, interleaved ZB": run_of(WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=2, zero=1, schedule="interleaved_zb"),
    "70B, ZB-V": run_of(WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=2, zero=1, schedule="zb_v"),
    "70B, DualPipe-V, selective": run_of(
        WIDE, (1, 8, 4096), pp=4, tp=8, dp_shard=2, zero=1, schedule="dualpipe_v", recompute="selective"
    ),
    "8B, ring of 8": run_of(batch=(1, 1, 65536), cp=8, context="ring", dp_shard=2, zero=3, recompute="full"),
    "8B, Ulysses over 8": run_of(batch=(1, 2, 32768), cp=8, context="ulysses", zero=3, recompute="selective"),
    "8B, grid of 4 x 2, tp 2": run_of(batch=(1, 1, 65536), cp=8, tp=2, context="usp", ulysses=4, zero=1),
    "30B-A3B, ep 8, ZeRO-1": run_of(SPARSE, (1, 2, 4096), dp_shard=8, ep=8, zero=1),
    "30B-A3B, ep 8 of 16, ZeRO-3, full": run_of(SPARSE, (2, 1, 4096), dp_shard=16, ep=8, zero=3, recompute="full"),
    "8x7B capped, ep 4 over tp 4": run_of(CAPPED, (1, 2, 4096), dp_shard=2, tp=4, ep=4, zero=2),
    "671B-like, latents, ZB-V, ep 16": run_of(
        LATENT, (1, 8, 4096), pp=4, dp_shard=16, ep=16, zero=1, schedule="zb_v", grads="bf16", recompute="selective"
    ),
    "671B-like, latents, ZeRO-3, tp 2": run_of(
        LATENT, (1, 1, 4096), tp=2, dp_shard=32, ep=32, zero=3, recompute="full"
    ),
}


def measured(run: RunConfig) -> dict[str, Any]:
    """Traced and by formula: of every rank that a dry run chooses the peak, and the worst of the other figures."""
    places, known, grid = positions(run), {}, dry_run.grid_of(run)
    ranks, others = [], {"FLOP": 0.0, "bytes sent": 0.0}
    for rank in dry_run.chosen_ranks(grid):
        answer = role.answer_of(run, role.trace_rank(run, rank, "cuda", known), rank, 0.0, "cuda")
        trace = dry_run.read_answer(answer, grid)
        place = places[trace.position]
        peak, billed = trace.moments[dry_run.STEADY], sum(t.value for t in position_bill(place, "cuda").values())
        ranks.append(
            {
                "rank": trace.name,
                "traced_bytes": peak.bytes,
                "formula_bytes": round(billed),
                "percent": round(100 * (billed / peak.bytes - 1), 2),
                "place": peak.place,
            }
        )
        for found in compare(trace, place, "cuda"):
            kind = "FLOP" if "FLOP" in found.what else "bytes sent"
            others[kind] = max(others[kind], 100 * found.deviation)
    worst = max((abs(one["percent"]) for one in ranks), default=0.0)
    return {"ranks": ranks, "worst_percent": worst, **{f"{k}, worst percent": round(v, 3) for k, v in others.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it; writes no record")
    args = parser.parse_args()
    results = {}
    for name, run in CASES.items():
        if args.only in name:
            results[name] = found = measured(run)
            percents = " ".join(f"{one['percent']:+.1f}" for one in found["ranks"])
            print(f"{name:45} memory {percents} %   FLOP {found['FLOP, worst percent']} %", flush=True)
    worst = max(found["worst_percent"] for found in results.values())
    print(f"{len(results)} layouts; memory within {worst:.1f} %")
    if not args.only:
        record("planner_dry_run", {"layouts": len(results), "worst_percent": worst, "cases": results}, ["torch"])


if __name__ == "__main__":
    main()
