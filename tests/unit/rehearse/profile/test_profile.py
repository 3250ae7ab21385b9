"""The profile of a run from those of its ranks: plan, roofline and ceiling beside what was measured; and its page."""

from dataclasses import replace

import pytest

from ingot.rehearse.profile.kinds import COMMUNICATION, HOST, IDLE, KINDS, OPTIMIZER, PRODUCTS
from ingot.rehearse.profile.profile import summarize
from ingot.report.profile_page import profile_page, write_profile_page
from ingot.report.render.markup import render_html
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.flops import train_flops_per_token

ARCH = Arch(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64, max_seq_len=32)
RUN = RunConfig(
    name="tiny <b>",
    model=ARCH,
    data=Data(tokens=""),
    train=Train(steps=10, seq_len=32, global_batch=8, micro_batch=2, precision="fp32"),
    parallel=Parallel(dp_shard=2),
)
FLOPS = RUN.tokens_per_step * train_flops_per_token(ARCH, 32) / 2  # of a rank
# A rank at the peak computes for a second.
MACHINE = Cluster(
    name="here",
    device="cpu",
    devices_per_node=2,
    memory_bytes=1 << 34,
    memory_bandwidth=1e9,
    peak_flops={"fp32": FLOPS},
    op_seconds=1e-6,
    link_bandwidth=1e9,
)


def rank(number: int, waited: float) -> dict:
    """Return the profile of a rank whose products take 2 s, at half of the peak, and its update 1 s."""
    operation = {"kind": PRODUCTS, "name": "aten::mm", "shapes": "3x4 4x5", "count": 2.0, "seconds": 2.0}
    update = {"kind": OPTIMIZER, "name": "aten::_fused_adamw_", "shapes": "", "count": 1.0, "seconds": 1.0}
    seconds = dict.fromkeys(KINDS, 0.0) | {PRODUCTS: 2.0, OPTIMIZER: 1.0, COMMUNICATION: waited, HOST: 1.0, IDLE: 0.5}
    return {
        "rank": number,
        "device": "cpu",
        "device_name": "",
        "torch": "2.13.0",
        "steps": 3,
        "first_step": 8,
        "log_lines": 1,
        "peak_memory_bytes": 1 << 30,
        "step_seconds": 4.0,
        "profiled_step_seconds": sum(seconds.values()),
        "without_core_seconds": 0.2,
        "seconds": seconds,
        "exposed": {"dp_shard": waited},
        "hidden": {"dp_shard": 0.25},
        "operations": [
            operation | {"flops": FLOPS / 2, "bytes": 8.0},
            update | {"flops": None, "bytes": None},
        ],
        "device_waits": {"cudaStreamSynchronize": {"count": 1.0, "seconds": 0.125}},
        "waits": [{"axis": "dp_shard", "line": "trainer/parallel/zero.py:1 wait", "count": 2.0, "seconds": waited}],
        "reads": [{"operation": "_local_scalar_dense", "line": "trainer/log.py:2 read", "count": 4}],
        "reads_log_line": True,
    }


@pytest.fixture
def result() -> dict:
    found = summarize(RUN, MACHINE, [rank(0, 0.5), rank(1, 1.5)])
    return found | {"name": RUN.name, "version": "0", "changed": [], "traces": ["trace-rank00000.json.gz"]}


def test_kinds_add_up_and_have_the_plan_beside_them(result):
    kinds = result["kinds"]
    assert sum(one["seconds"] for one in kinds.values()) == pytest.approx(result["profiled_step_seconds"]) == 5.5
    assert kinds[COMMUNICATION]["seconds"] == 1.0
    assert result["communication"] == {"dp_shard": {"exposed": 1.0, "hidden": 0.25}}
    planned = {kind: one["planned_seconds"] for kind, one in kinds.items() if one["planned_seconds"]}
    assert set(planned) == {PRODUCTS, "attention", "elementwise", COMMUNICATION, HOST}
    assert sum(planned.values()) == pytest.approx(result["planned_step_seconds"])
    assert result["waits"][0]["seconds"] == 1.0 and result["layout"] == {"dp_shard": 2}


def test_the_ceiling_is_computation_at_its_roofline(result):
    mfu = result["mfu"]
    assert (mfu["now"], mfu["computing"]) == (pytest.approx(1 / 4), pytest.approx(1 / 3))
    assert mfu["ceiling"] == pytest.approx(1 / 2)  # products at the peak, and an update whose bound is not known
    operation = result["operations"][0]
    assert operation["flops_per_second"] == pytest.approx(FLOPS / 2)
    assert operation["of_roofline"] == pytest.approx(0.5) and result["operations"][1]["of_roofline"] is None


def test_rates_of_another_device_are_not_compared_with(result):
    found = summarize(RUN, replace(MACHINE, device="cuda"), [rank(0, 0.5)])
    assert found["mfu"] is None and found["planned_step_seconds"] is None and found["cluster"] == ""
    assert found["operations"][0]["of_roofline"] is None
    page = render_html(profile_page(found | {k: result[k] for k in ("name", "version", "changed", "traces")}, "x"))
    assert "No plan" in page and "What MFU this shape can have" not in page


def test_the_page_has_every_part(result, tmp_path):
    path = write_profile_page(result, tmp_path, "ingot profile run.toml --set x='<b>'")
    page = path.read_text()
    for text in ("tiny &lt;b&gt;", "Where the time of a step goes", "Communication by axis", "The longest operations",
                 "aten::mm 3x4 4x5", "trainer/parallel/zero.py:1 wait", "trainer/log.py:2 read", "50.0% at most",
                 "cudaStreamSynchronize", "had no free core", "Peak memory", "trace-rank00000.json.gz"):  # fmt: skip
        assert text in page, text
    assert "<b>" not in page and "://" not in page
