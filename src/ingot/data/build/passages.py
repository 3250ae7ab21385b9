"""Passages that came before in the corpus, found once duplicates are gone; parts.py cuts them (dedup/substrings.py).

windows       per input      runs of words of what is left
marked        per partition  which of them came before
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config import from_dict, to_dict
from ingot.data.build.fates import Fates, Inputs, beating
from ingot.data.dedup.substrings import SubstringRules, mark_repeated, window_partitions, write_windows
from ingot.data.tasks.task import Context, Store, Task

_BYTES_PER_WORD = 4  # fewer than any language has, on average: partitions come out small rather than large


def windows(context: Context) -> int:
    """Task. arguments: part, rules, partitions. inputs: the curated file, and all fates."""
    curated, *decided = context.folders
    part = context.task.arguments["part"]
    inputs = Inputs({part: curated}, Fates(*decided))

    def texts() -> Iterator[str]:
        for number, text in enumerate(inputs.texts_left(part)):
            context.at(number)
            yield text
        context.at(-1)

    rules = from_dict(SubstringRules, context.task.arguments["rules"])
    return write_windows(texts(), rules, context.task.arguments["partitions"], context.out)


def marked(context: Context) -> int:
    """Task. arguments: partition. inputs: windows of every input. Returns how many came before."""
    with beating(context):
        return mark_repeated(context.task.arguments["partition"], context.folders, context.out)


@dataclass(frozen=True)
class Spans:
    """Tasks that found repeated passages (marked: as one group); none if the recipe cuts none."""

    windows: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    seconds: float = 0.0

    def of(self, part: int) -> tuple[str, ...]:
        """What cutting input `part` reads: its windows, then the marks of every partition."""
        return (self.windows[part], *self.marked) if self.windows else ()


def find_spans(
    curated: Sequence[Task],
    deciding: Sequence[Task],
    rules: SubstringRules,
    store: Store,
    run: Callable[[Sequence[Task], str], list[Any]],
) -> Spans:
    """Run the tasks that look for repeated passages in what is left."""
    if not rules.enabled:
        return Spans()
    sizes = ((store.folder(task.key) / "rows.jsonl").stat().st_size for task in curated)
    partitions = window_partitions(sum(sizes) // _BYTES_PER_WORD)
    first = [
        Task(
            function=f"{__name__}:windows",
            arguments={"part": part, "rules": to_dict(rules), "partitions": partitions},
            inputs=(task.key, *(one.key for one in deciding)),
            label=task.label,
        )
        for part, task in enumerate(curated)
    ]
    run(first, "passages")
    keys = store.group(task.key for task in first)
    second = [
        Task(
            function=f"{__name__}:marked",
            arguments={"partition": number},
            inputs=(keys,),
            label=f"passages, partition {number}",
        )
        for number in range(partitions)
    ]
    run(second, "passages")
    seconds = sum(json.loads((store.folder(task.key) / "seconds.json").read_text()) for task in (*first, *second))
    return Spans(tuple(task.key for task in first), (store.group(task.key for task in second),), seconds)
