"""Faults in the limits of saves and evaluations: how they are learned, and what may take longer."""

from .mutant import Mutant

_WATCHDOG = "tests/unit/trainer/launch/test_watchdog.py"
_HEART = "tests/unit/trainer/resilience/test_heartbeat.py"
_WHOLE = f"{_WATCHDOG}::test_saves_and_evaluations_may_take_ten_times_the_longest_within_bounds"
_REPORTS = (
    "tests/unit/trainer/test_background_saves.py"
    "::test_every_rank_reports_to_the_watchdog_how_long_whole_saves_and_evaluations_took"
)

MUTANTS: list[Mutant] = [
    Mutant(
        name="saves-not-learned",
        what="a save or an evaluation that all ranks hang in is found after launch.watchdog_other_seconds alone",
        file="trainer/launch/watchdog.py",
        before="fixed or min(learned or math.inf, self._launch.watchdog_other_seconds)",
        after="fixed or self._launch.watchdog_other_seconds",
        tests=(_WHOLE,),
    ),
    Mutant(
        name="saves-without-least-limit",
        what="a save of a second hangs after ten, as on a disk that others use",
        file="trainer/launch/watchdog.py",
        before="max(LEAST * self._launch.watchdog_seconds, longest, again)",
        after="max(longest, again)",
        tests=(_WHOLE,),
    ),
    Mutant(
        name="first-save-hangs",
        what="the first save of a run has a limit that no save has shown",
        file="trainer/launch/watchdog.py",
        before="        if not self._whole[phase]:\n            return 0.0\n",
        after="",
        tests=(f"{_WATCHDOG}::test_all_that_is_no_step_has_its_own_limit_however_short_it_was",),
    ),
    Mutant(
        name="given-limit-of-saves-ignored",
        what="the limits of saves and evaluations in the run file have no effect",
        file="trainer/launch/watchdog.py",
        before="return fixed or min(",
        after="return min(",
        tests=(f"{_WATCHDOG}::test_the_run_file_may_give_the_limit_of_saves_and_evaluations",),
    ),
    Mutant(
        name="slow-disk-hangs",
        what="a save that waits for an earlier one on a disk that is slower now counts as a hang",
        file="trainer/launch/watchdog.py",
        before="self._in_flight if phase is Phase.SAVE else 0.0)",
        after="0.0)",
        tests=(f"{_WATCHDOG}::test_a_save_that_was_slow_before_training_waits_for_it_has_longer",),
    ),
    Mutant(
        name="evaluation-compiles-too-long",
        what="an evaluation that compiles for another shape counts as a hang",
        file="trainer/launch/watchdog.py",
        before="RECOMPILES * self._first_step if phase is Phase.EVALUATE else 0.0",
        after="0.0",
        tests=(f"{_WATCHDOG}::test_an_evaluation_may_compile_for_a_batch_of_another_shape",),
    ),
    Mutant(
        name="limit-without-a-reason",
        what="the event of a hang does not show what its limit follows from",
        file="trainer/launch/supervise.py",
        before="limit_reason=incident.limit_reason,",
        after='limit_reason="",',
        tests=("tests/unit/trainer/launch/test_supervise.py::test_a_hang_is_found_written_down_and_ended",),
    ),
    Mutant(
        name="stall-is-a-whole-save",
        what="the limit of saves is learned from the part of a save that training waits for",
        file="trainer/resilience/heartbeat.py",
        before=" and self._phase not in REPORTED:",
        after=":",
        tests=(f"{_HEART}::test_a_rank_reports_how_long_a_whole_save_took",),
    ),
    Mutant(
        name="two-saves-are-one",
        what="the last save of a run and the one that it waits for have the time of one",
        file="trainer/resilience/heartbeat.py",
        before="        if self._phase is phase:",
        after="        if False:",
        tests=(f"{_HEART}::test_the_end_of_the_save_that_a_rank_waited_for_is_a_sign_of_life",),
    ),
    Mutant(
        name="saves-not-reported",
        what="no rank reports how long a whole save took",
        file="trainer/save.py",
        before="    trainer.heartbeat.learn(Phase.SAVE, trainer.save_seconds)\n",
        after="",
        tests=(_REPORTS,),
    ),
    Mutant(
        name="age-of-saves-not-reported",
        what="no rank reports how old the save is that it waits for",
        file="trainer/save.py",
        before="        trainer.heartbeat.wait_for_save(background.in_flight.age)\n",
        after="",
        tests=(_REPORTS,),
    ),
    Mutant(
        name="evaluations-not-reported",
        what="no rank reports how long a whole evaluation took",
        file="trainer/log.py",
        before="    trainer.heartbeat.learn(Phase.EVALUATE, seconds)\n",
        after="",
        tests=(_REPORTS,),
    ),
]
