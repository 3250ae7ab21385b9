"""Guards of a run that are switched off, each alone: the row of the board that is about it has to be red.

python -m tests.mutants switched-off
"""

from .mutant import Mutant

_GUARDS = "tests/board/test_guards.py"
_ROWS = "tests/board/test_rows.py"
_ZOMBIE = f"{_ROWS}::test_a_row[RS30 zombie]"

MUTANTS: list[Mutant] = [
    Mutant(
        name="switched-off-watchdog",
        what="RS03 without the watchdog: nothing looks at heartbeats",
        file="trainer/launch/supervise.py",
        before="if hang := running.hang():",
        after="if (hang := None) is not None:",
        tests=(f"{_GUARDS}::test_a_stopped_rank_is_found",),
    ),
    Mutant(
        name="switched-off-ledger-check",
        what="RS10 without the check of the ledger: a checkpoint counts whatever the files of its samples hold",
        file="trainer/checkpoint/segments.py",
        before="        if not same:",
        after="        if False:",
        tests=(f"{_GUARDS}::test_a_wrong_bit_in_the_ledger_is_found",),
    ),
    Mutant(
        name="switched-off-fence",
        what="RS30 zombie without the fence of writers: ranks save although another launcher has taken over",
        file="trainer/checkpoint/fence.py",
        before="newest is not None and newest.epoch > epoch",
        after="False",
        tests=(_ZOMBIE,),
    ),
    Mutant(
        name="switched-off-fence-of-readers",
        what="RS30 zombie without the fence of readers: a checkpoint counts that was published too late",
        file="trainer/checkpoint/fence.py",
        before="if not 0 < epoch < self.epoch or adopted is None:",
        after="if epoch >= 0:",
        tests=(_ZOMBIE,),
    ),
    Mutant(
        name="switched-off-conditional-create",
        what="RS30 store without conditional creation: a manifest that comes late replaces that of another launcher",
        file="stores/objects.py",
        before='mode = "create" if new else "overwrite"',
        after='mode = "overwrite"',
        tests=(f"{_GUARDS}::test_a_commit_that_reaches_the_store_late_is_refused",),
    ),
    Mutant(
        name="switched-off-fsync",
        what="RS09 without fsync: a file of tensors gets its name while the disk may not have its bytes yet",
        file="trainer/checkpoint/verified_file.py",
        before="os.fsync(self._file.fileno())\n",
        after="self._file.flush()\n",
        tests=(f"{_ROWS}::test_a_loss_of_power_after_any_rename_costs_no_checkpoint",),
    ),
    Mutant(
        name="switched-off-back-off",
        what="RS33 without back-off: a job that gets no farther is started again at once",
        file="trainer/resilience/restarts.py",
        before="return min(_FIRST_WAIT * 2 ** (self._in_vain - 1), _LONGEST_WAIT) if self._in_vain else 0.0",
        after="return 0.0",
        tests=(f"{_GUARDS}::test_restarts_without_progress_wait_longer",),
    ),
    Mutant(
        name="switched-off-grace",
        what="RS28 without the end of launch.grace: nothing kills a rank that never stops",
        file="trainer/launch/stopping.py",
        before="now >= self.request.deadline",
        after="now < 0",
        tests=(f"{_GUARDS}::test_a_run_that_never_stops_is_killed",),
    ),
]
