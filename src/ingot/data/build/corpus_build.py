"""Crawl files -> corpus folder: every document's fate, decided in the order of the inputs.

Tasks (execute/) take one input each through the stages that look at one document (curate.py). Further tasks decide, in
input order, what came before: URLs, equal texts, near-duplicates among what passed (duplicates.py), and write the parts
(parts.py). So the corpus does not depend on the runner or the number of workers, and what a task did is kept, by
content, until the corpus is finished: the same command after Ctrl-C or a crash goes on where it stopped.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config import from_dict, to_dict
from ingot.data.build.corpus import MANIFEST, cut_files, load_corpus, write_manifest
from ingot.data.build.curate import stamp
from ingot.data.build.duplicates import decide
from ingot.data.build.funnel import funnel, most_dropped, what_ran
from ingot.data.build.passages import find_spans
from ingot.data.build.recipe import DataRecipe, fingerprint
from ingot.data.dedup.index import INDEX
from ingot.data.lineage.purge.listed import LIST, PurgedList
from ingot.data.sources.input import Input, identity
from ingot.data.sources.remote import RemoteRules
from ingot.data.tasks.run import Inline, Runner, Status, describe, run_all
from ingot.data.tasks.task import Context, Store, Task
from ingot.errors import ConfigError, DataError, ResourceError
from ingot.schema.corpus import CorpusManifest, CorpusPart, LineagePart
from ingot.storage import canonical_json, exclusive, fsync_dir, require_free, sha256_bytes, sha256_file

Progress = Callable[[float, str], None]
_CURATE_SHARE, _DUPLICATES_SHARE = 0.85, 0.95  # of the time of a build, for the progress bar
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Identity:
    """What decides every byte of a corpus, besides the versions of ingot and of the libraries that read pages."""

    inputs: dict[str, str]  # name -> sha256, or another word that changes with a remote input
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
    progress: Progress | None = None,
) -> CorpusManifest:
    """Curate `inputs` by `recipe` (default: the preset `web`) into the corpus folder `out`; returns its manifest.

    A finished corpus of the same inputs and recipe is kept as it is; one of others is replaced when the new one is
    complete, or refused if not `replace`: tokens were made from it. purged: folder whose list says what may not come
    back (purge/listed.py). against: index of the documents that earlier builds kept (dedup/index.py): what is like
    them is dropped. progress(fraction, text) is called now and then. Inputs are taken in the order of their names,
    whatever the order of `inputs`.
    Raises ConfigError, ResourceError, RunBusyError; DataError for a file that is no crawl file, for one whose workers
    die again and again, and when nothing is left (`out` then holds the dropped documents, to be looked at).
    """
    recipe, report = recipe or DataRecipe(), progress or (lambda fraction, text: None)
    _check_inputs(inputs, recipe)
    inputs = sorted(inputs, key=lambda one: one.name)
    list_folder = str(purged.absolute()) if purged and (purged / LIST).exists() else ""
    with _work_folder(out) as work:
        begun, store, runner = any(work.iterdir()), Store(work / "store"), runner or Inline()
        try:
            identity, stored = corpus_identity(inputs, recipe, against, store, runner, report)
            if finished := find_corpus(out, identity):
                return _not_empty(finished, out)
            _check_out(out, replace)
            require_free(out, 3 * stored + _SPARE_BYTES, "building the corpus")
        except (ConfigError, ResourceError):
            if not begun:
                shutil.rmtree(work)
            raise
        manifest = _Build(inputs, recipe, identity, list_folder, against, store, runner, report).run(work / "corpus")
        _publish(work / "corpus", out, work)
    report(1.0, "corpus written")
    return _not_empty(manifest, out)


def corpus_identity(
    inputs: Sequence[Input],
    recipe: DataRecipe,
    against: Path | None,
    store: Store,
    runner: Runner,
    report: Progress,
) -> tuple[Identity, int]:
    """Hashes the inputs, each in a task. Also returns their bytes, as far as they are known.

    A build that goes on hashes local inputs again if their size or time changed, and asks every server again.
    """
    places = {"cache": str(store.root / "fetched"), "remote": to_dict(recipe.remote)}
    tasks = [
        Task(
            function="ingot.data.build.corpus_build:identify",
            arguments={"input": to_dict(one), "stamp": stamp(one)},
            places=places,
            label=one.name,
        )
        for one in inputs
    ]
    for one, task in zip(inputs, tasks, strict=True):
        if one.is_remote and store.finished(task) and "common_crawl" not in store.result(task):
            store.forget(task)
    found = run_all(tasks, store, runner, lambda status: report(0.0, f"hashing: {describe(status)}"))
    decides = fingerprint(recipe) | ({"against": sha256_file(against / INDEX)} if against else {})
    identity = Identity(
        inputs={one.name: version.get("sha256") or canonical_json(version) for one, version in _pairs(inputs, found)},
        sources={one.name: one.source for one in inputs},
        config_sha256=sha256_bytes(canonical_json(decides).encode()),
    )
    return identity, sum(max(version["bytes"], 0) for version in found)  # -1 where a server does not say


def identify(context: Context) -> dict:
    """Task: what changes when the content of an input does. arguments: input, stamp. places: cache, remote."""
    places = context.task.places
    rules = from_dict(RemoteRules, places["remote"])
    return identity(from_dict(Input, context.task.arguments["input"]), Path(places["cache"]), rules)


def _pairs(inputs: Sequence[Input], found: list[dict]) -> Iterator[tuple[Input, dict]]:
    return zip(inputs, found, strict=True)


def find_corpus(out: Path, identity: Identity) -> CorpusManifest | None:
    """The manifest of the corpus in `out` if exactly `identity` made it."""
    if not (out / MANIFEST).exists():
        return None
    found = load_corpus(out)
    return found if Identity(found.inputs, found.sources, found.config_sha256) == identity else None


def _check_inputs(inputs: Sequence[Input], recipe: DataRecipe) -> None:
    if not inputs:
        raise ConfigError("no crawl files given", fix="ingot data build FILES... --out DIR")
    names = Counter(one.name for one in inputs)
    sources = sorted({one.source for one in inputs})
    for name in recipe.source:
        if name not in sources:
            close = difflib.get_close_matches(name, sources, n=1)
            raise ConfigError(
                f"the recipe has rules for a source {name!r}, and no input is of it",
                rule=f"the sources of this build are {', '.join(sources)}",
                fix=f"did you mean {close[0]!r}?" if close else "name its inputs with --source, or leave the rules out",
            )
    for one in inputs:
        if not one.is_remote and not Path(one.location).exists():
            raise ConfigError(f"no crawl file at {one.location}", fix="check its name")
        if names[one.name] > 1:
            raise ConfigError(
                f"{names[one.name]} inputs are called {one.name}",
                rule="document ids are made from the file's base name, so it must be unique",
                fix="give each file once, or rename one",
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one.source) or one.source == "dropped":
            raise ConfigError(
                f"{one.source!r} cannot name a source",
                rule="letters, digits, '_', '.' and '-', beginning with a letter or digit; not 'dropped'",
            )


def _check_out(out: Path, replace: bool) -> None:
    if not replace and (out / MANIFEST).exists():
        raise ConfigError(
            f"{out.parent} holds finished tokens of another corpus (other crawl files, sources or recipe)",
            rule="finished tokens are not overwritten: a run may be training on them",
            fix=f"choose another --out, or remove {out} and {out.parent}/tokens first",
        )
    if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not a corpus",
            rule="a build writes a new folder, or replaces an older corpus",
            fix="choose another folder",
        )


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` for what is unfinished: removed when the block ends well, else kept for the next try."""
    work = out.absolute().with_name(f".{out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    with exclusive(work, f"building {out}"):
        shutil.rmtree(work / "removed", ignore_errors=True)
        yield work
        # It has many files: who stops here must not leave half of them where they count.
        if (work / "store").exists():
            (work / "store").rename(work / "removed")
        shutil.rmtree(work)


@dataclass(frozen=True)
class _Build:
    inputs: Sequence[Input]
    recipe: DataRecipe
    identity: Identity
    purged: str
    against: Path | None
    store: Store
    runner: Runner
    report: Progress

    def run(self, folder: Path) -> CorpusManifest:
        """Everything into `folder`, the manifest last."""
        decides = fingerprint(self.recipe)  # once: it hashes word lists and models
        listed = PurgedList.load(Path(self.purged)).sha256 if self.purged else ""
        index = self._contamination_index(decides)
        curated = [self._curate_task(one, index, decides, listed) for one in self.inputs]
        results = self._all(curated, "reading", 0.0, _CURATE_SHARE)
        deciding, seconds = decide(curated, self.recipe.dedup, self.against, self.store, self._compare)
        spans = find_spans(curated, deciding, self.recipe.substrings, self.store, self._compare)
        seconds["substrings"] += spans.seconds
        common = {"fates": len(deciding), "substrings": to_dict(self.recipe.substrings)}
        writing = [
            Task(
                function="ingot.data.build.parts:write_parts",
                arguments={"source": one.source, "number": number} | common,
                inputs=(curated[number].key, *(task.key for task in deciding), *spans.of(number)),
                label=one.name,
            )
            for number, one in enumerate(self.inputs)
        ]
        parts = self._all(writing, "writing", _DUPLICATES_SHARE, 1 - _DUPLICATES_SHARE)
        for task in curated:
            own = json.loads((self.store.folder(task.key) / "seconds_by_stage.json").read_text())
            for stage, spent in own.items():
                seconds[stage] += spent
        ran = what_ran(self.recipe, index=self.store.folder(index.key) if index else None, purged=self.purged)
        manifest = CorpusManifest(
            inputs=self.identity.inputs,
            sources=self.identity.sources,
            config_sha256=self.identity.config_sha256,
            parts=tuple(from_dict(CorpusPart, one["kept"]) for one in parts if one["kept"]),
            dropped=tuple(from_dict(CorpusPart, one["dropped"]) for one in parts if one["dropped"]),
            lineage=tuple(from_dict(LineagePart, one["lineage"]) for one in parts),
            funnel=funnel(sum(results), [one["drops"] for one in parts], ran, seconds),
            recipe=to_dict(self.recipe),
        )
        shutil.rmtree(folder, ignore_errors=True)  # of a build that was stopped here
        folder.mkdir()
        for task in writing:
            for path in self.store.folder(task.key).glob("*-*"):
                (folder / path.name).hardlink_to(path)
        write_manifest(folder, manifest)
        return manifest

    def _all(self, tasks: Sequence[Task], doing: str, start: float, share: float, unit: str = "files") -> list[Any]:
        def watch(status: Status) -> None:
            self.report(start + share * status.done / max(status.total, 1), f"{doing}: {describe(status, unit)}")

        return run_all(tasks, self.store, self.runner, watch)

    def _compare(self, tasks: Sequence[Task], doing: str) -> list[Any]:
        return self._all(tasks, doing, _CURATE_SHARE, 0.0, "tasks")

    def _contamination_index(self, decides: dict[str, Any]) -> Task | None:
        rules = self.recipe.decontamination
        if not rules.enabled or not rules.files:
            return None
        arguments = {"rules": to_dict(rules), "files": decides["files"][""]["decontamination"]}
        task = Task(
            function="ingot.data.build.corpus_build:contamination_index", arguments=arguments, label="evaluation sets"
        )
        self._all([task], "indexing", 0.0, 0.0)
        return task

    def _curate_task(self, one: Input, index: Task | None, decides: dict[str, Any], listed: str) -> Task:
        how = to_dict(one)
        location = how.pop("location")
        arguments = {
            "name": one.name,
            "identity": self.identity.inputs[one.name],
            "input": how,
            "decides": decides,
            "libraries": _libraries(),
            "purged": listed,
        }
        places = {
            "location": location,
            "stamp": stamp(one),
            "cache": str(self.store.root / "fetched"),
            "remote": to_dict(self.recipe.remote),
            "purged": self.purged,
        }
        inputs = (index.key,) if index else ()
        return Task(
            function="ingot.data.build.curate:curate", arguments=arguments, inputs=inputs, places=places, label=one.name
        )


@functools.cache
def _libraries() -> dict[str, str]:
    """Versions of what else decides how a page reads: a build that goes on after an update is not made of two."""
    found = {}
    for name in ("fastwarc", "resiliparse", "trafilatura", "lxml", "spacy", "pyarrow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def contamination_index(context: Context) -> None:
    """Task: the n-grams of the evaluation sets."""
    from ingot.data.decontaminate import DecontaminationRules, build_index

    build_index(from_dict(DecontaminationRules, context.task.arguments["rules"]), context.out)


def _publish(folder: Path, out: Path, work: Path) -> None:
    """Put the finished `folder` in the place of `out`; an older corpus there is moved away first, then removed."""
    old = work / "replaced"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    folder.rename(out)
    fsync_dir(out.absolute().parent)


def _not_empty(manifest: CorpusManifest, out: Path) -> CorpusManifest:
    if manifest.parts:
        return manifest
    worst = most_dropped(manifest.funnel)[:3]
    records = manifest.funnel[0].documents_in
    if not worst:
        raise DataError(f"the crawl files hold no record ({', '.join(manifest.inputs)})", fix="give other files")
    if worst[0][1] == records and worst[0][0] == "read.bad_input":
        warnings = [text.removeprefix("left out: ") for text in cut_files(out)]
        raise DataError(
            "\n".join(warnings[:5]), rule=f"none of {records:,} inputs could be read", fix="give other files"
        )
    listed = ", ".join(f"{rule} {count:,}" for rule, count in worst)
    raise DataError(
        f"none of {records:,} records is left; most were dropped by {listed}",
        rule="a corpus holds at least one document",
        fix=f"see them: ingot data inspect {out} --dropped-by {worst[0][0]}; then relax the recipe with --set",
    )
