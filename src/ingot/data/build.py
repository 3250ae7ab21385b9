"""Crawl files -> corpus folder: every document's fate, decided in the order of the inputs.

Workers take one crawl file each through the stages that look at one document (curate.py). This process then decides,
in input order, what came before: URLs, then near-duplicates among what passed. Workers write the parts. So the corpus
does not depend on the number of workers, and what a file gave is kept, by content, until the corpus is finished: the
same command after Ctrl-C or a crash goes on where it stopped.
"""

import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot import __version__
from ingot.config import to_dict
from ingot.data.corpus import MANIFEST, load_corpus, write_manifest
from ingot.data.curate import DONE, URL, Classifier, Curated, CurateTask, curate
from ingot.data.dedup.lsh import near_duplicates
from ingot.data.dedup.minhash import shingles
from ingot.data.funnel import funnel, most_dropped, what_ran
from ingot.data.parts import WriteTask, write_parts
from ingot.data.recipe import DataRecipe
from ingot.data.toxicity import classifier_name
from ingot.data.url import UrlDuplicates
from ingot.data.workers import run_tasks
from ingot.errors import ConfigError, DataError
from ingot.schema.corpus import CorpusManifest
from ingot.schema.document import Drop
from ingot.storage import canonical_json, exclusive, fsync_dir, require_free, sha256_bytes, sha256_file

Progress = Callable[[float, str], None]
_CURATE_SHARE = 0.9  # of the time of a build, for the progress bar
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Input:
    """A crawl file, and the name under which weights and evaluation know what comes from it."""

    path: Path
    source: str = "web"


@dataclass
class _File:
    """A curated input. `overrides`: line number -> the drop that build.py decided on instead of the worker's fate."""

    curated: Curated
    source: str
    overrides: dict[int, Drop] = field(default_factory=dict)


def build_corpus(
    inputs: Sequence[Input],
    out: Path,
    recipe: DataRecipe | None = None,
    *,
    workers: int = 1,
    classifier: Classifier | None = None,
    progress: Progress | None = None,
) -> CorpusManifest:
    """Curate `inputs` by `recipe` (default: the preset `web`) into the corpus folder `out`; returns its manifest.

    A finished corpus of the same inputs and recipe is kept as it is; one of others is replaced when the new one is
    complete. classifier: text -> toxicity score, see toxicity.py. progress(fraction, text) is called now and then.
    Files are taken in the order of their names, whatever the order of `inputs`.
    Raises ConfigError, ResourceError, RunBusyError; DataError for a file that is no crawl file, for one whose worker
    dies twice, and when nothing is left (`out` then holds the dropped documents, to be looked at).
    """
    recipe = recipe or DataRecipe()
    _check_inputs(inputs)
    inputs = sorted(inputs, key=lambda one: one.path.name)
    identity = corpus_identity(inputs, recipe, classifier)
    if finished := find_corpus(out, identity):
        return _not_empty(finished, out)
    _check_out(out)
    stored = sum(i.path.stat().st_size for i in inputs)
    require_free(out, 3 * stored + _SPARE_BYTES, "building the corpus")
    with _work_folder(out) as work:
        manifest = _build(
            inputs, work, recipe, identity, workers, classifier, progress or (lambda fraction, text: None)
        )
        _publish(work / "corpus", out, work)
    return _not_empty(manifest, out)


@dataclass(frozen=True)
class Identity:
    """What decides every byte of a corpus, besides ingot's version."""

    inputs: dict[str, str]  # base name -> sha256
    sources: dict[str, str]  # base name -> source
    config_sha256: str


def corpus_identity(inputs: Sequence[Input], recipe: DataRecipe, classifier: Classifier | None) -> Identity:
    plugged = {"classifier": classifier_name(classifier)} if classifier else {}
    return Identity(
        inputs={i.path.name: sha256_file(i.path) for i in inputs},
        sources={i.path.name: i.source for i in inputs},
        config_sha256=sha256_bytes(canonical_json(to_dict(recipe) | plugged).encode()),
    )


def find_corpus(out: Path, identity: Identity) -> CorpusManifest | None:
    """The manifest of the corpus in `out` if exactly `identity` made it."""
    if not (out / MANIFEST).exists():
        return None
    found = load_corpus(out)
    return found if Identity(found.inputs, found.sources, found.config_sha256) == identity else None


def _check_inputs(inputs: Sequence[Input]) -> None:
    if not inputs:
        raise ConfigError("no crawl files given", fix="ingot data build FILES... --out DIR")
    names = Counter(i.path.name for i in inputs)
    for one in inputs:
        if one.path.is_dir():
            raise ConfigError(
                f"{one.path} is a folder",
                rule="inputs are WARC or WET files, plain or gzip",
                fix=f"name its files: {one.path}/*.warc.gz",
            )
        if not one.path.is_file():
            raise ConfigError(f"no crawl file at {one.path}", rule="inputs are WARC or WET files, plain or gzip")
        if not one.path.stat().st_size:
            raise ConfigError(
                f"{one.path} is empty", rule="a crawl file holds records", fix="fetch it again, or leave it out"
            )
        if names[one.path.name] > 1:
            raise ConfigError(
                f"{names[one.path.name]} inputs are called {one.path.name}",
                rule="document ids are made from the file's base name, so it must be unique",
                fix="give each file once, or rename one",
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one.source) or one.source == "dropped":
            raise ConfigError(
                f"{one.source!r} cannot name a source",
                rule="letters, digits, '_', '.' and '-', beginning with a letter or digit; not 'dropped'",
            )


def _check_out(out: Path) -> None:
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
        yield work
        shutil.rmtree(work)


def _build(inputs, work: Path, recipe, identity: Identity, workers: int, classifier, progress) -> CorpusManifest:
    """Everything into work/corpus, the manifest last."""
    tasks = [_curate_task(one, work, recipe, identity, classifier) for one in inputs]
    total = sum(i.path.stat().st_size for i in inputs)
    missing = [task for task in tasks if not (task.folder / DONE).exists()]

    def curating(done: int, documents: int) -> None:
        finished = sum(t.path.stat().st_size for t in tasks) - sum(t.path.stat().st_size for t in missing[done:])
        text = f"{documents:,} records, {len(tasks) - len(missing) + done} of {len(tasks)} files"
        progress(_CURATE_SHARE * finished / max(total, 1), text)

    run_tasks(curate, missing, workers=workers, progress=curating)
    files = [_File(Curated(task.folder), task.source) for task in tasks]
    started = time.process_time()
    _drop_seen_urls(files)
    url_seconds, started = time.process_time() - started, time.process_time()
    if recipe.dedup.enabled:
        progress(_CURATE_SHARE, "near-duplicates")
        _drop_near_duplicates(files, recipe)
    parent_seconds = {"url": url_seconds, "near_duplicates": time.process_time() - started}
    folder = work / "corpus"
    shutil.rmtree(folder, ignore_errors=True)  # of a build that was stopped here
    folder.mkdir()
    write_tasks = [
        WriteTask(file.curated.folder, number, file.source, file.overrides, folder) for number, file in enumerate(files)
    ]
    parts = run_tasks(write_parts, write_tasks, workers=workers, progress=lambda done, documents: None)
    manifest = CorpusManifest(
        inputs=identity.inputs,
        sources=identity.sources,
        config_sha256=identity.config_sha256,
        parts=tuple(kept for kept, _ in parts if kept),
        dropped=tuple(dropped for _, dropped in parts if dropped),
        funnel=funnel([(file.curated, file.overrides) for file in files], what_ran(recipe, classifier), parent_seconds),
    )
    write_manifest(folder, manifest)
    progress(1.0, "corpus written")
    return manifest


def _curate_task(one: Input, work: Path, recipe: DataRecipe, identity: Identity, classifier) -> CurateTask:
    """The key names all that a file's result depends on, ingot's version included, so that a stale one is not used."""
    name = one.path.name
    key = sha256_bytes(
        canonical_json([name, identity.inputs[name], one.source, identity.config_sha256, __version__]).encode()
    )
    return CurateTask(one.path, one.source, work / f"file-{key[:24]}", recipe, classifier)


def _drop_seen_urls(files: list[_File]) -> None:
    """Of pages with one canonical URL the first stays, whatever later stages make of it."""
    seen = UrlDuplicates()
    for file in files:
        reached = np.flatnonzero(file.curated.index["stage"] >= URL)
        for number, url in zip(reached.tolist(), file.curated.urls(), strict=True):
            if seen.seen(url) and file.curated.index["stage"][number] != URL:
                file.overrides[number] = Drop("url", "url.duplicate", url[:300])


def _drop_near_duplicates(files: list[_File], recipe: DataRecipe) -> None:
    candidates: list[tuple[_File, int]] = []
    signatures = [np.zeros((0, recipe.dedup.permutations), np.uint32)]
    for file in files:
        passed = file.curated.passed
        stays = np.array([number not in file.overrides for number in passed.tolist()], bool)
        signatures.append(file.curated.signatures()[stays])
        candidates += [(file, number) for number in passed[stays].tolist()]

    def shingle_set(candidate: int) -> np.ndarray:
        file, number = candidates[candidate]
        return np.unique(shingles(file.curated.row(number)["text"], recipe.dedup.ngram))

    for candidate, found in near_duplicates(np.concatenate(signatures), shingle_set, recipe.dedup).items():
        file, number = candidates[candidate]
        like_file, like_number = candidates[found.like]
        rule = "near_duplicates.same_text" if found.jaccard == 1 else "near_duplicates.similar"
        value = f"{found.jaccard:.3f} with {like_file.curated.row(like_number)['id']}"
        file.overrides[number] = Drop("near_duplicates", rule, value)


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
    listed = ", ".join(f"{rule} {count:,}" for rule, count in worst)
    raise DataError(
        f"none of {records:,} records is left; most were dropped by {listed}",
        rule="a corpus holds at least one document",
        fix=f"see them: ingot data inspect {out} --dropped-by {worst[0][0]}; then relax the recipe with --set",
    )
