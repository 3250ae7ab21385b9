"""The sections of a report on evaluation: held-out text, tasks, and samples."""

from ingot.report.facts import VOID, RunData
from ingot.report.readable import is_number
from ingot.report.render.page import Block, Sample, Section, TableBlock, Text

_STDERR = "_stderr"  # the end of the name of a metric's standard error, in lm-eval


def evaluated(data: RunData) -> list[dict]:
    """Return the evaluation of each step that has one, the newest of each, in the order of steps: those in the
    background come late. Steps that the run went back from have none."""
    return newest_by_step(data.evaluations)


def newest_by_step(found: list[dict]) -> list[dict]:
    """Return the newest of `evaluation` or `task_scores` events for each step, without void ones, in order."""
    newest = {event["step"]: event for event in found if not event.get(VOID)}
    return [newest[step] for step in sorted(newest)]


def evaluation_section(data: RunData) -> Section | None:
    """Return the section on evaluation: bits per byte by source for the last evaluation, and by step for all; the
    scores of tasks; and evaluations in the background that failed."""
    blocks = [*_heldout(evaluated(data)), *_tasks(newest_by_step(data.task_scores)), *_failed(data.background)]
    return Section("evaluation", "Evaluation", blocks) if blocks else None


def _heldout(evaluations: list[dict]) -> list[Block]:
    if not evaluations:
        return []
    last = evaluations[-1]
    header = ("Held-out text", "Tokens", "Bits per byte", "Unigram", "Lower by")
    rows = [_evaluation_row("all", last)]
    sources = last.get("by_source")
    rows += [_evaluation_row(str(name), part) for name, part in sorted(_items(sources)) if isinstance(part, dict)]
    blocks: list[Block] = [
        Text(
            f"At step {last['step']:,}, on {last['tokens']:,} tokens the model never trained on. The unigram knows "
            "only how often each token occurs in the training set. Lower is better."
        ),
        TableBlock(header, rows, right=(1, 2, 3, 4)),
    ]
    if len(evaluations) > 1:
        earlier = [(f"{e['step']:,}", f"{e['tokens']:,}", f"{e['bpb']:.4f}", f"{e['loss']:.4f}") for e in evaluations]
        caption = f"All evaluations: {len(earlier):,}"
        blocks.append(
            TableBlock(
                ("Step", "Tokens", "Bits per byte", "Loss"), earlier, right=(0, 1, 2, 3), caption=caption, folded=True
            )
        )
    return blocks


def _evaluation_row(name: str, part: dict) -> tuple[str, ...]:
    bpb, unigram = part.get("bpb"), part.get("unigram_bpb")
    lower = ""
    if is_number(bpb) and is_number(unigram) and unigram > 0:
        lower = f"{1 - bpb / unigram:.1%}"
    return (
        name,
        number_text(part.get("tokens"), ",.0f"),
        number_text(bpb, ".4f"),
        number_text(unigram, ".4f"),
        lower,
    )


def _tasks(scored: list[dict]) -> list[Block]:
    """Return the table of the last scores of tasks of lm-eval, and a folded one of all."""
    rows = [(f"{event['step']:,}", *row) for event in scored for row in _task_rows(event)]
    if not rows:
        return []
    last = [row[1:] for row in rows if row[0] == rows[-1][0]]
    header = ("Task", "Metric", "Value", "Standard error", "Examples")
    blocks: list[Block] = [
        Text(f"Tasks of lm-eval, at step {rows[-1][0]}."),
        TableBlock(header, last, right=(2, 3, 4)),
    ]
    if len(rows) > len(last):
        blocks.append(
            TableBlock(("Step", *header), rows, right=(0, 3, 4, 5), caption="Tasks at all evaluations", folded=True)
        )
    return blocks


def _task_rows(event: dict) -> list[tuple[str, ...]]:
    examples, rows = dict(_items(event.get("examples"))), []
    for task, scores in sorted(_items(event.get("scores"))):
        values = dict(_items(scores))
        for metric in sorted(name for name in values if _STDERR not in name):
            name, _, filtered = metric.partition(",")
            spread = values.get(name + _STDERR + (f",{filtered}" if filtered else ""))
            rows.append(
                (
                    str(task),
                    metric,
                    number_text(values[metric], ".4f"),
                    number_text(spread, ".4f"),
                    number_text(examples.get(task), ",.0f"),
                )
            )
    return rows


def _failed(background: list[dict]) -> list[Block]:
    failed = [event for event in background if event.get("reason")]
    if not failed:
        return []
    last, count = failed[-1], len(background)
    return [
        Text(
            f"{len(failed)} of {count} evaluation{'s' * (count != 1)} in the background failed, the last one at step "
            f"{last['step']:,}: {last['reason']}."
        )
    ]


def samples_section(data: RunData) -> Section | None:
    """Return the samples of the last step that has samples, and a folded table of earlier samples."""
    newest = {(e["step"], *_prompt_and_text(e)): e for e in data.samples if not e.get(VOID)}
    samples = [newest[key] for key in sorted(newest, key=lambda key: key[0])]
    if not samples:
        return None
    last = samples[-1]["step"]
    blocks: list[Block] = [
        Text(f"What the model writes after step {last:,}. Model output: not edited, and not to be trusted.")
    ]
    blocks += [Sample(*_prompt_and_text(e)) for e in samples if e["step"] == last]
    earlier = [(f"{e['step']:,}", *_prompt_and_text(e)) for e in samples if e["step"] != last]
    if earlier:
        header = ("Step", "Prompt", "Continuation")
        blocks.append(TableBlock(header, earlier, right=(0,), caption="Samples of earlier steps", folded=True))
    return Section("samples", "Samples", blocks)


def _prompt_and_text(event: dict) -> tuple[str, str]:
    return str(event.get("prompt", "")), str(event.get("text", ""))


def number_text(value, spec: str) -> str:
    return format(value, spec) if is_number(value) else ""


def _items(value) -> list[tuple]:
    return list(value.items()) if isinstance(value, dict) else []
