"""Mixture policies of plug-ins, through `ingot data mix`, and what happens when their code is wrong."""

import pytest
from tests.expect import refused
from tests.unit.plugins.data_plugins import plugins  # noqa: F401

from ingot.data.mixture.shares import named_weights, preset_weights

POLICY = """
@dataclass(frozen=True, kw_only=True)
class Rules:
    power: float = 0.5
def weights(available, rules):
    {}
    return {{source: tokens**rules.power for source, tokens in available.items()}}, ["a note"]
MIXTURES.register(MixturePolicy(name="flat", weights=weights, settings=Rules))
"""


def tables_of(plugins, text="", body="pass"):  # noqa: F811
    plugins.write("policies", POLICY.format(body))
    return plugins.recipe(text, "policies").mixture


def test_a_policy_gets_sizes_and_settings(plugins):  # noqa: F811
    tables = tables_of(plugins)
    assert preset_weights("flat", {"web": 100, "law": 4}, tables) == ({"web": 10.0, "law": 2.0}, ("a note",))
    tables = tables_of(plugins, "[mixture.flat]\npower = 0")
    assert named_weights("flat", {"web": 100, "law": 4}, tables) == ("flat", {"web": 1.0, "law": 1.0}, ("a note",))


@pytest.mark.parametrize("result", ["None", "{}", "({'web': 'x'}, [])", "({'web': True}, [])", "({1: 1.0}, [])",
                                    "({'web': 1.0}, [1])", "({'web': 1.0}, 'note')"])  # fmt: skip
def test_a_wrong_result_is_refused(plugins, result):  # noqa: F811
    tables = tables_of(plugins, body=f"return {result}")
    with refused("E-DATA-PLUGIN-RESULT", part="mixture 'flat' of plug-in policies"):
        preset_weights("flat", {"web": 1}, tables)


def test_a_policy_that_raises_is_named_with_its_line(plugins):  # noqa: F811
    tables = tables_of(plugins, body="1 / 0")
    with refused("E-DATA-PLUGIN-CREATE", kind="mixture", name="flat") as caught:
        preset_weights("flat", {"web": 1}, tables)
    assert "ZeroDivisionError: division by zero (policies.py:" in caught.value.found
