"""The file of fallback layouts: read as written, and refused if it was changed or is of another run."""

import json
from dataclasses import replace

import pytest
from tests.expect import refused
from tests.unit.planner.run.test_check import RUN

from ingot.schema.fallbacks import Fallback, Fallbacks, layout_sha256, pasted, read_fallbacks, write_fallbacks

OWN = Fallback(nodes=4, ranks=8, step_seconds=2.0, memory_bytes=9)
FEWER = (
    Fallback(nodes=3, ranks=6, problem="6 ranks cannot divide a batch of 8"),
    Fallback(nodes=2, ranks=4, overrides=("parallel.dp_shard=4", "launch.nodes=2"), step_seconds=4.0),
    Fallback(nodes=1, ranks=2, overrides=("parallel.dp_shard=2", "launch.nodes=1"), step_seconds=8.0),
)
FOUND = Fallbacks(
    run_sha256=layout_sha256(RUN),
    cluster_sha256="c",
    own=OWN,
    available_bytes=10,
    bills=({"weights": 4, "runtime": 5}, {"weights": 3, "runtime": 5}),
    fewer_nodes=FEWER,
)


@pytest.fixture
def path(tmp_path):
    write_fallbacks(tmp_path / "fallbacks.json", FOUND)
    return tmp_path / "fallbacks.json"


def test_the_file_is_read_as_it_was_written(path):
    assert read_fallbacks(path, RUN) == FOUND


def test_the_file_of_another_version_is_refused(path):
    write_fallbacks(path, replace(FOUND, version=1))
    with refused("E-FALLBACKS-OTHER"):
        read_fallbacks(path, RUN)


def test_the_layout_for_the_nodes_that_are_there(path):
    assert FOUND.of_nodes(3) == FEWER[1] and FOUND.of_nodes(1) == FEWER[2] and FOUND.of_nodes(0) is None
    slow = replace(FEWER[0], problem="", step_seconds=6.0)
    assert replace(FOUND, fewer_nodes=(slow, *FEWER[1:])).of_nodes(3) == FEWER[1]
    unknown = [replace(entry, problem="", step_seconds=0.0) for entry in FEWER]
    assert replace(FOUND, fewer_nodes=tuple(unknown)).of_nodes(3) == unknown[0]


def test_a_rank_has_the_bill_of_its_pipeline_rank():
    assert [FOUND.bill_of(rank)["weights"] for rank in range(8)] == [4] * 4 + [3] * 4


def test_overrides_are_options_to_paste():
    assert pasted(FEWER[1].overrides) == "--set parallel.dp_shard=4 --set launch.nodes=2"


@pytest.mark.parametrize("damage", ["edited", "cut", "missing", "list", "renamed"])
def test_a_file_that_is_not_as_written_is_refused(path, damage):
    content = json.loads(path.read_text())
    if damage == "edited":
        content["fewer_nodes"][1]["overrides"][0] = "parallel.dp_shard=2"
    elif damage == "renamed":
        content["less"] = content.pop("less_memory")
    path.write_text(json.dumps([1] if damage == "list" else content)[: 40 if damage == "cut" else None])
    if damage == "missing":
        path.unlink()
    with refused("E-FALLBACKS-READ", path=str(path)):
        read_fallbacks(path, RUN)


@pytest.mark.parametrize(
    "other",
    [
        replace(RUN, train=replace(RUN.train, micro_batch=2)),
        replace(RUN, launch=replace(RUN.launch, nodes=2)),
        replace(RUN, launch=replace(RUN.launch, min_ranks=1)),
        replace(RUN, parallel=replace(RUN.parallel, recompute="full")),
    ],
)
def test_the_file_of_a_run_with_another_layout_is_refused(path, other):
    with refused("E-FALLBACKS-OTHER", path=str(path)):
        read_fallbacks(path, other)


def test_settings_that_change_no_layout_keep_the_file(path):
    assert read_fallbacks(path, replace(RUN, name="b", launch=replace(RUN.launch, max_restarts=1))) == FOUND
