"""The output of `ingot ckpt diff`: what differs between two checkpoints."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.ckpt_ls import layout_text
from ingot.cli.progress import ByteBar
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.trainer.checkpoint.compare import Comparison

_SHOWN = 10  # parameters, without --all


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.trainer.checkpoint.compare import compare_checkpoints

    found = compare_checkpoints(Path(args.a), Path(args.b), ByteBar(terminal))
    _show_heads(found, terminal)
    if found.settings:
        terminal.say("")
        rows = [(key, _value(before), _value(after)) for key, before, after in found.settings]
        terminal.table(rows, header=("setting", "A", "B"))
    _show_parameters(found, terminal, every=args.all)
    terminal.say(_optimizer_line(found))
    terminal.result(found.as_dict())
    return EXIT_OK


def _show_heads(found: "Comparison", terminal: Terminal) -> None:
    from ingot.units import format_count

    rows = [
        (name, one.step, format_count(one.tokens), one.kind, layout_text(one.layout), one.path)
        for name, one in (("A", found.a), ("B", found.b))
    ]
    terminal.table(rows, header=("", "step", "tokens", "kind", "layout", "path"), right=(1, 2))


def _show_parameters(found: "Comparison", terminal: Terminal, *, every: bool) -> None:
    changed = [one for one in found.parameters if one.largest or one.not_finite or one.relative is None]
    total = len(found.parameters)
    terminal.say(f"\nweights   {len(changed)} of {total} parameters differ")
    shown = found.parameters if every else changed[:_SHOWN]
    if shown:
        terminal.table(
            [
                (one.name, "x".join(map(str, one.shape)), _relative(one.relative), f"{one.largest:.3g}", _doubt(one))
                for one in shown
            ],
            header=("parameter", "shape", "change", "largest", ""),
            right=(2, 3),
        )
    if len(changed) > len(shown):
        terminal.say(f"          and {len(changed) - len(shown)} more: --all")
    for name, first, second in found.reshaped:
        terminal.say(f"shape     {name}: {list(first)} in A, {list(second)} in B")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        for name in names:
            terminal.say(f"only {side}    {name}")


def _doubt(change) -> str:
    return f"{change.not_finite:,} NaN or infinite" if change.not_finite else ""


def _relative(value: float | None) -> str:
    return "from 0" if value is None else f"{value:.2%}" if value >= 5e-5 or value == 0 else f"{value:.1e}"


def _optimizer_line(found: "Comparison") -> str:
    if found.optimizer_only:
        return f"optimizer only {found.optimizer_only.upper()} has a state"
    kinds = [f"{kind} {_relative(value)}" for kind, value in found.optimizer.items()]
    return "optimizer " + (", ".join(kinds) if kinds else "neither has a state")


def _value(value: object) -> str:
    return "-" if value is None else str(value) or '""'
