"""Faults in the functions and classes of `import ingot`."""

from .mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        name="workers-of-a-data-loader",
        what="every worker of a DataLoader begins with the first step, so samples are lost and repeated",
        file="api/torch_tokens.py",
        before="self.after_step + 1 + worker, ",
        after="self.after_step + 1, ",
        tests=("tests/unit/api/test_tokens.py::test_workers_of_a_data_loader_share_the_steps_in_order",),
    ),
    Mutant(
        name="part-of-a-dataset",
        what="rank r has every n-th sample of a batch, not the r-th part, as training has it",
        file="api/tokens.py",
        before="[self.rank * per_rank : (self.rank + 1) * per_rank]",
        after="[self.rank :: self.ranks][:per_rank]",
        tests=("tests/unit/api/test_tokens.py::test_the_samples_are_those_of_training",),
    ),
    Mutant(
        name="near-copies-unverified",
        what="a text is a near copy by its estimated similarity, without comparing the sets",
        file="api/dedup.py",
        before="if similarity >= self.rules.jaccard and",
        after="if estimate >= self.rules.jaccard and",
        tests=("tests/unit/api/test_parts.py::test_a_deduper_is_as_exact_as_its_threshold",),
    ),
    Mutant(
        name="metrics-of-a-repeated-step",
        what="the metrics of a run keep the steps that a roll-back undid",
        file="api/run.py",
        before='events.RUN_STARTED else "to_step", 0)',
        after='events.RUN_STARTED else "from_step", 0)',
        tests=("tests/unit/api/test_folders.py::test_steps_that_were_trained_again_have_their_last_values",),
    ),
    Mutant(
        name="notes-of-another-machine",
        what="data that is missing here is an error in a check for another cluster",
        file="api/checking.py",
        before="if elsewhere and one.missing_here",
        after="if anywhere and one.missing_here",
        tests=("tests/unit/cli/test_check.py::test_data_counts_on_this_machine_and_is_a_note_elsewhere",),
    ),
    Mutant(
        name="forgotten-save",
        what="a loop of one's own that leaves out a checkpoint that is due goes on",
        file="api/trainer.py",
        before="self._require(not self._loop.save_is_due,",
        after="self._require(True,",
        tests=("tests/unit/api/test_trainer.py::test_a_step_that_is_not_complete_is_refused",),
    ),
    Mutant(
        name="left-loop-unjudged",
        what="the steps of a loop that is left are saved before the policy and callbacks have seen them",
        file="trainer/loop.py",
        before="        if self._recent:\n            self._write_line(saves=True)",
        after="        if not self._recent:\n            self._write_line(saves=True)",
        tests=("tests/unit/api/test_trainer.py::test_leaving_the_loop_saves_and_an_error_does_not",),
    ),
    Mutant(
        name="given-callback-unrecorded",
        what="checkpoints do not record the callbacks that a program gave, so a run continues without them unasked",
        file="trainer/run.py",
        before="recorded = given.added_to(config)",
        after="recorded = config",
        tests=("tests/unit/api/test_train_here.py::test_a_callback_with_state_is_a_part_of_the_run",),
    ),
    Mutant(
        name="model-held-by-hooks",
        what="hooks of parameters hold the model of a run that has ended, with its process groups",
        file="trainer/parallel/apply.py",
        before="            hook.remove()",
        after="            _ = hook",
        tests=("tests/unit/api/test_train_here.py::test_a_run_in_this_process_has_the_bits_of_the_command",),
    ),
]
