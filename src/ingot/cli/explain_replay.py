"""The replay of `ingot explain spike RUN --replay`: losses by document and source, norms by layer, and the verdict."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from ingot.cli.terminal import Terminal
from ingot.units import counted
from ingot.value_names import printable

if TYPE_CHECKING:
    from ingot.rehearse.replay.found import LayerNorms, ReplayedSpike
    from ingot.report.diagnose.spike import BatchDocument, SpikeBatch, SpikeReport
    from ingot.report.diagnose.spike_verdict import DocumentLoss, ReplayedSource, SpikeVerdict

_DOCUMENTS, _LAYERS = 5, 6  # shown


def replayed_facts(args: argparse.Namespace, found: "SpikeReport", terminal: Terminal) -> dict[str, Any]:
    """Replay the first step of `found`, show what it says, and return it as values of JSON."""
    from dataclasses import asdict, replace

    from ingot.rehearse.replay.spike import replay_spike
    from ingot.report.diagnose.attempts import attempt_of, recorded_way
    from ingot.report.diagnose.spike import parts_at
    from ingot.report.diagnose.spike_verdict import document_losses, judge_spike, source_losses
    from ingot.report.diagnose.troubled import skipped_steps
    from ingot.report.facts import gather

    batch, data = found.batches[0], gather(args.run)
    step = batch.step.step
    attempt = attempt_of(data, step, batch.step.time)
    terminal.say("")
    replayed = replay_spike(
        args.run,
        step,
        skipped=skipped_steps(data, step, attempt.began),
        device=args.device,
        say=terminal.say,
        progress=terminal.progress,
        way=recorded_way(data, attempt),
    )
    terminal.end_progress()
    verdict = judge_spike(replace(data, steps=attempt.steps), batch, replayed, attempt)
    documents = document_losses(batch.parts, replayed)
    other = parts_at(args.run, replayed.other_step) if replayed.other_step else []
    sources = source_losses(batch.parts, other, replayed)
    has_spike = verdict.has_spike
    _show_losses(batch, documents, sources, replayed, terminal, has_spike=has_spike)
    _show_layers(replayed, terminal)
    _show_verdict(step, verdict, terminal)
    for note in replayed.notes + replayed.unused:
        terminal.say(f"note      {note}")
    numbers = {name: value for name, value in vars(replayed).items() if not name.endswith("nats")}
    numbers |= {"steps": [asdict(one) for one in replayed.steps], "own": asdict(replayed.own)}
    return _plain(
        numbers
        | {
            "step": step,
            "layers": [asdict(one) for one in replayed.layers],
            "verdict": asdict(verdict),
            "documents": [asdict(one) for one in documents],
            "sources": [asdict(one) for one in sources],
        }
    )


def _show_losses(
    batch: "SpikeBatch",
    documents: "list[DocumentLoss]",
    sources: "list[ReplayedSource]",
    replayed: "ReplayedSpike",
    terminal: Terminal,
    *,
    has_spike: bool,
) -> None:
    own, other = replayed.own, replayed.other_step
    terminal.say(
        f"replayed  step {own.step}: loss {own.loss:.4g}, gradient norm {own.grad_norm:.4g}, learning rate {own.lr:.3g}"
    )
    if other:
        sizes = f"loss {replayed.other_loss:.4g}, gradient norm {replayed.other_grad_norm:.4g}"
        terminal.say(f"          the batch of step {other} on the same weights: {sizes}")
    excess = f", and its share of the loss above that of step {other}" if other and has_spike else ""
    terminal.say(f"losses    nats per token of each document in the step{excess}")
    known = {document.id: document for document in batch.documents}
    for one in documents[:_DOCUMENTS]:
        excess = f", {one.excess:.0%} of the excess" if one.excess == one.excess and has_spike else ""
        place, own_tokens = printable(_place(known.get(one.document), one.source)), counted(one.tokens, "token")
        terminal.say(f"          {one.document[:12]}  {one.loss:.4g} over {own_tokens}{excess}  {place}")
    if len(sources) > 1:
        shown = (f"{printable(one.source)} {_number(one.loss)} ({_number(one.other)})" for one in sources)
        terminal.say(f"sources   loss in the step, and in step {replayed.other_step} in brackets: {', '.join(shown)}")


def _place(document: "BatchDocument | None", source: str) -> str:
    return document.url if document and document.url else source


def _show_layers(replayed: "ReplayedSpike", terminal: Terminal) -> None:
    """Show the layers whose gradients grew most."""
    rows = sorted(replayed.layers, key=_growth, reverse=True)[:_LAYERS]
    if not rows:
        return
    terminal.say(
        "layers    those whose gradient grew most: its norm (before: median of the steps before), that of their weights"
    )
    other = f"step {replayed.other_step}" if replayed.other_step else "other"
    header = ("", "before", f"step {replayed.own.step}", other, "weights before", "after")
    table = [
        (
            f"          {one.name}",
            _number(one.gradient_before),
            _number(one.gradient),
            _number(one.gradient_other),
            _number(one.weights_before),
            _number(one.weights_after),
        )
        for one in rows
    ]
    terminal.table(table, header, right=(1, 2, 3, 4, 5))


def _growth(layer: "LayerNorms") -> float:
    usual = layer.gradient_before if layer.gradient_before > 0 else layer.gradient_other
    if not math.isfinite(layer.gradient):
        return math.inf
    return layer.gradient / usual if usual > 0 else 0.0


def _show_verdict(step: int, verdict: "SpikeVerdict", terminal: Terminal) -> None:
    words = {
        "data": "data: this batch, and no other one on the same weights",
        "data and state": "data and state: this batch on these weights",
        "state": "state: these weights, whatever the batch",
        "settings": "settings: an accepted change shortly before",
        "hardware": "hardware or layout: the replay has no spike",
        "none": "none: there is no spike",
        "unknown": "unknown",
    }
    terminal.say(f"verdict   {terminal.style(words[verdict.cause], 'bold')}")
    for reason in verdict.reasons:
        terminal.say(f"          {reason}")
    for number, text in enumerate(verdict.advice):
        terminal.say(f"{'to do' if not number else '':<9} {text}")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _plain(value: Any) -> Any:
    """Return nested values in which null replaces numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
