"""The recipe: every choice of a layout with its reason, its formula, and a runner-up that is no straw man."""

from functools import cache
from itertools import takewhile

import pytest

from ingot.planner.request.planning import plan
from ingot.planner.request.presets import load_model
from ingot.planner.show.recipe import recipe, recipe_lines
from ingot.planner.show.runners_up import Choice, Story, layout_words, settings_of
from ingot.planner.show.worth import dense_twin, equal_dense, sparse_twin
from ingot.theory.params import count_active_parameters, count_parameters


@cache
def story(model: str, cluster: str = "8xh100", **asked) -> Story:
    planning = plan(model, tokens="2B", cluster=cluster, **asked)
    assert planning.found and planning.question
    return Story(planned=planning.best, found=planning.found, pinned=planning.question.pinned)


@cache
def choices(model: str) -> tuple[Choice, ...]:
    return tuple(recipe(story(model)))


def titles_until_the_score(told: Story) -> list[str]:
    return [choice.title for choice in takewhile(lambda choice: choice.title != "the score", recipe(told))]


def test_choices_come_in_the_order_of_decisions():
    titles = [choice.title for choice in choices("smollm2-135m")]
    assert titles == [
        "the bill", "tensor parallel inside the node", "pipeline across nodes", "data parallel over the rest",
        "recompute", "global batch", "the score", "dense or experts",
    ]  # fmt: skip
    long = titles_until_the_score(story("smollm2-135m", "2xh100", seq=32_768, batch=8))
    assert "context parallel" in long and long.index("context parallel") == 4
    assert "expert parallel" in titles_until_the_score(story("tiny-moe"))


def test_every_choice_says_why():
    for choice in choices("smollm2-135m"):
        assert choice.chosen and choice.reason
    bill = choices("smollm2-135m")[0]
    # 18 bytes of state: weights 2, gradients 4, master 4, moments 8.
    assert "135M x (2 weight + 4 gradient + 4 master + 8 moments) B = 2.3 GiB" in bill.formula


def test_runners_up_are_layouts_that_were_evaluated_and_decide_otherwise():
    told = story("smollm2-135m")
    words = {layout_words(c.run): c for c in (*told.found.best, *(change.candidate for change in told._neighbours))}
    for names in (("pp",), ("micro_batch",), ("zero", "dp_replicate")):
        text = told.runner_up(*names)
        found = next(candidate for layout, candidate in words.items() if text.startswith(f"runner-up: {layout},"))
        assert settings_of(found.run, names) != settings_of(told.run, names)
        assert found.step_seconds > 0.99 * told.mine.step_seconds
    assert "as asked for" in Story(planned=told.planned, found=told.found, pinned={"pp": 1}).runner_up("pp")


def test_the_chosen_layout_is_no_slower_than_its_runners_up():
    assert not any(choice.runner_up.startswith("better") for choice in choices("smollm2-135m"))
    mine = story("smollm2-135m")
    slower = Story(
        planned=plan("smollm2-135m", tokens="2B", cluster="8xh100", pinned={"pp": 4}).best, found=mine.found, pinned={}
    )
    assert slower.runner_up("pp").startswith("better: ")


def test_twins_have_as_much_work_for_a_token():
    dense, sparse = load_model("llama3-8b").arch, load_model("mixtral-8x7b").arch
    assert count_active_parameters(sparse_twin(dense)) == pytest.approx(count_parameters(dense), rel=0.001)
    assert count_parameters(dense_twin(sparse)) == pytest.approx(count_active_parameters(sparse), rel=0.001)
    # DeepSeekMoE 16B: 16.4B parameters, 2.8B active; as good as Llama 2 7B.
    assert equal_dense(sparse) == pytest.approx((46.7e9 * 12.9e9) ** 0.5, rel=0.01)


def test_dense_and_experts_are_weighed_in_tokens_per_dollar():
    last = choices("smollm2-135m")[-1]
    assert last.title == "dense or experts" and "tokens per dollar" in last.reason and "sqrt(" in last.formula


def test_lines_number_the_choices():
    lines = list(recipe_lines(story("smollm2-135m")))
    assert [line[0] for line in lines if line[0].isdigit()] == list("12345678")
    assert all(line.startswith("   ") for line in lines if not line[0].isdigit())
