"""Open a run for a replay in one process: its newest checkpoint before a step, and its batches from there on."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import CheckpointError
from ingot.rehearse.replay.config import one_process
from ingot.rehearse.replay.found import LAST_WAY, RecordedWay
from ingot.rng import derive
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard_record import Measure, lr_factor, read_measures
from ingot.schema.quarantine_record import continued, read_quarantine
from ingot.schema.run import RunConfig, setting_changes
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run, recorded_run
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import load_checkpoint
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, verify_tensors
from ingot.trainer.checkpoint.resumable import judged_checkpoints
from ingot.trainer.heldout import data_path
from ingot.trainer.launch.here import own_process
from ingot.trainer.loader.loader import Loader
from ingot.trainer.mesh.start import start
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import Unwatched
from ingot.trainer.restore import open_loader


class RecordedSkips(Unwatched):
    """The policy of a replay: skip the updates that the run skipped, and those whose gradient is not finite.

    measures: of the guard, whose factors hold. look: called before each update, while gradients are there.
    """

    def __init__(self, steps: Iterable[int], measures: Sequence[Measure] = ()):
        self.steps, self.step, self._measures = frozenset(steps), 0, measures
        self.look: Callable[[], None] = lambda: None

    def measures(self) -> Sequence[Measure]:
        return self._measures

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        self.look()
        return ~torch.isfinite(grad_norm) | (self.step in self.steps)


@dataclass(kw_only=True)
class OpenedReplay:
    """A run that is open for a replay.

    parts: of its step, with the state of the checkpoint. loader: its batches from step first + 1 on. first: the step of
    the checkpoint; 0: the first weights. older: usable or damaged checkpoints before it. unused: why newer ones are not
    used. notes: differences between replay and run, as sentences. rates: step -> its learning rate in the run, where
    the log has it.
    """

    parts: StepParts
    policy: RecordedSkips
    loader: Loader
    device: torch.device
    first: int
    older: list[ListedCheckpoint]
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    rates: Mapping[int, float]

    def rate_of(self, step: int) -> float:
        """Return the learning rate of `step`: that of the log, else by the schedule and the factors of the guard."""
        if step in self.rates:
            return self.rates[step]
        config = self.parts.config
        schedule = learning_rate(config.train.steps, config.optim.lr, config.schedule)
        return schedule(step) * lr_factor(self.policy.measures(), step, config.optim.lr)


@contextlib.contextmanager
def open_replay(
    root: Path,
    wanted: int,
    *,
    skipped: Iterable[int],
    device: str,
    say: Callable[[str], None],
    way: RecordedWay = LAST_WAY,
) -> Iterator[OpenedReplay]:
    """Open the run folder `root` at the newest usable checkpoint before step `wanted`, in this process.

    skipped: the steps whose updates the run skipped. device: "auto", "cpu" or "cuda". way: of the run to this training
    of the step. The run may still be training. Raises ConfigError for a run file that cannot be used here,
    ResourceError if this machine has too little memory.
    """
    folder = RunFolder(root)
    config, notes = one_process(load_run(folder.config), device, say)
    measures = way.measures
    if measures is None:  # those taken because of the step are from after it was trained
        measures = [one for one in read_measures(folder.guard) if not one.first <= wanted <= one.last]
    policy = RecordedSkips(skipped, measures)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_process({}, alone=True))
        place = start(config.train.device, config.launch.timeout_seconds, tf32=config.train.tf32)
        torch.manual_seed(derive(config.seed, "torch", 0))
        checkpoint, manifest, older, unused = _newest(folder, wanted, way.foreign)
        parts = build_parts(config, place.device, folder.root, policy, continues=checkpoint is not None)
        stack.callback(parts.optimizer.close)
        stack.callback(parts.model.close)
        if checkpoint is not None and manifest is not None:
            load_checkpoint(checkpoint.path, manifest, parts.state, lambda read: None)
            parts.model.publish()
            parts.callbacks.restore(manifest.callbacks)
            notes += _differences(folder, manifest, config)
        first = checkpoint.step if checkpoint else 0
        say(f"replay    from {f'the checkpoint of step {first}' if first else 'the first weights'} to step {wanted}")
        left_out = read_quarantine(folder.quarantine)
        if manifest is not None:
            left_out = continued(left_out, manifest.quarantine, manifest.step)
        loader = stack.enter_context(
            open_loader(config, folder, parts.mesh, place.device, first + 1, measures, left_out, None)
        )
        opened = OpenedReplay(
            parts=parts,
            policy=policy,
            loader=loader,
            device=place.device,
            first=first,
            older=older,
            unused=unused,
            notes=tuple(notes),
            rates=way.rates,
        )
        del parts
        try:
            yield opened
        finally:
            del opened.parts  # before the group ends


def _newest(
    folder: RunFolder, wanted: int, foreign: Collection[int]
) -> tuple[ListedCheckpoint | None, CheckpointManifest | None, list[ListedCheckpoint], tuple[str, ...]]:
    """Return the newest usable checkpoint before step `wanted` with its manifest, the older ones, and why newer ones
    were not used."""
    unused = []
    before = [one for one in judged_checkpoints(folder) if one.step < wanted]
    for number, one in enumerate(before):
        try:
            if one.damage:
                unused.append(f"the checkpoint of step {one.step}: {one.damage}")
                continue
            if one.step in foreign:
                unused.append(f"the checkpoint of step {one.step}: the run trained it again, after it had gone back")
                continue
            return one, verify_tensors(one.path), before[number + 1 :], tuple(unused)
        except CheckpointError as error:
            unused.append(error.found)
    return None, None, [], tuple(unused)


def _differences(folder: RunFolder, manifest: CheckpointManifest, config: RunConfig) -> list[str]:
    """Return a sentence for each difference between the run that saved `manifest` and its folder now."""
    recorded, found = recorded_run(folder.config), []
    changes = [one for one in setting_changes(manifest.settings, recorded.settings()) if not one.kind.is_free]
    found += [f"since the checkpoint a setting changed: {change}" for change in changes]
    if read_token_manifest(data_path(folder, config.data.tokens)).fingerprint() != manifest.data_fingerprint:
        found.append("the tokens are not those of the checkpoint: batches may be others than in the run")
    if recorded.plugins.code != config.plugins.code:
        found.append("a plug-in has other code than the run recorded")
    return found
