"""Faults in the diagnosis of slow runs, which runs that something around them slows down must show."""

from .mutant import Mutant

_RUNS = "tests/e2e/test_slow_causes.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="late-link-names-no-run",
        what="a run whose ranks wait for a late link is of no class",
        file="report/diagnose/causes.py",
        before="seconds = blocked.least if case.on_cpu and blocked else sum(",
        after="seconds = waits['pipeline'].least if case.on_cpu and blocked else sum(",
        tests=(f"{_RUNS}::test_a_late_link_between_two_hosts_makes_a_run_communication_bound",),
    ),
    Mutant(
        name="late-storage-names-no-run",
        what="the wait for data of the rank that waits most is lost where all ranks were timed",
        file="report/diagnose/evidence.py",
        before='return spread.most if spread else data.progress[step]["data_wait_seconds"]',
        after='return 0.0 if spread else data.progress[step]["data_wait_seconds"]',
        tests=(f"{_RUNS}::test_storage_that_answers_late_makes_a_run_data_bound",),
    ),
    Mutant(
        name="throttled-rank-names-no-run",
        what="a rank that the run found to be slow explains no step",
        file="report/diagnose/causes.py",
        before="if slow := _slow_ranks(case):",
        after="if slow := {}:",
        tests=(f"{_RUNS}::test_a_rank_that_gets_a_quarter_of_its_time_holds_the_run_up",),
    ),
]
