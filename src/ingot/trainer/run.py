"""A run on one rank, in this order: config -> mesh -> model -> parallelize -> optimizer -> resume -> loader -> loop."""

import contextlib
import gc
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch

from ingot.errors import IngotError
from ingot.events import EventLog
from ingot.rng import derive
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import check_vocabulary, read_token_manifest
from ingot.theory.flops import train_flops_per_token
from ingot.theory.rules import load_run
from ingot.trainer.blame import plugins_blamed
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.checkpoint.background import BackgroundSaver
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.nodes import open_disks
from ingot.trainer.checkpoint.places import report_damage
from ingot.trainer.checkpoint.replicas import Replicas
from ingot.trainer.damaged_data import recorded_quarantine
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.guards import alert_watch, open_guards, policy_of, range_of_gradients, sanity_judge
from ingot.trainer.heldout import check_prompts, data_path, open_encoder, open_heldout
from ingot.trainer.listed_data import leave_out_listed
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.log import devices_in_use, log_start, total_peak
from ingot.trainer.loop import Ending, train
from ingot.trainer.mesh.axis_traffic import AxisTraffic, DeviceTraffic, traffic_axes
from ingot.trainer.mesh.environment import ordered_overrides
from ingot.trainer.mesh.mesh import Mesh, cpu_group
from ingot.trainer.mesh.start import RankInfo, start, stop
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.parts import RunParts
from ingot.trainer.record import open_measurements, open_recorder
from ingot.trainer.resilience.heartbeat import Heartbeat, Phase, open_heartbeat
from ingot.trainer.resilience.leaving import with_peers
from ingot.trainer.resilience.start_times import StartClock
from ingot.trainer.resilience.stop_requests import StopRequests
from ingot.trainer.resilience.stop_vote import StopVote
from ingot.trainer.restore import open_loader, restore
from ingot.trainer.save_schedule import SaveSchedule
from ingot.trainer.slow_ranks import slow_machines, straggler_watch
from ingot.trainer.telemetry.source_loss import recorded_sources
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
    except BaseException:
        with contextlib.suppress(IngotError, OSError):  # the first error is the cause
            trainer.close()
        raise
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
    clock, heartbeat = clock or StartClock(), heartbeat or open_heartbeat()
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
    if (damage := open_disks(folder)) and place.is_first:
        report_damage(folder, damage, say)
    continues = bool(candidate_folders(folder.checkpoints))
    base = folder.config.parent
    clock.end("build")
    parts = build_parts(config, place.device, base, continues=continues, given=given, clock=clock)
    on_rank_zero = say if place.is_first else _silent
    parts.policy = policy = policy_of(config, folder, parts.step_judge, log, on_rank_zero)
    recorded = given.added_to(config)
    facts = CheckpointFacts(
        step=0,
        tokens=0,
        settings=recorded.settings(),
        config_sha256=recorded.training_sha256(),
        data_fingerprint=manifest.fingerprint(),
        layout=parts.mesh.layout,
        epoch=from_rank_zero(lambda: epoch),
    )
    clock.end("build")
    loaded = restore(parts, folder, facts, place, log, on_rank_zero)
    clock.end("load")
    first_step = loaded.restored.step + 1 if loaded.restored else 1
    heldout = open_heldout(config, folder, encoder, max_tokens=config.evaluate.max_tokens)
    parts.gradient_range = range_of_gradients(config, parts)
    recorded = recorded_quarantine(folder, loaded.restored)
    quarantine = leave_out_listed(config, folder, recorded, first_step, log, on_rank_zero)
    stragglers = straggler_watch(config, parts.mesh, place, on_rank_zero)
    trainer = RunParts(
        **vars(parts),
        folder=folder,
        place=place,
        ledger=Ledger(),
        segments=list(loaded.restored.ledger) if loaded.restored else [],
        quarantine=quarantine,
        checkpoint_facts=facts,
        background=_background(config, folder, place, loaded.replicas),
        uploader=loaded.uploader,
        fetch_instead=loaded.fetch_instead,
        fetch_file=loaded.fetch_file,
        heldout=heldout,
        encoder=encoder,
        sanity=sanity_judge(config, heldout, loaded.restored),
        cost=CostMeter(config.cost.usd_per_hour, devices_in_use(place), folder.events),
        tokens_per_byte=manifest.tokens / max(manifest.text_bytes, 1),
        flops_per_token=train_flops_per_token(config.model, config.train.seq_len),
        peak_flops=total_peak(config, place),
        first_step=first_step,
        until_step=config.train.steps if until_step is None else min(until_step, config.train.steps),
        loader=open_loader(
            config, folder, parts.mesh, place.device, first_step, parts.policy.measures(), quarantine, encoder
        ),
        stop_vote=StopVote(stops or StopRequests(folder.stop_request if place.is_first else None)),
        schedule=SaveSchedule(config, place, first_step, log, on_rank_zero),
        heartbeat=heartbeat,
        clock=clock,
        waits=WaitClock(heartbeat.set_waiting, _traffic(config, parts.mesh, place)),
        stragglers=stragglers,
        slow_machines=stragglers and slow_machines(config, parts.mesh, place, on_rank_zero),
        alerts=alert_watch(config, folder, parts, first_step, log, is_first=place.is_first),
        recorder=open_recorder(
            config,
            folder,
            place,
            first_step,
            event_log.write,
            epoch=facts.epoch,
            sources=recorded_sources(manifest)[0],
            axes=traffic_axes(parts.mesh),
        ),
        source_loss=None,
        route_flips=None,
        event_log=event_log,
        log=log,
        say=on_rank_zero,
    )
    if trainer.recorder is not None:
        open_measurements(trainer, manifest)
    open_guards(trainer, policy)
    log_start(trainer)
    trainer.waits.start()
    clock.end("build")
    return trainer


def _traffic(config: RunConfig, mesh: Mesh, place: RankInfo) -> AxisTraffic | None:
    """Return what divides the waits of this rank by axis; None if nothing is recorded, or there are no other ranks."""
    if not config.metrics.record or place.world_size == 1:
        return None
    return DeviceTraffic(mesh) if place.device.type == "cuda" else AxisTraffic(mesh)


def _background(
    config: RunConfig, folder: RunFolder, place: RankInfo, replicas: Replicas | None
) -> BackgroundSaver | None:
    """Return the saver of a run that does not wait for its checkpoints. Collective."""
    if config.checkpoint.mode == "sync":
        return None
    group = cpu_group(_SAVE_TIMEOUT, "checkpoints")
    # One number for all ranks: those of a node that replaced a lost one count fewer attempts.
    return BackgroundSaver(folder, place.device, group, replicas, from_rank_zero(lambda: place.attempt))


def _silent(*_, **__) -> None:
    """Drop events and lines: used on every rank except the first."""
