"""The memory terms against what the trainer's own model keeps."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.planner.predict.memory import activations
from ingot.planner.predict.memory.in_flight import history_of
from ingot.planner.predict.memory.peak_memory import position_bill
from ingot.planner.predict.memory.stage_memory import stage_memories
from ingot.planner.request.presets import load_model
from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory import memory
from ingot.theory.layout import Position, positions
from ingot.theory.params import count_parameters
from ingot.theory.saved import norm_bytes

TINY = Arch(
    vocab_size=512, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=128
)
EXPERTS = Moe(num_experts=8, top_k=2, d_expert=48, first_dense=1)
LARGE = replace(TINY, d_model=2048, d_ffn=8192, num_layers=24)


def ranks_of(arch: Arch, precision: Any = "bf16", *, sequences=8, seq_len=128, micro_batches=1, **settings):
    parallel = Parallel(**settings)
    batch = sequences * micro_batches * parallel.data_ranks
    train = Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=sequences, precision=precision)
    return positions(RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel))


def one(arch: Arch, precision="bf16", **more) -> Position:
    (position,) = ranks_of(arch, precision, **more)
    return position


def kept(position: Position, device: str = "cpu") -> float:
    """Return the bytes kept of one micro-batch."""
    return sum(stage.kept for stage in stage_memories(position, device))


def saved_bytes(arch: Arch, dtype, sequences: int, seq_len: int, recompute: str = "none", every: int = 1) -> int:
    """Distinct storages that autograd keeps between forward and backward, parameters excluded."""
    import torch

    from ingot.trainer.model.routing import RouterLoss
    from ingot.trainer.model.transformer import Transformer
    from ingot.trainer.parallel.recompute import recompute as make_recompute

    torch.set_num_threads(1)
    model = Transformer(arch).to(dtype)
    if recompute != "none":
        make_recompute(model.blocks, recompute, every)  # type: ignore[arg-type]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        kept.append(tensor)  # alive, so that no address is used twice
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, arch.vocab_size, (sequences, seq_len))
    extra = {"router_loss": RouterLoss(torch.arange(sequences), torch.ones(()))} if arch.is_moe else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, tokens, **extra)
    return sum(sizes.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "arch",
    [
        TINY,
        replace(TINY, num_layers=5, d_ffn=64),
        replace(TINY, num_kv_heads=4, head_dim=32),
        replace(TINY, qk_norm=True, tied_embeddings=False),
        replace(TINY, moe=EXPERTS, num_layers=3),
        replace(TINY, moe=replace(EXPERTS, normalize=False, shared_experts=1, z_loss=1e-3, top_k=4)),
        replace(TINY, moe=replace(EXPERTS, scores="sigmoid", sequence_loss=1e-3, capacity_factor=8.0)),
        replace(TINY, num_kv_heads=4, head_dim=24, mla=Mla(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16)),
    ],
    ids=["plain", "deep", "all heads", "qk-norm", "experts", "shared experts", "sigmoids", "latents"],
)
def test_activations_are_what_autograd_saves(arch, precision):
    torch = pytest.importorskip("torch")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
    assert kept(one(arch, precision)) == pytest.approx(saved_bytes(arch, dtype, 8, 128), rel=0.02)


@pytest.mark.parametrize("every", [1, 2])
def test_a_recomputed_block_keeps_its_input(every):
    torch = pytest.importorskip("torch")
    arch = replace(TINY, num_layers=5)
    rank = one(arch, recompute="full", recompute_every=every)
    # Inputs of checkpointed blocks are saved; rotary tables beside them are a few kilobytes.
    assert kept(rank) == pytest.approx(saved_bytes(arch, torch.bfloat16, 8, 128, "full", every), rel=0.03)


def test_recompute_orders_memory_and_the_block_in_its_backward_comes_back():
    none, selective, full = (one(LARGE, recompute=how) for how in ("none", "selective", "full"))
    sizes = [kept(rank) for rank in (none, selective, full)]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0] / 10
    whole, *again = (activations.block_sizes(rank) for rank in (none, selective, full))
    assert whole.recomputed == 0 and whole.kept == again[0].kept == again[1].kept
    assert whole.kept > again[0].recomputed > again[1].recomputed > 0


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["llama3-70b", "llama3-405b"])
def test_every_form_of_recompute_saves_memory_at_every_degree_of_tensor_parallelism(model, tp, sequence):
    arch = load_model(model).arch
    settings = {"tp": tp} | ({} if tp == 1 else {"sequence": sequence})
    full, selective = (one(arch, recompute=how, **settings) for how in ("full", "selective"))
    sizes = [activations.recomputed_block_bytes(rank) for rank in (full, selective)]
    sizes.append(sum(activations.block_bytes(one(arch, **settings), "cuda").values()))
    assert sizes[0] < sizes[1] / 3 and sizes[1] < sizes[2] * 0.75


def test_tensor_parallelism_divides_activations_like_korthikanti():
    """Table 2: everything / t with sequence parallelism, but for the gathered inputs; without, norms stay whole."""
    arch = replace(LARGE, num_heads=16, num_kv_heads=16, head_dim=128)
    whole, cut, plain = (
        sum(activations.block_bytes(one(arch, tp=tp, sequence=sequence), "cuda").values())
        for tp, sequence in ((1, True), (4, True), (4, False))
    )
    inputs = 2 * arch.d_model * 2
    assert cut - inputs == pytest.approx((whole - inputs) / 4)
    assert plain - cut == pytest.approx(2 * norm_bytes(arch.d_model, 2, "cuda") * 3 / 4)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("gpipe", (8, 8, 8, 8)), ("1f1b", (4, 3, 2, 1)), ("zb_h1", (4, 4, 4, 4))]
)
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule, expected):
    rows = [history_of(schedule, 4, 8, 1, rank) for rank in range(4)]
    assert tuple((row.alive + row.left).sum(1).max() for row in rows) == expected


def test_a_stage_on_its_own_keeps_the_activations_of_its_blocks():
    first, last = ranks_of(TINY, pp=2, micro_batches=1)
    assert kept(first) + kept(last) == pytest.approx(kept(one(TINY)))  # and no output of the first one


def test_a_loss_that_waits_for_its_backward_keeps_no_gradient_of_the_head():
    """GPipe has four losses that wait on the last stage; 1F1B and one micro-batch have none."""
    from ingot.planner.predict.memory.peak import peak

    head = TINY.vocab_size * TINY.d_model * 2
    for schedule, micro_batches, late in (("gpipe", 4, True), ("gpipe", 1, False), ("1f1b", 4, False)):
        last = ranks_of(TINY, pp=2, micro_batches=micro_batches, schedule=schedule)[-1]
        (stage,) = peak(last, "cpu").stages
        assert stage.late == late and stage.head == head
        assert kept(last) - stage.kept == (head if late else 0)


def test_chunks_bound_the_logits():
    for vocab in (256, 4096, 128_256):
        assert memory.chunk_tokens(vocab, "cuda") * vocab * 4 <= 1 << 30
    assert memory.chunk_tokens(10**9, "cpu") == 16
    assert memory.chunks(4096, 256, "cpu") == 1
    assert memory.chunks(4096, 257, "cpu") == 2


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sharded_state_is_the_usual_bytes_per_parameter(ranks):
    """16 bytes per parameter over all ranks: masters 4, gradients 4, moments 8 (Rajbhandari et al. 2020, 3.1)."""
    n, rank = count_parameters(LARGE), one(LARGE, micro_batches=2, dp_shard=ranks, zero=3)
    shards = memory.weights(rank), memory.optimizer(rank), memory.gradients_kept(rank)
    assert sum(t.value for t in shards) * ranks == pytest.approx(16 * n)
    assert memory.checkpoint_bytes(LARGE, "bf16").value == 12 * n


def test_experts_are_divided_by_those_that_hold_them():
    sparse = replace(LARGE, moe=replace(EXPERTS, d_expert=512))
    rank = one(sparse, dp_shard=8, ep=4, zero=1)
    experts = 23 * 8 * 3 * 2048 * 512
    rest = count_parameters(sparse) - experts
    # A rank has a quarter of all experts, and one other rank has the same.
    assert memory.weights(rank).value == rest * 4 / 8 + experts / 4 * 4 / 2
    assert memory.optimizer(rank).value == 2 * memory.weights(rank).value
    assert memory.gathered(rank).value == 2 * (rest + experts / 4)
    alone = one(sparse, dp_shard=8, ep=8, zero=1, micro_batches=2)
    assert memory.gradients_kept(alone).value == 4 * (rest + experts / 8)


def test_context_parallelism_divides_tokens_and_state():
    whole, part = one(LARGE), one(LARGE, cp=4, context="ulysses", zero=1)
    assert memory.optimizer(part).value == memory.optimizer(whole).value / 4
    # Key/value heads are repeated for four ranks, so a part is a little more than a quarter.
    assert 1 < 4 * kept(part) / kept(whole) < 1.05


def test_repeated_heads_are_kept():
    few = replace(LARGE, num_heads=16, num_kv_heads=2, head_dim=128)
    forms: list[dict[str, Any]] = [{"context": "ring"}, {"context": "ulysses"}, {"context": "usp", "ulysses": 4}]
    found = [activations.block_bytes(one(few, cp=8, **form))["q, k, v"] / 256 for form in forms]
    assert tuple(found) == (16 + 2 * 2, 16 + 2 * 8, 16 + 2 * 2 * 4)


def test_a_token_of_a_block_with_experts_leaves_its_rows():
    block = activations.block_bytes(one(replace(LARGE, moe=EXPERTS)), "cuda", experts=True)
    assert block["rows of experts"] == block["what experts made"] == 2 * 2048 * 2
    assert block["gate, silu(gate), up, product of experts"] == 2 * 4 * 48 * 2
    cut = activations.block_bytes(one(replace(LARGE, moe=EXPERTS), tp=2, ep=2), "cuda", experts=True)
    assert cut["rows of experts"] == block["rows of experts"] / 2
    assert "input of gate, up" not in block


def test_whole_parameters_are_there_once():
    n = count_parameters(LARGE)
    assert memory.gathered(one(LARGE, dp_shard=4, zero=1)).value == 2 * n
    assert memory.gathered(one(LARGE, "fp32", dp_shard=4, zero=1)).value == 0  # the master is whole
    assert memory.weights(one(LARGE, "fp32", dp_shard=4, zero=1)).value == 4 * n
    outer = LARGE.vocab_size * LARGE.d_model * (1 if LARGE.tied_embeddings else 2) + LARGE.d_model
    for ahead in (1, 2):  # the outer unit, the block in use and those gathered ahead
        rank = one(LARGE, dp_shard=4, zero=3, unit_layers=1, prefetch=ahead)
        assert memory.gathered(rank).value == 2 * (outer + (1 + ahead) * (n - outer) / LARGE.num_layers)
    assert memory.gathered(one(LARGE, dp_shard=4, zero=3, reshard=False)).value == 2 * n


def test_the_optimizer_converts_as_much_at_a_time_as_is_counted():
    pytest.importorskip("torch")
    from ingot.trainer.optim.optimizer import CONVERT_BYTES

    assert memory.CONVERT_BYTES == CONVERT_BYTES
    n = count_parameters(LARGE)
    assert memory.gradients_at_update(one(LARGE)).value == 4 * n
    assert memory.gradients_at_update(one(LARGE, grads="bf16")).value == 2 * n + CONVERT_BYTES


def test_a_checkpoint_is_as_large_as_predicted():
    torch = pytest.importorskip("torch")
    from ingot.trainer.model.transformer import Transformer

    torch.set_num_threads(1)
    model = Transformer(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    held = sum(t.numel() * t.element_size() for t in [*model.parameters(), *state])
    assert held == memory.checkpoint_bytes(TINY, "fp32").value


def test_logits_are_bounded_by_the_chunk_and_cut_by_tensor_parallelism():
    large = replace(TINY, vocab_size=128_256)
    short, long = (memory.logits(one(large, sequences=s, seq_len=128), "cuda").value for s in (64, 8192))
    assert long - short == (8192 - 64) * 128 * large.d_model * 2  # hidden states
    assert memory.logits(one(large, sequences=1), "cuda").value < short
    halved = memory.logits(one(large, tp=2), "cuda").value / memory.logits(one(large), "cuda").value
    assert 0.5 < halved < 0.65  # and one more chunk in bf16, for sums over ranks


@pytest.mark.parametrize("precision, extra", [("fp32", 4), ("bf16", 0)])
def test_a_softcap_keeps_the_capped_logits_of_a_chunk(precision, extra):
    """The capped logits in bf16 take the place of the float32 copy that exists without a cap."""
    plain, capped = (one(replace(TINY, logit_softcap=cap), precision) for cap in (0.0, 30.0))
    chunk = min(memory.chunk_tokens(TINY.vocab_size, "cpu"), 8 * 128)
    assert memory.logits(capped).value - memory.logits(plain).value == chunk * TINY.vocab_size * extra


def test_every_formula_shows_its_numbers():
    rank = one(TINY, dp_shard=2, micro_batches=2)
    terms = (memory.weights, memory.optimizer, memory.gathered, memory.gradients_at_update, memory.gradients_kept)
    for term in (*(f(rank) for f in terms), memory.logits(rank), *position_bill(rank, "cuda").values()):
        assert any(c.isdigit() for c in term.formula)
