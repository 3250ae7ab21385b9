"""Faults in the comparison of runs: where they are compared, with which steps, and how sure a difference is."""

from .mutant import Mutant

_TESTS = "tests/unit/report/test_compare.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="compares-void-steps",
        what="steps that a run went back from are compared",
        file="report/compare/curves.py",
        before="        drop_after(self.steps, step)\n",
        after="",
        tests=(f"{_TESTS}::test_void_steps_and_pauses_count_for_nothing",),
    ),
    Mutant(
        name="pauses-are-training-time",
        what="the time between two attempts counts as training time",
        file="report/compare/curves.py",
        before="ends = [self.last_times.get(number, 0.0) for number in range(1, len(began))]",
        after="ends = began[1:]",
        tests=(f"{_TESTS}::test_void_steps_and_pauses_count_for_nothing",),
    ),
    Mutant(
        name="aligns-by-steps",
        what="runs are compared at equal steps where equal tokens were asked for",
        file="report/compare/curves.py",
        before='{"tokens": self._tokens,',
        after='{"tokens": self._steps,',
        tests=(f"{_TESTS}::test_runs_of_other_batches_and_log_lines_are_compared_at_equal_tokens",),
    ),
    Mutant(
        name="compares-losses-of-other-tokenizers",
        what="losses per token of different tokenizers are compared",
        file="report/compare/align.py",
        before='name: same is not False or name != "train/loss" for name in found',
        after="name: True for name in found",
        tests=(f"{_TESTS}::test_losses_of_other_tokenizers_are_not_compared",),
    ),
    Mutant(
        name="slope-is-noise",
        what="the fall of the loss counts as noise, so that differences seem to be less than they are",
        file="report/compare/align.py",
        before="float(np.median(np.abs(np.diff(values)))) * 1.4826 / math.sqrt(2)",
        after="float(np.std(values))",
        tests=(f"{_TESTS}::test_the_noise_has_no_part_from_a_slope_or_a_spike",),
    ),
    Mutant(
        name="pairs-other-samples",
        what="runs with other samples in their steps are compared step by step",
        file="report/compare/differing.py",
        before="    return all(first.get(key) == second.get(key) for key in keys)\n",
        after="    return True\n",
        tests=(f"{_TESTS}::test_noise_of_the_same_samples_is_in_both_runs_and_not_in_their_difference",),
    ),
    Mutant(
        name="means-over-unequal-ranges",
        what="the losses of runs with other batches are means over ranges of other widths",
        file="report/compare/align.py",
        before="    return max([window, *(one.least_window(x) for one in aligned)])\n",
        after="    return max(window, aligned[0].least_window(x))\n",
        tests=(f"{_TESTS}::test_means_are_over_equal_ranges_and_not_over_steps_before_a_loss_that_is_not_finite",),
    ),
    Mutant(
        name="no-time-without-a-head",
        what="the training time of a log without its head begins at the first start that it has",
        file="report/compare/curves.py",
        before="        if first and not self.starts and self.headless is None:\n",
        after="        if False:\n",
        tests=(f"{_TESTS}::test_a_log_without_its_head_counts_time_from_its_first_step",),
    ),
    Mutant(
        name="void-lines-in-time-and-money",
        what="time and money of a report are those of void steps until the run has passed them",
        file="report/facts.py",
        before="        drop_after(self.progress, step)\n",
        after="",
        tests=(
            "tests/unit/report/test_new_chapters.py::test_money_of_void_steps_was_spent_and_their_tokens_do_not_count",
        ),
    ),
]
