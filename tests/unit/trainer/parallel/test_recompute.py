"""Blocks recomputed in the backward: the same bits, with less memory, in every dress a block wears."""

import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from tests.expect import settled
from torch import nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.schema.arch import Arch
from ingot.trainer.mesh.collectives import gather, scatter_sum
from ingot.trainer.model.attention import AttentionMaskSpec
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.recompute import recompute
from ingot.trainer.parallel.split_backward import SplitBackward, WeightGradients, split_linears

ARCH = Arch(vocab_size=64, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64, max_seq_len=64)
BATCH, TOKENS = 2, 16


def make_model(how=None, every=1, dtype=torch.float64):
    torch.manual_seed(3)
    model = Transformer(ARCH).to(dtype)
    if how:
        recompute(model.blocks, how, every)
    return model


def step(model, documents=None):
    """Loss and gradients of one batch, by name."""
    tokens = torch.arange(BATCH * (TOKENS + 1)).view(BATCH, -1) * 7 % ARCH.vocab_size
    loss = model(tokens[:, :-1], tokens[:, 1:], documents)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_bits(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys() and len(theirs[1]) > 30
    for name, grad in theirs[1].items():
        assert torch.equal(ours[1][name], grad), name


class Ledger(TorchDispatchMode):
    """Operations by name, and the storages that they made; `given`: tensors that were there before."""

    def __init__(self, given=()):
        super().__init__()
        self.ops, self.made = Counter(), {}
        self.given = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops[func.overloadpacket.__name__] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.given:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self):
        return sum(size for ref, size in self.made.values() if not ref.expired())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradients_keep_their_bits(how, dtype, masked):
    documents = torch.arange(TOKENS).div(5, rounding_mode="floor").expand(BATCH, -1) if masked else None
    plain = step(make_model(dtype=dtype), documents)
    for every in (1, 2, 3):
        assert_same_bits(step(make_model(how, every, dtype), documents), plain)


def test_names_stay():
    plain, changed = make_model(), make_model("selective")
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in changed.named_modules()]


@pytest.mark.parametrize("how", ["full", "selective"])
def test_only_every_nth_layer_runs_twice(how):
    model, runs = make_model(how, every=3), Counter()
    for layer, block in model.blocks.items():
        block.attention_norm.register_forward_hook(lambda *_, layer=layer: runs.update([layer]))
    step(model)
    assert runs == {"0": 2, "1": 1, "2": 1, "3": 2}


def test_a_part_of_the_model_recomputes_the_same_layers():
    """A pipeline stage holds some layers only, under their own numbers."""
    stage = make_model()
    for layer in ("0", "2"):
        del stage.blocks[layer]
    recompute(stage.blocks, "full", 3)
    assert ["forward" in vars(stage.blocks[layer]) for layer in ("1", "3")] == [False, True]


def test_nothing_runs_twice_without_gradients():
    ops = []
    for model in (make_model(), make_model("full"), make_model("selective")):
        with torch.no_grad(), Ledger() as ledger:
            model(torch.zeros(1, 8, dtype=torch.int64))
        ops.append(ledger.ops)
    assert ops[0] == ops[1] == ops[2]


def test_selective_runs_no_matrix_product_and_no_attention_again():
    counts = {}
    for how in (None, "selective", "full"):
        model = make_model(how)
        with Ledger() as ledger:
            step(model)
        counts[how] = {op: ledger.ops[op] for op in ("mm", "_scaled_dot_product_flash_attention_for_cpu", "silu")}
    assert counts["selective"] == counts[None] | {"silu": 2 * ARCH.num_layers}
    # Per block q, k, v, o, gate and up again; down is the last, and nothing in the backward needs its result.
    assert counts["full"]["mm"] == counts[None]["mm"] + 6 * ARCH.num_layers
    assert counts["full"]["_scaled_dot_product_flash_attention_for_cpu"] == 2 * ARCH.num_layers


def kept_bytes(how, every=1):
    """Bytes of all results of the blocks' operations that are alive between forward and backward."""
    model = make_model(how, every)
    x = torch.randn(BATCH, TOKENS, ARCH.d_model, dtype=torch.float64, requires_grad=True)
    rotary = (torch.ones(TOKENS, ARCH.head_dim // 2), torch.zeros(TOKENS, ARCH.head_dim // 2))
    sight = AttentionMaskSpec(torch.arange(TOKENS))
    with Ledger(given=(x, *model.parameters(), *rotary, sight.positions_T)) as ledger:
        out = x
        for block in model.blocks.values():
            out = block(out, rotary, sight)
    alive = ledger.bytes_alive()
    out.sum().backward()
    del out
    assert ledger.bytes_alive() == 0
    return alive


def test_bytes_kept():
    hidden = BATCH * TOKENS * ARCH.d_model * 8  # of one hidden state; q and attention's result have the same size
    full, selective, none = (kept_bytes(how) for how in ("full", "selective", None))
    # full: a block's input is the output of the one before; the first input was made before the ledger was opened.
    assert full == ARCH.num_layers * hidden
    # selective: and q, k + v (half the heads each), attention, o, gate + up (twice as wide each), down.
    logsumexp = BATCH * TOKENS * ARCH.num_heads * 8
    assert selective == full + ARCH.num_layers * ((1 + 1 + 1 + 1 + 4 + 1) * hidden + logsumexp)
    assert selective < 0.75 * none
    assert kept_bytes("full", every=2) == (none + full) / 2


def test_full_saves_one_tensor_per_block_for_the_backward():
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    model = make_model("full")
    x = torch.randn(BATCH, TOKENS, ARCH.d_model, dtype=torch.float64, requires_grad=True)
    rotary = (torch.ones(TOKENS, ARCH.head_dim // 2), torch.zeros(TOKENS, ARCH.head_dim // 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.blocks["0"](x, rotary, AttentionMaskSpec(torch.arange(x.shape[1])))
    assert [size for size in saved if size] == [x.nbytes]


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_compiled_blocks_recompute(how, wrapped):
    """The compiler traces the recompute: which operations run again is then its partitioner's affair."""
    plain = step(make_model(dtype=torch.float32))
    model = make_model(how, dtype=torch.float32)
    counters.clear()
    for block in model.blocks.values():
        if wrapped:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        else:
            block.compile(backend="aot_eager", fullgraph=True)
    compiled = step(model)
    assert counters["stats"]["unique_graphs"] == 1  # serves all blocks
    torch._dynamo.reset()
    torch.testing.assert_close(compiled[0], plain[0])
    for name, grad in plain[1].items():
        torch.testing.assert_close(compiled[1][name], grad, msg=name)


class CutByRows(nn.Module):
    """`row` holds half the columns that its layer has inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.column, self.row, self.last = (nn.Linear(n, 8, bias=False) for n in (8, 16, 8))
        self.row.weight = nn.Parameter(self.row.weight.detach()[:, :8].clone())

    def forward(self, x):
        return self.last(torch.sin(self.row(torch.tanh(self.column(x)))))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_product_of_a_matrix_cut_by_rows_runs_again(compiled):
    results = []
    for how in (None, "selective"):
        block, x = CutByRows(), torch.ones(3, 2, 8, requires_grad=True)
        if how:
            recompute(nn.ModuleDict({"0": block}), how, 1)
        if compiled:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        with nullcontext() if compiled else Ledger() as ledger:
            block(x).sum().backward()
        results.append(([x.grad, *(p.grad for p in block.parameters())], ledger and ledger.ops["mm"]))
    torch._dynamo.reset()
    (plain, once), (again, more) = results
    torch.testing.assert_close(again, plain)
    assert compiled or more == once + 1


def sharded(rank, ranks, how):
    """Loss and gradients of a model whose blocks are FSDP units."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(how)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, grads = step(model)
    return loss, {name: grad.full_tensor() for name, grad in grads.items()}


def compare_sharded(rank, ranks, how):
    assert_same_bits(sharded(rank, ranks, how), sharded(rank, ranks, None))


@pytest.mark.parametrize("how", ["full", "selective"])
def test_sharded_blocks_recompute(fork_ranks, how):
    fork_ranks(compare_sharded, 2, how)


def world():
    group = torch.distributed.group.WORLD
    assert group is not None
    return group


class Gather(torch.autograd.Function):
    """Rows of all ranks together; backward: the sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx, x):
        return gather(x, 0, world())

    @staticmethod
    def backward(ctx, *grads):
        return scatter_sum(grads[0], 0, world())


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scatter_sum(x, 0, world())

    @staticmethod
    def backward(ctx, *grads):
        return gather(grads[0], 0, world())


class TwoCuts(nn.Module):
    """Twice the pattern of tensor parallelism with a split sequence: gather, column, row, scatter."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8 * (i + 1), 8, bias=False, dtype=torch.float64) for i in (0, 1, 0, 1))
        for row in self.parts[1::2]:
            row.weight = nn.Parameter(row.weight.detach()[:, :8].clone())  # this rank's columns

    def forward(self, x):
        for column, row in zip(self.parts[::2], self.parts[1::2], strict=True):
            x = x + Scatter.apply(row(torch.tanh(column(Gather.apply(torch.sin(x))))))
        return x


# Kept between forward and backward: the block's result, of this rank's 3 tokens of 8 float64. Selective also keeps both
# columns' results, of the tokens of two ranks, and both scatters' results, of this rank's own.
FULL_BYTES = 3 * 8 * 8
SELECTIVE_BYTES = FULL_BYTES + 2 * (6 + 3) * 8 * 8
COUNTED = ("all_gather_into_tensor", "reduce_scatter_tensor", "mm", "tanh")


def collectives(rank, ranks, how, split, most):
    """Gradients, operations, and the bytes that are alive between forward and backward."""
    torch.manual_seed(rank)
    block, deferred = TwoCuts(), SplitBackward()
    if split:
        split_linears(block, deferred)
    if how:
        recompute(nn.ModuleDict({"0": block}), how, 1)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    left = WeightGradients(deferred)
    with Ledger(given=(x, *block.parameters())) as ledger:
        with left if split else nullcontext():
            out = block(x)
        kept = settled(ledger.bytes_alive, most)
        with left if split else nullcontext():
            out.square().sum().backward()
        left.compute()
    grads = {"x": x.grad} | {name: p.grad for name, p in block.named_parameters()}
    return grads, {op: ledger.ops[op] for op in COUNTED}, kept


def compare_collectives(rank, ranks, split):
    limits = {None: math.inf, "full": FULL_BYTES, "selective": SELECTIVE_BYTES}
    plain, full, selective = (collectives(rank, ranks, how, split, most) for how, most in limits.items())
    for recomputed in (full, selective):
        for name, grad in plain[0].items():
            assert torch.equal(recomputed[0][name], grad), name
    return plain[1:], full[1:], selective[1:]


@pytest.mark.parametrize("split", [False, True])
def test_selective_keeps_what_leaves_a_region_but_nothing_as_wide_as_the_model(fork_ranks, split):
    for (plain, _), (full, least), (selective, kept) in fork_ranks(compare_collectives, 2, split):
        assert plain == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4, "mm": 12, "tanh": 2}
        # The last scatter of a block is not run again: the backward needs nothing after it. Nor is the product before
        # it, unless the backward is split.
        assert full == {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 5, "mm": 15 + split, "tanh": 4}
        assert selective == {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 4, "mm": 13 + split, "tanh": 4}
        assert (least, kept) == (FULL_BYTES, SELECTIVE_BYTES)
