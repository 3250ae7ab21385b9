"""Private names of PyTorch: each works on the installed version. tests/unit/test_house.py checks that only one file of
src touches them.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.trainer import torch_private as private


def wrappers():
    return [
        value
        for name, value in vars(private).items()
        if inspect.getmodule(value) is private and not name.startswith("_") and value is not private.AttentionKernels
    ]


@pytest.mark.parametrize("wrapper", wrappers(), ids=lambda wrapper: wrapper.__name__)
def test_every_wrapper_has_a_reason_its_versions_and_a_replacement(wrapper):
    lines = [line.strip().split(":")[0] for line in inspect.getdoc(wrapper).splitlines()]
    assert {"Why", "Checked", "Fallback"} <= set(lines)
    assert wrapper.__name__ in CHECKS


def checks_collectives():
    assert private.functional_collectives().wait_tensor(torch.ones(2)).sum() == 2


def checks_recorder(fork_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "8")
    records, groups = fork_ranks(_one_sum, 1)[0]
    (last,) = (record for record in records if record["profiling_name"] == "gloo:all_reduce")
    assert last["process_group"] == ["1", "own"] and last["collective_seq_id"] == 1 and not last["is_p2p"]
    assert last["input_sizes"] == [[3]] and last["input_dtypes"] == ["Float"] and last["retired"] in (True, False)
    assert groups["1"] == [0]


def checks_waits_of_fsdp():
    """The methods exist; that streams wait in them is in tests/dist/test_axis_traffic.py, on ranks."""
    units, names = private.waits_of_fsdp()
    assert len(names) == 3 and all(callable(getattr(units, name)) for name in names)


def checks_group_of_fsdp_wait():
    streams = SimpleNamespace(all_reduce_stream="sums", _last_post_reduce_events={"sums": 1, "scatters": 2})
    unit = SimpleNamespace(
        comm_ctx=streams,
        mesh_info=SimpleNamespace(replicate_process_group="copies"),
        _all_reduce_state=SimpleNamespace(event=3),
        _all_reduce_process_group="copies",
        _all_gather_process_group="shards",
    )
    found = [private.group_of_fsdp_wait(unit, event) for event in (1, 2, 3, 4)]
    assert found == ["copies", "shards", "copies", "shards"]
    del streams._last_post_reduce_events  # as before torch 2.13
    assert private.group_of_fsdp_wait(unit, 1) == "shards"


def _one_sum(rank, world):
    torch.distributed.all_reduce(torch.ones(3), group=torch.distributed.new_group([0], group_desc="own"))
    return private.recorded_collectives(), private.ranks_of_groups()


def checks_abort(fork_ranks):
    assert fork_ranks(_sum_after_abort, 2) == [(0, 2.0)] * 2  # groups of Gloo stay


def _sum_after_abort(rank, world):
    aborted, one = private.abort_communicators(), torch.ones(1)
    torch.distributed.all_reduce(one)
    return aborted, one.item()


def checks_attention():
    q = torch.randn(1, 2, 4, 8)
    kernels = private.attention_kernels()
    out, lse = kernels.flash_on_cpu(q, q, q, 0.0, True)
    assert out.shape == q.shape and lse.shape == (1, 2, 4)
    back = kernels.flash_on_cpu_backward(out, q, q, q, out, lse, 0.0, True)
    assert [gradient.shape for gradient in back] == [q.shape] * 3
    assert all(hasattr(kernel, "default") for kernel in kernels)


def checks_grouped():
    assert private.grouped_product_kernel().default


def checks_packet():
    assert private.operator_packet(torch.ops.aten.mm.default) is torch.ops.aten.mm


def checks_key():
    x, y = torch.ones(4), torch.ones(4)
    assert private.storage_key(x.untyped_storage()) == private.storage_key(x[1:].untyped_storage())
    assert private.storage_key(x.untyped_storage()) != private.storage_key(y.untyped_storage())


def checks_buffers():
    class Narrow(private.WideBuffers):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.full((2,), 1 / 3))
            self.weight = nn.Parameter(torch.ones(2))

    module = nn.Sequential(Narrow()).to(torch.bfloat16)[0]
    assert module.weight.dtype == torch.bfloat16 and torch.equal(module.wide, torch.full((2,), 1 / 3))


def checks_gather():
    from torch.distributed.fsdp import FSDPModule, fully_shard

    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    try:
        module = fully_shard(nn.Linear(2, 2))
        assert isinstance(module, FSDPModule)
        output = torch.ones(2, requires_grad=True) * 2
        assert private.gather_before_backward(module, output).shape == output.shape
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        group._partial_reduce_output = output
        private.drop_partial_sums(module)
        assert group._partial_reduce_output is None
    finally:
        dist.destroy_process_group()


def checks_compiler():
    assert private.compiler_is_loaded() in (True, False)


def checks_allocate():
    with torch.device("meta"):
        module = torch.nn.BatchNorm1d(3)
    private.allocate(module, "cpu")
    found = {name: (value.shape, value.dtype, value.device.type) for name, value in module.state_dict().items()}
    assert found == {n: (v.shape, v.dtype, "cpu") for n, v in torch.nn.BatchNorm1d(3).state_dict().items()}
    assert all(parameter.requires_grad for parameter in module.parameters())


def checks_overlap():
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory as symmetric

    assert inductor._micro_pipeline_tp is False and callable(symmetric.enable_symm_mem_for_group)


def checks_trace():
    class Count(private.TraceMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        torch.ones(2) + 1
    assert count.seen >= 2


def checks_fake():
    with private.UncompiledFakeMode() as mode:
        fake = torch.empty(2, 3)
    attributes = dict(private.FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu")).__dict__)
    made = private.new_fake_tensor(torch.empty(2, 3, device="meta"), attributes)
    assert type(made) is type(fake) is private.FakeTensor and made.shape == (2, 3) and made.device == fake.device


def checks_dispatch():
    with private.UncompiledFakeMode(), private.without_dispatch():
        assert type(torch.empty(2)) is torch.Tensor


def checks_groups():
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=4)
    try:
        private.count_group_name([2, 3])
        group = dist.new_group([0, 1])
        assert private.group_of_name(group.group_name) is group
        assert not private.is_process_group(object())
    finally:
        dist.destroy_process_group()


def checks_inputs():
    assert private.changes_its_inputs(torch.ops.aten.add_.Tensor)
    assert not private.changes_its_inputs(torch.ops.aten.add.Tensor) and not private.changes_its_inputs(len)


def checks_norms():
    """The bits are those of single norms, in the wide dtype, by one operation for all tensors."""
    tensors = [torch.randn(700, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    operations = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        norms = private.norms_of(tensors, torch.float32)
    assert len(operations) == 1
    for norm, tensor in zip(norms, tensors, strict=True):
        assert norm.dtype == torch.float32
        assert torch.equal(norm, torch.linalg.vector_norm(tensor, dtype=torch.float32))


def checks_nodes():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    number = private.next_sequence_number()
    product = weight * 3
    assert private.next_sequence_number() == number + 1 and private.running_node() is None
    weight.register_hook(lambda grad: seen.append(private.running_node()))
    product.register_hook(lambda grad: seen.append(private.running_node()))
    product.sum().backward()
    assert any(node and node[1] == number for node in seen)


CHECKS = {
    "changes_its_inputs": checks_inputs,
    "norms_of": checks_norms,
    "running_node": checks_nodes,
    "next_sequence_number": checks_nodes,
    "functional_collectives": checks_collectives,
    "recorded_collectives": checks_recorder,
    "ranks_of_groups": checks_recorder,
    "abort_communicators": checks_abort,
    "attention_kernels": checks_attention,
    "grouped_product_kernel": checks_grouped,
    "operator_packet": checks_packet,
    "storage_key": checks_key,
    "WideBuffers": checks_buffers,
    "gather_before_backward": checks_gather,
    "drop_partial_sums": checks_gather,
    "waits_of_fsdp": checks_waits_of_fsdp,
    "group_of_fsdp_wait": checks_group_of_fsdp_wait,
    "compiler_is_loaded": checks_compiler,
    "allocate": checks_allocate,
    "overlap_products_with_collectives": checks_overlap,
    "TraceMode": checks_trace,
    "UncompiledFakeMode": checks_fake,
    "new_fake_tensor": checks_fake,
    "without_dispatch": checks_dispatch,
    "fake_store": checks_groups,
    "count_group_name": checks_groups,
    "group_of_name": checks_groups,
    "is_process_group": checks_groups,
}


@pytest.mark.parametrize("name", CHECKS)
def test_it_works_on_the_installed_torch(name, request):
    check = CHECKS[name]
    check(*(request.getfixturevalue(fixture) for fixture in inspect.signature(check).parameters))
