"""A rank that starts again in its process: what it forgets."""

import weakref

from ingot.trainer.resilience.again import forget


class _Model:
    pass


def _raise(held: list) -> None:
    model = _Model()
    held.append(weakref.ref(model))
    try:
        inner = _Model()
        held.append(weakref.ref(inner))
        raise OSError("closed by peer")
    except OSError as error:
        raise ValueError("lost") from error


def test_what_an_error_and_its_causes_hold_is_released():
    held: list = []
    kept = None
    try:
        _raise(held)
    except ValueError as error:
        kept = error
    assert all(reference() is not None for reference in held)
    forget(kept)
    assert kept is not None and all(reference() is None for reference in held)


def test_collectives_of_groups_that_are_gone_are_forgotten(fork_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")
    before, after = fork_ranks(_one_group_after_another, 1)[0]
    assert [call.sizes for call in before] == [((2,),)]
    assert [(call.number, call.sizes) for call in after] == [(1, ((3,),))]


def _one_group_after_another(rank, world):
    import torch
    import torch.distributed as dist

    from ingot.trainer.mesh.start import stop
    from ingot.trainer.resilience.reports import calls_of_this_process, forget_calls

    forget_calls()  # those of the process that was forked
    dist.all_reduce(torch.ones(2))
    before = calls_of_this_process()
    stop()
    forget_calls()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    return before, calls_of_this_process()
