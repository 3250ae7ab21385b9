"""Build a corpus folder from crawl files: decide for every document whether it stays, in the order of the inputs.

One task per input (process_input.py) takes its documents through the stages that look at one document. Further tasks
find URLs and texts that repeat earlier ones, in the order of the inputs (duplicates.py), and write the files
(corpus_files.py). So the corpus does not depend on the runner or the number of workers. The results of tasks are kept
until the corpus is finished: after Ctrl-C or a crash, the same command continues where it stopped.
"""

import contextlib
import difflib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ingot.data.build.corpus import MANIFEST, cut_files, load_corpus, write_manifest
from ingot.data.build.corpus_files import WriteCorpusFile, find_repeated_spans, write_corpus_file
from ingot.data.build.duplicates import find_duplicates
from ingot.data.build.plugin_code import check_parts, code_beside_ingot, import_plugins, used_code, written_recipe
from ingot.data.build.process_input import (
    EvaluationSetsIndex,
    IndexEvaluationSets,
    InputResult,
    ProcessInput,
    Stamp,
    index_evaluation_sets,
    process_input,
    stamp,
)
from ingot.data.build.recipe import DataRecipe, fingerprint, recipe_of
from ingot.data.build.stages import SUBSTRINGS, StageSettings, funnel, most_dropped, what_ran
from ingot.data.dedup.index import INDEX
from ingot.data.filters.quarantine import QuarantineRules
from ingot.data.lineage.purge.history import LIST, PurgedList
from ingot.data.parts import filters_on
from ingot.data.sources.input import Input, identity
from ingot.data.sources.remote import RemoteRules
from ingot.data.tasks.run import Inline, PhaseStatus, ReportProgress, Runner, describe, run_all
from ingot.data.tasks.store import Store, open_store
from ingot.data.tasks.task import PLACE, Attempt, R, Task, task_function
from ingot.errors import ConfigError, DataError, ResourceError
from ingot.schema.corpus import CorpusManifest
from ingot.schema.plugins import Plugins
from ingot.storage import canonical_json, exclusive, fsync_dir, require_free, sha256_bytes, sha256_file

_PROCESS_SHARE, _DUPLICATES_SHARE = 0.85, 0.95  # progress bar: share of a build's time until the end of this step
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class CorpusIdentity:
    """The facts that decide every byte of a corpus, besides the versions of ingot and of the libraries."""

    inputs: dict[str, str]  # name -> SHA-256; for a remote input, a text that changes with its content
    sources: dict[str, str]  # name -> source
    config_sha256: str


def build_corpus(
    inputs: Sequence[Input],
    out: Path,
    recipe: DataRecipe | None = None,
    *,
    runner: Runner | None = None,
    purged: Path | None = None,
    against: Path | None = None,
    replace: bool = True,
    progress: ReportProgress | None = None,
) -> CorpusManifest:
    """Build the corpus folder `out` from `inputs` by `recipe` (default: the preset `web`). Return its manifest.

    A finished corpus of the same inputs and recipe is kept as it is. Another corpus is replaced when the new one is
    complete. replace: if False, raise ConfigError instead, because tokens were made from the old corpus. purged: the
    data folder with the list of purged documents (lineage/purge/history.py). against: index of the documents that
    earlier builds kept (dedup/index.py); similar documents are dropped. Inputs are processed in the order of their
    names, not in the order of `inputs`.
    Raises ConfigError, ResourceError, RunBusyError; DataError for an input that cannot be fetched, for one whose
    workers die repeatedly, and if no document is left (`out` then holds the dropped documents).
    """
    recipe, report = import_plugins(recipe or DataRecipe()), progress or (lambda fraction, text: None)
    _check_inputs(inputs, recipe)
    check_parts(recipe, inputs)
    inputs = sorted(inputs, key=lambda one: one.name)
    list_folder = purged.absolute() if purged and (purged / LIST).exists() else None
    with _work_folder(out) as work:
        begun, runner = any(work.iterdir()), runner or Inline()
        store = open_store(work / "store")
        try:
            identity, stored, decides = corpus_identity(inputs, recipe, against, store, runner, report)
            if finished := find_corpus(out, identity):
                return _not_empty(finished, out)
            _check_out(out, replace)
            require_free(out, 3 * stored + _SPARE_BYTES, "building the corpus")
        except (ConfigError, ResourceError):
            if not begun:
                shutil.rmtree(work)
            raise
        manifest = _Build(inputs, recipe, identity, list_folder, against, store, runner, report).run(
            work / "corpus", decides
        )
        _publish(work / "corpus", out, work)
    report(1.0, "corpus written")
    return _not_empty(manifest, out)


def corpus_identity(
    inputs: Sequence[Input],
    recipe: DataRecipe,
    against: Path | None,
    store: Store,
    runner: Runner,
    report: ReportProgress,
) -> tuple[CorpusIdentity, int, dict[str, Any]]:
    """Hash each input in a task. Return the identity of the corpus, the total bytes of inputs whose size is known,
    and the fingerprint of the recipe, which is taken once: a second one could be of other files.

    A continued build hashes local inputs again only if size or time changed, and requests the versions of remote ones.
    """
    cache = store.root / "fetched"
    tasks = [
        identify_input.task(IdentifyInput(input=one, stamp=stamp(one), cache=cache, remote=recipe.remote), one.name)
        for one in inputs
    ]
    for one, task in zip(inputs, tasks, strict=True):
        if one.is_remote and store.finished(task) and "common_crawl" not in store.result(task):
            store.forget(task)
    found = run_all(tasks, store, runner, lambda status: report(0.0, f"hashing: {describe(status)}"))
    recipe_facts = fingerprint(recipe)
    decides = recipe_facts | ({"against": sha256_file(against / INDEX)} if against else {})
    decides |= {"plugins": code} if (code := used_code(recipe, inputs)) else {}
    pairs = zip(inputs, found, strict=True)
    identity = CorpusIdentity(
        inputs={one.name: version.get("sha256") or canonical_json(version) for one, version in pairs},
        sources={one.name: one.source for one in inputs},
        config_sha256=sha256_bytes(canonical_json(decides).encode()),
    )
    return identity, sum(max(version["bytes"], 0) for version in found), recipe_facts  # -1: unknown


@dataclass(frozen=True, kw_only=True)
class IdentifyInput:
    """Settings of `identify_input`. stamp: see process_input.stamp. cache: the folder of fetched inputs."""

    input: Input
    stamp: Stamp
    cache: Annotated[Path, PLACE]
    remote: Annotated[RemoteRules, PLACE]


@task_function("identify_input")
def identify_input(specification: IdentifyInput, attempt: Attempt) -> dict[str, Any]:
    """Return the facts that change whenever the content of the input changes (sources/input.py: identity)."""
    return identity(specification.input, specification.cache, specification.remote)


def find_corpus(out: Path, identity: CorpusIdentity) -> CorpusManifest | None:
    """Return the manifest of the corpus in `out` if its identity equals `identity`, else None."""
    if not (out / MANIFEST).exists():
        return None
    found = load_corpus(out)
    return found if CorpusIdentity(found.inputs, found.sources, found.config_sha256) == identity else None


def _check_inputs(inputs: Sequence[Input], recipe: DataRecipe) -> None:
    if not inputs:
        raise ConfigError(
            "E-INPUT-NONE",
            "no crawl files are given",
            rule="a build reads at least one input",
            fix="ingot data build FILES... --out DIR",
        )
    names = Counter(one.name for one in inputs)
    sources = sorted({one.source for one in inputs})
    for name in recipe.source:
        if name not in sources:
            close = difflib.get_close_matches(name, sources, n=1)
            raise ConfigError(
                "E-RECIPE-SOURCE",
                f"the recipe has rules for the source {name!r}, but no input belongs to it",
                rule=f"the sources of this build are {', '.join(sources)}",
                fix=f"did you mean {close[0]!r}?" if close else "name its inputs with --source, or leave the rules out",
                source=name,
                sources=sources,
            )
    for one in inputs:
        if not one.is_remote and not Path(one.location).exists():
            raise ConfigError(
                "E-INPUT-MISSING",
                f"there is no crawl file at {one.location}",
                rule="every input exists before a build begins",
                fix="check the path",
                path=one.location,
            )
        if names[one.name] > 1:
            raise ConfigError(
                "E-INPUT-NAME",
                f"{names[one.name]} inputs have the name {one.name}",
                rule="document ids are made from the name of the file, so the name must be unique",
                fix="give each file once, or rename one",
                name=one.name,
                count=names[one.name],
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one.source) or one.source == "dropped":
            raise ConfigError(
                "E-SOURCE-NAME",
                f"{one.source!r} is not a valid source name",
                rule="letters, digits, '_', '.' and '-', beginning with a letter or digit; not 'dropped'",
                fix="choose another name: --source NAME FILES...",
                source=one.source,
            )


def _check_out(out: Path, replace: bool) -> None:
    if not replace and (out / MANIFEST).exists():
        raise ConfigError(
            "E-TOKENS-FINISHED",
            f"{out.parent} holds finished tokens of another corpus (other crawl files, sources, recipe or plug-ins)",
            rule="finished tokens are not overwritten: a run may be training on them",
            fix=f"choose another --out, or remove {out.parent}/tokens: the same command then replaces the corpus",
            path=str(out.parent),
        )
    if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "E-CORPUS-FOLDER",
            f"{out} exists and is not a corpus",
            rule="a build writes a new folder, or replaces an older corpus",
            fix="choose another --out",
            path=str(out),
        )


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Yield the folder for unfinished work: removed if the block ends without an error, else kept for the next call."""
    work = out.absolute().with_name(f".{out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    with exclusive(work, f"building {out}"):
        shutil.rmtree(work / "removed", ignore_errors=True)
        yield work
        # Renamed before it is removed: a process that is killed here must not leave half of a store.
        if (work / "store").exists():
            (work / "store").rename(work / "removed")
        shutil.rmtree(work)


@dataclass(frozen=True)
class _Build:
    inputs: Sequence[Input]
    recipe: DataRecipe
    identity: CorpusIdentity
    purged: Path | None
    against: Path | None
    store: Store
    runner: Runner
    report: ReportProgress

    def run(self, folder: Path, decides: dict[str, Any]) -> CorpusManifest:
        """Write the corpus into `folder`, the manifest last."""
        evaluation_sets = self._index_evaluation_sets(decides)
        processed = self._process_tasks(evaluation_sets, decides)
        results = self._run(processed, "reading", 0.0, _PROCESS_SHARE)
        decisions, seconds = find_duplicates(processed, self.recipe.dedup, self.against, self.store, self._compare)
        rules = self.recipe.substrings
        spans = find_repeated_spans(processed, decisions, rules, self.store, self._compare)
        seconds[SUBSTRINGS.name] += spans.seconds if spans else 0.0
        writing = [
            write_corpus_file.task(
                WriteCorpusFile(
                    source=one.source,
                    number=number,
                    input=processed[number].ref,
                    dropped=tuple(task.ref for task in decisions),
                    spans=spans.of(number, rules) if spans else None,
                ),
                one.name,
            )
            for number, one in enumerate(self.inputs)
        ]
        written = self._run(writing, "writing", _DUPLICATES_SHARE, 1 - _DUPLICATES_SHARE)
        for task in processed:
            own = json.loads((self.store.folder(task) / "seconds_by_stage.json").read_text())
            for stage, spent in own.items():
                seconds[stage] += spent
        index = self.store.folder(evaluation_sets) if evaluation_sets else None
        ran = what_ran(StageSettings(self.recipe, index, self.purged))
        manifest = CorpusManifest(
            inputs=self.identity.inputs,
            sources=self.identity.sources,
            config_sha256=self.identity.config_sha256,
            parts=tuple(one.kept for one in written if one.kept),
            dropped=tuple(one.dropped for one in written if one.dropped),
            lineage=tuple(one.lineage for one in written),
            funnel=funnel(sum(one.records for one in results), [one.drops for one in written], ran, seconds),
            recipe=written_recipe(self.recipe, self.inputs),
        )
        shutil.rmtree(folder, ignore_errors=True)  # left by a build that was stopped in this function
        folder.mkdir()
        for task in writing:
            for path in self.store.folder(task).glob("*-*"):
                (folder / path.name).hardlink_to(path)
        write_manifest(folder, manifest)
        return manifest

    def _run(self, tasks: Sequence[Task[R]], doing: str, start: float, share: float, unit: str = "files") -> list[R]:
        def watch(status: PhaseStatus) -> None:
            self.report(start + share * status.done / max(status.total, 1), f"{doing}: {describe(status, unit)}")

        return run_all(tasks, self.store, self.runner, watch)

    def _compare(self, tasks: Sequence[Task[R]], doing: str, /) -> list[R]:
        return self._run(tasks, doing, _PROCESS_SHARE, 0.0, "tasks")

    def _index_evaluation_sets(self, decides: dict[str, Any]) -> Task[EvaluationSetsIndex] | None:
        rules = self.recipe.decontamination
        if not rules.enabled or not rules.files:
            return None
        files = decides["files"][""]["decontamination"]
        task = index_evaluation_sets.task(IndexEvaluationSets(rules=rules, files=files), "evaluation sets")
        self._run([task], "indexing", 0.0, 0.0)
        return task

    def _process_tasks(
        self, evaluation_sets: Task[EvaluationSetsIndex] | None, decides: dict[str, Any]
    ) -> list[Task[InputResult]]:
        listed = PurgedList.load(self.purged).sha256 if self.purged else ""
        # None of these affects the corpus, and the code of plug-ins is in `libraries`.
        recipe = replace(self.recipe, remote=RemoteRules(), plugins=Plugins(), mixture={}, quarantine=QuarantineRules())
        return [
            process_input.task(
                ProcessInput(
                    name=one.name,
                    identity=self.identity.inputs[one.name],
                    input=replace(one, location=""),
                    recipe=recipe,
                    recipe_files=decides["files"],
                    libraries=code_beside_ingot(self.recipe, one),
                    purged_sha256=listed,
                    evaluation_sets=evaluation_sets.ref if evaluation_sets else None,
                    location=one.location,
                    stamp=stamp(one),
                    cache=self.store.root / "fetched",
                    remote=self.recipe.remote,
                    purged=self.purged,
                    plugins=self.recipe.plugins,
                    quarantine=self.recipe.quarantine,
                    filters=filters_on(recipe_of(self.recipe, one.source)),
                ),
                one.name,
            )
            for one in self.inputs
        ]


def _publish(folder: Path, out: Path, work: Path) -> None:
    """Move the finished `folder` to `out`; an older corpus is moved into `work`, which the caller removes."""
    old = work / "replaced"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    folder.rename(out)
    fsync_dir(out.absolute().parent)


def _not_empty(manifest: CorpusManifest, out: Path) -> CorpusManifest:
    """Return `manifest`, or raise DataError if its corpus has no document."""
    if manifest.parts:
        return manifest
    worst = most_dropped(manifest.funnel)[:3]
    records = manifest.funnel[0].documents_in
    if not worst:
        raise DataError(
            "E-INPUT-EMPTY",
            f"the crawl files hold no record ({', '.join(manifest.inputs)})",
            rule="a build reads at least one record",
            fix="give other files",
            inputs=list(manifest.inputs)[:5],
        )
    left_out = [text for text in cut_files(out) if text.startswith("left out: ")][:5]
    if left_out and {rule for rule, _ in worst} <= {"read.bad_input", "read.bad_row"}:  # rows of a wrong column
        raise DataError(
            "E-INPUT-UNREADABLE",
            "\n".join(text.removeprefix("left out: ") for text in left_out),
            rule=f"at least one record of the inputs can be read; none of {records:,} could",
            fix="correct what is named above, or give other files",
            inputs=list(manifest.inputs)[:5],
        )
    listed = ", ".join(f"{rule} {count:,}" for rule, count in worst)
    raise DataError(
        "E-CORPUS-EMPTY",
        "\n".join([f"none of {records:,} records is left; most were dropped by {listed}", *left_out]),
        rule="a corpus holds at least one document",
        fix=f"see them: ingot data inspect {out} --dropped-by {worst[0][0]}; then relax the recipe with --set",
        path=str(out),
        records=records,
        dropped_by=[rule for rule, _ in worst],
    )
