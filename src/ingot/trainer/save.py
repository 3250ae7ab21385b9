"""Checkpoints of a run in progress: save one, in the background or while training waits, and report it; go back to one.

Before a save, the samples consumed since the last checkpoint go to the ledger.
"""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from ingot.errors import IngotError
from ingot.schema import events
from ingot.schema.checkpoint import FULL, LedgerSegment, SaveKind
from ingot.schema.guard_record import Measure
from ingot.trainer.checkpoint.replicas import Copied
from ingot.trainer.checkpoint.resumable import roll_back_choice
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.checkpoint.uploader import UPLOAD_SECONDS, left_out_text
from ingot.trainer.damaged_data import recorded_quarantine
from ingot.trainer.loader.ledger import Ledger, segment_of
from ingot.trainer.mesh.collectives import largest_of_ranks
from ingot.trainer.no_checkpoint import no_checkpoint
from ingot.trainer.parts import RunParts
from ingot.trainer.resilience.heartbeat import Phase
from ingot.trainer.restore import load_newest, open_loader
from ingot.units import format_bytes, format_seconds

_END_SECONDS = 1.0  # of launch.grace, that the ranks need to end
_SILENT_SECONDS = 3.0  # that the end of a run waits for uploads without a line
_LOOK_SECONDS = 0.2  # between two looks at uploads that the end of a run waits for
SAVE_MARGIN = 1.25  # of the last save's time, for the decision whether another one fits into launch.grace


@dataclass(frozen=True)
class SaveSeconds:
    """The seconds of a save. stall: training waited on this rank. verify: the slowest rank read its file back and
    compared it, most of it while it wrote. snapshot: of the stall, for the copy of the state. write: from the copy to
    the published checkpoint. The last two are None if training waited for the files.
    """

    stall: float
    verify: float
    snapshot: float | None = None
    write: float | None = None

    def as_facts(self) -> dict[str, float | None]:
        """Return the fields of the event of a save."""
        return {
            "stall_seconds": self.stall,
            "snapshot_seconds": self.snapshot,
            "write_seconds": self.stall if self.write is None else self.write,
            "verify_seconds": self.verify,
        }


def save(trainer: RunParts, step: int, kind: SaveKind = FULL, *, last: bool = False) -> bool:
    """Save the checkpoint of `step`, or its weights alone, or begin to in the background, and report it. Collective.

    While an earlier save is in flight, nothing is saved, which is reported, and False is returned. last: the run ends
    after this save, so wait for the earlier one and for this one. Raises the error of the earlier save if this one
    would fail as well, and the error of this one if training waits for it.
    """
    began = time.monotonic()
    background = trainer.background
    ended = settle(trainer, wait=last)
    if not ended:  # before an error is raised, which this rank may know before the others
        trainer.schedule.left_out(kind)
        trainer.log(events.CHECKPOINT_SKIPPED, step=step, what=kind, in_flight=_step_in_flight(trainer))
        trainer.left_out += 1
        if trainer.left_out == 1:  # with short steps, most of them are left out
            trainer.left_out_shown = 1
            what = "" if kind == FULL else "the weights of "
            trainer.say(
                f"not saved {what}step {step}: an earlier save is still being written; `saved` lines count more"
            )
        return False
    if background is not None and background.broken is not None:
        raise background.broken
    trainer.schedule.begun(kind)
    segment, samples, ledger = None, b"", ()
    if kind == FULL:
        segment, samples = next_segment(trainer, step)
        ledger = (*trainer.segments, segment)
    sanity = trainer.sanity if kind == FULL else None
    facts = replace(
        trainer.checkpoint_facts,
        kind=kind,
        step=step,
        tokens=step * trainer.config.tokens_per_step,
        health=trainer.policy.health() if sanity is None else sanity.health(trainer.policy.health()),
        callbacks=trainer.callbacks.records() if kind == FULL else {},
        guard=trainer.policy.state() if sanity is None else replace(trainer.policy.state(), sanity=sanity.state),
        quarantine=trainer.quarantine,
    )
    require_unchanged = trainer.hashes.require_unchanged if trainer.hashes is not None else None
    checkpoint = trainer.config.checkpoint
    keep = checkpoint.keep if kind == FULL else checkpoint.weights_keep
    keep_every = checkpoint.keep_every if kind == FULL else 0
    if background is not None:
        save = background.start(facts, trainer.state, ledger, samples, keep, keep_every, began, require_unchanged)
        if code := background.new_refusal():
            _report_pageable(trainer, step, code)
        if last:
            settle(trainer, wait=True)
            if save.error is not None:
                raise save.error
        return True
    saved = save_checkpoint(
        trainer.folder,
        facts,
        trainer.state,
        ledger,
        keep=keep,
        keep_every=keep_every,
        segment=samples,
        require_unchanged=require_unchanged,
    )
    _record(trainer, kind, step, segment, saved.bytes, SaveSeconds(time.monotonic() - began, saved.verify_seconds))
    return True


def _report_pageable(trainer: RunParts, step: int, code: int) -> None:
    log = trainer.log if trainer.place.is_first else trainer.event_log.write  # each rank has memory of its own
    log(events.SNAPSHOT_PAGEABLE, step=step, rank=trainer.place.rank, code=code)
    trainer.say(
        f"WARNING   the copy of the state for saves is not in page-locked memory (cudaHostRegister answers {code}): "
        "training waits longer for each save. The memory of this machine may be short, or locked by its other programs"
    )


def fits(trainer: RunParts, step: int, deadline: float) -> bool:
    """Return whether a save of `step` would end before `deadline`, in seconds of time.monotonic(). Collective.

    A save in flight is awaited first. The estimate is the time of the last save of this process, and SAVE_MARGIN for
    another load of the disk; without one, the save is tried: a save that does not end leaves the checkpoints as they
    were. If it does not fit, that is reported.
    """
    if math.isinf(deadline):
        return True
    settle(trainer, wait=True)
    needed, negative_left = largest_of_ranks(SAVE_MARGIN * trainer.save_seconds, time.monotonic() - deadline)
    if needed <= -negative_left:
        return True
    newest = last_saved(trainer)
    trainer.say(
        f"WARNING   not saved step {step}: a save takes about {format_seconds(trainer.save_seconds)}, but "
        f"{format_seconds(max(-negative_left, 0.0))} of launch.grace are left. Step {newest} is the newest checkpoint: "
        f"{step - newest} steps will be trained again"
    )
    return False


def settle(trainer: RunParts, *, wait: bool) -> bool:
    """Report the save in flight if it has ended on all ranks; return False if it has not. Collective.

    wait: wait for it.
    """
    background = trainer.background
    if background is None:
        return True
    if wait and background.in_flight is not None:
        trainer.heartbeat.wait_for_save(background.in_flight.age)
        background.in_flight.wait()
    ended = torch.tensor(int(background.in_flight is None or background.in_flight.ended))
    dist.all_reduce(ended, dist.ReduceOp.MIN)
    if not ended:
        return False
    report_ended(trainer)
    return True


def report_ended(trainer: RunParts) -> None:
    """Report the save in flight if it has ended on this rank, and uploads. Called after every step; not collective."""
    _report_uploads(trainer)
    background = trainer.background
    if background is None or background.in_flight is None or not background.in_flight.ended:
        return
    save, background.in_flight = background.in_flight, None
    if save.copied is not None:
        _report_copies(trainer, save.copied)
    if save.error is None:
        seconds = SaveSeconds(save.stall_seconds, save.verify_seconds, save.snapshot_seconds, save.write_seconds)
        _record(trainer, save.kind, save.step, save.segment, save.bytes, seconds)
        return
    if save.is_fatal:
        background.broken = save.error
    reason = save.error.found if isinstance(save.error, IngotError) else str(save.error)
    code = getattr(save.error, "code", "")
    facts = {"step": save.step, "what": save.kind, "code": code, "reason": reason}
    trainer.schedule.failed(save.kind)
    trainer.log(events.CHECKPOINT_FAILED, **facts, write_seconds=save.write_seconds)
    what = "checkpoint" if save.kind == FULL else "save of the weights"
    trainer.say(f"WARNING   the {what} of step {save.step} was not saved: {reason}")


def _report_copies(trainer: RunParts, copied: Copied) -> None:
    trainer.log(events.SNAPSHOT_KEPT, **vars(copied))
    for failure in copied.failures[:1]:
        trainer.say(f"WARNING   the snapshot of step {copied.step} is not in memory everywhere: {failure}")
    if not copied.failures:
        nodes = f"{copied.nodes} nodes" if copied.nodes > 1 else "its node"
        seconds = format_seconds(copied.seconds)
        trainer.say(f"kept      step {copied.step}  {format_bytes(copied.bytes)}  {seconds}  in the memory of {nodes}")


def last_saved(trainer: RunParts) -> int:
    """Return the step of the newest verified checkpoint that training continued from or saved; 0 without one."""
    return trainer.segments[-1].last_step if trainer.segments else 0


def _record(
    trainer: RunParts,
    kind: SaveKind,
    step: int,
    segment: LedgerSegment | None,
    size: int,
    seconds: SaveSeconds,
) -> None:
    """Take in that a save ended well, and report it. segment: the ledger segment that a full checkpoint added."""
    path = trainer.folder.of(kind).checkpoint(step).relative_to(trainer.folder.root)
    facts = seconds.as_facts() | {"path": str(path), "store": trainer.config.checkpoint.remote.url}
    trainer.log(events.CHECKPOINT if kind == FULL else events.WEIGHTS_SAVED, step=step, bytes=size, **facts)
    written = "" if seconds.write is None else f"written in {format_seconds(seconds.write)}  "
    stall = f"stall {format_seconds(seconds.stall)}"
    what = "" if kind == FULL else "weights of "
    left = trainer.left_out - trainer.left_out_shown
    trainer.left_out_shown = trainer.left_out
    more = f"  {left} save{'s' * (left != 1)} left out" if left else ""
    trainer.say(f"saved     {what}step {step}  {format_bytes(size)}  {stall}  {written}verified{more}")
    trainer.schedule.measured(kind, step, seconds.stall, seconds.write or 0.0)
    # Weights alone are in the run folder, never on disks of nodes: rank 0 uploads all of them.
    if trainer.uploader is not None and (kind == FULL or trainer.place.is_first):
        trainer.uploader.push(step, kind)
    if segment is None:
        return
    trainer.segments.append(segment)
    trainer.ledger.forget(step)
    trainer.save_seconds = seconds.stall + (seconds.write or 0.0)
    trainer.heartbeat.learn(Phase.SAVE, trainer.save_seconds)


def finish_uploads(trainer: RunParts, deadline: float, *, stopped: bool) -> None:
    """Wait until the newest checkpoint is in the store, for a limited time and not beyond `deadline`, and report it.

    deadline: in seconds of time.monotonic(). stopped: the run stops, so a request that is there has had its effect. One
    that comes later ends the wait: at once, or, if it is not Ctrl-C, at the end of launch.grace.

    Collective with checkpoint.disks, where every node uploads its files: requests arrive on rank 0 alone, so its
    decision ends the wait of all nodes.
    """
    uploader, checkpoint = trainer.uploader, trainer.config.checkpoint
    is_shared = bool(checkpoint.disks and checkpoint.remote.url)
    if uploader is None and not is_shared:
        return
    requests, began, is_reported = trainer.stop_vote.requests, time.monotonic(), False
    requests.is_ending = True
    ends, before = min(began + UPLOAD_SECONDS, deadline - _END_SECONDS), requests.current() if stopped else None

    def is_over() -> bool:
        nonlocal ends, before, is_reported
        _report_uploads(trainer)
        now, request = time.monotonic(), requests.current()
        if request is not None and request is not before:
            waits = request.reason != signal.SIGINT.name and math.isfinite(request.deadline)
            ends, before = min(ends, request.deadline - _END_SECONDS if waits else now), request
        if not is_reported and began + _SILENT_SECONDS <= now < ends:
            is_reported = True
            left = "" if uploader is None or uploader.left is None else f"{format_bytes(uploader.left)} left to send; "
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + ends - now))
            until += " or launch.stop_after" if trainer.config.launch.stop_after else ""
            trainer.say(
                f"uploads   {left}waiting for {checkpoint.remote.url}, at most until {until}; Ctrl-C "
                "ends the wait, and all that is saved here stays whole"
            )
        return now >= ends

    if uploader is not None:
        uploader.end()
    unfinished, over = True, False
    while unfinished and not over:
        unfinished, over = uploader is not None and not uploader.wait(_LOOK_SECONDS), is_over()
        if is_shared:
            unfinished, over = map(bool, largest_of_ranks(unfinished, over))
    if unfinished:
        waited, push = format_seconds(time.monotonic() - began), f"ingot ckpt push {trainer.folder.root}"
        trainer.say(f"WARNING   the last checkpoint is not in the store after {waited}; to upload it: {push}")
    _report_uploads(trainer)


def _report_uploads(trainer: RunParts) -> None:
    log = trainer.log if trainer.place.is_first else trainer.event_log.write  # of an uploader of another node
    for event in trainer.uploader.reports() if trainer.uploader else ():
        log(**event)
        full = event["what"] == FULL
        if event["kind"] == events.CHECKPOINT_STORED:
            size, seconds = format_bytes(event["bytes"]), format_seconds(event["seconds"])
            what = "" if full else "weights of "
            sent = f"{size}  {seconds}  in" if event["bytes"] else "is in"
            trainer.say(f"stored    {what}step {event['step']}  {sent} {event['store']}{left_out_text(event)}")
        else:
            again = event["retry_seconds"]
            then = (
                f"; trying again in {format_seconds(again)}" if again else f"; {event['fix']}" if event["fix"] else ""
            )
            what = "the checkpoint" if full else "the save of the weights"
            trainer.say(f"WARNING   {what} of step {event['step']} is not in the store: {event['reason']}{then}")


def _step_in_flight(trainer: RunParts) -> int | None:
    save = trainer.background.in_flight if trainer.background else None
    return save.step if save else None


def next_segment(trainer: RunParts, step: int) -> tuple[LedgerSegment, bytes]:
    """Return the file of the samples that all ranks consumed since the last segment, and its content: on rank 0; other
    ranks get an entry with the same steps alone. Collective."""
    first = last_saved(trainer) + 1
    own = trainer.ledger.segment(first, step)
    if not trainer.place.is_first:
        if trainer.place.rank in trainer.readers:
            dist.send(torch.from_numpy(np.ascontiguousarray(own)), dst=0)
        return LedgerSegment(file="", first_step=first, last_step=step, sha256=""), b""
    # Data rank r read the r-th part of each global batch, so the concatenated parts are the batch.
    return segment_of(first, step, np.concatenate(_of_readers(own, trainer.readers), axis=1))


def _of_readers(own: np.ndarray, readers: Sequence[int]) -> list[np.ndarray]:
    """Receive, on rank 0, the sample ids of each rank in `readers`, each with the shape of `own`."""
    parts = [torch.from_numpy(own) if rank == 0 else torch.empty(own.shape, dtype=torch.int64) for rank in readers]
    arriving = [dist.irecv(part, src=rank) for rank, part in zip(readers, parts, strict=True) if rank != 0]
    for work in arriving:
        if work is not None:
            work.wait()
    return [part.numpy() for part in parts]


def reload(trainer: RunParts, measure: Measure | None = None) -> int:
    """Load the newest undamaged checkpoint into the running `trainer`. Returns its step. Collective.

    measure: the guard's, because of which the run goes back. Raises RunFailed if there is no checkpoint yet,
    CheckpointError if no checkpoint can be used.
    """
    settle(trainer, wait=True)
    if trainer.background is not None:
        trainer.background.broken = None  # the state that could not be saved is replaced
    restored = load_newest(
        trainer,
        trainer.folder,
        trainer.checkpoint_facts,
        trainer.log,
        trainer.say,
        trainer.fetch_instead,
        trainer.fetch_file,
    )
    if restored is None:
        raise no_checkpoint(trainer.folder, trainer.config.optim.lr, measure)
    trainer.loader.close()
    trainer.quarantine = recorded_quarantine(trainer.folder, restored)
    trainer.loader = open_loader(
        trainer.config,
        trainer.folder,
        trainer.mesh,
        trainer.place.device,
        restored.step + 1,
        trainer.policy.measures(),
        trainer.quarantine,
        trainer.encoder,
    )
    trainer.ledger, trainer.segments = Ledger(), list(restored.ledger)
    if trainer.background is not None:
        trainer.background.forget(restored.step)  # a later start must not undo this
    if trainer.hashes is not None:
        trainer.hashes.forget()
    if trainer.sanity is not None:
        trainer.sanity.restore(restored.guard.sanity)
    return restored.step


def report_roll_back(trainer: RunParts, step: int, back_at: int, reason: str, sound: str = "") -> None:
    """Report that the run went back from `step` to the checkpoint of `back_at`, and why to that one.

    reason: "guard" or "damage". sound: as for `roll_back_choice`.
    """
    if not trainer.place.is_first:  # the choice is read from the folder, and only rank 0 reports
        return
    choice = roll_back_choice(trainer.folder, back_at, sound)
    passed_over = [{"step": at, "reason": reason} for at, reason in choice.passed_over]
    facts = {"reason": reason, "why": choice.why, "passed_over": passed_over}
    trainer.log(events.ROLLED_BACK, from_step=step, to_step=back_at, **facts)
    s = "s" * (step - back_at != 1)
    trainer.say(f"rollback  from step {step} to step {back_at}: {step - back_at} step{s} trained again")
    others = "".join(f"; not step {at}: {reason}" for at, reason in choice.passed_over)
    if choice.why:
        trainer.say(f"          why step {back_at}: {choice.why}{others}")
