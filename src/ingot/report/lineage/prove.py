"""The proof that a run consumed exactly the samples of its order, each once per epoch, from the files of the run alone.

The ledger is read segment by segment and compared with the order, which is computed anew from run file, seed, mixture
and token manifest. Independently of the order, every window is counted. The first difference ends the proof.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import EXIT_OK, CheckpointError, IngotError
from ingot.events import read_events
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.order_sections import OrderByStep, OrderSection, identity_of
from ingot.schema import events
from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import find_checkpoint
from ingot.trainer.checkpoint.manifest import list_checkpoints, read_manifest
from ingot.trainer.checkpoint.resumable import find_resume_point
from ingot.trainer.loader.epochs import EpochCount
from ingot.trainer.loader.ledger import compare_step, damaged_segment, is_untrained, of_step, read_segment
from ingot.trainer.loader.order import KEY as WEIGHTS
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import DAMAGE, TokenReader

TOKENS = "data.tokens"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a setting of the order, or of the layout, before step `step`."""

    step: int
    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of a proof.

    checkpoint: the step of the checkpoint whose ledger was read. steps, samples, segments: those that were compared
    without a difference. epochs: stream -> passes over it that were counted ("" is the stream of all windows). windows:
    stream -> windows of an epoch. counted_steps: the last step in the count; later steps are compared with the order
    only, because seed, seq_len, global_batch or tokens changed, so epochs no longer continue. differences: settings of
    the order that differ between checkpoint and run file. shards: the shard files that were checked. hashed: every byte
    of them was read. replaced: the number of samples whose windows were in quarantine, so that others
    took their places. untrained: the steps that changed no weights: their updates were skipped or their data passed.
    fault: code, found, fix and facts of the first difference, None if there is none.
    """

    run: str
    checkpoint: int
    steps: int
    samples: int
    segments: int
    seed: int
    tokens: str
    epochs: dict[str, float]
    windows: dict[str, int]
    counted_steps: int
    changes: tuple[Change, ...]
    differences: tuple[Change, ...]
    shards: int
    hashed: bool
    replaced: int
    untrained: tuple[int, ...]
    unchecked: tuple[str, ...]
    fault: dict[str, Any] | None

    @property
    def exit_code(self) -> int:
        return CheckpointError.exit_code if self.fault else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"proved": self.fault is None, "exit_code": self.exit_code}


def prove_run(path: Path, *, hashes: bool = False) -> Proof:
    """Prove the samples of the run folder `path` up to its newest readable checkpoint, or up to the checkpoint `path`.

    hashes: read every byte of the shards that the samples are from; otherwise their sizes and lists of block hashes are
    checked. Raises IngotError if the run, its run file or its checkpoints cannot be read; a difference is a result.
    """
    folder, named = find_checkpoint(path)
    whole_run = path.resolve() == folder.root.resolve()
    listed = (c.manifest for c in list_checkpoints(folder.checkpoints) if whole_run and c.manifest)
    manifest = next(listed, None) or read_manifest(named)
    run = RunTokens(folder.root, manifest)
    orders = OrderByStep(run, manifest.step)
    prover = _Prover(run, orders)
    fault = None
    try:
        for segment in manifest.ledger:
            prover.segment(segment)
        shards = prover.check_shards(hashes)
    except IngotError as error:
        fault, shards = {"code": error.code, "found": error.found, "fix": error.fix, "facts": error.facts}, 0
    return Proof(
        run=str(path),
        checkpoint=manifest.step,
        steps=prover.steps,
        samples=prover.samples,
        segments=prover.segments,
        seed=orders.sections[-1].seed,
        tokens=manifest.data_fingerprint,
        epochs=prover.count.epochs() if prover.count else {},
        windows={name: prover.count.sizes[name] for name in prover.count.taken} if prover.count else {},
        counted_steps=prover.counted,
        changes=(*_changes(orders.sections), *_layouts(folder, manifest.step)),
        differences=_differences(run.config, manifest.settings, manifest.step),
        shards=shards,
        hashed=hashes and fault is None,
        replaced=prover.replaced,
        untrained=tuple(prover.untrained),
        unchecked=() if fault else (*_lost_steps(folder, manifest.step), *prover.unchecked(hashes)),
        fault=fault,
    )


class _Prover:
    """The state of a proof: what was compared so far, without a difference."""

    def __init__(self, run: RunTokens, orders: OrderByStep):
        self.run, self.orders = run, orders
        self.steps = self.samples = self.segments = self.counted = 0
        self.untrained: list[int] = []
        self.replaced = 0
        self.count: EpochCount | None = None
        self._section: OrderSection | None = None
        self._shards: set[int] = set()  # of the present tokens
        self._gone: list[OrderSection] = []  # sections whose tokens have been purged since
        self._left_out = {one.shard for one in run.quarantine if one.code in DAMAGE}

    def segment(self, segment: LedgerSegment) -> None:
        """Compare all steps of a segment. Raises DataError at the first difference."""
        rows, intact = read_segment(self.run.folder.ledger, segment)
        for step, ids in enumerate(rows, segment.first_step):
            section, order = self._at(step)
            if len(ids) != section.global_batch and not intact:
                raise damaged_segment(self.run.folder.ledger, segment)
            compare_step(step, ids, order, section.global_batch)
            self.untrained += [step] if is_untrained(ids) else []
            whole, replaced = order.replaced(step, section.global_batch)
            self.replaced += int(replaced.sum())
            ids = of_step(ids)
            if self.count and self.counted == step - 1 and (section.continues or step > section.first):
                # An epoch has each window once: one that is left out counts, and not the one in its place.
                self.count.add(step, np.where(replaced, whole, ids), section.weights)
                self.counted = step
            if section.layout and section.layout.current:
                self._shards.update(order.locate(ids)[0].tolist())
            self.steps, self.samples = step, self.samples + len(ids)
        if not intact:
            raise damaged_segment(self.run.folder.ledger, segment)
        self.segments += 1

    def _at(self, step: int) -> tuple[OrderSection, Order]:
        section, order = self.orders.at(step)
        if section is not self._section:
            self._section = section
            if section.first == 1 and section.layout:
                self.count = EpochCount(section.layout.manifest, section.seq_len)
            if section.layout and not section.layout.current:
                self._gone.append(section)
        return section, order

    def check_shards(self, hashes: bool) -> int:
        """Check the shard files of all samples on the present tokens. Returns their number. Raises DataError."""
        reader = TokenReader(self.run.tokens, self.orders.sections[-1].seq_len, manifest=self.run.manifest)
        checked = [
            number for number in sorted(self._shards) if self.run.manifest.shards[number].name not in self._left_out
        ]
        for number in checked:
            reader.check_shard(number, blocks=hashes)
        return len(checked)

    def unchecked(self, hashes: bool) -> list[str]:
        """Return what the proof does not cover, as phrases for people."""
        found = ["the tensors of the checkpoint (ingot ckpt verify)"]
        if not hashes:
            found.append("the bytes of the shards (--hashes)")
        found += [f"shard {name}, which is in quarantine" for name in sorted(self._left_out)]
        found += [f"the shards of steps {s.first} to {s.last}, purged since" for s in self._gone]
        if self.counted < self.steps:
            found.append(f"whether steps {self.counted + 1} to {self.steps} repeat earlier samples (see the changes)")
        return found


def _changes(sections: Sequence[OrderSection]) -> list[Change]:
    found = []
    for before, after in pairwise(sections):
        pairs = {
            "seed": (before.seed, after.seed),
            "train.seq_len": (before.seq_len, after.seq_len),
            "train.global_batch": (before.global_batch, after.global_batch),
            WEIGHTS: (dict(before.weights), dict(after.weights)),
            TOKENS: (identity_of(before)[-1], identity_of(after)[-1]),
        }
        found += [Change(step=after.first, key=k, before=a, after=b) for k, (a, b) in pairs.items() if a != b]
    return found


def _layouts(folder: RunFolder, last_step: int) -> list[Change]:
    """Return the changes of the layout up to `last_step`, from the event log; none if there is no log."""
    logged = read_events(folder.events, events.RUN_STARTED)
    whole = [e for e in logged if isinstance(e.get("from_step"), int) and isinstance(e.get("layout"), dict)]
    starts = [e for e in whole if e["from_step"] < last_step]
    return [
        Change(step=after["from_step"] + 1, key="layout", before=before["layout"], after=after["layout"])
        for before, after in pairwise(starts)
        if before["layout"] != after["layout"]
    ]


def _lost_steps(folder: RunFolder, proved: int) -> list[str]:
    """Return a phrase about the steps after step `proved` whose checkpoint was saved and cannot be used, if any."""
    newest = find_resume_point(folder)
    if newest.newest_step <= proved:
        return []
    steps = f"steps {proved + 1} to {newest.newest_step}, which were saved"
    return [f"{steps}, but the checkpoint of step {newest.newest_step}: {newest.problem}" if newest.problem else steps]


def _differences(config: RunConfig, settings: Mapping[str, Any], step: int) -> tuple[Change, ...]:
    """Return the settings of the order that the run file has otherwise than the checkpoint of `step`."""
    now, keys = config.settings(), ("seed", "train.seq_len", "train.global_batch")
    found = [Change(step=step, key=k, before=settings[k], after=now.get(k)) for k in keys if k in settings]
    before, after = ({k: v for k, v in own.items() if k.startswith(WEIGHTS)} for own in (settings, now))
    found.append(Change(step=step, key=WEIGHTS, before=before, after=after))
    return tuple(change for change in found if change.before != change.after)
