"""Settings adapted to a change, and the values of controls: always legal by the layout rules."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.planner.web import answers
from ingot.planner.web.choices import controls, steps_away
from ingot.planner.web.settings import WORDS, PageSettings
from ingot.theory.layout import layout_problems


def settled(moved="", **setting):
    return answers.settled(PageSettings(**setting), moved)


def problems(state):
    return list(answers.problems_of(state, answers.run_of(state)[0]))


def test_a_new_degree_makes_room_for_itself():
    before = settled(model="llama3-70b", cluster="16x8xh100", batch=256, tp=8, pp=4, cp=4, zero=1)
    assert before.cp == 4
    after = settled("pp", **{**vars(before), "pp": 16})
    assert (after.tp, after.pp, after.cp) == (8, 16, 1)
    assert not problems(after)


def test_what_was_moved_stays_even_where_it_is_wrong():
    state = settled("tp", model="llama3-8b", tp=3)
    assert state.tp == 3
    assert "does not divide 8 devices" in problems(state)[0][1]


def test_a_schedule_that_splits_the_backward_takes_zero_1():
    state = settled("schedule", model="llama3-8b", pp=4, schedule="zb_h1", zero=3, batch=64)
    assert (state.schedule, state.zero) == ("zb_h1", 1)
    back = settled("zero", **{**vars(state), "zero": 3})
    assert (back.schedule, back.zero) == ("1f1b", 3)


def test_micro_batches_that_interleaving_does_not_take_fall_back_to_1f1b():
    state = settled("micro_batch", model="llama3-8b", pp=4, schedule="interleaved", zero=1, batch=12, micro_batch=1)
    assert state.schedule == "1f1b"  # 6 micro-batches are not a multiple of 4
    assert not problems(state)


def test_without_experts_there_is_no_expert_parallelism():
    assert settled(model="llama3-8b", ep=8).ep == 1
    assert settled(model="mixtral-8x7b", ep=8).ep == 8


degree = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64])
layouts = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama3-8b", "smollm2-135m", "mixtral-8x7b", "moe-671b"]),
        "cluster": st.sampled_from(["h100", "8xh100", "6x8xa100", "16x72xgb200", "v5p-256"]),
        "batch": st.sampled_from([1, 48, 512, 1152]),
        "tp": degree, "pp": degree, "cp": degree, "ep": degree, "dp_replicate": degree, "micro_batch": degree,
        "zero": st.sampled_from([1, 2, 3]),
        "schedule": st.sampled_from(WORDS["schedule"]),
        "stages_per_rank": st.sampled_from([0, 2, 5]),
        "context": st.sampled_from(WORDS["context"]),
    }
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(layouts, st.sampled_from(["", "tp", "schedule", "micro_batch", "ep"]))
def test_settling_is_done_once_and_uses_every_device(layout, moved):
    state = settled(moved, **layout)
    assert answers.settled(state, moved) == state
    if not problems(state):
        run = answers.run_of(state)[0]
        assert run.parallel.world_size == answers.cluster_of(state.cluster).devices


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(layouts)
def test_what_is_offered_as_legal_is_legal_by_the_trainers_rules(layout):
    state = settled(**layout)
    for key, value, moved in steps_away(state):
        assert getattr(moved, key) == value
        assert not list(layout_problems(answers.run_of(moved)[0])), (key, value)


def test_what_is_not_offered_says_why():
    found = controls(settled(model="llama3-8b", cluster="6x8xa100", batch=48))
    whys = [why for control in found.values() for why in control.refused]
    whys += [choice.why for control in found.values() for choice in control.choices if choice.why]
    assert whys and all(len(why) > 10 for why in whys)
    assert any("NVIDIA A100" in why and "8-bit" in why for why in whys)  # FP8
    assert found["schedule"].idle == "there is no pipeline"
    assert found["ep"].idle == "the model has no experts"


def test_the_present_value_is_always_among_the_choices():
    state = settled(model="llama3-70b", cluster="128x8xh100", tp=8, pp=4, zero=1, schedule="interleaved")
    for key, control in controls(state).items():
        assert getattr(state, key) in [choice.value for choice in control.choices], key


def test_a_link_reads_no_files():
    for model in ("../../x.toml", "/etc/passwd", "run.toml"):
        with refused("E-MODEL-UNKNOWN", given=model):
            answers.settled(PageSettings(model=model))


def test_the_largest_pipeline_is_refused_before_it_is_simulated():
    state = settled(model="moe-671b", cluster="8xh100", pp=8, zero=1, batch=1_000_000)
    assert [key for key, _ in problems(state)] == ["train.micro_batch"]
    assert answers.answer(state).plan is None
