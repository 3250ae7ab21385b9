"""Faults in the time of a restart by phase, and in how a plan uses it."""

from .mutant import Mutant

_CLOCK = "tests/unit/trainer/resilience/test_start_times.py"
_SUPERVISE = "tests/unit/trainer/launch/test_supervise.py"
_PLAN = "tests/unit/planner/request/test_restarts.py"
_LOOP = "tests/unit/trainer/test_run_loop.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="pieces-of-a-phase-lost",
        what="only the last piece of a phase counts",
        file="trainer/resilience/start_times.py",
        before="self._seconds.get(phase, 0.0) + now",
        after="now",
        tests=(f"{_CLOCK}::test_phases_come_in_pieces_and_cover_all_the_time",),
    ),
    Mutant(
        name="imports-counted-twice",
        what="imports of the fork server count as scheduling, too",
        file="trainer/resilience/start_times.py",
        before="self._last - given.ordered_at - given.imported",
        after="self._last - given.ordered_at",
        tests=(f"{_CLOCK}::test_what_the_launcher_knew_comes_first",),
    ),
    Mutant(
        name="warm-up-of-all-steps",
        what="all of the first line counts as warm-up",
        file="trainer/resilience/start_times.py",
        before="first - count * seconds / steps",
        after="first",
        tests=(f"{_CLOCK}::test_the_warm_up_is_what_the_first_line_took_longer",),
    ),
    Mutant(
        name="detect-from-now",
        what="the time until a lost rank was seen is not measured",
        file="trainer/launch/supervise.py",
        before="detect = seen - at",
        after="pass",
        tests=(f"{_SUPERVISE}::test_a_rank_knows_how_long_its_job_was_gone",),
    ),
    Mutant(
        name="hang-without-its-age",
        what="a hang counts as seen at once",
        file="trainer/launch/supervise.py",
        before="detect = ended.seconds  # a hang",
        after="detect = None  # a hang",
        tests=(f"{_SUPERVISE}::test_a_hang_is_as_old_as_the_newest_heartbeat",),
    ),
    Mutant(
        name="restart-of-the-first-attempt",
        what="a restarted job is measured like a first start",
        file="trainer/launch/supervise.py",
        before="running.start(self._attempt, before, check=check)",
        after="running.start(self._attempt, check=check)",
        tests=(f"{_SUPERVISE}::test_a_rank_knows_how_long_its_job_was_gone",),
    ),
    Mutant(
        name="preload-not-timed",
        what="the imports of the fork server are not measured",
        file="trainer/launch/fork_server.py",
        before="after_imports(time.monotonic() - began)",
        after="after_imports(0.0)",
        tests=(f"{_SUPERVISE}::test_attempts_share_a_fork_server_which_imports_once",),
    ),
    Mutant(
        name="load-not-timed",
        what="the loading of the state is not measured",
        file="trainer/run.py",
        before='    clock.end("load")\n',
        after="",
        tests=(f"{_LOOP}::test_callbacks_see_every_step_of_a_run_that_stops_between_lines",),
    ),
    Mutant(
        name="first-start-is-a-restart",
        what="a plan counts the first start of a run as a restart",
        file="planner/request/restarts.py",
        before='if event["seconds"].get("kill") is not None',
        after="if True",
        tests=(f"{_PLAN}::test_the_median_of_the_restarts_without_the_first_start",),
    ),
    Mutant(
        name="measured-restart-not-planned",
        what="--restart-from does not change the plan",
        file="planner/request/planning.py",
        before="replace(assumptions, restart_seconds=measured.value, restart_source=measured.formula)",
        after="replace(assumptions, restart_source=measured.formula)",
        tests=(f"{_PLAN}::test_a_plan_counts_the_measured_restarts",),
    ),
]
