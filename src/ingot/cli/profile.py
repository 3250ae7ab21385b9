"""`ingot profile`: some steps of a copy of a run under torch's profiler, as a page, JSON and traces."""

import argparse
from collections.abc import Mapping
from typing import Any

from ingot.cli.arguments import add_run_to_copy, count, path
from ingot.cli.options import add_cluster, add_overrides
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot profile runs/demo",
    "ingot profile run.toml --steps 5",
    "ingot profile run.toml --set train.micro_batch=4 --out profiles/mb4",
    "nsys profile --capture-range=cudaProfilerApi ingot profile run.toml --nvtx",
)
_MOST_STEPS = 1000
_OPERATIONS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_to_copy(parser)
    parser.add_argument(
        "--steps",
        type=count("steps", 1, _MOST_STEPS),
        default=3,
        metavar="N",
        help="profile N steps (default: 3)",
    )
    parser.add_argument(
        "--warmup",
        type=count("warmup", 1, _MOST_STEPS),
        default=3,
        metavar="N",
        help="train N steps before them (default: 3)",
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="folder of the profile (default: RUN-profile)")
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="write no page: mark the ranges of the steps for Nsight Systems, under which this command runs",
    )
    add_cluster(parser, "compare with the rates of this cluster", "machine.json beside the run file, else this machine")
    add_overrides(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.rehearse.profile import profile as profiles
    from ingot.rehearse.profile.copied import open_copy
    from ingot.report.profile_page import write_profile_page

    copy = open_copy(args.run, args.out, args.overrides, steps=args.steps, warmup=args.warmup, nvtx=args.nvtx)
    ranks = copy.config.parallel.world_size
    terminal.say(f"profile   {copy.plan.all_steps} steps of {ranks} ranks, in {copy.plan.root}; the run is only read")
    if copy.changes:
        terminal.say(f"changed   {', '.join(copy.changes)}")
    result = profiles.profile(copy, args.cluster, say=terminal.say, show=terminal.progress)
    terminal.end_progress()
    if args.nvtx:
        terminal.say(f"marked    {args.steps} steps with NVTX, between the start and the stop of cudaProfilerApi")
        terminal.result(result)
        return EXIT_OK
    page = write_profile_page(result, copy.plan.root, _command(args))
    _show(result, terminal)
    terminal.say(f"page      {page}")
    traces = result["traces"]
    terminal.say(f"traces    {copy.plan.root / traces[0]}{f' to {traces[-1]}' * (ranks > 1)}, for ui.perfetto.dev")
    terminal.result(result | {"page": str(page)})
    terminal.next(f"ingot explain time {args.run if args.run.is_file() else args.run / 'run.toml'}")
    return EXIT_OK


def _command(args: argparse.Namespace) -> str:
    import shlex

    words = ["ingot", "profile", str(args.run), "--steps", str(args.steps), "--warmup", str(args.warmup)]
    words += ["--cluster", args.cluster] if args.cluster else []
    words += [word for override in args.overrides for word in ("--set", override)]
    return shlex.join(words)


def _show(result: Mapping[str, Any], terminal: Terminal) -> None:
    from ingot.observe.scalars import axis_title
    from ingot.report.profile_page import kind_rows, operation_rows
    from ingot.units import format_seconds

    step, profiled = result["step_seconds"], result["profiled_step_seconds"]
    planned = result["planned_step_seconds"]
    beside = f"; {format_seconds(planned)} planned for {result['cluster']}" if planned else ""
    terminal.say(f"step      {format_seconds(step)}{beside}; {format_seconds(profiled)} under the profiler")
    if mfu := result["mfu"]:
        parts = f"{mfu['now']:.1%} now, {mfu['computing']:.1%} without waits, {mfu['ceiling']:.1%} at most"
        terminal.say(f"mfu       {parts} with these shapes")
    terminal.say()
    terminal.table(kind_rows(result), ("kind", "seconds", "share", "planned"), right=(1, 2, 3))
    axes = [
        (axis_title(axis), format_seconds(one["exposed"]), format_seconds(one["hidden"]))
        for axis, one in result["communication"].items()
        if one["exposed"] or one["hidden"]
    ]
    if axes:
        terminal.say()
        terminal.table(axes, ("axis", "exposed", "hidden"), right=(1, 2))
    terminal.say()
    header = ("operation", "kind", "calls", "seconds", "rate", "of roofline")
    terminal.table(operation_rows(result, _OPERATIONS), header, right=(2, 3, 4, 5))
    terminal.say()
