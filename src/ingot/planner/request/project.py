"""From a preset to files: a run planned for data and a cluster, and a project folder to start from."""

from dataclasses import replace
from pathlib import Path

from ingot.config import load, to_dict, to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.request.clusters import find_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import Planned, make_plan
from ingot.planner.run.propose import propose
from ingot.planner.run.scaling import compute_optimal_tokens
from ingot.planner.search.context import with_context
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_atomic, write_json
from ingot.theory.layout import require_layout
from ingot.theory.params import count_active_parameters

_GITIGNORE = "/data/\n/runs/\n/machine.json\n"


def plan_file(
    path: Path,
    cluster: Cluster,
    overrides: tuple[str, ...] = (),
    usd_per_hour: float = 0.0,
    *,
    software: Software = INGOT,
    assumptions: Assumptions | None = None,
    mfu: float = 0.0,
) -> Planned:
    """The plan of an existing run file, which saves as often as the file says unless `assumptions` do; its data is read
    where it is there."""
    run = load(RunConfig, path, overrides)
    if usd_per_hour:
        run = replace(run, cost=replace(run.cost, usd_per_hour=usd_per_hour))
    require_layout(run)
    run, reasons = with_context(run, cluster)
    folder = path.parent / run.data.tokens
    manifest = read_token_manifest(folder) if folder.is_dir() else None
    assumptions = assumptions or Assumptions()
    if not (assumptions.checkpoint_every_seconds or assumptions.checkpoint_every_steps):
        assumptions = replace(assumptions, checkpoint_every_steps=run.checkpoint.every_steps)
    plan = make_plan(run, cluster, software=software, assumptions=assumptions, mfu=mfu, manifest=manifest)
    return Planned(run=run, plan=plan, reasons=reasons)


def write_plan(out: Path, planned: Planned, *, force: bool = False) -> Path:
    """Write the run file, with the reason of each chosen value beside it, and plan.json. Returns the latter's path.

    Raises UsageError when `out` exists and `force` is off: a run file may have been edited by hand; ConfigError when
    ingot's trainer cannot execute the plan.
    """
    require_executable(planned)
    if out.exists() and not force:
        raise UsageError(f"{out} exists", rule="a run file is not overwritten", fix="--force, or another --out")
    write_atomic(out, to_toml(planned.run, planned.reasons))
    beside = out.parent / "plan.json"
    write_json(beside, to_dict(planned.plan))
    return beside


def require_executable(planned: Planned) -> None:
    """Raises ConfigError when ingot's trainer cannot execute the plan."""
    plan = planned.plan
    if plan.cluster.device == "tpu":
        found = f"{plan.cluster.name} has TPUs: this plan is for looking at"
        raise ConfigError(found, rule="ingot trains on CPUs and GPUs", fix="leave --out, or take a cluster of GPUs")
    if plan.software != INGOT:
        found = f"the plan is of other software than ingot's own: {plan.software.name}"
        fix = "leave --out, or plan without --fp8 and --software"
        raise ConfigError(found, rule="ingot's trainer computes in 16 bits, with its own kernels", fix=fix)


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
