"""The trace of one rank of a run: the real build and the real step on fake tensors, even for thousands of ranks.

Tensors have a shape and a dtype but no memory; collectives of the fake process group return at once. All other code is
the training program. dry_run.py starts `python -m ingot.rehearse.dryrun.role` with a request on standard input and
reads one line of JSON per phase that a rank enters, and one per traced rank. The tracing processes are forked from this
process after all imports.
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
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.errors import IngotError
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.rehearse.dryrun.fake import FakeProgram, Known
from ingot.rehearse.dryrun.rendezvous import Call
from ingot.rehearse.dryrun.stand_ins import as_on_cuda, dealt_to_experts, replaced
from ingot.rehearse.dryrun.tracker import HOST, Tracker
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.flops import mean_keys
from ingot.theory.layout import resolve_parallel
from ingot.theory.rules import run_from_dict
from ingot.trainer import build as trainer_build
from ingot.trainer.attend.packed import has_packed_kernel
from ingot.trainer.attend.tiles import Tile, tiles_of
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.fake import own_groups_only
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.parallel.apply import COMPUTE
from ingot.trainer.parallel.ring import plain_tiles, ring_tiles
from ingot.trainer.parallel.zero import Zero
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import Unwatched
from ingot.trainer.step import train_step
from ingot.trainer.torch_private import fake_store

BUILD, FIRST, STEADY, SAVE = "initialisation", "first step", "steady step", "save"
_CPU = torch.device("cpu")


def trace_rank(
    config: RunConfig,
    rank: int,
    device: str = "cpu",
    known: Known | None = None,
    loads: Sequence[float] = (),
    began: Callable[[str], object] = str,
) -> Tracker:
    """Build the run as `rank`, take two optimizer steps and gather the tensors of a checkpoint; return the tracker.

    device: "cuda" traces the operations and logit chunks that the program uses on CUDA. Nothing is compiled, so no
    elementwise operations are fused. parallel.async_tp is ignored, because it only splits collectives into parts.
    known: cache of fake operations, shared with earlier traces. loads: loads of the experts, in any unit; empty: all
    equal. began: called with the name of each phase at its start. The process must not have a process group; the one
    made here is destroyed at the end.
    """
    train = dataclasses.replace(config.train, compile="off", device="cpu")
    parallel = dataclasses.replace(config.parallel, async_tp=False)
    config = dataclasses.replace(config, train=train, parallel=parallel)
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=config.parallel.world_size)
    try:
        fakes = FakeProgram(known)
        tracker = Tracker(fakes)

        def within(original: Callable, *kind: str) -> Callable:
            def build_within(*args, **kwargs):
                with tracker.within(*kind):
                    return original(*args, **kwargs)

            return build_within

        world = dist.group.WORLD
        assert world is not None  # it was made above
        tracker.groups = [(world.group_name, "world", tuple(range(dist.get_world_size())))]
        new_group = _listed(own_groups_only(dist.new_group, rank), tracker)
        with replaced(dist, "new_group", new_group):
            # Built outside the fake mode, because the mesh contains a real tensor of ranks.
            whole = OPTIMIZERS[config.optim.kind].whole_matrices
            mesh = build_mesh(resolve_parallel(config), "cpu", experts=config.model.is_moe, copy=whole)
        with (
            replaced(dist, "new_group", new_group),
            replaced(trainer_build, "build_mesh", lambda *_, **__: mesh),
            replaced(trainer_build, "build_optimizer", within(trainer_build.build_optimizer, _state_kind(config))),
            replaced(trainer_build, "Callbacks", within(trainer_build.Callbacks, "other", "callbacks")),
            dealt_to_experts(config, mesh, loads),
            as_on_cuda() if device == "cuda" else nullcontext(),
            fakes,
            tracker,
        ):
            began(BUILD)
            tracker.begin(BUILD)
            with tracker.within("parameters", "build"):
                # State on the host waits for the veto, whose value fake tensors do not have.
                offloads = config.parallel.offload != "none"
                scaled = train.precision == "fp16"
                policy = Unwatched() if offloads else DefaultPolicy(RunFolder(Path()), scaled_loss=scaled)
                guard = dataclasses.replace(config.guard, preset="watch") if offloads else config.guard
                config = dataclasses.replace(config, guard=guard)
                run = trainer_build.build_parts(config, _CPU, Path(), policy, first_values=False)
            _follow(run, tracker)
            if run.program.turns is not None:
                run.program.turns.holders.append(tracker)
                run.program.turns.in_thread = tracker.in_thread
            for moment in (FIRST, STEADY):
                began(moment)
                tracker.begin(moment)
                with tracker.within("other", "batch"):
                    batch = empty_batch(config)
                train_step(run, batch, config.optim.lr)
                del batch
            began(SAVE)
            tracker.begin(SAVE)
            with tracker.within("other", "save"):
                for block in run.state.blocks(run.optimizer.moments(), first_rank=rank == 0):
                    block.tensor.detach().contiguous()
            return tracker
    finally:
        dist.destroy_process_group()


def _listed(original: Callable, tracker: Tracker) -> Callable:
    """Wrap `dist.new_group` so that the tracker lists the groups of this rank."""

    def new_group(ranks: list[int], *args, group_desc: str = "", **kwargs):
        group = original(ranks, *args, group_desc=group_desc, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            tracker.groups.append((group.group_name, group_desc, tuple(dist.get_process_group_ranks(group))))
        return group

    return new_group


def _state_kind(config: RunConfig) -> str:
    """Return the tracker's kind of memory for optimizer state: "optimizer", or HOST if it is offloaded."""
    return "optimizer" if config.parallel.offload == "none" else HOST


def empty_batch(config: RunConfig) -> Batch:
    shape = config.accumulation, config.train.micro_batch, config.train.seq_len
    tokens = torch.zeros(*shape[:-1], shape[-1] + 1, dtype=torch.int64)
    # Real numbers, not fake ones: attention is planned on the host.
    documents = torch.from_numpy(np.zeros(shape, np.int32)) if config.data.mask_documents else None
    return Batch(1, np.zeros(0, np.int64), tokens[..., :-1], tokens[..., 1:], documents, 0.0)


# -- places of the program, for the tracker
# ------------------------------------------------------------------------------


def _follow(run: StepParts, tracker: Tracker) -> None:
    """Install hooks that set the tracker's place (module or part of a step) and kind of memory as the program runs."""
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
        tracker.label((piece.value for piece in run.model.shards), HOST)
    gradients = HOST if settings.offload_parameters else "gradients"

    def update(step: Callable) -> Callable:
        def step_and_label(*args, **kwargs):
            tracker.label((piece.grad for piece in run.model.shards), gradients)
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

    # First in the list of hooks, so that data-parallel gathers before a module are recorded at this module.
    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, prepend=True)


# -- the answer to the calling process ------------------------------------------------------------------------


def answer_of(
    config: RunConfig, tracker: Tracker, rank: int, cpu_seconds: float, device: str = "cpu"
) -> dict[str, Any]:
    """Return a trace as values for JSON. "program": for each phase, indices into "calls", a table of distinct calls."""
    parallel = resolve_parallel(config)
    row = parallel.cp // parallel.ring * parallel.tp  # number of ranks with the same ring index
    table: dict[Call, int] = {}
    groups: dict[tuple[int, ...], int] = {}
    program = {}
    for moment, _ in tracker.moments:
        calls = [event.call for event in tracker.events_of(moment) if event.call is not None]
        program[moment] = [table.setdefault(call, len(table)) for call in calls]
    for group in (*(call.group for call in table), *(ranks for _, _, ranks in tracker.groups)):
        groups.setdefault(group, len(groups))
    rows = [
        [c.op, groups[c.group], c.dtype, c.elements, c.channel, c.peer, c.label, c.ticket, c.joined, c.own]
        for c in table
    ]
    return {
        "rank": rank,
        "peaks": {moment: dataclasses.asdict(peak) for moment, peak in tracker.peaks().items()},
        "flops": tracker.flops_of(STEADY),
        "attended": attended_pairs(config, parallel, rank // row % parallel.ring, device),
        "operations": tracker.operations_of(STEADY),
        "groups": [list(group) for group in groups],
        "calls": rows,
        "communicators": [[name, purpose, groups[ranks]] for name, purpose, ranks in tracker.groups],
        "program": program,
        "cpu_seconds": cpu_seconds,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _serve(config: RunConfig, device: str, loads: Sequence[float], pipe: Connection) -> None:
    """Trace each rank whose number arrives on `pipe` and send the answer back, until the pipe is closed. All traces
    share one cache of fake operations.
    """
    known: Known = {}
    with suppress(EOFError):
        while True:
            rank, started = pipe.recv(), time.process_time()
            try:
                tracker = trace_rank(config, rank, device, known, loads, partial(_report, pipe, rank))
                answer = answer_of(config, tracker, rank, time.process_time() - started, device)
            except IngotError as error:
                answer = {"rank": rank, "error": error.found, "rule": error.rule, "fix": error.fix}
                answer |= {"code": error.code, "facts": error.facts}
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                answer = {"rank": rank, "error": text, "traceback": traceback.format_exc()}
            pipe.send((True, json.dumps(answer)))


def _report(pipe: Connection, rank: int, phase: str) -> None:
    pipe.send((False, json.dumps({"rank": rank, "phase": phase})))


def attended_pairs(config: RunConfig, parallel: Parallel, ring_index: int, device: str) -> float:
    """Return the query-key pairs that attention computes per head, sequence and layer on the rank at `ring_index` of a
    ring: half of a causal tile, and all of other tiles (attend/tiles.py). parallel: without any "auto".

    The batches of a dry run have one document per sequence, which is the most work that documents can be.
    """
    arch, tokens = config.model, config.train.seq_len
    window = arch.sliding_window if arch.sliding_window < tokens else 0
    masked, part = window > 0 or config.data.mask_documents, tokens // parallel.ring
    if parallel.ring > 1:
        found: list[Tile] = []
        for source in range(parallel.ring):
            if masked:
                found += ring_tiles(parallel, ring_index, source, part, ends=None, window=window, batch=1)
            else:
                found += plain_tiles(parallel, ring_index, source, part)
        return sum(tile.pairs for tile in found)
    if has_packed_kernel(device == "cuda", COMPUTE[config.train.precision], arch.head_dim) or not masked:
        return tokens * mean_keys(tokens, window)
    return sum(tile.pairs for tile in tiles_of((range(tokens),), (range(tokens),), None, window, batch=1))


def main() -> None:
    """Trace the ranks of the request on standard input in up to `jobs` processes, and print one line of JSON per phase
    and per rank. If a process dies, no further ranks are started.
    """
    request = json.load(sys.stdin)
    config = run_from_dict(request["config"])
    torch.set_num_threads(1)
    FakeProgram()  # imports modules lazily
    gc.freeze()  # the collector skips imported objects, which it would scan again every few thousand tensors
    context = multiprocessing.get_context("fork")
    left, running = list(request["ranks"]), {}
    for _ in range(min(request["jobs"], len(left))):
        ours, theirs = context.Pipe()
        arguments = config, request["device"], request["loads"], theirs
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        running[ours] = process, left.pop(0)
        ours.send(running[ours][1])
    while running:
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            process, rank = running[pipe]
            try:
                done, line = pipe.recv()
            except EOFError:
                process.join()
                done, line = True, json.dumps({"rank": rank, "died": process.exitcode})
                left.clear()
            if done:
                del running[pipe]
                if left:
                    running[pipe] = process, left.pop(0)
                    pipe.send(running[pipe][1])
            print(line, flush=True)


if __name__ == "__main__":
    main()
