"""The settings `[launch]` of a run file: how the job is started, watched, restarted and stopped."""

import math
from dataclasses import dataclass
from typing import Literal

from ingot.errors import ConfigError
from ingot.ranges import Deadline, Degree, Factor, PositiveDegree, Queue, Seconds
from ingot.schema.save_interval import AUTO
from ingot.units import parse_duration

SAME = 3  # times the same failure at the same step: a bug, after which no attempt begins


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Supervision of the job. max_restarts: number of restarts after lost ranks, in restart_window_seconds.
    timeout_seconds: if a collective waits
    longer, a rank counts as hung. lease_seconds: a launcher that gave no sign of life for this time counts as gone, and
    another machine may take over the run.

    stop_after: the duration, from the start of the launcher, after which the run saves and stops, as "4h", "1d2h30m",
      "04:00:00" or "1-12:00:00"; restarts of the ranks do not begin it again. "": no limit.
    grace: the duration between a request to stop (a signal, or stop_after) and the moment when the ranks are killed. A
      save that does not fit into the rest of it, by the last one's duration, is not begun. "": the run stops when it
      has saved.
    watchdog_seconds: the shortest time in a step after which a job counts as hung; a step may also take five times the
      longest so far, and the first one after a restart five times the first one before (trainer/launch/watchdog.py).
      Ranks of a job that has ended have that long to leave it. 0: there is no watchdog.
    watchdog_other_seconds: the same for all that is no step: the start, the very first step, a wait for data, the
      callbacks of a log line, the first save and the first evaluation. The run folder may not answer for as long.
    watchdog_save, watchdog_evaluate: the same for saves and for evaluations of the held-out text, also the first one: a
      duration, as "10min". "auto": ten times the longest one so far, with what a save wrote while training went on, but
      at least five times watchdog_seconds and at most watchdog_other_seconds.
    data_seconds: without a batch for this time, another thread of the rank reads it again; a read of a token shard that
      fails is tried again for half of it. After 300 s without a batch the run ends.
    nodes: the number of machines, each with an equal share of the ranks. Every machine gets the same command, and the
      run folder is on storage that all of them see. Machines beyond this number wait as spares.
    spares: how many machines should wait as spares, each with its own launcher. If fewer do, for shrink_seconds, a
      warning says so, also after one took the place of a lost machine; training goes on. For `nodes` of at least 2.
    node_seconds: without a sign of life for this time, a machine counts as lost.
    node_wait_seconds: how long to wait for machines that are missing, at the start and after one was lost.
    restart: "full" starts all ranks anew after a failure; "partial" only those that failed, and the others start again
      in their processes (trainer/resilience/again.py).
    min_ranks: the fewest ranks with which the run goes on if machines are missing, a multiple of the ranks of one; 0:
      all of `parallel`. The planner chooses the layout for fewer machines before the start (schema/fallbacks.py).
    shrink_seconds: how long to wait for the place of a lost machine before the run goes on with fewer: about as long as
      a restart of a large job takes, because all ranks start again when the machine returns.
    grow_seconds: the shortest time between two restarts for machines that have joined. One that comes and goes then
      costs at most a restart in this time.
    on_oom: after a rank ran out of memory, "stop" shows its memory and the cheapest layout with less; "adapt" goes on
      with that layout.
    straggler_factor: a rank that needs longer for its own work than its peers by more than this factor, and for many
      steps, is reported as slow (trainer/telemetry/stragglers.py). Ranks of equal machines differ by a few percent. 0:
      slow ranks are not looked for.
    on_straggler: what follows for the machine of a rank that stays slow in its computation. "report": nothing. "drain":
      the run saves and goes on without it, if a spare can take its place, or if it is faster with fewer machines
      (`min_ranks`); otherwise it stays. A rank that waits for its data never costs a machine. On CPUs only so far.
    straggler_seconds: how long the other ranks have waited for such a rank, in total and without a break, before its
      machine leaves: about as long as a drain takes, with its save and start. Then a drain at most doubles what the
      slow rank has cost already, and what passes within minutes costs no machine.
    on_bad_health: what a machine's report of a fault means (machine/health). "drain": the run saves, goes on without
      that machine, and a spare takes its place; after an error of memory that cannot be corrected, it saves nothing
      before. Without other machines it ends. "warn": it is reported.
    health_file: a file on each machine to which its monitor adds reports, a JSON object per line; "": there is none.
    check_every: before the first start, and after every so many restarts after failures, the machines are checked
      against each other, spares too (trainer/fleet): an unfit one is treated as `on_bad_health` says. 0: never; 1:
      after each restart. `ingot doctor --nodes` is the same check as a command.
    check_seconds: the duration of each measurement of a check, at most 60: computation and memory of each device, and
      the links of pairs of machines, twice.
    failures_per_node_day: how often a node of the cluster fails, for checkpoint.every = "auto" and the planner; 0: the
      rate of Llama 3's run, in proportion to the devices of a node (theory/failures.py).
    """

    max_restarts: Queue = 3
    restart_window_seconds: Deadline = 3600.0
    timeout_seconds: Deadline = 120.0
    lease_seconds: Deadline = 60.0
    stop_after: str = ""
    grace: str = ""
    watchdog_seconds: Seconds = 60.0
    watchdog_other_seconds: Deadline = 1800.0
    watchdog_save: str = AUTO
    watchdog_evaluate: str = AUTO
    data_seconds: Deadline = 60.0
    nodes: PositiveDegree = 1
    spares: Degree = 0
    node_seconds: Deadline = 15.0
    node_wait_seconds: Deadline = 600.0
    restart: Literal["full", "partial"] = "full"
    min_ranks: Degree = 0
    shrink_seconds: Deadline = 60.0
    grow_seconds: Deadline = 600.0
    on_oom: Literal["stop", "adapt"] = "stop"
    straggler_factor: Factor = 1.2
    on_straggler: Literal["report", "drain"] = "report"
    straggler_seconds: Deadline = 300.0
    on_bad_health: Literal["drain", "warn"] = "drain"
    health_file: str = ""
    check_every: Queue = 0
    check_seconds: Deadline = 2.0
    failures_per_node_day: Factor = 0.0

    def problems(self):
        for name, without in (("stop_after", ""), ("grace", ""), ("watchdog_save", AUTO), ("watchdog_evaluate", AUTO)):
            text = getattr(self, name)
            if text == without:
                continue
            try:
                seconds = parse_duration(text)
            except ConfigError as error:
                yield name, f"{error.found}; {error.rule}" + (f', or "{without}"' if without else "")
                continue
            if not 0 < seconds <= _YEAR:
                yield name, f"{text!r} is {seconds:,.0f} s, not from 1 to {_YEAR:,} s"

        if self.check_seconds > 60:
            yield "check_seconds", f"{self.check_seconds:g} is more than 60: the ranks wait for all measurements"
        if self.straggler_factor and not 1 < self.straggler_factor <= 100:
            yield "straggler_factor", f"{self.straggler_factor} is neither 0 nor above 1 and at most 100"
        if self.on_straggler == "drain" and not self.straggler_factor:
            yield (
                "on_straggler",
                '"drain" needs a launch.straggler_factor above 1: with 0, slow ranks are not looked for',
            )
        if self.on_straggler == "drain" and self.on_bad_health == "warn":
            yield (
                "on_straggler",
                '"drain" needs launch.on_bad_health = "drain": with "warn", drained machines join again',
            )

    @property
    def stop_after_limit(self) -> float:
        """stop_after in seconds; inf if there is no limit."""
        return _limit(self.stop_after)

    @property
    def watchdog_save_limit(self) -> float | None:
        """watchdog_save in seconds; None for "auto"."""
        return None if self.watchdog_save == AUTO else parse_duration(self.watchdog_save)

    @property
    def watchdog_evaluate_limit(self) -> float | None:
        """watchdog_evaluate in seconds; None for "auto"."""
        return None if self.watchdog_evaluate == AUTO else parse_duration(self.watchdog_evaluate)

    @property
    def grace_limit(self) -> float:
        """grace in seconds; inf if there is no limit."""
        return _limit(self.grace)


_YEAR = 365 * 86_400


def _limit(duration: str) -> float:
    return parse_duration(duration) if duration else math.inf
