"""Faults in when a run saves, and what: intervals of time, the vote of rank 0, and saves of the weights alone."""

from .mutant import Mutant

_SCHEDULE = "tests/unit/trainer/test_save_schedule.py"
_BY_TIME = f"{_SCHEDULE}::test_saves_by_time_are_after_the_same_step_on_all_ranks_and_change_no_number"

MUTANTS: list[Mutant] = [
    Mutant(
        name="first-save-after-the-whole-interval",
        what="the first checkpoint of an attempt comes after the whole interval: runs that fail before have none",
        file="trainer/save_schedule.py",
        before="self.restart(now, SOON_SECONDS)",
        after="self.restart(now)",
        tests=(f"{_SCHEDULE}::test_the_first_save_of_an_attempt_comes_soon_and_later_ones_after_the_whole_interval",),
    ),
    Mutant(
        name="failed-save-waits",
        what="after a save that failed, the next one comes after the whole interval",
        file="trainer/save_schedule.py",
        before="timer.restart(self._clock(), SOON_SECONDS)",
        after="timer.restart(self._clock())",
        tests=(f"{_SCHEDULE}::test_a_failed_save_is_tried_again_soon",),
    ),
    Mutant(
        name="each-rank-has-a-clock",
        what="the clocks of all ranks decide when a save is due",
        file="trainer/save_schedule.py",
        before="        if not self._decides:\n            return 0\n        now",
        after="        now",
        tests=(f"{_SCHEDULE}::test_only_the_clock_of_rank_0_counts", _BY_TIME),
    ),
    Mutant(
        name="clock-not-agreed",
        what="ranks save by their own vote, not by the result of the vote",
        file="trainer/loop.py",
        before="trainer.schedule.agree(due)",
        after="trainer.schedule.agree(vote)",
        tests=(_BY_TIME,),
    ),
    Mutant(
        name="weights-after-a-checkpoint",
        what="a full checkpoint does not count as a save of the weights",
        file="trainer/save_schedule.py",
        before="for restarted in (FULL, WEIGHTS) if kind == FULL else (WEIGHTS,):",
        after="for restarted in (kind,):",
        tests=(f"{_SCHEDULE}::test_a_full_checkpoint_counts_as_a_save_of_the_weights", _BY_TIME),
    ),
    Mutant(
        name="weights-displace-a-checkpoint",
        what="a full checkpoint that is due while the weights are written is left out until the next one",
        file="trainer/save_schedule.py",
        before="if kind == FULL and self._last_begun == WEIGHTS:",
        after="if kind == FULL and self._last_begun == FULL:",
        tests=(
            f"{_SCHEDULE}::test_a_full_checkpoint_that_was_left_out_takes_the_place_of_the_next_save",
            f"{_SCHEDULE}::test_a_full_checkpoint_that_is_due_while_weights_are_written_follows_them",
        ),
    ),
    Mutant(
        name="auto-by-the-last-stall",
        what='with "auto", one slow save decides on the interval',
        file="trainer/save_schedule.py",
        before="stall, mttf = median(timer.stalls),",
        after="stall, mttf = timer.stalls[-1],",
        tests=(f"{_SCHEDULE}::test_auto_saves_after_a_minute_and_then_at_dalys_interval_of_the_median_stall",),
    ),
    Mutant(
        name="auto-below-a-write",
        what='with "auto", saves are due more often than they can be written',
        file="theory/failures.py",
        before="    if best < least:\n        return Term(least,",
        after="    if best < 0:\n        return Term(least,",
        tests=(f"{_SCHEDULE}::test_auto_waits_at_least_for_the_write",),
    ),
    Mutant(
        name="weights-with-moments",
        what="a save of the weights alone has the optimizer's state, too",
        file="trainer/checkpoint/save.py",
        before="full = kind == FULL\n",
        after="full = True\n",
        tests=(_BY_TIME,),
    ),
    Mutant(
        name="leftovers-of-weights",
        what="half written saves of the weights alone stay on the disk for ever",
        file="trainer/checkpoint/folders.py",
        before="for saves in (folder.of(FULL), folder.of(WEIGHTS)):",
        after="for saves in (folder.of(FULL),):",
        tests=("tests/unit/trainer/checkpoint/test_save.py::test_leftovers_of_killed_saves_are_named",),
    ),
    Mutant(
        name="older-weights-read",
        what="of a run, an older checkpoint is evaluated and exported instead of newer weights",
        file="trainer/checkpoint/folders.py",
        before="candidate_folders(folder.checkpoints) + candidate_folders(folder.weights.checkpoints)",
        after="candidate_folders(folder.checkpoints)",
        tests=("tests/unit/trainer/test_trained.py::test_the_newest_weights_are_read_and_those_that_are_named",),
    ),
    Mutant(
        name="weights-shown-as-resumable",
        what="ingot ckpt ls says that training continues from a save of the weights alone",
        file="trainer/launch/inspect.py",
        before="c.damage or WEIGHTS_ALONE)",
        after="c.damage or RESUMES_HERE)",
        tests=("tests/unit/trainer/launch/test_inspect.py::test_saves_of_the_weights_are_listed_and_named",),
    ),
    Mutant(
        name="weights-among-checkpoints",
        what="a run continues from a save of the weights alone that was moved among its checkpoints",
        file="trainer/checkpoint/rules.py",
        before="and (holds == [WEIGHTS]) != (manifest.kind == WEIGHTS):",
        after="and (holds == [WEIGHTS]) > (manifest.kind == WEIGHTS):",
        tests=("tests/unit/trainer/checkpoint/test_manifest.py::test_weights_alone_are_no_checkpoint",),
    ),
]
