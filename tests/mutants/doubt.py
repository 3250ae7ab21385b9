"""Faults in what the guard goes back to: proven checkpoints, the order of measures, and held-out text before saves."""

from .mutant import Mutant

_LADDER = "tests/unit/trainer/guard/test_ladder.py"
_RUNS = "tests/unit/trainer/guard/test_guarded_runs.py"
_SANITY = "tests/unit/trainer/guard/test_sanity.py"
_RETENTION = "tests/unit/trainer/checkpoint/test_retention.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="unproven-without-doubt",
        what="a checkpoint shortly before the trouble counts as sound",
        file="schema/guard_record.py",
        before="if step > min((one.proven_to for one in later), default=step):",
        after="if False:",
        tests=(f"{_LADDER}::test_doubt_about_checkpoints", f"{_RUNS}::test_a_row_of_batches_that_hurt_is_passed"),
    ),
    Mutant(
        name="proven-checkpoint-removed",
        what="retention keeps no checkpoint that is proven",
        file="trainer/checkpoint/retention.py",
        before='    wanted[proven] = f"the newest with {proven_steps} steps after it"\n',
        after="",
        tests=(f"{_RETENTION}::test_what_the_rules_keep",),
    ),
    Mutant(
        name="one-bound-of-retention",
        what="retention keeps no checkpoint for a run that has none proven before the trouble",
        file="schema/guard_record.py",
        before="return (rows[-1].proven_to, rows[-1].first - 2, *may_be)",
        after="return (rows[-1].proven_to, *may_be)",
        tests=(f"{_RUNS}::test_an_update_that_harmed_the_weights_is_undone",),
    ),
    Mutant(
        name="proven-one-step-late",
        what="retention keeps a checkpoint that is proven, but for trouble in the step before the next",
        file="trainer/checkpoint/retention.py",
        before="proven_to(newest + 1, proven_steps, 0)",
        after="proven_to(newest + 2, proven_steps, 0)",
        tests=(f"{_RETENTION}::test_a_run_always_has_a_proven_checkpoint_to_go_back_to",),
    ),
    Mutant(
        name="removed-before-it-is-proven",
        what="retention removes every checkpoint before its steps follow, if few are kept",
        file="trainer/checkpoint/retention.py",
        before="waits = waits if proven_steps else 0",
        after="waits = 0",
        tests=(f"{_RETENTION}::test_a_run_always_has_a_proven_checkpoint_to_go_back_to",),
    ),
    Mutant(
        name="no-earlier-step",
        what="the step before the trouble is not passed",
        file="trainer/guard/ladder.py",
        before="            first = max(began - 1, 1)\n",
        after="            first = began\n",
        tests=(f"{_RUNS}::test_an_update_that_harmed_the_weights_is_undone",),
    ),
    Mutant(
        name="clip-limit-stays",
        what="the limit of the gradient norm stays when the learning rate is lowered",
        file="trainer/step.py",
        before="limit = optim.clip_norm * limit_factor(parts.policy.measures(), step, optim.lr)",
        after="limit = optim.clip_norm",
        tests=(f"{_RUNS}::test_lower_rates_come_with_a_lower_limit",),
    ),
    Mutant(
        name="sanity-not-marked",
        what="a checkpoint whose held-out loss rose is saved as healthy",
        file="trainer/save.py",
        before="health=trainer.policy.health() if sanity is None else sanity.health(trainer.policy.health()),",
        after="health=trainer.policy.health(),",
        tests=(f"{_SANITY}::test_a_run_does_not_continue_from_weights_that_lost_what_they_had_learned",),
    ),
    Mutant(
        name="sanity-state-lost",
        what="a run that continues has no loss to compare with",
        file="trainer/guards.py",
        before="SanityJudge(config.guard, restored.guard.sanity if restored else SanityState(), ",
        after="SanityJudge(config.guard, SanityState(), ",
        tests=(_SANITY,),
    ),
    Mutant(
        name="sanity-of-saves-left-out",
        what="held-out text is scored for a save that is left out, and what it shows is lost",
        file="trainer/loop.py",
        before="sanity.due(self.done) and settle(self.trainer, wait=last):",
        after="sanity.due(self.done):",
        tests=(
            "tests/unit/trainer/test_background_saves.py::test_a_save_that_is_due_while_another_is_written_is_left_out",
        ),
    ),
    Mutant(
        name="proven-by-a-suspect-one",
        what="a suspect checkpoint that is left from before a way back makes older ones count as proven",
        file="trainer/checkpoint/retention.py",
        before="newest = next((one for one in ordered if not is_suspect(one) and is_sound(one)), 0)",
        after="newest = ordered[0]",
        tests=(f"{_RETENTION}::test_what_the_rules_keep",),
    ),
    Mutant(
        name="answer-to-a-run-that-went-on",
        what="a run that went on after a stop takes a measure against it later",
        file="trainer/checkpoint/resumable.py",
        before="return any(one.manifest and measure in one.manifest.guard.measures for one in listed)",
        after="return False",
        tests=(f"{_RUNS}::test_a_person_chooses_the_measure",),
    ),
    Mutant(
        name="sanity-of-a-bad-batch",
        what="held-out text that is unlike the training batches marks checkpoints",
        file="trainer/guard/sanity.py",
        before="if gap and training is not None and math.isfinite(loss) and loss > training + gap:",
        after="if False:",
        tests=(f"{_SANITY}::test_a_batch_unlike_the_training_batches_judges_nothing_and_says_so_once",),
    ),
    Mutant(
        name="sanity-of-a-repeated-batch",
        what="held-out text that repeats itself marks checkpoints",
        file="trainer/guard/sanity.py",
        before="if self._batch.repeated <= MOST_REPEATED:",
        after="if True:",
        tests=(f"{_SANITY}::test_a_run_with_a_bad_batch_says_so_and_marks_nothing",),
    ),
    Mutant(
        name="sanity-of-another-batch",
        what="the loss of held-out text is compared with that of other text, which the run had before",
        file="trainer/guard/sanity.py",
        before='if state.batch not in ("", self._batch.identity):',
        after="if False:",
        tests=(f"{_SANITY}::test_a_batch_unlike_the_training_batches_judges_nothing_and_says_so_once",),
    ),
    Mutant(
        name="sanity-follows-the-rise",
        what="the loss of a suspect checkpoint becomes the one to compare with",
        file="trainer/guard/sanity.py",
        before="self.state = replace(self.state, doubted=self.state.doubted + 1, unlike=False)",
        after="self.state = replace(self.state, step=step, loss=loss, doubted=self.state.doubted + 1, unlike=False)",
        tests=(f"{_SANITY}::test_a_loss_that_rose_makes_checkpoints_suspect_until_it_is_the_level",),
    ),
]
