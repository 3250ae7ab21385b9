"""This rank's part of what a training step needs: mesh, model, optimizer, state."""

from pathlib import Path

import torch
import torch.distributed as dist

from ingot.hub.config_file import run_of
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.schema.run import RunConfig
from ingot.theory.layout import require_layout, resolve_parallel
from ingot.theory.schedule import ScheduleTable, build_table
from ingot.trainer.attend.kernels import require_kernels
from ingot.trainer.attend.packed import activate_newest_kernels, has_packed_kernel
from ingot.trainer.callbacks import Callbacks
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.export.model_folder import first_weights
from ingot.trainer.export.saved_weights import saved_weights
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.loss_terms import loss_terms
from ingot.trainer.mesh.mesh import Mesh, build_mesh
from ingot.trainer.model.attention import attend_locally
from ingot.trainer.model.experts import LocalDispatch
from ingot.trainer.model.init import initial_value
from ingot.trainer.model.routing import RouterLoss
from ingot.trainer.model.transformer import Transformer, sharding_of
from ingot.trainer.optim.build import build_optimizer, optimizer_rules
from ingot.trainer.optim.gradients import STATE as LOSS_SCALE
from ingot.trainer.optim.gradients import LossScale
from ingot.trainer.optim.matrices import Matrices
from ingot.trainer.parallel.apply import COMPUTE, InitialValue, ShardedModel, parallelize, should_compile
from ingot.trainer.parallel.balance import Balance
from ingot.trainer.parallel.context import ContextParallelism
from ingot.trainer.parallel.expert import dispatch_of
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.parallel.turns import Turns
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import Policy, Unwatched
from ingot.trainer.resilience.start_times import StartClock


def build_parts(
    config: RunConfig,
    device: torch.device,
    base: Path,
    policy: Policy | None = None,
    *,
    first_values: bool = True,
    continues: bool = False,
    given: GivenCallbacks = NOTHING_GIVEN,
    clock: StartClock | None = None,
) -> StepParts:
    """Build this rank's part of the model, with its first weights and its optimizer. Collective.

    base: the folder that relative paths of the run file start from. policy: None in a benchmark or a dry run.
    first_values: False leaves weights unset, for a dry run. continues: a checkpoint will replace the weights, so the
    folder of config.init is not read and may be missing. given: callbacks that a program gave to the run. clock: counts
    the time of the groups.
    Raises ConfigError with every problem of the layout, or if the model in config.init has a different shape.
    """
    require_layout(config)
    settings, arch = resolve_parallel(config), config.model
    whole = OPTIMIZERS[config.optim.kind].whole_matrices
    mesh = build_mesh(settings, device.type, config.launch.timeout_seconds, experts=arch.is_moe, copy=whole)
    if clock is not None:
        clock.end("groups")
    table = build_table(settings.schedule, settings.pp, config.accumulation, settings.stages_on_each_rank)
    first_value = _first_value(config, base, continues) if first_values else None
    # Without exchanges of experts, nothing of a pair could overlap.
    paired = any(table.overlaps) and settings.ep > 1
    turns = Turns(device, sends_again=settings.recompute != "selective") if paired else None
    model = _build_model(config, mesh, table, device, first_value, turns)
    program = PipelineExecutor(
        model.stages,
        table,
        mesh,
        model.data,
        d_model=arch.d_model,
        dtype=model.hidden,
        device=device,
        sequence_ranks=settings.tp if settings.sequence else 1,
        router_loss=RouterLoss if arch.is_moe else None,
        split=model.split,
        turns=turns,
    )
    rules = optimizer_rules(config.optim)
    matrices = None
    if whole:
        like = model.shards[0].value
        matrices = Matrices(model.placement(), rules, mesh.ranks("copy"), mesh.group("copy"), like)
    optimizer = build_optimizer(model.shards, rules, settings, base, matrices)
    device_of_shards = model.shards[0].value.device
    judge = StepJudge(config.guard, device_of_shards, config.settled_after) if config.guard.watches else None
    loss_scale = LossScale(device) if config.train.precision == "fp16" else None
    balance = Balance(model.stages, mesh, arch.moe, arch.expert_layers, device) if arch.is_moe else None
    if balance and first_value and config.init and not continues:
        for buffer in balance.shards:
            buffer.value.copy_(first_value(buffer.name, buffer.shape, buffer.offsets, buffer.sizes))
    callbacks = Callbacks(given.added_to(config), model.shards, device, given, loss_scale.scale if loss_scale else None)
    state = TrainingState(
        model.shards,
        optimizer,
        extras=loss_scale.state() if loss_scale else {},
        optional_extras=frozenset(LOSS_SCALE),  # the run may have begun in another precision
        buffers=balance.shards if balance else (),
        callbacks=callbacks.tensors(),
    )
    token_readers = mesh.one_per_token_rank(table.rank_of_stage[-1])
    return StepParts(
        config=config,
        mesh=mesh,
        model=model,
        program=program,
        optimizer=optimizer,
        loss_scale=loss_scale,
        state=state,
        policy=policy or Unwatched(),
        readers=mesh.one_per_data_rank(table.rank_of_stage[-1]),
        token_readers=token_readers,
        loss_share=1 / len(token_readers) if _global_rank() in token_readers else 0.0,
        step_judge=judge,
        balance=balance,
        callbacks=callbacks,
    )


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first_value(config: RunConfig, base: Path, continues: bool) -> InitialValue:
    """Return the function that makes first values: drawn from the seed, or read from the model in config.init."""

    def drawn(name: str, shape, offsets, sizes) -> torch.Tensor:
        return initial_value(name, shape, config.model, config.seed, offsets, sizes)

    if not config.init or continues:
        return drawn
    source = base / config.init
    return (saved_weights if run_of(source) else first_weights)(source, config.model, drawn)


def _build_model(
    config: RunConfig,
    mesh: Mesh,
    table: ScheduleTable,
    device: torch.device,
    first_value: InitialValue | None,
    turns: Turns | None,
) -> ShardedModel:
    """Build the model with the attention and the expert dispatch that the mesh needs, and distribute it."""
    arch = config.model
    if mesh.parallel.ring > 1:
        require_kernels(device, COMPUTE[config.train.precision], arch.head_dim)
    if device.type == "cuda":
        activate_newest_kernels(torch.cuda.get_device_capability(device)[0], arch.head_dim)
    compiled = should_compile(config.train, device, mesh.parallel.splits_backward)
    has_masks = config.data.mask_documents or 0 < arch.sliding_window < config.train.seq_len
    packed = has_packed_kernel(device.type == "cuda", COMPUTE[config.train.precision], arch.head_dim)
    whole_attention = mesh.parallel.cp == 1 and (packed or not has_masks)
    context = ContextParallelism(mesh, attend_locally, hidden=compiled and not whole_attention)
    # A dense mesh has no expert groups.
    dispatch = dispatch_of(mesh, LocalDispatch(context.kept.once)) if arch.is_moe else None

    def make() -> Transformer:
        with torch.device("meta"):
            model = Transformer(arch, context.attend, dispatch)
        model.readout.terms = loss_terms(config)
        return model

    model = parallelize(
        make,
        mesh,
        config.train,
        device,
        sharding=sharding_of(arch),
        rank_of_stage=table.rank_of_stage,
        micro_batches=config.accumulation,
        initial_value=first_value,
        kept=context.kept,
        whole_attention=whole_attention,
    )
    if turns is not None:
        turns.holders += [holder for holder in (model.split, context.kept) if holder is not None]
    return model
