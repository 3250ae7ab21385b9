"""The time of profiled steps by kind, on traces that are written by hand."""

import math
import random

import pytest
from tests.expect import refused
from tests.unit.rehearse.profile.traces import (
    BACKWARD,
    MAIN,
    NCCL_STREAM,
    host,
    kernel,
    launch,
    noted,
    window,
)

from ingot.rehearse.profile.analysis import analyze
from ingot.rehearse.profile.kinds import (
    ATTENTION,
    COMMUNICATION,
    ELEMENTWISE,
    HOST,
    IDLE,
    KINDS,
    OPTIMIZER,
    PRODUCTS,
    kind_of_kernel,
    kind_of_operation,
)
from ingot.rehearse.profile.timeline import divide_device, divide_thread, waits_for_device
from ingot.rehearse.profile.trace import DATA, OPTIMIZING, WAIT, read_spans, window_of

# The thread of a rank for a step of 1000 microseconds: (event, what it adds to which kind).
STEP = [
    window(100, 1100),
    noted(f"{WAIT}outside", 0, 90),
    noted(DATA, 100, 150),
    host("aten::copy_", 110, 120),
    noted("ingot forward", 150, 500),
    host("aten::linear", 160, 260),
    host("aten::t", 161, 165),
    host("aten::addmm", 165, 255),
    host("aten::copy_", 170, 180),  # a product owns what it calls
    host("aten::scaled_dot_product_attention", 270, 370),
    host("aten::bmm", 280, 360),
    host("aten::einsum", 380, 420),
    host("aten::empty", 381, 384),
    host("aten::bmm", 385, 415),  # an elementwise operation owns no product
    host("aten::mul", 430, 440),
    noted(f"{WAIT}tp", 450, 490),
    host("aten::add", 455, 465),
    noted("ingot optimizer", 600, 800),
    noted(f"{WAIT}dp_shard", 610, 640),
    host("aten::_foreach_add_", 650, 750),
    host("aten::mm", 660, 700),
    host("gloo:all_reduce", 620, 790),  # in flight while the thread does other work
    host("aten::mul", 780, 790),
    host("aten::mul", 900, 910, thread=99),  # of the loader
]


def divided(events, exchanges=()):
    spans = read_spans(events)
    return divide_thread(spans, window_of(spans), dict(exchanges))


def test_each_moment_of_a_thread_belongs_to_one_kind():
    assert OPTIMIZING == "ingot optimizer"
    found = divided(STEP).by_kind
    assert found == {
        IDLE: 40,
        PRODUCTS: 90 + 30,
        ATTENTION: 100,
        ELEMENTWISE: 10 + 40 - 30 + 10,
        OPTIMIZER: 100 + 10,
        COMMUNICATION: 40 + 30,
        HOST: 1000 - 40 - 120 - 100 - 30 - 110 - 70,
    }
    assert sum(found.values()) == 1000


def test_communication_is_exposed_by_axis_and_hidden_beside_work():
    exchanges = {"dp_shard": [(0, 200), (150, 300), (600, 640)], "tp": [(440, 490)]}
    found = divided(STEP, exchanges)
    assert found.exposed == {"tp": 40, "dp_shard": 30}
    assert found.hidden == {"dp_shard": 200 + 10, "tp": 10}  # of the window, without the waits


def test_operations_own_what_they_call():
    found = divided(STEP).operations
    owned = [(span.name, kind, time) for span, (kind, time) in found.items()]
    assert ("aten::addmm", PRODUCTS, 90) in owned
    assert ("aten::scaled_dot_product_attention", ATTENTION, 100) in owned
    assert ("aten::einsum", ELEMENTWISE, 10) in owned and ("aten::bmm", PRODUCTS, 30) in owned
    assert ("aten::_foreach_add_", OPTIMIZER, 100) in owned
    assert not [name for name, *_ in owned if name in ("aten::t", "gloo:all_reduce")]


# A device for a step of 1000 microseconds.
DEVICE = [
    window(0, 1000),
    host("aten::mm", 10, 20),
    launch(1, 12),
    host("aten::add", 20, 30),
    launch(2, 22),
    noted(OPTIMIZING, 500, 700),
    host("aten::_fused_adamw_", 510, 560),
    launch(3, 520),
    noted(f"{WAIT}dp_shard", 30, 40),
    host("aten::_flash_attention_backward", 50, 60, thread=BACKWARD),
    launch(4, 55, thread=BACKWARD),
    host("cudaStreamSynchronize", 800, 1000, cat="cuda_runtime"),
    kernel("ampere_bf16_s16816gemm", 100, 200, 1),
    kernel("vectorized_add", 150, 300, 2, stream=8),
    kernel("flash_bwd_kernel", 400, 500, 4),
    kernel("multi_tensor_apply", 700, 780, 3),
    kernel("ncclDevKernel_ReduceScatter", 180, 350, stream=NCCL_STREAM, group="5"),
    kernel("ncclDevKernel_AllGather", 340, 380, stream=21, group="9"),
    kernel("triton_poi_fused_mm_scaled_dot_product_flash_attention_0", 990, 1010),
]


def test_each_moment_of_a_device_belongs_to_one_kind():
    spans = read_spans(DEVICE)
    found = divide_device(spans, window_of(spans), {"5": "dp_shard"})
    assert found.by_kind == {
        PRODUCTS: 100,
        ELEMENTWISE: 100 + 10,
        ATTENTION: 100,
        OPTIMIZER: 80,
        COMMUNICATION: 50 + 30,
        HOST: 100 + 20 + 200 + 20,
        IDLE: 190,
    }
    assert sum(found.by_kind.values()) == 1000
    assert found.exposed == {"dp_shard": 50, "unknown": 30}
    assert found.hidden == {"dp_shard": 120, "unknown": 0}
    assert {span.name for span, (kind, _) in found.operations.items() if kind == PRODUCTS} == {"aten::mm"}


@pytest.mark.parametrize("seed", range(20))
def test_the_kinds_add_up_to_the_step_whatever_the_trace_has(seed):
    draw, steps = random.Random(seed), 3
    begin, end = 1e9 + draw.random(), 1e9 + 5000 + draw.random()
    names = ["aten::mm", "aten::add", "aten::t", f"{WAIT}tp", DATA, OPTIMIZING, "aten::_flash_attention", "gloo:send"]
    events = [window(begin, end)]
    for number in range(1, 300):
        at, name = draw.uniform(begin - 100, end), draw.choice(names)
        cat = "cpu_op" if "::" in name or ":" in name else "user_annotation"
        events += [host(name, at, at + draw.expovariate(1 / 200), cat=cat), launch(number, at + 0.1)]
        late = at + draw.uniform(0, 500)
        kind = draw.choice(["gemm", "nccl", "add"])
        events.append(kernel(kind, late, late + draw.expovariate(1 / 50), draw.choice([number, 0])))
    for on_gpu in (False, True):
        found = analyze(events, steps=steps, on_gpu=on_gpu, exchanges={"tp": [(begin, end)]}, axes={})
        assert math.isclose(sum(found["seconds"].values()), (end - begin) / steps / 1e6, rel_tol=1e-9)
        assert math.isclose(sum(found["exposed"].values()), found["seconds"][COMMUNICATION], abs_tol=1e-12)
        assert set(found["seconds"]) == set(KINDS) and min(found["seconds"].values()) >= 0


def test_a_trace_without_the_profiled_steps_is_refused():
    with refused("E-PROFILE-TRACE", spans=1):
        analyze([host("aten::mm", 0, 1)], steps=1, on_gpu=False, exchanges={}, axes={})


def test_kinds_of_names():
    operations = {
        "aten::mm": PRODUCTS,
        "aten::_grouped_mm": PRODUCTS,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ATTENTION,
        "ScaledDotProductFlashAttentionForCpuBackward0": HOST,
        "autograd::engine::evaluate_function: MmBackward0": HOST,
        "aten::transpose": HOST,
        "torch::autograd::AccumulateGrad": HOST,
        "c10d::allreduce_": HOST,
        "aten::silu": ELEMENTWISE,
        "plugin::norm": ELEMENTWISE,
    }
    assert {name: kind_of_operation(name) for name in operations} == operations
    kernels = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": PRODUCTS,
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>": PRODUCTS,
        "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": ATTENTION,
        "triton_tem_fused_flex_attention_0": ATTENTION,
        "triton_poi_fused_mm_silu_0": None,
        "void at::native::vectorized_elementwise_kernel<4>": None,
    }
    assert {name: kind_of_kernel(name) for name in kernels} == kernels
    assert waits_for_device("cudaStreamSynchronize") and waits_for_device("cudaMemcpy")
    assert not waits_for_device("cudaMemcpyAsync") and not waits_for_device("cudaLaunchKernel")
    assert MAIN != BACKWARD
