import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ingot.errors import ResourceError, RunFailed
from ingot.plugins.callback import StepFinding, StepNumbers, Verdict
from ingot.schema.accepted import AcceptedChanges, rate_to_try, write_accepted
from ingot.schema.guard import Guard
from ingot.schema.guard_record import FAILED, GuardState
from ingot.schema.run_folder import RunFolder
from ingot.trainer.default_policy import SKIPS, SKIPS_IN_A_ROW, VETOES_IN_A_ROW, DefaultPolicy
from ingot.trainer.guard.exploded import LossLimit
from ingot.trainer.resilience.policy import StepResult, read_steps


def scalar(value):
    return torch.tensor(float(value))


def line(*values, skipped=False, first=41):
    """StepResult at a log line, whose readings from step `first` on have these (loss, gradient norm). skipped: whether
    all steps were, or the indices of those that were."""
    indices = skipped if isinstance(skipped, tuple) else range(len(values) if skipped else 0)
    readings = [StepNumbers(first + i, loss, norm, i in indices) for i, (loss, norm) in enumerate(values)]
    return StepResult(readings[-1].step, 1e-3, scalar(0), scalar(0), line=readings)


def limited(from_weights=False, **guard):
    return {"limit": LossLimit(Guard(**guard), 64, from_weights=from_weights)}


@pytest.fixture
def judge(fork_ranks, tmp_path):
    """judge(facts, ...) -> what one DefaultPolicy says to them in turn, on one rank."""

    def run(*facts, **settings):
        def ask(rank, ranks):
            policy = DefaultPolicy(RunFolder(tmp_path), **settings)
            verdicts = []
            for fact in facts:
                try:
                    verdicts.append(policy.verdict(fact))
                except RunFailed as error:
                    return [*verdicts, (error.code, error.facts)]
            return verdicts

        return fork_ranks(ask, 1)[0]

    return run


def test_finite_values_pass(judge):
    assert judge(line((3.5, 0.0), (1e30, 2.0))) == [Verdict.CONTINUE]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf)])
@pytest.mark.parametrize("scaled_loss", [False, True])
def test_the_first_bad_step_is_named(judge, bad, scaled_loss):
    ((code, facts),) = judge(line((1.0, 1.0), bad, (math.nan, math.nan)), scaled_loss=scaled_loss)
    assert (code, facts["step"]) == ("E-LOSS-NOT-FINITE", 42)


@pytest.mark.parametrize("scaled_loss", [False, True])
def test_a_gradient_that_is_not_finite_is_vetoed(tmp_path, scaled_loss):
    policy = DefaultPolicy(RunFolder(tmp_path), scaled_loss=scaled_loss)
    for norm, answer in ((2.0, False), (math.inf, True), (math.nan, True)):
        veto = policy.veto(scalar(math.nan), scalar(norm))
        assert veto.dtype == torch.bool and veto.shape == () and veto.item() is answer


def test_skipped_steps_pass_until_there_are_too_many_in_a_row(judge):
    """Also over log lines, and without a loss scale only a few do."""
    bad, fine = (math.nan, math.nan), (2.0, 1.0)
    some = line(*[bad] * (SKIPS_IN_A_ROW - 1), skipped=True)
    assert judge(some, line(fine), some) == [Verdict.CONTINUE] * 3
    *before, (code, facts) = judge(some, line(bad, skipped=True))
    assert before == [Verdict.CONTINUE]
    assert (code, facts["step"], facts["skipped"]) == ("E-LOSS-NOT-FINITE", 41, SKIPS_IN_A_ROW)


def test_a_loss_far_above_that_of_a_guess_ends_the_run(judge):
    """ln(64) is 4.16. A spike between two log lines is no reason to stop; skipped steps change no weights."""
    assert judge(line((4.2, 1.0)), line((9.0, 1.0), (8.3, 1.0)), **limited()) == [Verdict.CONTINUE] * 2
    assert judge(line((9.0, 1.0), skipped=True), **limited()) == [Verdict.CONTINUE]
    of_another_model = (26.0, 1.0), (25.0, 1.0)
    assert judge(line(*of_another_model), **limited(from_weights=True)) == [Verdict.CONTINUE]
    for exploded, first in (
        (line((4.2, 1.0), (8.5, 1.0)), (42, 8.5)),
        (line((4.2, 1.0), (8.5, 1.0), (math.inf, math.inf), skipped=(2,)), (42, 8.5)),  # the last step changed nothing
        (line(*of_another_model[:1], (8.5, 1.0)), (41, 26.0)),  # a restart makes no baseline of what it finds
        (line((math.inf, math.inf), (4.2, 1.0), (8.5, 1.0), first=40, skipped=(0,)), (42, 8.5)),
        (line((9, 1.0), (4.2, 1.0), (9, 1.0), (math.nan, math.nan), (8.5, 1.0), skipped=(3,)), (43, 9)),  # in a row
    ):
        ((code, facts),) = judge(exploded, **limited())
        assert (code, facts["step"], facts["loss"]) == ("E-LOSS-EXPLODED", *first)
    assert judge(line((8.5, 1.0)), **limited(exploded_ratio=0.0)) == [Verdict.CONTINUE]
    ((code, _),) = judge(line((4.7, 1.0)), **limited(exploded_ratio=1.1))
    assert code == "E-LOSS-EXPLODED" and Guard(exploded_ratio=1.1).loss_limit(64) < 4.7


def test_the_errors_name_a_command_with_the_rate_before_the_accepted_change(tmp_path):
    """Else with a tenth of the rate, also if the record is of another change or cannot be read."""
    folder = RunFolder(tmp_path)
    policy = DefaultPolicy(folder, **limited(), lr=30.0)
    record = AcceptedChanges(step=80, config_sha256="", data_fingerprint="", changes={"optim.lr": (0.003, 30.0)})
    changed = {"0.003": (0.003, 30.0), "0.00012345": (0.00012345, 30.0)}  # in all digits, or it is another change
    of_no_use = [(30.0, 0.003), ("not set", 30.0), (None, 30.0)]
    cases = [(replace(record, changes={"optim.lr": one}), rate) for rate, one in changed.items()]
    cases += [(replace(record, changes={"optim.lr": one}), "3.0") for one in of_no_use]
    for written, rate in (*cases, (None, "3.0")):
        write_accepted(folder.accepted, [written] if written else [])
        for bad, code in (((9.0, 1.0), "E-LOSS-EXPLODED"), ((math.nan, 1.0), "E-LOSS-NOT-FINITE")):
            with pytest.raises(RunFailed) as caught:
                policy.judge([StepNumbers(82, *bad, False)])
            command = f"ingot train {tmp_path} --set optim.lr={rate} --accept-change optim.lr. "
            assert caught.value.code == code and command in caught.value.fix and "same command" not in caught.value.fix
    folder.accepted.write_text("{")
    assert rate_to_try(folder.accepted, 30.0) == 3.0
    assert rate_to_try(folder.accepted, 3e-4) == 3e-5  # without the last bit of a division


def test_an_end_because_of_the_numbers_is_recorded_once(tmp_path):
    """Skipped steps before it belong to it, and an accepted change whose updates hurt bounds the way back."""
    kept = []
    settings = {"record": lambda measures: kept.append([*measures]), "proven_steps": 8, "lr": 0.1, **limited()}
    bad = [StepNumbers(step, math.nan, math.nan, True) for step in (40, 41, 42)]
    for numbers, changed_after, ends in (
        (bad, 0, (40, 42, 30)),
        (bad, 35, (40, 42, 35)),
        ([StepNumbers(42, 9.0, 1.0, False)], 0, (42, 42, 32)),
    ):
        kept.clear()
        policy = DefaultPolicy(RunFolder(tmp_path), **settings)
        policy.restore(GuardState(), changed=False, new_window=False, changed_after=changed_after)
        for _ in range(2):
            with pytest.raises(RunFailed):
                policy.judge(numbers)
            policy._vetoes = 0
        ((end,),) = kept
        assert (end.action, end.first, end.last, end.proven_to, end.lr) == (FAILED, *ends, 0.1)
        assert policy.state().measures == (end,)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ResourceError("E-X", "x", rule="y", fix="z")]
)
def test_an_end_that_cannot_be_recorded_keeps_its_reason(tmp_path, error):
    def record(measures):
        raise error

    lines = []
    policy = DefaultPolicy(RunFolder(tmp_path), record=record, say=lines.append, **limited())
    with pytest.raises(RunFailed) as raised:
        policy.judge([StepNumbers(42, 9.0, 1.0, False)])
    assert raised.value.code == "E-LOSS-EXPLODED"
    assert len(lines) == 1 and lines[0].startswith("WARNING") and "is not recorded" in lines[0]


def test_skipped_steps_pass_until_they_are_a_tenth(judge):
    bad, fine = (math.nan, math.nan), (2.0, 1.0)
    now_and_then = [line(bad, *[fine] * 9, skipped=(0,)) for _ in range(SKIPS - 1)]
    assert judge(*now_and_then, line(*[fine] * 10), *now_and_then) == [Verdict.CONTINUE] * (2 * SKIPS - 1)
    *before, error = judge(*now_and_then, line(bad, skipped=True))
    assert len(before) == SKIPS - 1 and error[0] == "E-LOSS-NOT-FINITE"


def test_health_is_that_of_the_last_step_that_changed_weights(fork_ranks, tmp_path):
    def ask(rank, ranks):
        policy = DefaultPolicy(RunFolder(tmp_path))
        before = policy.health()
        policy.verdict(line((3.0, 1.0)))
        policy.verdict(line((math.nan, math.nan), skipped=True))
        return before.state, policy.health().state, "loss 3," in policy.health().reason

    assert fork_ranks(ask, 1) == [("unknown", "healthy", True)]


def test_vetoed_steps_pass_until_there_are_too_many_in_a_row(judge):
    overflow, fine = (math.nan, math.inf), (2.0, 1.0)
    some = line(*[overflow] * (VETOES_IN_A_ROW - 1), skipped=True)
    assert judge(some, line(fine), some, scaled_loss=True) == [Verdict.CONTINUE] * 3
    *before, (code, facts) = judge(some, line(overflow, skipped=True), scaled_loss=True)
    assert before == [Verdict.CONTINUE]
    assert (code, facts["skipped"]) == ("E-LOSS-SCALE", VETOES_IN_A_ROW)


def test_reading_takes_the_mean_of_the_ranks_that_know_the_loss(fork_ranks):
    def read(rank, ranks):
        loss = [math.nan, 1.0, math.nan, 4.0][rank]  # ranks 0 and 2 are an earlier pipeline stage
        steps = [
            StepResult(step, 1e-3, scalar(step * loss), scalar(step), torch.tensor(step == 2), readers=[1, 3])
            for step in (1, 2)
        ]
        return read_steps(steps), steps[1].read()

    expected = [StepNumbers(1, 2.5, 1.0, False), StepNumbers(2, 5.0, 2.0, True)]
    assert fork_ranks(read, 4) == [(expected, expected[1])] * 4


def test_facts_at_a_line_are_not_read_again():
    """No process group: reading would fail."""
    facts = line((1.0, 2.0), (3.0, 4.0))
    assert facts.read() == StepNumbers(42, 3.0, 4.0, False)


def test_an_overflow_of_a_scaled_loss_is_no_matter_for_the_guard(tmp_path):
    looked = []
    ladder = SimpleNamespace(look=looked.extend, verdict=lambda: Verdict.CONTINUE)
    kinds = ("gradient not finite",), ("loss spike",), ("gradient not finite", "loss not finite")
    steps = [
        StepNumbers(n, 1.0, math.inf, True, finding=StepFinding(own, 0.0, 0.0, 0.0)) for n, own in enumerate(kinds, 1)
    ]
    DefaultPolicy(RunFolder(tmp_path), scaled_loss=True, ladder=ladder).judge(steps)
    assert [one.finding and one.finding.kinds for one in looked] == [None, *kinds[1:]]
