"""The stress: every legal layout of some ranks, each on forked processes, against one process with the same model.

A layout trains three steps in fp32 and three in bf16. Its mean loss and its gradient norm, which every rank must know,
have to equal those of one process within the limits of `ALLOWED`. A layout that fails or hangs is killed; the next one
begins in new processes. The process that forks must not have touched a device.
"""

import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_parts.runs import layouts, stress_run
from ingot.rehearse.proof.ranks import STEPS, batch_of
from ingot.schema.run import RunConfig
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.start import enter_rank, start, stop
from ingot.trainer.step import train_step

# precision -> largest deviation of a loss and of a gradient norm, relative to one process
ALLOWED = {"fp32": (1e-3, 1e-3), "bf16": (1e-2, 5e-2)}
_SECONDS = 120.0  # a layout without an answer for so long hangs
Layout = tuple[str, bool, dict[str, Any]]  # name, has experts, settings of `Parallel`
Numbers = dict[str, Any]  # precision -> losses and gradient norms by step; "step_seconds"


def due(world: int, done: frozenset[str], *, smoke: bool) -> list[Layout]:
    """Return the layouts of `world` ranks that are not in `done`. smoke: only a few of them."""
    found = list(layouts(world))
    return [layout for layout in found[:: len(found) // 3 if smoke else 1] if layout[0] not in done]


def stress(left: list[Layout], device: str, *, smoke: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a layout, its result) for each one. Raises RuntimeError if one process alone fails."""
    expected: dict[bool, Numbers] = {}
    for name, experts, settings in left:
        if experts not in expected:
            found = _play(_runs(device, experts, {}), smoke)
            if isinstance(found, str):
                raise RuntimeError(f"one process alone: {found}")
            expected[experts] = found
        found = _play(_runs(device, experts, settings), smoke)
        yield name, {"error": found} if isinstance(found, str) else compare(found, expected[experts])


def compare(found: Numbers, expected: Numbers) -> dict[str, Any]:
    """Return the largest deviations by precision, and an error if one of them is too large."""
    result: dict[str, Any] = {"bf16_step_seconds": found["step_seconds"]}
    for precision, limits in ALLOWED.items():
        for what, limit in zip(("loss", "gradient norm"), limits, strict=True):
            pairs = zip(found[precision][what], expected[precision][what], strict=True)
            off = max(abs(ours - right) / abs(right) for ours, right in pairs)
            result[f"{precision} {what}"] = off
            if not off <= limit:  # also if it is not a number
                result["error"] = f"{what} in {precision} differs by {off:.2g} of one process's, allowed are {limit:g}"
    return result


def _runs(device: str, experts: bool, settings: dict[str, Any]) -> list[RunConfig]:
    return [stress_run(device, experts=experts, precision=precision, **settings) for precision in ALLOWED]


def _train(run: RunConfig, device: torch.device, smoke: bool) -> dict[str, list[float]]:
    parts = build_parts(run, device, Path())
    facts: dict[str, list[float]] = {"loss": [], "gradient norm": [], "seconds": []}
    for number in range(1, (1 if smoke else STEPS) + 1):
        batch = batch_of(run, parts.mesh, number)
        batch = replace(batch, inputs=batch.inputs.to(device), targets=batch.targets.to(device))
        began = time.perf_counter()
        result = train_step(parts, batch, run.optim.lr)
        loss = result.loss.detach().float() * parts.loss_share
        dist.all_reduce(loss)
        facts["loss"].append(loss.item())
        facts["gradient norm"].append(result.grad_norm.item())
        facts["seconds"].append(time.perf_counter() - began)
    parts.optimizer.close()
    return facts


def _rank(runs: list[RunConfig], rank: int, listener: socket.socket, pipe: Any, smoke: bool) -> None:
    enter_rank(rank, runs[0].parallel.world_size, listener)
    try:
        place = start(runs[0].train.device, _SECONDS)
        facts = {run.train.precision: _train(run, place.device, smoke) for run in runs}
        pipe.send(facts | {"step_seconds": facts["bf16"]["seconds"][-1]})
        stop()
    except BaseException as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        time.sleep(_SECONDS)  # the parent kills all ranks: those that wait for this one would wait in destructors
    finally:
        os._exit(0)


def _play(runs: list[RunConfig], smoke: bool) -> Numbers | str:
    """Return the numbers of a layout, or what went wrong as text. All ranks have ended afterwards."""
    world, context = runs[0].parallel.world_size, multiprocessing.get_context("fork")
    gc.freeze()  # a collection in a rank would copy all that exists now
    pipes, processes, answers = {}, [], {}
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(runs, rank, listener, theirs, smoke))
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
        while pipes:
            if not (ready := wait(list(pipes), _SECONDS)):
                return f"nothing for {_SECONDS:g} s: the ranks wait for each other"
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    return f"rank {rank} died"
                if isinstance(answers[rank], str):
                    return answers[rank]
    finally:
        for process in processes:
            process.join(5 if len(answers) == world else 0)
            process.kill()
            process.join()
    first = answers[0]
    for rank, numbers in answers.items():
        for precision in ALLOWED:
            for what in ("loss", "gradient norm"):
                if numbers[precision][what] != first[precision][what]:
                    return f"rank {rank} has another {what} in {precision} than rank 0"
    return first
