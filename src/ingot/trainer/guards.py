"""The guards of a run, made from its settings: of its steps, its saves, its state and its gradients."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard_answer import question_of_stopped, take_answer
from ingot.schema.guard_record import (
    STOP,
    Action,
    Measure,
    SanityState,
    in_force,
    measure_of,
    passed_steps,
    read_measures,
    write_measures,
)
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.step_ranges import number_of
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.checkpoint.resumable import went_on_after
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.guard.alerts import LOW_PRECISION, AlertWatch
from ingot.trainer.guard.exploded import LossLimit
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.guard.ladder import Ladder
from ingot.trainer.guard.sanity import SanityJudge
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.heldout import Heldout, sanity_batch
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.samples import GradientSamples
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.log import log_measure, log_retrained
from ingot.trainer.parts import RunParts, StepParts
from ingot.trainer.question import ask_person
from ingot.trainer.retry import StepRetry


def open_guards(trainer: RunParts, policy: DefaultPolicy) -> None:
    """Give a run that is otherwise complete the guards that need its parts. Collective."""
    config = trainer.config
    _warn_of_passed(trainer)
    for sentence in in_force(trainer.policy.measures(), trainer.first_step, config.optim.lr):
        trainer.say(f"guard     {sentence}")
    if policy.ladder is not None and config.guard.ask_seconds:
        policy.ladder.ask = partial(ask_person, trainer)
    trainer.gradients = _gradients(config, trainer)
    trainer.hashes = _hashes(config, trainer)
    if config.guard.retries:
        scaled = config.train.precision == "fp16"
        place, part = trainer.place, trainer.mesh.data_rank
        trainer.retry = StepRetry(
            trainer.model.stages, place.device, scaled_loss=scaled, data_rank=part, ranks=place.world_size
        )


def policy_of(
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
    record = lambda taken: from_rank_zero(lambda: write_measures(folder.guard, taken))  # noqa: E731
    if judge is not None and config.guard.acts:
        report = partial(log_measure, log, say)
        ladder = Ladder(config.guard, folder, judge, measures, record, report, config.optim.lr)
        ladder.retrained = partial(log_retrained, log, say)
        answer: Action | None = from_rank_zero(lambda: _answer(folder, measures))
        if answer is not None:
            ladder.answer(answer)
    return DefaultPolicy(
        folder,
        scaled_loss=config.train.precision == "fp16",
        limit=LossLimit(config.guard, config.model.vocab_size, from_weights=bool(config.init)),
        lr=config.optim.lr,
        recorded=ladder.measures if ladder else measures,
        ladder=ladder,
        record=record,
        proven_steps=config.guard.proven_steps,
        say=say,
    )


def _answer(folder: RunFolder, measures: Sequence[Measure]) -> Action | None:
    """Return the measure that a person chose after the guard had stopped the run; None if nobody did, or if the run
    went on without. A wait that was killed is over."""
    folder.guard_question.unlink(missing_ok=True)
    if (question := question_of_stopped(measures)) is None:
        return None
    answer = take_answer(folder, question)
    return None if answer == STOP or went_on_after(folder, question) else answer


def sanity_judge(config: RunConfig, heldout: Heldout | None, restored: CheckpointManifest | None) -> SanityJudge | None:
    """Return the judge of weights by held-out text, if the run has such text and wants it."""
    if heldout is None or not config.guard.sanity_every:
        return None
    return SanityJudge(config.guard, restored.guard.sanity if restored else SanityState(), sanity_batch(heldout))


def _warn_of_passed(trainer: RunParts) -> None:
    """Report if most of the steps to come have no data to train on."""
    first, last = trainer.first_step, trainer.config.train.steps
    ranges = [*trainer.config.data.skipped_steps, *passed_steps(trainer.policy.measures())]
    passed, steps = number_of(ranges, first, last), last - first + 1
    if 2 * passed > steps:
        trainer.say(
            f"WARNING   the data of {passed} of the {steps} steps from step {first} on are passed (data.skip, or the "
            "guard): they change no weights"
        )


def _hashes(config: RunConfig, parts: RunParts) -> StateHashes | None:
    """Return the hashes of the state, if the run wants them. Collective."""
    if not config.guard.hash_every:
        return None
    in_memory = parts.mesh.parallel.offload != "nvme"
    hashes = StateHashes(
        parts.state,
        parts.model.data.published(),
        parts.mesh,
        config.guard.hash_every,
        moments=in_memory,
        gradients=parts.gradients,
    )
    if hashes.every > 1 and hashes.has_pairs:  # a rank that hashes in each step sees its own change
        hashes.samples = GradientSamples(parts.model.data, parts.place.device, parts.gradients)
    return hashes


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


def range_of_gradients(config: RunConfig, parts: StepParts) -> GradientRange | None:
    """Return the measurement of the gradient's range, if the run wants it and its precision has a narrow one."""
    dtype = LOW_PRECISION.get(config.train.precision)
    if dtype is None or not config.guard.watches or not config.guard.precision_every:
        return None
    model = config.model
    every, tied = config.guard.precision_every, model.tied_embeddings
    return GradientRange(parts.model.shards, model.num_layers, dtype, every, tied=tied)


def alert_watch(
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
