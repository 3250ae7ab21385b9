"""FLOPs and bytes of operations by their shapes, and their bounds by a roofline."""

import pytest
from tests.unit.rehearse.profile.traces import host

from ingot.rehearse.profile.kinds import ELEMENTWISE, PRODUCTS
from ingot.rehearse.profile.operations import (
    MeasuredOperation,
    Roofline,
    bytes_of,
    flops_of,
    least_seconds,
    measured_operations,
    shapes_of,
)
from ingot.rehearse.profile.trace import read_spans

BF16, F32, INT = "c10::BFloat16", "float", "long int"


def call(name: str, *sizes, kind=BF16, flags=()):
    """Return the span of a call with tensors of these sizes, and then arguments that are no tensors."""
    more = len(flags)
    (span,) = read_spans(
        [
            host(
                name,
                0,
                10,
                Input_Dims=[*sizes, *[[]] * more],
                Input_type=[kind] * len(sizes) + ["Scalar"] * more,
                Concrete_Inputs=[""] * len(sizes) + list(flags),
            )
        ]
    )
    return span


Q, K = [2, 8, 64, 16], [2, 4, 64, 16]
ATTEND = "aten::_scaled_dot_product_flash_attention_for_cpu"
WHOLE = 4 * 2 * 8 * 64 * 64 * 16  # FLOPs of all pairs


@pytest.mark.parametrize(
    ("span", "flops"),
    [
        (call("aten::mm", [3, 4], [4, 5]), 2 * 3 * 4 * 5),
        (call("aten::addmm", [5], [3, 4], [4, 5]), 2 * 3 * 4 * 5),
        (call("aten::bmm", [7, 3, 4], [7, 4, 5]), 2 * 7 * 3 * 4 * 5),
        (call("aten::baddbmm", [7, 3, 5], [7, 3, 4], [7, 4, 5]), 2 * 7 * 3 * 4 * 5),
        (call("aten::_grouped_mm", [30, 4], [6, 4, 5]), 2 * 30 * 4 * 5),  # rows in groups
        (call("aten::_grouped_mm", [4, 30], [30, 5]), 2 * 4 * 30 * 5),  # a sum over rows in groups
        (call("aten::_grouped_mm", [6, 3, 4], [4, 30]), 2 * 3 * 4 * 30),  # columns in groups
        (call(ATTEND, Q, K, K, flags=("0.", "False")), WHOLE),
        (call(ATTEND, Q, K, K, flags=("0.", "True")), WHOLE / 2),
        (call(f"{ATTEND}_backward", Q, Q, K, K, Q, flags=("0.", "True")), 2.5 * WHOLE / 2),
        (call("aten::_scaled_dot_product_efficient_attention", Q, K, K, flags=("True", "0.", "False")), WHOLE),
        (call("aten::_flash_attention_forward", [64, 8, 16], [64, 4, 16], [64, 4, 16]), None),  # lengths are not known
        (call("aten::mul", [3, 4], [3, 4]), None),
        (call("aten::mm"), None),
    ],
)
def test_flops_by_shapes(span, flops):
    assert flops_of(span) == flops


def test_bytes_are_those_of_arguments_and_a_result():
    assert bytes_of(call("aten::mm", [3, 4], [4, 5])) == 2 * (12 + 20 + 15)
    assert bytes_of(call("aten::add", [3, 4], [1], kind=F32)) == 4 * (12 + 1 + 12)
    assert bytes_of(call("aten::embedding", [100, 8], [5], kind=F32)) == 4 * (800 + 5 + 800)
    assert bytes_of(call("aten::foreach")) is None
    assert shapes_of(call("aten::mm", [3, 4], [4, 5])) == "3x4 4x5 bf16"


def test_calls_with_the_same_shapes_are_one_operation():
    product, other, sum_ = (call("aten::mm", [3, 4], [4, n]) for n in (5, 6, 5))
    found = measured_operations({product: (PRODUCTS, 8.0), other: (PRODUCTS, 40.0), sum_: (PRODUCTS, 2.0)}, steps=2)
    assert [(one.shapes, one.count, one.seconds) for one in found] == [
        ("3x4 4x6 bf16", 0.5, pytest.approx(20e-6)),
        ("3x4 4x5 bf16", 1.0, pytest.approx(5e-6)),
    ]


def test_a_bound_is_that_of_the_slower_rate():
    roofline = Roofline(peak=100.0, bandwidth=10.0)
    product = MeasuredOperation(PRODUCTS, "aten::mm", "", count=2, seconds=9.0, flops=300.0, bytes=20.0)
    moved = MeasuredOperation(ELEMENTWISE, "aten::add", "", count=1, seconds=5.0, flops=None, bytes=20.0)
    fast = MeasuredOperation(ELEMENTWISE, "aten::mul", "", count=1, seconds=1.0, flops=None, bytes=20.0)
    open_ = MeasuredOperation(ELEMENTWISE, "own", "", count=1, seconds=0.5, flops=None, bytes=None)
    assert roofline.bound(product) == 6.0 and roofline.bound(moved) == 2.0 and roofline.bound(open_) is None
    assert Roofline(0.0, 10.0).bound(product) is None
    assert least_seconds([product, moved, fast, open_], roofline) == 6.0 + 2.0 + 1.0 + 0.5
