"""Memory, time and communication of a plan as the page draws them: shares of a bar, and words. The page only paints."""

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.units import format_bytes, format_seconds

# From here on a plan that fits is called tight: fragmentation differs from run to run.
TIGHT = 0.9
_LINES = {
    "tp": "tensor parallel",
    "sequence": "choices of experts",
    "ulysses": "context, heads dealt out",
    "ring": "context, ring",
    "ep": "tokens to experts",
    "shard": "shards of the model (ZeRO)",
    "expert_shard": "shards of experts (ZeRO)",
    "dp_replicate": "copies of the model",
    "pp": "pipeline",
}
# State of the model first, then what comes and goes with a batch.
_KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits")
_MOMENTS = ("initialisation", "first step", "steady state", "save")


def memory(run: RunConfig, plan: Plan) -> dict:
    """Of the fullest rank by kind, of every pipeline rank, and of the moments of a run, against one scale."""
    capacity = rank_memory_bytes(plan.cluster, run.parallel.world_size)
    used = plan.total_memory_bytes
    stages = plan.stage_memory_bytes
    most = max([capacity, used, *(sum(stage.values()) for stage in stages), *plan.moments_bytes.values()])
    scale = most * 1.02
    parts = [_part(kind, size, scale, plan) for kind, size in _ordered(plan.memory_bytes)]
    return {
        "capacity": format_bytes(capacity),
        "capacity_share": capacity / scale,
        "tight_share": TIGHT * capacity / scale,
        "used": format_bytes(used),
        "of_capacity": f"{used / capacity:.0%}",
        "fits": used <= capacity,
        "tight": used > TIGHT * capacity,
        "free": format_bytes(abs(capacity - used)),
        "parts": parts,
        "stages": [_stage(rank, stage, scale, capacity) for rank, stage in enumerate(stages)],
        "moments": [
            {"name": name, "text": format_bytes(size), "share": size / scale, "fits": size <= capacity}
            for name in _MOMENTS
            if (size := plan.moments_bytes.get(name, 0))
        ],
    }


def _ordered(kinds: dict[str, int]) -> list[tuple[str, int]]:
    rest = [kind for kind in kinds if kind not in _KINDS]
    return [(kind, kinds[kind]) for kind in (*_KINDS, *rest) if kinds.get(kind)]


def _part(kind: str, size: float, scale: float, plan: Plan) -> dict:
    formula = plan.formulas.get(f"memory.{kind}", "")
    return {"kind": kind, "share": size / scale, "text": format_bytes(size), "formula": formula}


def _stage(rank: int, kinds: dict[str, int], scale: float, capacity: float) -> dict:
    total = sum(kinds.values())
    parts = [{"kind": k, "share": size / scale, "text": format_bytes(size)} for k, size in _ordered(kinds)]
    return {"rank": rank, "text": format_bytes(total), "fits": total <= capacity, "parts": parts}


def step(plan: Plan) -> list[dict]:
    """What a step is made of, longest first."""
    parts = sorted(plan.time_seconds.items(), key=lambda item: -item[1])
    whole = plan.step_seconds or 1.0
    return [
        {
            "name": name,
            "share": seconds / whole,
            "percent": f"{seconds / whole:.1%}",
            "text": format_seconds(seconds),
            "formula": plan.formulas.get(f"time.{name}", ""),
        }
        for name, seconds in parts
        if seconds > 1e-6 * whole
    ]


def communication(plan: Plan) -> list[dict]:
    """By line of the mesh: what one rank sends in a step, how long that takes alone, and what a step waits for."""
    lines = plan.communication
    longest = max((line.seconds for line in lines.values()), default=0.0) or 1.0
    return [
        {
            "line": name,
            "name": _LINES.get(name, name),
            "sent": format_bytes(line.sent_bytes),
            "alone": format_seconds(line.seconds),
            "exposed": format_seconds(line.exposed_seconds) if line.exposed_seconds else "hidden",
            "exposed_share": min(line.exposed_seconds, line.seconds) / longest,
            "hidden_share": max(line.seconds - line.exposed_seconds, 0.0) / longest,
            "of_step": f"{line.exposed_seconds / plan.step_seconds:.1%}" if plan.step_seconds else "",
            "where": "between nodes" if line.crosses else "inside a node",
        }
        for name, line in sorted(lines.items(), key=lambda item: -item[1].exposed_seconds)
        if line.sent_bytes
    ]
