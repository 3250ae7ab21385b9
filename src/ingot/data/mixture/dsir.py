"""DSIR: select the documents of a corpus that are most similar to a target, by hashed n-grams (Xie et al. 2023,
arXiv:2302.03169).

A text is a bag of unigrams and bigrams, hashed to 10,000 buckets. The bucket frequencies of the target and of the
corpus give each document a log importance weight: the sum over its features of log p_target - log p_corpus. With Gumbel
noise added (Kool et al. 2019), the k largest keys are a sample without replacement in proportion to the weights.

The corpus is read twice, document by document. In between, features are in a file, 2 bytes each; memory use is about
60 bytes per document.
"""

import math
import re
import shutil
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from ingot.config import to_dict
from ingot.data.build.corpus import MANIFEST, json_line, jsonl_writer, load_corpus, read_documents, write_manifest
from ingot.data.classify.make import read_texts
from ingot.data.lineage.records import RECORD_COLUMNS, read_lineage, write_rows
from ingot.errors import ConfigError, DataError
from ingot.rng import derive
from ingot.schema.corpus import CorpusManifest, CorpusPart, FunnelStage, LineagePart
from ingot.storage import canonical_json, require_free, sha256_bytes, sha256_file, write_json

IMPORTANCE, SUMMARY, CORPUS = "importance.jsonl.gz", "dsir.json", "corpus"
_TOKEN = re.compile(r"\w+|[^\w\s]+")
_REMEMBERED_WORDS = 1 << 20
_CHUNK_FEATURES = 1 << 22
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class DsirRules:
    """Settings of DSIR. buckets: number of hash buckets, by default as in the paper. smoothing: added to each bucket's
    count.

    min_words: documents with fewer words are never chosen. A sum over few features is near 0; in a corpus mostly unlike
    the target, that would rank an empty document above nearly all others. seed: seed of the noise. A document's noise
    depends only on the seed and its id.
    """

    buckets: int = 10_000
    smoothing: float = 1.0
    min_words: int = 50
    seed: int = 1234

    def problems(self):
        if not 2 <= self.buckets <= 1 << 16:
            yield "buckets", f"is {self.buckets}, must be in [2, 65536]"
        if not 0 < self.smoothing < float("inf"):
            yield "smoothing", f"is {self.smoothing}, must be positive"
        if self.min_words < 0:
            yield "min_words", f"is {self.min_words}, must be at least 0"


class Features:
    """Computes the hashed features of texts: lower-case words and runs of punctuation, and adjacent pairs of them."""

    def __init__(self, buckets: int):
        self.buckets = buckets
        self._hashes = _Hashes()

    def __call__(self, text: str) -> np.ndarray:
        """Return the buckets of the features, uint16 [2 * words - 1], unigrams first; empty for a text without
        words."""
        words = _TOKEN.findall(text.lower())
        hashes = np.fromiter(map(self._hashes.__getitem__, words), np.uint64, len(words))
        # SplitMix64's constants, two different odd numbers, so that (a, b) and (b, a) get different hashes.
        pairs = hashes[:-1] * np.uint64(0x9E3779B97F4A7C15) + hashes[1:] * np.uint64(0xBF58476D1CE4E5B9)
        found = np.concatenate([hashes, pairs >> np.uint64(32)]) % np.uint64(self.buckets)
        return found.astype(np.uint16)


class _Hashes(dict):
    """A cache of the CRC-32 of each word's UTF-8. The cache is emptied when it grows large."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _REMEMBERED_WORDS:
            self.clear()
        value = self[word] = zlib.crc32(word.encode("utf-8", "surrogatepass"))
        return value


def log_frequencies(counts: np.ndarray, smoothing: float) -> np.ndarray:
    """Return the log of each bucket's smoothed share, float64; the shares add up to one."""
    smooth = counts + smoothing
    return np.log(smooth) - math.log(smooth.sum())


def gumbel(seed: int, identity: str) -> float:
    """Return standard Gumbel noise for one document, which depends only on the seed and the document's id."""
    uniform = (derive(seed, "dsir", identity) + 0.5) / 2**63
    return -math.log(-math.log(uniform))


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The log importance weight of each document, and which documents are chosen. Both arrays, float64 [documents]
    and bool [documents], are in the order of the corpus."""

    log_weights: np.ndarray
    chosen: np.ndarray


def importance(
    documents: Iterable[tuple[str, str]],
    target: np.ndarray,
    keep: int,
    rules: DsirRules,
    scratch: IO[bytes],
) -> Importance:
    """Return the weights of `documents` (id, text), and which `keep` of them are chosen.

    target: counts of the target's features, [buckets]. scratch: an empty file for the documents' features. Raises
    ConfigError if fewer than `keep` documents have `min_words` words.
    """
    features = Features(rules.buckets)
    lengths, noise, counts = array("q"), array("d"), np.zeros(rules.buckets, np.int64)
    for identity, text in documents:
        found = features(text)
        counts += np.bincount(found, minlength=rules.buckets)
        scratch.write(found.data)
        lengths.append(len(found))
        noise.append(gumbel(rules.seed, identity))
    sizes = np.array(lengths, np.int64)
    long_enough = sizes >= 2 * rules.min_words - 1
    if not 0 < keep <= (count := int(long_enough.sum())):
        raise ConfigError(
            "E-DSIR-KEEP",
            f"{keep:,} documents are to be kept, but {count:,} have at least {rules.min_words} words",
            rule="keep is at least 1, and at most the number of documents that are long enough",
            fix="lower --keep, or lower min_words",
            keep=keep,
            documents=count,
            min_words=rules.min_words,
        )
    table = log_frequencies(target, rules.smoothing) - log_frequencies(counts, rules.smoothing)
    log_weights = _sums(scratch, sizes, table)
    keys = np.where(long_enough, log_weights + np.array(noise), -np.inf)
    chosen = np.zeros(len(keys), bool)
    chosen[np.argsort(-keys, kind="stable")[:keep]] = True
    return Importance(log_weights=log_weights, chosen=chosen)


def _sums(scratch: IO[bytes], lengths: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the sum of table[feature] over each document's features, float64 [documents].

    Reads `scratch` in pieces of whole documents. lengths: number of features of each document.
    """
    scratch.flush()
    scratch.seek(0)
    ends, sums, first = np.cumsum(lengths), np.zeros(len(lengths)), 0
    while first < len(lengths):
        begin = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, begin + _CHUNK_FEATURES, side="right")), first + 1)
        values = table[np.frombuffer(scratch.read(2 * (int(ends[stop - 1]) - begin)), np.uint16)]
        running = np.concatenate([[0.0], np.cumsum(values)])
        sums[first:stop] = running[ends[first:stop] - begin] - running[ends[first:stop] - lengths[first:stop] - begin]
        first = stop
    return sums


@dataclass(frozen=True, kw_only=True)
class SourceChoice:
    """The counts of one source. mean_log_weight: mean over all documents of the source, chosen or not."""

    source: str
    documents: int
    chosen: int
    text_bytes: int
    chosen_text_bytes: int
    mean_log_weight: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selection, as written to dsir.json. target: the SHA-256 of each file. weights: each source's share of the
    chosen text in bytes."""

    corpus_sha256: str
    target: dict[str, str]
    rules: DsirRules
    documents: int
    chosen: int
    sources: tuple[SourceChoice, ...]
    weights: dict[str, float]


def select(
    corpus: Path,
    target: Sequence[Path],
    keep: int,
    out: Path,
    rules: DsirRules | None = None,
    *,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Selection:
    """Choose `keep` documents of the folder `corpus` that are similar to the texts in `target`; write the folder `out`.

    out/importance.jsonl.gz  id, source, log_weight and chosen of every document, in the order of the corpus
    out/corpus/              a corpus of the chosen documents with their lineage, ready to be tokenized; its funnel has
                             the additional row `dsir`
    out/dsir.json            the Selection

    target: files or corpus folders (see classify.make.read_texts). Raises ConfigError if `out` exists or a rule is
    invalid, DataError for an unusable target or corpus.
    """
    rules, say = rules or DsirRules(), progress or (lambda fraction, text: None)
    for name, problem in rules.problems():
        raise ConfigError(
            "E-DSIR-SETTING",
            f"{name} {problem}",
            rule="every setting of DSIR is within its bounds",
            fix=f"change {name}",
            name=name,
        )
    if out.exists():
        raise ConfigError(
            "E-DSIR-EXISTS",
            f"{out} exists",
            rule="a selection is written to a new folder",
            fix="name another folder with --out",
            path=str(out),
        )
    manifest = load_corpus(corpus)
    text_bytes, documents = sum(p.text_bytes for p in manifest.parts), sum(p.documents for p in manifest.parts)
    require_free(out, 2 * text_bytes, "choosing documents")
    counts = _target_counts(target, rules, text_field)
    work = out.with_name(f".{out.name}.work")
    shutil.rmtree(work, ignore_errors=True)  # left by a selection that was killed
    work.mkdir(parents=True)

    def documents_of_corpus() -> Iterator[tuple[str, str]]:
        for number, (_, row) in enumerate(read_documents(corpus)):
            say(0.7 * number / documents, "weights")
            yield row["id"], row["text"]

    with tempfile.TemporaryFile(dir=work) as scratch:
        found = importance(documents_of_corpus(), counts, keep, rules, scratch)
    choices, parts = _write(corpus, manifest, found, work, lambda n: say(0.7 + 0.3 * n / documents, "chosen ones"))
    chosen_bytes = sum(one.chosen_text_bytes for one in choices)
    selection = Selection(
        corpus_sha256=sha256_file(corpus / MANIFEST),
        target={str(path): sha256_file(path / MANIFEST if path.is_dir() else path) for path in target},
        rules=rules,
        documents=documents,
        chosen=keep,
        sources=tuple(choices),
        weights={one.source: one.chosen_text_bytes / max(chosen_bytes, 1) for one in choices if one.chosen},
    )
    lineage = _write_lineage(corpus, manifest, found.chosen, work / CORPUS)
    write_manifest(work / CORPUS, _manifest(manifest, selection, parts, lineage))
    write_json(work / SUMMARY, to_dict(selection))
    work.rename(out)
    return selection


def _target_counts(target: Sequence[Path], rules: DsirRules, text_field: str) -> np.ndarray:
    features, counts = Features(rules.buckets), np.zeros(rules.buckets, np.int64)
    for path in target:
        for text in read_texts(path, text_field):
            counts += np.bincount(features(text), minlength=rules.buckets)
    if not counts.any():
        raise DataError(
            "E-DSIR-TARGET",
            "the target has no words",
            rule="DSIR needs texts of the wanted kind to compare with",
            fix="name files or corpus folders with text as the target",
            target=[str(path) for path in target],
        )
    return counts


def _write(
    corpus: Path, manifest: CorpusManifest, found: Importance, out: Path, say: Callable[[int], None]
) -> tuple[list[SourceChoice], list[CorpusPart]]:
    """Write the importance file and the parts of the chosen corpus; return the counts of each source and the parts."""
    (out / CORPUS).mkdir()
    tallies: dict[str, Counter[str]] = {}
    weight_sums: dict[str, float] = {}
    parts, number = [], 0
    with jsonl_writer(out / IMPORTANCE) as write_importance:
        documents: Iterator[tuple[str, dict]] = read_documents(corpus, verify=False)  # verified in the first pass
        for part in manifest.parts:
            path, sizes = out / CORPUS / part.name, []
            with jsonl_writer(path) as write_document:
                for _ in range(part.documents):
                    source, row = next(documents)
                    weight, chosen = float(found.log_weights[number]), bool(found.chosen[number])
                    size = len(row["text"].encode("utf-8", "surrogatepass"))
                    tally = tallies.setdefault(source, Counter())
                    tally.update({"documents": 1, "text_bytes": size})
                    weight_sums[source] = weight_sums.get(source, 0.0) + weight
                    if chosen:
                        tally.update({"chosen": 1, "chosen_text_bytes": size})
                        write_document(json_line(row))
                        sizes.append(size)
                    write_importance(
                        json_line({"id": row["id"], "source": source, "log_weight": round(weight, 4), "chosen": chosen})
                    )
                    number += 1
                    say(number)
            if not sizes:
                path.unlink()
                continue
            parts.append(
                CorpusPart(
                    name=part.name,
                    source=part.source,
                    documents=len(sizes),
                    text_bytes=sum(sizes),
                    sha256=sha256_file(path),
                )
            )
    choices = [
        SourceChoice(
            source=source,
            documents=tally["documents"],
            chosen=tally["chosen"],
            text_bytes=tally["text_bytes"],
            chosen_text_bytes=tally["chosen_text_bytes"],
            mean_log_weight=weight_sums[source] / tally["documents"],
        )
        for source, tally in sorted(tallies.items())
    ]
    return choices, parts


def _write_lineage(corpus: Path, manifest: CorpusManifest, chosen: np.ndarray, out: Path) -> list[LineagePart]:
    """Write the lineage of the chosen documents, with their new rows. chosen: bool [documents], in corpus order."""
    cuts = np.cumsum([part.documents for part in manifest.parts])[:-1]
    of_part = dict(zip([part.name for part in manifest.parts], np.split(chosen, cuts), strict=True))
    new_row = {name: np.cumsum(mine) - 1 for name, mine in of_part.items()}
    written = []
    for entry in manifest.lineage:
        rows = (
            row | {"row": int(new_row[row["part"]][row["row"]])}
            for row in read_lineage(corpus / entry.name)
            if row["part"] and of_part[row["part"]][row["row"]]
        )
        if records := write_rows(out / entry.name, rows, RECORD_COLUMNS):
            written.append(LineagePart(name=entry.name, records=records, sha256=sha256_file(out / entry.name)))
        else:
            (out / entry.name).unlink()
    return written


def _manifest(
    manifest: CorpusManifest, selection: Selection, parts: list[CorpusPart], lineage: list[LineagePart]
) -> CorpusManifest:
    """Return the manifest of the chosen corpus: that of the whole corpus with the new parts and lineage, and with this
    selection as a stage of the funnel.

    The records of dropped documents are left out; the whole corpus has them.
    """
    stage = FunnelStage(
        name="dsir",
        ran=f"{selection.rules.buckets:,} buckets, like {', '.join(Path(name).name for name in selection.target)}",
        documents_in=selection.documents,
        documents_out=selection.chosen,
        dropped={"dsir.not_chosen": selection.documents - selection.chosen},
    )
    settings = [manifest.config_sha256, to_dict(selection.rules), selection.target, selection.chosen]
    return replace(
        manifest,
        config_sha256=sha256_bytes(canonical_json(settings).encode()),
        parts=tuple(parts),
        funnel=(*manifest.funnel, stage),
        dropped=(),
        lineage=tuple(lineage),
    )
