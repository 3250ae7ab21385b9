"""From a preset to files: a run planned for data and a cluster, and a project folder to start from."""

import os
from dataclasses import replace
from pathlib import Path

from ingot.config import load, to_dict, to_toml
from ingot.errors import ConfigError, DataMissing, UsageError
from ingot.huggingface.config_file import read_arch, require_fit
from ingot.loader.reader import check_vocabulary
from ingot.planner.context import with_context
from ingot.planner.plan import Planned, make_plan
from ingot.planner.propose import NO_HINTS, Hints, propose
from ingot.recipes.clusters import find_cluster
from ingot.recipes.load import ModelPreset, load_model
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig
from ingot.schema.tokens import TokenManifest, read_token_manifest, training_tokens
from ingot.storage import write_atomic, write_json
from ingot.theory.layout import require_layout
from ingot.theory.params import count_active_parameters
from ingot.theory.scaling import compute_optimal_tokens
from ingot.units import parse_count

_GITIGNORE = "/data/\n/runs/\n/machine.json\n"


def plan_model(
    model: str,
    tokens: str,
    cluster: Cluster,
    *,
    beside: Path,
    name: str = "",
    wanted: Hints = NO_HINTS,
    precision: str = "bf16",
    usd_per_hour: float = 0.0,
    init: Path | None = None,
) -> Planned:
    """A run of preset or file `model` on `tokens`: a count ("1.5T"), or DATA of `data build --out DATA`,
    DATA/tokens or DATA/tokens/train.

    init: a Hugging Face folder that it begins with, which then says the model instead of `model`. beside: the folder of
    the run file; paths in the run are relative to it. Raises UsageError, ConfigError, DataError.
    """
    preset = ModelPreset(arch=read_arch(init)) if init else load_model(model)
    data, manifest, count = _data(tokens, beside)
    proposal = propose(
        preset.arch,
        cluster,
        data,
        name=name or (init.resolve().name if init else Path(model).stem),
        tokens=count,
        # The ids of weights that are there already stay; tokens with others are refused.
        vocab_size=manifest.vocab_size if manifest and not init else 0,
        preset=preset.train,
        wanted=wanted,
        precision=precision,
        usd_per_hour=usd_per_hour,
    )
    run, reasons = proposal.run, proposal.reasons
    if init:
        if manifest:
            check_vocabulary(manifest, run.model.vocab_size)
        require_fit(init, run.model)
        run = replace(run, init=_relative(init, beside))
        reasons["init"] = "the first weights, and the shape in [model]"
    plan = make_plan(run, cluster, tokens=count, manifest=manifest)
    return Planned(run=run, plan=plan, reasons=reasons)


def plan_file(path: Path, cluster: Cluster, overrides: tuple[str, ...] = (), usd_per_hour: float = 0.0) -> Planned:
    """The plan of an existing run file; its data is read where it is there."""
    run = load(RunConfig, path, overrides)
    if usd_per_hour:
        run = replace(run, cost=replace(run.cost, usd_per_hour=usd_per_hour))
    require_layout(run)
    run, reasons = with_context(run, cluster)
    folder = path.parent / run.data.tokens
    manifest = read_token_manifest(folder) if folder.is_dir() else None
    return Planned(run=run, plan=make_plan(run, cluster, manifest=manifest), reasons=reasons)


def _data(tokens: str, beside: Path) -> tuple[Data, TokenManifest | None, int]:
    folder = Path(tokens)
    if not folder.is_dir():
        return Data(tokens="data/tokens/train"), None, _count(tokens)
    train = training_tokens(folder)
    manifest = read_token_manifest(train)
    heldout, tokenizer = train.parent / "heldout", train.parent / "tokenizer.json"
    data = Data(
        tokens=_relative(train, beside),
        heldout=_relative(heldout, beside) if heldout.is_dir() else "",
        tokenizer=_relative(tokenizer, beside) if tokenizer.is_file() else "",
    )
    return data, manifest, max(manifest.tokens, 1)


def _count(tokens: str) -> int:
    try:
        count = parse_count(tokens)
    except ConfigError:
        raise DataMissing(
            f"--tokens {tokens}: no such folder, and not a count",
            rule="--tokens is the folder of `ingot data build --out`, or a count like 1.5T",
            fix="ingot data build FILES... --out DIR makes the folder",
        ) from None
    if count < 1:
        raise UsageError(f"--tokens {tokens}", rule="at least 1 token")
    return count


def _relative(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()


def write_plan(out: Path, planned: Planned, *, force: bool = False) -> Path:
    """Write the run file, with the reason of each chosen value beside it, and plan.json. Returns the latter's path.

    Raises UsageError when `out` exists and `force` is off: a run file may have been edited by hand.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists", rule="a run file is not overwritten", fix="--force, or another --out")
    write_atomic(out, to_toml(planned.run, planned.reasons))
    beside = out.parent / "plan.json"
    write_json(beside, to_dict(planned.plan))
    return beside


def make_project(folder: Path, model: str) -> list[Path]:
    """Make `folder` with a run.toml for the data that `ingot data build --out data` will make, and a .gitignore."""
    if (folder / "run.toml").exists():
        raise UsageError(f"{folder / 'run.toml'} exists", rule="init starts new projects", fix="choose another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", rule="init makes a folder", fix="choose another name")
    preset = load_model(model)
    data = Data(tokens="data/tokens/train", heldout="data/tokens/heldout", tokenizer="data/tokens/tokenizer.json")
    # The data is not there yet: planned for as many tokens as the model can use.
    count = compute_optimal_tokens(count_active_parameters(preset.arch))
    proposal = propose(
        preset.arch, find_cluster(None, folder), data, name=folder.resolve().name, tokens=count, preset=preset.train
    )
    files = {folder / "run.toml": to_toml(proposal.run, proposal.reasons), folder / ".gitignore": _GITIGNORE}
    for path, text in files.items():
        if not path.exists():
            write_atomic(path, text)
    return list(files)
