"""The model of a published run as an Arch, so that theory/ can count its parameters and FLOPs."""

import math
from dataclasses import dataclass, replace

from ingot.planner.published.row import PublishedRow
from ingot.planner.run.scaling import shape_of
from ingot.schema.arch import Arch, Mla, Moe
from ingot.theory.flops import mean_keys

# The widths of DeepSeek-V3 (DeepSeek-AI 2024, section 4.2), for sources that only state that attention is latent.
_LATENT = Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
_WINDOW = 128  # gpt-oss (OpenAI 2025, model card, section 2.2), for sources that name sliding windows without a size
_GATED = ("swiglu", "geglu", "reglu", "glu", "silu")
_VOCABULARY = 32000  # for sources that state none
_SEQUENCES = {2023: 4096, 2024: 8192}  # for sources that state none, from that year on; 2,048 before 2023


@dataclass(frozen=True, kw_only=True)
class ForeignArch(Arch):
    """An Arch with the properties that only models of other systems have.

    head_passes: how many times each token goes through the head: 2 with a multi-token-prediction module (DeepSeek-V3,
      DeepSeek-AI 2024, section 2.2), whose block is counted in num_layers.
    sliding_window: if only some layers have a window, one window that, used in every layer, gives the same total number
      of keys.
    """

    head_passes: int = 1


def arch_of(row: PublishedRow, notes: list[str]) -> Arch | None:
    """Return the model, or None if the row gives neither layers and width nor a number of parameters."""
    arch = _given_shape(row) or _derived_shape(row, notes)
    if arch is None:
        return None
    arch = _with_experts(row, arch, notes)
    if row.text("model", "attention") == "mla":
        mla = _LATENT
        arch = replace(arch, mla=mla, head_dim=mla.nope_dim + mla.rope_dim, num_kv_heads=arch.num_heads)
        notes.append("widths of latent attention are those of DeepSeek-V3")
    if row.flag("model", "mtp"):
        arch = replace(arch, num_layers=arch.num_layers + 1, head_passes=2)
    return _with_window(row, arch, notes)


def sequence_of(row: PublishedRow) -> int:
    usual = max((length for year, length in _SEQUENCES.items() if row.year >= year), default=2048)
    return row.count("model", "seq") or usual


def _given_shape(row: PublishedRow) -> ForeignArch | None:
    layers, width = row.count("model", "layers"), row.count("model", "hidden")
    if layers is None or width is None:
        return None
    heads = row.count("model", "heads") or max(width // 128, 1)
    act = row.text("model", "act")
    gated = act in _GATED or not act
    ffn = row.count("model", "ffn") or (round(8 * width / 3 / 256) * 256 if gated else 4 * width)
    return ForeignArch(
        vocab_size=row.count("model", "vocab") or _VOCABULARY,
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=row.count("model", "kv_heads") or heads,
        head_dim=row.count("model", "head_dim") or max(width // heads, 1),
        d_ffn=ffn,
        max_seq_len=sequence_of(row),
        tied_embeddings=bool(row.flag("model", "tied_embeddings")),
        feed_forward="swiglu" if gated else "gelu",
    )


def _derived_shape(row: PublishedRow, notes: list[str]) -> ForeignArch | None:
    parameters = row.number("model", "params")
    if parameters is None:
        return None
    notes.append("the shape is a usual one with this number of parameters")
    usual = shape_of(parameters, vocab_size=row.count("model", "vocab") or _VOCABULARY)
    known = {name: getattr(usual, name) for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ffn")}
    kv = {name: getattr(usual, name) for name in ("num_kv_heads", "head_dim", "tied_embeddings")}
    return ForeignArch(max_seq_len=sequence_of(row), **known, **kv)


def _with_experts(row: PublishedRow, arch: ForeignArch, notes: list[str]) -> ForeignArch:
    experts = row.count("model", "moe", "experts") or row.count("model", "moe", "num_experts")
    if experts is None or experts < 2:
        return arch
    top_k = min(row.count("model", "moe", "topk") or row.count("model", "moe", "top_k") or 2, experts)
    width = row.count("model", "moe", "expert_ffn")
    if width is None:
        width = arch.d_ffn
        notes.append("experts are as wide as the feed-forward")
    dense = min(row.count("model", "moe", "dense_layers") or 0, arch.num_layers - 1)
    shared = row.count("model", "moe", "shared") or 0
    moe = Moe(num_experts=experts, top_k=top_k, d_expert=width, shared_experts=shared, first_dense=dense)
    return replace(arch, moe=moe)


def _with_window(row: PublishedRow, arch: ForeignArch, notes: list[str]) -> ForeignArch:
    seq_len = sequence_of(row)
    window = row.count("model", "sliding_window") or (_WINDOW if "sliding-window" in row.words else 0)
    if not 0 < window < seq_len:
        return arch
    if "alternate" in row.words:
        keys = (mean_keys(seq_len, window) + mean_keys(seq_len)) / 2
        # The window W whose mean_keys, W - W^2/2T, equal `keys`.
        window = round(seq_len * (1 - math.sqrt(1 - 2 * keys / seq_len)))
        notes.append(f"windows on alternate layers are replaced by a window of {window} tokens on all layers")
    return replace(arch, sliding_window=window)
