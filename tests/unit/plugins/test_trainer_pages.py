"""The pages about plug-ins of the trainer: their contracts and code are those of the source, and they run."""

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.expect import refused
from tests.unit.data.conftest import english

from ingot import ranges
from ingot.cli.main import main
from ingot.errors import describe
from ingot.events import read_events
from ingot.plugins.callback import CallbackPart, CallbackRun, StepCallback
from ingot.plugins.family import FamilyPart
from ingot.plugins.layers import AttentionPart, BlockPart, FeedForwardPart, NormPart
from ingot.plugins.loss import LossTermPart, TermWeight, VocabularyPart
from ingot.plugins.optimizer import MatrixRule, OptimizerPart, UpdateRule
from ingot.plugins.piece import ParameterShard
from ingot.plugins.registry import Part, options_of, options_problems
from ingot.plugins.schedule import SchedulePart
from ingot.plugins.sink import Sink, SinkLimits, SinkPart, SinkPlace
from ingot.quickstart.run import VOCAB_SIZE
from ingot.schema.run import Optim
from ingot.theory.rules import load_run
from ingot.trainer.model.attention import Attention
from ingot.trainer.model.transformer import TransformerBlock
from ingot.trainer.optim.build import optimizer_rules
from ingot.trainer.optim.optimizer import Optimizer
from ingot.value_names import type_name

from .test_registry import RUN

ROOT = Path(__file__).parents[3]
PAGES, EXAMPLES = ROOT / "docs" / "extend", ROOT / "examples" / "extend"
CONTRACTS = {
    "optimizer": [UpdateRule, MatrixRule, OptimizerPart],
    "schedule": [SchedulePart],
    "callback": [StepCallback, CallbackPart, CallbackRun, ParameterShard],
    "sink": [Sink, SinkPart, SinkPlace, SinkLimits],
    "feed_forward": [FeedForwardPart],
    "norm": [NormPart],
    "attention": [AttentionPart, Attention],
    "block": [BlockPart, TransformerBlock],
    "loss": [LossTermPart, VocabularyPart, TermWeight],
    "family": [FamilyPart],
}
SHOWN = {
    "optimizer": ["muon"],
    "schedule": ["inverse_sqrt"],
    "callback": ["loss_metric", "noise_scale"],
    "sink": ["csv_sink"],
    "feed_forward": ["squared_relu"],
    "norm": ["layer_norm"],
    "attention": ["gated_attention"],
    "block": ["parallel_block"],
    "loss": ["z_loss"],
    "family": ["parallel_family"],
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", CONTRACTS)
def test_a_page_shows_the_contract_and_whole_examples(page):
    code, contracts = blocks(page, "python"), CONTRACTS[page]
    assert code[: len(contracts)] == [inspect.getsource(one) for one in contracts]
    examples = [(EXAMPLES / f"{name}.py").read_text() for name in SHOWN[page]]
    assert [one for one in code if one in examples] == examples


def run_file(page: str) -> str:
    """Return a run file with the settings of a page; those of its section [model] join that section."""
    (text,) = blocks(page, "toml")
    before, found, model = text.partition("[model]\n")
    return RUN.replace("steps = 10", "steps = 1000").replace("[model]\n", found + model or "[model]\n") + before


@pytest.mark.parametrize("page", CONTRACTS)
def test_the_settings_of_a_page_are_those_of_a_run(process, tmp_path, page):
    modules = [*SHOWN[page], *(["parallel_block"] if page == "family" else [])]
    for name in modules:
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    (tmp_path / "run.toml").write_text(run_file(page))
    assert load_run(tmp_path / "run.toml").plugins.code.keys() == set(modules)


@pytest.mark.parametrize("page", CONTRACTS)
def test_a_page_names_errors_that_exist(page):
    mentioned = set(re.findall(r"`(E-[A-Z-]+)`", (PAGES / f"{page}.md").read_text()))
    assert mentioned and [code for code in mentioned if describe(code) is None] == []


def test_the_small_optimizer_of_the_page_is_sgd(process):
    (code,) = [one for one in blocks("optimizer", "python") if "class Sgd" in one]
    exec(code, {})
    optim = Optim(kind="sgd", beta1=0.8, weight_decay=0.1)
    start, gradients = torch.randn(5, 3), [torch.randn(5, 3) for _ in range(3)]
    piece = ParameterShard("w", (5, 3), (0, 0), (5, 3), start.clone(), True)
    ours = Optimizer([piece], optimizer_rules(optim))
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.SGD([parameter], lr=0.1, momentum=0.8, weight_decay=0.1)
    for gradient in gradients:
        piece.grad, parameter.grad = gradient.clone(), gradient.clone()
        ours.step(0.1)
        theirs.step()
    torch.testing.assert_close(piece.value, parameter.data)


def test_the_settings_of_the_overview_are_checked(process):
    (code,) = blocks("../extend", "python")
    names = {}
    exec(code, names)
    part = Part(name="x", settings=names["Options"])
    assert list(options_problems(part, {}, "x")) == []
    problems = dict(options_problems(part, {"timescale": 11, "momentum": 2.0, "temperature": 0.0}, "x"))
    assert problems.keys() == {"x.timescale", "x.momentum", "x.temperature"}
    assert names["Options"](momentum=7).momentum == 7
    with refused("E-CONFIG-SETTINGS", keys=["momentum"]):
        options_of(part, {"momentum": 7})


def test_the_ranges_of_the_overview_are_those_of_the_source():
    text = (ROOT / "docs" / "extend.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (a .*number .*) \|$", text, re.MULTILINE)
    hints = {name: getattr(ranges, name) for name, _ in rows}
    assert {"Share", "Factor", "Positive", "PositiveCount", "Steps", "PositiveSteps"} <= hints.keys()
    assert dict(rows) == {name: f"{type_name(hint)} {get_args(hint)[1]}" for name, hint in hints.items()}


def test_the_small_run_of_the_overview_is_a_run(tmp_path):
    (tmp_path / "try.toml").write_text(blocks("../extend", "toml")[-1])
    run = load_run(tmp_path / "try.toml")
    assert (run.model.vocab_size, run.data.tokens) == (VOCAB_SIZE, "quickstart/data/tokens/train")


@pytest.mark.slow
def test_the_small_run_of_the_overview_trains(tmp_path, monkeypatch, capsys):
    """Trains on tokens of another text, with a smaller vocabulary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.toml").write_text(blocks("../extend", "toml")[-1])
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": english(n)}) + "\n" for n in range(40)))
    data = ["text.jsonl", "--out", "quickstart/data", "--vocab-size", "300", "--runner", "inline"]
    assert main(["data", "build", *data, "--set", "dedup.enabled=false"]) == 0
    assert main(["train", "try.toml", "--out", "runs/try", "--set", "model.vocab_size=300"]) == 0
    assert {event["rank"] for event in read_events(tmp_path / "runs/try/events.jsonl", "rank_started")} == {0, 1}
