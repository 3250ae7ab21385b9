"""Faults of drills: an oracle that sees less, a copy that is not one, a job that outlives its drill."""

from .mutant import Mutant

_ORACLES = "tests/unit/drill/test_oracles.py::"
_FAULTS = "tests/unit/drill/test_faults.py::"
_COPY = "tests/unit/drill/test_copied.py::"

MUTANTS: list[Mutant] = [
    Mutant(
        name="drill-trace-of-the-last-time",
        what="of a step that was done twice, only the last time is compared with the undisturbed run",
        file="drill/oracles.py",
        before="if step in void else ours[step]\n",
        after="if step in void else ours[step][:1]\n",
        tests=(f"{_ORACLES}test_o1_compares_bits_of_every_time_a_step_was_logged",),
    ),
    Mutant(
        name="drill-shorter-ledger",
        what="a ledger that lacks its last steps counts as equal",
        file="drill/oracles.py",
        before='return "" if len(ours) == len(reference) else',
        after='return "" if len(ours) <= len(reference) else',
        tests=(f"{_ORACLES}test_o2_and_o3_name_the_difference",),
    ),
    Mutant(
        name="drill-recovered-by-an-old-step",
        what="a run counts as recovered at a step that it had reached before the fault",
        file="drill/oracles.py",
        before='self.recovered is None and event["step"] > self.reached',
        after='self.recovered is None and event["step"] >= self.reached',
        tests=(f"{_ORACLES}test_o5_counts_from_the_fault_to_the_first_step_that_is_new",),
    ),
    Mutant(
        name="drill-any-rank-blamed",
        what="the report of a killed rank may name another one",
        file="drill/faults.py",
        before='faults = [(e["rank"], name in e["cause"])',
        after='faults = [(trial.named[0], name in e["cause"])',
        tests=(f"{_FAULTS}test_a_killed_rank_is_named_once",),
    ),
    Mutant(
        name="drill-late-watchdog",
        what="a hang may be found at any time",
        file="drill/faults.py",
        before='if faults[0]["seconds"] > limit:',
        after='if faults[0]["seconds"] < 0:',
        tests=(f"{_FAULTS}test_a_hang_is_found_by_the_watchdog_in_time_with_the_stacks_of_the_others",),
    ),
    Mutant(
        name="drill-from-the-beginning",
        what="a run that starts at step 0 after damage to its newest checkpoint counts as one that took the older one",
        file="drill/faults.py",
        before='return "" if 0 < begun < refused',
        after='return "" if 0 <= begun < refused',
        tests=(f"{_FAULTS}test_a_damaged_checkpoint_is_refused_by_name_and_the_older_one_taken",),
    ),
    Mutant(
        name="drill-store-of-the-run",
        what="the copies of a drill upload their checkpoints to the store of the run",
        file="drill/copied.py",
        before="disks=(), remote=RemoteCheckpoints())",
        after="disks=())",
        tests=(f"{_COPY}test_the_run_is_only_read_and_its_places_are_not_used",),
    ),
    Mutant(
        name="drill-empties-any-folder",
        what="a folder that is no drill's is emptied",
        file="drill/copied.py",
        before="any(root.iterdir()) and not (root / RESULT).exists()",
        after="any(root.iterdir()) and (root / RESULT).is_dir()",
        tests=(f"{_COPY}test_only_the_folder_of_an_earlier_drill_is_emptied",),
    ),
    Mutant(
        name="drill-outlived",
        what="the job of a drill goes on after a SIGKILL of the drill",
        file="drill/job.py",
        before="            die_with_parent()\n",
        after="",
        tests=("tests/e2e/test_drill.py::test_nothing_outlives_a_drill[9--9]",),
    ),
    Mutant(
        name="drill-slope-without-starts",
        what="the growth of memory is fitted without the own start of each process, so it depends on their order",
        file="drill/leaks.py",
        before="            mean_memory = sum(one[1] for one in life) / len(life)\n",
        after="            mean_memory = lives[0][0][1]\n            mean_at = 0.0\n",
        tests=("tests/unit/drill/test_soak.py::test_memory_has_one_slope_over_all_lives",),
    ),
    Mutant(
        name="drills-share-a-folder",
        what="a drill empties the folder in which another one works",
        file="drill/copied.py",
        before="if is_locked(lock_of(root)):",
        after="if False:",
        tests=("tests/unit/drill/test_copied.py::test_two_drills_do_not_share_a_folder",),
    ),
    Mutant(
        name="drill-variants-unasked",
        what="a row of a drill plays its variants, which nobody asked for",
        file="drill/drill.py",
        before="else [fault for fault in FAULTS if fault.id == row]",
        after="else faults_of(row)",
        tests=("tests/unit/drill/test_faults.py::test_rows_are_chosen_by_the_ids_of_the_board",),
    ),
    Mutant(
        name="drill-silent-until-its-end",
        what="a drill with --json shows nothing before its end",
        file="cli/drill.py",
        before="_ToStandardError() if terminal.json_mode and not terminal.quiet else terminal",
        after="terminal",
        tests=("tests/unit/cli/test_drill.py::test_json_is_alone_on_standard_output_and_progress_on_standard_error",),
    ),
    Mutant(
        name="drill-taken-for-a-run",
        what="ingot status shows the folder of a drill as a run that never started",
        file="drill/state.py",
        before="    return (root / RESULT).is_file()",
        after="    return False",
        tests=("tests/unit/drill/test_state.py::test_a_drill_is_no_run_and_names_its_runs",),
    ),
]
