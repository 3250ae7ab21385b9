"""`from ingot import plan`: one call from a size, a cluster and a budget to ranked plans, in objects, text and HTML."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.expect import refused

from ingot import plan
from ingot.errors import UsageError
from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.request.answer import PlanResult
from ingot.planner.request.clusters import load_cluster
from ingot.schema.cluster import Cluster
from ingot.theory.layout import layout_problems
from ingot.theory.params import count_parameters
from ingot.theory.rules import load_run

# Pins of which one layout or a few are left, so that a search is instant.
PINNED: dict[str, object] = {
    "tp": 8,
    "pp": 4,
    "schedule": "1f1b",
    "cp": 1,
    "micro_batch": 1,
    "recompute": "full",
    "zero": 1,
}
SMALL: dict[str, Any] = {"tokens": "2B", "cluster": "8xh100"}


@pytest.fixture(scope="module")
def small() -> PlanResult:
    return plan("smollm2-135m", **SMALL)


@pytest.fixture(scope="module")
def usual() -> PlanResult:
    return plan(params="70b", tokens="1.5T", cluster="128x8xh100", price=4, mfu=0.45, pinned=PINNED)


def test_70b_on_1024_h100_takes_16_days_and_157_million(usual):
    best = usual.best.plan
    assert best.flops_per_token * best.steps * best.tokens_per_step == pytest.approx(6.3e23, rel=1e-4)
    assert best.total_seconds / 86400 == pytest.approx(16.0, abs=0.05)
    assert best.usd == pytest.approx(1.57e6, rel=0.005)
    assert best.mfu == pytest.approx(0.45)
    assert best.outlook and best.outlook.days > best.outlook.productive_days


def test_the_texts_discount_twice(usual):
    text = " ".join(str(usual).split())
    assert "say 40 days and $3.89M" in text and "400 of 989 TFLOP/s are an MFU of 40.4%" in text
    assert "180 would be one of 18.2%" in text and "16.0 days and $1.57M" in text
    assert "6 x 70,000,000,000 x tokens" in text
    assert usual.facts()["texts"] in text and "40 days and $3.89M" in usual._repr_html_()
    assert usual.facts()["layouts"][0]["productive_days"] == pytest.approx(16.0, abs=0.05)


def test_a_long_sequence_is_more_work_than_6nd():
    def text(seq):
        return " ".join(str(plan(params="8b", tokens="1B", cluster="8x8xh100", seq=seq, top=1)).split())

    assert "times 6ND" not in text(4096) and "times 6ND" in text(131_072)


def test_without_an_mfu_it_predicts_its_own():
    found = plan(params="70b", tokens="1.5T", cluster="128x8xh100", pinned=PINNED).best.plan
    assert found.mfu and 0.25 < found.mfu < 0.6
    assert found.step_seconds == pytest.approx(sum(found.time_seconds.values()))


def test_every_plan_is_one_that_the_trainer_takes_and_that_fits(small):
    assert small.fits and len(small.plans) == 5 and small.search_result
    for planned in small.plans:
        assert not list(layout_problems(planned.run))
        there = rank_memory_bytes(planned.plan.cluster, planned.run.parallel.world_size)
        assert planned.plan.total_memory_bytes <= there
        assert planned.run.parallel.world_size == 8
    times = [planned.plan.step_seconds for planned in small.plans]
    assert times[-1] >= 0.99 * times[0]  # layouts that hardly differ are ordered by their simplicity


def test_a_number_of_tokens_is_what_it_trains_on(small):
    run = small.best.run
    assert run.train.steps * run.tokens_per_step == pytest.approx(2e9, rel=1e-3)


def test_pins_hold_and_say_so():
    best = plan("smollm2-135m", **SMALL, pinned={"pp": 2, "micro_batch": 4}).best
    assert (best.run.parallel.pp, best.run.train.micro_batch) == (2, 4)
    assert best.reasons["parallel.pp"] == best.reasons["train.micro_batch"] == "as asked for"


@pytest.mark.parametrize(
    ("pins", "code", "facts"),
    [
        ({"tp": 3}, "E-PIN-DEVICES", {"product": 3, "devices": 8}),
        ({"tp": 4, "pp": 4}, "E-PIN-DEVICES", {"product": 16, "devices": 8}),
        ({"micro_batch": 3}, "E-PIN-BATCH", {"micro_batch": 3}),
        ({"schedule": "zbv", "pp": 2}, "E-PIN-VALUE", {"pins": ["schedule=zbv", "pp=2"]}),
        ({"micro_batch": "abc"}, "E-PIN-VALUE", {"pins": ["micro_batch=abc"]}),
        ({"micro_batch": True}, "E-PIN-VALUE", {"pins": ["micro_batch=True"]}),
        ({"tp": True}, "E-PIN-VALUE", {"pins": ["tp=True"]}),
        ({"zero": 5}, "E-PIN-VALUE", {"pins": ["zero=5"]}),
        ({"recompute": "some"}, "E-PIN-VALUE", {"pins": ["recompute=some"]}),
        ({"tp": 2}, "E-PIN-LAYOUT", {}),  # 9 heads
    ],
)
def test_pins_that_allow_no_layout_are_refused(pins, code, facts):
    with refused(code, **facts) as caught:
        plan("smollm2-135m", **SMALL, pinned=pins)
    assert caught.value.fix


def test_an_unknown_pin_is_refused():
    with refused("E-PIN-UNKNOWN", pin="tq") as caught:
        plan("smollm2-135m", **SMALL, pinned={"tq": 2})
    assert caught.value.fix


def test_budgets_are_spent_and_not_exceeded():
    flops = plan("smollm2-135m", budget="1e18flop", cluster="h100").best
    assert flops.plan.flops_per_token * flops.run.train.steps * flops.run.tokens_per_step == pytest.approx(
        1e18, rel=0.01
    )
    day = plan("smollm2-135m", budget="24h", cluster="h100").best.plan
    assert day.outlook and 0.99 < day.outlook.days <= 1.0
    money = plan("smollm2-135m", budget="$500", cluster="h100", price=2).best.plan
    assert money.outlook and 495 < sum(money.outlook.usd_by_kind.values()) <= 500
    hours = plan("smollm2-135m", budget="96 gpu-hours", cluster="2xh100").best.plan
    assert hours.outlook and 95 < hours.outlook.device_hours <= 96


@pytest.mark.parametrize(
    ("budget", "cluster"), [("24h", "h100"), ("$500", "8xh100"), ("1e19flop", "h100"), ("96 gpu-hours", "2xh100")]
)
def test_tokens_that_a_budget_buys_cost_just_that(budget, cluster):
    bought = plan("smollm2-135m", budget=budget, cluster=cluster).best
    back = plan("smollm2-135m", tokens=bought.run.train.steps * bought.run.tokens_per_step, cluster=cluster).best
    assert replace(back.run, name="") == replace(bought.run, name="")
    assert back.plan.outlook == bought.plan.outlook and back.plan.usd == bought.plan.usd


def test_a_plan_counts_the_checkpoints_of_its_run_file(small, tmp_path):
    small.write(tmp_path / "run.toml")
    again, outlook = plan(run=tmp_path / "run.toml", cluster="8xh100").best.plan, small.best.plan.outlook
    assert again.outlook and outlook
    assert again.outlook.days == pytest.approx(outlook.days, rel=1e-4)
    every = small.best.run.checkpoint.every_steps * small.best.plan.step_seconds
    assert outlook.checkpoint_every_seconds == pytest.approx(every, rel=0.01)


def test_a_budget_alone_chooses_the_compute_optimal_size():
    best = plan(budget="24h", cluster="h100").best
    run = best.run
    tokens = run.train.steps * run.tokens_per_step
    assert tokens / count_parameters(run.model) == pytest.approx(20, rel=0.15)
    larger = plan(budget="96h", cluster="h100").best.run.model
    assert count_parameters(larger) == pytest.approx(2 * count_parameters(run.model), rel=0.2)


@pytest.mark.parametrize(
    ("asked", "code", "facts"),
    [
        ({"tokens": "1B", "budget": "24h"}, "E-BUDGET-TOKENS", {"tokens": "1B"}),
        ({}, "E-PLAN-AMOUNT", {}),
        ({"budget": "1e9flop"}, "E-BUDGET-SMALL", {}),
        ({"budget": "1h", "steps": 10}, "E-BUDGET-STEPS", {"steps": 10}),
        ({"tokens": "1TB"}, "E-COUNT-BYTES", {"option": "--tokens"}),
        ({"tokens": "1B", "seq": -1}, "E-OPTION-RANGE", {"option": "--seq", "value": -1}),
        ({"tokens": "1B", "lr": float("nan")}, "E-OPTION-RANGE", {"option": "--lr"}),
        ({"tokens": "1B", "run": "run.toml"}, "E-PLAN-FILE", {"path": "run.toml"}),
        ({"tokens": "1B", "mfu": 45}, "E-OPTION-RANGE", {"option": "--mfu"}),
        ({"tokens": "1B", "price": -1}, "E-OPTION-RANGE", {"option": "--price"}),
        ({"tokens": "1B", "failures": "200%"}, "E-OPTION-RANGE", {"option": "--failures"}),
        ({"tokens": "1B", "batch": "1k"}, "E-BATCH-SHORT", {"tokens": 1000}),
        ({"tokens": "1B", "assumptions": ["link_bandwith=1GB/s"]}, "E-ASSUME-UNKNOWN", {"given": "link_bandwith"}),
        ({"tokens": "1B", "assumptions": ["memory_bytes=80Gb"]}, "E-SIZE-BITS", {"key": "memory_bytes"}),
        ({"tokens": "1B", "assumptions": ["memory_bytes"]}, "E-OPTION-PAIR", {"setting": "memory_bytes"}),
        ({"tokens": "1B", "software": ["kernel=eager"]}, "E-SOFTWARE-UNKNOWN", {"given": "kernel"}),
    ],
)
def test_impossible_requests_are_refused_with_a_rule_and_a_fix(asked: dict[str, Any], code, facts):
    with refused(code, **facts) as caught:
        plan("smollm2-135m", cluster="8xh100", **asked)
    assert isinstance(caught.value, UsageError) and caught.value.rule and caught.value.fix


def test_a_budget_for_no_model_says_which_size_it_would_be():
    with refused("E-BUDGET-SIZE") as caught:
        plan(budget="1s", cluster="h100")
    assert 1000 < caught.value.facts["parameters"] < 10**6


def test_money_needs_a_price_and_time_a_rate():
    unpriced = replace(load_cluster("8xh100"), usd_per_hour=0.0)
    with refused("E-BUDGET-PRICE", cluster="8xh100"):
        plan("smollm2-135m", budget="$100", cluster=unpriced)
    unknown = Cluster(name="box", device="cuda", memory_bytes=80 << 30)
    with refused("E-BUDGET-RATE", cluster="box"):
        plan("smollm2-135m", budget="1h", cluster=unknown)


def test_facts_are_changed_in_units_that_are_written():
    bits = plan("smollm2-135m", tokens="1B", cluster="2x8xh100", assumptions=["network_bandwidth=400Gb/s"])
    assert bits.best.plan.cluster.network_bandwidth == 50e9
    given = plan(
        "smollm2-135m", **SMALL, assumptions=["restart_seconds=1h", "memory_bytes=40GiB"], failures="1%"
    ).best.plan
    assert given.cluster.memory_bytes == 40 << 30
    assert given.outlook and (given.outlook.restart_seconds, given.outlook.failures_per_node_day) == (3600, 0.01)


def test_where_nothing_fits_the_cheapest_change_is_told():
    found = plan("smollm2-360m", tokens="1B", cluster="h100", batch=8, assumptions=["memory_bytes=3GiB"])
    assert not found.fits and len(found.plans) == 1
    assert found.fix and found.fix in " ".join(str(found).split())


def test_a_plan_becomes_a_run_file_once(small, tmp_path):
    small.write(tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml") == small.best.run
    assert (tmp_path / "plan.json").exists() and "the fastest of" in (tmp_path / "run.toml").read_text()
    with refused("E-FILE-EXISTS", path=str(tmp_path / "run.toml")):
        small.write(tmp_path / "run.toml")


@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "1024x8xh100"), ("smollm2-135m", "8xh100")])
def test_a_proposal_saves_so_that_it_does_not_warn_of_itself(model, cluster):
    best = plan(model, tokens="100B", cluster=cluster, pinned={"zero": 3, "micro_batch": 1, "tp": 1, "pp": 1}).best
    assert not any("checkpoint.every_steps" in warning for warning in best.plan.warnings)
    every = best.run.checkpoint.every_steps * best.plan.step_seconds
    assert best.plan.outlook
    assert best.plan.outlook.checkpoint_every_seconds == pytest.approx(every, abs=best.plan.step_seconds)


def test_a_run_file_is_planned_with_its_own_checkpoints(small, tmp_path):
    small.write(tmp_path / "run.toml")
    settings = {"run": tmp_path / "run.toml", "cluster": "8xh100", "failures": "50%"}
    often, rare = (
        plan(**settings, overrides=[f"checkpoint.every_steps={n}", "checkpoint.mode=sync"]).best.plan
        for n in (50, 10**6)
    )
    assert often.outlook and rare.outlook
    assert often.outlook.checkpoint_every_seconds == pytest.approx(50 * often.step_seconds)
    assert often.outlook.goodput < rare.outlook.goodput  # which is short, and saves at its end
    assert "checkpoint.every_steps = " in " ".join(often.warnings)
    given = plan(**settings, assumptions=["checkpoint_every_seconds=60s"]).best.plan
    assert given.outlook and given.outlook.checkpoint_every_seconds == 60


@pytest.mark.parametrize(
    ("asked", "code"),
    [({"cluster": "v5p-16"}, "E-PLAN-DEVICE"), ({"cluster": "8xh100", "recipe": "rowwise"}, "E-PLAN-SOFTWARE")],
)
def test_plans_that_the_trainer_cannot_execute_are_not_written(tmp_path, asked: dict[str, Any], code):
    result = plan("smollm2-135m", tokens="1B", **asked)
    assert result.why_not_executed == result.facts()["why_not_executed"] != ""
    assert "\nlook      " in str(result)
    with refused(code):
        result.write(tmp_path / "run.toml")
    assert not (tmp_path / "run.toml").exists()


def test_text_keeps_its_width_and_has_what_decides(usual, small):
    for result in (usual, small):
        assert all(len(line) <= 120 for line in str(result).splitlines())
    text = str(small)
    for word in ("layouts", "memory", "links", "MFU", "days", "failures", "goodput", "saving", "cost", "exposed"):
        assert word in text
    assert "causal attention counted half" in text and "pipeline ranks 0 to 3" in str(usual)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_notebooks_get_a_table_with_memory_bars_and_nothing_unescaped():
    html = plan("smollm2-135m", **SMALL, name="<script>alert(1)</script>")._repr_html_()
    parser = _Tags()
    parser.feed(html)
    assert not parser.open and {"table", "details", "span"} <= parser.seen and "script" not in parser.seen
    assert "&lt;script&gt;" in html
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%", html)]
    assert widths and all(0 <= w <= 100 for w in widths)


def test_everything_is_there_as_plain_values(small):
    facts = small.facts()
    assert facts["search"]["considered"] >= len(facts["layouts"]) == 5
    assert facts["layouts"][0]["step_seconds"] == facts["plan"]["step_seconds"]
    assert facts["plan"]["outlook"]["goodput"] > 0 and facts["fits"] is True


def test_a_measured_machine_spends_time_by_its_own_rates():
    machine = Cluster(
        name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30, memory_bandwidth=8e9,
        peak_flops={"bf16": 150e9}, op_seconds=4e-5, step_overhead_seconds=0.002, runtime_bytes=350 << 20,
        usd_per_hour=0.1, measured="2026-01-01",
    )  # fmt: skip
    result = plan("tiny", budget="10min", cluster=machine)
    assert result.search_result is None and result.best.run.parallel.dp_shard == 2
    assert 590 < result.best.plan.total_seconds <= 600
    assert plan("tiny", budget="$0.05", cluster=machine).best.plan.usd == pytest.approx(0.05, rel=0.02)
