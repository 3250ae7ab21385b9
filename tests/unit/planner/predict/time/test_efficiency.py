"""Rates by shape: bounds that hold whatever the constants are, and orders that everyone measures."""

from dataclasses import fields, replace

import pytest

from ingot.planner.predict.time.constants import PRIOR, Constants, fitted
from ingot.planner.predict.time.efficiency import (
    Product,
    attention_seconds,
    cast_seconds,
    clock_share,
    product_seconds,
    rates_of,
    sustained_share,
    tile_share,
)
from ingot.planner.request.clusters import load_cluster
from ingot.schema.software import INGOT

H100, A100 = load_cluster("8xh100"), load_cluster("8xa100")
BF16 = rates_of(H100, INGOT, "bf16", PRIOR)
FP8 = rates_of(H100, replace(INGOT, recipe="tensorwise", kernels="tuned"), "bf16", PRIOR)


def share(product: Product, rates=BF16, peak=989e12) -> float:
    return product.flops / product_seconds(rates, product) / peak


def test_large_products_reach_most_of_what_was_ever_measured_and_never_more():
    large = share(Product("x", 16384, 16384, 16384))
    assert 0.8 * H100.matmul_efficiency < large < H100.matmul_efficiency


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (Product("", 8192, 8192, 128), Product("", 8192, 8192, 4096)),  # a short k
        (Product("", 128, 8192, 8192), Product("", 4096, 8192, 8192)),  # weights are read for few rows
        (Product("", 4097, 4097, 4096), Product("", 4096, 4096, 4096)),  # a last tile that is nearly empty
        (Product("", 64, 1536, 2048, 64), Product("", 4096, 1536, 2048, 64)),  # few rows for each expert
    ],
)
def test_shapes_that_waste_are_slower_per_operation(worse, better):
    assert share(worse) < 0.97 * share(better)


def test_products_of_one_wave_and_a_little_take_two():
    one, more = Product("", 132 * 128, 256, 4096), Product("", 132 * 128 + 128, 256, 4096)
    assert tile_share(one, 132) == pytest.approx(1.0)
    assert tile_share(more, 132) < 0.9


def test_low_precision_gains_less_than_two_and_more_with_width():
    gains = []
    for width in (1024, 4096, 16384):
        product = Product("", 8192, width, width)
        gains.append(product_seconds(BF16, product) / (product_seconds(FP8, product) + cast_seconds(FP8, product)))
    assert gains == sorted(gains) and gains[-1] < 2.0
    head = replace(Product("", 8192, 4096, 4096), low=False)
    assert product_seconds(FP8, head) == product_seconds(BF16, head) and cast_seconds(FP8, head) == 0.0


def test_scales_by_rows_cost_more_than_one_scale():
    product, times = Product("", 8192, 8192, 8192), {}
    for recipe in ("tensorwise", "blockwise", "rowwise"):
        rates = rates_of(H100, replace(INGOT, recipe=recipe), "bf16", PRIOR)
        times[recipe] = product_seconds(rates, product) + cast_seconds(rates, product)
    assert times["tensorwise"] < times["blockwise"] < times["rowwise"]


def test_a_lower_power_limit_lowers_the_clock_by_its_cube_root():
    limited = load_cluster("8xh100-96")
    assert clock_share(H100) == 1.0
    assert clock_share(limited) == pytest.approx((500 / 700) ** (1 / 3))
    assert sustained_share(A100, 0.1) == 1.0 and sustained_share(H100, 0.1) == 0.9


def test_attention_is_slower_backward_for_short_sequences_narrow_heads_and_with_biases():
    base = attention_seconds(BF16, 1e12, 8192, 128)
    assert attention_seconds(BF16, 1e12, 8192, 128, backward=True) > base
    assert attention_seconds(BF16, 1e12, 512, 128) > base
    assert attention_seconds(BF16, 1e12, 8192, 64) > base
    biased = rates_of(H100, replace(INGOT, biased_scores=True), "bf16", PRIOR)
    assert attention_seconds(biased, 1e12, 8192, 128) > base


def test_constants_are_few_within_bounds_and_of_no_family():
    assert len(fields(Constants)) <= 16
    for constants in (PRIOR, fitted()):
        for f in fields(Constants):
            assert f.metadata["low"] <= getattr(constants, f.name) <= f.metadata["high"], f.name
