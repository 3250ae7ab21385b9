"""What `explain` says: formulas whose numbers are the plan's."""

import re

import pytest

from ingot.errors import UsageError
from ingot.planner.request.planning import plan
from ingot.planner.show.explain import TOPICS, explain
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
    with pytest.raises(UsageError, match="cannot explain 'weather'"):
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
