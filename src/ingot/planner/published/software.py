"""The software of a published run as properties, derived from the words, year and precision of its source.

Rules apply in order, and later rules override earlier ones. Systems that are not known by name get the usual
properties of their year.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ingot.planner.published.layout import recomputed_share
from ingot.planner.published.row import PublishedRow
from ingot.schema.software import Recipe, Software

# FlashAttention appeared in May 2022 (Dao et al. 2022); common training systems had it a year later.
_FLASH_YEAR = 2023
_MEGATRON = r"megatron|nemo|mt-nlg"
_LARGE = 256


@dataclass(frozen=True)
class SoftwareRule:
    """A rule that gives a row's software `properties` if `applies` returns True. why: the reason to show with a
    prediction."""

    why: str
    applies: Callable[[PublishedRow], bool]
    properties: dict[str, Any]


def _says(pattern: str) -> Callable[[PublishedRow], bool]:
    return lambda row: re.search(pattern, row.words) is not None


def _says_of_itself(pattern: str) -> Callable[[PublishedRow], bool]:
    """Return a test that searches for `pattern` only in the row's id and note, not in words about its whole table."""
    return lambda row: re.search(pattern, f"{row.id.lower()} {row.text('note')}") is not None


def _since(year: int, pattern: str = "") -> Callable[[PublishedRow], bool]:
    return lambda row: row.year >= year and re.search(pattern, row.words) is not None


def _precision(pattern: str) -> Callable[[PublishedRow], bool]:
    return lambda row: re.search(pattern, row.text("plan", "precision")) is not None


def _tpu(row: PublishedRow) -> bool:
    return "tpu" in row.text("cluster", "gpu")


def _old_halves(row: PublishedRow) -> bool:
    """Return True if the run is of 2023 or earlier, in fp16, and the row does not mention flash attention. Systems of
    that time that had not moved to bf16 did not use flash attention either.
    """
    return row.year <= _FLASH_YEAR and row.text("plan", "precision") == "fp16" and "flash" not in row.words


def _of_megatron(row: PublishedRow) -> bool:
    """Return True if the row names Megatron, or if the run is of 2023 or earlier and splits the model over GPUs by tp
    or pp: all such systems were then Megatron or derived from Megatron.
    """
    cut = (row.count("plan", "tp") or 1) * (row.count("plan", "pp") or 1) > 1
    return re.search(_MEGATRON, row.words) is not None or (cut and row.year <= _FLASH_YEAR and not _tpu(row))


def _first_megatron(row: PublishedRow) -> bool:
    return row.year < _FLASH_YEAR and _of_megatron(row)


def _cut_at_scale(row: PublishedRow) -> bool:
    """Return True if the run is of 2023 or later and splits the model by tp or pp over at least 256 devices. Such
    systems have optimized kernels for the operations between matrix products.
    """
    cut = (row.count("plan", "tp") or 1) * (row.count("plan", "pp") or 1) > 1
    return cut and row.year >= _FLASH_YEAR and (row.count("cluster", "n_gpus") or 0) >= _LARGE


def _says_recompute(pattern: str) -> Callable[[PublishedRow], bool]:
    return lambda row: re.search(pattern, row.text("plan", "recompute")) is not None


def _early_experts(row: PublishedRow) -> bool:
    """Return True if the model has experts and the row names no container of 26.07 (July 2026) or later."""
    named = re.search(r"\b(\d\d)\.(\d\d)", row.words)
    early = named is None or (int(named[1]), int(named[2])) < (26, 7)
    return row.count("model", "moe", "experts") is not None and early


def _experts_over_nodes(row: PublishedRow) -> bool:
    over = (row.count("plan", "ep") or 1) > 8 and not row.text("cluster", "gpu").startswith("gb")
    return over and (row.count("plan", "vpp") or 1) > 1 and _since(2025, r"nemo|megatron-bridge")(row)


def _first_zero3(row: PublishedRow) -> bool:
    dated = re.search(r"20(?:19|20|21|22)", row.words) is not None
    return dated and row.count("plan", "fsdp_zero") == 3 and not _tpu(row)


_HALF = {"products_recomputed": 0.5}

RULES = (
    SoftwareRule("PyTorch's default: eager kernels", lambda row: True, {"name": "unknown", "kernels": "eager"}),
    SoftwareRule("PyTorch's default: the loss is computed from all logits", lambda row: True, {"loss": "whole"}),
    SoftwareRule("torchtitan compiles its loss since the end of 2024", _since(2025, r"torchtitan"), {"loss": "fused"}),
    SoftwareRule("divided over many devices, so it has fused kernels", _cut_at_scale, {"kernels": "compiled"}),
    SoftwareRule(
        "says that its kernels are fused", _says(r"\bfused?\b|\bfusion|liger|apex\b"), {"kernels": "compiled"}
    ),
    SoftwareRule("before FlashAttention was common", lambda row: row.year < _FLASH_YEAR, {"attention": "unfused"}),
    SoftwareRule("fp16 without flash attention", _old_halves, {"attention": "unfused", "dropout": True}),
    SoftwareRule(
        "Megatron has fused kernels, and keeps 18 bytes of state per parameter",
        _of_megatron,
        {
            "name": "megatron",
            "kernels": "compiled",
            "core_recompute": True,
            "megatron_state": True,
            "scatter_sends": True,
        },
    ),
    SoftwareRule(
        "Megatron, in its first papers, waits for every collective",
        _first_megatron,
        {"overlap_data": False, "overlap_pipeline": False, "dropout": True},
    ),
    SoftwareRule(
        "since 2022, Megatron's weight-gradient products accumulate in place; DeepSpeed's pipeline does not",
        lambda row: row.year >= 2022 and _of_megatron(row) and not _says(r"mt-nlg")(row),
        {"fused_gradients": True},
    ),
    SoftwareRule(
        "Megatron-Core and NeMo: Transformer Engine's kernels; tensor-parallel collectives overlap with products",
        _since(2023, r"megatron-core|megatron_core|nemo|megatron-bridge"),
        {"kernels": "tuned", "overlap_tensor": True, "attention": "flash", "dropout": False},
    ),
    SoftwareRule(
        "NVIDIA's tables since 2025: CUDA graphs, attention kernels for the device's generation, fused losses",
        _since(2025, r"nemo|megatron-bridge"),
        {"graphs": True, "attention": "tuned", "dispatch_once": True, "loss": "fused"},
    ),
    SoftwareRule(
        "NVIDIA's recipes with experts over the network: all-to-alls overlap with another micro-batch's computation",
        _experts_over_nodes,
        {"overlap_experts": True},
    ),
    SoftwareRule(
        "experts whose row counts the host needs were not captured in graphs before July 2026",
        _early_experts,
        {"graphs": False},
    ),
    SoftwareRule("says flash attention", _says(r"flash"), {"attention": "flash"}),
    SoftwareRule("ALiBi adds position biases to attention scores", _says(r"alibi"), {"biased_scores": True}),
    SoftwareRule(
        "compiled", _says(r"compile|maxtext|jax|xla|levanter|pax"), {"name": "compiled", "kernels": "compiled"}
    ),
    SoftwareRule("TPUs run one compiled program", _tpu, {"kernels": "compiled", "attention": "flash", "graphs": True}),
    SoftwareRule(
        "XLA overlaps collectives with products",
        lambda row: _tpu(row) or re.search(r"maxtext|jax|xla", row.words) is not None,
        {"overlap_tensor": True, "overlap_data": True, "overlap_pipeline": True, "megatron_state": False},
    ),
    SoftwareRule(
        "the loss is one fused kernel, with gradients in place", _says(r"llm-foundry|flash-attn"), {"loss": "fused"}
    ),
    SoftwareRule("eager", _says(r"\beager\b"), {"kernels": "eager"}),
    SoftwareRule(
        "per-operation recomputation keeps half of the products", _says_recompute(r"per-op|default config"), _HALF
    ),
    SoftwareRule(
        "DeepSpeed's pipeline sends whole activations from every rank",
        _says(r"mt-nlg|deepspeed|neox"),
        {"scatter_sends": False, "fused_gradients": False},
    ),
    SoftwareRule(
        "DeepSpeed's ZeRO-3 of 2021: one ring over one network card",
        _first_zero3,
        {"rails": False, "overlap_data": True},
    ),
    SoftwareRule("DeepSpeed gathers each matrix separately", _first_zero3, {"gathers_matrices": True}),
    SoftwareRule("asynchronous tensor parallelism", _says_of_itself(r"async"), {"overlap_tensor": True}),
    SoftwareRule("gradients are reduced after the backward", _says(r"not overlapped"), {"overlap_data": False}),
    SoftwareRule(
        "says which collectives it overlaps", _says(r"overlaps dp"), {"overlap_data": True, "overlap_pipeline": True}
    ),
    SoftwareRule(
        "says that it overlaps collectives, and does not name any: all of them",
        lambda row: re.search(r"(?<!not )\boverlap(?!s dp|\w* all)", row.words) is not None,
        {"overlap_data": True, "overlap_pipeline": True, "overlap_tensor": True},
    ),
    SoftwareRule("experts drop tokens beyond their capacity", _says(r"token ?drop"), {"dropless": False}),
    SoftwareRule(
        "DeepSeek: all-to-alls overlap with computation and send a token once per node; optimized kernels",
        lambda row: re.search(r"dualpipe|deepep", f"{row.words} {row.text('plan', 'schedule')}") is not None,
        {"overlap_experts": True, "dispatch_once": True, "kernels": "tuned"},
    ),
)

# Low-precision recipes by patterns in the row's precision; the first match counts.
_RECIPES: tuple[tuple[str, Recipe], ...] = (
    ("nvfp4|fp4", "nvfp4"),
    ("mx", "mxfp8"),
    ("rowwise", "rowwise"),
    ("block|-sc", "blockwise"),
    ("fp8", "tensorwise"),
)


def software_of(row: PublishedRow) -> tuple[Software, tuple[str, ...]]:
    """Return the software, and the reasons for its properties, in the order of the rules."""
    found, why = Software(), []
    for rule in RULES:
        if rule.applies(row):
            found = replace(found, **rule.properties)
            why.append(rule.why)
    precision = row.text("plan", "precision")
    recipe = next((recipe for words, recipe in _RECIPES if re.search(words, precision)), "")
    if share := recomputed_share(row):
        found = replace(found, products_recomputed=share)
        why.append("the recomputed share follows from hardware FLOPs minus model FLOPs")
    return replace(found, recipe=recipe), tuple(why)
