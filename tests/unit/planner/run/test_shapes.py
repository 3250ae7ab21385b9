"""Shapes from a number of parameters."""

import pytest

from ingot.errors import ConfigError
from ingot.planner.run.shapes import shape_of
from ingot.schema.layout_rules import legal_tp
from ingot.theory.params import count_parameters


@pytest.mark.parametrize("parameters", [125e6, 350e6, 1e9, 3e9, 7e9, 13e9, 32e9, 70e9, 128e9, 405e9, 1e12])
def test_a_shape_has_about_as_many_parameters(parameters):
    arch = shape_of(parameters)
    assert count_parameters(arch) == pytest.approx(parameters, rel=0.05)
    assert not list(arch.problems())
    assert arch.d_model == arch.num_heads * arch.head_dim


@pytest.mark.parametrize("parameters", [7e9, 13e9, 70e9, 405e9])
def test_large_shapes_can_be_cut_over_a_node(parameters):
    assert 8 in legal_tp(shape_of(parameters))


def test_seven_billion_is_near_the_models_of_that_name():
    arch = shape_of(8e9)
    assert (arch.d_model, arch.num_kv_heads, arch.d_ffn) == (4096, 8, 14336)
    assert 30 <= arch.num_layers <= 34


@pytest.mark.parametrize("parameters", [0, -1, 1000, 1e20, float("nan"), float("inf")])
def test_numbers_that_no_model_has(parameters):
    with pytest.raises(ConfigError, match="parameters"):
        shape_of(parameters)
