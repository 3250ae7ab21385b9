"""Spikes, by the real commands: the step of an explosion is explained; a poisoned page is built, trained on, found by
the guard, explained, and left out again."""

import json
import math
import random

import pytest
from tests.e2e.conftest import VOCAB, Project
from tests.unit.data.conftest import english, write_crawl

from ingot.cli.main import main
from ingot.data.build.corpus import load_corpus
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.quarantine import read_quarantine

PAGES = 150
POISON = "http://poison.example/page"
RUN_FILE = """name = "poisoned"
seed = 7

[model]
vocab_size = 400
d_model = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
head_dim = 16
d_ffn = 64
max_seq_len = 64

[data]
tokens = "data/tokens/train"

[train]
steps = 70
seq_len = 64
global_batch = 4
micro_batch = 4
precision = "fp32"
device = "cpu"

[optim]
lr = 2e-2

[checkpoint]
mode = "sync"
every_steps = 35

[watch]
log_every = 10

[guard]
settle_steps = 0
ready = 16
window = 32
"""


def test_an_explosion_between_two_log_lines_ends_the_run_at_its_own_step(project, capsys):
    options = ["parallel.dp_shard=1", "watch.log_every=10", "optim.lr=3"]
    project.train("exploded", *(word for option in options for word in ("--set", option)), code=93)
    folder = project.folder("exploded")
    losses = {step: facts[0] for step, facts in project.facts("exploded").items()}
    first = min(step for step, loss in losses.items() if loss > 2 * math.log(VOCAB))
    assert max(losses) == 10 and 1 < first < 9
    (fault,) = read_events(folder.events, events.FAULT)
    assert (fault["code"], fault["step"]) == ("E-LOSS-EXPLODED", first)
    assert main(["guard", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert f"ended at step {first} with E-LOSS-EXPLODED: loss {losses[first]:.4g} at step {first}" in shown
    assert main(["explain", "spike", str(folder.root), "--json"]) == 0
    (explained,) = json.loads(capsys.readouterr().out)["steps"]
    assert (explained["step"], explained["found"]) == (first, ["the run ended"])


@pytest.mark.slow
def test_a_poisoned_page_is_found_explained_and_left_out(tmp_path, capsys):
    pick = random.Random(5)
    pages = [(f"http://site.example/{number}", english(number), 200) for number in range(PAGES)]
    noise = "\n".join("".join(pick.choice("ZQXJKVWY#%@~^*+=|<>{}") for _ in range(60)) for _ in range(70))
    pages.insert(60, (POISON, f"{english(5000, 6)}\n{noise}", 200))
    crawl = str(write_crawl(tmp_path / "crawl.warc.gz", pages))
    build = ["data", "build", crawl, "--vocab-size", "400", "--runner", "inline", "--preset", "none"]
    build += ["--set", "junk.enabled=false", "--out"]
    assert main([*build, str(tmp_path / "data")]) == 0
    (tmp_path / "run.toml").write_text(RUN_FILE)
    output = Project(tmp_path).train("runs/poisoned")
    run, listed = tmp_path / "runs/poisoned", tmp_path / "list.jsonl"
    assert f"why: ingot explain spike {run} --step" in output
    capsys.readouterr()

    assert main(["explain", "spike", str(run), "--quarantine", str(listed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] and all(step["documents"][0]["url"] == POISON for step in found["steps"])
    assert [entry.url for entry in read_quarantine(listed)] == [POISON]

    assert main(["data", "trace", "--run", str(run), "--quarantine", str(listed)]) == 0
    assert POISON in capsys.readouterr().out
    lists = f"quarantine.files={json.dumps([str(listed)])}"
    assert main([*build, str(tmp_path / "again"), "--set", lists]) == 0
    funnel = {stage.name: stage for stage in load_corpus(tmp_path / "again/corpus").funnel}
    assert sum(funnel["quarantine"].dropped.values()) == 1 and funnel["quarantine"].documents_out == PAGES

    assert main(["data", "purge", str(tmp_path / "data"), "--quarantine", str(listed)]) == 0
    assert f"ingot train {run} --accept-change data.tokens" in capsys.readouterr().out
    assert main(["explain", "spike", str(run)]) != 0
    assert "E-STEP-TOKENS-GONE" in capsys.readouterr().err
