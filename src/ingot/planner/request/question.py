"""What a plan is asked: a model, a cluster, tokens; and the run that follows from them before it has a layout."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import ConfigError, DataMissing
from ingot.hub.config_file import require_fit
from ingot.planner.request.amounts import parse_tokens
from ingot.planner.request.subject import Subject
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import make_plan
from ingot.planner.run.propose import NO_HINTS, Hints, Proposal, propose
from ingot.schema.cluster import Cluster
from ingot.schema.nearest import shareable_batch
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest, check_vocabulary, read_token_manifest, training_tokens
from ingot.units import format_count

NOWHERE = Data(tokens="data/tokens/train")


@dataclass(frozen=True, kw_only=True)
class Question:
    """tokens: in the training set. wanted: what was asked for of batch, sequence, steps and learning rate; batch_why:
    why that batch. pinned: what the search may not change. mfu: in place of the predicted one. beside: the folder of
    the run file; its paths are relative to it."""

    subject: Subject
    cluster: Cluster
    tokens: int
    data: Data = NOWHERE
    manifest: TokenManifest | None = None
    wanted: Hints = NO_HINTS
    batch_why: str = ""
    name: str = ""
    precision: str = "bf16"
    software: Software = INGOT
    pinned: Mapping[str, object] = field(default_factory=dict)
    mfu: float = 0.0
    usd_per_hour: float = 0.0
    assumptions: Assumptions = field(default_factory=Assumptions)
    top: int = 5
    beside: Path = Path()


def base_run(question: Question) -> tuple[RunConfig, dict[str, str]]:
    """The run without a layout, and the reason of each chosen value: everything but how it is split. On a CPU all of
    it: a calibrated machine has ranks that share the batch, and its rates are those of just this.

    Raises ConfigError where data and model do not go together.
    """
    subject, cluster = question.subject, question.cluster
    proposal = _proposal(question, question.wanted)
    run, reasons = proposal.run, dict(proposal.reasons)
    if _repeats(question, run):
        steps = max(question.tokens // run.tokens_per_step, 1)
        run = _proposal(question, replace(question.wanted, steps=steps)).run
        reasons["train.steps"] = f"{format_count(question.tokens)} tokens, as asked for"
    if cluster.device != "cpu":
        for key in [key for key in reasons if key.startswith("parallel.") or key == "train.micro_batch"]:
            del reasons[key]
        if not question.wanted.global_batch and subject.hints.global_batch not in (0, run.train.global_batch):
            reasons["train.global_batch"] += f", made a number that {cluster.devices:,} devices can share"
    if question.batch_why:
        reasons["train.global_batch"] = question.batch_why
    if subject.init:
        if question.manifest:
            check_vocabulary(question.manifest, run.model.vocab_size)
        require_fit(subject.init, run.model)
        run = replace(run, init=relative(subject.init, question.beside))
        reasons["init"] = "the first weights, and the shape in [model]"
    return run, reasons


def _proposal(question: Question, wanted: Hints) -> Proposal:
    subject, cluster = question.subject, question.cluster
    return propose(
        subject.arch,
        cluster if cluster.device == "cpu" else _undivided(cluster, bool(wanted.global_batch)),
        question.data,
        name=question.name or subject.name,
        tokens=question.tokens,
        # The ids of weights that are there already stay; tokens with others are refused.
        vocab_size=question.manifest.vocab_size if question.manifest and not subject.init else 0,
        preset=_shared_hints(subject.hints, cluster),
        wanted=wanted,
        precision=question.precision,
        usd_per_hour=question.usd_per_hour,
    )


def _shared_hints(hints: Hints, cluster: Cluster) -> Hints:
    """With a batch that the devices can share in many ways, which no layout has chosen yet."""
    if cluster.device == "cpu" or not hints.global_batch:
        return hints
    return replace(hints, global_batch=shareable_batch(hints.global_batch, cluster.devices))


def _repeats(question: Question, run: RunConfig) -> bool:
    """Whether the rules go over the tokens more than once, though they are a number to train on and no folder."""
    chosen = question.wanted.steps or question.subject.hints.steps
    return not question.manifest and not chosen and run.train.steps * run.tokens_per_step > question.tokens


def plan_of(question: Question, run: RunConfig) -> Plan:
    return make_plan(
        run,
        question.cluster,
        software=question.software,
        assumptions=question.assumptions,
        mfu=question.mfu,
        parameters=question.subject.parameters,
        tokens=question.tokens,
        manifest=question.manifest,
    )


def _undivided(cluster: Cluster, batch_given: bool) -> Cluster:
    """The cluster for a proposal without a layout: of its devices only the odd part, which the batch then divides by,
    as it would not by chance."""
    odd = cluster.devices
    while odd % 2 == 0:
        odd //= 2
    return replace(cluster, nodes=1, devices_per_node=1 if batch_given else odd, domain_devices=0)


def read_data(tokens: str, beside: Path) -> tuple[Data, TokenManifest | None, int]:
    """`tokens`: a count ("1.5T"), or DATA of `data build --out DATA`, DATA/tokens or DATA/tokens/train. Raises
    DataError, UsageError."""
    folder = Path(tokens)
    if not folder.is_dir():
        return NOWHERE, None, _count(tokens)
    train = training_tokens(folder)
    manifest = read_token_manifest(train)
    heldout, tokenizer = train.parent / "heldout", train.parent / "tokenizer.json"
    data = Data(
        tokens=relative(train, beside),
        heldout=relative(heldout, beside) if heldout.is_dir() else "",
        tokenizer=relative(tokenizer, beside) if tokenizer.is_file() else "",
    )
    return data, manifest, max(manifest.tokens, 1)


def _count(tokens: str) -> int:
    try:
        return parse_tokens(tokens)
    except ConfigError:
        raise DataMissing(
            f"--tokens {tokens}: no such folder, and not a count",
            rule="--tokens is the folder of `ingot data build --out`, or a count like 1.5T",
            fix="ingot data build FILES... --out DIR makes the folder",
        ) from None


def relative(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()
