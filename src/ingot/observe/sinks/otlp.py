"""The newest numbers for an OpenTelemetry collector, with OTLP over HTTP."""

import time
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.observe.scalars import SCALARS
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import OtlpOptions
from ingot.schema import events

_SECONDS = 5.0  # between two exports
_TIMEOUT_SECONDS = 20.0  # of an export, with its repetitions


class OtlpSink(Sink):
    """A gauge ingot.GROUP.NAME per number, and the counter ingot.events by kind. Resource: service.name, ingot.run,
    ingot.run_id, ingot.attempt. A collector that does not answer raises: the next export has the newest numbers."""

    def __init__(self, place: SinkPlace, options: OtlpOptions):
        exporters = require("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otlp")
        self._metrics = require("opentelemetry.sdk.metrics", "otlp")
        self._readers = require("opentelemetry.sdk.metrics.export", "otlp")
        self._resources = require("opentelemetry.sdk.resources", "otlp")
        self._place = f"{options.endpoint.rstrip('/')}/v1/metrics"
        self._exporter = exporters.OTLPMetricExporter(endpoint=self._place, timeout=_TIMEOUT_SECONDS)
        self._reader: Any = None
        self._gauges: dict[str, Any] = {}
        self._exported_at = float("-inf")

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        if self._reader is not None:
            self._export()
        names = {"service.name": "ingot", "ingot.run": config["name"], "ingot.run_id": run_id}
        resource = self._resources.Resource.create({**names, "ingot.attempt": attempt})
        self._reader = self._readers.InMemoryMetricReader()
        provider = self._metrics.MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = provider.get_meter("ingot")
        self._counter = self._meter.create_counter("ingot.events", description="events by kind")
        self._gauges = {}

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, "run/step": float(step)}.items():
            if name not in self._gauges:
                unit, words = SCALARS.get(name, ("", ""))
                own = "ingot." + name.replace("/", ".")
                self._gauges[name] = self._meter.create_gauge(own, unit=unit, description=words)
            self._gauges[name].set(value)

    def event(self, kind: str, step: int | None, facts: Mapping[str, Any]) -> None:
        if kind == events.PROGRESS and time.monotonic() >= self._exported_at + _SECONDS:
            self._export()  # first: a call that raises is repeated, and would be counted twice
        self._counter.add(1, {"kind": kind})

    def close(self, deadline: float) -> None:
        if self._reader is not None:
            self._export()

    def _export(self) -> None:
        self._exported_at = time.monotonic()
        data = self._reader.get_metrics_data()
        if data is None:
            return
        result = self._exporter.export(data, timeout_millis=_TIMEOUT_SECONDS * 1000)
        if result is not self._readers.MetricExportResult.SUCCESS:
            raise OSError(f"{self._place} did not take the metrics")
