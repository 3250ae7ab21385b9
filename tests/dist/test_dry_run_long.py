"""The dry run of experts and of context parallelism: bytes, FLOPs and memory are those of the formulas, and a message
to the wrong neighbor is found."""

from dataclasses import replace

import numpy as np
import pytest
from tests.expect import refused

torch = pytest.importorskip("torch")

from tests.unit.rehearse.dryrun.test_dry_run import _really_trained  # noqa: E402

from ingot.planner.predict.memory.peak_memory import position_bill  # noqa: E402
from ingot.rehearse.dryrun import dry_run, role  # noqa: E402
from ingot.rehearse.dryrun.dry_run import compare  # noqa: E402
from ingot.rehearse.dryrun.fake import Known  # noqa: E402
from ingot.rehearse.dryrun.mesh_world import check_world  # noqa: E402
from ingot.rehearse.dryrun.rendezvous import Call  # noqa: E402
from ingot.rehearse.dryrun.tracker import Tracker  # noqa: E402
from ingot.schema.arch import Arch, Mla, Moe  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402

DENSE = Arch(
    vocab_size=512, d_model=128, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=16, d_ffn=256, max_seq_len=512,
    tied_embeddings=False,
)  # fmt: skip
SPARSE = replace(DENSE, moe=Moe(num_experts=16, top_k=4, d_expert=64, shared_experts=1, first_dense=1, bias_rate=1e-3))
CAPPED = replace(SPARSE, moe=Moe(num_experts=16, top_k=2, d_expert=64, capacity_factor=1.25, overflow="fallback"))
LATENT = replace(SPARSE, num_kv_heads=8, head_dim=24, mla=Mla(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16))


# The caches of fake operations that all traces share: layouts compute much the same.
KNOWN: dict[str, Known] = {"cpu": {}, "cuda": {}}


def calls_of(run: RunConfig, rank: int) -> list[Call]:
    return role.trace_rank(run, rank, known=KNOWN["cpu"]).calls


def run_of(arch: Arch = DENSE, micro_batches: int = 2, *, documents: bool = False, **parallel) -> RunConfig:
    layout = Parallel(unit_layers=1, **parallel)
    train = Train(steps=2, seq_len=512, global_batch=micro_batches * layout.data_ranks, micro_batch=1, precision="bf16")
    data = Data(tokens="", mask_documents=documents)
    return RunConfig(name="traced", model=arch, data=data, train=train, parallel=layout)


def traced(run: RunConfig, device: str, loads: tuple[float, ...] = ()) -> dict[int, dry_run.Trace]:
    grid, known = dry_run.grid_of(run), KNOWN[device]
    return {
        rank: dry_run.read_answer(
            role.answer_of(run, role.trace_rank(run, rank, device, known, loads), rank, 0.0, device), grid
        )
        for rank in dry_run.chosen_ranks(grid)
    }


CASES = {
    "experts over part of dp_shard": run_of(SPARSE, dp_shard=4, pp=2, ep=2, zero=1),
    "experts over all": run_of(SPARSE, dp_shard=4, tp=2, ep=8, zero=3, recompute="full"),
    "experts over tp": run_of(SPARSE, dp_shard=2, tp=4, ep=2, zero=2),
    "capacity, experts over cp and tp": run_of(CAPPED, cp=2, tp=2, dp_shard=2, ep=4, context="ring", zero=1),
    "latents, experts over dp_shard": run_of(LATENT, dp_shard=8, ep=4, zero=1),
    "ring": run_of(cp=8, context="ring", zero=3),
    "ring, striped": run_of(cp=4, dp_shard=2, context="ring", context_layout="striped", zero=1, recompute="full"),
    "ring, contiguous": run_of(cp=4, pp=2, context="ring", context_layout="contiguous", zero=1),
    "Ulysses": run_of(cp=4, dp_replicate=2, context="ulysses", zero=3),
    "grid": run_of(cp=4, dp_shard=2, context="usp", ulysses=2, zero=3, recompute="selective"),
    "window in a ring": run_of(replace(DENSE, sliding_window=96), cp=4, dp_shard=2, context="ring", zero=1),
    "documents in a ring": run_of(documents=True, cp=4, dp_shard=2, context="ring", zero=1),
    "window": run_of(replace(DENSE, sliding_window=96), dp_shard=8, zero=3),
    "grid, experts over part of cp": run_of(SPARSE, cp=8, context="usp", ulysses=2, ep=4, zero=1),
}
# One case of each form of context and of each place of experts; the others run nightly.
FEW = (
    "experts over all",
    "capacity, experts over cp and tp",
    "latents, experts over dp_shard",
    "ring, striped",
    "window in a ring",
    "documents in a ring",
    "grid, experts over part of cp",
    "Ulysses",
)


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"])
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_traces_meet_and_agree_with_the_formulas(name, device):
    run = CASES[name]
    found, places = traced(run, device), dry_run.positions(run)
    world = check_world({rank: trace.calls for rank, trace in found.items()}, dry_run.grid_of(run))
    assert world.fault is None and world.alike, world
    for trace in found.values():
        place = places[trace.position]
        for compared in compare(trace, place, device):
            assert compared.agrees, (trace.name, compared)
        billed = sum(term.value for term in position_bill(place, device).values())
        assert trace.moments[dry_run.STEADY].bytes == pytest.approx(billed, rel=0.25), trace.moments


class Measured(Tracker):
    """A tracker that knows the most elements of a tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"cp": 2, "context": "ring"},
        pytest.param({"cp": 2, "context": "ring", "context_layout": "striped"}, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "context": "ulysses"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("window", [0, pytest.param(4096, marks=pytest.mark.slow)])
def test_memory_is_linear_at_128k_tokens_with_documents(monkeypatch, form, device, window):
    """No tensor has as many elements as there are pairs of tokens, and attention costs no more than a causal one."""
    empty, lengths = role.empty_batch, np.random.default_rng(0).lognormal(6.5, 1.4, 2000).astype(np.int64) + 1

    def batch(config):
        made = empty(config)
        if made.document_ids is not None:
            starts = np.zeros(made.document_ids.shape, np.int32)
            starts[..., lengths.cumsum()[lengths.cumsum() < starts.shape[-1]]] = 1
            made = replace(made, document_ids=torch.from_numpy(starts.cumsum(-1, dtype=np.int32)))
        return made

    monkeypatch.setattr(role, "empty_batch", batch)
    monkeypatch.setattr(role, "Tracker", Measured)

    def measured(tokens, documents):
        arch = replace(DENSE, num_layers=2, max_seq_len=tokens, sliding_window=window)
        run = run_of(arch, 1, documents=documents, **form)
        run = replace(run, train=replace(run.train, seq_len=tokens))
        tracker = role.trace_rank(run, 0, device, KNOWN[device])
        assert isinstance(tracker, Measured)
        flops = sum(n for name, n in tracker.flops_of(role.STEADY).items() if "attention" in name)
        return tracker.peaks()[role.STEADY].bytes, tracker.elements, flops

    (half, _, _), (whole, elements, flops) = measured(2**16, True), measured(2**17, True)
    assert whole <= 2.02 * half
    assert elements <= 2**17 * 2**10
    assert flops <= 1.1 * measured(2**17, False)[2]


def test_an_expert_by_expert_product_takes_the_rows_of_its_load():
    """float64 has no grouped product: the program splits rows by numbers that it asks the host for."""
    run = run_of(replace(SPARSE, num_layers=2), 1, dp_shard=2, ep=2, zero=1)
    run = replace(run, train=replace(run.train, precision="fp64"))
    loads = (3.0, *[1.0] * 15)
    for given, factor in (((), 1.0), (loads, (10 / 18) / (8 / 16))):
        trace = traced(run, "cpu", given)[0]
        rows = [c for c in trace.calls if c.op == "all_to_all" and c.elements > 16]
        assert (rows[0].own >= 0) == bool(given)
        experts = 6 * 512 * 4 * 3 * 128 * 64 * (factor - 1)  # what 2,048 rows of one layer are more or fewer
        balanced = next(c for c in compare(trace, dry_run.positions(run)[0], "cpu", bool(given)))
        assert balanced.agrees
        assert trace.matmul_flops == pytest.approx(balanced.formula + experts, rel=2e-3)


def test_given_loads_are_followed_and_meet_and_drop_what_is_above_the_capacity():
    wide = replace(CAPPED, moe=replace(CAPPED.moe, capacity_factor=2.0))  # too wide for blocks of a fixed size
    run = run_of(wide, 1, dp_shard=4, ep=4, zero=1)
    found = traced(run, "cuda", (8.0, *[1.0] * 15))
    assert check_world({rank: trace.calls for rank, trace in found.items()}, dry_run.grid_of(run)).fault is None
    first, last = found[0], found[3]
    place = dry_run.positions(run)[0]
    sent = {rank: next(c for c in trace.calls if c.own >= 0) for rank, trace in found.items()}
    # 8/23 of the assignments want the first expert, 2/16 of them it takes; each other one gets 1/23.
    kept = round(512 * 2 * (2 / 16 + 15 / 23))
    assert sent[0].elements == sent[3].elements == kept * 128
    assert first.matmul_flops > last.matmul_flops
    assert all(c.agrees for trace in found.values() for c in compare(trace, place, "cuda", True))
    assert not all(c.agrees for c in compare(last, place, "cuda"))


@pytest.mark.slow
def test_messages_to_the_wrong_neighbor_are_found(monkeypatch):
    """One place too far: on one rank alone, and on all of them."""
    import torch.distributed as dist

    run = run_of(cp=4, context="ring", zero=1)
    grid, sound = dry_run.grid_of(run), calls_of(run, 0)
    last = calls_of(run, 3)
    assert check_world({0: sound, 3: last}, grid).fault is None
    usual = dist.P2POp

    def astray(op, tensor, peer, group):
        wrong = (peer + 1) % 4 if op is dist.isend else peer
        return usual(op, tensor, wrong, group)

    monkeypatch.setattr(dist, "P2POp", astray)
    planted = {rank: calls_of(run, rank) for rank in (0, 3)}
    alone = check_world({0: sound, 3: planted[3]}, grid)
    assert alone.fault and not alone.alike
    together = check_world(planted, grid)
    assert together.fault and together.fault.kind == "deadlock" and "represented by rank 0" in together.fault.message


def test_experts_across_rows_of_ulysses_cannot_be_followed():
    run = run_of(replace(SPARSE, moe=replace(SPARSE.moe, num_experts=12)), cp=12, context="usp", ulysses=4, ep=3)
    run = replace(run, train=replace(run.train, seq_len=480))
    with refused("E-DRYRUN-GROUPS", ep=3, row=4):
        dry_run.grid_of(run)


def test_a_trace_of_experts_is_what_a_real_rank_does_but_for_the_numbers_of_rows(fork_ranks):
    run = run_of(SPARSE, dp_shard=2, ep=2, zero=1)
    run = replace(run, train=replace(run.train, compile="off", device="cpu", seq_len=64))
    for rank, (calls, _, _) in enumerate(fork_ranks(_really_trained, 2, run)):
        same = [(op, group, dtype, peer) for op, group, dtype, _, peer in calls]
        assert [(c.op, c.group, c.dtype, c.peer) for c in calls_of(run, rank)] == same
