"""The order to leave lost peers: it ends the wait of a device, and then the step."""

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch

from ingot.errors import DataError
from ingot.trainer import torch_private
from ingot.trainer.resilience import reports
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL, PeerLost, with_peers
from ingot.trainer.resilience.reports import Reports
from ingot.trainer.torch_private import abort_communicators


class Nccl:
    """A backend that records what is done to it, as that of a GPU."""

    def __init__(self, name: str, done: list[str], abort=lambda: None):
        self._name, self._done, self._end_wait = name, done, abort

    def _group_start(self) -> None:
        self._done.append("start")

    def _group_end(self) -> None:
        self._done.append("end")

    def abort(self) -> None:
        self._done.append(f"abort {self._name}")
        self._end_wait()


class Group:
    """A process group with a backend for GPUs; without one if it is None."""

    def __init__(self, backend):
        self._backend = backend

    def _get_backend(self, device: torch.device):
        assert device.type == "cuda"
        if self._backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self._backend


class Gloo:
    def abort(self) -> None:
        raise AssertionError("a lost peer ends the collectives of Gloo")


def world_of(*backends) -> SimpleNamespace:
    return SimpleNamespace(pg_names={Group(backend): str(number) for number, backend in enumerate(backends)})


def test_communicators_of_all_groups_are_aborted_together(monkeypatch):
    done: list[str] = []
    world = world_of(Nccl("0", done), None, Gloo(), Nccl("3", done))
    monkeypatch.setattr(torch_private.distributed_c10d, "_world", world)
    assert abort_communicators() == 2
    assert done == ["start", "abort 3", "abort 0", "end"]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]:4321"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0"), True),
        (ValueError("index is out of range"), False),
        (DataError("E-SHARD-HASH", "gloo.bin differs", rule="as built", fix="copy it again"), False),
    ],
)
def test_an_error_about_a_peer_is_its_loss(monkeypatch, error, lost):
    """The model is freed after it, which waits for the device."""
    done: list[str] = []
    monkeypatch.setattr(torch_private.distributed_c10d, "_world", world_of(Nccl("0", done)))
    with pytest.raises(PeerLost if lost else type(error)), with_peers():
        raise error
    assert done == (["start", "abort 0", "end"] if lost else [])


def test_the_order_ends_the_wait_for_a_device(fork_ranks):
    """The main thread waits in native code, which no signal ends. Once the abort has ended it, no line follows."""
    done = fork_ranks(_wait_for_device, 1, timeout=20)[0]
    assert done[:2] == ["start", "abort 0"]
    assert "connection closed by peer" in done and "used what the device left" not in done


def _wait_for_device(rank, world):
    native, device = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a mutex that is not locked is all zeros
    native.pthread_mutex_lock(device)
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        backend = Nccl("0", done, lambda: _unlock(native, device))
        patch.setattr(torch_private.distributed_c10d, "_world", world_of(backend))
        Reports()
        try:
            with with_peers():
                _order_soon()
                native.pthread_mutex_lock(device)
                done.append("used what the device left")
        except PeerLost as error:
            done.append(str(error).partition(":")[0])
    return done


def _unlock(native, device) -> None:
    native.pthread_mutex_unlock(device)


def _order_soon() -> None:
    main = os.getpid()
    if os.fork() == 0:
        time.sleep(0.2)
        os.kill(main, LEAVE_SIGNAL)
        os._exit(0)


def test_the_order_has_no_effect_out_of_training(fork_ranks):
    """A rank that has left already may have groups of the next attempt."""
    assert fork_ranks(_ordered_too_late, 1) == [[]]


def _ordered_too_late(rank, world):
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private.distributed_c10d, "_world", world_of(Nccl("0", done)))
        Reports()
        with with_peers():
            pass
        os.kill(os.getpid(), LEAVE_SIGNAL)
        time.sleep(0.3)
    return done


def test_an_error_in_an_abort_does_not_leave_the_group_of_nccl_open(monkeypatch):
    done: list[str] = []

    def fails():
        raise RuntimeError("the backend is busy")

    monkeypatch.setattr(torch_private.distributed_c10d, "_world", world_of(Nccl("0", done, fails)))
    with pytest.raises(RuntimeError, match="busy"):
        abort_communicators()
    assert done == ["start", "abort 0", "end"]


def test_an_error_does_not_end_the_thread_that_answers(fork_ranks):
    assert fork_ranks(_ordered_after_an_error, 1) == [2]


def _ordered_after_an_error(rank, world):
    heard: list[int] = []

    def fails():
        heard.append(1)
        raise RuntimeError("the backend is busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "obey", fails)
        Reports()
        for orders in (1, 2):
            os.kill(os.getpid(), LEAVE_SIGNAL)
            ends = time.monotonic() + 10
            while len(heard) < orders and time.monotonic() < ends:
                time.sleep(0.01)
    return len(heard)
