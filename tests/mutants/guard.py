"""Faults in the guard: what is found, what is kept of it, and the way that a run takes after it."""

from .mutant import Mutant

_JUDGE = "tests/unit/trainer/guard/test_step_judge.py"
_LADDER = "tests/unit/trainer/guard/test_ladder.py"
_RUNS = "tests/unit/trainer/guard/test_guarded_runs.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="spikes-in-the-window",
        what="a spike becomes part of what later steps are compared with",
        file="trainer/guard/step_judge.py",
        before="self.window.copy_(torch.where(skipped, self.window, moved))",
        after="self.window.copy_(moved)",
        tests=(f"{_JUDGE}::test_each_kind_is_found_and_leaves_the_window_as_it_was",),
    ),
    Mutant(
        name="empty-places-judged",
        what="places of the window that are still empty count as steps with loss 0",
        file="trainer/guard/step_judge.py",
        before="empty = self._places > self.count",
        after="empty = self._places < 0",
        tests=(f"{_JUDGE}::test_there_is_no_spike_before_the_window_is_ready", _JUDGE),
    ),
    Mutant(
        name="spike-without-a-window",
        what="a few steps are enough to call the next one a spike",
        file="trainer/guard/step_judge.py",
        before="ready = self.count >= self.guard.ready",
        after="ready = self.count >= 1",
        tests=(f"{_JUDGE}::test_there_is_no_spike_before_the_window_is_ready",),
    ),
    Mutant(
        name="calm-window-without-a-floor",
        what="the smallest deviation is not used",
        file="trainer/guard/step_judge.py",
        before="self._spreads = torch.tensor([guard.loss_spread, guard.norm_spread],",
        after="self._spreads = torch.tensor([1e-12, 1e-12],",
        tests=(f"{_JUDGE}::test_a_very_calm_window_has_the_smallest_deviation",),
    ),
    Mutant(
        name="loss-not-summed",
        what="each rank judges its own loss, not that of the step",
        file="trainer/optim/gradients.py",
        before="square, own = sums[0].to(dtype), sums[1]",
        after="square = sums[0].to(dtype)",
        tests=("tests/unit/trainer/optim/test_clip.py",),
    ),
    Mutant(
        name="finding-without-a-veto",
        what="a spike is reported, and its update is made",
        file="trainer/step.py",
        before="    if judge.guard.acts:",
        after="    if False:",
        tests=(f"{_RUNS}::test_a_batch_that_hurts_costs_its_update_alone",),
    ),
    Mutant(
        name="skipped-step-in-the-ledger",
        what="the ledger has the samples of a skipped step as trained",
        file="trainer/loop.py",
        before="                self.trainer.ledger.mark_untrained(numbers.step)",
        after="                pass",
        tests=(f"{_RUNS}::test_a_batch_that_hurts_costs_its_update_alone",),
    ),
    Mutant(
        name="measures-not-recorded",
        what="a measure takes effect without a record",
        file="trainer/guard/ladder.py",
        before="        self.measures.append(measure)\n        self._record(self.measures)",
        after="        self.measures.append(measure)",
        tests=(f"{_LADDER}::test_measures_are_taken_one_after_the_other",),
    ),
    Mutant(
        name="row-not-in-the-checkpoint",
        what="a run that continues has forgotten the skipped steps before its checkpoint",
        file="trainer/guard/ladder.py",
        before="self._row, self._found, self._due = list(state.row), set(state.row_found), None",
        after="self._row, self._found, self._due = [], set(), None",
        tests=(f"{_LADDER}::test_the_record_of_a_checkpoint_completes_that_of_the_folder",),
    ),
    Mutant(
        name="trouble-never-ends",
        what="a row of much later is met by the next measure of an old trouble",
        file="trainer/guard/ladder.py",
        before="abs(first - taken.last) <= self.guard.calm_steps",
        after="True",
        tests=(f"{_LADDER}::test_after_calm_steps_the_next_row_is_a_trouble_of_its_own",),
    ),
    Mutant(
        name="harmed-checkpoint-used",
        what="the run goes back to a checkpoint of weights that an update had harmed",
        file="schema/guard_record.py",
        before="first = min((one.first for one in later), default=step + 1)",
        after="first = step + 1",
        tests=(f"{_RUNS}::test_an_update_that_harmed_the_weights_is_undone",),
    ),
    Mutant(
        name="no-checkpoint-before-trouble",
        what="the checkpoints from before a trouble are removed while it lasts",
        file="trainer/checkpoint/retention.py",
        before="for last in back_to}",
        after="for last in ()}",
        tests=("tests/unit/trainer/checkpoint/test_retention.py::test_what_the_rules_keep",),
    ),
    Mutant(
        name="passed-data-read",
        what="the loader reads and trains the data of steps that are passed",
        file="trainer/loader/loader.py",
        before="return among(step, self._passed)",
        after="return False",
        tests=(f"{_RUNS}::test_a_batch_that_hurts_costs_its_update_alone",),
    ),
]
