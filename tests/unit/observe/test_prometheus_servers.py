"""The rules and the dashboard on a real Prometheus, which scrapes a sink, and a real Alertmanager, which calls us."""

import json
import math
import re
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


LIMITS = {
    "mfu_least": 0.35, "communication_most": 0.3, "goodput_least": 0.9, "mix_drift": 0.05, "budget_usd": 10,
    "disk_hours": 12,
}  # fmt: skip
OFF = '{job="i",instance="z",run="off",run_id="off-1"}'
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
    "IngotLowMfu": ([("ingot_perf_mfu" + RUNS, "0.3x30"), ("ingot_limit_mfu_least" + RUNS, "0.35x30")], 20),
    "IngotCommunication": (
        [
            ("ingot_perf_tp_exposed_seconds" + RUNS, "0.4x30"),
            ("ingot_perf_world_exposed_seconds" + RUNS, "0.4x30"),
            ("ingot_perf_step_seconds" + RUNS, "2x30"),
            ("ingot_limit_communication_most" + RUNS, "0.3x30"),
        ],
        20,
    ),
    "IngotGoodput": ([("ingot_run_goodput" + RUNS, "0.8x90"), ("ingot_limit_goodput_least" + RUNS, "0.9x90")], 80),
    "IngotMixDrift": (
        [
            ('ingot_data_source_share{job="i",instance="a",run="x",run_id="x-1",source="web"}', "0.5x60"),
            ('ingot_data_source_weight{job="i",instance="a",run="x",run_id="x-1",source="web"}', "0.6x60"),
            ("ingot_limit_mix_drift" + RUNS, "0.05x60"),
        ],
        50,
    ),
    "IngotOverBudget": ([("ingot_run_cost_usd" + RUNS, "11x5"), ("ingot_limit_budget_usd" + RUNS, "10x5")], 3),
    "IngotBudgetForecast": (
        [
            ("ingot_run_cost_usd" + RUNS, "6x30"),
            ("ingot_run_cost_to_come_usd" + RUNS, "6x30"),
            ("ingot_limit_budget_usd" + RUNS, "10x30"),
        ],
        20,
    ),
    # 200 GB, of which 0.5 are used each minute: 4.8 hours are left after 110 minutes.
    "IngotDiskFilling": (
        [("ingot_disk_free_bytes" + RUNS, "200000000000-500000000x120"), ("ingot_limit_disk_hours" + RUNS, "12x120")],
        110,
    ),
    "IngotDiskFull": ([("ingot_disk_free_bytes" + RUNS, "1000x5"), ("ingot_checkpoint_bytes" + RUNS, "1000x5")], 3),
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
    # Within their limits; in a pipeline, a stage waits for the work of its neighbors, which is no communication.
    ("ingot_perf_mfu" + RUNS, "0.4x200"),
    ("ingot_perf_tp_exposed_seconds" + RUNS, "0.4x200"),
    ("ingot_perf_pp_exposed_seconds" + RUNS, "1x200"),
    ("ingot_run_goodput" + RUNS, "0.2x30 0.95x170"),  # of a start, then of a healthy run
    ('ingot_data_source_share{job="i",instance="a",run="x",run_id="x-1",source="web"}', "0.5 0.7 0.5 0.7 0.6x196"),
    ('ingot_data_source_weight{job="i",instance="a",run="x",run_id="x-1",source="web"}', "0.6x200"),
    ("ingot_run_cost_usd" + RUNS, "0+0.02x200"),
    ("ingot_run_cost_to_come_usd" + RUNS, "5x200"),
    ("ingot_disk_free_bytes" + RUNS, "200000000000-100000000x200"),  # full in 30 hours
    ("ingot_checkpoint_bytes" + RUNS, "1000000000x200"),
    *((f"ingot_limit_{name}{RUNS}", f"{limit}x200") for name, limit in LIMITS.items()),
    # A limit of 0 switches its alert off.
    *((f"ingot_limit_{name}{OFF}", "0x200") for name in LIMITS),
    ("ingot_perf_mfu" + OFF, "0.01x200"),
    ("ingot_perf_tp_exposed_seconds" + OFF, "1x200"),
    ("ingot_perf_step_seconds" + OFF, "2x200"),
    ("ingot_run_goodput" + OFF, "0.1x200"),
    ('ingot_data_source_share{job="i",instance="z",run="off",run_id="off-1",source="web"}', "0.1x200"),
    ('ingot_data_source_weight{job="i",instance="z",run="off",run_id="off-1",source="web"}', "0.6x200"),
    ("ingot_run_cost_usd" + OFF, "100x200"),
    ("ingot_run_cost_to_come_usd" + OFF, "100x200"),
    ("ingot_disk_free_bytes" + OFF, "200000000000-500000000x200"),
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
    tests.append(unit(series, 'run:ingot_collectives_share{run="x"}', 20, 2))  # one for each of two runs of one name
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


@needs("prometheus", "prometheus-alertmanager")
def test_every_alert_reaches_people_with_the_command_that_explains_it(tmp_path, monkeypatch):
    """Each rule, 600 times as fast, and a run for each: the run of an alert has its trouble, and no other alert."""
    monkeypatch.setattr(Hook, "alerts", [], raising=False)
    monkeypatch.setattr(Fabricated, "began", time.time(), raising=False)
    hook, runs = HTTPServer(("127.0.0.1", 0), Hook), HTTPServer(("127.0.0.1", 0), Fabricated)
    for one in (hook, runs):
        threading.Thread(target=one.serve_forever, daemon=True).start()
    text = (FILES / "rules.yml").read_text()
    (tmp_path / "rules.yml").write_text(re.sub(r"\b(\d+)([mh])\b", faster, text))
    found = re.findall(r"- alert: (\w+)\n.*?severity: (\w+).*?command: \"(.*?)\"", text, re.S)
    wanted = {name: (name, severity, command) for name, severity, command in found}
    assert sorted(wanted) == sorted(TROUBLE)
    server, manager = free_port(), free_port()
    programs = [
        *alertmanager(tmp_path, manager, hook.server_port),
        *prometheus(tmp_path, server, runs.server_port, manager, rules=tmp_path / "rules.yml", interval="500ms"),
    ]
    try:
        eventually(lambda: {own_alert(one["labels"]) for one in Hook.alerts} >= set(wanted), 120)
    finally:
        for program in programs:
            program.kill()
            program.wait()
        for one in (hook, runs):
            one.shutdown()
            one.server_close()
    for one in Hook.alerts:
        labels = one["labels"]
        if labels["alertname"] == "IngotLost" != labels["run"]:
            continue  # of a scrape that was late, on a busy machine
        assert (labels["run"], labels["severity"], one["annotations"]["command"]) == wanted[labels["alertname"]]
        assert labels["run"] in one["annotations"]["summary"] and "<no value>" not in one["annotations"]["summary"]


def own_alert(labels: dict[str, str]) -> str:
    """The name of an alert; "" if it is not that of its run."""
    return labels["alertname"] if labels["alertname"] == labels["run"] else ""


def faster(duration: re.Match) -> str:
    return f"{int(duration[1]) * {'m': 60, 'h': 3600}[duration[2]] * 1000 // 600}ms"


CALM_SECONDS = 8.0  # then comes the trouble; what lasts has to last for "1h", which are 6 s
# alert -> the numbers of its run, before and after its trouble: a number, or a function of the seconds that passed.
TROUBLE: dict[str, tuple[dict, dict]] = {
    "IngotStalled": ({}, {"run_progress_timestamp_seconds": lambda _: time.time() - 1000, "run_ended": 0}),
    "IngotLost": ({"run_ended": 0}, {}),
    "IngotLossNotFinite": ({"train_loss": 2}, {"train_loss": math.nan}),
    "IngotRestarts": ({'events_total{kind="restart"}': 1}, {'events_total{kind="restart"}': lambda s: 1 + 4 * s}),
    "IngotFault": ({'events_total{kind="fault"}': 0}, {'events_total{kind="fault"}': 1}),
    "IngotGuard": ({'events_total{kind="guard"}': 0}, {'events_total{kind="guard"}': 1}),
    "IngotCheckpointFailed": (
        {'events_total{kind="checkpoint_failed"}': 0},
        {'events_total{kind="checkpoint_failed"}': 1},
    ),
    "IngotCheckpointOld": ({}, {"checkpoint_timestamp_seconds": lambda _: time.time() - 11_000, "run_ended": 0}),
    "IngotSlower": ({"perf_tokens_per_second": 100}, {"perf_tokens_per_second": 50}),
    "IngotSlowRank": ({'rank_slow_factor{rank="3"}': 0}, {'rank_slow_factor{rank="3"}': 2}),
    "IngotWaitsForData": ({}, {"data_wait_seconds": 1, "perf_step_seconds": 2}),
    "IngotLowMfu": ({"perf_mfu": 0.4, "limit_mfu_least": 0.35}, {"perf_mfu": 0.3, "limit_mfu_least": 0.35}),
    "IngotCommunication": (
        {},
        {"perf_tp_exposed_seconds": 0.8, "perf_step_seconds": 2, "limit_communication_most": 0.3},
    ),
    "IngotGoodput": ({"run_goodput": 1}, {"run_goodput": 0.8, "limit_goodput_least": 0.9}),
    "IngotMixDrift": (
        {},
        {
            'data_source_share{source="web"}': 0.5,
            'data_source_weight{source="web"}': 0.6,
            "limit_mix_drift": 0.05,
        },
    ),
    "IngotOverBudget": ({}, {"run_cost_usd": 11, "run_cost_to_come_usd": 1, "limit_budget_usd": 10}),
    "IngotBudgetForecast": ({}, {"run_cost_usd": 6, "run_cost_to_come_usd": 6, "limit_budget_usd": 10}),
    "IngotDiskFilling": (
        {"disk_free_bytes": lambda s: 1e12 - 1e6 * s},
        {"disk_free_bytes": lambda s: 1e12 - 1e9 * s, "limit_disk_hours": 12},
    ),
    "IngotDiskFull": ({}, {"disk_free_bytes": 1e9, "checkpoint_bytes": 1e9}),
}


class Fabricated(BaseHTTPRequestHandler):
    """A target with a run for each alert, named like it."""

    began: float

    def do_GET(self):
        seconds, lines = time.time() - self.began, []
        for alert, (before, after) in TROUBLE.items():
            for name, value in (before if seconds < CALM_SECONDS else after).items():
                bare, _, labels = name.rstrip("}").partition("{")
                number = value(seconds) if callable(value) else value
                own = "".join(f",{label}" for label in [labels] if label)
                lines.append(f'ingot_{bare}{{run="{alert}",run_id="{alert}-1"{own}}} {number!r}'.replace("nan", "NaN"))
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


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


def prometheus(
    root: Path, port: int, sink: int, manager: int, *, rules: Path = FILES / "rules.yml", interval: str = "1s"
) -> list[subprocess.Popen]:
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ingot", "static_configs": [{"targets": [f"127.0.0.1:{sink}"]}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
    }
    (root / "prometheus.yml").write_text(json.dumps(config))
    options = [f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data"]
    return [start("prometheus", *options, f"--web.listen-address=127.0.0.1:{port}")]


def start(*command: str) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
