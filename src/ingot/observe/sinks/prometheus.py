"""The newest numbers for Prometheus, of the run and of its ranks: on a port, and in a file for node_exporter."""

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.errors import require
from ingot.events import read_events
from ingot.observe.alerts.disks import DiskLooks
from ingot.observe.alerts.limits import source_shares
from ingot.observe.ranks import RANK_METRICS, rank_rows
from ingot.observe.scalars import SCALARS, scalars_of
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import PrometheusOptions
from ingot.schema import events
from ingot.schema.metrics import NewestRow
from ingot.schema.run_folder import RunFolder

_SCRAPED_SECONDS = 60.0  # a server that scraped within them will again
_FILE_SECONDS = 1.0  # between two versions of the textfile
_DISK_SECONDS = 30.0  # between two looks at the disk of the run folder
_FRESH_SECONDS = 900.0  # events that are older when they are read are history: rules look at the last 15 minutes
_RESTORED = (
    *(events.RANK_STARTED, events.RUN_STARTED, events.PROGRESS, events.STRAGGLER, events.FINISHED, events.STOPPED),
    *(events.CHECKPOINT, events.EVALUATION, events.SANITY, events.START_TIMES, events.MEASURED),
)
# Kinds whose number alerts look at: they are shown from the start, because a counter that begins at 1 has no increase.
COUNTED = (
    *(events.FAULT, events.RESTART, events.PLANNED_RESTART, events.ROLLED_BACK, events.GUARD, events.FINDING),
    *(events.ALERT, events.STRAGGLER, events.HEALTH, events.STATE_DAMAGED, events.DATA_TROUBLE, events.QUARANTINED),
    *(events.CHECKPOINT, events.CHECKPOINT_FAILED, events.CHECKPOINT_SKIPPED, events.CHECKPOINT_NOT_STORED),
    *(events.SKIPPED, events.SINK_FAILED),
)
_STATE = {
    "ingot_run_step": "the newest step of a log line",
    "ingot_run_steps": "the last step of the run",
    "ingot_run_attempt": "starts of the ranks and roll-backs, from 0",
    "ingot_run_ended": "1 after the run finished or stopped on request, else 0",
    "ingot_run_started_timestamp_seconds": "Unix time of the start of this attempt",
    "ingot_run_progress_timestamp_seconds": "Unix time of the newest log line",
    "ingot_checkpoint_timestamp_seconds": "Unix time of the newest verified checkpoint",
}


# The settings [alerts] with which the rules compare, for each its words. 0 switches an alert off.
_LIMITS = {
    "mfu_least": "the MFU below which people are alerted",
    "communication_most": "the share of a step for communication above which people are alerted",
    "goodput_least": "the goodput below which people are alerted",
    "mix_drift": "how far the share of a source may be from its weight",
    "disk_hours": "people are alerted so many hours before a disk is full",
    "budget_usd": "what the run may cost (USD)",
}


class PrometheusSink(Sink):
    """Metrics ingot_GROUP_NAME of the run, ingot_rank_NAME by rank, and ingot_events_total by kind of event. Each has
    the labels `run` and `run_id`."""

    def __init__(self, place: SinkPlace, options: PrometheusOptions):
        self._library = require("prometheus_client", "prometheus")
        self._families = require("prometheus_client.core", "prometheus")
        self._folder = RunFolder(place.run)
        self._textfile = place.run / options.textfile if options.textfile else None
        self._lock = threading.Lock()
        self._began = time.time()
        self._restored_at = float("-inf")  # the time of the newest event that was read before the first call
        self._labels: dict[str, str] = {}
        self._state: dict[str, float] = {}
        self._limits: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._disk, self._disk_asked_at, self._disk_free = DiskLooks((place.run,)), float("-inf"), -1.0
        self._values: dict[str, float] = {}
        self._rows: dict[int, NewestRow] = {}
        self._rows_are_old = True
        self._world_size: int | None = None
        self._hosts: dict[int, str] = {}
        self._slow: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._written_at = self._scraped_at = float("-inf")
        self._scraped = threading.Event()
        self._server = None
        self._registry = self._library.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if options.port:
            self._server, _ = self._library.start_http_server(options.port, options.address, self._registry)

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        if not self._labels:
            self._restore()
        with self._lock:
            self._labels = {"run": str(config["name"]), "run_id": run_id}
            self._state["ingot_run_attempt"] = attempt
            self._state["ingot_run_steps"] = config["train.steps"]
            self._state.setdefault("ingot_run_ended", 0)  # this process may begin in the middle of an attempt
            self._limits = {name: config[f"alerts.{name}"] for name in _LIMITS if f"alerts.{name}" in config}
            prefix = "data.weights."
            weights = {name.removeprefix(prefix): own for name, own in config.items() if name.startswith(prefix)}
            self._weights = source_shares(weights)

    def _restore(self) -> None:
        """Take in what the log has already: this process may be the second one of an attempt."""
        for event in read_events(self._folder.events, *_RESTORED):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
                self._take(event["kind"], event.get("step"), event)
                self._values |= scalars_of(event)
                self._restored_at = max(self._restored_at, float(event["time"]))

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._values |= values

    def event(self, kind: str, step: int | None, facts: Mapping[str, Any]) -> None:
        is_fresh = facts["time"] > self._began - _FRESH_SECONDS
        if time.monotonic() >= self._disk_asked_at + _DISK_SECONDS:
            self._disk.ask()
            self._disk_asked_at = time.monotonic()
        with self._lock:
            began = self._state.get("ingot_run_started_timestamp_seconds", float("-inf"))
            is_end = events.ends_run(kind, facts) and facts["time"] >= began  # and not that of an earlier attempt
            if facts["time"] > self._restored_at or is_end:
                self._take(kind, step, facts)
            self._counts[kind] += is_fresh
        if self._textfile and time.monotonic() >= self._written_at + _FILE_SECONDS:
            try:
                self._write()
            except BaseException:
                self._counts[kind] -= is_fresh  # the call is repeated
                raise

    def _take(self, kind: str, step: int | None, facts: Mapping[str, Any]) -> None:
        if kind == events.RUN_STARTED:
            self._state |= {"ingot_run_started_timestamp_seconds": facts["time"], "ingot_run_ended": 0}
            self._rows, self._slow, self._world_size = {}, {}, facts["world_size"]
            self._hosts = {rank: host for rank, host in self._hosts.items() if rank < facts["world_size"]}
        elif kind == events.RANK_STARTED:
            self._hosts[facts["rank"]] = facts["host"]
        elif kind == events.PROGRESS and step is not None:
            self._state |= {"ingot_run_step": step, "ingot_run_progress_timestamp_seconds": facts["time"]}
            self._rows_are_old = True
        elif kind == events.STRAGGLER:
            self._slow[facts["rank"]] = 0.0 if facts["ended"] else facts["factor"]
        elif kind == events.CHECKPOINT:
            self._state["ingot_checkpoint_timestamp_seconds"] = facts["time"]
        elif events.ends_run(kind, facts):
            self._state["ingot_run_ended"] = 1

    def close(self, deadline: float) -> None:
        """Write the textfile, and wait for one more scrape if somebody scrapes, so that the end of the run is seen."""
        if self._textfile:
            self._write()
        if self._server is None:
            return
        if time.monotonic() < self._scraped_at + _SCRAPED_SECONDS:
            self._scraped.clear()
            self._scraped.wait(max(deadline - 1.0, 0.0))
        self._server.shutdown()

    def _write(self) -> None:
        assert self._textfile is not None
        self._written_at = time.monotonic()
        with self._without_scrape():
            self._library.write_to_textfile(str(self._textfile), self._registry)

    @contextlib.contextmanager
    def _without_scrape(self) -> Iterator[None]:
        before = self._scraped_at
        yield
        self._scraped_at = before

    # -- the collector of prometheus_client --

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, as families of prometheus_client. Called by another thread at each scrape."""
        rows = self._read_rows() if self._rows_are_old else None
        with self._lock:
            self._rows = self._rows if rows is None else rows
            families = list(self._collected())
        yield from families
        self._scraped_at = time.monotonic()
        self._scraped.set()

    def _read_rows(self) -> dict[int, NewestRow] | None:
        """Return the newest numbers of the ranks of this attempt; None if they cannot be read."""
        self._rows_are_old = False
        try:
            found = rank_rows(self._folder.metrics)
        except (OSError, ValueError):
            return None
        return {rank: row for rank, row in found.items() if self._world_size is None or rank < self._world_size}

    def _collected(self) -> Iterator[Any]:
        if not self._labels:
            return
        run = self._labels
        for name, words in _STATE.items():
            if name in self._state:
                yield self._gauge(name, words, [(run, self._state[name])])
        for name, limit in self._limits.items():
            yield self._gauge(f"ingot_limit_{name}", _LIMITS[name], [(run, limit)])
        rows = [({**run, "source": source}, weight) for source, weight in self._weights.items()]
        yield self._gauge("ingot_data_source_weight", "the share of the samples that a source should have", rows)
        for answer in self._disk.answers():  # of an error or silence it has no free bytes
            self._disk_free = answer.get("free_bytes", -1.0)
        if self._disk_free >= 0:
            yield self._gauge("ingot_disk_free_bytes", "of the disk of the run folder", [(run, self._disk_free)])
        yield from self._gauges({name: own for name, own in self._values.items() if name in SCALARS}, run)
        yield from self._of_sources(run)
        ranks = [({**run, "rank": str(rank), "host": host}, 1.0) for rank, host in sorted(self._hosts.items())]
        yield self._gauge("ingot_rank_info", "1 for each rank of this attempt, with its machine", ranks)
        yield self._gauge(
            "ingot_rank_step", "the step of the newest numbers of a rank", self._of_ranks(lambda row: row.step)
        )
        for name, metric in RANK_METRICS.items():
            words = f"{metric.meaning} ({metric.unit})" if metric.unit else metric.meaning
            rows = self._of_ranks(lambda row, name=name: row.values.get(name))
            if rows:
                yield self._gauge(rank_metric_name(name), words, rows)
        slow = [({**run, "rank": str(rank)}, factor) for rank, factor in sorted(self._slow.items())]
        yield self._gauge("ingot_rank_slow_factor", "of the time of its peers, for a slow rank; 0: no more", slow)
        counts = dict.fromkeys(COUNTED, 0) | self._counts
        family = self._families.CounterMetricFamily("ingot_events", "events by kind", labels=[*run, "kind"])
        for kind, count in counts.items():
            family.add_metric([*run.values(), kind], count)
        yield family

    def _of_ranks(self, number: Callable[[NewestRow], float | None]) -> list[tuple[Mapping[str, str], float]]:
        found = ((rank, number(row)) for rank, row in sorted(self._rows.items()))
        return [({**self._labels, "rank": str(rank)}, value) for rank, value in found if value is not None]

    def _gauges(self, values: Mapping[str, float], run: Mapping[str, str]) -> Iterator[Any]:
        for name, value in values.items():
            unit, words = SCALARS[name]
            yield self._gauge(metric_name(name), f"{words} ({unit})" if unit else words, [(run, value)])

    def _of_sources(self, run: Mapping[str, str]) -> Iterator[Any]:
        """Yield the numbers whose names depend on a layer, a source of data or a callback, with these as labels."""
        own: dict[str, tuple[str, list[tuple[dict[str, str], float]]]] = {}
        for name, value in self._values.items():
            group, _, rest = name.partition("/")
            label, _, metric = rest.rpartition("/")
            if name in SCALARS or not label:
                continue
            if group == "callbacks":
                family, words, labels = "ingot_callback", "of callbacks", {"callback": label, "metric": metric}
            elif group == "layers":
                family, words, labels = f"ingot_layer_{metric}", "by layer of the model", {"layer": label}
            else:
                family, words, labels = f"ingot_{group}_source_{metric}", "by source of the data", {"source": label}
            own.setdefault(family, (words, []))[1].append(({**run, **labels}, value))
        for family, (words, rows) in own.items():
            yield self._gauge(family, words, rows)

    def _gauge(self, name: str, words: str, rows: list[tuple[Mapping[str, str], float]] | Any) -> Any:
        labels = list(rows[0][0]) if rows else []
        family = self._families.GaugeMetricFamily(name, words, labels=labels)
        for own, value in rows:
            family.add_metric(list(own.values()), value)
        return family


def metric_name(name: str) -> str:
    """Return the name that a number has in Prometheus: "train/loss" -> "ingot_train_loss"."""
    return "ingot_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def rank_metric_name(name: str) -> str:
    """Return the name that a number of a rank has: "perf/step_seconds" -> "ingot_rank_step_seconds"."""
    return "ingot_rank_" + name.removeprefix("perf/").replace("/", "_")
