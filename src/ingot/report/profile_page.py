"""The page of a profile: where the time of a step goes, by kind, axis, operation and line. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.observe.scalars import axis_title
from ingot.report.render.markup import render_html
from ingot.report.render.page import (
    Bar,
    Bars,
    Block,
    HeadlineFigure,
    LabeledValues,
    ReportPage,
    Section,
    TableBlock,
    Text,
)
from ingot.storage import write_atomic
from ingot.theory.flops import mfu_words
from ingot.units import counted, format_bytes, format_flops, format_seconds

PAGE = "profile.html"
KIND_NOTES = {
    "products": "matrix products",
    "attention": "attention, with all that it calls",
    "elementwise": "every other operation: norms, activations, copies, sums, loss",
    "optimizer": "all operations of the update",
    "communication": "waits for other ranks that nothing hides",
    "host": "nothing computes: Python and torch have not started it yet",
    "idle": "nothing computes: the host waits for data or for the device",
}
_ROWS = 20
_UNKNOWN = "-"
_MAY_BREAK = "\u200b"  # names of operations are longer than a narrow screen


def write_profile_page(result: Mapping[str, Any], folder: Path, command: str) -> Path:
    """Write the page of a profile (rehearse/profile/profile.py) into `folder`. command: that reproduces it."""
    path = folder / PAGE
    write_atomic(path, render_html(profile_page(result, command)).encode("utf-8", "replace"))
    return path


def profile_page(result: Mapping[str, Any], command: str) -> ReportPage:
    """Return the page of a profile."""
    sections = (_kinds, _axes, _ceiling, _operations, _host, _ranks, _method)
    return ReportPage(
        title=str(result["name"]),
        subtitle=_subtitle(result),
        headline=_headline(result),
        command=command,
        sections=[section for make in sections if (section := make(result)) is not None],
        footer=f"Written by ingot {result['version']} from the traces of {counted(len(result['ranks']), 'rank')}.",
        brand="ingot profile",
    )


def kind_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (kind, seconds per step, share of the step, planned seconds) for each kind that takes time or was planned
    to."""
    step = result["profiled_step_seconds"]
    return [
        (kind, format_seconds(one["seconds"]), f"{one['seconds'] / step:.1%}", _seconds(one["planned_seconds"]))
        for kind, one in result["kinds"].items()
        if one["seconds"] or one["planned_seconds"]
    ]


def operation_rows(result: Mapping[str, Any], most: int = _ROWS) -> list[tuple[str, ...]]:
    """Return (operation, kind, calls per step, seconds per step, rate, share of the roofline), the longest first."""
    return [
        (
            f"{one['name']} {one['shapes']}".strip(),
            one["kind"],
            f"{one['count']:,.4g}",
            format_seconds(one["seconds"]),
            _rate(one),
            _UNKNOWN if one["of_roofline"] is None else f"{one['of_roofline']:.0%}",
        )
        for one in result["operations"][:most]
    ]


def _rate(operation: Mapping[str, Any]) -> str:
    if operation["flops_per_second"]:
        return f"{format_flops(operation['flops_per_second'])}/s"
    return f"{format_bytes(operation['bytes_per_second'])}/s" if operation["bytes_per_second"] else _UNKNOWN


def _seconds(value: float | None) -> str:
    return _UNKNOWN if value is None else format_seconds(value)


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def _subtitle(result: Mapping[str, Any]) -> str:
    layout = " x ".join(f"{axis} {degree}" for axis, degree in result["layout"].items())
    ranks = f"{len(result['ranks'])} {result['device']} {'ranks' if len(result['ranks']) > 1 else 'rank'}"
    parts = [f"{counted(result['steps'], 'step')} from step {result['first_step']} on", ranks, layout]
    parts += [result["precision"], result["device_name"], f"torch {result['torch']}"]
    return " · ".join(part for part in parts if part)


def _headline(result: Mapping[str, Any]) -> list[HeadlineFigure]:
    step, planned = result["step_seconds"], result["planned_step_seconds"]
    note = f"{format_seconds(planned)} planned for {result['cluster']}" if planned else "no plan for this machine"
    figures = [HeadlineFigure("Step", format_seconds(step), note)]
    if mfu := result["mfu"]:
        words = f", {mfu_words(mfu['now'])}" if result["device"] != "cpu" else ""
        figures.append(HeadlineFigure("MFU", _share(mfu["now"]), f"{_share(mfu['ceiling'])} at most{words}"))
    kinds, whole = result["kinds"], result["profiled_step_seconds"]
    lost = kinds["communication"]["seconds"]
    figures.append(HeadlineFigure("Exposed communication", f"{lost / whole:.0%}", f"{format_seconds(lost)} of a step"))
    waits = kinds["host"]["seconds"] + kinds["idle"]["seconds"]
    figures.append(HeadlineFigure("Host and idle", f"{waits / whole:.0%}", f"{format_seconds(waits)} of a step"))
    figures.append(HeadlineFigure("Cost of the profiler", f"{whole / step - 1:+.0%}", "longer steps than without it"))
    return figures


def _kinds(result: Mapping[str, Any]) -> Section:
    step = result["profiled_step_seconds"]
    rows = [
        Bar(kind, result["kinds"][kind]["seconds"] / step, values, KIND_NOTES[kind])
        for kind, *rest in kind_rows(result)
        for values in (tuple(rest),)
    ]
    mean = f"Mean over ranks, in profiled steps of {format_seconds(step)}."
    words = f"{mean} Each moment belongs to one kind, so the kinds add up."
    blocks: list[Block] = [Text(words), Bars(("Kind", "Seconds", "Share", "Planned"), rows)]
    if result["other_cluster"]:
        blocks.append(
            Text(f"No plan: the rates known here are of {result['other_cluster']}. Name the machine: --cluster.")
        )
    elif result["planned_step_seconds"] is None:
        blocks.append(
            Text(f"No plan: {result['cluster']} has no rate for {result['precision']} (ingot doctor --bench).")
        )
    elif result["device"] == "cpu":
        blocks.append(Text("The plan of a CPU has the update within products and elementwise work."))
    if (queued := result["without_core_seconds"]) > 0.01 * result["step_seconds"]:
        blocks.append(
            Text(
                f"Without the profiler, ranks were ready for {format_seconds(queued)} of a step, but had no free core."
            )
        )
    return Section("kinds", "Where the time of a step goes", blocks)


def _axes(result: Mapping[str, Any]) -> Section | None:
    rows = [
        (axis_title(axis), format_seconds(one["exposed"]), format_seconds(one["hidden"]))
        for axis, one in result["communication"].items()
        if one["exposed"] or one["hidden"]
    ]
    if not rows:
        return None
    words = (
        "Seconds per step, mean over ranks. Exposed: a rank waits, also for ranks that come late. Hidden: an exchange "
        "is in flight beside the rank's own work."
    )
    table = TableBlock(("Axis", "Exposed", "Hidden"), rows, right=(1, 2))
    return Section("axes", "Communication by axis of the mesh", [Text(words), table])


def _ceiling(result: Mapping[str, Any]) -> Section | None:
    mfu = result["mfu"]
    if mfu is None:
        return None
    rows = [
        ("Now", f"{_share(mfu['now'])}, steps of {format_seconds(result['step_seconds'])} without the profiler"),
        (
            "Computation alone",
            f"{_share(mfu['computing'])}, if no rank waited: {format_seconds(mfu['computing_seconds'])} a step",
        ),
        (
            "Ceiling of this shape",
            f"{_share(mfu['ceiling'])}, if each operation reached its roofline too: "
            f"{format_seconds(mfu['least_seconds'])} a step",
        ),
        ("FLOPs of the model", f"{format_flops(mfu['model_flops'])} per step and rank, causal attention counted half"),
        ("Rates", _rates(result)),
    ]
    return Section("ceiling", "What MFU this shape can have", [LabeledValues(rows)])


def _rates(result: Mapping[str, Any]) -> str:
    memory = result["memory_bandwidth"]
    moved = f", memory {format_bytes(memory)}/s" if memory else ""
    return f"{result['precision']} {format_flops(result['peak_flops'])}/s{moved}, of {result['cluster']}"


def _operations(result: Mapping[str, Any]) -> Section:
    words = (
        "Of rank 0, per step. Products and attention have FLOPs by their shapes, others the bytes of their arguments "
        "and of a result. Of roofline: the shortest time that these amounts allow, over the measured one; above 100%, "
        "caches helped."
    )
    header = ("Operation", "Kind", "Calls", "Seconds", "Rate", "Of roofline")
    rows = [(name.replace("_", f"_{_MAY_BREAK}"), *rest) for name, *rest in operation_rows(result)]
    table = TableBlock(header, rows, right=(2, 3, 4, 5))
    return Section("operations", "The longest operations", [Text(words), table])


def _host(result: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if waits := result["waits"][:_ROWS]:
        rows = [
            (one["line"], axis_title(one["axis"]), f"{one['count']:,.4g}", format_seconds(one["seconds"]))
            for one in waits
        ]
        caption = "Waits for other ranks, per step, mean over ranks"
        blocks.append(TableBlock(("Line", "Axis", "Waits", "Seconds"), rows, right=(2, 3), caption=caption))
    if calls := result["device_waits"]:
        rows = [(name, f"{one['count']:,.4g}", format_seconds(one["seconds"])) for name, one in calls.items()]
        caption = "Calls with which the host waits for the device, per step of rank 0"
        blocks.append(TableBlock(("Call", "Waits", "Seconds"), rows, right=(1, 2), caption=caption))
    reads, log_line = result["reads"][:_ROWS], "with a log line" if result["reads_log_line"] else "without a log line"
    if not reads:
        blocks.append(Text(f"Rank 0 reads no value of a tensor in a step {log_line}."))
    else:
        rows = [(one["line"], one["operation"], f"{one['count']:,}") for one in reads]
        caption = f"Reads of values of tensors in a step of rank 0 {log_line}"
        blocks.append(TableBlock(("Line", "Operation", "Times"), rows, right=(2,), caption=caption))
        blocks.append(Text("On a GPU the host waits for the device at each read of a tensor that is there."))
    return Section("host", "What the host waits for, by line", blocks)


def _ranks(result: Mapping[str, Any]) -> Section | None:
    ranks: Sequence[Mapping[str, Any]] = result["ranks"]
    if len(ranks) < 2:
        return None
    kinds = [kind for kind in result["kinds"] if any(rank["seconds"][kind] for rank in ranks)]
    rows = [
        (
            str(rank["rank"]),
            *(format_seconds(rank["seconds"][kind]) for kind in kinds),
            format_bytes(rank["peak_memory_bytes"]),
        )
        for rank in ranks
    ]
    header = ("Rank", *(kind.capitalize() for kind in kinds), "Peak memory")
    return Section("ranks", "Ranks", [TableBlock(header, rows, right=tuple(range(1, len(header))))])


def _method(result: Mapping[str, Any]) -> Section:
    lines = counted(result["log_lines"], "of them") if result["log_lines"] else "none of them"
    rows = [
        ("Steps", f"{result['steps']} profiled, as many before them without a profiler; {lines} wrote a log line"),
        ("Changed for the copy", ", ".join(result["changed"]) or "nothing"),
        ("Not in it", "saves, evaluations and restarts (ingot explain slow has their times)"),
        ("Traces", f"{', '.join(result['traces'][:8])}{' ...' * (len(result['traces']) > 8)}: open them in Perfetto"),
        ("All numbers", "profile.json"),
    ]
    return Section("method", "How it was measured", [LabeledValues(rows)])
