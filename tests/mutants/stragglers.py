"""Faults in the measurement of how long ranks wait for each other, and in the judgment of who is slow."""

from .mutant import Mutant

_WATCH = "tests/unit/trainer/telemetry/test_stragglers.py"
_RUNS = "tests/unit/trainer/test_stragglers.py"
_WAITING = "tests/unit/trainer/mesh/test_waiting.py"
_STATUS = "tests/unit/report/test_status.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="waits-for-ranks-not-timed",
        what="a rank that waits for others counts as one that works",
        file="trainer/mesh/waiting.py",
        before="self.seconds += time.monotonic() - began",
        after="pass",
        tests=(f"{_WAITING}::test_blocking_collectives_and_waits_for_started_ones_count",),
    ),
    Mutant(
        name="operators-not-timed",
        what="waits for the operators that the compiler can see are not counted",
        file="trainer/mesh/collectives.py",
        before="if torch.compiler.is_compiling() or waiting.running is None:",
        after="if True:",
        tests=(f"{_WAITING}::test_operators_of_eager_code_count",),
    ),
    Mutant(
        name="saving-threads-timed",
        what="collectives of a thread that saves count as waits of training",
        file="trainer/mesh/waiting.py",
        before="if threading.get_ident() != self._thread:",
        after="if False:",
        tests=(f"{_WAITING}::test_other_threads_do_not_count",),
    ),
    Mutant(
        name="wait-clock-left-running",
        what="a run leaves its clock in the process of its program",
        file="trainer/mesh/waiting.py",
        before="dist.Work.wait, self._wait, running = self._wait, None, None",
        after="running = None",
        tests=(f"{_WAITING}::test_a_stopped_clock_leaves_torch_as_it_was",),
    ),
    Mutant(
        name="own-time-with-waits",
        what="the time in which a rank waits for others is its own",
        file="trainer/log.py",
        before="since = time.monotonic() - self.began.wall - (self.waits.seconds - self.waited_before)",
        after="since = time.monotonic() - self.began.wall",
        tests=(f"{_RUNS}::test_a_wait_for_the_slow_rank_is_no_work",),
    ),
    Mutant(
        name="jitter-ignored",
        what="ranks whose times differ much from step to step are called slow",
        file="trainer/telemetry/stragglers.py",
        before="rare * variance / (2 * self._tolerated)",
        after="0.0",
        tests=(f"{_WATCH}::test_healthy_ranks_with_a_fifth_of_jitter_are_never_named",),
    ),
    Mutant(
        name="pauses-count-in-full",
        what="one long pause makes a straggler",
        file="trainer/telemetry/stragglers.py",
        before="np.clip(excess - self._tolerated, -STEP_WEIGHT, STEP_WEIGHT)",
        after="(excess - self._tolerated)",
        tests=(f"{_WATCH}::test_pauses_are_no_straggler",),
    ),
    Mutant(
        name="factor-not-tolerated",
        what="launch.straggler_factor has no effect",
        file="trainer/telemetry/stragglers.py",
        before="self._tolerated = math.log(factor)",
        after="self._tolerated = math.log(1.2)",
        tests=(f"{_WATCH}::test_what_is_tolerated_is_a_setting",),
    ),
    Mutant(
        name="stages-compared",
        what="ranks of different pipeline stages are compared",
        file="trainer/telemetry/stragglers.py",
        before="np.concatenate([median_of_others(values[group]) for group in self._groups])",
        after="median_of_others(values[self._judged])",
        tests=(f"{_WATCH}::test_ranks_are_compared_with_those_that_have_the_same_work",),
    ),
    Mutant(
        name="stages-in-one-group",
        what="the mesh gives ranks of different pipeline stages as peers",
        file="trainer/mesh/mesh.py",
        before=".permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)",
        after=".permute(3, 0, 1, 2, 4).flatten(1)",
        tests=("tests/unit/trainer/mesh/test_mesh.py::test_ranks_with_the_same_work",),
    ),
    Mutant(
        name="phase-always-compute",
        what="a rank that waits for its data is reported to compute longer",
        file="trainer/telemetry/stragglers.py",
        before='phase="data" if in_data else "compute"',
        after='phase="compute"',
        tests=(f"{_WATCH}::test_the_phase_is_the_part_that_is_longer",),
    ),
    Mutant(
        name="straggler-without-end",
        what="a rank that recovered stays slow",
        file="trainer/telemetry/stragglers.py",
        before="if excess < self._tolerated / 2:",
        after="if False:",
        tests=(f"{_WATCH}::test_it_is_reported_once_until_it_changes_and_when_it_ends",),
    ),
    Mutant(
        name="first-line-counts",
        what="the first steps of an attempt, which compile, make a straggler",
        file="trainer/telemetry/stragglers.py",
        before="if self._lines == 1 or not",
        after="if not",
        tests=(f"{_WATCH}::test_the_first_line_of_an_attempt_does_not_count",),
    ),
    Mutant(
        name="slow-after-a-restart",
        what="status shows ranks of an earlier attempt as slow",
        file="report/status.py",
        before="            self.slow.clear()\n",
        after="",
        tests=(f"{_STATUS}::test_slow_ranks_until_they_recover_or_start_again",),
    ),
    Mutant(
        name="recovered-ranks-explain",
        what="ranks that recovered explain why steps are slow",
        file="report/diagnose/causes.py",
        before='and not event.get("ended", True)',
        after="",
        tests=("tests/unit/report/diagnose/test_slow.py::test_ranks_that_the_run_found_to_be_slow_are_the_stragglers",),
    ),
]
