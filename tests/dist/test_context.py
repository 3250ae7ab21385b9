"""Context parallelism against attention of whole sequences in one process: rings, Ulysses and grids of both."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Train
from ingot.theory.context import ring_bytes, ulysses_bytes
from ingot.trainer.attend import tiles
from ingot.trainer.attend.kernels import attend_part
from ingot.trainer.build import build_parts
from ingot.trainer.evaluate import evaluate, run_logits, run_nats
from ingot.trainer.heldout import Heldout, SourceText
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.model.attention import AttentionMaskSpec, attend_locally
from ingot.trainer.model.generate import generate
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel import ring
from ingot.trainer.parallel.apply import compile_blocks
from ingot.trainer.parallel.context import ContextParallelism
from ingot.trainer.parallel.recompute import recompute

from .steps import CPU, join, keep, mean_losses, run_of, train

LAYOUTS = ("zigzag", "striped", "contiguous")
SIGHTS = ("causal", "documents", "window", "documents and window")
# Sizes of tiles (attend/tiles.py): as they are, and so small that documents have tiles of their own.
SIZES = ((128, 64), (4, 3))
HEADS, HEAD_DIM, BATCH, TOKENS = 12, 8, 2, 48


def documents_of(rows, tokens, seed=7):
    """Numbers of documents of random lengths."""
    starts = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.15
    return starts.cumsum(-1).int()


def mask_spec_of(what, positions):
    documents = documents_of(BATCH, TOKENS) if "documents" in what else None
    return AttentionMaskSpec(positions, documents, 11 if "window" in what else 0)


def example(kv_heads, dtype=torch.float64):
    """Queries, keys, values and a gradient of results."""
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(BATCH, heads, TOKENS, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def run(attend, tensors, mask_spec):
    """Results, and gradients of queries, keys and values."""
    q, k, v, grad = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, mask_spec)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend_densely(q, k, v, mask_spec):
    """Attention with a mask of all pairs, and keys and values repeated for each query head."""
    positions, documents, window = mask_spec.positions_T, mask_spec.document_ids_BS, mask_spec.window
    distance = positions[:, None] - positions
    mask = ((distance >= 0) & (distance < (window or len(positions))))[None]
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None, :])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def in_one_process(tensors, what):
    return run(attend_densely, tensors, mask_spec_of(what, torch.arange(TOKENS)))


def own_part(context, x_BNTH):
    return x_BNTH.index_select(2, context.positions(x_BNTH.shape[2], CPU))


def in_parts(context, tensors, what):
    """This rank's part of the same."""
    return run(
        context.attend, [own_part(context, x) for x in tensors], mask_spec_of(what, context.positions(TOKENS, CPU))
    )


def grids(world):
    """Every form over so many ranks whose degree divides the heads."""
    for ulysses in (u for u in range(1, world + 1) if world % u == 0 and HEADS % u == 0):
        for layout in LAYOUTS[: 1 if ulysses == world else 3]:
            yield Parallel(cp=world, context="usp", ulysses=ulysses, context_layout=layout)


@pytest.mark.parametrize(
    "world, kv_heads",
    [
        (2, (12, 4, 1)),
        (3, (6, 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, (12, 2)), (8, (3,)))),
    ],
)
def test_every_form_equals_one_process(fork_ranks, world, kv_heads):
    def check(rank, ranks):
        for parallel in grids(world):
            context = ContextParallelism(build_mesh(parallel, "cpu"), attend_locally)
            for heads, what, sizes in product(kv_heads, SIGHTS, SIZES):
                if what == "causal" and sizes != SIZES[0]:
                    continue
                tiles.SHARED_TOKENS, tiles.LEAST_ROWS = sizes
                tensors = example(heads)
                found, expected = in_parts(context, tensors, what), in_one_process(tensors, what)
                for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
                    error = (ours - own_part(context, theirs)).abs().max() / theirs.abs().max()
                    assert error <= 1e-13, f"{parallel} {heads} kv heads, {what}: {name} {error}"

    fork_ranks(check, world)


@pytest.mark.parametrize("what", ["causal", "documents and window"])
def test_bf16_is_as_near_to_float64_as_one_process(fork_ranks, what):
    def errors(rank, ranks):
        tensors = example(4, torch.bfloat16)
        exact, alone = in_one_process([x.double() for x in tensors], what), in_one_process(tensors, what)
        worst = []
        for parallel in grids(ranks):
            context = ContextParallelism(build_mesh(parallel, "cpu"), attend_locally)
            for ours, theirs, whole in zip(in_parts(context, tensors, what), alone, exact, strict=True):
                assert ours.dtype == torch.bfloat16
                worst.append(((ours - own_part(context, whole)).norm() / (theirs - whole).norm()).item())
        return worst

    # A rank has a quarter of the tokens, so an error like that of one process is half of its norm.
    assert np.max(fork_ranks(errors, 4)) < 2


@pytest.mark.parametrize(
    "ulysses, layout, what",
    [(1, "zigzag", "causal"), (2, "zigzag", "causal"), (4, "zigzag", "causal"), (1, "contiguous", "window")],
)
def test_what_is_sent_is_what_the_formulas_say(fork_ranks, ulysses, layout, what):
    parallel = Parallel(cp=4, context="usp", ulysses=ulysses, context_layout=layout)
    arch = Arch(
        vocab_size=8, d_model=8, num_layers=1, num_heads=HEADS, num_kv_heads=2, head_dim=HEAD_DIM, d_ffn=8,
        sliding_window=11 if what == "window" else 0,
    )  # fmt: skip
    train = Train(steps=1, seq_len=TOKENS, global_batch=BATCH, micro_batch=BATCH, precision="bf16")

    def count(rank, ranks):
        context, sent, dealt = ContextParallelism(build_mesh(parallel, "cpu"), attend_locally), [], []
        send, deal = dist.isend, dist.all_to_all_single

        def counted_deal(found, parts, group):
            dealt.append(parts.numel() * parts.itemsize)
            return deal(found, parts, group=group)

        def counted_exchange(operations):
            sent.extend(op.tensor.numel() * op.tensor.itemsize for op in operations if op.op is send)
            return exchange(operations)

        exchange, dist.batch_isend_irecv, dist.all_to_all_single = (
            dist.batch_isend_irecv, counted_exchange, counted_deal,
        )  # fmt: skip
        q, k, v, grad = (own_part(context, x) for x in example(2, torch.bfloat16))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = context.attend(*leaves, mask_spec_of(what, context.positions(TOKENS, CPU)))
        forward = [len(sent), sum(sent), len(dealt), sum(dealt)]
        out.backward(grad)
        return forward, [
            len(sent) - forward[0],
            sum(sent) - forward[1],
            len(dealt) - forward[2],
            sum(dealt) - forward[3],
        ]

    ring, dealt = ring_bytes(arch, train, parallel), ulysses_bytes(arch, train, parallel)
    assert what == "causal" or ring.forward_calls == 1  # 10 tokens back are among 12 of the rank before
    for forward, backward in fork_ranks(count, 4):
        assert forward == [ring.forward_calls, ring.forward, dealt.forward_calls, dealt.forward]
        assert backward == [ring.backward_calls, ring.backward, dealt.backward_calls, dealt.backward]


ARCH = Arch(
    vocab_size=32, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, d_ffn=24, sliding_window=9
)


def model_of(attend):
    model = Transformer(ARCH, attend).double()
    initialize(model, ARCH, 5)
    return model


def loss_and_gradients(model, ids, context=None):
    """Sums over all tokens."""
    positions = None if context is None else context.positions(TOKENS, CPU)
    own = ids if context is None else context.own(ids)
    loss = model(own, own, documents_of(BATCH, TOKENS), positions_T=positions)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    if context is not None:
        for x in found:
            dist.all_reduce(x)
    return found


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("how", ["full", "selective", pytest.param("compiled", marks=pytest.mark.slow)])
def test_recomputed_and_compiled_blocks(fork_ranks, monkeypatch, how, ulysses):
    ids = torch.randint(0, ARCH.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    compile_once = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_once(f, backend="eager"))
    expected = loss_and_gradients(model_of(attend_locally), ids)

    def check(rank, ranks):
        mesh = build_mesh(Parallel(cp=ranks, context="usp", ulysses=ulysses), "cpu")
        context = ContextParallelism(mesh, attend_locally, hidden=how == "compiled")
        model = model_of(context.attend)
        if how == "compiled":
            compile_blocks(model, whole_readout=False, whole_attention=False)
        else:
            recompute(model.blocks, how, 1, context.kept, ring=True)
        for ours, theirs in zip(loss_and_gradients(model, ids, context), expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()

    fork_ranks(check, 2 * ulysses)


@pytest.mark.parametrize("how", ["none", "selective"])
def test_a_ring_keeps_its_result_and_goes_round_once(fork_ranks, monkeypatch, how):
    """The results of a ring's steps are freed by the end of the forward: together they are as large as whole
    sequences."""
    made = []

    def noted(*args, **kwargs):
        results = attend_part(*args, **kwargs)
        made.extend(StorageWeakRef(x.untyped_storage()) for x in results)
        return results

    monkeypatch.setattr(ring, "attend_part", noted)
    ids = torch.randint(0, ARCH.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))

    def check(rank, ranks):
        context = ContextParallelism(build_mesh(Parallel(cp=ranks, context="ring", ulysses=1), "cpu"), attend_locally)
        model = Transformer(replace(ARCH, sliding_window=0), context.attend)
        initialize(model, ARCH, 5)
        if how == "selective":
            recompute(model.blocks, how, 1, context.kept, ring=True)
        own = context.own(ids)
        loss = model(own, own, None, positions_T=context.positions(TOKENS, CPU))
        forward = len(made)
        alive = sum(not part.expired() for part in made)
        loss.backward()
        return forward, alive, len(made) - forward

    results = 2 * 3 * ARCH.num_layers  # and log-sum-exps, of each step
    assert fork_ranks(check, 3) == [(results, 0, 0)] * 3


ON_EIGHT_RANKS = (
    {"cp": 4, "context": "usp", "ulysses": 2, "dp_replicate": 2},
    {"cp": 2, "context": "ulysses", "tp": 2, "pp": 2},
    {"cp": 2, "context": "ring", "tp": 2, "dp_shard": 2, "zero": 3, "recompute": "selective"},
)
LAYOUTS_OF_RUNS = ({"cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp_shard": 2, "cp": 2, "zero": 3})


def trained(config):
    parts = build_parts(config, CPU, Path())
    return SimpleNamespace(**vars(parts), place=SimpleNamespace(device=CPU))


def heldout_of():
    ids = np.random.default_rng(0).integers(1, ARCH.vocab_size, 150)
    ids[[20, 33, 90, 149]] = 0  # ends of documents
    unigram = np.full(ARCH.vocab_size, np.log(ARCH.vocab_size))
    return Heldout.prepare([SourceText("a", ids, 600)], unigram, seq_len=16, eot_id=0, mask_documents=True)


def evaluated_and_sampled(run_):
    """The loss of held-out text, and a continuation of a prompt whose length nothing divides."""
    found = evaluate(
        run_nats(run_), heldout_of(), micro_batch=2, device=CPU, part=run_.mesh.data_rank, readers=run_.readers
    )
    text = generate(run_logits(run_, 32), ARCH, [3, 1, 4], max_tokens=6)
    return found.total.loss, text


@pytest.fixture(scope="module")
def one_process():
    """`one_process(fork_ranks, function)`: the result of a function in a job of one rank, computed once per test
    function for all its layouts."""
    known = {}

    def computed(fork_ranks, function):
        if function.__qualname__ not in known:
            (known[function.__qualname__],) = fork_ranks(function, 1)
        return known[function.__qualname__]

    return computed


@pytest.mark.parametrize("layout", LAYOUTS_OF_RUNS, ids=str)
def test_evaluation_and_samples_are_those_of_one_process(fork_ranks, one_process, layout):
    def parts_of(rank, ranks):
        config = run_of(arch=ARCH, seq_len=16, **({"context": "ring"} | layout if ranks > 1 else {}))
        return evaluated_and_sampled(trained(config))

    loss, text = one_process(fork_ranks, parts_of)
    for ours, theirs in fork_ranks(parts_of, int(np.prod([n for name, n in layout.items() if name != "zero"]))):
        assert ours == pytest.approx(loss, rel=1e-12)
        assert theirs == text


@pytest.mark.parametrize(
    "layout", [{"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}, {"dp_shard": 2, "ep": 2}], ids=str
)
def test_scores_and_logits_of_experts_with_a_capacity_are_those_of_one_process(fork_ranks, one_process, layout):
    """Ranks that share a text fill it up to a length that they divide, one process keeps keys and values."""
    arch = replace(ARCH, moe=Moe(num_experts=8, top_k=2, d_expert=12, capacity_factor=0.4, shared_experts=1))

    def scores_of(rank, ranks):
        run_ = trained(run_of(arch=arch, seq_len=16, **(layout if ranks > 1 else {})))
        nats = evaluated_and_sampled(run_)[0]
        return nats, run_logits(run_, 32)([3, 1, 4]).numpy()

    loss, logits = one_process(fork_ranks, scores_of)
    for ours, theirs in fork_ranks(scores_of, 2):
        assert ours == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(theirs, logits, rtol=0, atol=1e-12 * np.abs(logits).max())


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2, "context": "ring", "context_layout": "striped"},
        {"cp": 2, "context": "ring", "dp_shard": 2, "zero": 3, "recompute": "selective"},
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ON_EIGHT_RANKS),
    ],
    ids=str,
)
def test_steps_of_the_trainer_are_those_of_one_process(fork_ranks, one_process, layout):
    def steps(rank, ranks):
        result = train(run_of(arch=ARCH, seq_len=16, global_batch=4, **(layout if ranks > 1 else {})), (1, 2, 3))
        return result.losses, result.norms, keep((piece, piece.value) for piece in result.parts.model.shards)

    losses, norms, kept = one_process(fork_ranks, steps)
    results = fork_ranks(
        steps, int(np.prod([layout.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")]))
    )
    assert mean_losses(ours for ours, _, _ in results) == pytest.approx(losses, rel=1e-12)
    assert results[0][1] == pytest.approx(norms, rel=1e-10)
    expected, found = join([kept]), join(own for _, _, own in results)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert np.abs(value - expected[name]).max() < 1e-9 * np.abs(expected[name]).max(), name


def test_whole_puts_tokens_back_in_order(fork_ranks):
    def check(rank, ranks):
        for parallel in grids(ranks):
            context = ContextParallelism(build_mesh(parallel, "cpu"), attend_locally)
            x = torch.arange(BATCH * TOKENS * 3).view(BATCH, TOKENS, 3)
            assert context.own(x).shape == (BATCH, TOKENS // ranks, 3)
            assert torch.equal(context.whole(context.own(x)), x)

    fork_ranks(check, 4)
