"""The topics of `explain`: formulas with the numbers of the plan; and timelines."""

import re
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.planner.request.clusters import find_cluster
from ingot.planner.request.planning import plan
from ingot.planner.show.explain import TOPICS, explain, timeline_lines
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.units import format_bytes

PIPELINE = {"tp": 2, "pp": 4, "schedule": "1f1b", "micro_batch": 1, "cp": 1, "dp_shard": 1, "dp_replicate": 1}


@pytest.fixture(scope="module")
def planned():
    return plan("qwen3-0.6b", tokens="10B", cluster="8xh100", batch=64, pinned=PIPELINE).best


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_fits_a_screen_and_has_numbers(planned, topic):
    lines = explain(topic, planned)
    assert lines and all(len(line) <= 120 for line in lines)
    assert re.search(r"\d", "\n".join(lines))


def test_other_topics_are_refused(planned):
    with refused("E-TOPIC-UNKNOWN", topic="weather"):
        explain("weather", planned)
    assert all(f"\n{topic}\n" in "\n" + "\n".join(explain("all", planned)) + "\n" for topic in TOPICS)


def test_memory_by_kind_pipeline_rank_and_moment(planned):
    text = "\n".join(explain("mem", planned))
    for kind, size in planned.plan.memory_bytes.items():
        assert f"memory.{kind}" in text and format_bytes(size) in text
    assert all(f"pipeline rank {rank}: " in text for rank in range(4))
    assert "steady state" in text and "initialisation" in text


def test_the_bubble_by_formula_and_by_simulation(planned):
    text = "\n".join(explain("bubble", planned))
    micro_batches = planned.run.accumulation
    assert f"3/(1 x {micro_batches} + 3) = {3 / (micro_batches + 3):.1%}" in text
    shares = {name: float(share) for name, share in re.findall(r"^  (\w+) +([\d.]+)%", text, re.MULTILINE)}
    assert shares["1f1b"] == pytest.approx(100 * 3 / (micro_batches + 3), abs=0.06)
    assert shares["zb_h1"] < shares["1f1b"] and shares["zb_v"] < shares["zb_h1"]


def test_without_a_pipeline_there_is_no_bubble():
    alone = plan("smollm2-135m", tokens="1B", cluster="h100").best
    assert explain("bubble", alone) == ["no pipeline (parallel.pp = 1): no bubble"]
    assert explain("comms", alone) == ["one rank exchanges nothing"]


def test_communication_by_line(planned):
    text = "\n".join(explain("comms", planned))
    for line, found in planned.plan.communication.items():
        assert f"{line}: sends {format_bytes(found.sent_bytes)}" in text


def test_batch_and_learning_rate_have_their_sources(planned):
    batch, rate = "\n".join(explain("batch", planned)), "\n".join(explain("lr", planned))
    assert "64 sequences x 4,096 = 262k tokens: as asked for" in batch
    assert f"optim.lr = {planned.run.optim.lr:g}" in rate and "Bi et al. 2024" in rate


ARCH = Arch(vocab_size=512, d_model=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=128)


def run_of(**forms) -> RunConfig:
    train = Train(steps=1, seq_len=64, global_batch=8, micro_batch=1)
    return RunConfig(name="x", model=ARCH, data=Data(tokens=""), train=train, parallel=Parallel(**forms))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    return find_cluster("8xh100", tmp_path_factory.mktemp("nothing"))


def test_a_run_is_drawn_rank_by_rank(cluster):
    lines = timeline_lines(run_of(pp=4), cluster, width=100)
    assert lines[0].startswith("1f1b, 4 ranks, 8 micro-batches, planned times: idle ")
    assert [line[:7] for line in lines[1:5]] == [f"rank {r} " for r in range(4)]
    assert all(f"F{m}" in lines[1] for m in range(8)) and max(map(len, lines[1:5])) <= 100
    assert lines[5] == "micro-batches that ranks keep at once: 4, 3, 2, 1"
    assert "(P-1)(F+B)" in lines[6]


@pytest.mark.parametrize("schedule, idle", [("gpipe", "27.3%"), ("zb_v", "5.9%"), ("dualpipe", "4.0%")])
def test_other_schedules_are_drawn_too(cluster, schedule, idle):
    head = timeline_lines(run_of(pp=4), cluster, schedule)[0]
    assert head == f"{schedule}, 4 ranks, 8 micro-batches, F = I = W: idle {idle}"


@pytest.mark.parametrize(
    "run, schedule, code, facts",
    [
        (run_of(), "", "E-PIPELINE-NONE", {"pp": 1}),
        (run_of(pp=4), "1f2b", "E-SCHEDULE-UNKNOWN", {"schedule": "1f2b"}),
        (run_of(pp=3), "interleaved", "E-SCHEDULE-FIT", {"pp": 3}),
    ],
)
def test_impossible_timelines_are_refused(cluster, run, schedule, code, facts):
    with refused(code, **facts):
        timeline_lines(run, cluster, schedule)


def test_the_kinds_of_links_and_networks_are_named(planned):
    def first_line(**kinds):
        cluster = replace(planned.plan.cluster, **kinds)
        return explain("comms", replace(planned, plan=replace(planned.plan, cluster=cluster)))[0]

    assert "NVSwitch" in first_line() and "InfiniBand" in first_line()
    assert "PCIe" in first_line(link_kind="pcie") and "Ethernet" in first_line(network_kind="ethernet")
    assert "NVSwitch" not in first_line(device="cpu")
