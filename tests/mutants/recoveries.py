"""Faults in the account of faults: which restart followed which of them, what each cost, and what a roll-back cost."""

from .mutant import Mutant

_FACTS = "tests/unit/report/test_facts.py"
_TIMELINE = "tests/unit/report/test_timeline.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="void-steps-count-as-lost",
        what="a fault after a roll-back is blamed for the steps before the roll-back, too",
        file="report/faults.py",
        before='            self._reached, self._drill = event["to_step"], None\n',
        after="            self._drill = None\n",
        tests=(f"{_FACTS}::test_a_fault_after_a_roll_back_redoes_the_steps_since_then_alone",),
    ),
    Mutant(
        name="other-data-compared",
        what="steps that follow a roll-back are compared with those that a fault lost",
        file="report/faults.py",
        before="            self._redone.clear()\n",
        after="            pass\n",
        tests=(f"{_FACTS}::test_steps_that_follow_a_roll_back_are_not_compared_with_those_that_a_fault_lost",),
    ),
    Mutant(
        name="failed-restart-unseen",
        what="a restart that fails before it trains is no fault",
        file="report/faults.py",
        before="        drill = self._drill or {}\n",
        after="        if self._open:\n            return\n        drill = self._drill or {}\n",
        tests=(f"{_FACTS}::test_a_restart_that_fails_before_it_trains_is_a_fault_of_its_own",),
    ),
    Mutant(
        name="steps-of-an-earlier-fault-forgotten",
        what="a second fault ends the comparison of the steps that the first one lost",
        file="report/faults.py",
        before="            self._redone.append(_RedoneSteps(found, self._reached))\n",
        after="            self._redone = [_RedoneSteps(found, self._reached)]\n",
        tests=(f"{_FACTS}::test_steps_lost_by_a_second_fault_are_those_of_its_own_attempt",),
    ),
    Mutant(
        name="drill-of-an-earlier-attempt",
        what="a fault counts as injected because a drill stopped the run earlier",
        file="report/faults.py",
        before="self._alive, self._led, self._drill = False, False, None",
        after="self._alive, self._led = False, False",
        tests=(f"{_FACTS}::test_a_drill_that_ended_no_attempt_is_not_the_cause_of_a_later_fault",),
    ),
    Mutant(
        name="nan-differs-from-nan",
        what="steps whose loss is NaN in both attempts count as different",
        file="report/faults.py",
        before="one == other or (one != one and other != other)",
        after="one == other",
        tests=(f"{_FACTS}::test_losses_that_are_no_numbers_are_equal",),
    ),
    Mutant(
        name="losses-of-another-roll-back",
        what="a roll-back of a live run is shown with the losses of one that was forgotten",
        file="report/recovery.py",
        before='iter([event for event in events if event["kind"] == kinds.ROLLED_BACK])',
        after="iter(data.roll_backs)",
        tests=(f"{_TIMELINE}::test_a_live_run_that_forgot_older_events_gives_each_roll_back_its_own_losses",),
    ),
    Mutant(
        name="loss-of-a-void-step",
        what="the loss after a roll-back is that of the bad step before it",
        file="report/facts.py",
        before='.get("loss"), None\n',
        after='.get("loss"), (event["from_step"], data.steps[event["from_step"]]["loss"])\n',
        tests=(f"{_TIMELINE}::test_a_roll_back_from_which_the_run_did_not_come_back_has_no_loss_after_it",),
    ),
]
