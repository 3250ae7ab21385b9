"""Faults in evaluation in the background: which save is scored, when, within which limits, and what follows."""

from .mutant import Mutant

_DUE = "tests/unit/trainer/background_eval/test_due.py"
_PROCESS = "tests/unit/trainer/background_eval/test_process.py"
_LAUNCH = "tests/unit/trainer/launch/test_evaluations.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="evaluates-doubtful-saves",
        what="a save whose weights are suspect is evaluated",
        file="trainer/background_eval/due.py",
        before=" and not grade_of_doubt(path):",
        after=":",
        tests=(f"{_DUE}::test_a_save_that_is_unfinished_or_in_doubt_is_passed_over",),
    ),
    Mutant(
        name="evaluates-void-steps",
        what="saves of steps that the run went back from are still evaluated",
        file="trainer/background_eval/due.py",
        before="self._saves = {one: save for one, save in self._saves.items() if one <= step}",
        after="pass",
        tests=(f"{_DUE}::test_saves_of_steps_that_the_run_went_back_from_are_void",),
    ),
    Mutant(
        name="interval-from-every-launcher",
        what="each start of the launcher begins the interval again: short jobs are never evaluated",
        file="trainer/background_eval/due.py",
        before='event["time"] if self._since is None else self._since',
        after='event["time"]',
        tests=(f"{_DUE}::test_the_first_is_an_interval_after_the_run_began_also_in_a_later_launcher",),
    ),
    Mutant(
        name="failed-evaluation-again",
        what="a save whose evaluation failed is evaluated again and again",
        file="trainer/background_eval/due.py",
        before='            self._evaluated = event["step"]\n',
        after='            self._evaluated = self._evaluated if event["reason"] else event["step"]\n',
        tests=(f"{_DUE}::test_the_next_is_an_interval_after_the_last_one_began_and_of_another_save",),
    ),
    Mutant(
        name="no-deadline-of-evaluations",
        what="an evaluation that hangs is never ended",
        file="trainer/launch/evaluations.py",
        before="is_late = is_late or time.monotonic() > end",
        after="is_late = False",
        tests=(f"{_LAUNCH}::test_a_late_process_ends_with_all_that_it_started",),
    ),
    Mutant(
        name="late-evaluation-leaves-children",
        what="of an evaluation that hangs only its first process is ended",
        file="trainer/launch/evaluations.py",
        before="os.killpg(self._process.pid, signal.SIGKILL)",
        after="self._process.kill()",
        tests=(f"{_LAUNCH}::test_a_late_process_ends_with_all_that_it_started",),
    ),
    Mutant(
        name="logs-void-results",
        what="the results of a step that the run went back from are logged",
        file="trainer/launch/evaluations.py",
        before="is_void = self._due.saved_at(step) != saved_at",
        after="is_void = False",
        tests=(f"{_LAUNCH}::test_results_of_a_step_that_the_run_went_back_from_are_not_logged",),
    ),
    Mutant(
        name="removed-save-costs-the-evaluation",
        what="a save that is removed while it is read costs the evaluation of this interval",
        file="trainer/launch/evaluations.py",
        before="if GONE in results[-1] and tries_left:",
        after="if False:",
        tests=(f"{_LAUNCH}::test_a_save_that_was_removed_while_it_was_read_is_replaced_by_the_newest",),
    ),
    Mutant(
        name="evaluations-end-with-an-error",
        what="a run folder that does not answer once ends all evaluations of the launcher",
        file="trainer/launch/evaluations.py",
        before="                self._ends.wait(_PAUSE_SECONDS)\n",
        after="                return\n",
        tests=(f"{_LAUNCH}::test_a_run_folder_that_fails_once_does_not_end_the_evaluations",),
    ),
    Mutant(
        name="unpins-what-a-user-pinned",
        what="a checkpoint that a user pinned is unpinned when a better one comes",
        file="trainer/launch/evaluations.py",
        before='"pinned": not was_pinned,',
        after='"pinned": True,',
        tests=(f"{_LAUNCH}::test_the_best_checkpoint_is_pinned_and_the_one_before_it_is_not_any_more",),
    ),
    Mutant(
        name="evaluation-survives-its-launcher",
        what="an evaluation whose launcher ended as it began goes on",
        file="trainer/background_eval/process.py",
        before="if os.getppid() != int(launcher):",
        after="if False:",
        tests=(f"{_PROCESS}::test_its_limits_hold_and_what_it_finds_is_its_reason",),
    ),
    Mutant(
        name="evaluation-without-limit-of-memory",
        what="an evaluation takes all memory of the machine",
        file="trainer/background_eval/process.py",
        before="resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))",
        after="pass",
        tests=(f"{_PROCESS}::test_its_limits_hold_and_what_it_finds_is_its_reason",),
    ),
    Mutant(
        name="kernel-kills-a-rank-first",
        what="when memory runs out, the kernel kills a rank and not the evaluation",
        file="trainer/background_eval/process.py",
        before='_OOM_SCORE.write_text("1000")',
        after='_OOM_SCORE.write_text("0")',
        tests=(f"{_PROCESS}::test_its_limits_hold_and_what_it_finds_is_its_reason",),
    ),
]
