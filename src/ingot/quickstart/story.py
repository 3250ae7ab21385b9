"""The story of `ingot quickstart`: every part of ingot called once, in order, on this machine.

Each chapter does real work with the functions that the verbs call, and leaves its artifact in the folder. What is
there already is not done again, so the same command continues an interrupted quickstart.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ingot import config as configuration
from ingot.config import to_toml
from ingot.data.build.funnel import funnel_table
from ingot.data.build.prepare import Prepared, prepare
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.errors import Preempted, RunFailed, require
from ingot.events import EventLog, read_events
from ingot.machine.cluster_file import read_cluster, write_cluster
from ingot.machine.doctor import examine
from ingot.machine.facts import read_machine, this_cluster
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
from ingot.trainer.launch.train import train
from ingot.units import format_bytes, format_count, format_seconds

VOCAB_SIZE = 4096
TWIN_STEPS = 60
PROMPTS = ("The function returns", "A module is", "This class represents", "If the argument is")


class Narrator(Protocol):
    """Who hears the story: cli/terminal.py prints it."""

    def say(self, text: str = "") -> None: ...
    def table(self, rows: Sequence[Sequence], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> None: ...
    def progress(self, fraction: float, text: str = "") -> None: ...


@dataclass(frozen=True)
class Places:
    """Where the quickstart keeps its parts."""

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


class Story:
    """Tells the chapters in order."""

    CHAPTERS = ("doctor", "crawl", "data", "plan", "train", "drill", "eval", "export", "report")

    def __init__(self, folder: Path, *, warcs: Sequence[Path], workers: int, narrator: Narrator, quiet: bool):
        self.folder, self.places = folder, Places(folder.resolve())
        self.warcs, self.workers = tuple(warcs), workers
        self.narrator, self.quiet = narrator, quiet
        self.log = EventLog(folder / "stages.jsonl")

    @contextmanager
    def chapter(self, name: str) -> Iterator[list[str]]:
        """Times a chapter. Lines appended to the yielded list are its summary; the first stands beside the name."""
        lines: list[str] = []
        started = time.monotonic()
        yield lines
        seconds = time.monotonic() - started
        head = f"{self.CHAPTERS.index(name) + 1}/{len(self.CHAPTERS)} {name:<7}"
        self.narrator.say(f"{head} {lines[0]:<78} {format_seconds(seconds):>10}")
        for line in lines[1:]:
            self.narrator.say(" " * 12 + line)
        self.log.write(events.STAGE, name=name, seconds=round(seconds, 3), summary=lines[0])

    def tell(self) -> dict:
        """Run all chapters; returns the facts for scripts. Raises what a chapter raises; Preempted when stopped."""
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
            "folder": str(self.places.root),
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
        with self.chapter("doctor") as lines:
            require("torch", "train")
            machine = read_machine()
            checks = examine(machine, self.places.root)
            bad = [check for check in checks if check.status != "ok"]
            gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
            lines.append(
                f"{machine.cores} cores · {format_bytes(machine.available_bytes)} of memory free · {gpus} · "
                f"{len(checks) - len(bad)} of {len(checks)} checks ok"
            )
            lines += [f"{c.status}: {c.name}: {c.found}" + (f" ({c.fix})" if c.fix else "") for c in bad]

    def crawl(self) -> list[Input]:
        """The crawl files, and the source that each one's text counts for: the user's own, or files made here."""
        if self.warcs:
            return [Input(location=str(path)) for path in self.warcs]
        with self.chapter("crawl") as lines:
            complete = self.places.crawl / "complete"
            if not complete.exists():
                said = ""

                def progress(fraction: float, text: str) -> None:
                    nonlocal said
                    said = text
                    self.narrator.progress(fraction, text)

                make_crawl(self.places.crawl, progress=progress)
                write_atomic(complete, said)  # how many pages, and whether some could not be made
            files = sorted(self.places.crawl.glob("crawl-*.warc.gz"))
            size = sum(file.stat().st_size for file in files)
            lines.append(
                f"{complete.read_text()} of this machine's documentation, fetched over HTTP into {len(files)} WARC "
                f"files, {format_bytes(size)}"
            )
        return [Input(location=str(file), source=source_of(file)) for file in files]

    def data(self, inputs: list[Input]) -> Prepared:
        with self.chapter("data") as lines:
            with Local(self.workers) as runner:
                prepared = prepare(
                    inputs,
                    self.places.data,
                    vocab_size=VOCAB_SIZE,
                    runner=runner,
                    progress=self.narrator.progress,
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
        self.narrator.table(
            [("            " + row[0], *row[1:]) for row in rows],
            ("            " + header[0], *header[1:]),
            right=(1, 2),
        )
        return prepared

    def plan(self, prepared: Prepared) -> tuple[RunConfig, Plan]:
        with self.chapter("plan") as lines:
            cluster = self.measured_machine()
            if not self.places.run_file.exists():
                self.write_run_file(prepared, cluster)
            config = configuration.load(RunConfig, self.places.run_file)
            plan = make_plan(config, cluster, manifest=prepared.train)
            write_json(self.places.plan, configuration.to_dict(plan))
            lines.append(
                f"{format_count(plan.parameters)} parameters · {config.train.steps} steps of "
                f"{format_count(plan.tokens_per_step)} tokens · {config.parallel.world_size} ranks · "
                f"about {format_seconds(plan.total_seconds)}"
            )
            parts = sorted(plan.memory_bytes.items(), key=lambda part: -part[1])
            bill = " + ".join(f"{kind} {format_bytes(size)}" for kind, size in parts if size)
            lines.append(f"a rank needs {format_bytes(plan.total_memory_bytes)}: {bill}")
            lines += [f"note: {warning}" for warning in plan.warnings]
        return config, plan

    def measured_machine(self) -> Cluster:
        """This machine with its measured rates; they are measured once per folder."""
        if self.places.machine.exists():
            return read_cluster(self.places.machine)
        from ingot.rehearse.calibrate.calibrate import calibrate

        machine = read_machine()
        ranks = len(machine.gpus) or 2  # two even on one core: the drill needs a survivor
        cluster = calibrate(with_published_rates(this_cluster(machine, ranks)))
        write_cluster(self.places.machine, cluster)
        return cluster

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
        reasons = proposal.reasons | {"checkpoint.every_steps": "often, so that the drill has little to redo"}
        text = to_toml(run, comments=reasons)
        write_atomic(self.places.run_file, text)

    def train(self, config: RunConfig) -> None:
        """Train, and have a rank killed between two checkpoints in the middle of the run."""
        every = config.checkpoint.every_steps
        middle = max(config.train.steps // 2 // every, 2) * every
        killer = RankKiller(
            self.places.run,
            self.places.twin,
            rank=config.parallel.world_size - 1,
            after_step=middle + every // 2,
        )
        with self.chapter("train") as lines:
            killer.start()
            try:
                outcome = train(self.places.run_file, self.places.run.root, quiet=self.quiet, say=self.narrator.say)
            finally:
                killer.stop()
            if not outcome.finished:
                raise Preempted(f"stopped at step {outcome.step}, saved; the same command continues")
            progress = list(read_events(self.places.run.events, events.PROGRESS))
            last = progress[-1]
            lines.append(
                f"step {last['step']} · loss {last['loss']:.3f} nats · {last['bpb']:.3f} bits per byte · "
                f"{format_count(last['tokens_per_second'])} tokens/s"
            )

    def drill(self, config: RunConfig) -> Twin | None:
        """Let the twin run the steps around the kill without a fault, and compare. None if nothing was killed."""
        with self.chapter("drill") as lines:
            kill, resumed = kill_and_restart(self.places.run)
            if kill is None:
                lines.append("skipped: the run was over before a rank could be killed")
                return None
            until = min(resumed + TWIN_STEPS // 2, config.train.steps)
            train(self.places.run_file, self.places.twin.root, until_step=until, quiet=True)
            twin = compare_with_twin(self.places.run, self.places.twin)
            lines.append(
                f"kill -9 of rank {kill['rank']} near step {kill['step']}, back from step {twin.resumed_from}; steps "
                f"{twin.first_step}-{twin.last_step} against an undisturbed twin:"
            )
            if not twin.equal:
                raise RunFailed(
                    f"losses after the recovery differ from the twin's by up to {twin.max_difference:g}",
                    rule="a recovered run equals the undisturbed one bit for bit",
                )
            lines.append(f"losses and gradient norms of {twin.steps} steps are equal, bit for bit")
        return twin

    def evaluation(self) -> dict:
        with self.chapter("eval") as lines:
            *_, last = read_events(self.places.run.events, events.EVALUATION)
            lines.append(
                f"{last['bpb']:.3f} bits per byte on {format_count(last['tokens'])} held-out tokens "
                f"(unigram {last['unigram_bpb']:.3f})"
            )
            lines += [
                f"{name}: {s['bpb']:.3f} (unigram {s['unigram_bpb']:.3f})"
                for name, s in sorted(last["by_source"].items())
            ]
            samples = [e for e in read_events(self.places.run.events, events.SAMPLE) if e["step"] == last["step"]]
            lines += [f"> {' '.join((e['prompt'] + e['text']).split())[:100]}" for e in samples]
        return last

    def export(self) -> float:
        from ingot.trainer.export.huggingface import export_run

        with self.chapter("export") as lines:
            exported = export_run(self.places.run.root, self.places.export)
            lines.append(
                f"Hugging Face folder {self.places.export.name}/, read back: logits differ by at most "
                f"{exported.max_logit_difference:g}"
            )
        return exported.max_logit_difference

    def report(self) -> Path:
        with self.chapter("report") as lines:
            warcs = ["--warc", *map(str, self.warcs)] if self.warcs else []
            command = shlex.join(["ingot", "quickstart", *warcs, "--dir", str(self.folder)])
            report = write_report(
                self.places.run.root,
                out=self.places.root,
                corpus=self.places.data / "corpus",
                stages=self.log.path,
                command=command,
            )
            lines.append(f"{report.html}")
        return report.html
