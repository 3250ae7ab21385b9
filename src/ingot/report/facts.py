"""What the report is told from: a run's event log and artifacts, read once, without torch.

Whatever is missing stays empty, and the story leaves it out. Events that lack what their kind promises are counted in
`unreadable_events` and not used.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from ingot import config as configuration
from ingot.config import from_dict
from ingot.errors import DataError, UsageError
from ingot.events import read_events
from ingot.report.incidents import Incident, IncidentReader
from ingot.schema import events as kinds
from ingot.schema.corpus import CorpusManifest
from ingot.schema.layout import RunFolder
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest, token_manifest_from_dict
from ingot.storage import sha256_file

_NUMBERS = {
    kinds.RUN_STARTED: ("from_step", "world_size"),
    kinds.STEP: ("step", "loss", "grad_norm", "lr"),
    kinds.PROGRESS: ("step", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds"),
    kinds.CHECKPOINT: ("step", "bytes", "stall_seconds"),
    kinds.EVALUATION: ("step", "bpb", "loss", "tokens", "unigram_bpb"),
    kinds.SAMPLE: ("step",),
    kinds.FINISHED: ("step", "tokens"),
}


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
    """Events are dicts as in schema/events.py. `steps` and `progress`: step -> the last one written for that step.

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
    checkpoints: list[dict] = field(default_factory=list)
    refused: list[dict] = field(default_factory=list)
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
    Raises UsageError when `run` has no event log, DataError for an artifact that cannot be read.
    """
    facts = Facts(folder=RunFolder(run))
    if not facts.folder.events.is_file():
        raise UsageError(
            f"{run} has no {facts.folder.events.name}",
            rule="a report is told from the event log of a run that was started",
            fix="ingot report RUN, where RUN is the folder that `ingot train` filled",
        )
    _read_artifacts(facts, corpus)
    if twin:
        facts.twin = _read_json(Twin, twin)
    read_run_events(facts)
    if stages:
        facts.stages += [e for e in read_events(stages, kinds.STAGE) if _is_number(e.get("seconds"))]
    return facts


def _read_artifacts(facts: Facts, corpus: Path | None) -> None:
    folder = facts.folder
    if folder.config.is_file():
        facts.run = configuration.load(RunConfig, folder.config)
        facts.hashes["run.toml"] = sha256_file(folder.config)
        manifest = folder.root / facts.run.data.tokens / "manifest.json"
        if manifest.is_file():
            facts.tokens = token_manifest_from_dict(_json(manifest), str(manifest))
            facts.hashes["token stream"] = facts.tokens.fingerprint()
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
        kinds.EVALUATION: facts.evaluations,
        kinds.SAMPLE: facts.samples,
        kinds.STAGE: facts.stages,
        kinds.RUN_STARTED: facts.starts,
    }
    started = alive = None
    for event in read_events(facts.folder.events):
        kind = event.get("kind") if isinstance(event, dict) else None
        if not _is_readable(event, kind):
            facts.unreadable_events += 1
            continue
        incidents.see(event)
        if kind in lists:
            lists[kind].append(event)
        elif kind == kinds.STEP:
            facts.steps[event["step"]] = event
        elif kind == kinds.PROGRESS:
            facts.progress[event["step"]] = event
        elif kind in (kinds.FINISHED, kinds.STOPPED, kinds.EXPORTED):
            setattr(facts, kind, event)
        if kind == kinds.RUN_STARTED:
            facts.active_seconds += alive - started if started and alive else 0.0
            started = alive = event["time"]
        elif kind in (kinds.STEP, kinds.PROGRESS, kinds.CHECKPOINT, kinds.EVALUATION, kinds.SAMPLE, kinds.FINISHED):
            alive = event["time"]
    facts.active_seconds += alive - started if started and alive else 0.0
    facts.incidents = incidents.found


def _is_readable(event, kind) -> bool:
    if not isinstance(kind, str) or not _is_number(event.get("time")):
        return False
    steps_are_whole = isinstance(event.get("step", 0), int | type(None))
    return steps_are_whole and all(_is_number(event.get(name)) for name in _NUMBERS.get(kind, ()))


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
