"""Faults in the readers of faults: what ended a run, what recovered, and how long a run is silent."""

from .mutant import Mutant

_FACTS = "tests/unit/report/test_facts.py"
_STATUS = "tests/unit/report/test_status.py"
_NODES = "tests/unit/trainer/launch/test_nodes.py"


def _mutant(name: str, what: str, before: str, after: str, *tests: str, file: str = "report/faults.py") -> Mutant:
    return Mutant(name=name, what=what, file=file, before=before, after=after, tests=tests)


MUTANTS: list[Mutant] = [
    _mutant(
        "recovery-takes-the-time-of-a-later-start", "a recovery of 4 s takes as long as the next planned restart",
        "        self._timed = None\n        self._led_to", "        self._led_to",
        f"{_FACTS}::test_later_starts_do_not_change_the_time_of_a_recovery",
    ),
    _mutant(
        "recovery-takes-the-time-of-a-launch", "the recovery from a lost leader lacks the time without a leader",
        ' and seconds.get("kill") is not None', "",
        f"{_FACTS}::test_the_time_of_a_launch_is_not_that_of_a_recovery",
    ),
    _mutant(
        "first-of-two-faults-named", "ingot status names a fault that the run survived",
        'failure=fault_of(last["end"]).text if', "failure=log.faults.found[0].text if",
        f"{_STATUS}::test_of_two_faults_the_one_that_ended_the_run_is_named", file="report/status.py",
    ),
    _mutant(
        "next-leader-is-a-new-command", "a run that goes on under another leader counts as ended",
        "            if who in self._members:", "            if not who:",
        f"{_FACTS}::test_the_time_of_a_launch_is_not_that_of_a_recovery",
    ),
    _mutant(
        "joined-launcher-forgotten", "a job that goes on under a leader from outside counts as ended",
        "            if who in self._earlier:", "            if not who:",
        f"{_FACTS}::test_a_job_that_is_lost_on_all_nodes_ended_its_command",
    ),
    _mutant(
        "late-join-unseen", "a leader that steps down ends its job, if the ranks of the next one begin before it joins",
        "                self._take_back_end()\n", "",
        f"{_FACTS}::test_a_job_goes_on_when_a_leader_that_stepped_down_joins_the_next_one",
    ),
    _mutant(
        "late-join-after-a-fault", "a fault before a leader stepped down does not recover if the next one has one",
        "            if self._led_to is None:\n                self._open[:0] = self._left\n", "",
        f"{_FACTS}::test_a_job_goes_on_when_a_leader_that_stepped_down_joins_the_next_one",
    ),
    _mutant(
        "first-attempt-of-the-next-leader", "each leader begins a command, because it counts its attempts from 0",
        ' == 0 and not self._led', " == 0", f"{_NODES}::test_another_node_leads_when_the_leader_is_lost",
    ),
    _mutant(
        "attempt-zero-unseen", "a pause of hours counts as a recovery",
        '        return event.get("attempt") == 0 and not self._led', "        return False",
        f"{_FACTS}::test_a_fault_after_which_a_new_command_continues_is_not_recovered",
    ),
    _mutant(
        "command-without-ranks-unseen", "a command whose ranks never began is the same as the one before",
        "if self._new_command or not self._restarted:", "if self._new_command:",
        f"{_FACTS}::test_a_new_command_whose_first_attempt_fails_recovers_from_that_only",
    ),
    _mutant(
        "steps-of-two-faults-counted-twice", "a recovery that needed two attempts repeated its steps twice",
        "return 0 if self.before_training else max(", "return max(",
        f"{_FACTS}::test_a_restart_that_ends_in_another_fault_is_two_faults_and_one_recovery",
    ),
    _mutant(
        "end-seen-by-the-next-command", "a loss of power was eight hours later than it was",
        "        if kind in _SIGNS:", "        if kind != kinds.RANK_STARTED:",
        f"{_FACTS}::test_an_end_without_an_event_is_as_old_as_the_last_sign_of_training",
    ),
    _mutant(
        "restart-counts-as-the-end", "a report made during a restart says that the command ended",
        "fault.by_command or (fault.is_open and not running)", "fault.by_command or fault.is_open",
        f"{_FACTS}::test_while_a_run_starts_again_its_fault_has_not_ended_the_command",
    ),
    _mutant(
        "steps-of-a-new-command-not-counted", "explain slow and the report count other steps",
        "for fault in data.faults)  # a new command", "for fault in data.faults if fault.recovered)  # a new command",
        f"{_FACTS}::test_steps_trained_again_after_a_new_command_are_counted_everywhere",
        file="report/diagnose/evidence.py",
    ),
    _mutant(
        "old-line-of-a-new-attempt", "a run that started a second ago had no step for hours",
        "self._since, self._has_line = event[\"time\"], False", "pass",
        f"{_STATUS}::test_a_job_that_starts_again_is_late_only_after_the_time_of_a_start", file="report/silence.py",
    ),
    _mutant(
        "start-never-late", "a run that hangs in its start stays without a warning",
        "limit = max(limit, run.launch.watchdog_other_seconds)", "return None",
        "tests/unit/watch/test_live.py::test_a_run_that_was_just_started_again_is_not_late", file="report/silence.py",
    ),
]  # fmt: skip
