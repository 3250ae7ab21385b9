"""The layers and loss terms that a run file chooses: what is refused before a run, and with which line."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import named, refused

from ingot.schema.changes import ChangeClass
from ingot.schema.run import setting_changes
from ingot.theory.rules import load_run

from .test_registry import RUN as GROUPED

EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
RUN = GROUPED.replace("num_kv_heads = 1", "num_kv_heads = 2")
OWN = """
from dataclasses import dataclass
from ingot.plugins.layers import ATTENTIONS, FEED_FORWARDS, AttentionPart, FeedForwardPart
from ingot.plugins.loss import LOSS_TERMS, LossTermPart
from ingot.ranges import Positive

@dataclass(frozen=True, kw_only=True)
class Options:
    power: Positive = 2.0

FEED_FORWARDS.register(
    FeedForwardPart(name="power", make="none:none", settings=Options, sharding={}, matrices=2, saved=2)
)
ATTENTIONS.register(AttentionPart(name="other", make="none:none"))
LOSS_TERMS.register(LossTermPart(name="term", term="none:none", settings=Options))
"""
EXPERTS = "[model.moe]\nnum_experts = 4\nd_expert = 8\n"
LATENT = "[model.mla]\nkv_rank = 8\nnope_dim = 4\nrope_dim = 4\nv_dim = 4\n"


@pytest.fixture
def load(lab):
    """`load(model, text)` reads a run file with `model` in its section [model] and `text` after its sections."""
    folder = lab(own=OWN, parallel_block=(EXAMPLES / "parallel_block.py").read_text())

    def read(model: str = "", text: str = ""):
        plugins = '[plugins]\nmodules = ["own", "parallel_block"]\n'
        (folder / "run.toml").write_text(RUN.replace("[data]", f"{model}[data]") + text + plugins)
        return load_run(folder / "run.toml")

    return read


POWER = 'feed_forward = "power"\n'


def test_settings_of_layers_and_terms_are_read(load):
    run = load(POWER + "[model.options.power]\npower = 3.0\n", "[loss.term]\nweight = 0.5\npower = 1.0\n")
    assert run.model.options == {"power": {"power": 3.0}} and run.loss == {"term": {"weight": 0.5, "power": 1.0}}


@pytest.mark.parametrize(
    ("model", "text", "key", "line", "words"),
    [
        ('feed_forward = "powr"\n', "", "model.feed_forward", "feed_forward", ("'power'",)),
        ('norm = "rsm"\n', "", "model.norm", "norm", ("'rms'",)),
        ('attention = "othr"\n', "", "model.attention", "attention", ("'other'",)),
        ('block = "paralel"\n', "", "model.block", "block", ("'parallel'",)),
        (POWER + "[model.options.power]\npowr = 3.0\n", "", "model.options.power.powr", "powr",
         ("'model.options.power.power'",)),
        (POWER + "[model.options.power]\npower = 0.0\n", "", "model.options.power.power", "power =", (0.0,)),
        ("[model.options.power]\npower = 3.0\n", "", "model.options.power", "[model.options.power]", ("'power'",)),
        ("[model.options.swiglu]\nx = 3.0\n", "", "model.options.swiglu.x", "x", ("'swiglu'",)),
        (POWER + EXPERTS, "", "model.feed_forward", "feed_forward", ("'power'", '"swiglu"')),
        ('attention = "other"\n' + LATENT, "", "model.attention", "attention", ('"grouped_query"', "model.mla")),
        ("", "[loss.trem]\nweight = 1.0\n", "loss.trem", "[loss.trem]", ("'term'",)),
        ("", "[loss.term]\nweight = 1.0\npowr = 3.0\n", "loss.term.powr", "powr", ("'loss.term.power'",)),
        ("", "[loss.term]\nweight = -1.0\n", "loss.term.weight", "weight", ("-1",)),
    ],
)  # fmt: skip
def test_a_wrong_choice_or_setting_is_reported_with_its_line(load, model, text, key, line, words):
    with refused("E-CONFIG-SETTINGS", keys=[key]) as caught:
        load(model, text)
    lines = RUN.replace("[data]", f"{model}[data]").splitlines() + text.splitlines()
    number = next(n for n, found in enumerate(lines, 1) if found.startswith(line))
    (problem,) = caught.value.facts["problems"]
    assert f"run.toml:{number}: " in problem and named([problem], *words)


def test_a_loss_term_needs_its_weight(load):
    with refused("E-CONFIG-SETTINGS", keys=["loss.term.weight"]):
        load("", "[loss.term]\npower = 1.0\n")


def test_a_layer_of_an_existing_run_is_refused_and_a_loss_term_needs_consent(load):
    run = load("", "[loss.term]\nweight = 0.5\n")
    before = run.settings()
    for model in (
        {"block": "parallel"},
        {"feed_forward": "power"},
        {"norm": "layer"},
        {"attention": "other"},
        {"options": {"power": {"power": 3.0}}},
    ):
        (change,) = setting_changes(before, replace(run, model=replace(run.model, **model)).settings())
        assert (change.key, change.kind) == (f"model.{next(iter(model))}", ChangeClass.REFUSED)
    for loss in ({}, {"term": {"weight": 0.25}}, {"term": {"weight": 0.5, "power": 1.0}}):
        (change,) = setting_changes(before, replace(run, loss=loss).settings())
        assert (change.key, change.kind) == ("loss", ChangeClass.OTHER_NUMBERS)
