"""The run's model on this rank's place in the mesh, and what updates it: what a run, a proof and a dry run share."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.schema.run import RunConfig
from ingot.theory.layout import require_layout, resolve_parallel
from ingot.theory.schedule import ScheduleTable, build_table
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.export.first_weights import first_weights
from ingot.trainer.mesh.mesh import Mesh, build_mesh
from ingot.trainer.model.attention import attend_locally
from ingot.trainer.model.experts import LocalDispatch
from ingot.trainer.model.init import initial_value
from ingot.trainer.model.routing import RouterLoss
from ingot.trainer.model.transformer import SHARDING, Transformer
from ingot.trainer.optim.adamw import AdamW
from ingot.trainer.optim.loss_scale import STATE as LOSS_SCALE
from ingot.trainer.optim.loss_scale import LossScale
from ingot.trainer.optim.offload import build_optimizer
from ingot.trainer.parallel.apply import COMPUTE, InitialValue, ShardedModel, parallelize
from ingot.trainer.parallel.balance import Balance
from ingot.trainer.parallel.context import ContextParallelism
from ingot.trainer.parallel.expert import dispatch_of
from ingot.trainer.parallel.flash import require_kernels
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.resilience.policy import Policy, Unwatched


@dataclass(kw_only=True)
class Parts:
    """What trains: the same on a laptop, on thousands of ranks, and in a trace without devices.

    program: runs micro-batches through the pipeline's stages, be it one. loss_scale: in fp16 only. state: what is
    saved. readers: the ranks that know losses, by the part of the batch that they read; of those that share its
    sequences, the first. token_readers: all of them. balance: of the experts, if the model has any.
    """

    config: RunConfig
    mesh: Mesh
    model: ShardedModel
    program: PipelineExecutor
    optimizer: AdamW
    loss_scale: LossScale | None
    state: TrainingState
    policy: Policy
    readers: list[int]
    token_readers: list[int]
    balance: Balance | None


def build_parts(
    config: RunConfig,
    device: torch.device,
    base: Path,
    policy: Policy | None = None,
    *,
    first_values: bool = True,
    continues: bool = False,
) -> Parts:
    """The run's model on this rank's place in the mesh, with its first weights, and what updates it. Collective.

    base: where relative paths of the run file start. policy: none watches over a benchmark. first_values: False leaves
    weights unset, for a trace. continues: a checkpoint will replace them, so config.init is not read, nor need it still
    be there. Raises ConfigError with every problem of the layout, or if the model of config.init is another one.
    """
    require_layout(config)
    settings, arch = resolve_parallel(config), config.model
    mesh = build_mesh(settings, device.type, config.launch.timeout_seconds, experts=arch.is_moe)
    table = build_table(settings.schedule, settings.pp, config.accumulation, settings.stages_on_each_rank)
    first_value = _first_value(config, base, continues) if first_values else None
    model = _build_model(config, mesh, table, device, first_value)
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
    )
    optimizer = build_optimizer(model.shards, config.optim, settings, base)
    loss_scale = LossScale(device) if config.train.precision == "fp16" else None
    balance = Balance(model.stages, mesh, arch.moe, arch.expert_layers, device) if arch.is_moe else None
    if balance and first_value and config.init and not continues:
        for buffer in balance.shards:
            buffer.value.copy_(first_value(buffer.name, buffer.shape, buffer.offsets, buffer.sizes))
    state = TrainingState(
        model.shards,
        optimizer,
        extras=loss_scale.state() if loss_scale else {},
        optional_extras=frozenset(LOSS_SCALE),  # a run may have begun in another precision
        buffers=balance.shards if balance else (),
    )
    return Parts(
        config=config,
        mesh=mesh,
        model=model,
        program=program,
        optimizer=optimizer,
        loss_scale=loss_scale,
        state=state,
        policy=policy or Unwatched(),
        readers=mesh.one_per_data_rank(table.rank_of_stage[-1]),
        token_readers=mesh.one_per_token_rank(table.rank_of_stage[-1]),
        balance=balance,
    )


def _first_value(config: RunConfig, base: Path, continues: bool) -> InitialValue:
    """Drawn, or of the model that the run begins with."""

    def drawn(name: str, shape, offsets, sizes) -> torch.Tensor:
        return initial_value(name, shape, config.model, config.seed, offsets, sizes)

    return first_weights(base / config.init, config.model, drawn) if config.init and not continues else drawn


def _build_model(
    config: RunConfig, mesh: Mesh, table: ScheduleTable, device: torch.device, first_value: InitialValue | None
) -> ShardedModel:
    """The seams of the model, attention and dispatch, get what the mesh asks for."""
    arch = config.model
    if mesh.parallel.ring > 1:
        require_kernels(device, COMPUTE[config.train.precision], arch.head_dim)
    context = ContextParallelism(mesh, attend_locally)
    dispatch = dispatch_of(mesh, LocalDispatch()) if arch.is_moe else None  # the views of experts are not there

    def make() -> Transformer:
        with torch.device("meta"):
            return Transformer(arch, context.attend, dispatch)

    return parallelize(
        make,
        mesh,
        config.train,
        device,
        sharding=SHARDING,
        rank_of_stage=table.rank_of_stage,
        micro_batches=config.accumulation,
        initial_value=first_value,
        kept=context.kept,
    )
