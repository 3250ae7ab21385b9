"""The traffic and memory of a real step, counted, against the formulas of theory/ and the planner's bill."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ingot.planner.predict.memory.peak_memory import position_bill  # noqa: E402
from ingot.rehearse.dryrun.mesh_world import Grid  # noqa: E402
from ingot.rehearse.dryrun.tracker import Tracker  # noqa: E402
from ingot.schema.arch import Arch, Mla, Moe  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402
from ingot.theory.layout import Position, layout_problems, positions  # noqa: E402
from ingot.theory.traffic import step_traffic  # noqa: E402
from ingot.trainer.build import build_parts  # noqa: E402
from ingot.trainer.mesh.mesh import AXES  # noqa: E402

# Dims that 2 and 4 ranks divide, so that nothing is padded.
ARCH = Arch(vocab_size=128, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64)
SPARSE = replace(ARCH, moe=Moe(num_experts=8, top_k=2, d_expert=16, shared_experts=1, first_dense=1))
# A capacity that no expert exceeds: routers exchange their choices, and every row is sent.
CAPPED = replace(ARCH, moe=Moe(num_experts=8, top_k=2, d_expert=16, capacity_factor=4.0, overflow="fallback"))
LATENT = replace(ARCH, num_kv_heads=4, head_dim=12, mla=Mla(q_rank=16, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8))


def run_of(precision: Any = "bf16", arch=ARCH, micro_batches=4, micro_batch=2, seq_len=16, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    batch = micro_batch * micro_batches * parallel.data_ranks
    train = Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro_batch, precision=precision)
    return RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)


def start(run: RunConfig) -> Callable[[], None]:
    """The optimizer step of this rank's place in `run`, on a random batch, without the norm of all gradients."""
    parts = build_parts(run, torch.device("cpu"), Path())
    tokens = torch.randint(0, run.model.vocab_size, (run.accumulation, run.train.micro_batch, run.train.seq_len))
    batch: Any = SimpleNamespace(step=1, inputs=tokens, targets=tokens, document_ids=None)

    def step():
        parts.program.train(batch)
        parts.model.reduce()
        parts.optimizer.step(1e-3)
        parts.model.publish()

    return step


def counted_steps(rank: int, world: int, runs: list[RunConfig]) -> list[dict[tuple[str, str], tuple[int, int]]]:
    """Return for each run (operation, axis) -> calls and bytes in this rank's second step."""
    found = []
    for run in runs:
        step = start(run)
        step()
        with Tracker() as tracker:
            step()
        found.append(by_axis(tracker.calls, Grid({axis: getattr(run.parallel, axis) for axis in AXES}), rank))
    return found


def peaks(rank: int, world: int, runs: list[RunConfig]) -> list[int]:
    """Return for each run the peak memory of this rank's tensors in its second step."""
    found = []
    for run in runs:
        with Tracker() as tracker:
            tracker.begin("start")
            step = start(run)
            step()
            tracker.begin("steady")
            step()
        found.append(tracker.peaks()["steady"].bytes)
    return found


def by_axis(calls, grid: Grid, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    sizes, times = Counter(), Counter()
    for call in calls:
        if call.op in ("recv", "irecv", "wait", "sent", "barrier") or len(call.group) == 1:
            continue
        axis = "+".join(grid.axes(call.group if call.peer < 0 else (rank, call.peer)))
        op = "send" if call.op == "isend" else call.op
        times[op, axis] += 1
        sizes[op, axis] += call.elements * getattr(torch, call.dtype).itemsize
    return {key: (times[key], sizes[key]) for key in sizes}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"dp_replicate": 2}),
    "ddp, bf16 gradients": (2, {"dp_replicate": 2, "grads": "bf16"}),
    "zero 1": (4, {"dp_shard": 4, "zero": 1}),
    "zero 1, fp32": (2, {"dp_shard": 2, "zero": 1, "precision": "fp32"}),
    "zero 2": (2, {"dp_shard": 2, "zero": 2, "grads": "bf16"}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}),
    "zero 3, kept whole": (2, {"dp_shard": 2, "zero": 3, "reshard": False, "unit_layers": 2}),
    "hsdp, zero 1": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 1}),
    "hsdp, zero 3": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    "canonical": (2, {"dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 4}),
    "tp": (2, {"tp": 2}),
    "tp, shared heads, untied": (4, {"tp": 4, "arch": replace(ARCH, tied_embeddings=False, qk_norm=True)}),
    "tp without sequence": (2, {"tp": 2, "sequence": False}),
    "tp, full recompute": (2, {"tp": 2, "recompute": "full"}),
    "tp without sequence, full recompute": (2, {"tp": 2, "sequence": False, "recompute": "full"}),
    "tp in chunks": (2, {"tp": 2, "tp_chunks": 3, "arch": SPARSE}),
    "tp in chunks, full recompute": (2, {"tp": 2, "tp_chunks": 2, "recompute": "full"}),
    "tp in chunks, selective recompute": (2, {"tp": 2, "tp_chunks": 2, "recompute": "selective"}),
    "tp in chunks, pp": (4, {"tp": 2, "tp_chunks": 2, "pp": 2, "schedule": "zb_v", "arch": LATENT}),
    "tp, every second block": (2, {"tp": 2, "recompute": "full", "recompute_every": 2}),
    "tp, selective recompute": (2, {"tp": 2, "recompute": "selective"}),
    "pp": (2, {"pp": 2}),
    "pp of 4, untied": (4, {"pp": 4, "schedule": "gpipe", "arch": replace(ARCH, tied_embeddings=False)}),
    "pp of 4, tied": (4, {"pp": 4}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved"}),
    "zb_v": (2, {"pp": 2, "schedule": "zb_v"}),
    "tp without sequence, selective recompute": (2, {"tp": 2, "sequence": False, "recompute": "selective"}),
    "hsdp, zero 3, on the host": (
        4,
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "offload": "cpu", "offload_parameters": True},
    ),
    "tp x pp x dp": (8, {"tp": 2, "pp": 2, "dp_shard": 2}),
    "tp x zero 3": (4, {"tp": 2, "dp_shard": 2, "zero": 3}),
    "pp x zero 3": (4, {"pp": 2, "dp_shard": 2, "zero": 3}),
    "latent attention, tp": (2, {"tp": 2, "arch": LATENT}),
    "ring": (2, {"cp": 2, "context": "ring"}),
    "ring of 4, striped, zero 3": (4, {"cp": 4, "context": "ring", "context_layout": "striped", "zero": 3}),
    "ring, full recompute": (2, {"cp": 2, "context": "ring", "recompute": "full", "recompute_every": 2}),
    "ring, selective recompute": (2, {"cp": 2, "context": "ring", "recompute": "selective"}),
    "usp, selective recompute": (4, {"cp": 4, "context": "usp", "ulysses": 2, "recompute": "selective"}),
    "ulysses": (2, {"cp": 2, "context": "ulysses", "zero": 2}),
    "ulysses, repeated heads": (4, {"cp": 4, "context": "ulysses"}),
    "ulysses, selective recompute": (2, {"cp": 2, "context": "ulysses", "recompute": "selective"}),
    "usp, fp32": (4, {"cp": 4, "context": "usp", "ulysses": 2, "precision": "fp32"}),
    "ring x zero 1": (4, {"cp": 2, "context": "ring", "dp_shard": 2, "zero": 1}),
    "ring x hsdp, zero 3": (8, {"cp": 2, "context": "ring", "dp_shard": 2, "dp_replicate": 2, "zero": 3}),
    "ring x tp": (4, {"cp": 2, "context": "ring", "tp": 2}),
    "ulysses x pp": (4, {"cp": 2, "context": "ulysses", "pp": 2}),
    "ring x canonical": (4, {"cp": 2, "context": "ring", "dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 4}),
    "ep over dp_shard": (2, {"dp_shard": 2, "ep": 2, "arch": SPARSE, "zero": 1}),
    "ep over half of dp_shard": (4, {"dp_shard": 4, "ep": 2, "arch": SPARSE, "zero": 2}),
    "ep over half of dp_shard, zero 3": (4, {"dp_shard": 4, "ep": 2, "arch": SPARSE, "zero": 3, "unit_layers": 2}),
    "experts whole on tp": (2, {"tp": 2, "arch": SPARSE}),
    "ep over tp": (4, {"tp": 2, "dp_shard": 2, "ep": 2, "arch": SPARSE, "zero": 1}),
    "ep over tp and dp_shard, full recompute": (
        4,
        {"tp": 2, "dp_shard": 2, "ep": 4, "arch": SPARSE, "recompute": "full"},
    ),
    "ep over tp, selective recompute": (2, {"tp": 2, "ep": 2, "arch": SPARSE, "recompute": "selective"}),
    "ep with capacity, over cp and tp": (4, {"cp": 2, "context": "ring", "tp": 2, "ep": 2, "arch": CAPPED}),
    "experts, zero 3, full recompute": (2, {"dp_shard": 2, "arch": SPARSE, "zero": 3, "recompute": "full"}),
    "capacity within cp": (2, {"cp": 2, "context": "ulysses", "arch": CAPPED}),
    "ep in copies": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "arch": SPARSE, "zero": 1}),
    "ep in copies, zero 3": (8, {"dp_replicate": 2, "dp_shard": 4, "ep": 2, "arch": SPARSE, "zero": 3}),
    "ep in a pipeline": (4, {"pp": 2, "dp_shard": 2, "ep": 2, "arch": SPARSE}),
    "ep x canonical": (
        4,
        {"dp_replicate": 2, "tp": 2, "ep": 1, "arch": SPARSE, "reduce": "canonical", "virtual_ranks": 4},
    ),
}


# The layouts of `make test-slow`, on two ranks; all layouts run nightly.
FEW = (
    "ddp", "zero 1, fp32", "zero 2", "zero 3", "canonical", "tp", "tp, full recompute", "pp", "ring", "ulysses",
    "tp in chunks, full recompute", "ep over dp_shard", "experts whole on tp",
)  # fmt: skip


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, FEW, marks=pytest.mark.slow),
        *(pytest.param(world, tuple(CASES), marks=pytest.mark.nightly) for world in (2, 4, 8)),
    ],
    ids=["few-2", "all-2", "all-4", "all-8"],
)
def test_bytes_by_axis_are_those_of_the_formulas(fork_ranks, world, names):
    runs = {name: run_of(**settings) for name in names for ranks, settings in [CASES[name]] if ranks == world}
    for name, run in runs.items():
        assert not list(layout_problems(run)) and run.parallel.world_size == world, name
    results = fork_ranks(counted_steps, world, list(runs.values()), timeout=300)
    wrong = []
    for number, (name, run) in enumerate(runs.items()):
        everyone = positions(run)
        for rank in range(world):
            inside = world // run.parallel.pp
            place = rank // inside
            counted, expected = results[rank][number], formulas(everyone[place])
            beside = [results[r][number] for r in range(place * inside, (place + 1) * inside)]
            counted = counted | (mean_of_rows(beside) if run.model.is_moe else {})
            if counted.keys() != expected.keys():
                wrong.append(f"{name}, rank {rank}: {sorted(counted)} instead of {sorted(expected)}")
            for key in counted.keys() & expected.keys():
                (times, size), (expected_times, expected_size) = counted[key], expected[key]
                if times != expected_times or abs(size - expected_size) > 0.01 * expected_size:
                    wrong.append(f"{name}, rank {rank}, {key}: {counted[key]} instead of {expected[key]}")
    assert not wrong, "\n".join(wrong)


def mean_of_rows(ranks: list[dict]) -> dict[tuple[str, str], tuple[int, float]]:
    """Experts differ in their load, and so do ranks in what they send; all together send what the formulas say."""
    keys = [key for key in ranks[0] if key[0] == "all_to_all"]
    return {key: (ranks[0][key][0], sum(counted[key][1] for counted in ranks) / len(ranks)) for key in keys}


def formulas(position: Position) -> dict[tuple[str, str], tuple[int, float]]:
    expected: dict[tuple[str, str], tuple[int, float]] = {}
    for traffic in step_traffic(position):
        times, size = expected.get((traffic.kind, traffic.axis), (0, 0.0))
        expected[traffic.kind, traffic.axis] = times + traffic.count, size + traffic.bytes
    return expected


LARGER = Arch(vocab_size=1024, d_model=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=384)
LARGER_SPARSE = replace(LARGER, moe=Moe(num_experts=8, top_k=2, d_expert=128, shared_experts=1, first_dense=1))
LARGER_LATENT = replace(
    LARGER, num_kv_heads=4, head_dim=48, mla=Mla(q_rank=64, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
)
LONG: dict[str, Any] = {"micro_batch": 4, "seq_len": 128}  # activations prevail
SHORT: dict[str, Any] = {"micro_batch": 1, "seq_len": 8}  # state prevails
SPARSE_LONG, SPARSE_SHORT = LONG | {"arch": LARGER_SPARSE}, SHORT | {"arch": LARGER_SPARSE}
HELD: dict[int, list[dict[str, Any]]] = {
    1: [
        LONG,
        SHORT,
        LONG | {"precision": "fp32"},
        LONG | {"recompute": "full"},
        LONG | {"recompute": "selective"},
        SHORT | {"grads": "bf16"},
        LONG | {"arch": LARGER_LATENT},
        SPARSE_LONG,
        SPARSE_LONG | {"precision": "fp32"},
        SPARSE_LONG | {"recompute": "full"},
        SPARSE_LONG | {"recompute": "selective"},
        SPARSE_SHORT,
    ],
    2: [
        LONG | {"dp_shard": 2, "zero": 1},
        SHORT | {"dp_shard": 2, "zero": 1, "micro_batches": 1},
        SHORT | {"dp_shard": 2, "zero": 2},
        LONG | {"dp_shard": 2, "zero": 3},
        SHORT | {"dp_shard": 2, "zero": 3},
        LONG | {"tp": 2},
        LONG | {"tp": 2, "sequence": False},
        LONG | {"tp": 2, "tp_chunks": 4},
        LONG | {"tp": 2, "tp_chunks": 4, "recompute": "selective"},
        LONG | {"tp": 2, "recompute": "selective"},
        LONG | {"pp": 2},
        LONG | {"pp": 2, "schedule": "zb_v"},
        LONG | {"cp": 2, "context": "ring", "zero": 1},
        LONG | {"cp": 2, "context": "ring", "recompute": "selective"},
        LONG | {"cp": 2, "context": "ulysses", "zero": 3},
        SPARSE_LONG | {"dp_shard": 2, "ep": 2, "zero": 1},
        SPARSE_LONG | {"dp_shard": 2, "ep": 2, "zero": 1, "recompute": "selective"},
        SPARSE_LONG | {"tp": 2, "ep": 2},
        SPARSE_SHORT | {"dp_shard": 2, "zero": 1},
        SPARSE_SHORT | {"dp_shard": 2, "ep": 2, "zero": 2},
        SPARSE_SHORT | {"dp_shard": 2, "zero": 3},
    ],
    4: [
        SPARSE_LONG | {"cp": 2, "context": "ring", "tp": 2, "ep": 4},
        SPARSE_SHORT | {"dp_shard": 4, "ep": 2, "zero": 3},
    ],
}


FEW_HELD = [
    SHORT | {"dp_shard": 2, "zero": 2},
    SHORT | {"dp_shard": 2, "zero": 3},
    LONG | {"tp": 2},
    LONG | {"pp": 2},
    LONG | {"cp": 2, "context": "ring", "recompute": "selective"},
    SPARSE_SHORT | {"dp_shard": 2, "ep": 2, "zero": 2},
]


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        pytest.param(2, FEW_HELD, marks=pytest.mark.slow),
        *(pytest.param(world, HELD[world], marks=pytest.mark.nightly) for world in HELD),
    ],
    ids=["few-2", *(f"all-{world}" for world in HELD)],
)
def test_memory_is_that_of_the_bill(fork_ranks, world, layouts):
    """Within a tenth: of temporaries, only the large ones are in the bill."""
    runs = [run_of(**{"arch": LARGER, "unit_layers": 1} | settings) for settings in layouts]
    results = fork_ranks(peaks, world, runs, timeout=300)
    wrong = []
    for number, run in enumerate(runs):
        everyone = positions(run)
        for rank in range(world):
            seen, bill = results[rank][number], position_bill(everyone[rank // (world // run.parallel.pp)], "cpu")
            share = sum(term.value for term in bill.values()) / seen
            if not 0.9 < share < 1.1:
                terms = {kind: round(term.value) for kind, term in bill.items()}
                wrong.append(f"{layouts[number]}, rank {rank}: {share:.2f} of {seen:,} bytes: {terms}")
    assert not wrong, "\n".join(wrong)
