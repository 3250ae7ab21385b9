"""The table of `ingot ckpt ls`: the checkpoints of a run on its disk and in its store."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.trainer.launch.listing import ListedSave, Listing, TierCopy

HEADER = ("step", "tokens", "kind", "layout", "size", "verified", "where", "marks")
_AXES = {"pp": "pp", "cp": "cp", "tp": "tp"}


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.trainer.launch.listing import list_run

    listing = list_run(Path(args.run))
    terminal.table([_row(save) for save in listing.saves], header=HEADER, right=(0, 1, 4))
    for line in _details(listing):
        terminal.say(line)
    terminal.result(listing.as_dict())
    return listing.exit_code


def layout_text(layout: dict[str, int] | None) -> str:
    """Return the degrees of a mesh above 1, like "dp 4 tp 2"; dp is "copies x ranks that share one" if there are
    copies. "-" if the layout is unknown, "1 rank" if nothing is divided."""
    if layout is None:
        return "-"
    copies, shards = layout.get("dp_replicate", 1), layout.get("dp_shard", 1)
    dp = f"dp {copies}x{shards}" if copies > 1 and shards > 1 else f"dp {copies * shards}"
    degrees = [f"{name} {layout[axis]}" for axis, name in _AXES.items() if layout.get(axis, 1) > 1]
    return " ".join([*([dp] if copies * shards > 1 else []), *degrees]) or "1 rank"


def time_text(seconds: float | None) -> str:
    """Return Unix seconds as local time to the minute; "-" for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _row(save: "ListedSave") -> tuple:
    from ingot.units import format_bytes, format_count

    copies = [copy for copy in (save.disk, save.store) if copy]
    size = copies[0].bytes
    return (
        save.step,
        "-" if save.tokens is None else format_count(save.tokens),
        save.kind,
        layout_text(save.layout),
        format_bytes(size) if size else "-",
        time_text(next((copy.verified_at for copy in copies if copy.verified_at is not None), None)),
        "both" if len(copies) == 2 else "disk" if save.disk else "store",
        _marks(save),
    )


def _marks(save: "ListedSave") -> str:
    both = bool(save.disk and save.store)
    marks = ["pinned"] if save.pinned else []
    for place, copy in (("disk", save.disk), ("store", save.store)):
        if copy and (mark := _mark(copy)):
            marks.append(f"{mark} on {place}" if both and place == "disk" else f"{mark} in {place}" if both else mark)
    if save.doubt:
        marks.append(save.health.state if save.health else "in doubt")
    if save.resumes_here:
        marks.append("resumes here")
    return ", ".join(marks)


def _mark(copy: "TierCopy") -> str:
    from ingot.trainer.launch.listing import NOT_ENDED

    if copy.late:
        return "late"
    if copy.damage:
        return "half upload" if copy.damage == NOT_ENDED else "DAMAGED"
    return "FILES LOST" if copy.lost else "in part" if copy.absent else ""


def _health(listing: "Listing") -> list[str]:
    """Return a line with the steps of each state of health, and one with the reason for that of the next start."""
    by_state: dict[str, list[str]] = {}
    for save in listing.saves:
        if save.health:
            by_state.setdefault(save.health.state, []).append(str(save.step))
    states = "; ".join(f"{state}: {', '.join(steps)}" for state, steps in by_state.items())
    lines = [f"health    {states}"]
    lines += [
        f"          step {save.step}: {save.health.reason}"
        for save in listing.saves
        if save.health and save.resumes_here and not save.doubt
    ]
    return lines if by_state else []


def _details(listing: "Listing") -> list[str]:
    """Return a line for each damage and doubt, and one for the store."""
    lines = []
    for save in listing.saves:
        what = f"step {save.step}" + ("" if save.kind == "full" else ", weights")
        for place, copy in (("disk", save.disk), ("store", save.store)):
            if copy and copy.damage:
                lines.append(f"{_mark(copy).split()[0].lower():<9} {what}, {place}: {copy.damage}")
            elif copy and copy.absent:
                lines.append(f"absent    {what}: {copy.absent}")
        if save.doubt:
            lines.append(f"in doubt  {what}: {save.doubt}")
    lines += _health(listing)
    if problem := listing.store_problem:
        lines.append(f"store     not listed: {problem.found}")
        lines += [f"fix       {problem.fix}"] if problem.fix else []
    elif listing.store:
        empty = "" if any(save.store for save in listing.saves) else ", which holds no checkpoint"
        lines.append(f"store     {listing.store}{empty}")
    return lines
