"""The ranges of profiled steps, waits by axis and line, and reads of values by line."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ingot.rehearse.profile.host_reads import HostReads
from ingot.rehearse.profile.ranges import ObservedWaits, Ranges, on_clock_of


class Exchange:
    """An exchange in flight. over: whether it is complete."""

    over = False

    def is_completed(self) -> bool:
        return self.over


def group(name: str, purpose: str) -> Any:
    return SimpleNamespace(group_name=name, group_desc=purpose, size=lambda: 2)


def test_ranges_of_nvtx_are_closed_in_reverse_order():
    calls: list[str] = []
    ranges = Ranges(nvtx=True, push=calls.append, pop=lambda: calls.append("pop"))
    with pytest.raises(KeyError), ranges.range("step"), ranges.range("forward"):
        raise KeyError
    assert calls == ["step", "forward", "pop", "pop"]


def test_waits_have_the_axis_of_their_exchange_and_the_line_that_waits():
    mesh = SimpleNamespace(size=lambda axis: 2, views={})
    clock = SimpleNamespace(traffic=SimpleNamespace(blocking=None))
    waits = ObservedWaits(cast(Any, mesh), cast(Any, clock), Ranges(nvtx=True, push=str, pop=lambda: None))
    first, second, lost = Exchange(), Exchange(), Exchange()
    for handle, own in (
        (first, group("1", "mesh_tp")),
        (second, group("2", "mesh_shard")),
        (lost, group("1", "mesh_tp")),
    ):
        waits.began(handle, own, shows_end=handle is not first)
    lost.over = True
    assert waits.around(lambda handle, timeout: timeout, first, timeout=7) == 7
    clock.traffic.blocking = group("3", "pipeline_channel")
    waits.around(lambda handle: None, object())
    clock.traffic.blocking = None
    waits.around(lambda: None)
    assert waits.groups == {"1": "tp", "2": "dp_shard", "3": "pp"}
    assert {axis for axis, _ in waits.seconds} == {"tp", "pp", "world"}
    assert all(line.startswith("test_ranges.py:") and "test_waits" in line for _, line in waits.seconds)
    assert [number for number, _ in waits.seconds.values()] == [1, 1, 1]
    assert {axis: len(own) for axis, own in waits.flights.items()} == {"tp": 2, "pp": 1, "world": 1}
    assert all(end >= begin for own in waits.flights.values() for begin, end in own)


def test_reads_of_values_are_found_by_line():
    x = torch.ones(4, requires_grad=True)
    with HostReads(torch.device("cpu")) as reads:
        (x * 2).sum().backward()
        for _ in range(3):
            x.sum().item()
        if x.sum() > 0:
            x.detach().nonzero()
    found = {(name, line.partition(" ")[2]): count for (name, line), count in reads.found.items()}
    assert all(line.startswith("test_ranges.py:") for _, line in reads.found)
    assert sorted(count for (name, _), count in reads.found.items() if name == "_local_scalar_dense") == [1, 3]
    assert found["nonzero", "test_reads_of_values_are_found_by_line"] == 1
    assert len(reads.found) == 3


def test_the_clock_of_a_trace_is_found_by_events_on_both():
    clock = on_clock_of([1e6 + 100.0, 3e6 + 104.0, 2e6 + 101.0], [1.0, 3.0, 2.0])
    assert clock(5.0) == 5e6 + 101.0
