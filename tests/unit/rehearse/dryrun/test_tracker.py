"""The tracker on small programs whose memory, FLOPs and calls are known."""

import gc

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ingot.rehearse.dryrun.tracker import Tracker  # noqa: E402

KB = 1024


def kilobytes(count: int) -> int:
    """Elements of that many kilobytes of float32."""
    return count * KB // 4


def test_peaks_by_moment_and_kind():
    with Tracker() as tracker:
        tracker.begin("first")
        with tracker.within("parameters", "build"):
            a = torch.empty(kilobytes(8))
        b = torch.empty(kilobytes(4))
        tracker.begin("second")
        view = a.view(2, -1)
        del b
        with tracker.within("optimizer", "update"):
            c = torch.empty(kilobytes(2))
    peaks = tracker.peaks()
    assert peaks["first"].bytes == 12 * KB and peaks["first"].rest == 12 * KB
    assert peaks["first"].by_kind == {"parameters": 8 * KB, "activations": 4 * KB}
    assert peaks["second"].bytes == 12 * KB and peaks["second"].place == "at the beginning"
    assert peaks["second"].rest == 10 * KB
    del view, c


def test_a_label_counts_from_the_first_byte_and_sizes_are_rounded_up():
    outside = torch.empty(1)
    with Tracker() as tracker:
        tracker.begin("all")
        x = torch.empty(kilobytes(1))
        tracker.label([x, None], "gradients")
        tracker.label([outside], "other")
    assert tracker.peaks()["all"].by_kind == {"gradients": KB, "other": 512}


def test_resized_storages_are_followed():
    with Tracker() as tracker:
        tracker.begin("all")
        x = torch.empty(kilobytes(8))
        x.untyped_storage().resize_(0)
        tracker.begin("freed")
        y = torch.empty(kilobytes(1))
        x.untyped_storage().resize_(8 * KB)
        tracker.begin("whole again")
    assert tracker.peaks()["all"].bytes == 8 * KB
    assert tracker.peaks()["freed"].by_kind == {"communication": 8 * KB, "activations": KB}
    del y


def test_backward_and_recomputation_are_separated():
    layer = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU())
    x = torch.randn(16, 64, requires_grad=True)
    with Tracker() as tracker:
        tracker.begin("plain")
        layer(x).sum().backward()
        tracker.begin("recomputed")
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    product = 2 * 16 * 64 * 64
    assert tracker.flops["mm"] == 3 * product + 4 * product
    kinds = [tracker.peaks()[moment].by_kind for moment in ("plain", "recomputed")]
    assert all(k["backward"] > 0 for k in kinds)
    assert "Tracker" not in torch.autograd.backward.__qualname__  # as it was before


def test_attention_on_a_cpu_has_flops():
    q, k = torch.randn(2, 4, 32, 16, requires_grad=True), torch.randn(2, 2, 32, 16, requires_grad=True)
    with Tracker() as tracker:
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
    forward = 2 * 2 * (2 * 4 * 32 * 32 * 16) / 2
    assert tracker.flops["_scaled_dot_product_flash_attention_for_cpu"] == forward
    assert tracker.flops["_scaled_dot_product_flash_attention_for_cpu_backward"] == 2.5 * forward


def test_what_died_is_forgotten():
    with Tracker() as tracker:
        tracker.begin("all")
        for _ in range(10):
            torch.empty(kilobytes(4))
        gc.collect()
    assert tracker.peaks()["all"].bytes == 4 * KB and tracker.peaks()["all"].rest == 0


def _every_collective(rank, world):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    everyone = dist.group.WORLD
    assert everyone is not None
    group, other = dist.new_group([0, 1]), 1 - rank
    assert isinstance(group, dist.ProcessGroup)
    x, small = torch.ones(8), torch.empty(4)
    with Tracker() as tracker, tracker.within(place="here"):
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(16), x)
        dist.reduce_scatter_tensor(small, x)
        functional.wait_tensor(functional.all_gather_tensor(x.bfloat16(), 0, everyone))
        functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, everyone))
        functional.wait_tensor(functional.all_reduce(x, "max", everyone))
        dist.broadcast(x, src=1)
        works = [dist.isend(x, other, group=group), dist.irecv(torch.empty(8), other, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        if rank == 0:
            dist.recv(small.new_empty(8), 1, group=group)
        else:
            dist.send(x, 0, group=group)
        dist.barrier()
    return tracker.calls, [event.what for event in tracker.events]


def test_collectives_are_recorded_with_group_size_and_peer(fork_ranks):
    calls, events = fork_ranks(_every_collective, 2)[0]
    listed = [(call.op, call.elements, call.dtype, call.peer) for call in calls]
    assert listed == [
        ("all_reduce", 8, "float32", -1),
        ("all_gather", 16, "float32", -1),
        ("reduce_scatter", 8, "float32", -1),
        ("all_gather", 16, "bfloat16", -1),
        ("reduce_scatter", 8, "float32", -1),
        ("all_reduce", 8, "float32", -1),
        ("broadcast", 8, "float32", 1),
        ("isend", 8, "float32", 1),
        ("irecv", 8, "float32", 1),
        ("sent", 8, "float32", 1),
        ("wait", 8, "float32", 1),
        ("irecv", 8, "float32", 1),  # a plain receive is one that is waited for at once
        ("wait", 8, "float32", 1),
        ("barrier", 0, "uint8", -1),
    ]
    assert all(call.group == (0, 1) and call.label == "here" for call in calls)
    assert calls[0].channel != calls[7].channel == calls[8].channel
    assert events.count("wait") >= 3
