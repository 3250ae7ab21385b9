"""The check of a run file: `ingot.check`, which `ingot check` prints."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import ConfigError, IngotError, MissingPartError, require
from ingot.hub.config_file import require_fit
from ingot.machine.facts import usable_cores
from ingot.planner.request.clusters import find_cluster
from ingot.planner.run.advice import notes
from ingot.planner.run.check import Finding, check_run
from ingot.planner.run.fallbacks import plan_fallbacks
from ingot.planner.run.feasibility import Feasibility, feasibility
from ingot.planner.show.explain import timeline_lines
from ingot.planner.show.fallbacks import fallback_notes
from ingot.schema.cluster import Cluster
from ingot.schema.quarantine import read_quarantine
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import FOLDER_NAME_RULE, RunFolder, is_folder_name
from ingot.stores.places import open_store
from ingot.stores.store import NotStored, StoreRefused
from ingot.theory.layout import require_layout
from ingot.theory.rules import load_run
from ingot.toml import key_lines
from ingot.units import format_bytes

if TYPE_CHECKING:
    from ingot.rehearse.dryrun.dry_run import DryRun, Trace
    from ingot.rehearse.proof.proof import LayoutProof

BALANCED = "balanced"
PATIENCE_SECONDS = 900.0
_WIDTH = 120  # characters of a timeline


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The check of one run file.

    config: the settings; None if the file has problems, which are then among the findings. predicted: time and memory
    of the run on `cluster`, None without a config. findings: problems, those with a line of the run file first. notes:
    name -> text about experts, context parallelism and fallback layouts. timeline: the lines of the pipeline's drawing,
    None if it was not asked for. simulated: the dry run. proof: the layouts compared with one process. Both are None
    without them.
    """

    run_file: Path
    overrides: tuple[str, ...]
    cluster: Cluster
    config: RunConfig | None
    predicted: Feasibility | None
    findings: tuple[Finding, ...]
    notes: dict[str, str]
    timeline: tuple[str, ...] | None = None
    simulated: "DryRun | None" = None
    proof: "LayoutProof | None" = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each severity: error, warning, note."""
        return {kind: sum(f.severity == kind for f in self.findings) for kind in ("error", "warning", "note")}

    @property
    def code(self) -> str:
        """The error code of the check, "" if the run can start."""
        if self.counts["error"] or (self.simulated and self.simulated.problems) or (self.proof and not self.proof.ok):
            return "E-CHECK-FAILED"
        return "E-DRYRUN-PATIENCE" if self.simulated and self.simulated.missing else ""

    @property
    def ok(self) -> bool:
        return not self.code

    @property
    def exit_code(self) -> int:
        return ConfigError.exit_code if self.code else 0

    def facts(self) -> dict:
        """Return the check as plain values: the JSON object of `ingot check --json`."""
        facts: dict = {"predicted": self.predicted.facts()} if self.predicted else {}
        facts["notes"] = self.notes
        if self.timeline is not None:
            facts["timeline"] = list(self.timeline)
        if self.simulated is not None:
            facts["simulated"] = _dry_run_facts(self.simulated)
        if self.proof is not None:
            facts["proof"] = self.proof.facts()
        facts |= {"errors": self.counts["error"], "findings": [asdict(f) for f in self.findings]}
        if self.code:
            facts |= {"error": self.code, "kind": ConfigError.kind, "exit_code": self.exit_code}
        return facts


def check(
    run_file: str | Path = "run.toml",
    *,
    overrides: Sequence[str] = (),
    cluster: str | None = None,
    timeline: str | None = None,
    simulate: bool = False,
    proof: bool = False,
    expert_load: str | Path | None = None,
    patience: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
) -> CheckResult:
    """Return all problems of a run file together, and how well the run works on a cluster. Nothing is started.

    run_file: a run file, or a folder with a run.toml. overrides: changes like "optim.lr=1e-3". cluster: "8xh100", or
    a machine.json (default: machine.json next to the run file, else this machine). timeline: the schedule under which
    the pipeline is drawn, "" for that of the run. simulate: trace a few ranks of the real program on fake tensors, for
    memory, traffic and collectives. proof: train a tiny version of the model, with its layers, optimizer and callbacks,
    on every layout of up to four processes, and compare with one process in float64. expert_load: a JSON file with the
    load of each expert. patience: seconds without progress after which a dry run ends (default: 900). say, progress:
    called as ranks are traced or layouts compared, with a line, and with the fraction done and a text.

    Problems of the file are findings, not exceptions. Raises UsageError for an unknown cluster, ConfigError for options
    that do not fit together or the timeline of a run without a pipeline, MissingPartError if a dry run needs a package
    that is not installed.

        result = ingot.check("run.toml", cluster="8xh100")
        if not result.ok:
            print([finding.message for finding in result.findings])
    """
    require_simulate(simulate, expert_load=expert_load, patience=patience)
    result = examine(run_file, overrides=overrides, cluster=cluster, timeline=timeline, anywhere=simulate)
    if simulate:
        result = add_dry_run(result, expert_load=expert_load, patience=patience, say=say, progress=progress)
    return add_proof(result, say) if proof else result


def examine(
    run_file: str | Path,
    *,
    overrides: Sequence[str] = (),
    cluster: str | None = None,
    timeline: str | None = None,
    anywhere: bool = False,
    width: int = _WIDTH,
) -> CheckResult:
    """Return the check without a dry run. anywhere: missing data and disk space are notes, as for another cluster.

    width: characters of a line of the timeline. The other arguments are those of `check`.
    """
    path, overrides = Path(run_file), tuple(overrides)
    names_folder = not path.is_dir()  # a run in a folder that is given needs no other
    path = path / "run.toml" if path.is_dir() else path
    found = find_cluster(cluster, path.parent)
    elsewhere = anywhere or (cluster is not None and not _is_here(found, path.parent))
    config = _sound(path, overrides)
    findings = check_run(path, found, cores=usable_cores(), overrides=overrides)
    if config:
        findings += [*_name_problems(path, overrides, config)] if names_folder else []
        findings += _init_problems(path, overrides, config)
        findings += _store_problems(path, overrides, config)
        findings += _quarantine_problems(path, overrides, config)
    about = dict(notes(config, found)) | dict(fallback_notes(plan_fallbacks(config, found))) if config else {}
    lines = timeline_lines(config, found, timeline, width) if config and timeline is not None else []
    return CheckResult(
        run_file=path,
        overrides=overrides,
        cluster=found,
        config=config,
        predicted=feasibility(config, found) if config else None,
        findings=tuple(one.as_note() if elsewhere and one.missing_here else one for one in findings),
        notes=about,
        timeline=None if timeline is None else tuple(lines),
    )


def _is_here(cluster: Cluster, folder: Path) -> bool:
    """Return True if the cluster has the number and kind of devices of this machine."""
    try:
        here = find_cluster(None, folder)
    except IngotError:  # an unreadable machine.json
        return False
    return all(getattr(cluster, f) == getattr(here, f) for f in ("device", "nodes", "devices_per_node", "device_name"))


def _sound(path: Path, overrides: tuple[str, ...]) -> RunConfig | None:
    """Return the run if its file is valid and its layout legal; None if it has problems, which `check_run` reports."""
    try:
        config = load_run(path, overrides)
        require_layout(config)
    except ConfigError:
        return None
    return config


def _name_problems(path: Path, overrides: tuple[str, ...], config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if `train` cannot make a run folder of the run's name. An existing run has its folder."""
    if not is_folder_name(config.name) and not RunFolder(path.parent).events.exists():
        message = f"name = {config.name!r} cannot be the name of a folder: {FOLDER_NAME_RULE}"
        fix = "change name, or choose the folder with ingot train --out DIR"
        yield Finding("error", _place(path, overrides, "name"), message, fix)


def _init_problems(path: Path, overrides: tuple[str, ...], config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the run cannot start from the model in `init`."""
    if not config.init:
        return
    folder = path.parent / config.init
    try:
        require_fit(folder, config.model)
    except ConfigError as error:
        where = _place(path, overrides, "init")
        yield Finding("error", where, error.found, error.fix, missing_here=not _is_there(folder))
    except OSError as error:  # a folder above it cannot be searched
        fix = "correct the permissions, or the path"
        yield Finding("error", _place(path, overrides, "init"), f"{folder}: {error.strerror}", fix, missing_here=True)


def _store_problems(path: Path, overrides: tuple[str, ...], config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the run's store is a folder that does not exist. Other stores are not asked."""
    url = config.checkpoint.remote.url
    if not url.startswith("file://"):
        return
    try:
        next(iter(open_store(url).stream("run.toml")), None)
    except NotStored:
        return
    except StoreRefused as error:
        yield Finding(
            "error", _place(path, overrides, "checkpoint.remote.url"), error.found, error.fix, True, error.code
        )


def _quarantine_problems(path: Path, overrides: tuple[str, ...], config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for a quarantine list that cannot be read, or with documents that are in the tokens. They are an
    error if the run may not leave out so many windows."""
    if not config.data.quarantine:
        return
    from ingot.trainer.loader.listed import listed_windows  # numpy, which few checks need
    from ingot.trainer.loader.quarantine import LIMIT

    where = _place(path, overrides, "data.quarantine")
    tokens = (path.parent / config.data.tokens).resolve()
    names: dict[Path, str] = {}
    for name in config.data.quarantine:
        listed = (path.parent / name).resolve()
        try:
            read_quarantine(listed)
        except IngotError as error:
            yield Finding("error", where, error.found, error.fix, missing_here=not _is_there(listed))
            continue
        names.setdefault(listed, name)
    readable, found = replace(config.data, quarantine=tuple(map(str, names))), dict[Path, tuple[int, int]]()
    try:
        found = listed_windows(replace(config, data=readable), RunFolder(path.parent))
    except IngotError as error:
        if error.code == LIMIT:  # the check of the tokens names what is missing of them
            yield Finding("error", where, error.found, error.fix)
    except OSError:
        pass
    for listed, (documents, windows) in found.items():
        message = f"documents of the list {names[listed]} in the tokens: {documents:,}; the run leaves out {windows:,} "
        fix = f"ingot data purge {tokens.parent.parent} --quarantine {listed}"
        yield Finding("warning", where, f"{message}windows", fix)


def _is_there(path: Path) -> bool:
    """Return whether this machine shows `path`: not below a folder without permission."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _place(path: Path, overrides: tuple[str, ...], key: str) -> str:
    """Return where a setting is given: the option, or the line of the run file."""
    if any(override.partition("=")[0].strip() == key for override in overrides):
        return f"--set {key}"
    return f"{path}:{key_lines(path.read_text()).get(key, '')}"


# -- the dry run --


def require_simulate(simulate: bool, **options: object) -> None:
    """Raise ConfigError if one of `options`, which belong to the dry run, is given without one."""
    alone = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if alone and not simulate:
        raise ConfigError(
            "E-SIMULATE-ALONE",
            f"{alone[0]} is given without --simulate",
            rule=f"{alone[0]} is an option of the dry run",
            fix=f"add --simulate, or remove {alone[0]}",
            option=alone[0],
        )


def add_proof(result: CheckResult, say: Callable[[str], None] = lambda text: None) -> CheckResult:
    """Return `result` with the proof of its layouts; unchanged if the run file has problems.

    say: called with a line for each layout. Raises MissingPartError without torch.
    """
    if result.config is None:
        return result
    require("torch", "train")
    from ingot.rehearse.proof.proof import LayoutProof, case_line, prove_layouts

    compared, left_out = [], []
    with contextlib.closing(prove_layouts(result.config)) as results:  # its processes end also if `say` raises
        for found in results:
            say(case_line(found))
            (compared if found.ran else left_out).append(found)
    proof = LayoutProof(tuple(compared), tuple(left_out))
    if proof.ok:
        return replace(result, proof=proof)
    wrong = sum(not case.ok for case in compared)
    message = f"{wrong} of {len(compared)} layouts do not compute what one process computes"
    fix = (
        "correct the layer, optimizer or callback that is not the same under these layouts, or train without them; "
        "an optimizer's sum, mean or norm needs a MatrixRule"
    )
    return replace(result, proof=proof, findings=(*result.findings, Finding("error", "--proof", message, fix)))


def add_dry_run(
    result: CheckResult,
    *,
    expert_load: str | Path | None = None,
    patience: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
) -> CheckResult:
    """Return `result` with the dry run of its config, or with the finding why a rank cannot be traced.

    Without a config, `result` is returned as it is. The arguments are those of `check`.
    """
    if result.config is None:
        return result
    try:
        simulated = _dry_run(result.config, result.cluster.device, expert_load, patience, say, progress)
    except MissingPartError:
        raise
    except IngotError as error:
        finding = Finding("error", "--simulate", error.found, error.fix)
        return replace(result, findings=(*result.findings, finding))
    return replace(result, simulated=simulated)


def _dry_run(config: RunConfig, device: str, expert_load, patience: float | None, say, progress) -> "DryRun":
    from ingot.rehearse.dryrun import dry_run
    from ingot.rehearse.dryrun.expert_load import read_loads

    require("torch", "train")
    loads = () if expert_load in (None, BALANCED) else read_loads(Path(expert_load), config.model)
    wanted = config.train.device
    say("\ntraced rank, with its highest peak of memory:")

    class Lines(dry_run.Watcher):
        """A watcher that reports each traced rank as a line."""

        fraction = 0.0

        def began(self, rank: int, phase: str) -> None:
            progress(self.fraction, f"rank {rank}: {phase}")

        def traced(self, trace: "Trace", done: int, ranks: int, was_kept: bool) -> None:
            self.fraction = done / ranks
            say(_traced_line(trace, f"{done:>{len(str(ranks))}}/{ranks}", was_kept))
            progress(self.fraction, f"traced {done} of {ranks} ranks")

    return dry_run.simulate(
        config,
        device=device if wanted == "auto" else wanted,
        loads=loads,
        patience=patience or PATIENCE_SECONDS,
        watcher=Lines(),
    )


def _traced_line(trace: "Trace", number: str, was_kept: bool) -> str:
    phase, peak = trace.peak
    how = "kept from an earlier dry run" if was_kept else f"{trace.cpu_seconds:.1f} CPU seconds"
    return f"{number}  {trace.name}: {format_bytes(peak)} ({phase}), {len(trace.calls):,} calls; {how}"


def _dry_run_facts(found: "DryRun") -> dict:
    """Return the dry run as JSON values."""
    return {
        "world_size": found.grid.world_size,
        "ranks": [asdict(replace(trace, calls=[])) | {"calls": len(trace.calls)} for trace in found.traces],
        "missing": found.missing,
        "fault": asdict(found.world.fault) if found.world and found.world.fault else None,
        "alike": found.world.alike if found.world else None,
        "streams": found.streams.facts() if found.streams else None,
        "compared": [asdict(c) | {"deviation": c.deviation, "agrees": c.agrees} for c in found.compared],
        "planner_bytes": found.bills,
        "over_bill": [trace.rank for trace in found.over_bill],
        "useful_flops": found.useful,
        "declared": list(found.declared),
    }
