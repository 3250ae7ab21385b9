from dataclasses import replace

import pytest

from ingot.errors import ConfigError
from ingot.planner.request.clusters import find_cluster
from ingot.planner.show.timeline import timeline_lines
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train

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
    "run, schedule, words",
    [
        (run_of(), "", "no pipeline"),
        (run_of(pp=4), "1f2b", "no schedule '1f2b'"),
        (replace(run_of(pp=3), train=Train(steps=1, seq_len=64, global_batch=8, micro_batch=1)), "interleaved", "3"),
    ],
)
def test_what_cannot_be_drawn_is_told(cluster, run, schedule, words):
    with pytest.raises(ConfigError) as told:
        timeline_lines(run, cluster, schedule)
    assert words in str(told.value)
