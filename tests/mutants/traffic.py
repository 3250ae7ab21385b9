"""Faults in the communication by axis: what is counted, in which axis, and where it is shown."""

from .mutant import Mutant

_RANKS = "tests/dist/test_axis_traffic.py"
_RUNS = "tests/unit/trainer/test_axis_traffic.py"
_LATE = (f"{_RANKS}::test_a_late_rank_is_exposed_in_its_axis_alone",)
_HIDDEN = (f"{_RANKS}::test_an_exchange_beside_work_is_hidden_until_it_is_complete",)
_FSDP = (f"{_RANKS}::test_a_device_counts_the_waits_of_fsdp_and_no_copies",)
_TRAFFIC = "trainer/mesh/axis_traffic.py"
_CLOCK = "trainer/mesh/waiting.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="exposed-not-counted",
        what="no axis has the time that ranks wait",
        file=_TRAFFIC,
        before="            axis.exposed += seconds\n",
        after="            pass\n",
        tests=_LATE,
    ),
    Mutant(
        name="axes-not-apart",
        what="waits of all axes count as those of all ranks",
        file=_TRAFFIC,
        before='self._of_axis.get(axis_of_group(self._mesh, group) or "")',
        after="None",
        tests=_LATE,
    ),
    Mutant(
        name="hidden-not-counted",
        what="no exchange is hidden",
        file=_TRAFFIC,
        before="                self.axis.hidden += own - self.axis.since",
        after="                pass",
        tests=_HIDDEN,
    ),
    Mutant(
        name="completion-not-noticed",
        what="an exchange counts as hidden until it is waited for, however long it has been complete",
        file=_TRAFFIC,
        before="(shown[0][1].ended or shown[0][0].is_completed())",
        after="shown[0][1].ended",
        tests=_HIDDEN,
    ),
    Mutant(
        name="waits-are-hidden",
        what="the time in which a rank waits counts as hidden communication",
        file=_CLOCK,
        before="ended - began, ended - self.seconds)",
        after="ended - began, ended)",
        tests=_HIDDEN,
    ),
    Mutant(
        name="failed-exchanges-kept",
        what="an exchange that nobody waits for is in flight for ever",
        file=_TRAFFIC,
        before="if flight.line < self._line - 2:",
        after="if False:",
        tests=(f"{_RANKS}::test_an_interval_has_its_part_of_an_exchange",),
    ),
    Mutant(
        name="fsdp-has-no-axis",
        what="the collectives that FSDP2 calls are in no axis",
        file=_CLOCK,
        before="for name in _OF_FSDP if self.traffic is not None else ():",
        after="for name in ():",
        tests=(f"{_RUNS}::test_late_ranks_show_in_the_axis_that_waits_for_them",),
    ),
    Mutant(
        name="other-streams-exposed",
        what="waits of streams that only communicate count as exposed",
        file=_TRAFFIC,
        before="if axis is None or self._current() != self._stream:",
        after="if axis is None:",
        tests=(f"{_RANKS}::test_a_device_counts_the_waits_of_the_stream_that_computes",),
    ),
    Mutant(
        name="fsdp-waits-on-devices-not-marked",
        what="with ZeRO-3, a GPU shows no communication of dp_shard",
        file=_CLOCK,
        before="            for name in names:\n",
        after="            for name in ():\n",
        tests=_FSDP,
    ),
    Mutant(
        name="sums-over-copies-in-the-shards",
        what="with HSDP, a GPU waits for dp_shard and never for dp_replicate",
        file="trainer/torch_private.py",
        before='if hasattr(unit.mesh_info, "replicate_process_group"):',
        after="if False:",
        tests=_FSDP,
    ),
    Mutant(
        name="streams-of-fsdp-exposed",
        what="waits of FSDP2's own streams count as exposed, too",
        file=_TRAFFIC,
        before="if group_of is None or stream != self._stream:",
        after="if group_of is None:",
        tests=_FSDP,
    ),
    Mutant(
        name="communication-without-its-axis",
        what="explain slow does not say which axis a run waits for",
        file="report/diagnose/classes.py",
        before="if cause.name == _COMMUNICATION and",
        after="if False and",
        tests=("tests/unit/report/diagnose/test_slow.py::test_the_class_of_communication_names_its_axis",),
    ),
]
