"""Topics of the whole run: its size, and its failures."""

from dataclasses import replace

import pytest

from ingot.planner.explain import TOPICS, explain
from ingot.planner.plan import Planned, make_plan
from ingot.recipes.clusters import load_cluster
from ingot.recipes.load import load_model
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train

CLUSTER = load_cluster("128x8xh100")
RUN = RunConfig(
    name="run",
    model=load_model("llama3-70b").arch,
    data=Data(tokens="tokens"),
    train=Train(steps=357_000, seq_len=4096, global_batch=1024, micro_batch=1),
    parallel=Parallel(tp=4, pp=4, dp_shard=64),
)
PLANNED = Planned(run=RUN, plan=make_plan(RUN, CLUSTER), reasons={})


@pytest.mark.parametrize("topic", TOPICS)
def test_lines_of_every_topic_fit_a_terminal(topic):
    lines = explain(topic, PLANNED)
    assert lines
    assert all(line and len(line) <= 118 for line in lines)


def test_a_size_is_judged_by_what_is_served():
    """1.5T tokens: 70B are 1.1 times compute-optimal; the more is served, the smaller the cheapest model."""
    text = " ".join(line.strip() for line in explain("size", PLANNED))
    assert "1.5T are 1.06 times that" in text
    sizes = [text.split(f"serve {tokens} tokens: ")[1].split("B on")[0] for tokens in ("1.5T", "15T", "150T")]
    assert [float(size) for size in sizes] == sorted(map(float, sizes), reverse=True)
    assert float(sizes[0]) < 70


def test_failures_and_money_show_their_formulas():
    text = " ".join(line.strip() for line in explain("failures", PLANNED))
    for part in ("128 nodes x 0.380% a day", "Daly 2006", "goodput", "99% quantile of Poisson", "x $2.8", "hdd"):
        assert part in text


def test_without_a_time_no_failures_are_told():
    blind = replace(CLUSTER, peak_flops={})
    lines = explain("failures", Planned(run=RUN, plan=make_plan(RUN, blind), reasons={}))
    assert lines == [lines[0]]
    assert lines[0].startswith("no failures are counted")


def test_a_batch_ramp_that_idles_the_pipeline_is_told():
    assert "pipeline ranks would wait 43% of a step" in " ".join(explain("batch", PLANNED))
