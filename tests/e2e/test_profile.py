"""`ingot profile` on a tiny run of two ranks: page, JSON and traces, and nothing of the run changes."""

import gzip
import json
import math

import pytest
from tests.e2e.conftest import RUN_FILE, write_tokens

from ingot.cli.main import main
from ingot.config import to_dict
from ingot.rehearse.profile.kinds import COMMUNICATION, ELEMENTWISE, HOST, OPTIMIZER, PRODUCTS
from ingot.rehearse.profile.trace import LAYER, STEP, WAIT
from ingot.schema.cluster import Cluster
from ingot.storage import write_json

pytestmark = pytest.mark.slow
MACHINE = Cluster(
    name="here",
    device="cpu",
    devices_per_node=2,
    memory_bytes=1 << 33,
    memory_bandwidth=5e9,
    peak_flops={"fp32": 5e10},
    op_seconds=5e-6,
    link_bandwidth=1e9,
)


def test_a_profile_of_two_ranks(tmp_path, capsys):
    write_tokens(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    write_json(tmp_path / "machine.json", to_dict(MACHINE))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["profile", str(tmp_path / "run.toml"), "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {path: path.read_bytes() for path in before} == before

    kinds = {kind: one["seconds"] for kind, one in result["kinds"].items()}
    assert math.isclose(sum(kinds.values()), result["profiled_step_seconds"], rel_tol=1e-6)
    for rank in result["ranks"]:
        assert math.isclose(sum(rank["seconds"].values()), rank["profiled_step_seconds"], rel_tol=1e-6)
    for kind in (PRODUCTS, ELEMENTWISE, OPTIMIZER, COMMUNICATION, HOST):
        assert kinds[kind] > 0, kind
    assert result["communication"]["dp_shard"]["exposed"] > 0
    assert result["mfu"]["now"] > 0 and result["mfu"]["now"] <= result["mfu"]["ceiling"]
    # The FLOPs by shapes are those of the model: three products of each matrix for every token of a rank.
    flops = sum(o["flops"] * o["count"] for o in result["operations"] if o["kind"] == PRODUCTS and o["flops"])
    tokens, matrices = 8 * 32 / 2, 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 64
    assert flops == 6 * tokens * matrices
    attention = sum(o["flops"] * o["count"] for o in result["operations"] if o["kind"] == "attention" and o["flops"])
    assert attention == 3.5 * 2 * tokens * 4 * 8 * 32 * 2 / 2 * 2
    assert result["waits"] and all(".py:" in one["line"] for one in result["waits"])
    assert any("parallel/" in one["line"] for one in result["waits"])

    folder = tmp_path / "runs" / "tiny-profile"
    assert not (folder / "run").exists() and "The longest operations" in (folder / "profile.html").read_text()
    for rank in range(2):
        with gzip.open(folder / f"trace-rank{rank:05}.json.gz", "rt") as file:
            names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
        assert sum(name.startswith(STEP) for name in names) == 2
        assert {f"{LAYER}0", f"{LAYER}1", "exchange dp_shard"} <= set(names)
        assert any(name.startswith(WAIT) for name in names)
