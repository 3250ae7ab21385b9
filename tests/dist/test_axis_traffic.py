"""Communication by axis: a late rank shows as exposed in the axis whose exchange waits for it, and in no other; an
exchange beside work shows as hidden."""

import math
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from ingot.schema.parallel import Parallel
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.axis_traffic import AxisTraffic, DeviceTraffic, axis_of_group, traffic_axes
from ingot.trainer.mesh.collectives import (
    all_sum,
    all_to_all,
    any_rank,
    finish,
    gather,
    scatter_sum,
    start_all_sum,
    start_all_to_all,
    started,
    sum_in_place,
)
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.step import train_step

from .steps import batch_of, run_of
from .test_experts import EXPERTS

LATE_SECONDS = 0.3


def mesh_of(**degrees):
    return build_mesh(Parallel(**degrees), "cpu", 60, experts=True)


def measured(mesh, work):
    """Return the seconds by axis of `work()`, which all ranks begin at once."""
    clock = WaitClock(traffic=AxisTraffic(mesh))
    clock.start()
    try:
        any_rank(False)
        before = clock.by_axis()
        work()
        return {axis: tuple(b - a for a, b in zip(before[axis], after, strict=True))
                for axis, after in clock.by_axis().items()}  # fmt: skip
    finally:
        clock.stop()


def message(group):
    """Exchange with the peer of a group of two."""
    peer = next(rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())
    works = [dist.isend(torch.ones(3), peer, group=group), dist.irecv(torch.ones(3), peer, group=group)]
    for work in [started(one, group, message=True) for one in works]:
        work.wait()


EXCHANGES = {
    "operator": lambda group: all_sum(torch.ones(4), group),
    "gather": lambda group: gather(torch.ones(4), 0, group),
    "scatter": lambda group: scatter_sum(torch.ones(4), 0, group),
    "to all": lambda group: all_to_all(torch.ones(2, 3), group),
    "started": lambda group: start_all_sum(torch.ones(4), group).wait(),
    "in place": lambda group: sum_in_place(torch.ones(4), group),
    "rows": lambda group: finish(start_all_to_all(torch.ones(2), [1, 1], [1, 1], group)),
    "of FSDP": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "message": message,
}


def late(rank, world, axis):
    """Each rank in turn is late to one exchange of every kind in `axis`; then comes one of each other axis."""
    mesh = mesh_of(dp_shard=2, tp=2)

    def work():
        for exchange in EXCHANGES.values():
            if mesh.index(axis) == 1:
                time.sleep(LATE_SECONDS / 3)
            exchange(mesh.group(axis))
        for other in {"dp_shard", "tp"} - {axis}:
            EXCHANGES["operator"](mesh.group(other))
        any_rank(False)

    return mesh.index(axis), measured(mesh, work)


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_a_late_rank_is_exposed_in_its_axis_alone(fork_ranks, axis):
    due = LATE_SECONDS / 3 * len(EXCHANGES)
    for index, found in fork_ranks(partial(late, axis=axis), 4):
        assert found.keys() == {"dp_shard", "tp", "world"}
        exposed = {name: seconds for name, (seconds, _) in found.items()}
        if index == 0:
            assert exposed.pop(axis) > 0.9 * due
        assert max(exposed.values()) < 0.5 * due, exposed


def overlapped(rank, world):
    """An exchange of dp_shard beside work, which is complete before half of it, and one that is late to be complete."""
    mesh = mesh_of(dp_shard=2, tp=2)
    early, slow = mesh.group("dp_shard"), mesh.group("tp")

    def complete():
        flying = start_all_sum(torch.ones(4), early)
        time.sleep(LATE_SECONDS)
        all_sum(torch.ones(4), slow)  # at its start it is noticed that the other one is complete
        time.sleep(2 * LATE_SECONDS)
        flying.wait()

    def incomplete():
        if mesh.index("dp_shard") == 1:
            time.sleep(LATE_SECONDS)
        flying = start_all_sum(torch.ones(4), early)
        time.sleep(LATE_SECONDS / 2)
        flying.wait()

    return [measured(mesh, complete), measured(mesh, incomplete), mesh.index("dp_shard")]


def test_an_exchange_beside_work_is_hidden_until_it_is_complete(fork_ranks):
    for first, second, index in fork_ranks(overlapped, 4):
        assert first["dp_shard"][1] > 0.9 * LATE_SECONDS and first["tp"][1] < 0.5 * LATE_SECONDS
        assert first["dp_shard"][1] < 2 * LATE_SECONDS  # without the work after its end
        if index == 0:  # it waits for the late rank, half of the time beside work
            exposed, hidden = second["dp_shard"]
            assert hidden > 0.45 * LATE_SECONDS and exposed > 0.3 * LATE_SECONDS
            assert hidden < 0.95 * LATE_SECONDS


def edges(rank, world):
    """An exchange in flight at a log line counts in both intervals, and one that nobody waits for is forgotten."""
    mesh = mesh_of(dp_shard=2)
    clock = WaitClock(traffic=AxisTraffic(mesh))
    clock.start()
    work = dist.irecv(torch.ones(3), 1 - rank, group=mesh.group("dp_shard"))
    started(work, mesh.group("dp_shard"), message=True)
    hidden = []
    for _ in range(7):
        time.sleep(0.02)
        hidden.append(clock.by_axis()["dp_shard"][1])
    thread = threading.Thread(target=dist.all_reduce, args=[torch.ones(1)])  # one that saves
    before = clock.by_axis()
    thread.start()
    thread.join()
    after = clock.by_axis()
    dist.isend(torch.ones(3), 1 - rank, group=mesh.group("dp_shard")).wait()
    work.wait()
    clock.stop()
    return hidden, before == after, dist.all_reduce.__module__


def test_an_interval_has_its_part_of_an_exchange(fork_ranks):
    for hidden, same, module in fork_ranks(edges, 2):
        steps = [b - a for a, b in pairwise(hidden)]
        assert min(hidden[0], *steps[:2]) > 0.015 and steps[-3:] == [0.0] * 3
        assert same and module == "torch.distributed.distributed_c10d"  # the clock left torch as it was


def named(rank, world, degrees):
    mesh = mesh_of(**degrees)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", *mesh.views)
    return traffic_axes(mesh), {name: axis_of_group(mesh, mesh.group(name)) for name in names if mesh.size(name) > 1}


@pytest.mark.parametrize(
    "degrees, axes, views",
    [
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), {"shard": "dp_shard", "ring": "cp", "sequence": "cp"}),
        ({"dp_shard": 4}, ("dp_shard",), {"shard": "dp_shard"}),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, ("dp_replicate", "dp_shard", "ep"), {"ep": "ep"}),
        ({"pp": 2, "tp": 2}, ("tp", "pp"), {"sequence": "tp"}),
    ],
)
def test_groups_belong_to_axes(fork_ranks, degrees, axes, views):
    found, names = fork_ranks(partial(named, degrees=degrees), 4)[0]
    assert found == (*axes, "world")
    assert {name: names[name] for name in views} == views
    assert {axis: names[axis] for axis in axes if axis != "ep"} == {axis: axis for axis in axes if axis != "ep"}


def trained(rank, world, run):
    """Return what a step counts by axis, and what is in flight after it."""
    parts = build_parts(run, torch.device("cpu"), Path())
    traffic = AxisTraffic(parts.mesh)
    clock = WaitClock(traffic=traffic)
    clock.start()
    try:
        for step in (1, 2):
            train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
        return clock.by_axis(), [type(handle).__name__ for handle in traffic._in_flight]
    finally:
        clock.stop()


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
        {"pp": 2, "cp": 2},
        {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 3, "arch": EXPERTS},
    ],
)
def test_each_axis_of_a_step_has_its_exchanges(fork_ranks, layout):
    run = run_of(**layout)
    for found, left in fork_ranks(partial(trained, run=run), 4):
        axes = {axis for axis in layout if axis not in ("zero", "arch")}
        assert found.keys() == axes | {"world"}
        assert all(exposed > 0 for exposed, _ in found.values()), found
        started_early = axes - {"tp"}  # the exchanges of tp are waited for at once
        assert all(found[axis][1] > 0 for axis in started_early if run.parallel.zero != 3 or axis == "ep"), found
        assert "Tensor" not in left and (not left or run.parallel.zero != 3)  # gathers for the next forward


class Stream:
    """A device whose clock the test moves: events have its time."""

    now, side = 0.0, "compute"

    def mark(self):
        event = SimpleNamespace(at=self.now, query=lambda: True, synchronize=lambda: None)
        event.elapsed_time = lambda other, event=event: (other.at - event.at) * 1000
        return event


def on_device(rank, world):
    """Return what a device counts by axis: waits of 1 s, of the stream that computes and of another one, in the
    training thread and in that of the backward."""
    mesh, stream = mesh_of(dp_shard=2), Stream()
    clock = WaitClock(traffic=DeviceTraffic(mesh, stream.mark, lambda: stream.side))
    wait = dist.Work.wait

    def slowly(work, *args):
        stream.now += 1.0
        return wait(work, *args)

    dist.Work.wait = slowly
    clock.start()
    group = mesh.group("dp_shard")
    start_all_sum(torch.ones(1), group).wait()
    backward = threading.Thread(target=lambda: start_all_sum(torch.ones(1), group).wait())
    backward.start()
    backward.join()
    saves = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    saves.start()
    saves.join()
    stream.side = "communication"
    start_all_sum(torch.ones(1), group).wait()
    found = clock.by_axis()
    clock.stop()
    dist.Work.wait = wait
    return found


def waits_of_fsdp(rank, world, copies, reduces):
    """Return what a device counts by axis of a step of FSDP2, in which each wait of a stream takes 1 s, and each copy
    out of a buffer or sum with earlier gradients 100 s."""
    mesh, clock_of_device, streams = mesh_of(dp_replicate=copies, dp_shard=2), Stream(), torch.cpu.Stream

    def passing(function, seconds):
        def slowly(*args):
            clock_of_device.now += seconds
            return function(*args)

        return slowly

    for owner, name, seconds in (
        (streams, "wait_event", 1.0),
        (FSDPParam, "init_unsharded_param", 100.0),
        (FSDPParam, "accumulate_unsharded_grad_if_needed", 100.0),
    ):
        setattr(owner, name, passing(getattr(owner, name), seconds))
    streams.record_event = lambda stream: object()  # of a CPU they are None, and no stream waits for another
    streams.wait_stream = lambda stream, other: stream.wait_event(other.record_event())
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh.plane("shard"))
    model.set_requires_gradient_sync(reduces)
    clock = WaitClock(traffic=DeviceTraffic(mesh, clock_of_device.mark, torch.cpu.current_stream, streams))
    clock.start()
    try:
        model(torch.ones(2, 4)).sum().backward()
        return {axis: exposed for axis, (exposed, _) in clock.by_axis().items()}
    finally:
        clock.stop()


@pytest.mark.parametrize(
    "copies, reduces, due",
    [
        (1, True, {"dp_shard": 2.0}),  # gathered for the forward; the end of the backward
        (1, False, {"dp_shard": 1.0}),
        (2, True, {"dp_shard": 1.0, "dp_replicate": 1.0}),
    ],
)
def test_a_device_counts_the_waits_of_fsdp_and_no_copies(fork_ranks, copies, reduces, due):
    for found in fork_ranks(partial(waits_of_fsdp, copies=copies, reduces=reduces), 2 * copies):
        assert found == due | {"world": 0.0}


def test_a_device_counts_the_waits_of_the_stream_that_computes(fork_ranks):
    for found in fork_ranks(on_device, 2):
        exposed, hidden = found["dp_shard"]
        assert exposed == 2.0 and math.isnan(hidden) and found["world"][0] == 0.0
