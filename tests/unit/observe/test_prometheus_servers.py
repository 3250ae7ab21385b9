"""The rules and the dashboard on a real Prometheus, which scrapes a sink, and a real Alertmanager, which calls us."""

import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tools.dashboard import FILE, dashboard

from ingot.observe.prometheus.__main__ import main
from ingot.observe.ranks import RANK_METRICS
from ingot.observe.sinks.prometheus import PrometheusSink, rank_metric_name
from ingot.plugins.sink import SinkPlace
from ingot.plugins.sink_options import PrometheusOptions
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .planted import eventually, free_port, write_ranks

FILES = FILE.parent


def needs(*programs: str):
    missing = [name for name in programs if shutil.which(name) is None]
    reason = f"{', '.join(missing)} not found: apt-get install prometheus prometheus-alertmanager"
    return lambda test: pytest.mark.nightly(pytest.mark.skipif(bool(missing), reason=reason)(test))


def test_the_dashboard_is_written_by_its_tool_and_copied(tmp_path, capsys):
    assert json.loads(FILE.read_text()) == dashboard()
    assert main([str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["ingot-dashboard.json", "ingot-rules.yml"]
    assert len(capsys.readouterr().out.splitlines()) == 2


# alert -> the series that make it fire, by the minute, and when it is looked at. Each also has a healthy run `ok`.
RUNS = '{job="i",instance="a",run="x",run_id="x-1"}'
FIRES = {
    "IngotStalled": ([("ingot_run_progress_timestamp_seconds" + RUNS, "0x30"), ("ingot_run_ended" + RUNS, "0x30")], 20),
    "IngotLost": ([("ingot_run_ended" + RUNS, "0x10 stale")], 25),
    "IngotLossNotFinite": ([("ingot_train_loss" + RUNS, "2x5 NaN NaN NaN NaN NaN")], 8),
    "IngotRestarts": (
        [('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="restart"}', "0x20 1 2 3 4 4x10")],
        28,
    ),
    "IngotFault": ([('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="fault"}', "1x5")], 3),
    "IngotGuard": ([('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="guard"}', "0x20 1x9")], 25),
    "IngotCheckpointFailed": (
        [('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="checkpoint_failed"}', "0x20 1x9")],
        25,
    ),
    "IngotCheckpointOld": (
        [("ingot_checkpoint_timestamp_seconds" + RUNS, "0x200"), ("ingot_run_ended" + RUNS, "0x200")],
        190,
    ),
    "IngotSlower": ([("ingot_perf_tokens_per_second" + RUNS, "100x60 50x60")], 100),
    "IngotSlowRank": ([('ingot_rank_slow_factor{job="i",instance="a",run="x",run_id="x-1",rank="3"}', "2x20")], 10),
    "IngotWaitsForData": ([("ingot_data_wait_seconds" + RUNS, "1x30"), ("ingot_perf_step_seconds" + RUNS, "2x30")], 20),
}
# A run without trouble, and one that ended long ago: nothing fires.
CALM = [
    ("ingot_run_progress_timestamp_seconds" + RUNS, "0+60x200"),
    ("ingot_checkpoint_timestamp_seconds" + RUNS, "0+60x200"),
    ("ingot_run_ended" + RUNS, "0x200"),
    ("ingot_train_loss" + RUNS, "2x200"),
    ("ingot_perf_tokens_per_second" + RUNS, "100x200"),
    ("ingot_data_wait_seconds" + RUNS, "0.01x200"),
    ("ingot_perf_step_seconds" + RUNS, "2x200"),
    ('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="fault"}', "0x200"),
    ('ingot_events_total{job="i",instance="a",run="x",run_id="x-1",kind="restart"}', "0x200"),
    ('ingot_rank_slow_factor{job="i",instance="a",run="x",run_id="x-1",rank="3"}', "0x200"),
    ('ingot_run_ended{job="i",instance="b",run="done",run_id="done-1"}', "0x9 1 stale"),
    ('ingot_run_ended{job="i",instance="c",run="led",run_id="led-1"}', "0x10 stale"),  # the leader changes
    ('ingot_run_ended{job="i",instance="d",run="led",run_id="led-1"}', "_x11 0x190"),
    ('ingot_run_ended{job="i",instance="e",run="away",run_id="away-1"}', "0x10 stale _x6 0x190"),  # the longest pause
    # Two runs of one name at once, and a sink that starts again: its counters begin at 0, as events go on.
    ("ingot_perf_collectives_seconds" + RUNS, "0.1x200"),
    ('ingot_perf_collectives_seconds{job="i",instance="f",run="x",run_id="x-2"}', "0.1x200"),
    ('ingot_perf_step_seconds{job="i",instance="f",run="x",run_id="x-2"}', "2x200"),
    ('ingot_events_total{job="i",instance="g",run="again",run_id="again-1",kind="restart"}', "0x3 1x20 2x60 0x100"),
]


@needs("promtool")
def test_every_alert_fires_for_its_cause_and_none_without(tmp_path):
    rules = FILES / "rules.yml"
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True)
    names = [line.split()[2] for line in rules.read_text().splitlines() if line.strip().startswith("- alert:")]
    assert sorted(FIRES) == sorted(names)
    series, tests = [{"series": name, "values": values} for name, values in CALM], []
    for minute in (5, 15, 20, 100, 190):
        tests.append(unit(series, 'ALERTS{alertstate="firing"}', minute, 0))
    tests.append(unit(series, "run:ingot_collectives_share", 20, 2))  # one for each of two runs of one name
    for name, (rows, minute) in FIRES.items():
        own = [{"series": one, "values": values} for one, values in rows]
        tests.append(unit(own, f'ALERTS{{alertname="{name}",alertstate="firing"}}', minute, 1))
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))  # is YAML
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def unit(series: list[dict], query: str, minute: int, count: int) -> dict:
    """A test of promtool: `query` has `count` results at this minute."""
    samples = [{"labels": "{}", "value": count}] if count else []
    found = {"expr": f"count({query})", "eval_time": f"{minute}m", "exp_samples": samples}
    return {"interval": "1m", "input_series": series, "promql_expr_test": [found]}


class Hook(BaseHTTPRequestHandler):
    """The receiver of Alertmanager's calls."""

    alerts: list[dict]

    def do_POST(self):
        self.alerts.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@needs("prometheus", "prometheus-alertmanager")
def test_a_prometheus_scrapes_8_ranks_shows_the_dashboard_and_alerts(tmp_path, monkeypatch):
    monkeypatch.setattr(Hook, "alerts", [], raising=False)
    hook = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    port, server, manager = free_port(), free_port(), free_port()
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    write_ranks(run, 8)
    sink = PrometheusSink(SinkPlace(run=run.root, own=run.root), PrometheusOptions(address="127.0.0.1", port=port))
    programs = [*alertmanager(tmp_path, manager, hook.server_port), *prometheus(tmp_path, server, port, manager)]
    try:
        now = train(sink)
        ask = f"http://127.0.0.1:{server}/api/v1/query?query="

        def result(query: str) -> list[dict]:
            try:
                with urllib.request.urlopen(ask + urllib.parse.quote(query), timeout=10) as answer:
                    return json.loads(answer.read())["data"]["result"]
            except OSError:
                return []

        eventually(lambda: len(result("ingot_rank_info")) == 8)
        eventually(lambda: result("run:ingot_data_wait_share"))
        for name in map(rank_metric_name, RANK_METRICS):  # every number of every rank
            found = {one["metric"]["rank"]: float(one["value"][1]) for one in result(name)}
            assert found == {str(rank): rank + 1.0 for rank in range(8)}, name
        assert {one["metric"]["rank"] for one in result("ingot_rank_info")} == {str(rank) for rank in range(8)}
        for query in [shown(one) for panel in dashboard()["panels"] for one in panel["targets"]]:
            eventually(lambda query=query: result(query), 20)  # an increase needs a second scrape
        sink.event(events.FAULT, 4, {"time": now, "rank": 3})
        sink.scalars(5, 80, {"train/loss": float("nan")})
        wanted = {"IngotFault", "IngotLossNotFinite"}
        eventually(lambda: {one["labels"]["alertname"] for one in Hook.alerts} >= wanted, 90)
        (own,) = [one for one in Hook.alerts if one["labels"]["alertname"] == "IngotLossNotFinite"][:1]
        assert own["labels"]["run"] == "x" and own["annotations"]["command"] == "ingot explain nan RUN"
    finally:
        for program in programs:
            program.kill()
            program.wait()
        sink.close(1.0)
        hook.shutdown()
        hook.server_close()


def shown(target: dict) -> str:
    return target["expr"].replace("$run", ".*")


def train(sink: PrometheusSink) -> float:
    """Give the sink every kind of number that the dashboard shows, as a run of 8 ranks would."""
    now = time.time()
    sink.open("x-1", 0, {"name": "x", "train.steps": 10})
    for rank in range(8):
        sink.event(events.RANK_STARTED, None, {"time": now, "rank": rank, "host": f"node{rank // 4}"})
    sink.event(events.RUN_STARTED, None, {"time": now, "world_size": 8})
    from ingot.observe.scalars import SCALARS, USES

    sink.scalars(4, 64, dict.fromkeys((*SCALARS, "eval/web/bpb", "data/web/loss", "layers/0/grad_norm"), 1.0))
    sink.event(events.PROGRESS, 4, {"time": now})
    sink.event(events.WAITS, 4, {"time": now} | {use: {"mean": 0.5, "most": 1.0, "rank": 6} for use in USES})
    slow = {"time": now, "rank": 6, "factor": 1.5, "ended": False}
    sink.event(events.STRAGGLER, 4, slow)
    sink.event(events.CHECKPOINT, 4, {"time": now})
    return now


def alertmanager(root: Path, port: int, hook: int) -> list[subprocess.Popen]:
    config = {
        "route": {"receiver": "own", "group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"},
        "receivers": [{"name": "own", "webhook_configs": [{"url": f"http://127.0.0.1:{hook}/"}]}],
    }
    (root / "alertmanager.yml").write_text(json.dumps(config))
    options = [f"--config.file={root}/alertmanager.yml", f"--storage.path={root}/alerts", "--cluster.listen-address="]
    return [start("prometheus-alertmanager", *options, f"--web.listen-address=127.0.0.1:{port}")]


def prometheus(root: Path, port: int, sink: int, manager: int) -> list[subprocess.Popen]:
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FILES / "rules.yml")],
        "scrape_configs": [{"job_name": "ingot", "static_configs": [{"targets": [f"127.0.0.1:{sink}"]}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
    }
    (root / "prometheus.yml").write_text(json.dumps(config))
    options = [f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data"]
    return [start("prometheus", *options, f"--web.listen-address=127.0.0.1:{port}")]


def start(*command: str) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
