import json
from dataclasses import asdict, replace
from random import Random

import pytest

from ingot.cli.guard import _MEASURES
from ingot.errors import RunFailed
from ingot.plugins.callback import StepFinding, StepNumbers, Verdict
from ingot.schema.guard import Guard
from ingot.schema.guard_answer import ANSWERS
from ingot.schema.guard_record import (
    ACCEPT,
    AGAIN,
    EARLIER,
    LOWER,
    NO_DOUBT,
    PASS,
    STOP,
    SUSPECT,
    UNPROVEN,
    GuardState,
    Measure,
    clip_factor,
    described,
    doubt,
    guard_state,
    in_force,
    lr_factor,
    passed_steps,
    read_measures,
    write_measures,
)
from ingot.schema.run_folder import RunFolder
from ingot.schema.step_ranges import StepSpan, among
from ingot.trainer.guard.ladder import Ladder
from ingot.trainer.no_checkpoint import no_checkpoint

SPIKE, NAN = "loss spike", "gradient not finite"


class Judge:
    forgotten, begins, held = 0, frozenset(), ((), ())

    def forget(self):
        self.forgotten += 1

    def values(self):
        return self.held

    def restore(self, losses, norms):
        self.held = losses, norms


def line(first, pattern, kind=SPIKE):
    """Steps from `first` on: the update of "x" was skipped, the data of "p" were passed, "." was trained."""
    finding = StepFinding((kind,), 9.0, 0.0, 1.0)
    return [
        StepNumbers(step, 2.0, 1.0, sign != ".", passed=sign == "p", finding=finding if sign == "x" else None)
        for step, sign in enumerate(pattern, first)
    ]


def ladder_of(tmp_path, measures=(), lr=0.0, **settings):
    folder, reported = RunFolder(tmp_path), []
    record = lambda all: write_measures(folder.guard, all)  # noqa: E731
    ladder = Ladder(Guard(**settings), folder, Judge(), measures, record, reported.append, lr)
    ladder.reported = reported
    return ladder


def ask(ladder, first, pattern, kind=SPIKE):
    ladder.look(line(first, pattern, kind))
    return ladder.verdict()


def test_single_skipped_steps_are_no_row(tmp_path):
    ladder = ladder_of(tmp_path)
    assert ask(ladder, 1, "x.xxpxx.") is Verdict.CONTINUE
    assert ask(ladder, 9, ".xx") is Verdict.CONTINUE and ladder.state().row == (10, 11)
    assert ask(ladder, 12, ".xx") is Verdict.CONTINUE
    assert not ladder.measures and read_measures(tmp_path / "guard.json") == []


def test_measures_are_taken_one_after_the_other(tmp_path):
    """A row is its first three steps, wherever log lines end."""
    ladder = ladder_of(tmp_path, lr_steps=50, clip_factor=0.25, proven_steps=2)
    assert ask(ladder, 8, ".xx") is Verdict.CONTINUE
    assert ask(ladder, 11, "xx") is Verdict.ROLL_BACK  # a row over two lines
    assert ask(ladder, 9, "xxxx.") is Verdict.ROLL_BACK  # and one with more steps in its line
    assert ask(ladder, 13, "...xxx") is Verdict.ROLL_BACK
    assert ask(ladder, 19, "xxx") is Verdict.ROLL_BACK
    assert ask(ladder, 30, "xxxx") is Verdict.ROLL_BACK and ladder._judge.begins == {30}
    found = [(one.action, one.first, one.last) for one in ladder.measures]
    assert [one.proven_to for one in ladder.measures] == [5, 5, 5, 5, 26]
    assert found == [(AGAIN, 9, 11), (PASS, 9, 11), (EARLIER, 8, 18), (LOWER, 8, 21), (ACCEPT, 30, 32)]
    assert ladder.reported == ladder.measures == read_measures(tmp_path / "guard.json")
    assert passed_steps(ladder.measures) == [StepSpan(9, 11), StepSpan(8, 18), StepSpan(8, 21)]
    factors = {
        step: (lr_factor(ladder.measures, step, 0.1), clip_factor(ladder.measures, step, 0.1))
        for step in (7, 8, 71, 72)
    }
    assert factors == {7: (1, 1), 8: (0.5, 0.25), 71: (0.5, 0.25), 72: (1, 1)}
    assert ladder_of(tmp_path, ladder.measures)._judge.begins == {30}  # also after a kill
    with pytest.raises(RunFailed):
        ask(ladder, 70, "xxx")


@pytest.mark.parametrize(("pattern", "verdicts"), [("...", ["hardware"]), ("xxx", ["data"]), ("x..", [])])
def test_steps_that_were_trained_again_show_if_their_data_or_the_hardware_hurt(tmp_path, pattern, verdicts):
    ladder, found = ladder_of(tmp_path), []
    ladder.retrained = lambda taken, verdict: found.append((taken.first, taken.last, verdict))
    ask(ladder, 20, "xxx")
    for first in (15, 15):  # the second time, after damage for example
        ask(ladder, first, f".....{pattern}")
    assert found[: len(verdicts)] == [(20, 22, verdict) for verdict in verdicts] and len(found) == len(verdicts)


def test_a_share_of_skips_around_sound_steps_is_no_second_verdict_about_them(tmp_path):
    ladder, found = ladder_of(tmp_path, calm_steps=30, skip_share=0.3), []
    ladder.retrained = lambda taken, verdict: found.append((taken.first, taken.last, verdict))
    ask(ladder, 20, "xxx")
    assert ask(ladder, 15, "x.x.x...x.x.x.x.x.x.x.x.") is Verdict.ROLL_BACK
    assert [(one.action, one.first <= 20, one.last > 22) for one in ladder.measures] == [
        (AGAIN, True, False),
        (PASS, True, True),
    ]
    assert found == [(20, 22, "hardware")]


def trained(ladder, is_bad, steps=3000):
    """Return the number of steps that were trained, again too, until the ladder ended it or `steps` was over."""
    step = tried = 0
    try:
        while step < steps and tried < 2 * steps:
            step, tried = step + 1, tried + 1
            sign = "p" if among(step, passed_steps(ladder.measures)) else "x" if is_bad(step) else "."
            if ask(ladder, step, sign) is Verdict.ROLL_BACK:
                step = ladder.measures[-1].proven_to
                ladder.restore(GuardState(), changed=False, new_window=False)
    except RunFailed as error:
        assert error.code == "E-GUARD-STOPPED" and "13 updates of the steps" in error.found
    return tried


@pytest.mark.parametrize(("is_bad", "most"), [(lambda step: step % 3, 400), (lambda step: step % 9 == 0, 1600)])
def test_a_share_of_skipped_steps_is_trouble_although_no_row_is(tmp_path, is_bad, most):
    """Two of three for ever, and one of nine: each measure is taken once, and the run stops."""
    ladder = ladder_of(tmp_path, preset="guard")
    assert trained(ladder, lambda step: step > 100 and is_bad(step)) < most
    assert [one.action for one in ladder.measures] == [AGAIN, PASS, EARLIER, LOWER, ACCEPT, STOP]
    assert {one.skipped for one in ladder.measures} == {13} and described(ladder.measures[0]).count("13 updates") == 1
    assert read_measures(tmp_path / "guard.json") == ladder.measures


def test_skipped_steps_before_those_of_a_measure_are_not_counted(tmp_path):
    """A share of them began earlier than the row whose next measure it is met by."""
    row = Measure(action=AGAIN, first=20, last=22, found=(SPIKE,))
    ladder = ladder_of(tmp_path, [row, replace(row, action=PASS)], skip_share=0.25, calm_steps=20)
    assert ask(ladder, 10, "x.x.x......x.x") is Verdict.ROLL_BACK
    (*_, taken) = ladder.measures
    assert (taken.action, taken.first, taken.last, taken.skipped) == (EARLIER, 19, 23, 2)


def test_isolated_skipped_steps_are_no_trouble_at_twenty_times_the_usual_rate(tmp_path):
    random, ladder = Random(7), ladder_of(tmp_path)
    bad = {step for step in range(1, 5001) if random.random() < 0.02}
    assert trained(ladder, lambda step: step in bad and step - 1 not in bad, steps=5000) == 5000
    assert not ladder.measures


def test_the_share_of_skipped_steps_is_that_of_the_checkpoint(tmp_path):
    """Also over a kill; but those that a later measure is an answer to are trained again and counted anew."""
    ladder = ladder_of(tmp_path, skip_share=0.25, calm_steps=20)
    assert ask(ladder, 1, "x.x.x.x.") is Verdict.CONTINUE
    state = guard_state(json.loads(json.dumps(asdict(ladder.state()))))
    again = ladder_of(tmp_path, skip_share=0.25, calm_steps=20)
    again.restore(state, changed=False, new_window=False)
    assert ask(again, 9, "x") is Verdict.ROLL_BACK
    assert [(one.action, one.first, one.last, one.skipped) for one in again.measures] == [(AGAIN, 1, 9, 5)]
    again.restore(state, changed=False, new_window=False)
    assert ask(again, 9, "x") is Verdict.CONTINUE
    changed = ladder_of(tmp_path, skip_share=0.25, calm_steps=20)
    changed.restore(state, changed=True, new_window=True)
    assert ask(changed, 9, "x") is Verdict.CONTINUE


def test_a_row_from_before_a_change_of_settings_does_not_count(tmp_path):
    """Also if the window stays, as after another rate: a measure would go back to before the change."""
    state = GuardState(row=(9, 10), row_found=(NAN,), skipped=((9, (NAN,)), (10, (NAN,))))
    ladder = ladder_of(tmp_path)
    ladder.restore(state, changed=True, new_window=False)
    assert ladder.state().row == ladder.state().row_found == ()
    assert ask(ladder, 11, "xx.") is Verdict.CONTINUE and not ladder.measures
    assert ask(ladder, 14, "xxx") is Verdict.ROLL_BACK
    assert (ladder.measures[-1].first, ladder.measures[-1].found) == (14, (SPIKE,))


def test_doubt_about_checkpoints():
    """From the trouble on, checkpoints are suspect, shortly before it unproven; one that has the measure is neither."""
    again = Measure(action=AGAIN, first=20, last=22, found=(SPIKE,), proven_to=11)
    earlier = replace(again, action=EARLIER, first=19, proven_to=10)
    grades = [doubt([again, earlier], step, [again]).grade for step in (10, 11, 18, 19, 25)]
    assert grades == [0, UNPROVEN, UNPROVEN, SUSPECT, SUSPECT]
    assert doubt([again], 12, ()).reason == "only 7 steps of training followed before trouble from step 20 on"
    assert doubt([again], 30, [again]) == NO_DOUBT


def test_the_measures_hold_for_the_steps_that_hurt(tmp_path):
    """The run went back, to before an accepted change, and other steps hurt then: earlier ones than at first."""
    ladder = ladder_of(tmp_path)
    for first in (852, 842, 845, 848):
        assert ask(ladder, first, "xxx") is Verdict.ROLL_BACK
    found = [(one.action, one.first, one.last, one.proven_to) for one in ladder.measures]
    assert found[:2] == [(AGAIN, 852, 854, 842), (PASS, 842, 844, 832)]
    assert found[2:] == [(EARLIER, 841, 847, 832), (LOWER, 841, 850, 832)]
    assert [lr_factor(ladder.measures, step, 0.1) for step in (840, 841, 1050, 1051)] == [1, 0.5, 0.5, 1]
    other = ladder_of(tmp_path)
    for first in (852, 852, 846, 842):
        assert ask(other, first, "xxx") is Verdict.ROLL_BACK
    assert [(one.first, one.last) for one in other.measures] == [(852, 854), (852, 854), (845, 848), (841, 844)]


@pytest.mark.parametrize("seed", range(4))
def test_a_range_is_never_reversed_and_has_all_steps_of_the_row(tmp_path, seed):
    random, ladder = Random(seed), ladder_of(tmp_path, skip_share=0.1, calm_steps=60)
    for _ in range(40):
        first, pattern = random.randrange(1, 120), random.choice(("xxx", "xx.xx.xx.", "x.x.x.x.x.x."))
        ladder.ask = lambda measure: random.choice(ANSWERS[:-1])
        if ask(ladder, first, pattern) is Verdict.ROLL_BACK:
            (*_, taken) = ladder.measures
            assert 1 <= taken.first <= taken.last and first <= taken.last
            assert taken.skipped or taken.first <= first, taken
            ladder.restore(GuardState(), changed=False, new_window=False)
    assert {one.action for one in ladder.measures} == {AGAIN, PASS, EARLIER, LOWER, ACCEPT}


def test_the_run_goes_back_to_an_accepted_change_not_behind_it(tmp_path):
    """The updates after it are the cause to look for; what hurts in the first step after it comes from before. No
    measure makes the level the normal one that the change has led to."""
    ladder = ladder_of(tmp_path)
    ladder.restore(GuardState(), changed=True, new_window=False, changed_after=850)
    for first in (852, 852, 855, 858):
        assert ask(ladder, first, "xxx") is Verdict.ROLL_BACK
    assert [one.action for one in ladder.measures] == [AGAIN, PASS, EARLIER, LOWER]
    assert [(one.first, one.proven_to) for one in ladder.measures] == [(852, 850)] * 2 + [(851, 850)] * 2
    assert doubt(ladder.measures, 850, ()) == NO_DOUBT and doubt(ladder.measures, 851, ()).grade == SUSPECT
    with pytest.raises(RunFailed):
        ask(ladder, 861, "xxx")
    later, at_once = ladder_of(tmp_path), ladder_of(tmp_path)
    for one, first, proven_to in ((later, 900, 890), (at_once, 851, 841)):
        one.restore(GuardState(), changed=True, new_window=False, changed_after=850)
        assert ask(one, first, "xxx") is Verdict.ROLL_BACK and one.measures[-1].proven_to == proven_to


def test_a_lower_rate_ends_with_another_rate_and_the_measures_begin_anew(tmp_path):
    old = ladder_of(tmp_path, lr=0.5)
    for _ in range(4):
        assert ask(old, 9, "xxx") is Verdict.ROLL_BACK
    measures = read_measures(tmp_path / "guard.json")
    assert measures == old.measures and {one.lr for one in measures} == {0.5}
    assert [lr_factor(measures, 20, lr) for lr in (0.5, 0.3)] == [clip_factor(measures, 20, lr) for lr in (0.5, 0.3)]
    assert [lr_factor(measures, 20, lr) for lr in (0.5, 0.3)] == [0.5, 1]
    new = ladder_of(tmp_path, measures, lr=0.3)
    assert ask(new, 12, "xxx") is Verdict.ROLL_BACK and new.measures[-1].action == AGAIN
    unknown = [replace(one, lr=0.0) for one in measures]  # the record of an earlier version
    assert lr_factor(unknown, 20, 0.3) == 0.5


def test_what_the_measures_do_is_described(tmp_path):
    one = Measure(action=LOWER, first=8, last=11, found=(NAN,), lr_factor=0.5, clip_factor=0.5, lr_last=211, lr=0.5)
    other = replace(one, last=15, lr_last=215)
    assert [line.partition(":")[0] for line in in_force([one, other], 5, 0.5)] == [
        "passes the data of the steps 8-15, as its measures decided",
        *["lowered"] * 3,
    ]
    assert "step 8 has 0.25 of the learning rate" in in_force([one, other], 5, 0.5)[-1]
    (line,) = in_force([one], 100, 0.3)
    assert "ended" in line and "0.3" in line and "0.5" in line
    assert in_force([one], 212, 0.5) == [] and in_force([], 1, 0.5) == []


def test_after_calm_steps_the_next_row_is_a_trouble_of_its_own(tmp_path):
    ladder = ladder_of(tmp_path, calm_steps=20)
    assert ask(ladder, 1, "xxx") is ask(ladder, 1, "xxx") is Verdict.ROLL_BACK
    assert ask(ladder, 24, "xxx") is Verdict.ROLL_BACK
    assert [one.action for one in ladder.measures] == [AGAIN, PASS, AGAIN]


@pytest.mark.parametrize(("preset", "kind", "before"), [("strict", SPIKE, 2), ("guard", NAN, 4)])
def test_the_run_stops_for_a_person(tmp_path, preset, kind, before):
    """After two measures with "strict"; and if nothing was finite, there is no level to accept."""
    ladder = ladder_of(tmp_path, preset=preset)
    assert [ask(ladder, 5, "xxx", kind) for _ in range(before)] == [Verdict.ROLL_BACK] * before
    with pytest.raises(RunFailed) as caught:
        ask(ladder, 5, "xxx", kind)
    assert caught.value.code == "E-GUARD-STOPPED" and caught.value.facts["last_step"] == 7
    assert f"ingot explain {'nan' if kind == NAN else 'spike'} {tmp_path} --step 5." in caught.value.fix
    assert read_measures(tmp_path / "guard.json")[-1].action == STOP


def test_a_person_chooses_the_measure_in_place_of_a_stop(tmp_path):
    """Before the run stops, or after it: then the next start takes it. Nobody answers if it is to stop otherwise."""
    answers, asked = [None, LOWER, STOP], []
    ladder = ladder_of(tmp_path, preset="strict", proven_steps=1)
    ladder.ask = lambda measure: asked.append(measure) or answers.pop(0)
    assert ask(ladder, 5, "xxx") is ask(ladder, 5, "xxx") is Verdict.ROLL_BACK
    assert ask(ladder, 5, "xxx") is Verdict.CONTINUE and len(ladder.measures) == 2
    assert ask(ladder, 8, "x") is Verdict.ROLL_BACK
    assert (ladder.measures[-1].action, ladder.measures[-1].first, ladder.measures[-1].proven_to) == (LOWER, 4, 2)
    for _ in range(2):  # after what a person chose, the measures begin anew
        assert ask(ladder, 9, "xxx") is Verdict.ROLL_BACK
    with pytest.raises(RunFailed):
        ask(ladder, 9, "xxx")
    assert [one.action for one in asked] == [STOP] * 3 and asked[-1].first == 9
    again = ladder_of(tmp_path, read_measures(tmp_path / "guard.json"), preset="strict")
    again.answer(ACCEPT)
    assert [one.action for one in read_measures(tmp_path / "guard.json")][-2:] == [STOP, ACCEPT]
    assert again._judge.begins == {9}


def test_the_command_offers_what_an_answer_may_be():
    assert _MEASURES == ANSWERS


def test_the_record_of_a_checkpoint_completes_that_of_the_folder(tmp_path):
    old = Measure(action=PASS, first=2, last=4, found=(SPIKE,), proven_to=0)
    new = Measure(action=AGAIN, first=300, last=304, found=(SPIKE,), proven_to=291)
    ladder = ladder_of(tmp_path, [new])
    ladder.restore(GuardState(measures=(old,), row=(9, 10), row_found=(SPIKE,)), changed=False, new_window=False)
    assert ladder.measures == [old, new] == read_measures(tmp_path / "guard.json")
    assert ask(ladder, 11, "x") is Verdict.ROLL_BACK and ladder.measures[-1].first == 9
    assert ladder._judge.forgotten == 0
    ladder.restore(GuardState(measures=(old, new)), changed=True, new_window=True)
    assert ladder._judge.forgotten == 1 and ladder.state().row == ()


def test_without_a_checkpoint_the_error_names_the_cause_and_the_rate(tmp_path):
    """The facts have the measure with which the launcher begins again; after damage there is none."""
    measure = Measure(action=PASS, first=2, last=4, found=(NAN,), lr=0.5)
    error = no_checkpoint(RunFolder(tmp_path), 0.5, measure)
    assert (error.code, error.facts["measure"], error.facts["step"]) == ("E-ROLLBACK-NO-CHECKPOINT", PASS, 2)
    assert f"ingot explain nan {tmp_path} --step 2." in error.fix
    assert f"ingot train {tmp_path} --set optim.lr=0.05 --accept-change optim.lr." in error.fix
    assert "measure" not in no_checkpoint(RunFolder(tmp_path), 0.5, None).facts
