"""An error of a plug-in's code is not confused with one of ingot or with the loss of another rank."""

import pytest
import torch
from tests.expect import refused

from ingot.errors import ConfigError
from ingot.plugins.load import load_plugins
from ingot.trainer.blame import plugins_blamed

LAYER = """
def forward(x, raised):
    if raised:
        raise raised
    return x.nothing
"""


@pytest.fixture
def forward(lab):
    folder = lab(layer_of_mine=LAYER)
    load_plugins(["layer_of_mine"], folder)
    import layer_of_mine  # pyright: ignore[reportMissingImports]

    return layer_of_mine.forward


def test_an_error_inside_a_plugin_names_it_with_file_and_line(forward):
    with refused("E-PLUGIN-RAISED", plugin="layer_of_mine", line=5) as caught, plugins_blamed():
        forward(torch.ones(1), None)
    assert caught.value.facts["file"].endswith("layer_of_mine.py") and "AttributeError" in caught.value.found


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo] connection closed by peer"), ConfigError("E-X", "x"), torch.OutOfMemoryError("full")]
)
def test_lost_ranks_full_memory_and_errors_with_a_code_stay_what_they_are(forward, error):
    with pytest.raises(type(error)) as caught, plugins_blamed():
        forward(torch.ones(1), error)
    assert caught.value is error


def test_an_error_of_ingot_is_not_blamed_on_a_plugin(forward):
    with pytest.raises(ZeroDivisionError), plugins_blamed():
        1 / 0  # noqa: B018
