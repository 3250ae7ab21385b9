"""How a process becomes a rank: environment, device, threads, process group.

Importable without torch, because the launcher needs `worker_environment` and nothing else.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from ingot.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands in the job.

    attempt: 0 for the first start, then one more for every restart, by our supervisor or by torchrun.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    attempt: int
    device: "torch.device"

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def worker_environment(ranks: int, cores: int | None = None) -> dict[str, str]:
    """Environment variables for `ranks` worker processes on one machine; the user's own settings go before these.

    MALLOC_*: glibc keeps freed memory instead of returning it to the kernel after each step. Measured: a quarter to
    half more training speed on CPU, because pages need not be zeroed and mapped again.
    OMP_NUM_THREADS: an equal share of the cores; more threads than cores halve the speed.
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE: a restarted job must not read the addresses of its dead predecessor.
    """
    return {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "OMP_NUM_THREADS": str(threads_per_rank(ranks, cores)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def threads_per_rank(ranks: int, cores: int | None = None) -> int:
    """An equal share of the usable cores, at least one."""
    usable = cores or len(os.sched_getaffinity(0))
    return max(usable // ranks, 1)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> "torch.device":
    """cuda:local_rank if wanted or, for "auto", if there is one. Raises ConfigError when it is not there."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this machine wants a GPU of its own, but {count} can be used here",
            rule="one process per GPU",
            fix="lower parallel.dp_shard, or set train.device = 'cpu'",
        )
    return torch.device("cuda", local_rank)


def start(device: Literal["auto", "cpu", "cuda"], timeout_seconds: float, *, tf32: bool = False) -> Place:
    """Join the job that torchrun describes in the environment; without torchrun, be a job of one process.

    timeout_seconds: a collective of the world group that waits longer fails; other groups are given theirs when they
    are made (`build_mesh`). Gloo on CPU, NCCL on GPUs. Sets the number of threads, on which the bits of a CPU run
    depend, and on a GPU whether products of float32 matrices may use TF32.
    """
    import torch
    import torch.distributed as dist

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    local_rank, local_world_size = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    place = Place(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=local_rank,
        local_world_size=local_world_size,
        attempt=number("INGOT_ATTEMPT", 0) + number("TORCHELASTIC_RESTART_COUNT", 0),
        device=choose_device(device, local_rank),
    )
    torch.set_num_threads(number("OMP_NUM_THREADS", threads_per_rank(local_world_size)))
    timeout = timedelta(seconds=timeout_seconds)
    on_gpu = place.device.type == "cuda"
    use_tf32(tf32 and on_gpu)
    if on_gpu:
        torch.cuda.set_device(place.device)
    dist.init_process_group(
        # Gloo beside NCCL carries what lives on the host: stop requests, losses, the ledger.
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store(place, timeout),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=place.device if on_gpu else None,
    )
    return place


def use_tf32(allowed: bool) -> None:
    """Whether products of float32 matrices may round their inputs to the 10 bits of mantissa of TF32.

    Through the one setting that the newer `fp32_precision` and the compiler both follow; after setting `fp32_precision`
    itself, the compiler fails where it asks for this one (torch 2.9 and later). It goes for CPUs with such units as
    well, so a run on a CPU says no.
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")


def _store(place: Place, timeout: timedelta):
    """The meeting point of all ranks, with a name space per attempt: dead ranks' addresses stay out of sight."""
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:
        if place.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE={place.world_size}, but MASTER_ADDR is not set",
                rule="several processes need a place to meet",
                fix="start them with torchrun",
            )
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.world_size,
        is_master=place.is_first and not hosted_by_torchrun,
        timeout=timeout,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"attempt-{place.attempt}", store)  # pyright: ignore[reportPrivateImportUsage]


def stop() -> None:
    """Leave the job. Safe to call when it was never joined."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
