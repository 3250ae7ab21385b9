"""The copy of a run in which a profile works: the same steps, without saves, evaluations and other nodes. No torch.

The run itself is only read. Its data and its first weights are read where they are.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ingot.config import to_toml
from ingot.errors import UsageError
from ingot.machine.facts import find_gpus
from ingot.schema.run import RemoteCheckpoints, RunConfig
from ingot.storage import write_atomic, write_json
from ingot.trainer.launch.prepare import find_folder, read_run, with_paths_from
from ingot.trainer.resilience.lock import is_locked

RESULT = "profile.json"  # marks the folder of a profile
_OWN_STEPS = 2  # the step that warms the profiler up, and the one whose reads are counted


@dataclass(frozen=True)
class ProfilePlan:
    """The folder `root` of a profile, and the numbers of its steps. nvtx: for Nsight Systems, instead of torch's
    profiler."""

    root: Path
    steps: int
    warmup: int
    nvtx: bool = False

    def words(self) -> list[str]:
        """Return the arguments of a rank."""
        return [str(self.root), str(self.steps), str(self.warmup), str(int(self.nvtx))]

    @classmethod
    def of_words(cls, words: Sequence[str]) -> "ProfilePlan":
        root, steps, warmup, nvtx = words
        return cls(Path(root), int(steps), int(warmup), nvtx == "1")

    @property
    def run_file(self) -> Path:
        return self.root / "run.toml"

    @property
    def run(self) -> Path:
        """The run folder of the copy."""
        return self.root / "run"

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps * 2 + _OWN_STEPS

    def trace(self, rank: int) -> Path:
        return self.root / f"trace-rank{rank:05}.json.gz"

    def part(self, rank: int) -> Path:
        return self.root / f"rank{rank:05}.json"

    def log(self, rank: int) -> Path:
        return self.root / f"rank{rank:05}.log"


@dataclass(frozen=True)
class ProfiledCopy:
    """A run to profile. source: its run file. changes: the settings in which the copy differs, as text."""

    plan: ProfilePlan
    config: RunConfig
    source: Path
    changes: list[str]


def open_copy(
    run: Path,
    out: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    steps: int,
    warmup: int,
    nvtx: bool = False,
) -> ProfiledCopy:
    """Make the folder of a profile of `run`, a run file or the folder of a run.

    out: the folder; None: the run's folder with "-profile" after its name. overrides: settings as "a.b=c". Raises
    UsageError and ConfigError for a run that cannot be read or profiled here, before anything is written.
    """
    path, config = read_run(run, overrides)
    folder = find_folder(run, path, None, config)
    root = (out or folder.root.with_name(f"{folder.root.name}-profile")).resolve()
    _require_profilable(config, nvtx)
    if is_locked(folder.lock):
        raise UsageError(
            "E-PROFILE-RUNNING",
            f"the run in {folder.root} is training now",
            rule="a profile of a run needs the devices and the memory of its ranks for itself",
            fix="wait for its end or stop it; `ingot explain slow` reads the log of a run that is training",
            run=str(folder.root),
        )
    _require_own(root, folder.root)
    plan = ProfilePlan(root, steps, warmup, nvtx)
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / RESULT, {"complete": False})
    config = with_paths_from(config, path.parent.resolve(), root)
    changed = _changed(config, plan)
    write_atomic(plan.run_file, to_toml(changed))
    return ProfiledCopy(plan, changed, path, _differences(config, changed))


def _require_profilable(config: RunConfig, nvtx: bool) -> None:
    """Raise UsageError for a run that this machine cannot profile."""
    if config.launch.nodes > 1:
        raise UsageError(
            "E-PROFILE-NODES",
            f"the run has launch.nodes = {config.launch.nodes}",
            rule="a profile starts all ranks on this machine",
            fix="profile a layout of one node: --set launch.nodes=1 --set parallel.dp_shard=N, with its N devices",
            nodes=config.launch.nodes,
        )
    if nvtx and (config.train.device == "cpu" or not find_gpus()):
        raise UsageError(
            "E-PROFILE-NVTX",
            "--nvtx is given, but the ranks of this run have no GPU here",
            rule="NVTX ranges are for Nsight Systems, which looks at NVIDIA GPUs",
            fix="leave --nvtx out: the profile then writes traces for Perfetto, on any device",
        )


def _require_own(root: Path, run: Path) -> None:
    """Empty the folder of an earlier profile. Raises UsageError for another one."""
    if root == run.resolve() or (root.exists() and any(root.iterdir()) and not (root / RESULT).exists()):
        raise UsageError(
            "E-PROFILE-FOLDER",
            f"{root} is the folder of the run, or has something else in it than a profile",
            rule=f"a profile empties its folder, so that must be new or have a {RESULT}",
            fix="name another folder with --out DIR, or remove that one",
            folder=str(root),
        )
    shutil.rmtree(root, ignore_errors=True)


def _changed(config: RunConfig, plan: ProfilePlan) -> RunConfig:
    """Return the settings of the copy. No step is its last one, which would be evaluated and saved."""
    launch = replace(config.launch, spares=0, min_ranks=0, stop_after="")
    saves = replace(config.checkpoint, disks=(), remote=RemoteCheckpoints(), replicas=0)
    background = replace(config.evaluate.background, every="")
    return replace(
        config,
        launch=launch,
        checkpoint=saves,
        evaluate=replace(config.evaluate, every_steps=0, prompts=(), background=background),
        train=replace(config.train, steps=max(config.train.steps, plan.all_steps + 1)),
        parallel=replace(config.parallel, offload_folder="offloaded" if config.parallel.offload_folder else ""),
    )


def _differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Return "section.key = value" for each setting that differs."""
    found = []
    for one in fields(before):
        own, other = getattr(before, one.name), getattr(after, one.name)
        if is_dataclass(own) and type(own) is type(other):
            found += _differences(own, other, f"{prefix}{one.name}.")
        elif own != other:
            found.append(f"{prefix}{one.name} = {other!r}")
    return found
