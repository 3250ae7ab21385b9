"""The request for a plan (model, cluster, tokens), and the run that follows from it before a layout is chosen."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import ConfigError, DataMissing
from ingot.hub.config_file import require_fit
from ingot.planner.request.amounts import parse_tokens
from ingot.planner.request.presets import ModelChoice
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import make_plan
from ingot.planner.run.propose import NO_HINTS, Hints, ProposedRun, propose
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest, check_vocabulary, read_token_manifest, training_tokens
from ingot.theory.rules.nearest import shareable_batch
from ingot.units import format_count

NOWHERE = Data(tokens="data/tokens/train")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for ranked plans.

    tokens: number of tokens to train on. wanted: the batch, sequence length, steps and learning rate that the user
    asked for. batch_why: the reason for that batch. pinned: settings that the search must keep. mfu: a value that
    replaces the predicted MFU, 0 for none. top: number of plans to return. relative_to: folder of the run file.
    """

    model: ModelChoice
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
    relative_to: Path = Path()


def base_run(request: PlanRequest) -> tuple[RunConfig, dict[str, str]]:
    """Return the run before its layout is chosen, and the reason for each chosen value.

    On a CPU the run already has its layout: all ranks of the machine share the batch, because the machine's rates were
    measured with all ranks running. Raises ConfigError if data and model do not fit together.
    """
    model, cluster = request.model, request.cluster
    proposal = _proposal(request, request.wanted)
    run, reasons = proposal.run, dict(proposal.reasons)
    if _repeats(request, run):
        steps = max(request.tokens // run.tokens_per_step, 1)
        run = _proposal(request, replace(request.wanted, steps=steps)).run
        reasons["train.steps"] = f"{format_count(request.tokens)} tokens, as asked for"
    if cluster.device != "cpu":
        for key in [key for key in reasons if key.startswith("parallel.") or key == "train.micro_batch"]:
            del reasons[key]
        if not request.wanted.global_batch and model.hints.global_batch not in (0, run.train.global_batch):
            reasons["train.global_batch"] += f", changed to a number that {cluster.devices:,} devices can share"
    if request.batch_why:
        reasons["train.global_batch"] = request.batch_why
    if model.init and request.manifest:
        check_vocabulary(request.manifest, run.model.vocab_size)
    return with_init(run, reasons, model, request.relative_to)


def with_init(
    run: RunConfig, reasons: Mapping[str, str], model: ModelChoice, relative_to: Path
) -> tuple[RunConfig, dict[str, str]]:
    """Return the run, and the reasons of its values, with the initial weights of the model, if it has any.

    relative_to: the folder of the run file. Raises ConfigError if the run's model is not that of the weights.
    """
    if not model.init:
        return run, dict(reasons)
    require_fit(model.init, run.model)
    why = {"init": "the initial weights, and the source of the shape in [model]"}
    return replace(run, init=relative(model.init, relative_to)), {**reasons, **why}


def _proposal(request: PlanRequest, wanted: Hints) -> ProposedRun:
    model, cluster = request.model, request.cluster
    return propose(
        model.arch,
        cluster if cluster.device == "cpu" else _undivided(cluster, bool(wanted.global_batch)),
        request.data,
        name=request.name or model.name,
        tokens=request.tokens,
        # A model with given weights keeps its vocabulary; base_run refuses tokens whose ids it does not have.
        vocab_size=request.manifest.vocab_size if request.manifest and not model.init else 0,
        preset=_shared_hints(model.hints, cluster),
        wanted=wanted,
        precision=request.precision,
        usd_per_hour=request.usd_per_hour,
    )


def _shared_hints(hints: Hints, cluster: Cluster) -> Hints:
    """Return hints with a global batch that many layouts can divide evenly, because the layout is not known yet."""
    if cluster.device == "cpu" or not hints.global_batch:
        return hints
    return replace(hints, global_batch=shareable_batch(hints.global_batch, cluster.devices))


def _repeats(request: PlanRequest, run: RunConfig) -> bool:
    """Return True if the proposed run would train on more tokens than the user's count. If the tokens are a folder or
    the number of steps is given, the result is False."""
    chosen = request.wanted.steps or request.model.hints.steps
    return not request.manifest and not chosen and run.train.steps * run.tokens_per_step > request.tokens


def plan_of(request: PlanRequest, run: RunConfig) -> Plan:
    return make_plan(
        run,
        request.cluster,
        software=request.software,
        assumptions=request.assumptions,
        mfu=request.mfu,
        parameters=request.model.parameters,
        tokens=request.tokens,
        manifest=request.manifest,
    )


def _undivided(cluster: Cluster, batch_given: bool) -> Cluster:
    """Return a cluster with which to propose a run that has no layout yet: one node.

    Its number of devices is the largest odd factor of `cluster.devices`, so that the proposed batch is a multiple of
    this factor; it is 1 if the user gave the batch.
    """
    odd = cluster.devices
    while odd % 2 == 0:
        odd //= 2
    return replace(cluster, nodes=1, devices_per_node=1 if batch_given else odd, domain_devices=0)


def read_data(tokens: str, relative_to: Path) -> tuple[Data, TokenManifest | None, int]:
    """Return the [data] section, the manifest (None if `tokens` is a count) and the number of tokens.

    tokens: a count ("1.5T"), the folder DATA of `data build --out DATA`, DATA/tokens or DATA/tokens/train.
    relative_to: the folder of the run file. Raises DataError, UsageError.
    """
    folder = Path(tokens)
    if not folder.is_dir():
        return NOWHERE, None, _count(tokens)
    train = training_tokens(folder)
    manifest = read_token_manifest(train)
    heldout, tokenizer = train.parent / "heldout", train.parent / "tokenizer.json"
    data = Data(
        tokens=relative(train, relative_to),
        heldout=relative(heldout, relative_to) if heldout.is_dir() else "",
        tokenizer=relative(tokenizer, relative_to) if tokenizer.is_file() else "",
    )
    return data, manifest, max(manifest.tokens, 1)


def _count(tokens: str) -> int:
    try:
        return parse_tokens(tokens)
    except ConfigError:
        raise DataMissing(
            "E-TOKENS-ARGUMENT",
            f"--tokens {tokens} is neither an existing folder nor a count",
            rule="--tokens is the folder of `ingot data build --out`, or a count like 1.5T",
            fix="give a count, or make the folder: ingot data build FILES... --out DIR",
            path=tokens,
        ) from None


def relative(path: Path, relative_to: Path) -> str:
    return Path(os.path.relpath(path.resolve(), relative_to.resolve())).as_posix()
