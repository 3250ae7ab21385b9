"""Write the Grafana dashboard for [sinks.prometheus]: `python tools/dashboard.py`."""

import json
from pathlib import Path

FILE = Path(__file__).parents[1] / "src" / "ingot" / "observe" / "prometheus" / "dashboard.json"
# (title, unit of Grafana, [(query, legend) ..]); a row has three.
PANELS = [
    ("Loss", "none", [("ingot_train_loss", "train"), ("ingot_eval_loss", "held out")]),
    ("Bits per byte", "none", [("ingot_train_bpb", "train"), ("ingot_eval_source_bpb", "held out {{source}}")]),
    ("Gradient norm", "none", [("ingot_train_grad_norm", "norm")]),
    ("Tokens per second", "short", [("ingot_perf_tokens_per_second", "tokens/s")]),
    ("Model FLOPs utilization", "percentunit", [("ingot_perf_mfu", "MFU")]),
    ("Learning rate", "sci", [("ingot_train_lr", "lr")]),
    (
        "Seconds of a step",
        "s",
        [
            (f"ingot_perf_{use}_seconds", use)
            for use in ("computing", "collectives", "pipeline", "reading", "queued", "blocked", "data")
        ],
    ),
    (
        "Time of a step by rank",
        "s",
        [
            ("ingot_rank_computing_seconds", "computing, rank {{rank}}"),
            ("ingot_rank_data_wait_seconds", "data, rank {{rank}}"),
        ],
    ),
    ("Slow ranks", "none", [("ingot_rank_slow_factor", "rank {{rank}}")]),
    ("Memory", "bytes", [("ingot_memory_peak_bytes", "peak")]),
    ("Checkpoints", "s", [("ingot_checkpoint_stall_seconds", "stall"), ("ingot_checkpoint_write_seconds", "write")]),
    ("Age of the newest checkpoint", "s", [("time() - ingot_checkpoint_timestamp_seconds", "age")]),
    (
        "Faults, restarts, findings in 15 minutes",
        "none",
        [('increase(ingot_events_total{kind=~"fault|restart|finding|alert|guard|rolled_back"}[15m])', "{{kind}}")],
    ),
    ("Experts: busiest over mean", "none", [("ingot_experts_max_load", "busiest"), ("ingot_experts_load_cv", "cv")]),
    ("Cost", "currencyUSD", [("ingot_run_cost_usd", "cost")]),
    ("Progress", "percentunit", [("ingot_run_step / ingot_run_steps", "done")]),
    ("Time left", "s", [("ingot_run_eta_seconds", "left")]),
    ("Ranks", "none", [("count by (host) (ingot_rank_info)", "{{host}}")]),
    ("Norm of the weights", "none", [("ingot_train_param_norm", "norm")]),
    ("Update over weights", "sci", [("ingot_train_update_ratio", "ratio")]),
    ("Gradient norm by layer", "none", [("ingot_layer_grad_norm", "layer {{layer}}")]),
    ("Training loss by source", "none", [("ingot_data_source_loss", "{{source}}")]),
    ("Goodput", "percentunit", [("ingot_run_goodput", "time in steps that count")]),
    ("Temperature of GPUs", "celsius", [("ingot_rank_device_temperature_celsius", "rank {{rank}}")]),
]


def of_run(query: str) -> str:
    """Return a query for the runs that the dashboard shows."""
    words = []
    for word in query.split():
        name, brace, rest = word.partition("{")
        at = name.find("ingot_")
        if at < 0:
            words.append(word)
        elif brace:
            words.append(f'{name}{{run=~"$run",{rest}')
        else:
            tail = name[len(name.rstrip(")")) :] if name.endswith(")") else ""
            words.append(f'{name.removesuffix(tail)}{{run=~"$run"}}{tail}')
    return " ".join(words)


def dashboard() -> dict:
    """Return the dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + at), "datasource": source, "expr": of_run(query), "legendFormat": legend}
                for at, (query, legend) in enumerate(queries)
            ],
        }
        for number, (title, unit, queries) in enumerate(PANELS)
    ]
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": source,
            "query": "label_values(ingot_run_step, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
        },
    ]
    return {
        "uid": "ingot-run",
        "title": "ingot: a run",
        "tags": ["ingot"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
