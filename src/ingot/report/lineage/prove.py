"""The proof that a run consumed exactly the samples of its order, each once per epoch, from the files of the run alone.

The ledger is read segment by segment and compared with the order, which is computed anew from run file, seed, mixture
and token manifest. Independently of the order, every window is counted. The first difference ends the proof.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ingot.data.lineage.purge.history import TokenLayout
from ingot.errors import EXIT_OK, CheckpointError, DataError, IngotError
from ingot.events import read_events
from ingot.report.lineage.exposure import RunTokens
from ingot.schema import events
from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import find_checkpoint
from ingot.trainer.checkpoint.manifest import list_checkpoints, read_manifest
from ingot.trainer.loader.epochs import EpochCount
from ingot.trainer.loader.ledger import compare_step, damaged_segment, read_segment
from ingot.trainer.loader.order import Order, earlier_values
from ingot.trainer.loader.reader import TokenReader

WEIGHTS = "data.weights"
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
    of them was read. fault: code, found and facts of the first difference, None if there is none.
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
    unchecked: tuple[str, ...]
    fault: dict[str, Any] | None

    @property
    def exit_code(self) -> int:
        return CheckpointError.exit_code if self.fault else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"proved": self.fault is None, "exit_code": self.exit_code}


@dataclass(frozen=True)
class _Section:
    """Steps first..last, which all have the same settings of the order. earlier: the mixtures before, as (last step,
    weights). layout: None if the tokens are no longer known. continues: epochs continue from the section before."""

    first: int
    last: int
    seed: int
    seq_len: int
    global_batch: int
    weights: Mapping[str, float]
    earlier: Sequence[tuple[int, Mapping[str, float]]]
    layout: TokenLayout | None
    continues: bool

    def order(self) -> Order:
        """Compute the order as the trainer did in these steps. Raises DataError if the tokens are no longer known."""
        if self.layout is None:
            raise DataError(
                "E-PROVE-TOKENS",
                f"the steps {self.first} to {self.last} were trained on other tokens than those in data.tokens now",
                rule="the order of samples is computed from the tokens that the run was trained on",
                fix="restore these tokens in the folder data.tokens, or set data.tokens to their folder",
                step=self.first,
                last_step=self.last,
            )
        mixes = [(last * self.global_batch, own) for last, own in self.earlier]
        return Order(self.layout.manifest, self.seq_len, self.seed, self.weights, earlier=mixes)


def prove_run(path: Path, *, hashes: bool = False) -> Proof:
    """Prove the samples of the run folder `path` up to its newest readable checkpoint.

    hashes: read every byte of the shards that the samples are from; otherwise their sizes and lists of block hashes are
    checked. Raises IngotError if the run, its run file or its checkpoints cannot be read; a difference is a result.
    """
    folder, newest = find_checkpoint(path)
    listed = (c.manifest for c in list_checkpoints(folder.checkpoints) if c.manifest)
    manifest = next(listed, None) or read_manifest(newest)
    run = RunTokens(folder.root)
    sections = _sections(run, manifest.step)
    prover = _Prover(run, sections)
    fault = None
    try:
        for segment in manifest.ledger:
            prover.segment(segment)
        shards = prover.check_shards(hashes)
    except IngotError as error:
        fault, shards = {"code": error.code, "found": error.found, "facts": error.facts}, 0
    return Proof(
        run=str(path),
        checkpoint=manifest.step,
        steps=prover.steps,
        samples=prover.samples,
        segments=prover.segments,
        seed=sections[-1].seed,
        tokens=manifest.data_fingerprint,
        epochs=prover.count.epochs() if prover.count else {},
        windows={name: prover.count.sizes[name] for name in prover.count.taken} if prover.count else {},
        counted_steps=prover.counted,
        changes=(*_changes(sections), *_layouts(folder, manifest.step)),
        differences=_differences(run.config, manifest.settings, manifest.step),
        shards=shards,
        hashed=hashes and fault is None,
        unchecked=tuple(prover.unchecked(hashes)) if fault is None else (),
        fault=fault,
    )


class _Prover:
    """The state of a proof: what was compared so far, without a difference."""

    def __init__(self, run: RunTokens, sections: Sequence[_Section]):
        self.run, self.sections = run, sections
        self.steps = self.samples = self.segments = self.counted = 0
        self.count: EpochCount | None = None
        self._order: tuple[_Section, Order] | None = None
        self._shards: set[int] = set()  # of the present tokens
        self._gone: list[_Section] = []  # sections whose tokens have been purged since

    def segment(self, segment: LedgerSegment) -> None:
        """Compare all steps of a segment. Raises DataError at the first difference."""
        rows, intact = read_segment(self.run.folder.ledger, segment)
        for step, ids in enumerate(rows, segment.first_step):
            section, order = self._at(step)
            if len(ids) != section.global_batch and not intact:
                raise damaged_segment(self.run.folder.ledger, segment)
            compare_step(step, ids, order, section.global_batch)
            if self.count and self.counted == step - 1 and (section.continues or step > section.first):
                self.count.add(step, ids, section.weights)
                self.counted = step
            if section.layout and section.layout.current:
                self._shards.update(order.locate(ids)[0].tolist())
            self.steps, self.samples = step, self.samples + len(ids)
        if not intact:
            raise damaged_segment(self.run.folder.ledger, segment)
        self.segments += 1

    def _at(self, step: int) -> tuple[_Section, Order]:
        if self._order is None or step > self._order[0].last:
            section = next(s for s in self.sections if step <= s.last)
            self._order = section, section.order()
            if section.first == 1 and section.layout:
                self.count = EpochCount(section.layout.manifest, section.seq_len)
            if section.layout and not section.layout.current:
                self._gone.append(section)
        return self._order

    def check_shards(self, hashes: bool) -> int:
        """Check the shard files of all samples on the present tokens. Returns their number. Raises DataError."""
        reader = TokenReader(self.run.tokens, self.sections[-1].seq_len, manifest=self.run.manifest)
        for number in sorted(self._shards):
            reader.check_shard(number, blocks=hashes)
        return len(self._shards)

    def unchecked(self, hashes: bool) -> list[str]:
        """Return what the proof does not cover, as phrases for people."""
        found = ["the tensors of the checkpoint (ingot ckpt verify)"]
        if not hashes:
            found.append("the bytes of the shards (--hashes)")
        found += [f"the shards of steps {s.first} to {s.last}, purged since" for s in self._gone]
        if self.counted < self.steps:
            found.append(f"whether steps {self.counted + 1} to {self.steps} repeat earlier samples (see the changes)")
        return found


def _sections(run: RunTokens, last_step: int) -> list[_Section]:
    """Divide the steps 1 to `last_step` wherever a setting of the order changed."""
    config = run.config
    now = {
        "seed": config.seed,
        "train.seq_len": config.train.seq_len,
        "train.global_batch": config.train.global_batch,
        WEIGHTS: dict(config.data.weights),
    }
    history = {key: [*earlier_values(run.folder, key, value), (last_step, value)] for key, value in now.items()}
    ends = {last for values in history.values() for last, _ in values} | {steps.last for steps in run.ranges}
    found: list[_Section] = []
    first = 1
    for last in sorted(end for end in ends if 0 < end <= last_step):
        own = {key: next(v for end, v in values if first <= end) for key, values in history.items()}
        section = _Section(
            first,
            last,
            own["seed"],
            own["train.seq_len"],
            own["train.global_batch"],
            own[WEIGHTS],
            [(end, weights) for end, weights in history[WEIGHTS][:-1] if end < first],
            run.layout_at(first),
            continues=first == 1,
        )
        if found and _numbers(found[-1]) == _numbers(section):
            section = replace(section, continues=True)
        found.append(section)
        first = last + 1
    return found


def _numbers(section: _Section) -> tuple:
    """Return the settings that have to stay equal for epochs to continue."""
    tokens = section.layout and section.layout.manifest.fingerprint()
    return section.seed, section.seq_len, section.global_batch, tokens


def _changes(sections: Sequence[_Section]) -> list[Change]:
    found = []
    for before, after in pairwise(sections):
        pairs = {
            "seed": (before.seed, after.seed),
            "train.seq_len": (before.seq_len, after.seq_len),
            "train.global_batch": (before.global_batch, after.global_batch),
            WEIGHTS: (dict(before.weights), dict(after.weights)),
            TOKENS: (_numbers(before)[-1], _numbers(after)[-1]),
        }
        found += [Change(step=after.first, key=k, before=a, after=b) for k, (a, b) in pairs.items() if a != b]
    return found


def _layouts(folder: RunFolder, last_step: int) -> list[Change]:
    """Return the changes of the layout up to `last_step`, from the event log; none if there is no log."""
    starts = [e for e in read_events(folder.events, events.RUN_STARTED) if e["from_step"] < last_step]
    return [
        Change(step=after["from_step"] + 1, key="layout", before=before["layout"], after=after["layout"])
        for before, after in pairwise(starts)
        if before["layout"] != after["layout"]
    ]


def _differences(config: RunConfig, settings: Mapping[str, Any], step: int) -> tuple[Change, ...]:
    """Return the settings of the order that the run file has otherwise than the checkpoint of `step`."""
    now, keys = config.settings(), ("seed", "train.seq_len", "train.global_batch")
    found = [Change(step=step, key=k, before=settings[k], after=now.get(k)) for k in keys if k in settings]
    before, after = ({k: v for k, v in own.items() if k.startswith(WEIGHTS)} for own in (settings, now))
    found.append(Change(step=step, key=WEIGHTS, before=before, after=after))
    return tuple(change for change in found if change.before != change.after)
