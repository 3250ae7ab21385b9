"""`ingot status RUN`: show the state of a run, on one screen of 80 columns and 40 lines whatever happened to it."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal
from ingot.units import counted

if TYPE_CHECKING:
    from pathlib import Path

    from ingot.report.status import RunStatus

_SHOWN_STEPS = 3
_SHOWN_METRICS = 6
_SHOWN_DRAINED = 2
_SHOWN_FAULTS = 3
_SHOWN_SLOW = 2
_SHOWN_ALERTS = 3
_SHOWN_UNFIT = 2
_MOST_CHARACTERS = 150  # of a text of the log: two lines of a terminal
_WIDTH, _HEIGHT = 80, 38  # of a screen, without the line of the prompt and that of the next command
_WHOLE = ("failed ", "unused ")  # beginnings of lines that are never cut: each has the way out of a trouble

EXAMPLES = ("ingot status runs/demo", "ingot status runs/demo --json")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, metavar="RUN", help="run folder; the run may still be training")


class _Screen:
    """Lines for a screen: if they would be more than it has, those that are wider than it are cut. --json has all."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def say(self, text: str) -> None:
        self._said.append(text)

    def lines(self) -> list[str]:
        head, *others = self._said  # the head has the codes of a terminal
        if sum(-(-len(line) // _WIDTH) for line in self._said) <= _HEIGHT:
            return self._said
        return [head, *(own if own.startswith(_WHOLE) else _cut(own, _WIDTH) for own in others)]


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.drill.state import is_drill
    from ingot.errors import EXIT_OK
    from ingot.planner.show.layout import degrees_text
    from ingot.report.status import command_after, read_status, sparkline
    from ingot.schema.events import ALERT
    from ingot.theory.flops import mfu_words
    from ingot.units import format_count, format_seconds

    if is_drill(args.run):
        return _say_drill(args.run, terminal)
    status, screen = read_status(args.run), _Screen()
    parts = [terminal.style(status.name, "bold"), status.state, counted(status.ranks, "rank")]
    if status.layout:
        parts[-1] += f" ({degrees_text(status.layout)})"
    parts.append(f"step {status.step:,}/{status.steps:,}" + (" passed" if status.passed else ""))
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.bpb is not None:
        parts.append(f"bpb {status.bpb:.2f}")
    if status.heldout_bpb is not None:
        parts.append(f"held-out bpb {status.heldout_bpb:.2f}")
    if status.tokens_per_second and status.state == "running":
        parts.append(f"{format_count(status.tokens_per_second)} tok/s")
    if status.mfu is not None and status.state == "running":
        parts.append(f"MFU {status.mfu:.1%} ({mfu_words(status.mfu)})")
    if status.still_seconds is not None:
        parts.append(terminal.style(f"no step for {format_seconds(status.still_seconds)}", "yellow"))
    if status.eta_seconds is not None:
        parts.append(f"eta {format_seconds(status.eta_seconds)}")
    screen.say("   ".join(parts))
    if status.failure:
        screen.say(f"failed {terminal.style(_cut(status.failure), 'red')}")
    if status.state == "waiting":
        screen.say("waits  for other nodes: the one that led stepped down; the others join with the same command")
    if status.log_damage:
        screen.say(f"log    {status.log_damage}")
    if status.losses:
        screen.say(f"loss   {sparkline(status.losses)}   {status.losses[0]:.2f} -> {status.losses[-1]:.2f}")
    if status.fallback:
        screen.say(f"layout {_fallback_text(status.fallback)}")
    if status.experts:
        _say_experts(status.experts, screen)
    if status.metrics:
        screen.say(f"own    {_metrics_text(status.metrics)}")
    _say_saves(status, args.run, screen)
    if status.restarts or status.faults:
        screen.say(f"faults {len(status.faults)}, restarts {status.restarts}")
        for fault in status.faults[-_SHOWN_FAULTS:]:
            screen.say(f"       {_cut(fault)}")
    slowest = sorted(status.stragglers, key=lambda own: -own["factor"])
    for slow in slowest[:_SHOWN_SLOW]:
        screen.say(f"slow   {_slow_text(slow)}")
    if more := slowest[_SHOWN_SLOW:]:
        ranks = [str(own["rank"]) for own in more[:_SHOWN_METRICS]] + [".."] * (len(more) > _SHOWN_METRICS)
        screen.say(f"       and {counted(len(more), 'rank')} more: {', '.join(ranks)}")
    for drained in status.drained[-_SHOWN_DRAINED:]:
        screen.say(f"drained {drained['node']}: {_cut(str(drained['words']))}")
    if status.spares and status.state == "running":
        screen.say(f"spares {status.spares.get('waiting')} of {status.spares.get('wanted')} wait")
    if status.fleet_check:
        screen.say(f"check  {_check_text(status.fleet_check)}")
    if status.start_times:
        screen.say(f"start  {_start_text(status)}")
    if status.skipped_steps or status.roll_backs or status.guard or status.damaged_ranks:
        screen.say(f"policy {_policy_text(status)}")
    for alert in status.alerts[-_SHOWN_ALERTS:]:
        screen.say(f"alert  {_cut(alert)}")
    if (more := len(status.alerts) - _SHOWN_ALERTS) > 0:
        screen.say(f"       and {more:,} older: ingot alerts {args.run}")
    if status.happened and status.happened["kind"] != ALERT:  # alerts have lines of their own
        screen.say(f"last   step {status.happened['step']:,}: {_cut(str(status.happened['text']))}")
    if status.quarantined:
        screen.say(f"data   {_quarantine_text(status.quarantined)}")
    for line in screen.lines():
        terminal.say(line)
    terminal.result(asdict(status))
    follow_up = {
        "running": f"ingot watch {args.run}",
        "waiting": f"ingot watch {args.run}",
        "finished": f"ingot report {args.run}",
    }
    code = (status.fault or {}).get("code")
    explain = [f"ingot explain {code}"] if code else []
    terminal.next(*explain, follow_up.get(status.state) or command_after(status.fault, args.run))
    return EXIT_OK


def _say_saves(status: "RunStatus", run: "Path", screen: _Screen) -> None:
    """Print where the newest saves of the run folder `run` are, and which of them are of no use."""
    import time

    from ingot.units import format_seconds

    now = time.time()
    if status.checkpoint_step is not None and status.checkpoint_time is not None:
        age = format_seconds(max(now - status.checkpoint_time, 0))
        screen.say(f"saved  step {status.checkpoint_step:,}, {age} ago")
        if status.checkpoint_health:
            screen.say(f"       {status.checkpoint_health}")
    if status.weights_step is not None and status.weights_time is not None:
        age = format_seconds(max(now - status.weights_time, 0))
        screen.say(f"saved  the weights alone of step {status.weights_step:,}, {age} ago")
    if status.kept_step is not None:
        where = f"in the memory of {status.kept_nodes} node{'s' * (status.kept_nodes != 1)}"
        age = "" if status.kept_time is None else f", {format_seconds(max(now - status.kept_time, 0))} ago"
        screen.say(f"kept   step {status.kept_step:,} {where + age if status.kept_nodes else 'nowhere in memory'}")
    if status.stored_step is not None and status.stored_time is not None:
        screen.say(f"stored step {status.stored_step:,}, {format_seconds(max(now - status.stored_time, 0))} ago")
    if took := _save_text(status):
        screen.say(f"took   {took}")
    if status.unstored_reason:
        screen.say(f"store  the last upload failed: {_cut(status.unstored_reason)}")
    if status.unused_step is not None:
        follows = f"training resumes from step {status.checkpoint_step:,}" if status.checkpoint_step else "none is left"
        if (status.stored_step or 0) > (status.checkpoint_step or 0):
            fetch = f"ingot ckpt fetch {run} --step {status.stored_step}"
            follows = f"training resumes from step {status.stored_step:,}, which the store has ({fetch})"
        screen.say(f"unused the checkpoint of step {status.unused_step:,}: {_cut(status.unused_reason)}; {follows}")
    if status.failed_step is not None:
        screen.say(f"failed the save of step {status.failed_step:,}: {_cut(status.failed_reason)}")


def _save_text(status: "RunStatus") -> str:
    """Return how long the parts of the newest save took, on each tier; "" if the log has none."""
    from ingot.units import format_seconds

    save, parts = status.last_save or {}, []

    def seconds(name: str) -> str:
        return format_seconds(save[f"{name}_seconds"])

    def of_it(name: str, what: str) -> str:
        return "" if save.get(f"{name}_seconds") is None else f" ({what} {seconds(name)} of it)"

    if save.get("stall_seconds") is not None:
        parts.append(f"stall {seconds('stall')}{of_it('snapshot', 'copy of the state')}")
    if save.get("write_seconds") is not None:
        parts.append(f"written in {seconds('write')}{of_it('verify', 'reading back')}")
    for what, step, took in (
        ("kept in memory", status.kept_step, status.kept_seconds),
        ("uploaded", status.stored_step, status.stored_seconds),
    ):
        if took is not None:
            which = "" if step == save.get("step") else f" (step {step:,})"
            parts.append(f"{what} in {format_seconds(took)}{which}")
    return f"step {save['step']:,}: {', '.join(parts)}" if save and parts else ", ".join(parts)


def _say_drill(root: "Path", terminal: Terminal) -> int:
    """Show the folder of a drill: its result, and the runs that are in it."""
    from dataclasses import asdict

    from ingot.drill.state import read_drill
    from ingot.errors import EXIT_OK
    from ingot.report.status import read_status

    drill = read_drill(root)
    verdict = f", {counted(drill.faults, 'fault')}, {len(drill.red)} red" if drill.state == "finished" else ""
    terminal.say(f"drill  {terminal.style(str(root), 'bold')}   {drill.state}{verdict}")
    terminal.say(
        "       the folder of ingot drill, which breaks copies of a run on purpose; copies that recovered are gone"
    )
    for name in drill.red:
        terminal.say(f"red    {name}")
    statuses = {str(folder): read_status(folder) for folder in drill.runs}
    for folder, status in statuses.items():
        terminal.say(f"run    {folder}   {status.state}   step {status.step:,}/{status.steps:,}")
    terminal.result(asdict(drill) | {"runs": {folder: asdict(status) for folder, status in statuses.items()}})
    terminal.next(*[f"ingot status {folder}" for folder in statuses][:1] or ["ingot drill --list"])
    return EXIT_OK


def _metrics_text(metrics: dict[str, dict[str, float]]) -> str:
    """Return the newest values of the first metrics, each with the callback that wrote it."""
    found = [(by, name, value) for by, values in metrics.items() for name, value in values.items()]
    parts = [f"{by}.{name} {value:.4g}" for by, name, value in found[:_SHOWN_METRICS]]
    more = len(found) - len(parts)
    return "   ".join(parts) + (f"   and {more} more" if more else "")


def _fallback_text(layout: dict) -> str:
    """Return why the job does not have the layout of its run file, and which it has."""
    fewer = [f"{layout['nodes']} of {layout['of_nodes']} nodes are there"] * (layout["nodes"] < layout["of_nodes"])
    why = " and ".join(fewer + ["a rank ran out of memory"] * (layout["reason"] == "memory"))
    return f"{' '.join(layout['overrides'])}   because {why}"


def _cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text without its end if it has more than `most` characters: --json has all of it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _slow_text(slow: dict) -> str:
    from ingot.units import format_seconds

    return (
        f"rank {slow['rank']} on {slow['host']} takes {slow['factor']:.1f} times as long as its peers since step "
        f"{slow['since']:,} ({slow['phase']}): all wait {format_seconds(slow['seconds'])} of a step for it"
        + ("; long enough to drain its machine" if slow.get("slowdown") else "")
    )


def _check_text(check: dict) -> str:
    """Return what the newest check of the machines found: each unfit one with its reasons."""
    from ingot.units import format_seconds

    found = [_cut(f"{one['node']} is unfit: {one['check']}: {one['words']}") for one in check["unfit"]]
    unfit = "; ".join(found[:_SHOWN_UNFIT] + [f"and {len(found) - _SHOWN_UNFIT} more"] * (len(found) > _SHOWN_UNFIT))
    count = len(check["fleet"])
    return f"{count} machine{'s' * (count != 1)} in {format_seconds(check['seconds'])}: {unfit or 'all are sound'}"


def _start_text(status: "RunStatus") -> str:
    """Return the time of the newest start or restart by phase, and the median of several restarts."""
    from statistics import median

    from ingot.trainer.resilience.start_times import phases_text
    from ingot.units import format_seconds

    newest = status.start_times or {}
    what = "the last restart" if newest["seconds"].get("kill") is not None else "the start"
    text = f"{what} took {format_seconds(newest['total_seconds'])}: {phases_text(newest['seconds'])}"
    several = status.restart_seconds
    return text + (f"; median of {len(several)}: {format_seconds(median(several))}" if len(several) > 1 else "")


def _policy_text(status: "RunStatus") -> str:
    """Return what the policy did: the number of skipped updates with the last steps, and the last roll-back."""
    parts, skipped = [], status.skipped_steps
    if skipped:
        before = ".., " if len(skipped) > _SHOWN_STEPS else ""
        steps = ", ".join(f"{step:,}" for step in skipped[-_SHOWN_STEPS:])
        parts.append(f"updates skipped {len(skipped):,} (steps {before}{steps})")
    if status.roll_backs:
        start, end = status.roll_backs[-1]
        parts.append(f"roll-backs {len(status.roll_backs):,} (last: step {start:,} to {end:,})")
    if status.damaged_ranks:
        ranks = ", ".join(map(str, status.damaged_ranks))
        parts.append(f"damage found (rank{'s' * (len(status.damaged_ranks) > 1)} {ranks})")
    if status.guard:
        parts.append(f"guard: {status.guard}")
    return ", ".join(parts)


def _quarantine_text(quarantined: Sequence[dict]) -> str:
    last, windows = quarantined[-1], sum(one["windows"] for one in quarantined)
    return (
        f"{counted(windows, 'window')} in quarantine (last: {last['windows']:,} of shard {last['shard']} from step "
        f"{last['step']:,} on, {last['code']}): others of their source are in their place"
    )


def _say_experts(experts: dict, screen: _Screen) -> None:
    """Print two lines: the busiest expert with mean values over layers, and the deviation of expert loads by layer."""
    from ingot.report.status import sparkline

    layers, cvs, busiest = experts["layers"], experts["load_cv"], experts["max_load"]
    worst = max(range(len(layers)), key=busiest.__getitem__)
    parts = [f"load   busiest expert {busiest[worst]:.1f}x the mean (layer {layers[worst]})"]
    for name, word in (("dropped", "dropped"), ("fallback", "over capacity, to the fallback expert")):
        if experts.get(name) is not None:
            parts.append(f"{word} {sum(experts[name]) / len(layers):.1%}")
    parts.append(f"entropy {sum(experts['entropy']) / len(layers):.2f} nats")
    screen.say("   ".join(parts))
    spread = f"{min(cvs):.2f}..{max(cvs):.2f}"
    screen.say(f"       deviation {sparkline(tuple(cvs))}   {spread}, layers {layers[0]} to {layers[-1]}")
