"""Mutants of the health of machines."""

from .mutant import Mutant

_HEALTH = "tests/unit/machine/test_health.py"
_NODES = "tests/unit/trainer/launch/test_nodes.py"
_SUPERVISE = "tests/unit/trainer/launch/test_supervise.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="wrong-memory-is-only-drained",
        what="a double-bit error counts as a fault after which the run may save",
        file="machine/health/rules.py",
        before="        return HealthVerdict.DISCARD\n",
        after="        return HealthVerdict.DRAIN\n",
        tests=(f"{_HEALTH}::test_the_consequence_of_an_xid",),
    ),
    Mutant(
        name="corrected-errors-for-ever",
        what="corrected memory errors of weeks add up until they look like a rate",
        file="machine/health/rules.py",
        before="while recent[0][0] < now - CORRECTED_SECONDS:",
        after="while len(recent) > 100:",
        tests=(f"{_HEALTH}::test_a_thing_is_found_once_and_a_rate_of_corrected_errors_when_it_doubles",),
    ),
    Mutant(
        name="flapping-link-is-lost",
        what="a link that came back counts as down",
        file="machine/health/rules.py",
        before="            self._down.pop(report.device, None)\n            return None\n",
        after="            return None\n",
        tests=(f"{_HEALTH}::test_a_link_that_flaps_is_no_loss_and_one_that_stays_down_is",),
    ),
    Mutant(
        name="first-counters-as-new-errors",
        what="the errors since the driver was loaded count as new ones at the start of a run",
        file="machine/health/nvidia.py",
        before="new = total - self._before.get(key, total)",
        after="new = total - self._before.get(key, 0)",
        tests=(f"{_HEALTH}::test_counters_of_nvidia_smi_are_reported_when_they_grow",),
    ),
    Mutant(
        name="old-kernel-messages",
        what="faults that the kernel wrote down before the run drain its machine",
        file="machine/health/kernel_log.py",
        before="        os.lseek(self._fd, 0, os.SEEK_END)\n",
        after="",
        tests=(f"{_HEALTH}::test_the_kernel_log_has_reports_from_now_on_only",),
    ),
    Mutant(
        name="faults-of-other-jobs",
        what="a fault of a GPU that belongs to another job drains the machine",
        file="machine/health/sources.py",
        before="    return bus_address(report.device.removeprefix(_GPU)) in gpus\n",
        after="    return True\n",
        tests=(f"{_HEALTH}::test_the_gpus_of_other_jobs_do_not_count",),
    ),
    Mutant(
        name="reports-for-other-machines",
        what="a line of the file for another machine counts for this one",
        file="machine/health/report_file.py",
        before="[report for report in found if report.node == self._node]",
        after="found",
        tests=(f"{_HEALTH}::test_a_file_of_reports_is_read_line_by_line_for_this_machine",),
    ),
    Mutant(
        name="half-a-line-is-read",
        what="a line that the monitor is still writing is read in two parts",
        file="machine/health/report_file.py",
        before='whole = added[: added.rfind(b"\\n") + 1]',
        after="whole = added",
        tests=(f"{_HEALTH}::test_a_file_of_reports_is_read_line_by_line_for_this_machine",),
    ),
    Mutant(
        name="save-after-wrong-memory",
        what="a run saves what it computed after memory returned wrong data",
        file="trainer/launch/health.py",
        before="save = worst.verdict is HealthVerdict.DRAIN",
        after="save = worst.verdict >= HealthVerdict.DRAIN",
        tests=(f"{_NODES}::test_a_machine_with_a_fault_is_drained_and_a_spare_takes_its_place",),
    ),
    Mutant(
        name="save-of-broken-memory-goes-on",
        what="memory that turns out broken while the ranks save does not end the save",
        file="trainer/launch/supervise.py",
        before="if asked and (worse := running.planned_restart()) and not worse.save:",
        after="if asked and (worse := running.planned_restart()) and worse is not planned and worse.save:",
        tests=(f"{_SUPERVISE}::test_memory_that_turns_out_broken_while_ranks_save_ends_that",),
    ),
    Mutant(
        name="drained-machine-joins-again",
        what="a machine that was drained takes part in the run again",
        file="trainer/launch/node.py",
        before="    require_sound(folder, launch)\n",
        after="",
        tests=(f"{_NODES}::test_a_machine_with_a_fault_is_drained_and_a_spare_takes_its_place",),
    ),
    Mutant(
        name="faulty-spare-stays",
        what="a spare with a fault waits for a place in the job",
        file="trainer/launch/job_on_nodes.py",
        before="if node.sickness.worst and node not in members:",
        after="if node.sickness.worst and node.number is not None and node not in members:",
        tests=(f"{_NODES}::test_a_spare_with_a_fault_leaves_and_nothing_starts_again",),
    ),
    Mutant(
        name="leader-is-always-sound",
        what="a fault of the leader's machine is looked at by nobody",
        file="trainer/launch/job_on_nodes.py",
        before="faults = [self._here.fault_of_machine(), *(node",
        after="faults = [*(node",
        tests=(f"{_NODES}::test_the_machine_of_the_leader_is_drained_and_another_one_leads",),
    ),
    Mutant(
        name="warn-drains",
        what="launch.on_bad_health has no effect",
        file="trainer/launch/health.py",
        before='harmless = self._launch.on_bad_health == "warn" or (',
        after="harmless = (",
        tests=(f"{_NODES}::test_a_fault_is_only_reported_where_the_user_wants_that",),
    ),
]
