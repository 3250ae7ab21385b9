"""One rank of a run of thousands, traced on a laptop: the real build and the real step, with nothing behind them.

Tensors are fake (shape and dtype, no memory), the process group is fake (it says yes to everything). Everything else is
the program that trains. Started by train/dry_run.py as `python -m ingot.rehearse.dryrun.role`: a request on standard
input, one line of JSON per traced rank on standard output. Processes that trace are forked from this one, which has
imported everything they need.
"""

import dataclasses
import gc
import json
import multiprocessing
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.config import from_dict
from ingot.errors import IngotError
from ingot.rehearse.dryrun.attention import attended_pairs
from ingot.rehearse.dryrun.fake import FakeProgram, Known
from ingot.rehearse.dryrun.rendezvous import Call
from ingot.rehearse.dryrun.stand_ins import as_on_cuda, dealt_to_experts, own_groups_only, replaced
from ingot.rehearse.dryrun.tracker import HOST, Tracker
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.layout import resolve_parallel
from ingot.trainer import parts
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.parallel.zero import Zero
from ingot.trainer.parts import Parts
from ingot.trainer.resilience.policy import DefaultPolicy
from ingot.trainer.step import train_step

BUILD, FIRST, STEADY, SAVE = "initialisation", "first step", "steady step", "save"
_CPU = torch.device("cpu")


def trace_rank(
    config: RunConfig, rank: int, device: str = "cpu", known: Known | None = None, loads: Sequence[float] = ()
) -> Tracker:
    """Build the run as `rank`, take two optimizer steps, and gather what a checkpoint holds; the tracker saw it all.

    device: "cuda" for the operations and the chunks of logits that the program uses there. Nothing is compiled, so no
    elementwise operations are fused, and parallel.async_tp is not followed: it does the same collectives in parts.
    known: what fakes remember, from ranks traced before. loads: of experts, in any measure; none: all alike.
    Needs a process without a process group, and leaves none.
    """
    train = dataclasses.replace(config.train, compile="off", device="cpu")
    parallel = dataclasses.replace(config.parallel, async_tp=False)
    config = dataclasses.replace(config, train=train, parallel=parallel)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.parallel.world_size)
    try:
        fakes = FakeProgram(known)
        tracker = Tracker(fakes)

        def within_state(original: Callable) -> Callable:
            def build_within(*args, **kwargs):
                with tracker.within(_state_kind(config)):
                    return original(*args, **kwargs)

            return build_within

        new_group = own_groups_only(dist.new_group, rank)
        with replaced(dist, "new_group", new_group):
            # Its table of ranks has to be real.
            mesh = build_mesh(resolve_parallel(config), "cpu", experts=config.model.is_moe)
        with (
            replaced(dist, "new_group", new_group),
            replaced(parts, "build_mesh", lambda *_, **__: mesh),
            replaced(parts, "build_optimizer", within_state(parts.build_optimizer)),
            dealt_to_experts(config, mesh, loads),
            as_on_cuda() if device == "cuda" else nullcontext(),
            fakes,
            tracker,
        ):
            tracker.begin(BUILD)
            with tracker.within("parameters", "build"):
                policy = DefaultPolicy(RunFolder(Path()), scaled_loss=train.precision == "fp16")
                run = parts.build_parts(config, _CPU, Path(), policy, first_values=False)
            _follow(run, tracker)
            for moment in (FIRST, STEADY):
                tracker.begin(moment)
                with tracker.within("other", "batch"):
                    batch = empty_batch(config)
                train_step(run, batch, config.optim.lr)
                del batch
            tracker.begin(SAVE)
            with tracker.within("other", "save"):
                for block in run.state.blocks(run.optimizer.moments(), first_rank=rank == 0):
                    block.tensor.detach().contiguous()
            return tracker
    finally:
        dist.destroy_process_group()


def _state_kind(config: RunConfig) -> str:
    """Of the optimizer's state, which may be offloaded."""
    return "optimizer" if config.parallel.offload == "none" else HOST


def empty_batch(config: RunConfig) -> Batch:
    shape = config.accumulation, config.train.micro_batch, config.train.seq_len
    tokens = torch.zeros(*shape[:-1], shape[-1] + 1, dtype=torch.int64)
    documents = torch.zeros(shape, dtype=torch.int32) if config.data.mask_documents else None
    return Batch(1, np.zeros(0, np.int64), tokens[..., :-1], tokens[..., 1:], documents, 0.0)


# -- what runs where, for the tracker ------------------------------------------------------------------------------


def _follow(run: Parts, tracker: Tracker) -> None:
    """Name places (the module whose forward or backward it is, and the parts of a step) and kinds of memory."""
    for stage in run.model.stages.values():
        names = [
            "embed",
            "norm",
            "readout",
            *(f"blocks.{i}" for i in dict(stage.get_submodule("blocks").named_children())),
        ]
        for name in names:
            module = getattr(stage, name, None) if "." not in name else stage.get_submodule(name)
            if isinstance(module, nn.Module):
                _name_places(module, name, tracker)
    settings, state = run.config.parallel, _state_kind(run.config)
    if settings.offload_parameters:
        tracker.label((piece.value for piece in run.model.pieces), HOST)
    gradients = HOST if settings.offload_parameters else "gradients"

    def update(step: Callable) -> Callable:
        def step_and_label(*args, **kwargs):
            tracker.label((piece.grad for piece in run.model.pieces), gradients)
            with tracker.within(state, "update"):
                step(*args, **kwargs)
            tracker.place, tracker.kind = "publish", "communication"

        return step_and_label

    def reduce(original: Callable) -> Callable:
        def reduce_and_go_on(*args, **kwargs):
            with tracker.within("gradients", "reduce"):
                original(*args, **kwargs)
            tracker.place, tracker.kind = "clip", "other"

        return reduce_and_go_on

    def publish(original: Callable) -> Callable:
        def publish_and_go_on(*args, **kwargs):
            original(*args, **kwargs)
            tracker.place, tracker.kind = "", None

        return publish_and_go_on

    def arrived(original: Callable) -> Callable:
        def within_gradients(*args, **kwargs):
            with tracker.within("gradients"):
                original(*args, **kwargs)

        return within_gradients

    def balance(original: Callable) -> Callable:
        def within_balance(*args, **kwargs):
            with tracker.within("other", "balance"):
                return original(*args, **kwargs)

        return within_balance

    _wrap(run.optimizer, "step", update)
    _wrap(run.model, "reduce", reduce)
    _wrap(run.model, "publish", publish)
    if isinstance(run.model.data, Zero):
        _wrap(run.model.data, "_arrived", arrived)
    if run.balance:
        _wrap(run.balance, "step", balance)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _name_places(module: nn.Module, name: str, tracker: Tracker) -> None:
    is_readout = name == "readout"

    def enter(place: str, kind: str | None = None) -> None:
        tracker.place, tracker.kind = place, kind

    def before(module, args):
        enter(f"forward {name}", "logits" if is_readout else None)

    def after(module, args, output):
        enter(f"forward {name}")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: enter(f"backward {name}"))

    # First of all hooks: what data parallelism gathers before a module happens at this module.
    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, prepend=True)


# -- what goes back to the process that asked ------------------------------------------------------------------------


def told(config: RunConfig, tracker: Tracker, rank: int, cpu_seconds: float) -> dict[str, Any]:
    """A trace as JSON: calls as numbers into a table of the different ones."""
    parallel = resolve_parallel(config)
    row = parallel.cp // parallel.ring * parallel.tp  # ranks at one place of a ring
    table: dict[Call, int] = {}
    groups: dict[tuple[int, ...], int] = {}
    program = {}
    for moment, _ in tracker.moments:
        calls = [event.call for event in tracker.events_of(moment) if event.call is not None]
        program[moment] = [table.setdefault(call, len(table)) for call in calls]
    for call in table:
        groups.setdefault(call.group, len(groups))
    rows = [
        [c.op, groups[c.group], c.dtype, c.elements, c.channel, c.peer, c.label, c.ticket, c.joined, c.own]
        for c in table
    ]
    return {
        "rank": rank,
        "peaks": {moment: dataclasses.asdict(peak) for moment, peak in tracker.peaks().items()},
        "flops": tracker.flops_of(STEADY),
        "attended": dataclasses.asdict(attended_pairs(config, parallel, rank // row % parallel.ring)),
        "operations": tracker.operations,
        "groups": [list(group) for group in groups],
        "calls": rows,
        "program": program,
        "cpu_seconds": cpu_seconds,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _trace_and_tell(config: RunConfig, device: str, loads: Sequence[float], pipe: Connection) -> None:
    """Answer for one rank after the other until the pipe is closed. What fakes remember serves all of them."""
    known: Known = {}
    with suppress(EOFError):
        while True:
            rank, started = pipe.recv(), time.process_time()
            try:
                tracker = trace_rank(config, rank, device, known, loads)
                answer = told(config, tracker, rank, time.process_time() - started)
            except IngotError as error:
                answer = {"rank": rank, "error": error.found, "rule": error.rule, "fix": error.fix}
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                answer = {"rank": rank, "error": text, "traceback": traceback.format_exc()}
            pipe.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Trace the ranks of the request on standard input in `jobs` processes at a time; a rank that fails ends it."""
    request = json.load(sys.stdin)
    config = from_dict(RunConfig, request["config"])
    torch.set_num_threads(1)
    FakeProgram()  # imports the rest
    gc.freeze()  # what is imported is not looked through again for every few thousand tensors
    context = multiprocessing.get_context("fork")
    left, running = list(request["ranks"]), {}
    for _ in range(min(request["jobs"], len(left))):
        ours, theirs = context.Pipe()
        arguments = config, request["device"], request["loads"], theirs
        process = context.Process(target=_trace_and_tell, args=arguments, daemon=True)
        process.start()
        theirs.close()
        running[ours] = process, left.pop(0)
        ours.send(running[ours][1])
    while running:
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            process, rank = running.pop(pipe)
            try:
                answer = pipe.recv_bytes().decode()
            except EOFError:
                process.join()
                answer = json.dumps({"rank": rank, "error": f"its process died (exit code {process.exitcode})"})
                left.clear()
            if left:
                running[pipe] = process, left.pop(0)
                pipe.send(running[pipe][1])
            print(answer, flush=True)


if __name__ == "__main__":
    main()
