"""What ranks really send and hold in a step, counted, against the formulas of theory/ and the planner's bill."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ingot.dist.mesh import Mesh, build_mesh  # noqa: E402
from ingot.planner.memory import position_bill  # noqa: E402
from ingot.schema.arch import Arch  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402
from ingot.telemetry.tracker import Tracker  # noqa: E402
from ingot.theory.layout import Position, layout_problems, positions, resolve_parallel  # noqa: E402
from ingot.theory.traffic import step_traffic  # noqa: E402

AXES = ("tp", "dp_shard", "dp_replicate", "pp")
# Dims that 2 and 4 ranks divide, so that nothing is padded.
ARCH = Arch(vocab_size=128, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64)


def run_of(precision: Any = "bf16", arch=ARCH, micro_batches=4, micro_batch=2, seq_len=16, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    batch = micro_batch * micro_batches * parallel.data_ranks
    train = Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro_batch, precision=precision)
    return RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)


def start(run: RunConfig) -> tuple[Mesh, Callable[[], None]]:
    """This rank's place in `run`, and its optimizer step on a random batch."""
    from ingot.model.init import initial_value
    from ingot.model.transformer import SHARDING, Transformer
    from ingot.optim.adamw import Optimizer
    from ingot.parallel.apply import parallelize
    from ingot.parallel.pipeline import Pipeline

    (position, *_), device = positions(run), torch.device("cpu")
    mesh, table = build_mesh(resolve_parallel(run), "cpu"), position.table

    def make() -> Transformer:
        with torch.device("meta"):
            return Transformer(run.model)

    def value(name, shape, offsets, sizes):
        return initial_value(name, shape, run.model, run.seed, offsets, sizes)

    model = parallelize(
        make, mesh, run.train, device, sharding=SHARDING, rank_of_stage=table.rank_of_stage,
        micro_batches=run.accumulation, initial_value=value,
    )  # fmt: skip
    program = Pipeline(
        model.stages, table, mesh, model.data, d_model=run.model.d_model, dtype=model.hidden, device=device,
        sequence_ranks=position.sequence_ranks,
    )  # fmt: skip
    optimizer = Optimizer(model.pieces, run.optim)
    tokens = torch.randint(0, run.model.vocab_size, (run.accumulation, run.train.micro_batch, run.train.seq_len))
    batch: Any = SimpleNamespace(inputs=tokens, targets=tokens, document_ids=None)

    def step():
        program.train(batch)
        model.reduce()
        optimizer.step(1e-3)
        model.publish()

    return mesh, step


def counted_steps(rank: int, world: int, runs: list[RunConfig]) -> list[dict[tuple[str, str], tuple[int, int]]]:
    """Of each run: (operation, axis) -> how often and on how many bytes, in this rank's second step."""
    found = []
    for run in runs:
        mesh, step = start(run)
        step()
        with Tracker() as tracker:
            step()
        found.append(by_axis(tracker.calls, {axis: set(mesh.ranks(axis)) for axis in AXES}, rank))
    return found


def peaks(rank: int, world: int, runs: list[RunConfig]) -> list[int]:
    """Of each run: the most bytes that this rank's tensors take in its second step."""
    found = []
    for run in runs:
        with Tracker() as tracker:
            tracker.begin("start")
            _, step = start(run)
            step()
            tracker.begin("steady")
            step()
        found.append(tracker.peaks()["steady"].bytes)
    return found


def by_axis(calls, axes: dict[str, set[int]], rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    sizes, times = Counter(), Counter()
    for call in calls:
        if call.op in ("recv", "irecv", "wait", "sent", "barrier") or len(call.group) == 1:
            continue
        members = set(call.group) if call.peer < 0 else {rank, call.peer}
        axis = next(axis for axis, ranks in axes.items() if members <= ranks)
        op = "send" if call.op == "isend" else call.op
        times[op, axis] += 1
        sizes[op, axis] += call.elements * getattr(torch, call.dtype).itemsize
    return {key: (times[key], sizes[key]) for key in sizes}


CASES = {
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
}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_by_axis_are_those_of_the_formulas(fork_ranks, world):
    runs = {name: run_of(**settings) for name, (ranks, settings) in CASES.items() if ranks == world}
    for name, run in runs.items():
        assert not list(layout_problems(run)) and run.parallel.world_size == world, name
    results = fork_ranks(counted_steps, world, list(runs.values()))
    wrong = []
    for number, (name, run) in enumerate(runs.items()):
        everyone = positions(run)
        for rank in range(world):
            counted, position = results[rank][number], everyone[rank // (world // run.parallel.pp)]
            expected = formulas(position)
            if counted.keys() != expected.keys():
                wrong.append(f"{name}, rank {rank}: {sorted(counted)} instead of {sorted(expected)}")
            for key in counted.keys() & expected.keys():
                (times, size), (expected_times, expected_size) = counted[key], expected[key]
                if times != expected_times or abs(size - expected_size) > 0.01 * expected_size:
                    wrong.append(f"{name}, rank {rank}, {key}: {counted[key]} instead of {expected[key]}")
    assert not wrong, "\n".join(wrong)


def formulas(position: Position) -> dict[tuple[str, str], tuple[int, float]]:
    expected: dict[tuple[str, str], tuple[int, float]] = {}
    for traffic in step_traffic(position):
        times, size = expected.get((traffic.kind, traffic.axis), (0, 0.0))
        expected[traffic.kind, traffic.axis] = times + traffic.count, size + traffic.bytes
    return expected


LARGER = Arch(vocab_size=1024, d_model=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=384)
LONG, SHORT = {"micro_batch": 4, "seq_len": 128}, {"micro_batch": 1, "seq_len": 8}  # activations or state prevail
HELD = {
    1: [
        LONG,
        SHORT,
        LONG | {"precision": "fp32"},
        LONG | {"recompute": "full"},
        LONG | {"recompute": "selective"},
        SHORT | {"grads": "bf16"},
    ],
    2: [
        LONG | {"dp_shard": 2, "zero": 1},
        SHORT | {"dp_shard": 2, "zero": 1, "micro_batches": 1},
        SHORT | {"dp_shard": 2, "zero": 2},
        LONG | {"dp_shard": 2, "zero": 3},
        SHORT | {"dp_shard": 2, "zero": 3},
        LONG | {"tp": 2},
        LONG | {"tp": 2, "sequence": False},
        LONG | {"tp": 2, "recompute": "selective"},
        LONG | {"pp": 2},
        LONG | {"pp": 2, "schedule": "zb_v"},
    ],
}


@pytest.mark.parametrize("world", HELD)
def test_memory_is_that_of_the_bill(fork_ranks, world):
    """Within a tenth: of temporaries, only the large ones are in the bill."""
    runs = [run_of(arch=LARGER, unit_layers=1, **settings) for settings in HELD[world]]
    results = fork_ranks(peaks, world, runs)
    wrong = []
    for number, run in enumerate(runs):
        everyone = positions(run)
        for rank in range(world):
            seen, bill = results[rank][number], position_bill(everyone[rank // (world // run.parallel.pp)], "cpu")
            share = sum(term.value for term in bill.values()) / seen
            if not 0.9 < share < 1.1:
                wrong.append(f"{HELD[world][number]}, rank {rank}: {share:.2f} of {seen:,} bytes")
    assert not wrong, "\n".join(wrong)
