"""The check of a run file before a run starts, which reports all problems together.

If a section has a problem, only the checks that need this section are skipped.
Nothing is written or started, and only small files are read: the run file, manifests and tables of hashes.
"""

import importlib.util
import re
import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from ingot.errors import PARTS, ConfigError, DataError
from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.step_time import step_seconds
from ingot.planner.run.advice import check_warnings, degrees, memory_warnings
from ingot.planner.run.scaling import least_warmup_steps
from ingot.plugins.callback import CALLBACKS
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.sink import SINKS
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.storage import sha256_file
from ingot.theory.layout import derived_problems
from ingot.theory.memory import checkpoint_bytes
from ingot.theory.params import count_parameters
from ingot.theory.rules import load_run_sections, run_problems
from ingot.theory.update import mean_moments
from ingot.toml import key_lines
from ingot.units import format_bytes, format_count

_HIGH_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Finding:
    """One problem of a run file.

    where: "run.toml:14", or the key. fix: the remedy, "" if the message contains it. missing_here: data or disk space
    is missing on this machine, while the run file itself can be correct; a "note" then, if the run is for another
    machine. code: the stable name of a piece of advice,
    which `ingot explain CODE` describes; "" for most.
    """

    severity: Literal["error", "warning", "note"]
    where: str
    message: str
    fix: str = ""
    missing_here: bool = False
    code: str = ""

    def as_note(self) -> "Finding":
        return replace(self, severity="note")


def check_run(path: Path, machine: Cluster, *, cores: int, overrides: tuple[str, ...] = ()) -> list[Finding]:
    """Return the problems of the run file at `path`, for training on `machine` with `cores` usable CPU cores."""
    try:
        sections, problems = load_run_sections(path, overrides)
    except ConfigError as error:
        return [
            Finding("error", "", error.found, error.fix, code=error.code if error.code != "E-CONFIG-SETTINGS" else "")
        ]
    findings = [_config_finding(line) for line in problems]
    run = SimpleNamespace(**sections)
    sound = sections.keys()
    if sound >= {"train", "parallel"}:
        findings += _devices(run, machine, cores)
    findings += _values(run, sound)
    manifest = None
    if "data" in sound:
        for key in ("tokens", "heldout"):
            found, read = _token_folder(run, path.parent, key, sound)
            findings += found
            manifest = read if key == "tokens" else manifest
        findings += _tokenizer(run, path.parent, manifest, sound)
        findings += _sources(run, manifest)
    findings += _sinks(run, sound)
    if sound >= {"model", "train", "checkpoint", "optim", "callbacks", "guard"} and _has_known_state(run):
        findings += _disk(run, path.parent)
    if sound >= {f.name for f in fields(RunConfig) if is_dataclass(f.type)}:
        findings += _whole(RunConfig(name="checked", **sections), machine, manifest)
    return _in_order(findings, path, overrides)


def _whole(run: RunConfig, machine: Cluster, manifest: TokenManifest | None) -> Iterator[Finding]:
    """Yield the findings that need all sections of the run file: derived layout problems, memory, warnings."""
    if any(run_problems(run)):
        return  # these problems are reported already, and an impossible layout would only cause further ones
    problems = list(derived_problems(run))
    for key, message in problems:
        yield Finding("error", key, f"{key}: {message}")
    if problems:
        return
    bill = memory_bill(run, machine)
    fits = sum(term.value for term in bill.values()) <= rank_memory_bytes(machine, run.parallel.world_size)
    for advice in memory_warnings(run, machine, bill):
        yield Finding("warning" if fits else "error", "plan", advice)
    for advice in check_warnings(run, machine, _seconds(run, machine), manifest):
        yield Finding("warning", "plan", advice)


def _in_order(findings: list[Finding], path: Path, overrides: tuple[str, ...]) -> list[Finding]:
    """Return each finding once, with its place filled in: first those with a line of the run file, by line, then those
    of --set, then all others."""
    lines = key_lines(path.read_text(encoding="utf-8"))
    given = {override.partition("=")[0].strip() for override in overrides}
    placed = {}
    for found in findings:
        place = f"--set {found.where}" if found.where in given else f"{path}:{lines.get(found.where, '')}".rstrip(":")
        known = found.where in given or found.where in lines
        placed[replace(found, where=place) if known else found] = None

    def order(found: Finding) -> tuple[int, int]:
        line = re.search(r":(\d+)$", found.where)
        return (0, int(line[1])) if line else (1 if found.where.startswith("--set") else 2, 0)

    return sorted(placed, key=order)


def _seconds(run: RunConfig, machine: Cluster) -> float:
    parts = step_seconds(run, machine)
    return sum(term.value for term in parts.values()) if parts else 0.0


def _config_finding(problem: str) -> Finding:
    """Return the finding for a problem that ingot.config reported as "place: message"."""
    match = re.match(r"(--set \S+?|.*?\.toml(?::\d+)?): (.*)", problem, re.DOTALL)
    return Finding("error", match[1], match[2]) if match else Finding("error", "", problem)


def _sinks(run, sound: Set[str]) -> Iterator[Finding]:
    """Yield the sinks whose library is not installed."""
    for name in run.sinks if "sinks" in sound else ():
        package = SINKS[name].package if name in SINKS else ""
        if package and importlib.util.find_spec(package) is None:
            extra = f" 'ingot[{PARTS[package]}]'" if package in PARTS else f" {package}"
            message = f"[sinks.{name}] needs the package {package!r}, which is not installed"
            yield Finding("error", f"sinks.{name}", message, f"pip install{extra}", True, "E-PART-MISSING")


def _devices(run, machine: Cluster, cores: int) -> Iterator[Finding]:
    ranks, named = run.parallel.world_size, degrees(run.parallel)
    where = named.partition(" or ")[0]
    if run.train.device == "cuda" and machine.device != "cuda":
        yield Finding(
            "error", "train.device", f"train.device = 'cuda', but {machine.name} has no GPU", "set it to 'auto'"
        )
    elif machine.device == "cuda" and run.train.device != "cpu" and ranks > machine.devices:
        lower = f"set it to {machine.devices}" if where == named == "parallel.dp_shard" else f"lower {named}"
        fix = f"{lower}, or plan on another machine with --cluster"
        yield Finding("error", where, f"{ranks} ranks need {ranks} GPUs, {machine.name} has {machine.devices}", fix)
    elif machine.device == "cuda" and run.train.device != "cpu" and ranks < machine.devices:
        message = f"{ranks} ranks use {ranks} of the {machine.devices} GPUs of {machine.name}; the others are idle"
        yield Finding("warning", where, message, f"raise {named}")
    elif machine.device == "cpu" and ranks > cores:
        fix = f"parallel.dp_shard = {cores} is faster" if named == "parallel.dp_shard" else f"{cores} ranks are faster"
        yield Finding("warning", where, f"{ranks} ranks share {cores} cores", fix)
    if run.parallel.async_tp and machine.device != "cuda":
        message = f"overlapped tensor parallelism needs GPUs with symmetric memory, and {machine.name} has none"
        yield Finding("error", "parallel.async_tp", message, "remove parallel.async_tp")


def _values(run, sound: Set[str]) -> Iterator[Finding]:
    """Yield warnings about values that are legal but probably mistakes. sound: names of sections without problems."""
    if "optim" in sound and run.optim.lr > _HIGH_LEARNING_RATE:
        fix = "peak rates of AdamW are between 1e-5 and 1e-2"
        yield Finding("warning", "optim.lr", f"optim.lr = {run.optim.lr} is high for AdamW", fix)
    if sound >= {"checkpoint", "train"} and (every := run.checkpoint.interval.steps) > run.train.steps:
        (key,) = run.checkpoint.with_steps(every)
        message = f"{key} = {every} steps exceeds the {run.train.steps} steps"
        yield Finding("warning", key, message, "a fault then repeats the whole run; lower it")
    if sound >= {"schedule", "train"} and run.schedule.warmup_steps * 2 > run.train.steps:
        message = f"warm-up takes {run.schedule.warmup_steps} of {run.train.steps} steps"
        yield Finding("warning", "schedule.warmup_steps", message, "1-5% of the steps are usual")
    if sound >= {"schedule", "train", "model"}:
        yield from _warmup(run)


def _warmup(run) -> Iterator[Finding]:
    """Yield a warning if a large model has a shorter warm-up than `ingot plan` proposes."""
    parameters, warmup = count_parameters(run.model), run.schedule.warmup_steps
    least = least_warmup_steps(run.train.steps, parameters)
    if warmup < least:
        message = f"a model of {format_count(parameters)} parameters has a warm-up of {warmup:,} steps"
        fix = f"set schedule.warmup_steps to {least:,} or more: without it, large models diverge more easily"
        yield Finding("warning", "schedule.warmup_steps", message, fix, code="E-WARMUP-SHORT")


def _token_folder(run, base: Path, key: str, sound: Set[str]) -> tuple[list[Finding], TokenManifest | None]:
    value = getattr(run.data, key)
    where = f"data.{key}"
    if not value:
        return (
            [Finding("error", where, "data.tokens is empty", "name a token folder")] if key == "tokens" else []
        ), None
    folder = base / value
    try:
        manifest = read_token_manifest(folder)
    except DataError as error:
        return [Finding("error", where, f"{where}: {error.found}", error.fix, missing_here=True)], None
    findings = [
        Finding("error", where, m, "ingot data verify shows all; build it again", missing_here=True)
        for m in _shards(folder, manifest)
    ]
    if "model" in sound and manifest.vocab_size > run.model.vocab_size:
        message = f"token ids reach {manifest.vocab_size - 1:,}, model.vocab_size is {run.model.vocab_size:,}"
        findings.append(Finding("error", "model.vocab_size", message, f"set it to {manifest.vocab_size} or more"))
    if "train" not in sound:
        return findings, manifest
    windows = sum(max(shard.tokens - 1, 0) // run.train.seq_len for shard in manifest.shards)
    if windows == 0:
        message = f"{where}: no shard holds a sequence of {run.train.seq_len} tokens"
        findings.append(Finding("error", "train.seq_len", message, "shorten train.seq_len or add data"))
    elif key == "tokens" and windows < run.train.global_batch:
        message = f"one batch takes {run.train.global_batch} sequences, the data has {windows}"
        findings.append(Finding("error", "train.global_batch", message, f"use {windows} or fewer, or add data"))
    return findings, manifest


def _shards(folder: Path, manifest: TokenManifest) -> Iterator[str]:
    """Yield the differences between a token folder and its manifest: missing files, sizes, tables of hashes."""
    width = 2 if manifest.dtype == "uint16" else 4
    for shard in manifest.shards:
        tokens = folder / f"{shard.name}.tokens"
        if not tokens.is_file():
            yield f"{tokens} is missing"
        elif tokens.stat().st_size != shard.tokens * width:
            yield f"{tokens} has {tokens.stat().st_size:,} bytes, but {shard.tokens * width:,} by the manifest"
        for suffix, expected in ((".blocks", shard.blocks_sha256), (".documents", shard.documents_sha256)):
            table = folder / f"{shard.name}{suffix}"
            if not table.is_file():
                yield f"{table} is missing"
            elif sha256_file(table) != expected:
                yield f"{table} is not the file that was built (SHA-256 differs)"


def _tokenizer(run, base: Path, manifest: TokenManifest | None, sound: Set[str]) -> Iterator[Finding]:
    if not run.data.tokenizer:
        if "evaluate" in sound and run.evaluate.prompts:
            yield Finding("error", "evaluate.prompts", "prompts need a tokenizer", "set data.tokenizer")
        return
    path = base / run.data.tokenizer
    if not path.is_file():
        fix = "`ingot data build` writes it in the folder that contains the token folders"
        yield Finding("error", "data.tokenizer", f"no tokenizer at {path}", fix, missing_here=True)
    elif manifest and sha256_file(path) != manifest.tokenizer_sha256:
        message = f"{path} is not the tokenizer that encoded {run.data.tokens}"
        yield Finding("error", "data.tokenizer", message, "name the tokenizer.json that the tokens were built with")


def _sources(run, manifest: TokenManifest | None) -> Iterator[Finding]:
    if manifest is None:
        return
    for source in run.data.weights:
        if source not in manifest.sources:
            message = f"data.weights names {source!r}; the sources are {', '.join(manifest.sources)}"
            yield Finding("error", "data.weights", message, "give weights only to these sources")


def _has_known_state(run) -> bool:
    """Return whether the optimizer and the callbacks are registered, so that the bytes of a checkpoint are known."""
    return run.optim.kind in OPTIMIZERS and all(name in CALLBACKS for name in run.callbacks)


def _disk(run, base: Path) -> Iterator[Finding]:
    one = checkpoint_bytes(run.model, run.train.precision, mean_moments(run)).value
    kept = run.checkpoint.most_kept(run.train.steps, run.guard.proven_steps)
    weights = checkpoint_bytes(run.model, run.train.precision, 0).value
    alone = run.checkpoint.weights_keep + 1 if run.checkpoint.weights_interval is not None else 0
    needed = one * (kept + 1) + weights * alone
    place = base.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        parts = f"{kept} + 1 checkpoints x {format_bytes(one)}"
        parts += f" and {alone} saves of the weights alone x {format_bytes(weights)}" if alone else ""
        total = f"{parts} = {format_bytes(needed)}"
        message = f"{total}, {format_bytes(free)} free at {place}"
        yield Finding("error", "checkpoint.keep", message, "lower checkpoint.keep or free space", missing_here=True)
