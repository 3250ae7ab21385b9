"""Alerts from the verdicts of the run's own guards: each function reads one kind of event, and decides nothing anew.

A function gets an event and the state of the run, and yields signs of trouble and ends of alerts. Events that lack what
their kind has raise KeyError, TypeError, ValueError or OverflowError, and are counted by the caller.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.observe.alerts import kinds
from ingot.observe.alerts.incidents import End, Sign
from ingot.observe.alerts.run_state import RunState, finite
from ingot.schema import events
from ingot.schema.alert import alert_of
from ingot.schema.alert import described as alert_text
from ingot.schema.alert_record import CRITICAL, WARNING
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.guard_record import STOP, described, measure_of
from ingot.schema.run import RunConfig
from ingot.units import counted, format_seconds

Verdict = Sign | End
_MOST_UNFIT = 16  # machines of one check


class VerdictRules:
    """The verdicts of the events of a run."""

    def __init__(self, run: RunConfig, state: RunState):
        self._guard, self._state = run.guard, state
        self._log_every = run.watch.log_every
        self._of: dict[str, Callable[[Mapping[str, Any]], Iterator[Verdict]]] = {
            events.FINDING: self._finding,
            events.ALERT: self._alert,
            events.GUARD: self._measure,
            events.GUARD_ASKED: self._asked,
            events.SANITY: self._sanity,
            events.STATE_DAMAGED: self._damaged,
            events.STATE_REPLAYED: self._replayed,
            events.STRAGGLER: self._straggler,
            events.QUARANTINED: self._quarantined,
            events.DATA_TROUBLE: self._data_trouble,
            events.FAULT: self._fault,
            events.NODE: self._node,
            events.HEALTH: self._health,
            events.FLEET_CHECK: self._fleet_check,
            events.CHECKPOINT: self._saved,
            events.WEIGHTS_SAVED: self._saved,
            events.CHECKPOINT_FAILED: self._not_saved,
            events.CHECKPOINT_STORED: self._stored,
            events.CHECKPOINT_NOT_STORED: self._not_stored,
            events.LEASE_RECORDED: self._lease_recorded,
            events.LEASE_NOT_RECORDED: self._lease_not_recorded,
            events.CHECKPOINT_REFUSED: self._refused,
            events.RUN_STARTED: self._started,
            events.PROGRESS: self._progress,
        }

    def of(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        """Yield the verdicts of an event."""
        read = self._of.get(event["kind"])
        return read(event) if read else iter(())

    # -- training --

    def _finding(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        found, step = [str(one) for one in event["found"]], int(event["step"])
        infinite = any("not finite" in one for one in found)
        sigmas = max(float(event["loss_sigmas"]), float(event["norm_sigmas"]))
        text = f"step {step:,}: {', '.join(found)}; loss {float(event['loss']):.4g}"
        text += "" if infinite else f" ({float(event['loss_sigmas']):+.1f} deviations)"
        text += f", gradient norm {float(event['grad_norm']):.4g}"
        text += "" if infinite else f" ({float(event['norm_sigmas']):+.1f})"
        yield Sign(
            kind=kinds.NOT_FINITE if infinite else kinds.SPIKE,
            evidence=text + ("; its update was skipped" if event["skipped"] else ""),
            since=step,
            value=None if infinite else finite(sigmas),
            limit=None if infinite else self._guard.sigmas,
            quiet_steps=self._guard.calm_steps,
        )

    def _alert(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        alert = alert_of(event)
        again = max(self._guard.plateau_window, self._guard.loss_ratio_window)  # after which it would come again
        yield Sign(
            kind=alert.alert,
            evidence=alert_text(alert),
            since=alert.since,
            value=finite(alert.value),
            limit=finite(alert.limit),
            quiet_steps=again + 2 * self._log_every,
        )

    def _measure(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        measure = measure_of(event)
        yield End(kinds.GUARD_ASKS, why="the guard took a measure")
        yield Sign(
            kind=kinds.GUARD_STOPPED if measure.action == STOP else kinds.GUARD_MEASURE,
            evidence=described(measure),
            since=measure.first,
            quiet_steps=self._guard.calm_steps,
        )

    def _asked(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        left = float(event["until"]) - event["time"]
        found = ", ".join(map(str, event["found"]))
        yield Sign(
            kind=kinds.GUARD_ASKS,
            evidence=f"steps {int(event['first'])}-{int(event['last'])}: {found}; the run waits "
            f"{format_seconds(max(left, 0.0))} for a person to choose a measure",
            since=int(event["first"]),
            lost=1.0,
        )

    def _sanity(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        if not event["suspect"]:
            yield End(kinds.SUSPECT_WEIGHTS, why="held-out text has its usual loss again")
            return
        yield Sign(
            kind=kinds.SUSPECT_WEIGHTS,
            evidence=f"held-out text has a loss of {float(event['loss']):.4g} at step {int(event['step']):,}: the "
            "checkpoint of this step is suspect",
            since=int(event["step"]),
            value=finite(event["loss"]),
        )

    def _damaged(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        tensor = f", tensor {event['tensor']}" if event["tensor"] else ""
        yield Sign(
            kind=kinds.STATE_DAMAGED,
            subject=_rank(event),
            evidence=f"the hashes of the state differ on {_rank(event)} ({event['host']}){tensor}: {event['sign']}",
            since=int(event["step"]),
            quiet_steps=self._guard.calm_steps,
        )

    def _replayed(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        if event["verdict"] == "transient":
            yield End(kinds.STATE_DAMAGED, why="the same steps show no damage when trained again")

    def _straggler(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        if event["ended"]:
            yield End(kinds.STRAGGLER, _rank(event), "as fast as its peers again")
            return
        seconds, step = float(event["seconds"]), self._state.step_seconds
        yield Sign(
            kind=kinds.STRAGGLER,
            subject=_rank(event),
            evidence=f"{_rank(event)} on {event['host']} takes {float(event['factor']):.2f} times as long as its peers "
            f"({event['phase']}): all ranks wait {format_seconds(max(seconds, 0.0))} of each step for it",
            since=int(event["since"]),
            value=finite(event["factor"]),
            lost=seconds / step if step else 0.0,
        )

    # -- data --

    def _quarantined(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield Sign(
            kind=kinds.DAMAGED_DATA,
            subject=str(event["shard"]),
            evidence=f"left out {counted(int(event['windows']), 'window')} of shard {event['shard']}: {event['found']}",
            since=int(event["step"]),
            value=float(int(event["windows"])),
            quiet_steps=self._guard.calm_steps,
        )

    def _data_trouble(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield Sign(
            kind=kinds.DATA_TROUBLE,
            subject=_rank(event),
            evidence=f"{_rank(event)} needed {int(event['tries'])} tries and {format_seconds(float(event['seconds']))} "
            f"to read {event['path']}: {event['reason']}",
            since=int(event["step"]),
            quiet_steps=self._guard.calm_steps,
        )

    # -- ranks and machines --

    def _fault(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        rank, failure = event["rank"], str(event["failure"])
        who = "the job" if rank is None else f"rank {int(rank)}"
        silent = finite(event.get("seconds"))
        where = f" (evidence: {event['evidence']})" if event.get("evidence") else ""
        command = {"numerics": "ingot explain nan {run}", "memory": "ingot explain mem {run}/run.toml"}.get(failure, "")
        yield Sign(
            kind=kinds.RANK_SILENT if failure == "hang" else kinds.RANK_LOST,
            subject=who,
            evidence=f"{who} {event['cause']} near step {int(event['step']):,}{where}",
            since=int(event["step"]),
            value=silent,
            lost=1.0,
            command=command,
        )

    def _node(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        host = str(event["host"])
        if event["action"] == "joined":
            yield End(kinds.MACHINE_LOST, host, "the machine joined again")
        elif event["action"] == "lost":
            yield Sign(kind=kinds.MACHINE_LOST, subject=host, evidence=f"machine {host} is lost: {event['reason']}")

    def _health(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        verdict = event["verdict"]
        leaves = {"drain": "; it leaves the run", "discard": "; it leaves the run, and nothing is saved before"}
        yield Sign(
            kind=kinds.MACHINE_FAULT,
            subject=str(event["node"]),
            evidence=f"machine {event['node']}: {event['words']}{leaves.get(verdict, '')}",
            severity=WARNING if verdict == "warn" else CRITICAL,
            quiet_steps=self._guard.calm_steps,
        )

    def _fleet_check(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        if not event["unfit"]:
            yield End(kinds.UNFIT_MACHINE, why="a check found all machines sound")
        for one in event["unfit"][:_MOST_UNFIT]:
            yield Sign(
                kind=kinds.UNFIT_MACHINE,
                subject=str(one["node"]),
                evidence=f"machine {one['node']} is unfit: {one['check']}: {one['words']}",
                quiet_steps=self._guard.calm_steps,
            )

    # -- checkpoints --

    def _saved(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        full = event["kind"] == events.CHECKPOINT
        why = f"step {int(event['step']):,} is saved"
        yield End(kinds.NOT_SAVED, None if full else WEIGHTS, why)  # a checkpoint has the weights, too
        if full:
            yield End(kinds.CHECKPOINT_REFUSED, why=why)
            yield End(kinds.CHECKPOINT_OLD, why=why)

    def _not_saved(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        what = str(event.get("what", FULL))
        name = "the weights" if what == WEIGHTS else "the checkpoint"
        yield Sign(
            kind=kinds.NOT_SAVED,
            subject=what,
            evidence=f"{name} of step {int(event['step']):,} could not be saved: {event['reason']}",
            since=int(event["step"]),
            severity=WARNING if what == WEIGHTS else None,
        )

    def _stored(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield End(kinds.NOT_STORED, str(event.get("what", FULL)), f"the store has step {int(event['step']):,}")

    def _not_stored(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        retry = finite(event.get("retry_seconds"))
        again = "it is not tried again" if retry is None else f"the next attempt is in {format_seconds(max(retry, 0))}"
        yield Sign(
            kind=kinds.NOT_STORED,
            subject=str(event.get("what", FULL)),
            evidence=f"step {int(event['step']):,} is not in {event['store']}: {event['reason']}; {again}",
            since=int(event["step"]),
        )

    def _lease_recorded(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield End(kinds.NOT_STORED, "lease", "the record of this attempt is in the store")

    def _lease_not_recorded(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        text = f"{event['store']} refuses the record of this attempt, so nothing is uploaded: {event['reason']}"
        yield Sign(kind=kinds.NOT_STORED, subject="lease", evidence=text, severity=CRITICAL)

    def _refused(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield Sign(
            kind=kinds.CHECKPOINT_REFUSED,
            subject=f"step {int(event['step'])}",
            evidence=f"the checkpoint of step {int(event['step']):,} is damaged, and an older one is tried: "
            f"{event['reason']}",
            since=int(event["step"]),
        )

    # -- the run --

    def _started(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        yield End(kinds.STRAGGLER, why="the ranks start again")
        yield End(kinds.GUARD_ASKS, why="the run started again")
        yield End(kinds.GUARD_STOPPED, why="the run started again")

    def _progress(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        why = f"steps continue with step {int(event['step']):,}"
        for kind in (kinds.RANK_LOST, kinds.RANK_SILENT, kinds.MACHINE_LOST, kinds.RUN_SILENT, kinds.RUN_ENDED):
            yield End(kind, why=why)


def _rank(event: Mapping[str, Any]) -> str:
    return f"rank {int(event['rank'])}"
