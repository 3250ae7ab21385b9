"""A run on one rank, in this order: config -> mesh -> model -> parallelize -> optimizer -> resume -> loader -> loop."""

import gc
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch

from ingot.events import EventLog
from ingot.rng import derive
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard_answer import question_of_stopped, take_answer
from ingot.schema.guard_record import STOP, Action, Measure, SanityState, measure_of, read_measures, write_measures
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
from ingot.trainer.checkpoint.replicas import Replicas
from ingot.trainer.checkpoint.resumable import went_on_after
from ingot.trainer.damaged_data import recorded_quarantine
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.guard.alerts import LOW_PRECISION, AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.guard.ladder import Ladder
from ingot.trainer.guard.sanity import SanityJudge
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.heldout import Heldout, check_prompts, data_path, open_encoder, open_heldout
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.log import devices_in_use, log_measure, log_start, total_peak
from ingot.trainer.loop import Ending, train
from ingot.trainer.mesh.environment import ordered_overrides
from ingot.trainer.mesh.mesh import Mesh, cpu_group
from ingot.trainer.mesh.start import RankInfo, start, stop
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.parts import RunParts, StepParts
from ingot.trainer.question import ask_person
from ingot.trainer.resilience.heartbeat import Heartbeat, Phase, open_heartbeat
from ingot.trainer.resilience.leaving import with_peers
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
    parts.policy = policy = _policy(config, folder, parts.step_judge, log, on_rank_zero)
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
    parts.gradient_range = _gradient_range(config, parts)
    quarantine = recorded_quarantine(folder, loaded.restored)
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
        sanity=_sanity(config, heldout, loaded.restored),
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
        heartbeat=heartbeat or open_heartbeat(),
        clock=clock,
        waits=WaitClock(),
        stragglers=_stragglers(config, parts.mesh, place),
        alerts=_alerts(config, folder, parts, first_step, log, is_first=place.is_first),
        event_log=event_log,
        log=log,
        say=on_rank_zero,
    )
    if policy.ladder is not None and config.guard.ask_seconds:
        policy.ladder.ask = partial(ask_person, trainer)
    trainer.gradients = _gradients(config, trainer)
    trainer.hashes = _hashes(config, trainer)
    log_start(trainer)
    trainer.waits.start()
    clock.end("build")
    return trainer


def _policy(
    config: RunConfig,
    folder: RunFolder,
    judge: StepJudge | None,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> DefaultPolicy:
    """Return the policy of the run, with what its guard did so far. Collective."""
    # One read for all ranks: what they pass and where they go back to follows from it.
    measures = [measure_of(one) for one in from_rank_zero(lambda: [vars(one) for one in read_measures(folder.guard)])]
    ladder = None
    if judge is not None and config.guard.acts:
        record = lambda taken: from_rank_zero(lambda: write_measures(folder.guard, taken))  # noqa: E731
        ladder = Ladder(config.guard, folder, judge, measures, record, partial(log_measure, log, say))
        answer: Action | None = from_rank_zero(lambda: _answer(folder, measures))
        if answer is not None:
            ladder.answer(answer)
    return DefaultPolicy(
        folder,
        scaled_loss=config.train.precision == "fp16",
        vocab_size=config.model.vocab_size,
        from_weights=bool(config.init),
        recorded=ladder.measures if ladder else measures,
        ladder=ladder,
    )


def _answer(folder: RunFolder, measures: Sequence[Measure]) -> Action | None:
    """Return the measure that a person chose after the guard had stopped the run; None if nobody did, or if the run
    went on without. A wait that was killed is over."""
    folder.guard_question.unlink(missing_ok=True)
    if (question := question_of_stopped(measures)) is None:
        return None
    answer = take_answer(folder, question)
    return None if answer == STOP or went_on_after(folder, question) else answer


def _sanity(config: RunConfig, heldout: Heldout | None, restored: CheckpointManifest | None) -> SanityJudge | None:
    """Return the judge of weights by held-out text, if the run has such text and wants it."""
    if heldout is None or not config.guard.sanity_every:
        return None
    return SanityJudge(config.guard, restored.guard.sanity if restored else SanityState())


def _hashes(config: RunConfig, parts: StepParts) -> StateHashes | None:
    """Return the hashes of the state, if the run wants them. Collective."""
    if not config.guard.hash_every:
        return None
    in_memory = parts.mesh.parallel.offload != "nvme"
    return StateHashes(
        parts.state,
        parts.model.data.published(),
        parts.mesh,
        config.guard.hash_every,
        moments=in_memory,
        gradients=parts.gradients,
    )


def _gradients(config: RunConfig, trainer: RunParts) -> RecomputedGradients | None:
    """Return the gradients that two ranks compute, if the run wants them. Collective."""
    if not config.guard.recompute_every:
        return None
    if trainer.place.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return RecomputedGradients(
        trainer.program,
        trainer.model.data,
        trainer.mesh,
        every=config.guard.recompute_every,
        seed=config.seed,
        read=lambda step, part: trainer.loader.part_of(step, part),  # a run that goes back has another loader
        device=trainer.place.device,
    )


def _gradient_range(config: RunConfig, parts: StepParts) -> GradientRange | None:
    """Return the measurement of the gradient's range, if the run wants it and its precision has a narrow one."""
    dtype = LOW_PRECISION.get(config.train.precision)
    if dtype is None or not config.guard.watches or not config.guard.precision_every:
        return None
    model = config.model
    every, tied = config.guard.precision_every, model.tied_embeddings
    return GradientRange(parts.model.shards, model.num_layers, dtype, every, tied=tied)


def _alerts(
    config: RunConfig,
    folder: RunFolder,
    parts: StepParts,
    first_step: int,
    log: Callable[..., None],
    *,
    is_first: bool,
) -> AlertWatch | None:
    if not config.guard.watches:
        return None
    scale = parts.loss_scale and parts.loss_scale.scale.item
    alerts = AlertWatch(config, parts.model.shards, parts.gradient_range, scale, log, is_first=is_first)
    alerts.take_up(folder.events, first_step - 1)
    return alerts


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


def _silent(*_, **__) -> None:
    """Drop events and lines: used on every rank except the first."""
