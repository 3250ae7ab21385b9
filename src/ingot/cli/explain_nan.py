"""`ingot explain nan RUN`: the first operation of a run that was not finite, and why."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli.arguments import add_run_and_step
from ingot.cli.terminal import Terminal
from ingot.value_names import printable

if TYPE_CHECKING:
    from ingot.rehearse.replay.found import NotFiniteOrigin, Replayed
    from ingot.report.diagnose.not_finite import NotFiniteCase
    from ingot.report.diagnose.not_finite_causes import NotFiniteCause
    from ingot.report.lineage.trace import TracedDocument

_SHOWN = 8  # documents and tensors


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_and_step(parser, "the newest in the log whose loss or gradient is not finite")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to replay (default: auto, a GPU if there is one)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.errors import require
    from ingot.report.diagnose.not_finite import find_case
    from ingot.report.diagnose.not_finite_causes import agreement, judge

    case = find_case(args.run, args.step)
    require("torch", "train")
    from ingot.rehearse.replay import replay

    state = "is running" if case.running else "is not running"
    terminal.say(f"{terminal.style(case.run.name, 'bold')}   {state}")
    terminal.say(f"step      {case.step}: {case.reason}")
    found = replay.replay(
        args.run,
        case.step,
        skipped=case.skipped,
        device=args.device,
        say=terminal.say,
        progress=terminal.progress,
        way=case.way,
    )
    terminal.end_progress()
    causes = judge(case, found)
    documents, untraced = _documents(args.run, found)
    same = agreement(case, found)
    _show_log(case, terminal)
    if same is not None:
        difference = (
            f"differ from the log by up to {same:.1e} of their size" if same else "are those of the log, bit for bit"
        )
        terminal.say(f"replayed  the losses and gradient norms before it {difference}")
    _show_first(found, terminal)
    _show_documents(documents, untraced, found, terminal)
    _show_causes(causes, bool(found.step), terminal)
    for note in found.notes + found.unused:
        terminal.say(f"note      {note}")
    terminal.result(_facts(case, found, causes, documents) | {"agreement": same})
    terminal.next(*_commands(args.run, found, causes))


def _documents(root: Path, found: "Replayed") -> "tuple[list[TracedDocument], str]":
    """Return the documents of the affected samples, and why there are none."""
    from ingot.errors import IngotError
    from ingot.report.lineage.trace import trace_step

    if not found.step or not found.samples:
        return [], ""
    try:
        return [one for one in trace_step(root, found.step) if one.sample in found.samples], ""
    except (IngotError, OSError) as error:  # tokens of another program, or a corpus that is gone
        return [], getattr(error, "found", str(error))


def _show_log(case: "NotFiniteCase", terminal: Terminal) -> None:
    for number, one in enumerate(case.logged[-4:]):
        label = "log" if number == 0 else ""
        terminal.say(f"{label:<9} step {one.step}  loss {one.loss:.4g}  gn {one.grad_norm:.4g}  lr {one.lr:.3g}")


def _show_first(found: "Replayed", terminal: Terminal) -> None:
    from ingot.report.diagnose.not_finite_causes import range_text

    origin = found.origin
    if found.loaded_bad or found.phase == "update":
        when = f"after the update of step {found.step}" if not found.loaded_bad else "in the checkpoint"
        for one in found.bad_state[:_SHOWN]:
            terminal.say(f"tensor    {when}: {range_text(one)}")
    if not found.step:
        steps = f"steps {found.checkpoint + 1} to {found.steps[-1].step}"
        terminal.say(f"first     nothing: loss, gradients and state of {steps} are finite")
    elif origin is None:
        terminal.say(f"first     step {found.step}, {found.phase}: no operation of the model")
    else:
        _show_origin(found.step, origin, terminal)


def _show_origin(step: int, origin: "NotFiniteOrigin", terminal: Terminal) -> None:
    from ingot.report.diagnose.not_finite_causes import range_text

    module = f"{origin.module or 'outside of every module'}" + (f" ({origin.module_class})" if origin.module else "")
    node = f" of {origin.node}" if origin.node else ""
    place = terminal.style(f"{module}, {origin.operation}{node}", "bold")
    terminal.say(f"first     {place}: {origin.phase} of step {step}, micro-batch {origin.micro_batch}")
    if origin.kind == "memory":
        terminal.say("          it reads memory that no operation has written")
    for one in origin.inputs:
        terminal.say(f"input     {range_text(one)}")
    terminal.say(f"result    {range_text(origin.output)}")
    if origin.module_input is not None:
        terminal.say(f"module    got {range_text(origin.module_input)}")


def _show_documents(documents: "list[TracedDocument]", untraced: str, found: "Replayed", terminal: Terminal) -> None:
    if found.samples:
        shown = ", ".join(map(str, found.samples[:_SHOWN])) + (", ..." if len(found.samples) > _SHOWN else "")
        terminal.say(f"samples   {len(found.samples)} of {found.batch} are known to be affected: {shown}")
    for one in documents[:_SHOWN]:
        terminal.say(f"document  sample {one.sample}  {one.document_id[:12]}  {one.source}  {printable(one.url)}")
    if len(documents) > _SHOWN:
        terminal.say(f"          and {len(documents) - _SHOWN} more")
    if untraced:
        terminal.say(f"unknown   the documents of these samples: {untraced}")


def _show_causes(causes: "list[NotFiniteCause]", shows: bool, terminal: Terminal) -> None:
    terminal.say("causes    the first one found explains those below it")
    for number, cause in enumerate(causes, 1):
        mark = "found" if cause.found else "no"
        name = terminal.style(f"{cause.name:<22}", "bold") if cause.found else f"{cause.name:<22}"
        terminal.say(f"{number:>3}. {name} {mark:<5}  {cause.evidence}")
        if cause.found:
            terminal.say(f"     -> {cause.fix}")
    if not any(cause.found for cause in causes):
        terminal.say("     none of the usual causes" if shows else "     nothing to explain: log and replay are finite")


def _commands(root: Path, found: "Replayed", causes: "list[NotFiniteCause]") -> list[str]:
    first = next((cause for cause in causes if cause.found), None)
    trace = [f"ingot data trace --run {root} --step {found.step}"] if first and first.name == "bad batch" else []
    return [*trace, f"ingot ckpt ls {root}", first.command if first and first.command else f"ingot train {root}"]


def _facts(
    case: "NotFiniteCase", found: "Replayed", causes: "list[NotFiniteCause]", documents: "list[TracedDocument]"
) -> dict[str, Any]:
    from dataclasses import asdict

    return _plain(
        {
            "run": case.run.name,
            "running": case.running,
            "wanted": case.step,
            "reason": case.reason,
            "logged": [asdict(one) for one in case.logged],
            "replay": asdict(found),
            "causes": [asdict(one) for one in causes],
            "documents": [vars(one) for one in documents],
        }
    )


def _plain(value: Any) -> Any:
    """Return nested values in which null replaces numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
