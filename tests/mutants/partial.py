"""Mutants of partial restarts."""

from .mutant import Mutant

_PARTIAL = "tests/unit/trainer/launch/test_partial.py"
_NODES = "tests/unit/trainer/launch/test_nodes.py"
_E2E = "tests/e2e/test_recovery.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="kept-ranks-killed",
        what="ranks that wait for the next attempt are killed with the others",
        file="trainer/launch/local.py",
        before="set(self.left.values()) if keep else set()",
        after="set[int]()",
        tests=(f"{_PARTIAL}::test_only_the_lost_rank_gets_a_new_process",),
    ),
    Mutant(
        name="full-restart-keeps-ranks",
        what="ranks that wait survive a restart of all ranks",
        file="trainer/launch/local.py",
        before="set(self.left.values()) if keep else set()",
        after="set(self.left.values())",
        tests=(f"{_PARTIAL}::test_a_second_failure_at_the_same_step_replaces_all",),
    ),
    Mutant(
        name="hung-rank-not-killed-first",
        what="the peers of a stopped rank wait for it until they are killed as well",
        file="trainer/launch/local.py",
        before="            _kill([beat.pid for rank in failed if",
        after="            ([beat.pid for rank in failed if",
        tests=(f"{_PARTIAL}::test_a_stopped_rank_is_the_only_one_that_is_replaced",),
    ),
    Mutant(
        name="leave-without-end",
        what="the supervisor waits for a rank that never leaves its peers",
        file="trainer/launch/local.py",
        before="while self.running() and time.monotonic() < deadline:",
        after="while self.running():",
        tests=(f"{_PARTIAL}::test_a_rank_that_does_not_leave_its_peers_is_replaced",),
    ),
    Mutant(
        name="partial-at-the-same-step",
        what="a failure that repeats at its step is always met by a partial restart",
        file="trainer/launch/supervise.py",
        before='keep = self._launch.restart == "partial" and ended.step > self._failed_at',
        after='keep = self._launch.restart == "partial"',
        tests=(f"{_PARTIAL}::test_a_second_failure_at_the_same_step_replaces_all",),
    ),
    Mutant(
        name="log-of-the-last-attempt",
        what="a rank that starts again goes on to write to the log of the attempt before",
        file="trainer/resilience/again.py",
        before="        redirect_errors(self.log)\n",
        after="",
        tests=(f"{_PARTIAL}::test_only_the_lost_rank_gets_a_new_process",),
    ),
    Mutant(
        name="groups-kept",
        what="a rank that starts again stays in its old groups, and those that wait for it do not lose it",
        file="trainer/resilience/again.py",
        before="        stop()  # peers",
        after="        pass  # peers",
        tests=(f"{_E2E}::test_a_rank_keeps_its_process_when_another_is_lost",),
    ),
    Mutant(
        name="calls-of-groups-that-are-gone",
        what="the collectives of the attempt before count as those of the new groups",
        file="trainer/resilience/reports.py",
        before='if entry["time_created_ns"] > _forgotten]',
        after="]",
        tests=("tests/unit/trainer/resilience/test_again.py::test_collectives_of_groups_that_are_gone_are_forgotten",),
    ),
    Mutant(
        name="model-of-the-last-attempt-kept",
        what="an error keeps the model of the attempt before, and with it its memory",
        file="trainer/resilience/again.py",
        before="        traceback.clear_frames(error.__traceback__)\n",
        after="",
        tests=("tests/unit/trainer/resilience/test_again.py::test_what_an_error_and_its_causes_hold_is_released",),
    ),
    Mutant(
        name="node-ends-all-its-ranks",
        what="another node than the leader's does not keep its ranks",
        file="trainer/launch/node.py",
        before='self._running.end_attempt(message["failed"], keep=message["keep"])',
        after="self._running.end_attempt()",
        tests=(f"{_NODES}::test_the_rank_of_another_node_keeps_its_process[0]",),
    ),
    Mutant(
        name="children-cancel-the-keep",
        what="a rank that has started a process does not keep its own",
        file="trainer/launch/local.py",
        before="if not _descends(pid, kept)]",
        after="]",
        tests=(f"{_PARTIAL}::test_a_rank_keeps_its_children",),
    ),
    Mutant(
        name="end-of-an-earlier-attempt",
        what="the end of a rank that had left the attempt before counts in the next one",
        file="trainer/launch/local.py",
        before='if report["of"] == self._attempt:',
        after="if True:",
        tests=(f"{_PARTIAL}::test_a_rank_that_ends_while_it_waits_is_not_lost_again",),
    ),
    Mutant(
        name="rank-outlives-its-server",
        what="a rank that is stopped before its module runs outlives the launcher and the fork server",
        file="trainer/launch/fork_server.py",
        before="        die_with_parent()\n        if os.getppid() != server:\n            os._exit(1)\n",
        after="",
        tests=(
            "tests/unit/trainer/launch/test_supervise.py::test_a_rank_that_is_stopped_before_its_module_runs_ends_with_its_server",
        ),
    ),
    Mutant(
        name="stopped-fork-server",
        what="a supervisor waits for ever for a fork server that is stopped",
        file="trainer/launch/local.py",
        before="        if self._idle or self._all_begun() or state_of(server) not in STOPPED:\n",
        after="        if True:\n",
        tests=(
            "tests/unit/trainer/launch/test_supervise.py::test_a_fork_server_that_is_stopped_before_its_ranks_begin_is_killed",
        ),
    ),
]
