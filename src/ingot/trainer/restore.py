"""The state that a run starts from, also after a roll-back: load the newest snapshot in memory or checkpoint, and open
the data at the next step."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ingot.errors import CheckpointError, IngotError
from ingot.schema import events
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import WEIGHTS, CheckpointManifest
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SUSPECT, Measure, passed_steps
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.checkpoint.accepted import alters_steps_after, changes_since, last_change, record_resumed
from ingot.trainer.checkpoint.agree import from_rank_zero, world
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.health import health_of_step
from ingot.trainer.checkpoint.load import FetchInstead, resume, resume_from_memory
from ingot.trainer.checkpoint.manifest import candidate_folders, doubt_about, grade_of_doubt, newest_step
from ingot.trainer.checkpoint.message import RankError
from ingot.trainer.checkpoint.nodes import FetchFile, NodeFetch, sweep_disks
from ingot.trainer.checkpoint.places import local_rank
from ingot.trainer.checkpoint.remote import open_tier
from ingot.trainer.checkpoint.replicas import Replicas, open_replicas
from ingot.trainer.checkpoint.resumable import roll_back_choice
from ingot.trainer.checkpoint.tiers import fetch_instead, fetch_newest
from ingot.trainer.checkpoint.uploader import Uploader
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.heldout import data_path
from ingot.trainer.loader.loader import Loader
from ingot.trainer.loader.order import earlier_weights
from ingot.trainer.loader.window_filter import WindowFilter
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.start import RankInfo, uses_store_of_torchrun
from ingot.trainer.parts import StepParts
from ingot.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state that a run continues from, and the places besides its folder that saves go to. The rest as in RunParts.

    restored: the manifest of the loaded state; None for a new run. replicas: the keepers of snapshots in memory.
    """

    restored: CheckpointManifest | None
    replicas: Replicas | None
    uploader: Uploader | None
    fetch_instead: FetchInstead
    fetch_file: FetchFile | None


def restore(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    place: RankInfo,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> Start:
    """Load the newest state of the run into `parts`, from the memory of the nodes, else from their disks or the store,
    and begin to upload what the store lacks. Collective.

    log, say: have an effect on rank 0 alone, which reports all that is refused. Raises as `resume`, and the errors of
    the store.
    """
    config, any_refused = parts.config.checkpoint, False

    def watched(kind: str, **facts: object) -> None:
        nonlocal any_refused
        any_refused = any_refused or kind == events.CHECKPOINT_REFUSED
        log(kind, **facts)

    replicas = _open_replicas(config.replicas, folder, place, say)
    restored = load_from_memory(parts, folder, facts, replicas, watched, say)
    striped = bool(config.disks)
    tier = open_tier(folder, config, facts.epoch) if place.is_first or striped else None
    fetch_file = tier.fetch_file if tier and striped else None
    instead = partial(fetch_instead, tier, log=watched, say=say)
    if restored is None:
        from_rank_zero(lambda: fetch_newest(folder, tier, watched, say))
        restored = load_newest(parts, folder, facts, watched, say, instead, fetch_file)
        if restored is not None and place.is_first:  # memory has its own line
            _say_choice(folder, restored.step, parts.config.guard, say)
    if any_refused:
        step = restored.step if restored else 0
        say(f"continue  after step {step}, from the newest sound checkpoint")
    sweep_disks(folder, at_start=True)
    uploader = Uploader(folder, facts.epoch) if tier and (place.is_first or local_rank() == 0) else None
    if uploader:  # uploads of the last attempt may have been killed
        # Memory may have a step that no disk has.
        full = min(restored.step, newest_step(folder.checkpoints)) if restored else 0
        if full:
            uploader.push(full)
        if place.is_first and (weights := newest_step(folder.weights.checkpoints)) > full:
            uploader.push(weights, WEIGHTS)
    return Start(restored=restored, replicas=replicas, uploader=uploader, fetch_instead=instead, fetch_file=fetch_file)


def _say_choice(folder: RunFolder, step: int, guard: Guard, say: Callable[[str], None]) -> None:
    """Report why the run continues after the checkpoint of `step`, and what is known of its weights."""
    choice, health = roll_back_choice(folder, step), health_of_step(folder, step, guard)
    others = "".join(f"; not step {at}: {reason}" for at, reason in choice.passed_over)
    if choice.why:
        say(f"resume    step {step}: {choice.why}{others}")
    if health is not None and health.state in ("proven", "young"):  # a doubt is named above
        say(f"          {health.text}")


def _open_replicas(number: int, folder: RunFolder, place: RankInfo, warn: Callable[[str], None]) -> Replicas | None:
    """Return the keepers of snapshots in memory, if the run wants them. Collective.

    They end with the process that starts the ranks again. Without one there is nothing to keep them for.
    """
    owner = os.environ.get(SUPERVISOR_VARIABLE) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid())
    if not number or not owner:
        return None
    if place.local_world_size < place.world_size and uses_store_of_torchrun():
        warn(
            "WARNING   a lost node cannot be replaced in this job, only by starting it again, which loses its memory: "
            "start torchrun with --rdzv-backend=c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return open_replicas(number, folder, int(owner), place.rank - place.local_rank, warn)


def load_from_memory(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    replicas: Replicas | None,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> CheckpointManifest | None:
    """Load the newest snapshot that the memory of the nodes has whole into `parts`, and report it. Collective.

    Returns None if there is none, or if a checkpoint on the disk is newer: then nothing was reported, or why a snapshot
    was not used.
    """
    if replicas is None:
        return None
    began = time.monotonic()
    try:
        memory = replicas.newest(folder, facts.epoch, from_rank_zero(lambda: newest_step(folder.checkpoints)))
    except (IngotError, OSError, RankError, ValueError) as error:  # the same on every rank
        say(f"WARNING   snapshots in memory are not used: {getattr(error, 'found', error)}")
        return None
    if memory is None:
        return None
    grade = doubt_about(memory.manifest, parts.policy.measures()).grade
    in_store = bool(parts.config.checkpoint.remote.url)  # which may have one without doubt
    if grade and (grade == SUSPECT or in_store or grade > from_rank_zero(partial(_least_doubt, folder))):
        return None
    try:
        restored = resume_from_memory(
            folder, memory, parts.state, settings=facts.settings, data_fingerprint=facts.data_fingerprint
        )
    except CheckpointError as error:
        log(events.CHECKPOINT_REFUSED, step=memory.step, path=str(memory.path), reason=error.found)
        say(f"refused   {error.found}; trying the checkpoints")
        return None
    finally:
        memory.close()
    replicas.adopt(memory.images[0].snapshot, facts.epoch)
    taken = gather_from(range(world()), np.array([memory.own_bytes, memory.peer_bytes], dtype=np.float64))
    own, peers = map(int, taken.sum(0))
    seconds = time.monotonic() - began
    log(events.SNAPSHOT_RESTORED, step=restored.step, own_bytes=own, peer_bytes=peers, seconds=seconds)
    say(
        f"restored  step {restored.step} from memory  {format_bytes(own)} of the same nodes  {format_bytes(peers)} of "
        f"other nodes  {format_seconds(seconds)}  no checkpoint was read"
    )
    _take_up(parts, folder, facts, restored, log, say)
    return restored


def _least_doubt(folder: RunFolder) -> int:
    """Return the smallest grade of doubt of the checkpoints on the disk; SUSPECT if there is none."""
    return min(map(grade_of_doubt, candidate_folders(folder.checkpoints)), default=SUSPECT)


def load_newest(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    log: Callable[..., None],
    say: Callable[[str], None],
    fetch_instead: FetchInstead,
    fetch_file: FetchFile | None,
) -> CheckpointManifest | None:
    """Load the newest undamaged checkpoint of `folder` into `parts`. Returns None for a new run. Collective.

    A checkpoint that cannot be used is reported, and the next older one is tried, on the disk or by `fetch_instead`.
    fetch_file: see `bring_files`. Settings that differ from those of the loaded checkpoint are recorded.
    """

    store = facts.settings.get("checkpoint.remote.url")
    began, read = time.monotonic(), np.zeros(1)

    def on_refused(step: int, path: Path, reason: str, again: bool) -> None:
        log(events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(folder.root)), reason=reason)
        from_store = f"the copy in {store}, then " if store and again else ""
        say(f"refused   {reason}; trying {from_store}the next older one")

    def on_fetched(manifest: CheckpointManifest, fetched: NodeFetch) -> None:
        whole = sum(entry.bytes for entry in manifest.files.values())
        log(events.CHECKPOINT_FETCHED, step=manifest.step, **vars(fetched), whole_bytes=whole)
        say(
            f"fetched   step {manifest.step} on node {fetched.node}  {fetched.files} of {len(manifest.files)} files, "
            f"{format_bytes(fetched.bytes)} of {format_bytes(whole)}  {format_seconds(fetched.seconds)}"
        )

    def on_bytes(size: int) -> None:
        read[0] += size

    restored = resume(
        folder,
        parts.state,
        settings=facts.settings,
        data_fingerprint=facts.data_fingerprint,
        on_refused=on_refused,
        fetch_instead=fetch_instead,
        fetch_file=fetch_file,
        on_fetched=on_fetched,
        on_bytes=on_bytes,
    )
    if restored:
        taken = int(gather_from(range(world()), read).sum())
        log(events.CHECKPOINT_LOADED, step=restored.step, bytes=taken, seconds=time.monotonic() - began)
        _take_up(parts, folder, facts, restored, log, say)
    return restored


def _take_up(
    parts: StepParts,
    folder: RunFolder,
    facts: CheckpointFacts,
    restored: CheckpointManifest,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> None:
    """Bring what depends on the loaded state up to date, and record settings that differ. Collective."""
    parts.model.publish()
    parts.callbacks.restore(restored.callbacks)
    same = (restored.config_sha256, restored.data_fingerprint) == (facts.config_sha256, facts.data_fingerprint)
    changes = [] if same else changes_since(restored, facts.settings, facts.data_fingerprint)
    new_level = [one.key for one in changes if not one.keeps_level]
    new_window = not same and not (changes and not new_level)
    changed = not same and not (changes and not any(alters_steps_after(restored.step, one) for one in changes))
    since = last_change(restored, changes)
    parts.policy.restore(restored.guard, changed=changed, new_window=new_window, changed_after=since)
    if parts.step_judge:
        _say_window(parts.step_judge, restored.step, new_level if new_window else None, say)
    # The order of samples depends on this record: no rank may open the data before it is written.
    from_rank_zero(lambda: record_resumed(folder, restored, facts.settings, facts.data_fingerprint, log))


def _say_window(judge: StepJudge, step: int, new_level: Sequence[str] | None, say: Callable[[str], None]) -> None:
    """Report that the guard judges no sizes for some steps after the checkpoint of `step`. new_level: the changes after
    which it begins a new window; None: there are none, but the checkpoint may lack a window: its guard was off."""
    held, ready = int(judge.count), judge.guard.ready
    if new_level is None and held >= min(ready, step):
        return
    if new_level is None:
        found = f"has {held} of the {ready} healthy steps that it needs"
    else:
        found = "begins a new window" + (f", because of {', '.join(new_level)}" if new_level else "")
    first = judge.first_judged(step)
    say(f"guard     {found}: sizes are judged from step {first} on, if all before are healthy")


def open_loader(
    config: RunConfig,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    first_step: int,
    measures: Sequence[Measure],
    quarantine: Sequence[Quarantined],
    encoder: Encoder | None,
) -> Loader:
    """Open the batches of this rank, from `first_step` to the run's last step.

    measures: of the guard, which say whose data are passed. quarantine: the tokens that are left out.
    encoder: reads windows as text, for data.filter.
    """
    passed = [*config.data.skipped_steps, *passed_steps(measures)]
    return Loader(
        data_path(folder, config.data.tokens),
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        weights=config.data.weights,
        earlier=earlier_weights(read_accepted(folder.accepted), config.data.weights),
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        first_step=first_step,
        last_step=config.train.steps,
        device=device,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
        read_seconds=config.launch.data_seconds,
        passed=passed,
        quarantine=quarantine,
        finds_damage=config.data.on_damage == "quarantine",
        window_filter=WindowFilter(config.data.filter, encoder and encoder.decode)
        if config.data.filter.is_on
        else None,
    )
