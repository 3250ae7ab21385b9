"""Faults in the profile of a run: time that is counted twice, not at all, or for another kind."""

from .mutant import Mutant

_TIMELINE = "tests/unit/rehearse/profile/test_timeline.py"
_OPERATIONS = "tests/unit/rehearse/profile/test_operations.py"
_PROFILE = "tests/unit/rehearse/profile/test_profile.py"
_WAITS = "tests/unit/trainer/guard/test_no_host_wait.py"
_JOB = "tests/unit/rehearse/profile/test_job.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="profiled-time-lost",
        what="the time after the last operation belongs to nobody",
        file="rehearse/profile/timeline.py",
        before="    advance(window.end)\n",
        after="",
        tests=(f"{_TIMELINE}::test_the_kinds_add_up_to_the_step_whatever_the_trace_has",),
    ),
    Mutant(
        name="work-in-waits",
        what="what runs in a wait for other ranks is work, not communication",
        file="rehearse/profile/timeline.py",
        before="        if self.kind == COMMUNICATION:\n            return",
        after="        if False:\n            return",
        tests=(f"{_TIMELINE}::test_each_moment_of_a_thread_belongs_to_one_kind",),
    ),
    Mutant(
        name="waits-hidden",
        what="an exchange counts as hidden while its rank waits for another one",
        file="rehearse/profile/timeline.py",
        before=" - length(common(flying, waiting))",
        after="",
        tests=(f"{_TIMELINE}::test_communication_is_exposed_by_axis_and_hidden_beside_work",),
    ),
    Mutant(
        name="late-launches-idle",
        what="a gap of the device is idle time although the host works",
        file="rehearse/profile/timeline.py",
        before="IDLE if wait[0] <= begin else HOST",
        after="IDLE",
        tests=(f"{_TIMELINE}::test_each_moment_of_a_device_belongs_to_one_kind",),
    ),
    Mutant(
        name="fused-kernels-named",
        what="a fused kernel is attention because its name has that of an operation whose result it reads",
        file="rehearse/profile/kinds.py",
        before="    if lower.startswith(_FUSED):\n        return None\n",
        after="",
        tests=(f"{_TIMELINE}::test_each_moment_of_a_device_belongs_to_one_kind",),
    ),
    Mutant(
        name="all-pairs-counted",
        what="causal attention counts all pairs of tokens",
        file="rehearse/profile/operations.py",
        before="(0.5 if is_causal else 1.0)",
        after="1.0",
        tests=(f"{_OPERATIONS}::test_flops_by_shapes",),
    ),
    Mutant(
        name="bounds-above-measured",
        what="an operation that caches make faster than its bound counts with its bound in the ceiling",
        file="rehearse/profile/operations.py",
        before="min(bound, one.seconds)",
        after="bound",
        tests=(f"{_OPERATIONS}::test_a_bound_is_that_of_the_slower_rate",),
    ),
    Mutant(
        name="other-device-planned",
        what="the plan for another kind of device is shown beside the measured times",
        file="rehearse/profile/profile.py",
        before='cluster.device == first["device"]\n',
        after="True\n",
        tests=(f"{_PROFILE}::test_rates_of_another_device_are_not_compared_with",),
    ),
    Mutant(
        name="dead-ranks-awaited",
        what="a profile waits for the other ranks when one has died",
        file="rehearse/profile/job.py",
        before="enumerate(codes) if code]",
        after="enumerate(codes) if code and None not in codes]",
        tests=(f"{_JOB}::test_a_rank_that_dies_ends_the_profile_with_its_last_words",),
    ),
    Mutant(
        name="copies-to-the-device-free",
        what="a copy from the host to the device counts as one for which the host does not wait",
        file="rehearse/profile/host_reads.py",
        before="return waits and source.device.type != result.device.type",
        after='return waits and result.device.type == "cpu" != source.device.type',
        tests=(f"{_WAITS}::test_no_step_on_a_device_reads_values_or_copies_with_a_wait",),
    ),
    Mutant(
        name="positions-sent-each-step",
        what="the positions of a rank's tokens are sent to the device in every micro-batch",
        file="trainer/parallel/context.py",
        before="        if key not in self._known:\n",
        after="        if True:\n",
        tests=(f"{_WAITS}::test_no_step_on_a_device_reads_values_or_copies_with_a_wait",),
    ),
    Mutant(
        name="reads-of-the-host-wait",
        what="a read of a tensor on the host counts as a wait for the device",
        file="rehearse/profile/host_reads.py",
        before="one.device.type == device.type for one",
        after="True for one",
        tests=(f"{_WAITS}::test_the_watch_finds_what_reads_values",),
    ),
]
