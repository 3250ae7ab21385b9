"""What the report is told from: a run's event log and artifacts, read once, without torch.

Whatever is missing stays empty, and the story leaves it out. Events that lack what their kind promises are counted in
`unreadable_events` and not used.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from ingot.config import from_dict
from ingot.errors import DataError, UsageError
from ingot.events import read_events
from ingot.report.incidents import Incident, IncidentReader
from ingot.schema import events as kinds
from ingot.schema.corpus import CorpusManifest
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.storage import sha256_file
from ingot.theory.rules import load_run

# Fields that an event of a kind must have, as finite numbers, to be told from; and those that may be NaN or infinite.
_NUMBERS = {
    kinds.RUN_STARTED: ("from_step", "world_size"),
    kinds.STEP: ("step",),
    kinds.PROGRESS: ("step", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds"),
    kinds.WAITS: ("step", "steps"),
    kinds.EXPERTS: ("step", "steps"),
    kinds.CHECKPOINT: ("step", "bytes", "stall_seconds"),
    kinds.EVALUATION: ("step", "tokens"),
    kinds.SAMPLE: ("step",),
    kinds.STAGE: ("seconds",),
    kinds.FINISHED: ("step", "tokens"),
    kinds.SETTING_CHANGED: ("step",),
}
_PERHAPS_NOT_FINITE = {
    kinds.STEP: ("loss", "grad_norm", "lr"),
    kinds.EVALUATION: ("bpb", "loss", "unigram_bpb"),
}
_BY_LAYER = ("layers", "load_cv", "max_load", "min_load", "entropy")  # of an `experts` event
_BEYOND = ("dropped", "fallback")  # of it, too, or null
_YEAR_5000_SECONDS = 95_617_584_000


@dataclass(frozen=True, kw_only=True)
class Twin:
    """`twin.json`: the run held against the same run without a fault, over steps first_step..last_step (inclusive)."""

    first_step: int
    last_step: int
    steps: int
    equal: bool
    max_difference: float
    kill_step: int
    resumed_from: int


@dataclass(kw_only=True)
class Facts:
    """Events are dicts as in schema/events.py. `steps`, `progress`, `waits` and `experts`: step -> the last one written
    for it.

    active_seconds: from each start to the last sign of life of that attempt, summed; pauses between are not in it.
    """

    folder: RunFolder
    run: RunConfig | None = None
    plan: Plan | None = None
    corpus: CorpusManifest | None = None
    tokens: TokenManifest | None = None
    twin: Twin | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    starts: list[dict] = field(default_factory=list)
    steps: dict[int, dict] = field(default_factory=dict)
    progress: dict[int, dict] = field(default_factory=dict)
    waits: dict[int, dict] = field(default_factory=dict)
    experts: dict[int, dict] = field(default_factory=dict)
    checkpoints: list[dict] = field(default_factory=list)
    refused: list[dict] = field(default_factory=list)
    changed_settings: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    stages: list[dict] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    exported: dict | None = None
    finished: dict | None = None
    stopped: dict | None = None
    active_seconds: float = 0.0
    unreadable_events: int = 0

    @property
    def last_step(self) -> int:
        return max((*self.steps, *self.progress, 0))


def gather(run: Path, *, corpus: Path | None = None, twin: Path | None = None, stages: Path | None = None) -> Facts:
    """Facts of the run folder `run`.

    corpus: a corpus folder; without it, the one beside the run's tokens if its hash is the one they were made from.
    twin: a twin.json. stages: the event log that holds `stage` events, if it is not the run's.
    Raises UsageError when `run` has no event log, DataError for an artifact or a log of which nothing can be read.
    """
    facts = Facts(folder=RunFolder(run))
    if not facts.folder.events.is_file():
        raise UsageError(
            f"{run} has no {facts.folder.events.name}",
            rule="what a run did is told from its event log, which starts with it",
            fix="name the folder that `ingot train` filled: ingot report RUN, ingot explain slow RUN",
        )
    _read_artifacts(facts, corpus)
    if twin:
        facts.twin = _read_json(Twin, twin)
    read_run_events(facts)
    if stages:
        facts.stages += [event for event in _readable_events(stages, facts) if event["kind"] == kinds.STAGE]
    return facts


def _read_artifacts(facts: Facts, corpus: Path | None) -> None:
    folder = facts.folder
    if folder.config.is_file():
        facts.run = load_run(folder.config)
        facts.hashes["run.toml"] = sha256_file(folder.config)
        manifest = folder.root / facts.run.data.tokens / "manifest.json"
        if manifest.is_file():
            facts.tokens = read_token_manifest(manifest.parent)
            facts.hashes["token stream found"] = facts.tokens.fingerprint()
            facts.hashes["tokenizer"] = facts.tokens.tokenizer_sha256
            facts.hashes["corpus"] = facts.tokens.corpus_sha256
            beside = manifest.parent.parent.parent / "corpus"
            if corpus is None and (beside / "corpus.json").is_file():
                same = sha256_file(beside / "corpus.json") == facts.tokens.corpus_sha256
                corpus = beside if same else None
    if folder.plan.is_file():
        facts.plan = _read_json(Plan, folder.plan)
    if corpus:
        facts.corpus = _read_json(CorpusManifest, corpus / "corpus.json")
        facts.hashes["corpus"] = sha256_file(corpus / "corpus.json")


def _json(path: Path) -> dict:
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", rule="artifacts are JSON objects") from None
    return values


def _read_json(kind, path: Path):
    return from_dict(kind, _json(path), where=lambda key: f"{path} ({key})")


def read_run_events(facts: Facts) -> None:
    """Walk the event log once, in the order it was written."""
    incidents = IncidentReader(facts.steps)
    lists = {
        kinds.CHECKPOINT: facts.checkpoints,
        kinds.CHECKPOINT_REFUSED: facts.refused,
        kinds.SETTING_CHANGED: facts.changed_settings,
        kinds.EVALUATION: facts.evaluations,
        kinds.SAMPLE: facts.samples,
        kinds.STAGE: facts.stages,
        kinds.RUN_STARTED: facts.starts,
    }
    started = alive = kind = None
    for event in _readable_events(facts.folder.events, facts):
        kind = event["kind"]
        incidents.see(event)
        if kind in lists:
            lists[kind].append(event)
        elif kind == kinds.STEP:
            facts.steps[event["step"]] = event
        elif kind == kinds.PROGRESS:
            facts.progress[event["step"]] = event
        elif kind == kinds.WAITS:
            facts.waits[event["step"]] = event
        elif kind == kinds.EXPERTS:
            facts.experts[event["step"]] = event
        elif kind in (kinds.FINISHED, kinds.STOPPED, kinds.EXPORTED):
            setattr(facts, kind, event)
        if kind == kinds.RUN_STARTED:
            facts.active_seconds += alive - started if started and alive else 0.0
            started = alive = event["time"]
        elif kind in (kinds.STEP, kinds.PROGRESS, kinds.CHECKPOINT, kinds.EVALUATION, kinds.SAMPLE, kinds.FINISHED):
            alive = event["time"]
    if kind is None:
        raise DataError(
            f"{facts.folder.events} holds no event that can be read",
            rule="a report is told from the event log alone",
            fix="restore the file from a copy; the checkpoints of the run are not touched by this",
        )
    facts.active_seconds += alive - started if started and alive else 0.0
    facts.incidents = incidents.found


def _readable_events(path: Path, facts: Facts) -> Iterator[dict]:
    """The events of `path` that hold what their kind promises; the others are counted."""
    for event in read_events(path):
        if _is_readable(event):
            yield event
        else:
            facts.unreadable_events += 1


def _is_readable(event) -> bool:
    kind = event.get("kind") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not is_finite(event.get("time")) or abs(event["time"]) > _YEAR_5000_SECONDS:
        return False
    step = event.get("step")
    if step is not None and not (isinstance(step, int) and is_finite(step)):
        return False
    if kind == kinds.EXPERTS and not _has_numbers_by_layer(event):
        return False
    finite = all(is_finite(event.get(name)) for name in _NUMBERS.get(kind, ()))
    return finite and all(is_number(event.get(name)) for name in _PERHAPS_NOT_FINITE.get(kind, ()))


def _has_numbers_by_layer(event: dict) -> bool:
    names = (*_BY_LAYER, *(name for name in _BEYOND if event.setdefault(name, None) is not None))
    columns = [column for name in names if isinstance(column := event.get(name), list) and column]
    if len(columns) < len(names) or len({len(column) for column in columns}) > 1:
        return False
    return all(is_finite(value) or value != value for column in columns for value in column)


def is_number(value) -> TypeGuard[float]:
    """An int or float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value) -> TypeGuard[float]:
    """A number that is neither NaN nor infinite, nor so large that it stands for a fault."""
    return is_number(value) and abs(value) < 1e18
