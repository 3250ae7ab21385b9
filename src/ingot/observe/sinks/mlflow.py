"""A run of MLflow, on its server or in a database in the run folder."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import MlflowOptions

_MOST_PARAMS, _MOST_CHARACTERS = 100, 500  # that MLflow takes in a batch, and in a value
_TAG = "ingot.run_id"
# Seven attempts of two minutes each, by default: a call would count as one that hangs. Ingot tries again, with pauses.
_REQUESTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


class MlflowSink(Sink):
    """One run of MLflow for the life of a run folder, found by the tag ingot.run_id. Steps that repeat have several
    values, each with its time."""

    def __init__(self, place: SinkPlace, options: MlflowOptions):
        for name, value in _REQUESTS.items():
            os.environ.setdefault(name, value)
        tracking = require("mlflow.tracking", "mlflow")
        self._entities = require("mlflow.entities", "mlflow")
        given = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = tracking.MlflowClient(tracking_uri=given or f"sqlite:///{place.own.absolute()}/mlflow.db")
        self._experiment = options.experiment
        self._run = ""

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        if not self._run:
            self._run = self._find(run_id) or self._create(run_id, config)
        self._client.set_tag(self._run, "ingot.attempt", str(attempt))

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return found.experiment_id if found else self._client.create_experiment(self._experiment)

    def _find(self, run_id: str) -> str:
        found = self._client.search_runs([self._experiment_id()], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        return found[0].info.run_id if found else ""

    def _create(self, run_id: str, config: Mapping[str, Any]) -> str:
        tags = {_TAG: run_id}
        run = self._client.create_run(self._experiment_id(), tags=tags, run_name=str(config["name"])).info.run_id
        params = [self._entities.Param(_name(key), str(value)[:_MOST_CHARACTERS]) for key, value in config.items()]
        for some in (params[at : at + _MOST_PARAMS] for at in range(0, len(params), _MOST_PARAMS)):
            self._client.log_batch(run, params=some)
        return run

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._run, _name(name), text[:_MOST_CHARACTERS])

    def close(self, deadline: float) -> None:
        if self._run:
            self._client.set_terminated(self._run)


def _name(name: str) -> str:
    """Return a name that MLflow takes: letters, digits, spaces and _-./ alone."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]
