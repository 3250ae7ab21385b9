"""Write the files of a corpus that come from one input: kept documents, dropped documents, and the lineage of both.

Before that, two kinds of tasks find spans of text that occur earlier in the corpus (dedup/substrings.py), without the
documents that are dropped as duplicates:

    write_windows    per input      hashes of the runs of `SubstringRules.words` words in the documents left
    mark_repeated    per partition  marks of the runs that occur earlier in the corpus
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ingot.data.build.corpus import json_line, jsonl_writer
from ingot.data.build.duplicate_decisions import DroppedRows, DuplicateDecisions, ProcessedInputs, drop_of
from ingot.data.build.process_input import InputResult, dropped_row
from ingot.data.build.stages import SUBSTRINGS
from ingot.data.dedup import substrings
from ingot.data.dedup.substrings import SubstringRules
from ingot.data.lineage.records import write_lineage
from ingot.data.sources.url import canonical_url
from ingot.data.tasks.run import RunTasks
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import Attempt, Task, TaskGroup, TaskRef, task_function
from ingot.schema.corpus import CorpusPart, LineagePart
from ingot.storage import sha256_file

_BYTES_PER_WORD = 4  # below the average of any language, so that partitions are too small rather than too large


@dataclass(frozen=True, kw_only=True)
class WriteWindows:
    """Settings of `write_windows`. number: the number of the input. dropped: all decisions about duplicates."""

    number: int
    input: TaskRef[InputResult]
    dropped: tuple[TaskRef[DuplicateDecisions], ...]
    rules: SubstringRules
    partitions: int


@dataclass(frozen=True)
class RunsOfWords:
    """The result for one input: the number of runs of `SubstringRules.words` words."""

    runs: int


@task_function("write_windows")
def write_windows(specification: WriteWindows, attempt: Attempt) -> RunsOfWords:
    """Write the hashes of all runs of words in the input's remaining documents, grouped by partition of the hashes."""
    inputs = ProcessedInputs({specification.number: specification.input}, DroppedRows(specification.dropped))

    def texts() -> Iterator[str]:
        for number, text in enumerate(inputs.texts_left(specification.number)):
            attempt.at(number)
            yield text
        attempt.at(-1)

    return RunsOfWords(substrings.write_windows(texts(), specification.rules, specification.partitions, attempt.out))


@dataclass(frozen=True, kw_only=True)
class MarkRepeated:
    partition: int
    windows: TaskGroup[RunsOfWords]


@dataclass(frozen=True)
class RepeatedRuns:
    """The result for one partition: the number of runs of words that occur earlier in the corpus."""

    runs: int


@task_function("mark_repeated")
def mark_repeated(specification: MarkRepeated, attempt: Attempt) -> RepeatedRuns:
    """Write a bit for each run of words of one partition: 1 if the run occurs earlier in the corpus."""
    with attempt.beating():
        folders = specification.windows.folders
        return RepeatedRuns(substrings.mark_repeated(specification.partition, folders, attempt.out))


@dataclass(frozen=True)
class RepeatedSpansTasks:
    """The finished tasks that found repeated spans. windows: one per input. marked: one per partition."""

    windows: Sequence[Task[RunsOfWords]]
    marked: TaskGroup[RepeatedRuns]
    seconds: float

    def of(self, number: int, rules: SubstringRules) -> "SpansOfInput":
        """Return the references that `write_corpus_file` needs to cut repeated spans out of input `number`."""
        return SpansOfInput(rules=rules, windows=self.windows[number].ref, marked=self.marked)


@dataclass(frozen=True, kw_only=True)
class SpansOfInput:
    """The repeated spans of one input: references to its runs of words, and to the marks of all partitions."""

    rules: SubstringRules
    windows: TaskRef[RunsOfWords]
    marked: TaskGroup[RepeatedRuns]


def find_repeated_spans(
    processed: Sequence[Task[InputResult]],
    decisions: Sequence[Task[DuplicateDecisions]],
    rules: SubstringRules,
    store: Store,
    run: RunTasks,
) -> RepeatedSpansTasks | None:
    """Run the tasks that find repeated spans in the remaining documents. Return None if the rules are switched off."""
    if not rules.enabled:
        return None
    sizes = ((store.folder(task) / "rows.jsonl").stat().st_size for task in processed)
    partitions = substrings.window_partitions(sum(sizes) // _BYTES_PER_WORD)
    dropped = tuple(task.ref for task in decisions)
    windows = [
        write_windows.task(
            WriteWindows(number=number, input=task.ref, dropped=dropped, rules=rules, partitions=partitions), task.label
        )
        for number, task in enumerate(processed)
    ]
    run(windows, "repeated spans")
    group = store.group(windows)
    marked = [
        mark_repeated.task(MarkRepeated(partition=number, windows=group), f"repeated spans, partition {number}")
        for number in range(partitions)
    ]
    run(marked, "repeated spans")
    return RepeatedSpansTasks(windows, store.group(marked), store.seconds([*windows, *marked]))


@dataclass(frozen=True, kw_only=True)
class WriteCorpusFile:
    """Settings of `write_corpus_file`.

    number: the number of the input. dropped: all decisions about duplicates. spans: the repeated spans to cut out, None
    if the recipe switches that off.
    """

    source: str
    number: int
    input: TaskRef[InputResult]
    dropped: tuple[TaskRef[DuplicateDecisions], ...]
    spans: SpansOfInput | None


@dataclass(frozen=True)
class CorpusFile:
    """The corpus files of one input. kept, dropped: None if the input has no such document.

    drops: stage -> rule -> number of dropped documents.
    """

    kept: CorpusPart | None
    dropped: CorpusPart | None
    lineage: LineagePart
    drops: dict[str, dict[str, int]]


@task_function("write_corpus_file")
def write_corpus_file(specification: WriteCorpusFile, attempt: Attempt) -> CorpusFile:
    """Write every record of an input into its file of kept or dropped documents, and write the lineage file."""
    source, number = specification.source, specification.number
    cutter = _SpanCutter(number, specification.spans) if specification.spans else None
    decisions = iter(DroppedRows(specification.dropped).of(number))
    kept = attempt.out / f"{source}-{number:05d}.jsonl.gz"
    dropped = attempt.out / f"dropped-{number:05d}.jsonl.gz"
    sizes = {path: Counter(documents=0, text_bytes=0) for path in (kept, dropped)}
    drops: dict[str, Counter[str]] = {}

    def records() -> Iterator[dict]:
        """Write the line of every record into the file of kept or dropped documents; yield its row for the lineage."""
        rows = specification.input.folder / "rows.jsonl"
        with rows.open("rb") as lines, jsonl_writer(kept) as keep, jsonl_writer(dropped) as drop:
            decision = next(decisions, None)
            for at, line in enumerate(lines):
                attempt.at(at)
                row = json.loads(line)
                if decision is not None and decision["row"] == at:
                    row = dropped_row(row, drop_of(decision, canonical_url(row["url"])))
                    line, decision = json_line(row), next(decisions, None)
                elif cutter is not None and not row.get("stage"):
                    row = cutter(row)
                    line = json_line(row)
                if row.get("stage"):
                    drop(line)
                    size = len(row["text"].encode("utf-8", "surrogatepass"))
                    sizes[dropped].update(documents=1, text_bytes=size)
                    drops.setdefault(row["stage"], Counter())[row["rule"]] += 1
                    yield row
                else:
                    keep(line)
                    yield row | {"part": kept.name, "row": sizes[kept]["documents"]}
                    sizes[kept].update(documents=1, text_bytes=row["after_bytes"])
        if cutter is not None:
            cutter.finish()

    lineage = write_lineage(attempt.out / f"lineage-{number:05d}.parquet", records())
    return CorpusFile(
        kept=_part(kept, source, sizes[kept]),
        dropped=_part(dropped, source, sizes[dropped]),
        lineage=lineage,
        drops={stage: dict(rules) for stage, rules in drops.items()},
    )


class _SpanCutter:
    """A function that cuts repeated spans out of a row. The kept rows must be given to it in order."""

    def __init__(self, number: int, spans: SpansOfInput):
        self._rules = spans.rules
        self._spans = substrings.RepeatedSpans(number, spans.windows.folder, spans.marked.folders, spans.rules)
        self.finish = self._spans.finish

    def __call__(self, row: dict) -> dict:
        spans = self._spans.of(row["text"])
        if not spans:
            return row
        text = substrings.cut(row["text"], spans).strip()
        if len(text.split()) < self._rules.words:
            value = f"{len(text.split())} words left of {len(row['text'].split())}"
            return dropped_row(row, SUBSTRINGS.drop("too_short", value))
        after = text.encode("utf-8", "surrogatepass")
        notes = row["notes"] | {"substrings_cut": len(spans)}
        hashed = {"after": xxhash.xxh3_128_hexdigest(after), "after_bytes": len(after)}
        return row | {"text": text, "notes": notes} | hashed


def _part(path: Path, source: str, sizes: Counter[str]) -> CorpusPart | None:
    if not sizes["documents"]:
        path.unlink()
        return None
    return CorpusPart(name=path.name, source=source, sha256=sha256_file(path), **sizes)
