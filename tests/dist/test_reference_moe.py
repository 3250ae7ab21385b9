"""Models with experts in every kind of layout against the Mixtral, Qwen3-MoE and DeepSeek-V3 of `transformers`.

An expert that a token is sent to by mistake, a gradient that is divided by the ranks of the wrong group, or a shared
key that is rotated the wrong way is far above the tolerance.
"""

from dataclasses import replace

import pytest

from ingot.schema.arch import Mla, Moe

from . import steps
from .reference import compare

MIXTRAL = replace(steps.ARCH, qk_norm=False, sliding_window=5, d_ffn=12, moe=Moe(num_experts=4, top_k=2, d_expert=12))
QWEN = replace(
    steps.ARCH, tied_embeddings=False, moe=Moe(num_experts=6, top_k=3, d_expert=10, first_dense=1, normalize=False)
)
DEEPSEEK = replace(
    steps.ARCH,
    qk_norm=False,
    num_kv_heads=4,
    head_dim=6,
    norm_eps=1e-6,
    tied_embeddings=False,
    mla=Mla(q_rank=10, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=5),
    moe=Moe(num_experts=8, top_k=4, d_expert=10, shared_experts=2, first_dense=1, scores="sigmoid", scale=2.5,
            groups=4, top_groups=2, bias_rate=0.001),
)  # fmt: skip
ARCHES = {"mixtral": MIXTRAL, "qwen3-moe": QWEN, "deepseek-v3": DEEPSEEK}
LAYOUTS = {
    "one process": {},
    "dp": {"dp_replicate": 2},
    "ep over dp_shard": {"dp_shard": 2, "ep": 2},
    "ep over dp_shard, zero 3": {"dp_shard": 2, "ep": 2, "zero": 3},
    "ep over tp": {"tp": 2, "ep": 2},
    "ep over dp_shard, across tp": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep within expert_shard, zero 3": {"dp_shard": 4, "ep": 2, "zero": 3},
    "cp, ring": {"cp": 2, "context": "ring"},
    "cp, ulysses": {"cp": 2, "context": "ulysses"},
    "ep over cp": {"cp": 2, "context": "ring", "ep": 2},
    "pp": {"pp": 2},
    "pp x ep": {"pp": 2, "dp_shard": 2, "ep": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "deepseek-v3" else pytest.mark.nightly) for name in ARCHES],
)
def test_layouts_equal_the_experts_of_transformers(fork_ranks, transformers_twin, name):
    compare(fork_ranks, transformers_twin, ARCHES[name], LAYOUTS)
