"""fallbacks.json of a run folder: the layouts to which a run can change when nodes or memory are missing.

`ingot train` lets the planner work them out before the start and writes the file; trainer and launchers only read it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError
from ingot.schema.run import RunConfig
from ingot.storage import canonical_json, sha256_bytes, write_json
from ingot.units import format_bytes

OTHER_RUN = "E-FALLBACKS-OTHER"
_VERSION = 2  # 1: at most three layouts with less memory, of all nodes alone
# The settings on which the choice of layouts depends.
_DECIDING = ("model.", "train.", "optim.", "parallel.", "checkpoint.", "plugins.code.", "launch.nodes")


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A layout in place of that of the run, with the same global batch and the same samples in each step.

    nodes, ranks: how many take part. overrides: the settings that differ from the run file, as for --set. memory_bytes:
    the predicted peak of the fullest rank. step_seconds: predicted; 0.0 if the speed of the machine is unknown.
    problem: why there is no layout; "" if there is one.
    """

    nodes: int
    ranks: int
    overrides: tuple[str, ...] = ()
    memory_bytes: int = 0
    step_seconds: float = 0.0
    problem: str = ""

    def text(self, own: "Fallback") -> str:
        """Return the settings, with their memory, and their time as a multiple of that of the run's `own` layout."""
        times = f", step {self.step_seconds / own.step_seconds:.2f} x as long" if own.step_seconds else ""
        return f"{' '.join(self.overrides)} ({format_bytes(self.memory_bytes)} a rank{times})"


@dataclass(frozen=True, kw_only=True)
class Fallbacks:
    """The layouts of a run on a cluster.

    run_sha256, cluster_sha256: of the settings and the cluster for which they were chosen. own: the layout of the run
    file. available_bytes: the memory of a rank. bills: the predicted peak of each pipeline rank, by kind of memory, in
    bytes. fewer_nodes: an entry for each number of nodes that launch.min_ranks permits, most nodes first. less_memory:
    layouts of all nodes, each with less memory than the one before it, and as little more time as possible; then such
    layouts for some smaller numbers of nodes (`ladder`).
    """

    version: int = _VERSION
    run_sha256: str
    cluster_sha256: str
    own: Fallback
    available_bytes: int
    bills: tuple[dict[str, int], ...]
    fewer_nodes: tuple[Fallback, ...] = ()
    less_memory: tuple[Fallback, ...] = ()

    def of_nodes(self, present: int) -> Fallback | None:
        """Return the fastest layout for at most `present` nodes, of equally fast ones that with the most nodes; None if
        none is possible. The others wait as spares: 125 nodes may divide a batch worse than 124."""
        possible = (entry for entry in self.fewer_nodes if not entry.problem and entry.nodes <= present)
        return min(possible, key=lambda entry: (entry.step_seconds, -entry.nodes), default=None)

    def base_of(self, nodes: int) -> Fallback | None:
        """Return the layout for exactly so many nodes; None if there is none."""
        return next((one for one in (self.own, *self.fewer_nodes) if one.nodes == nodes and not one.problem), None)

    def ladder(self, layout: Fallback) -> tuple[Fallback, ...]:
        """Return `layout`, which is `own` or one of `fewer_nodes`, and the layouts of as many nodes that need less and
        less memory."""
        return layout, *(entry for entry in self.less_memory if entry.nodes == layout.nodes)

    def bill_of(self, rank: int) -> dict[str, int]:
        """Return the predicted peak of a rank of the run's own layout, by kind of memory, in bytes."""
        return self.bills[rank * len(self.bills) // self.own.ranks]  # pipeline ranks are the outermost axis


def layout_sha256(run: RunConfig) -> str:
    """Return the hash of the settings on which fallback layouts depend. launch.min_ranks limits the list only."""
    deciding = {key: value for key, value in run.settings().items() if key.startswith(_DECIDING)}
    return sha256_bytes(canonical_json(deciding | {"launch.min_ranks": run.launch.min_ranks}).encode())


def write_fallbacks(path: Path, found: Fallbacks) -> None:
    """Replace the file `path`."""
    content = to_dict(found)
    write_json(path, content | {"sha256": _sha256(content)})


def read_fallbacks(path: Path, run: RunConfig) -> Fallbacks:
    """Return the fallback layouts of `run`. Raises ConfigError if the file is missing, was changed, or is of another
    run."""
    try:
        content = json.loads(path.read_bytes())
        recorded = content.pop("sha256")
        if recorded != _sha256(content):
            raise ValueError("its content does not have the recorded SHA-256")
        found = from_dict(Fallbacks, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        why = error.found if isinstance(error, ConfigError) else getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "E-FALLBACKS-READ",
            f"{path} cannot be used: {why}",
            rule="ingot train writes this file before ranks start, and nothing changes it",
            fix="remove it; ingot train writes it again",
            path=str(path),
        ) from None
    if (found.version, found.run_sha256) != (_VERSION, layout_sha256(run)):
        raise ConfigError(
            OTHER_RUN,
            f"{path} has the layouts of a run with other settings, or of another version of ingot",
            rule="fallback layouts belong to the model, batch, layout and number of nodes for which they were chosen",
            fix="remove it; ingot train writes it again",
            path=str(path),
        )
    return found


def pasted(overrides: Sequence[str]) -> str:
    """Return overrides as options of a command."""
    return " ".join(f"--set {override}" for override in overrides)


def _sha256(content: dict) -> str:
    return sha256_bytes(canonical_json(content).encode())
