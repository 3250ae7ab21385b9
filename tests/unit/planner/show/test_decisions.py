"""The recipe: every choice of a layout with its reason, its formula, and a runner-up that is no straw man."""

from functools import cache
from itertools import takewhile

import pytest

from ingot.planner.request.planning import plan
from ingot.planner.request.presets import load_model
from ingot.planner.show.alternatives import (
    Decision,
    DecisionContext,
    dense_equivalent,
    dense_twin,
    full_layout_text,
    settings_of,
    sparse_twin,
)
from ingot.planner.show.decisions import decision_lines, decisions
from ingot.theory.params import count_active_parameters, count_parameters


@cache
def context_of(model: str, cluster: str = "8xh100", **asked) -> DecisionContext:
    planning = plan(model, tokens="2B", cluster=cluster, **asked)
    assert planning.search_result
    return DecisionContext(planned=planning.best, search_result=planning.search_result, pinned=planning.pinned)


@cache
def decisions_of(model: str) -> tuple[Decision, ...]:
    return tuple(decisions(context_of(model)))


def titles_until_the_score(context: DecisionContext) -> list[str]:
    return [
        decision.title for decision in takewhile(lambda decision: decision.title != "the score", decisions(context))
    ]


def test_choices_come_in_the_order_of_decisions():
    titles = [decision.title for decision in decisions_of("smollm2-135m")]
    assert titles == [
        "the bill", "tensor parallel inside the node", "pipeline across nodes", "data parallel over the rest",
        "recompute", "global batch", "the score", "dense or experts",
    ]  # fmt: skip
    long = titles_until_the_score(context_of("smollm2-135m", "2xh100", seq=32_768, batch=8))
    assert "context parallel" in long and long.index("context parallel") == 4
    assert "expert parallel" in titles_until_the_score(context_of("tiny-moe"))


def test_every_choice_says_why():
    for decision in decisions_of("smollm2-135m"):
        assert decision.chosen and decision.reason
    bill = decisions_of("smollm2-135m")[0]
    # 18 bytes of state: weights 2, gradients 4, master 4, moments 8.
    assert "135M x (2 weight + 4 gradient + 4 master + 8 moments) B = 2.3 GiB" in bill.formula


def test_runners_up_are_layouts_that_were_evaluated_and_decide_otherwise():
    context = context_of("smollm2-135m")
    layouts = {
        full_layout_text(c.run): c
        for c in (*context.search_result.best, *(change.candidate for change in context._one_change_away))
    }
    for names in (("pp",), ("micro_batch",), ("zero", "dp_replicate")):
        text = context.runner_up(*names)
        found = next(candidate for layout, candidate in layouts.items() if text.startswith(f"runner-up: {layout},"))
        assert settings_of(found.run, names) != settings_of(context.run, names)
        assert found.step_seconds > 0.99 * context.own_layout.step_seconds
    pinned = DecisionContext(planned=context.planned, search_result=context.search_result, pinned={"pp": 1})
    assert "pinned" in pinned.runner_up("pp")


def test_the_chosen_layout_is_no_slower_than_its_runners_up():
    assert not any(decision.runner_up.startswith("better") for decision in decisions_of("smollm2-135m"))
    mine = context_of("smollm2-135m")
    slower = DecisionContext(
        planned=plan("smollm2-135m", tokens="2B", cluster="8xh100", pinned={"pp": 4}).best,
        search_result=mine.search_result,
        pinned={},
    )
    assert slower.runner_up("pp").startswith("better: ")


def test_twins_have_as_much_work_for_a_token():
    dense, sparse = load_model("llama3-8b").arch, load_model("mixtral-8x7b").arch
    assert count_active_parameters(sparse_twin(dense)) == pytest.approx(count_parameters(dense), rel=0.001)
    assert count_parameters(dense_twin(sparse)) == pytest.approx(count_active_parameters(sparse), rel=0.001)
    # DeepSeekMoE 16B: 16.4B parameters, 2.8B active; as good as Llama 2 7B.
    assert dense_equivalent(sparse) == pytest.approx((46.7e9 * 12.9e9) ** 0.5, rel=0.01)


def test_dense_and_experts_are_weighed_in_tokens_per_dollar():
    last = decisions_of("smollm2-135m")[-1]
    assert last.title == "dense or experts" and "tokens per dollar" in last.reason and "sqrt(" in last.formula


def test_lines_number_the_decisions_of():
    lines = list(decision_lines(context_of("smollm2-135m")))
    assert [line[0] for line in lines if line[0].isdigit()] == list("12345678")
    assert all(line.startswith("   ") for line in lines if not line[0].isdigit())
