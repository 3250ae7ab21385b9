"""The cases of a proof: the run's own model, tiny, on every layout that a few processes can have."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.layout import layout_problems

MOST_RANKS = 4
_LAYERS, _HEADS, _HEAD_DIM, _WIDTH, _VOCABULARY, _SEQUENCE, _BATCH = 4, 4, 8, 48, 64, 16, 8
# With a rate of 0.5, the last bits of sums grow to 1e-7 of a loss within the steps of a proof, without any fault.
_MOST_RATE = 1e-2
# Degrees and settings of each layout, in the order in which they are tried: first one form of parallelism at a time.
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 2},
    {"dp_shard": 2, "zero": 3},
    {"tp": 2, "sequence": True},
    {"tp": 2, "sequence": False},
    {"tp": 4, "sequence": True},
    {"cp": 2, "context": "ring"},
    {"cp": 2, "context": "ulysses"},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
    {"pp": 2, "schedule": "zb_h1"},
    {"pp": 2, "schedule": "dualpipe_v"},
    {"dp_shard": 2, "ep": 2, "zero": 1},
    {"tp": 2, "ep": 2},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 2},
    {"dp_shard": 2, "tp": 2, "zero": 1},
    {"dp_shard": 2, "tp": 2, "zero": 3, "recompute": "selective"},
    {"cp": 2, "tp": 2, "context": "ring"},
    {"dp_shard": 2, "cp": 2, "zero": 3},
    {"dp_shard": 2, "pp": 2, "zero": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "schedule": "zb_h1"},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    {"dp_shard": 2, "tp": 2, "ep": 4, "zero": 3},
)


@dataclass(frozen=True)
class LayoutCase:
    """A layout to compare. name: its settings as text. run: None if it does not fit the model; `why` then says why."""

    name: str
    run: RunConfig | None
    why: str = ""


def tiny(run: RunConfig) -> RunConfig:
    """Return `run` on one process in float64, with its layers, options, optimizer and callbacks, a tiny model, and a
    learning rate of at most `_MOST_RATE`.

    Numbers of heads keep their kind: one key/value head, fewer than heads, or equally many.
    """
    arch = run.model
    kv = arch.num_kv_heads
    small = replace(
        arch,
        vocab_size=_VOCABULARY,
        d_model=_HEADS * _HEAD_DIM,
        num_layers=_LAYERS,
        num_heads=_HEADS,
        num_kv_heads=_HEADS if kv == arch.num_heads else 1 if kv == 1 else 2,
        head_dim=_HEAD_DIM,
        d_ffn=_WIDTH if arch.d_ffn else 0,
        max_seq_len=2 * _SEQUENCE,
        sliding_window=6 if arch.sliding_window else 0,
        moe=_tiny_moe(arch),
        mla=_tiny_mla(arch),
    )
    train = replace(
        run.train,
        steps=1000,
        seq_len=_SEQUENCE,
        global_batch=_BATCH,
        micro_batch=1,
        precision="fp64",
        device="cpu",
        compile="off",
    )
    data = replace(run.data, weights={}, mask_documents=False)
    optim = replace(run.optim, lr=min(run.optim.lr, _MOST_RATE))
    return replace(run, model=small, train=train, data=data, optim=optim, init="", parallel=Parallel(unit_layers=1))


def _tiny_moe(arch: Arch):
    moe = arch.moe
    if not arch.is_moe:
        return moe
    top_k = min(moe.top_k, 2)
    return replace(
        moe,
        num_experts=4,
        top_k=top_k,
        d_expert=16,
        shared_experts=min(moe.shared_experts, 1),
        first_dense=min(moe.first_dense, 1),
        groups=2 if moe.groups > 1 else 1,
        top_groups=1,
        capacity_factor=1.25 if moe.capacity_factor and top_k == 2 else 0.0,
        overflow=moe.overflow if moe.capacity_factor and top_k == 2 else "drop",
        bias_steps=0,
    )


def _tiny_mla(arch: Arch):
    if not arch.is_mla:
        return arch.mla
    return replace(arch.mla, q_rank=12 if arch.mla.q_rank else 0, kv_rank=12, nope_dim=4, rope_dim=4, v_dim=6)


def cases(run: RunConfig, most_ranks: int = MOST_RANKS) -> Iterator[LayoutCase]:
    """Yield a case for each layout. run: what `tiny` returned."""
    for layout in _LAYOUTS:
        name = ", ".join(f"{key} {str(value).lower()}" for key, value in layout.items())
        case = replace(run, parallel=replace(run.parallel, **layout))
        if case.parallel.world_size > most_ranks:
            yield LayoutCase(name, None, f"needs {case.parallel.world_size} processes")
        elif problems := list(layout_problems(case)):
            yield LayoutCase(name, None, f"{problems[0][0]}: {problems[0][1]}")
        else:
            yield LayoutCase(name, case)
