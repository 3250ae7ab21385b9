"""The sinks of trackers, each fed by real processes and read back with the tracker's own library or format."""

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.plugins.sink import SinkPlace
from ingot.plugins.sink_options import TensorBoardOptions
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .planted import PlantedRun, planted


def needs(package: str, extra: str = ""):
    """Marks of a test that needs a tracker's library, which the nightly tests install. extra: that has it, if its name
    is another one."""
    try:
        missing = importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # of a package that this one is in
        missing = True
    reason = f"{package} is not installed: pip install -c constraints.txt '.[{extra or package}]'"
    return lambda test: pytest.mark.nightly(pytest.mark.skipif(missing, reason=reason)(test))


def fed(root: Path, name: str, settings: str = "") -> RunFolder:
    """A run that trained steps 1 and 2, was started again, and trained 2 and 3, after its sink `name` got all of it."""
    folder = planted(root, f"[sinks.{name}]\nclose_seconds = 300\n{settings}\n")
    log = PlantedRun(folder)
    log.start()
    log.line(1)
    log.line(2, loss=math.inf)
    log.write(events.SAMPLE, step=2, prompt="Once", text="upon a time")
    log.start()
    log.line(2, loss=3.0)
    log.line(3, loss=2.5)
    command = [sys.executable, "-P", "-m", "ingot.observe.feed", str(folder.root)]
    done = subprocess.run(command, input=b"end\n", stdout=subprocess.PIPE, timeout=400)
    assert done.stdout == b"" and list(read_events(folder.events, events.SINK_FAILED)) == []
    return folder


@needs("tensorboard")
def test_tensorboard_shows_the_steps_of_the_last_attempt(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(fed(tmp_path, "tensorboard").sinks / "tensorboard"))
    found.Reload()
    assert [(row.step, row.value) for row in found.Scalars("train/loss")] == [(1, 2.0), (2, 3.0), (3, 2.5)]
    assert "perf/tokens_per_second" in found.Tags()["scalars"]
    assert found.Tensors("sample/Once")[0].tensor_proto.string_val == [b"upon a time"]


@needs("tensorboard")
def test_a_full_disk_costs_tensorboard_nothing(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from ingot.observe.sinks.tensorboard import TensorBoardSink

    sink = TensorBoardSink(SinkPlace(run=tmp_path, own=tmp_path), TensorBoardOptions())
    sink.open("x", 1, {})
    file = sink._file

    class Full:
        seek, truncate = file.seek, file.truncate
        write = staticmethod(lambda data: os.write(file.fileno(), data[:5]))

    for step in (1, 2):
        monkeypatch.setattr(sink, "_file", Full)
        with pytest.raises(OSError, match="only 5 of"):
            sink.scalars(step, 16, {"train/loss": 2.0})
        monkeypatch.undo()
        sink.scalars(step, 16, {"train/loss": 2.0})
        found = EventAccumulator(str(tmp_path))  # before the sink is closed
        found.Reload()
        assert [row.step for row in found.Scalars("train/loss")] == [1, 2][:step]


@needs("mlflow")
def test_mlflow_has_the_history_of_each_number(tmp_path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{fed(tmp_path, 'mlflow').sinks}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("ingot").experiment_id])
    history = [(row.step, row.value) for row in client.get_metric_history(run.info.run_id, "train/loss")]
    assert [row for row in history if row[0] != 2] == [(1, 2.0), (3, 2.5)]
    assert {row for row in history if row[0] == 2} >= {(2, 3.0)}
    assert run.info.status == "FINISHED" and run.data.tags["ingot.attempt"] == "1"
    assert run.data.params["train.steps"] == "10" and run.data.tags["sample/Once"] == "upon a time"


@needs("trackio")
def test_trackio_has_a_row_per_call(tmp_path):
    folder = fed(tmp_path, "trackio", "folder = 'trackio'\nproject = 'own'")
    with sqlite3.connect(folder.root / "trackio" / "own.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    losses = [(step, own) for step, text in rows if "train/loss" in (own := json.loads(text))]
    assert [(step, own["train/loss"], own["run/attempt"]) for step, own in losses] == [
        (1, 2.0, 0),
        (2, "inf", 0),
        (2, 3.0, 1),
        (3, 2.5, 1),
    ]


@needs("clearml")
def test_clearml_writes_a_session_that_it_can_import(tmp_path):
    folder = fed(tmp_path, "clearml", "mode = 'offline'")
    (path,) = (folder.sinks / "clearml" / "offline").glob("*.zip")
    with zipfile.ZipFile(path) as session:
        batches = [json.loads(line) for line in session.read("metrics.jsonl").splitlines()]
        task = json.loads(session.read("task.json"))
    rows = [row for batch in batches for row in batch if (row["metric"], row.get("variant")) == ("train", "loss")]
    assert [(row["iter"], row["value"]) for row in rows] == [(1, 2.0), (2, 3.0), (3, 2.5)]  # infinity is left out
    assert task["name"].startswith("x-") and "diff" not in task.get("script", {})


@needs("wandb")
def test_wandb_writes_a_file_that_it_can_sync(tmp_path):
    folder = fed(tmp_path, "wandb", "mode = 'offline'")
    (path,) = folder.sinks.rglob("run-*.wandb")
    own, rows = [], []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "run":
            own.append(record.run)
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    losses = [(row["train/step"], row["train/loss"], row["run/attempt"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 2.0, 0), (2, "inf", 0), (2, 3.0, 1), (3, 2.5, 1)]
    assert own[0].run_id.startswith("x-") and own[0].display_name == "x"
    assert not (path.parent / "files" / "wandb-metadata.json").exists()  # the command line


def wandb_records(path: Path) -> Iterator:
    """The records of an offline file: after 7 bytes of header a log in the format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # the rest of a block is padding
            at += (1 << 15) - at % (1 << 15)
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


class Collector(BaseHTTPRequestHandler):
    """A collector that keeps what is posted to it."""

    posted: list[tuple[str, bytes]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@needs("opentelemetry.exporter.otlp.proto.http", "otlp")  # MLflow installs the rest of opentelemetry
def test_a_collector_gets_the_newest_numbers(tmp_path, monkeypatch):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    monkeypatch.setattr(Collector, "posted", [], raising=False)
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        fed(tmp_path, "otlp", f"endpoint = 'http://127.0.0.1:{server.server_port}'")
    finally:
        server.shutdown()
        server.server_close()
    path, body = Collector.posted[-1]
    (own,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    facts = {one.key: one.value for one in own.resource.attributes}
    assert path == "/v1/metrics" and facts["ingot.run"].string_value == "x" and facts["ingot.attempt"].int_value == 1
    metrics = {one.name: one for scope in own.scope_metrics for one in scope.metrics}
    assert metrics["ingot.train.loss"].gauge.data_points[0].as_double == 2.5
    assert metrics["ingot.train.loss"].unit == "nats"
    counts = {point.attributes[0].value.string_value: point.as_int for point in metrics["ingot.events"].sum.data_points}
    assert counts["step"] == 2
