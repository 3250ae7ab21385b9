"""`ingot explain spike RUN`: the documents of the steps in which the guard found trouble, and what is unusual."""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli import explain_replay
from ingot.cli.arguments import add_run_and_step, path
from ingot.cli.terminal import Terminal
from ingot.units import counted
from ingot.value_names import printable

if TYPE_CHECKING:
    from ingot.report.diagnose.spike import BatchDocument, SpikeBatch, SpikeReport
    from ingot.schema.quarantine import QuarantineEntry

_SUSPECTS, _REASONS, _OTHERS, _SAMPLES = 10, 4, 3, 6  # shown


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_and_step(parser, "those in which the guard found trouble, the worst first; else the one that ended the run")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="train the worst step again in this process, from the checkpoint before, for a verdict: data, state or "
        "hardware",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to replay (default: auto, a GPU if there is one)",
    )
    parser.add_argument(
        "--quarantine",
        type=path,
        metavar="LIST",
        help="add the documents with something unusual to this list, which builds and purges read",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.errors import require
    from ingot.report.diagnose.spike import explain_spike
    from ingot.schema.quarantine import read_quarantine

    if args.replay:
        require("torch", "train")
    if args.quarantine and args.quarantine.exists():
        read_quarantine(args.quarantine)  # a damaged list is reported before the work
    found = explain_spike(args.run, args.step, terminal.progress)
    terminal.end_progress()
    state = "is running" if found.running else "is not running"
    terminal.say(f"{terminal.style(printable(found.name), 'bold')}   {state}")
    terminal.say(
        f"compared  with {counted(found.healthy_documents, 'document')} of "
        f"{counted(found.healthy_steps, 'healthy step')} of this run"
    )
    shown: dict[str, int] = {}
    for batch in found.batches:
        _show_batch(batch, shown, terminal)
        if not args.replay and len(found.batches) == 1:
            terminal.say("verdict   needs a replay from the checkpoint before: --replay")
    _show_repeated(found, terminal)
    if found.more:
        steps = ", ".join(map(str, found.more[:_SAMPLES])) + (", ..." if len(found.more) > _SAMPLES else "")
        terminal.say(f"more      {counted(len(found.more), 'step')} with less trouble: {steps}; --step explains one")
    for sentence in found.unknown:
        terminal.say(f"unknown   {sentence}")
    added = _quarantine(found, args.quarantine, terminal) if args.quarantine else []
    replay = explain_replay.replayed_facts(args, found, terminal) if args.replay else None
    terminal.result(_facts(found, added) | ({"replay": replay} if args.replay else {}))
    terminal.next(*_commands(args, found))


def _show_repeated(found: "SpikeReport", terminal: Terminal) -> None:
    """Show the documents that are suspects of more than one step."""
    often = Counter(document.id for batch in found.batches for document in batch.suspects)
    for one, steps in often.most_common(_OTHERS):
        if steps > 1:
            terminal.say(f"\nagain     {one[:12]} is a suspect of {steps} of these {len(found.batches)} steps")


def _quarantine(found: "SpikeReport", path: Path, terminal: Terminal) -> "list[QuarantineEntry]":
    from ingot.report.lineage.quarantine import entries_for
    from ingot.schema.quarantine import add_to_quarantine

    entries = entries_for(found)
    added = add_to_quarantine(path, entries) if entries else []
    known = f"; it had {len(entries) - len(added):,} of the suspects" if len(added) < len(entries) else ""
    terminal.say(f"list      {counted(len(added), 'document')} added to {path}{known}")
    return added


def _show_batch(batch: "SpikeBatch", shown: dict[str, int], terminal: Terminal) -> None:
    """Show a step and its documents. shown: the documents that were shown before, with their steps."""
    step = batch.step
    values = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
    if (step.loss_sigmas or step.norm_sigmas) and math.isfinite(step.loss) and math.isfinite(step.grad_norm):
        values = f"loss {step.loss:.4g} ({step.loss_sigmas:+.1f} deviations), "
        values += f"gradient norm {step.grad_norm:.4g} ({step.norm_sigmas:+.1f})"
    skipped = "; its update was skipped" if step.skipped else ""
    what = ", ".join(step.found) or "the log has nothing against it"
    terminal.say(f"\n{terminal.style(f'step {step.step}', 'bold')}: {printable(what)}; {values}{skipped}")
    if not math.isnan(step.later_loss):
        terminal.say(
            f"later     the run went back and trained this step again: loss {step.later_loss:.4g}, gradient norm "
            f"{step.later_grad_norm:.4g}"
        )
    _show_text(batch, terminal)
    for text in batch.changes or ("nothing in the data or the settings changed at this step",):
        terminal.say(f"changes   {printable(text)}")
    if len(batch.sources) > 1:
        shares = (f"{printable(name)} {own:.0%} ({usual:.0%})" for name, (own, usual) in batch.sources.items())
        terminal.say(f"sources   tokens of the step, and of healthy ones in brackets: {', '.join(shares)}")
    suspects = batch.suspects
    if not any(document.signs for document in batch.documents):
        terminal.say(f"suspects  unknown: the documents ({len(batch.documents):,}) could not be compared")
    elif not suspects:
        documents = counted(len(batch.documents), "document")
        terminal.say(
            f"suspects  none: {documents}, all like those of healthy steps. The cause may be the learning rate, "
            "weights that were harmed before, or the hardware"
        )
    else:
        terminal.say(
            f"suspects  {len(suspects):,} of {counted(len(batch.documents), 'document')}, the most unusual first"
        )
    for number, document in enumerate(suspects[:_SUSPECTS], 1):
        _show_document(number, document, shown, terminal)
        shown.setdefault(document.id, step.step)
    if len(suspects) > _SUSPECTS:
        terminal.say(f"          and {len(suspects) - _SUSPECTS:,} more, with --json")
    for document in batch.documents[: 0 if suspects else _OTHERS]:
        nearest = document.signs[0].words if document.signs else "too short to compare"
        terminal.say(f"nearest   {document.id[:12]}  {printable(document.url or document.source)}: {nearest}")


def _show_text(batch: "SpikeBatch", terminal: Terminal) -> None:
    """Show the learning rate, the lengths and repetitions of the batch, and a change of its sources."""
    text, change = batch.text, batch.source_change
    if math.isfinite(batch.lr):
        terminal.say(f"lr        {batch.lr:.3g}")
    lengths = f"each with {text.shortest:,}"
    if text.longest > text.shortest:
        lengths += f" to {text.longest:,}, median {text.median:,}"
    terminal.say(f"batch     {counted(text.tokens, 'token')} of {counted(text.documents, 'document')}, {lengths}")
    if text.most_repeated:
        terminal.say(f"repeated  {text.repeated:.1%} of the tokens are in sequences of 8 that occur again in the batch")
    for one in text.most_repeated:
        documents = counted(one.documents, "document")
        terminal.say(f"          {one.times:,} times in {documents}: {printable(one.text or str(list(one.tokens)))!r}")
    if change is not None:
        terminal.say(
            f"source    the step is at a change of the data source: from step {change.step} on, {change.after:.0%} of "
            f"the samples are of {printable(change.source)}, before {change.before:.0%}"
        )


def _show_document(number: int, document: "BatchDocument", shown: dict[str, int], terminal: Terminal) -> None:
    place = f"{document.record_id} in {document.file}, " if document.file else ""
    samples = ", ".join(map(str, document.samples[:_SAMPLES])) + (", .." if len(document.samples) > _SAMPLES else "")
    own = counted(document.tokens, "token")
    terminal.say(f"{number:>3}. {terminal.style(document.id[:12], 'bold')}  {printable(document.url)}")
    if document.id in shown:
        names = ", ".join(sign.kind.name for sign in document.reasons)
        terminal.say(f"     as in step {shown[document.id]} ({names}): {own} in sample {samples}")
        return
    terminal.say(f"     {printable(place)}source {printable(document.source)}: {own} in sample {samples}")
    excerpts: list[str] = []
    for sign in document.reasons[:_REASONS]:
        terminal.say(f"     {sign.kind.name}: {sign.words}")
        if sign.excerpt and sign.excerpt not in excerpts:
            excerpts.append(sign.excerpt)
    for excerpt in excerpts:
        terminal.say(f"       {printable(excerpt)!r}")


def _commands(args: argparse.Namespace, found: "SpikeReport") -> list[str]:
    from ingot.report.lineage.exposure import data_of
    from ingot.schema.run_folder import RunFolder
    from ingot.trainer.checkpoint.manifest import newest_step

    commands = []
    if any(batch.suspects for batch in found.batches):
        if args.quarantine:
            commands.append(f"ingot data purge {data_of(args.run)} --quarantine {args.quarantine}")
            commands.append(f"ingot data build .. --set 'quarantine.files=[\"{args.quarantine}\"]'")
        else:
            step = f" --step {args.step}" if args.step else ""
            commands.append(f"ingot explain spike {args.run}{step} --quarantine quarantine.jsonl")
    if not args.replay:
        commands.append(f"ingot explain spike {args.run} --step {found.batches[0].step.step} --replay")
    if any("not finite" in kind for batch in found.batches for kind in batch.step.found):
        commands.append(f"ingot explain nan {args.run}")
    if newest_step(RunFolder(args.run).checkpoints):
        commands.append(f"ingot ckpt ls {args.run}")
    return commands or [f"ingot status {args.run}"]


def _facts(found: "SpikeReport", added: "list[QuarantineEntry]") -> dict[str, Any]:
    return {
        "run": found.name,
        "running": found.running,
        "healthy_steps": found.healthy_steps,
        "healthy_documents": found.healthy_documents,
        "more": list(found.more),
        "unknown": list(found.unknown),
        "steps": [_batch_facts(batch) for batch in found.batches],
        "quarantined": [vars(entry) for entry in added],
    }


def _batch_facts(batch: "SpikeBatch") -> dict[str, Any]:
    from dataclasses import asdict

    step = {
        name: None if isinstance(one, float) and not math.isfinite(one) else one
        for name, one in vars(batch.step).items()
    }
    return step | {
        "lr": batch.lr if math.isfinite(batch.lr) else None,
        "text": asdict(batch.text),
        "source_change": asdict(batch.source_change) if batch.source_change else None,
        "changes": list(batch.changes),
        "sources": {name: {"step": own, "healthy": usual} for name, (own, usual) in batch.sources.items()},
        "documents": [_document_facts(document) for document in batch.documents],
    }


def _document_facts(document: "BatchDocument") -> dict[str, Any]:
    signs = [
        vars(sign) | {"kind": sign.kind.name, "unusual": sign.unusual, "words": sign.words} for sign in document.signs
    ]
    return vars(document) | {"ratio": document.ratio, "suspect": bool(document.reasons), "signs": signs}
