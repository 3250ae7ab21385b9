"""Faults in the replay that finds the first operation that is not finite."""

from .mutant import Mutant

_RUNS = "tests/unit/rehearse/test_explain_nan.py"
_WATCH = "tests/unit/rehearse/test_watch.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="masks-blamed",
        what="an infinity that an operation was given on purpose, as for a mask, counts as its fault",
        file="rehearse/replay/watch.py",
        before="elif meant and not unset",
        after="elif False and not unset",
        tests=(f"{_WATCH}::test_a_row_that_is_masked_altogether_is_blamed_on_the_softmax",),
    ),
    Mutant(
        name="masked-rows-excused",
        what="a softmax of a row of masked scores is taken for a mask",
        file="rehearse/replay/watch.py",
        before=" and not bool(made.isnan().any()):",
        after=":",
        tests=(f"{_WATCH}::test_a_row_that_is_masked_altogether_is_blamed_on_the_softmax",),
    ),
    Mutant(
        name="module-around-blamed",
        what="an operation of the backward is named by the outermost module, not by its own",
        file="rehearse/replay/watch.py",
        before="return min(around)[1]",
        after="return max(around)[1]",
        tests=(f"{_WATCH}::test_an_operation_of_the_backward_is_found_in_its_module",),
    ),
    Mutant(
        name="recorded-skips-made",
        what="the replay makes the updates that the run skipped",
        file="rehearse/replay/opened.py",
        before="return ~torch.isfinite(grad_norm) | (self.step in self.steps)",
        after="return ~torch.isfinite(grad_norm)",
        tests=(f"{_WATCH}::test_updates_that_the_run_skipped_are_skipped_again",),
    ),
    Mutant(
        name="loss-scale-of-the-next-step",
        what="the step is looked at with the loss scale that it left, half of its own",
        file="rehearse/replay/replay.py",
        before="            one.copy_(before)\n",
        after="            pass\n",
        tests=(f"{_RUNS}::test_a_loss_scale_that_is_too_large",),
    ),
    Mutant(
        name="loaded-state-trusted",
        what="weights of a checkpoint that are not finite are not looked for",
        file="rehearse/replay/replay.py",
        before="        bad = _bad_state(parts)\n",
        after="        bad = ()\n",
        tests=(f"{_RUNS}::test_a_checkpoint_with_nan_in_a_tensor",),
    ),
    Mutant(
        name="weights-before-the-load",
        what="the replay computes with the first weights, because the loaded ones are not published",
        file="rehearse/replay/opened.py",
        before="            parts.model.publish()\n            parts.callbacks.restore",
        after="            parts.callbacks.restore",
        tests=(f"{_RUNS}::test_a_token_of_one_batch_names_its_documents",),
    ),
    Mutant(
        name="zero-rows-unseen",
        what="rows of zeros in the input of a norm do not count as the cause of its overflow",
        file="report/diagnose/not_finite_causes.py",
        before="found = bool(divisor or (rows and in_norm))",
        after="found = bool(divisor)",
        tests=(f"{_RUNS}::test_norm_of_a_zero_vector",),
    ),
]
