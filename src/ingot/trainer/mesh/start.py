"""The start of a rank: environment, device, threads, process group.

This module is importable without torch: the launcher needs `worker_environment` only.
"""

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from ingot.errors import ConfigError
from ingot.trainer.mesh.environment import environment_number

if TYPE_CHECKING:
    import torch

ATTEMPT_VARIABLE = "INGOT_ATTEMPT"  # the number of restarts of the job so far
# How often a thread that waits for another one looks again before it sleeps; GNU OpenMP's own number is 300,000. On a
# machine with other work, a thread that spins keeps its core from the one that it waits for. One rank with two threads:
# 2.2 times the tokens per second beside six busy processes, 90% on an idle machine (docs/measurements.md).
SPIN_COUNT = "10000"
_OWN_INTERFACE = "INGOT_OWN_INTERFACE"  # GLOO_SOCKET_IFNAME is not the user's
STORE_VARIABLE = "INGOT_STORE_FD"  # for rank 0: the file descriptor of the socket on which its store listens


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank of this process in the job, and its device.

    attempt: the number of restarts by ingot's supervisor or by torchrun so far.
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
    """Return environment variables for `ranks` worker processes on one machine. The user's own settings override them.
    Raises ConfigError if the user's OMP_NUM_THREADS is not a number: the processes would fail.

    MALLOC_*: glibc keeps freed memory instead of returning it to the kernel after each step. This makes training on a
    CPU 25% to 50% faster (measured), because pages need not be zeroed and mapped again.
    OMP_NUM_THREADS: an equal share of the cores; more threads than cores halve the speed.
    GOMP_SPINCOUNT: see SPIN_COUNT.
    """
    rank_threads(ranks, cores)
    return {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "OMP_NUM_THREADS": str(threads_per_rank(ranks, cores)),
        # How many of its collectives a rank remembers, to name the one in which a job hangs (resilience/reports.py).
        "TORCH_FR_BUFFER_SIZE": "512",
        **_spin_count(),
    }


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The ranks of a job that one machine starts, of several. first: the lowest of them. world: the ranks of all
    machines. host, port: where the store of the ranks listens, on the machine with rank 0. interface: the name of the
    network interface by which this machine reaches it; "" if it is not known."""

    first: int
    world: int
    host: str
    port: int
    interface: str = ""


def rank_variables(
    local_rank: int, ranks: int, listener: socket.socket | None, attempt: int = 0, share: NodeShare | None = None
) -> dict[str, str]:
    """Return the environment variables by which `start` finds the place of one of `ranks` processes of this machine.

    listener: a socket that listens where the store of the ranks will answer, so that no port is chosen before it is
    bound. The process of rank 0 must inherit it; a machine without rank 0 has none. share: None if there is no other
    machine.
    """
    if share is None:
        assert listener is not None, "a machine alone has rank 0"
        host, port = listener.getsockname()
        share = NodeShare(first=0, world=ranks, host=host, port=port)
    rank = share.first + local_rank
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(share.world),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": share.host,
        "MASTER_PORT": str(share.port),
        ATTEMPT_VARIABLE: str(attempt),
    }
    if share.interface and "GLOO_SOCKET_IFNAME" not in os.environ:  # Gloo would choose by the name of the host
        variables |= {"GLOO_SOCKET_IFNAME": share.interface, _OWN_INTERFACE: "1"}
    return variables | ({STORE_VARIABLE: str(listener.fileno())} if listener is not None and rank == 0 else {})


def outer_environment() -> dict[str, str]:
    """Return the environment without the variables of a job in which this process may run: torchrun's, the store's.
    The ranks that it starts are no part of that job.
    """
    names = (name for name in os.environ if name != STORE_VARIABLE and not name.startswith("TORCHELASTIC_"))
    return {name: os.environ[name] for name in names}


def enter_rank(
    local_rank: int, ranks: int, listener: socket.socket | None, attempt: int = 0, share: NodeShare | None = None
) -> None:
    """Describe this forked process as a rank, in its environment (rank_variables). All but rank 0 close `listener`."""
    for name in os.environ.keys() - outer_environment().keys():
        del os.environ[name]
    if os.environ.pop(_OWN_INTERFACE, ""):  # of an earlier attempt of this process, with other machines
        del os.environ["GLOO_SOCKET_IFNAME"]
    os.environ.update(rank_variables(local_rank, ranks, listener, attempt, share))
    if listener is None:
        return
    if os.environ["RANK"] == "0":
        listener.detach()
    else:
        listener.close()


def _spin_count() -> dict[str, str]:
    """Return SPIN_COUNT as a variable; none if the user chose how threads wait, which it would override."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPIN_COUNT}


def spin_briefly() -> None:
    """Set SPIN_COUNT for this process, unless the user chose otherwise. Has no effect once torch is imported."""
    for name, value in _spin_count().items():
        os.environ.setdefault(name, value)


def threads_per_rank(ranks: int, cores: int | None = None) -> int:
    """Return an equal share of the usable cores, at least one."""
    usable = cores or len(os.sched_getaffinity(0))
    return max(usable // ranks, 1)


def rank_threads(ranks: int, cores: int | None = None) -> int:
    """Return the number of threads of one of `ranks` processes: OMP_NUM_THREADS, else an equal share of the cores."""
    return environment_number("OMP_NUM_THREADS", threads_per_rank(ranks, cores), least=1)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> "torch.device":
    """Return the device cpu or cuda:local_rank. "auto" chooses a GPU if the machine has one.

    Raises ConfigError if the machine has no GPU for this rank.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            "E-GPU-MISSING",
            f"rank {local_rank} of this machine needs a GPU of its own, but {count} GPUs can be used here",
            rule="every process has its own GPU",
            fix="start fewer processes on this machine (lower parallel.dp_shard), or set train.device = 'cpu'",
            local_rank=local_rank,
            gpus=count,
        )
    return torch.device("cuda", local_rank)


def start(device: Literal["auto", "cpu", "cuda"], timeout_seconds: float, *, tf32: bool = False) -> RankInfo:
    """Join the job that the environment describes, by torchrun's variables; without them, start a job of one process.

    The backend is Gloo on CPUs and NCCL on GPUs. timeout_seconds: the timeout of the world group (`build_mesh` sets the
    timeout of other groups). Sets the number of threads, which affects the bits of a CPU run, and whether products of
    float32 matrices on a GPU use TF32. Raises ConfigError for a missing GPU or an incomplete environment.
    """
    import torch
    import torch.distributed as dist

    number = environment_number
    local_rank, local_world_size = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    rank_info = RankInfo(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=local_rank,
        local_world_size=local_world_size,
        attempt=number(ATTEMPT_VARIABLE, 0) + number("TORCHELASTIC_RESTART_COUNT", 0),
        device=choose_device(device, local_rank),
    )
    torch.set_num_threads(rank_threads(local_world_size))
    timeout = timedelta(seconds=timeout_seconds)
    on_gpu = rank_info.device.type == "cuda"
    use_tf32(tf32 and on_gpu)
    if on_gpu:
        torch.cuda.set_device(rank_info.device)
    dist.init_process_group(
        # Gloo carries values on the host: stop requests, losses, the ledger.
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store(rank_info, timeout),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
        device_id=rank_info.device if on_gpu else None,
    )
    return rank_info


def use_tf32(allowed: bool) -> None:
    """Allow or forbid that products of float32 matrices round their inputs to TF32 (10 bits of mantissa).

    `set_float32_matmul_precision` also sets `fp32_precision`, and the compiler reads it. If `fp32_precision` itself is
    set instead, the compiler fails (torch 2.9 and later). The setting also acts on CPUs with units for reduced
    precision, so a run on a CPU forbids TF32.
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")


def _store(rank_info: RankInfo, timeout: timedelta):
    """Return the store in which ranks find each other. torchrun's is the same in all attempts, so each one has a prefix
    there: no rank may read the addresses of the previous attempt. A store of its own needs none, and ranks of a node
    that replaced a lost one count fewer attempts."""
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:
        if rank_info.world_size > 1:
            raise ConfigError(
                "E-MASTER-ADDRESS",
                f"WORLD_SIZE={rank_info.world_size}, but MASTER_ADDR is not set",
                rule="several processes need the address of the first one (MASTER_ADDR, MASTER_PORT)",
                fix="start the processes with torchrun or `ingot train`, which set MASTER_ADDR",
                world_size=rank_info.world_size,
            )
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    hosted_by_torchrun = uses_store_of_torchrun()
    listener = os.environ.pop(STORE_VARIABLE, None)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"],
        environment_number("MASTER_PORT", 0, least=1),
        rank_info.world_size,
        is_master=rank_info.is_first and not hosted_by_torchrun,
        timeout=timeout,
        multi_tenant=True,
        # Without a socket of our own, the store listens on all interfaces of the machine.
        master_listen_fd=None if listener is None else int(listener),
    )
    if not hosted_by_torchrun:
        return store
    return dist.PrefixStore(f"attempt-{rank_info.attempt}", store)  # pyright: ignore[reportPrivateImportUsage]


def uses_store_of_torchrun() -> bool:
    """Return whether the ranks use the store of torchrun's first agent. A lost node cannot be replaced then:
    torchrun publishes the place of that store only once, at the start of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def stop() -> None:
    """Leave the job. Safe to call if this process never joined a job."""
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
