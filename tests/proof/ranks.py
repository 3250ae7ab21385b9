"""Ranks forked from this process, anew for every case."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # autograd imports it when it is first used, which would take every rank two seconds
import torch.distributed as dist


class RanksFailed(Exception):
    """An error on a rank, or no answer in time. All ranks of the case are gone."""


class Ranks:
    """`run(function, world, ...)` calls `function(folder, ...)` on every rank. A context manager."""

    def __init__(self):
        self._processes: list = []
        self._pipes: list = []
        self._files = tempfile.TemporaryDirectory(prefix="ingot-proof-")
        self._runs = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()
        self._files.cleanup()

    def run(self, function: Callable[..., Any], world: int, *arguments, timeout: float = 120.0) -> list:
        """Results by rank. function and arguments must be picklable. Raises RanksFailed.

        timeout: seconds; a collective that waits for half of it fails, so that its rank can say where it was. Ranks
        that wait elsewhere leave their stacks.
        """
        # Anew for every case: groups that PyTorch keeps in its caches keep their threads, and Gloo's threads are busy.
        self.close()
        self._fork(world)
        self._runs += 1
        folder = Path(self._files.name) / str(self._runs)
        folder.mkdir()
        for pipe in self._pipes:
            pipe.send((function, str(folder), timeout, arguments))
        deadline, results, waiting = time.monotonic() + timeout, {}, dict(enumerate(self._pipes))
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting.values()), max(left, 0))
            if not ready:
                stacks = "\n".join(f"rank {n}:\n{(folder / f'stack-{n}').read_text()}" for n in sorted(waiting))
                self._fail(f"ranks {sorted(waiting)} of {world}: no answer within {timeout:.0f} s\n{stacks}")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    ok, results[rank] = waiting.pop(rank).recv()
                except EOFError:
                    ok, results[rank] = False, "died without a word"
                if not ok:
                    self._fail(f"rank {rank} of {world}: {results[rank]}")
        return [results[rank] for rank in range(world)]

    def _fork(self, world: int) -> None:
        context = multiprocessing.get_context("fork")
        with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
            for rank in range(world):
                ours, theirs = context.Pipe()
                of_rank = (rank, world, listener, theirs, [ours, *self._pipes])
                process = context.Process(target=_serve, args=of_rank, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _fail(self, message: str) -> None:
        self.close()
        raise RanksFailed(message)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
        self._pipes, self._processes = [], []


def join(listener: socket.socket, rank: int, world: int, timeout: timedelta) -> None:
    """Join the group of `world` ranks whose store rank 0 opens on `listener`, a socket made before the fork.

    A store in a file costs a fifth more CPU time: its readers poll.
    """
    gc.freeze()  # a collection would visit, and so copy, all objects of the parent
    port = listener.getsockname()[1]
    own = listener.detach() if rank == 0 else listener.close()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, master_listen_fd=own, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _serve(rank: int, world: int, listener: socket.socket, pipe, others: list) -> None:
    """The life of a rank: one case."""
    for other in others:
        other.close()
    torch.set_num_threads(1)
    try:
        function, folder, timeout, arguments = pipe.recv()
        with Path(folder, f"stack-{rank}").open("w") as stack:
            faulthandler.dump_traceback_later(0.8 * timeout, file=stack)
            join(listener, rank, world, timedelta(seconds=timeout / 2))
            result = function(Path(folder), *arguments)
            dist.barrier()
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
        pipe.send((True, result))
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # no atexit handlers of the parent's pytest
