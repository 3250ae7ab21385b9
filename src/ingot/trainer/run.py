"""A run on one rank, in this order: config -> mesh -> model -> parallelize -> optimizer -> resume -> loader -> loop."""

import gc
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ingot.events import EventLog
from ingot.hub.config_file import run_of
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.rng import derive
from ingot.schema import events
from ingot.schema.guard_record import Measure, measure_of, read_measures, write_measures
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import check_vocabulary, read_token_manifest
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import require_layout, resolve_parallel
from ingot.theory.rules import load_run
from ingot.theory.schedule import ScheduleTable, build_table
from ingot.trainer.blame import plugins_blamed
from ingot.trainer.callbacks import Callbacks
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.checkpoint.background import BackgroundSaver
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.nodes import open_disks
from ingot.trainer.checkpoint.replicas import Replicas
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.export.model_folder import first_weights
from ingot.trainer.export.saved_weights import saved_weights
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.guard.ladder import Ladder
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.heldout import check_prompts, data_path, open_encoder, open_heldout
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.log import devices_in_use, log_measure, log_start, total_peak
from ingot.trainer.loop import Ending, train
from ingot.trainer.loss_terms import loss_terms
from ingot.trainer.mesh.environment import ordered_overrides
from ingot.trainer.mesh.mesh import Mesh, build_mesh, cpu_group
from ingot.trainer.mesh.start import RankInfo, start, stop
from ingot.trainer.mesh.waiting import WaitClock
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
from ingot.trainer.parallel.flash import require_kernels
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.parts import RunParts, StepParts
from ingot.trainer.resilience.heartbeat import Heartbeat, Phase, open_heartbeat
from ingot.trainer.resilience.leaving import with_peers
from ingot.trainer.resilience.policy import Policy, Unwatched
from ingot.trainer.resilience.start_times import StartClock
from ingot.trainer.resilience.stop_requests import StopRequests
from ingot.trainer.resilience.stop_vote import StopVote
from ingot.trainer.restore import open_loader, restore
from ingot.trainer.save_schedule import SaveSchedule
from ingot.trainer.telemetry.stragglers import StragglerWatch
from ingot.trainer.telemetry.usage import CostMeter

# A rank whose writer is slower than this fails the save on all ranks. Writes of terabytes to a slow disk take minutes.
_SAVE_TIMEOUT = timedelta(hours=2)


@plugins_blamed()
def run_rank(
    folder: RunFolder,
    until_step: int | None = None,
    say: Callable[[str], None] | None = None,
    given: GivenCallbacks = NOTHING_GIVEN,
    stops: StopRequests | None = None,
    *,
    epoch: int = 0,
    heartbeat: Heartbeat | None = None,
    clock: StartClock | None = None,
) -> Ending:
    """Train the run in `folder` as the rank that the environment names.

    until_step: the step to save and stop after. say: on rank 0, called with each line for people. given: callbacks
    besides those of the run file. stops: the requests to stop; None: those of the supervisor's file. epoch: on rank 0,
    the number of this attempt (checkpoint/fence.py). heartbeat: of this rank; None: it has no supervisor. clock: began
    with this process; None: begins now. Raises PeerLost if training lost the connection to another rank.
    """
    clock = clock or StartClock()
    config = load_run(folder.config, ordered_overrides(), same_code=True)
    place = start(config.train.device, config.launch.timeout_seconds, tf32=config.train.tf32)
    clock.end("groups")
    say = say or _silent
    trainer = build_trainer(
        config,
        folder,
        place,
        epoch=epoch,
        until_step=until_step,
        say=say,
        given=given,
        stops=stops,
        heartbeat=heartbeat,
        clock=clock,
    )
    try:
        with with_peers():
            ending = train(trainer)
        trainer.heartbeat.enter(Phase.LEAVE, ending.step)
    finally:
        trainer.close()
    # The model is in cycles of references. Its groups have threads, which must not end while the interpreter does.
    del trainer
    gc.collect()
    stop()
    return ending


def build_trainer(
    config: RunConfig,
    folder: RunFolder,
    place: RankInfo,
    *,
    epoch: int = 0,
    until_step: int | None = None,
    say: Callable[[str], None],
    given: GivenCallbacks = NOTHING_GIVEN,
    stops: StopRequests | None = None,
    heartbeat: Heartbeat | None = None,
    clock: StartClock | None = None,
) -> RunParts:
    """Build the model, load the newest usable checkpoint of `folder`, and open the data where the run stopped.

    epoch, stops, heartbeat, clock: as in `run_rank`. Collective. Raises ConfigError, DataError or CheckpointError
    before anything is trained.
    """
    clock = clock or StartClock()
    event_log = EventLog(folder.events)
    event_log.write(
        events.RANK_STARTED, rank=place.rank, pid=os.getpid(), host=socket.gethostname(), attempt=place.attempt
    )
    log = event_log.write if place.is_first else _silent
    tokens = data_path(folder, config.data.tokens)
    manifest = read_token_manifest(tokens)
    check_vocabulary(manifest, config.model.vocab_size)
    encoder = open_encoder(config, folder, manifest)
    check_prompts(config, encoder)

    # Until a checkpoint of as many ranks restores its states.
    torch.manual_seed(derive(config.seed, "torch", place.rank))
    open_disks(folder)
    continues = bool(candidate_folders(folder.checkpoints))
    base = folder.config.parent
    clock.end("build")
    parts = build_parts(config, place.device, base, continues=continues, given=given, clock=clock)
    on_rank_zero = say if place.is_first else _silent
    # One read for all ranks: what they pass and go back to follows from it.
    recorded = [measure_of(one) for one in from_rank_zero(lambda: [vars(one) for one in read_measures(folder.guard)])]
    parts.policy = DefaultPolicy(
        folder,
        scaled_loss=config.train.precision == "fp16",
        vocab_size=config.model.vocab_size,
        from_weights=bool(config.init),
        recorded=recorded,
        ladder=_ladder(config, folder, parts.step_judge, recorded, partial(log_measure, log, on_rank_zero)),
    )
    config_of_run = given.added_to(config)
    facts = CheckpointFacts(
        step=0,
        tokens=0,
        settings=config_of_run.settings(),
        config_sha256=config_of_run.training_sha256(),
        data_fingerprint=manifest.fingerprint(),
        layout=parts.mesh.layout,
        epoch=from_rank_zero(lambda: epoch),
    )
    clock.end("build")
    loaded = restore(parts, folder, facts, place, log, on_rank_zero)
    clock.end("load")
    first_step = loaded.restored.step + 1 if loaded.restored else 1
    parts.hashes = _hashes(config, parts)
    trainer = RunParts(
        **vars(parts),
        folder=folder,
        place=place,
        ledger=Ledger(),
        segments=list(loaded.restored.ledger) if loaded.restored else [],
        checkpoint_facts=facts,
        background=_background(config, folder, place, loaded.replicas),
        uploader=loaded.uploader,
        fetch_instead=loaded.fetch_instead,
        fetch_file=loaded.fetch_file,
        heldout=open_heldout(config, folder, encoder, max_tokens=config.evaluate.max_tokens),
        encoder=encoder,
        cost=CostMeter(config.cost.usd_per_hour, devices_in_use(place), folder.events),
        tokens_per_byte=manifest.tokens / max(manifest.text_bytes, 1),
        flops_per_token=train_flops_per_token(config.model, config.train.seq_len),
        peak_flops=total_peak(config, place),
        first_step=first_step,
        until_step=config.train.steps if until_step is None else min(until_step, config.train.steps),
        loader=open_loader(config, folder, parts.mesh, place.device, first_step, parts.policy.measures()),
        stop_vote=StopVote(stops or StopRequests(folder.stop_request if place.is_first else None)),
        schedule=SaveSchedule(config, place, first_step, log, on_rank_zero),
        heartbeat=heartbeat or open_heartbeat(),
        clock=clock,
        waits=WaitClock(),
        stragglers=_stragglers(config, parts.mesh, place),
        event_log=event_log,
        log=log,
        say=on_rank_zero,
    )
    log_start(trainer)
    trainer.waits.start()
    clock.end("build")
    return trainer


def _ladder(
    config: RunConfig,
    folder: RunFolder,
    judge: StepJudge | None,
    recorded: Sequence[Measure],
    report: Callable[[Measure], None],
) -> Ladder | None:
    """Return the measures of a run whose guard acts. recorded: those it took so far. Collective when one is taken."""
    if judge is None or not config.guard.acts:
        return None

    def record(measures: Sequence[Measure]) -> None:
        from_rank_zero(lambda: write_measures(folder.guard, measures))

    return Ladder(config.guard, folder, judge, recorded, record, report)


def _hashes(config: RunConfig, parts: StepParts) -> StateHashes | None:
    """Return the hashes of the state, if the run wants them. Collective."""
    if not config.guard.hash_every:
        return None
    in_memory = parts.mesh.parallel.offload != "nvme"
    return StateHashes(
        parts.state, parts.model.data.published(), parts.mesh, config.guard.hash_every, moments=in_memory
    )


def _stragglers(config: RunConfig, mesh: Mesh, place: RankInfo) -> StragglerWatch | None:
    """Return the watch for slow ranks, on rank 0, if the run wants it and hosts can measure how long ranks wait."""
    factor = config.launch.straggler_factor
    if not factor or not place.is_first or place.device.type != "cpu":
        return None
    return StragglerWatch(mesh.equal_work(), factor)


def _background(
    config: RunConfig, folder: RunFolder, place: RankInfo, replicas: Replicas | None
) -> BackgroundSaver | None:
    """Return the saver of a run that does not wait for its checkpoints. Collective."""
    if config.checkpoint.mode == "sync":
        return None
    group = cpu_group(_SAVE_TIMEOUT, "checkpoints")
    # One number for all ranks: those of a node that replaced a lost one count fewer attempts.
    return BackgroundSaver(folder, place.device, group, replicas, from_rank_zero(lambda: place.attempt))


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
    rules = optimizer_rules(config.optim)
    matrices = None
    if whole:
        like = model.shards[0].value
        matrices = Matrices(model.placement(), rules, mesh.ranks("copy"), mesh.group("copy"), like)
    optimizer = build_optimizer(model.shards, rules, settings, base, matrices)
    judge = StepJudge(config.guard, model.shards[0].value.device) if config.guard.preset != "off" else None
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
    config: RunConfig, mesh: Mesh, table: ScheduleTable, device: torch.device, first_value: InitialValue | None
) -> ShardedModel:
    """Build the model with the attention and the expert dispatch that the mesh needs, and distribute it."""
    arch = config.model
    if mesh.parallel.ring > 1:
        require_kernels(device, COMPUTE[config.train.precision], arch.head_dim)
    compiled = should_compile(config.train, device, mesh.parallel.splits_backward)
    context = ContextParallelism(mesh, attend_locally, compiled)
    dispatch = dispatch_of(mesh, LocalDispatch()) if arch.is_moe else None  # a dense mesh has no expert groups

    def make() -> Transformer:
        with torch.device("meta"):
            model = Transformer(arch, context.attend, dispatch)
        model.readout.terms = loss_terms(config)
        return model

    return parallelize(
        make,
        mesh,
        config.train,
        device,
        sharding=sharding_of(arch),
        rank_of_stage=table.rank_of_stage,
        micro_batches=config.accumulation,
        initial_value=first_value,
        kept=context.kept,
    )


def _silent(*_, **__) -> None:
    """Drop events and lines: used on every rank except the first."""
