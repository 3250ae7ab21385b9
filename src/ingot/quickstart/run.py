"""The stages of `ingot quickstart`, which use every part of ingot once, in order, on this machine.

Each stage does real work with the functions that the commands call, and writes its artifact to the folder. An artifact
that already exists is not made again, so the same command continues an interrupted quickstart.
"""

import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ingot import config as configuration
from ingot.config import to_toml
from ingot.data.build.prepare import Prepared, prepare
from ingot.data.build.stages import funnel_table
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.errors import Preempted, ResourceError, RunFailed, require
from ingot.events import EventLog, read_events
from ingot.machine.doctor import examine
from ingot.machine.facts import read_cluster, read_machine, this_cluster, write_cluster
from ingot.planner.request.clusters import with_published_rates
from ingot.planner.request.presets import load_model
from ingot.planner.run.plan import make_plan
from ingot.planner.run.propose import propose
from ingot.quickstart.crawl import make_crawl, source_of
from ingot.quickstart.drill import RankKiller, compare_with_twin, kill_and_restart
from ingot.report.facts import Twin
from ingot.report.write import write_report
from ingot.schema import events
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic, write_json
from ingot.theory.rules import load_run
from ingot.trainer.launch.train import train
from ingot.units import format_bytes, format_count, format_seconds

VOCAB_SIZE = 4096
TWIN_STEPS = 60
_WIDTH = 80  # characters of a line
_DOT, _KEPT_TOGETHER = " \u00b7 ", "\u00a0"  # between items, and a space at which no line is broken
PROMPTS = ("The function returns", "A module is", "This class represents", "If the argument is")


class Output(Protocol):
    """The interface for printing that the quickstart needs, such as the terminal of cli/terminal.py."""

    def say(self, text: str = "") -> None: ...
    def table(self, rows: Sequence[Sequence], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> None: ...
    def progress(self, fraction: float, text: str = "") -> None: ...


@dataclass(frozen=True)
class QuickstartPaths:
    """The paths of a quickstart's artifacts in its folder."""

    root: Path

    @property
    def crawl(self) -> Path:
        return self.root / "crawl"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def machine(self) -> Path:
        return self.root / "machine.json"

    @property
    def run_file(self) -> Path:
        return self.root / "run.toml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.root / "run")

    @property
    def twin(self) -> RunFolder:
        return RunFolder(self.root / "twin")

    @property
    def export(self) -> Path:
        return self.root / "hf"


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text. Those with items, which a dot separates, are broken between items only."""
    items = text.split(_DOT)
    kept = _DOT.join(item.replace(" ", _KEPT_TOGETHER) for item in items) if len(items) > 1 else text
    lines = textwrap.wrap(kept, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_KEPT_TOGETHER, " ") for line in lines] or [""]


class QuickstartRun:
    """One quickstart: its stages in order, each printed as one line with its time."""

    STAGES = ("doctor", "crawl", "data", "plan", "train", "drill", "eval", "export", "report")

    def __init__(self, folder: Path, *, warcs: Sequence[Path], workers: int, output: Output, quiet: bool):
        self.folder, self.paths = folder, QuickstartPaths(folder.resolve())
        self.warcs, self.workers = tuple(warcs), workers
        self.output, self.quiet = output, quiet
        self.log = EventLog(folder / "stages.jsonl")

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time, print and log a stage. Lines appended to the yielded list are its summary; the first is printed next to
        its name."""
        lines: list[str] = []
        started = time.monotonic()
        yield lines
        seconds = time.monotonic() - started
        first, *more = _wrapped(lines[0], _WIDTH - 24)
        self.output.say(f"{self._head(name)}{first:<{_WIDTH - 24}}  {format_seconds(seconds):>10}")
        below = [part for line in lines[1:] for part in _wrapped(line, _WIDTH - 12)]
        for line in (*more, *below):
            self.output.say(" " * 12 + line)
        self.log.write(events.STAGE, name=name, seconds=round(seconds, 3), summary=lines[0])

    def _head(self, name: str) -> str:
        return f"{self.STAGES.index(name) + 1}/{len(self.STAGES)} {name:<8}"

    def execute(self) -> dict:
        """Run all stages and return their results as JSON values, for --json.

        Raises Preempted if the training was stopped on request, and the errors of the stages.
        """
        started = time.monotonic()
        self.doctor()
        prepared = self.data(self.crawl())
        config, plan = self.plan(prepared)
        self.train(config)
        twin = self.drill(config)
        evaluation = self.evaluation()
        difference = self.export()
        report = self.report()
        return {
            "folder": str(self.paths.root),
            "seconds": round(time.monotonic() - started, 1),
            "tokens": prepared.train.tokens,
            "parameters": plan.parameters,
            "bpb": evaluation["bpb"],
            "unigram_bpb": evaluation["unigram_bpb"],
            "recovered_bit_for_bit": twin.equal if twin else None,
            "compared_steps": twin.steps if twin else 0,
            "max_logit_difference": difference,
            "report": str(report),
        }

    def doctor(self) -> None:
        with self.stage("doctor") as lines:
            require("torch", "train")
            machine = read_machine()
            checks = examine(machine, self.paths.root)
            bad = [check for check in checks if check.status != "ok"]
            gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
            lines.append(
                f"{machine.cores} cores · {format_bytes(machine.available_bytes)} of memory free · {gpus} · "
                f"{len(checks) - len(bad)} of {len(checks)} checks ok"
            )
            lines += [f"{c.status}: {c.name}: {c.found}" + (f" ({c.fix})" if c.fix else "") for c in bad]

    def crawl(self) -> list[Input]:
        """Return the crawl files with their sources: the user's files, or files made here."""
        if self.warcs:
            return [Input(location=str(path)) for path in self.warcs]
        with self.stage("crawl") as lines:
            complete = self.paths.crawl / "complete"
            if not complete.exists():
                summary = ""

                def progress(fraction: float, text: str) -> None:
                    nonlocal summary
                    summary = text
                    self.output.progress(fraction, text)

                make_crawl(self.paths.crawl, progress=progress)
                write_atomic(complete, summary)  # the number of pages, and a notice if pydoc failed
            files = sorted(self.paths.crawl.glob("crawl-*.warc.gz"))
            size = sum(file.stat().st_size for file in files)
            lines.append(f"{complete.read_text()} of documentation · {len(files)} WARC files · {format_bytes(size)}")
            lines.append("the documentation of this machine, fetched over HTTP")
        return [Input(location=str(file), source=source_of(file)) for file in files]

    def data(self, inputs: list[Input]) -> Prepared:
        with self.stage("data") as lines:
            with Local(self.workers) as runner:
                prepared = prepare(
                    inputs,
                    self.paths.data,
                    vocab_size=VOCAB_SIZE,
                    runner=runner,
                    progress=self.output.progress,
                )
            kept = sum(part.documents for part in prepared.corpus.parts)
            lines.append(
                f"{prepared.corpus.funnel[0].documents_in:,} records -> {kept:,} documents -> "
                f"{format_count(prepared.train.tokens)} tokens (+ {format_count(prepared.heldout.tokens)} held out)"
            )
            lines.append(f"vocabulary of {prepared.train.vocab_size:,}, encoded with {prepared.engine}")
            lines += [f"notice: {prepared.notice}"] if prepared.notice else []
            lines += [f"warning: {warning}" for warning in prepared.warnings]
        header, rows = funnel_table(prepared.corpus.funnel)
        self.output.table([row[:-1] for row in rows], header[:-1], right=(1, 2))  # what ran is in the report
        return prepared

    def plan(self, prepared: Prepared) -> tuple[RunConfig, Plan]:
        with self.stage("plan") as lines:
            cluster, notice = self.measured_machine()
            if not self.paths.run_file.exists():
                self.write_run_file(prepared, cluster)
            config = load_run(self.paths.run_file)
            plan = make_plan(config, cluster, manifest=prepared.train)
            write_json(self.paths.plan, configuration.to_dict(plan))
            lines.append(
                f"{format_count(plan.parameters)} parameters · {config.train.steps} steps of "
                f"{format_count(plan.tokens_per_step)} tokens · {config.parallel.world_size} ranks · "
                + (f"about {format_seconds(plan.total_seconds)}" if plan.step_seconds else "time unknown")
            )
            lines += [notice] if notice else []
            parts = sorted(plan.memory_bytes.items(), key=lambda part: -part[1])
            bill = " + ".join(f"{kind} {format_bytes(size)}" for kind, size in parts if size)
            lines.append(f"a rank needs {format_bytes(plan.total_memory_bytes)}: {bill}")
            lines += [f"note: {warning}" for warning in plan.warnings]
        return config, plan

    def measured_machine(self) -> tuple[Cluster, str]:
        """Return this machine as a cluster with measured rates, which are measured once per quickstart folder, and "".

        On a machine that is too busy to be measured, the cluster has no measured rates, and the text says so.
        """
        if self.paths.machine.exists():
            return read_cluster(self.paths.machine), ""
        from ingot.rehearse.calibrate.calibrate import DEADLINE_SECONDS, calibrate

        machine = read_machine()
        ranks = len(machine.gpus) or 2  # two even on one core: a rank must survive the drill
        uncalibrated = with_published_rates(this_cluster(machine, ranks))
        self.output.say(
            f"{self._head('plan')}measuring this machine: 15 s when idle, at most {format_seconds(DEADLINE_SECONDS)}"
        )
        try:
            cluster = calibrate(uncalibrated)
        except ResourceError as error:
            if error.code != "E-CALIBRATION-TIMEOUT":
                raise
            return uncalibrated, f"the speed of this machine is not measured: {error.found}"
        write_cluster(self.paths.machine, cluster)
        return cluster, ""

    def write_run_file(self, prepared: Prepared, cluster: Cluster) -> None:
        preset = load_model("tiny")
        proposal = propose(
            preset.arch,
            cluster,
            Data(tokens="data/tokens/train", heldout="data/tokens/heldout", tokenizer="data/tokens/tokenizer.json"),
            name="quickstart",
            tokens=prepared.train.tokens,
            vocab_size=prepared.train.vocab_size,
            preset=preset.train,
        )
        run, every = proposal.run, max(min(TWIN_STEPS // 2, proposal.run.train.steps // 4), 1)
        run = replace(
            run,
            checkpoint=replace(run.checkpoint, every_steps=every),
            evaluate=replace(run.evaluate, prompts=PROMPTS),
        )
        reasons = proposal.reasons | {"checkpoint.every_steps": "frequent, so that the drill repeats few steps"}
        text = to_toml(run, comments=reasons)
        write_atomic(self.paths.run_file, text)

    def train(self, config: RunConfig) -> None:
        """Train, and kill one rank between two checkpoints in the middle of the run."""
        every = config.checkpoint.every_steps
        middle = max(config.train.steps // 2 // every, 2) * every
        killer = RankKiller(
            self.paths.run,
            self.paths.twin,
            rank=config.parallel.world_size - 1,
            after_step=middle + every // 2,
        )
        with self.stage("train") as lines:
            killer.start()
            try:
                outcome = train(self.paths.run_file, self.paths.run.root, quiet=self.quiet, say=self.output.say)
            finally:
                killer.stop()
            if not outcome.finished:
                raise Preempted(f"stopped at step {outcome.step}, saved; the same command continues")
            trained = [one for one in read_events(self.paths.run.events, events.PROGRESS) if one["loss"] is not None]
            last = trained[-1]
            lines.append(
                f"step {last['step']} · loss {last['loss']:.3f} nats · {last['bpb']:.3f} bits per byte · "
                f"{format_count(last['tokens_per_second'])} tokens/s"
            )

    def drill(self, config: RunConfig) -> Twin | None:
        """Train an undisturbed twin over the steps around the kill, and compare it with the run. Returns None if no
        rank was killed."""
        with self.stage("drill") as lines:
            kill, resumed = kill_and_restart(self.paths.run)
            if kill is None:
                lines.append("skipped: the run ended before a rank could be killed")
                return None
            until = min(resumed + TWIN_STEPS // 2, config.train.steps)
            train(self.paths.run_file, self.paths.twin.root, until_step=until, quiet=True)
            twin = compare_with_twin(self.paths.run, self.paths.twin)
            if not twin.equal:
                raise RunFailed(
                    "E-DRILL-DIFFERS",
                    f"losses after the recovery differ from the twin's by up to {twin.max_difference:g}",
                    rule="a recovered run equals the undisturbed twin bit for bit",
                    fix="this is a bug in ingot; please report it with both run folders",
                    max_difference=twin.max_difference,
                )
            lines.append(
                f"kill -9 of rank {kill['rank']} near step {kill['step']}, back from step {twin.resumed_from}: "
                "equal to a twin, bit for bit"
            )
            lines.append(
                f"steps {twin.first_step}-{twin.last_step}: the same losses and gradient norms as an undisturbed twin"
            )
        return twin

    def evaluation(self) -> dict:
        with self.stage("eval") as lines:
            *_, last = read_events(self.paths.run.events, events.EVALUATION)
            lines.append(
                f"{last['bpb']:.3f} bits per byte on {format_count(last['tokens'])} held-out tokens "
                f"(unigram {last['unigram_bpb']:.3f})"
            )
            lines += [
                f"{name}: {s['bpb']:.3f} (unigram {s['unigram_bpb']:.3f})"
                for name, s in sorted(last["by_source"].items())
            ]
            samples = [e for e in read_events(self.paths.run.events, events.SAMPLE) if e["step"] == last["step"]]
            lines += [f"> {' '.join((e['prompt'] + e['text']).split())[:100]}" for e in samples]
        return last

    def export(self) -> float:
        from ingot.trainer.export.huggingface import export_run

        with self.stage("export") as lines:
            exported = export_run(self.paths.run.root, self.paths.export)
            lines.append(
                f"Hugging Face folder {self.paths.export.name}/, read back: logits differ by at most "
                f"{exported.max_logit_difference:g}"
            )
        return exported.max_logit_difference

    def report(self) -> Path:
        with self.stage("report") as lines:
            warcs = ["--warc", *map(str, self.warcs)] if self.warcs else []
            command = shlex.join(["ingot", "quickstart", *warcs, "--dir", str(self.folder)])
            report = write_report(
                self.paths.run.root,
                out=self.paths.root,
                corpus=self.paths.data / "corpus",
                stages=self.log.path,
                command=command,
            )
            lines.append(f"{report.html}")
        return report.html
