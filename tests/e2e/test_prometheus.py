"""A real Prometheus scrapes a real `ingot train` of 8 ranks: every rank is there, with the numbers that it recorded."""

import importlib.util
import json
import urllib.parse
import urllib.request

import numpy as np
import pytest
from tests.unit.observe.planted import eventually, free_port
from tests.unit.observe.test_prometheus_servers import needs, prometheus

from ingot.observe.ranks import RANK_METRICS
from ingot.observe.sinks.prometheus import rank_metric_name
from ingot.schema.metrics import read_series

from .conftest import RUN_FILE, Project, ended, write_tokens

RANKS, STEPS = 8, 60
ALWAYS = {"perf/step_seconds", "perf/wait_seconds", "perf/forward_seconds", "memory/peak_bytes"}
PACED = """
import time
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

class Paced(StepCallback):
    def on_update(self, step):
        time.sleep(0.1)  # some scrapes, one a second, are of steps in between

CALLBACKS.register(CallbackPart(name="paced", make=Paced))
"""
MISSING = importlib.util.find_spec("prometheus_client") is None


@pytest.mark.skipif(MISSING, reason="prometheus_client is not installed: pip install 'ingot[prometheus]'")
@needs("prometheus")
def test_8_ranks_are_scraped_while_they_train(tmp_path):
    write_tokens(tmp_path / "tokens")
    (tmp_path / "paced.py").write_text(PACED)
    sink, server = free_port(), free_port()
    text = RUN_FILE
    for before, after in {
        "steps = 120": f"steps = {STEPS}",
        "global_batch = 8": f"global_batch = {2 * RANKS}",
        "dp_shard = 2": f"dp_shard = {RANKS}",
        "log_every = 2": "log_every = 1",
    }.items():
        assert before in text
        text = text.replace(before, after)
    text += '\n[callbacks.paced]\n[plugins]\nmodules = ["paced"]\nfolder = "."\n'
    text += f'[sinks.prometheus]\nport = {sink}\naddress = "127.0.0.1"\nclose_seconds = 10.0\n'
    (tmp_path / "run.toml").write_text(text)
    project = Project(tmp_path)
    programs = prometheus(tmp_path, server, sink, free_port())  # nobody answers as its Alertmanager
    ask = f"http://127.0.0.1:{server}/api/v1/query?query="

    def result(query: str) -> dict[str, float]:
        """Return the newest value of each rank; of a number of the run, by its name."""
        try:
            with urllib.request.urlopen(ask + urllib.parse.quote(query), timeout=10) as answer:
                found = json.loads(answer.read())["data"]["result"]
        except OSError:
            return {}
        labels = ("rank", "run")
        return {
            next(own["metric"][one] for one in labels if one in own["metric"]): float(own["value"][1]) for own in found
        }

    wanted = {str(rank) for rank in range(RANKS)}
    try:
        process = project.start("run")
        eventually(lambda: set(result("ingot_rank_step_seconds")) == wanted, 120)
        first = result("ingot_run_step")["tiny"]
        assert process.poll() is None and first < STEPS, "the run ended before it was scraped"
        eventually(lambda: result("ingot_run_step").get("tiny", 0) > first, 60)
        ended(process, 0)
        assert set(result("last_over_time(ingot_rank_info[10m])")) == wanted
        metrics, seen = project.folder("run").metrics, set()
        for name in RANK_METRICS:
            scraped = result(f"last_over_time({rank_metric_name(name)}[10m])")
            if not scraped:
                continue  # of a GPU, or of an axis that this run has not
            seen.add(name)
            assert set(scraped) == wanted, name
            for rank, value in scraped.items():
                recorded = np.concatenate([part.mean for part in read_series(metrics, int(rank), name)])
                assert value in recorded, (name, rank, value)
        assert seen >= ALWAYS
        losses = [loss for loss, *_ in project.facts("run").values()]
        assert result("last_over_time(ingot_train_loss[10m])")["tiny"] in losses
        assert result("last_over_time(ingot_run_ended[10m])") == {"tiny": 1.0}
    finally:
        for program in programs:
            program.kill()
            program.wait()
