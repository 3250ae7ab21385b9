"""Layers: the feed-forward, norm, attention and block of a model, each with what it costs.

The first value of a matrix is drawn by its name (trainer/model/init.py): a matrix `down.weight` or `o.weight` writes to
the residual stream and gets smaller values. Vectors begin at 1, biases at 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.plugins.registry import Part, Reference, Registry, options_of
from ingot.schema.arch import Arch

# The roles of parameters under tensor parallelism. "column": a matrix [out, in] is split by its outputs, and the module
# that has it begins with the whole input. "row": it is split by its inputs, and its results are summed over ranks.
# "stream": every rank has the whole parameter and applies it to its own tokens. Roles go with nn.Linear and with
# parameters that a module applies alone, as a norm does.
Sharding = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class FeedForwardPart(Part):
    """The feed-forward of blocks without experts, chosen by `model.feed_forward`. Experts are SwiGLU.

    make(d_model, d_ffn, options): returns a module [..., D] -> [..., D] without randomness.
    sharding: parameter name in the module -> role; the matrix that returns to D is a "row", the others "column".
    matrices: the number of matrices of d_model x d_ffn. It has no other parameters.
    saved: the number of tensors of width d_ffn that the backward keeps per token, besides the input.
    """

    make: Reference
    sharding: Sharding
    matrices: int
    saved: int


@dataclass(frozen=True, kw_only=True)
class NormPart(Part):
    """The norm of the residual stream, chosen by `model.norm`: the norms of the block, usually two, and the last one.

    make(dim, eps, options): returns a module [..., dim] -> [..., dim]. eps: model.norm_eps.
    vectors: the number of its parameters, all of shape [dim].
    saved: the number of tensors of width dim, in the dtype of the computation, that the backward keeps per token; None:
      it keeps what RMSNorm keeps, which differs between devices.
    """

    make: Reference
    vectors: int = 1
    saved: int | None = None


def _nothing(arch: Arch, options: Any) -> int:
    return 0


def _no_matrices(arch: Arch, options: Any) -> Sequence[tuple[int, int]]:
    return ()


@dataclass(frozen=True, kw_only=True)
class AttentionPart(Part):
    """The attention of every block, chosen by `model.attention`: grouped-query attention with changes.

    make(arch, attend, options): returns a module like trainer/model/attention.py's Attention, usually a subclass: it
      computes q, k, v for its heads and calls `attend`, which context parallelism replaces.
    sharding: the names and roles of parameters that grouped-query attention does not have.
    matrices(arch, options): the shapes [out, in] of their matrices, which tensor parallelism divides.
    saved(arch, options): the numbers per token that the backward keeps in addition, which it divides too.
    """

    make: Reference
    sharding: Sharding = field(default_factory=dict)
    matrices: Callable[[Arch, Any], Sequence[tuple[int, int]]] = _no_matrices
    saved: Callable[[Arch, Any], int] = _nothing


@dataclass(frozen=True, kw_only=True)
class BlockPart(Part):
    """The block, chosen by `model.block`: how attention, feed-forward or experts, and norms are put together.

    make(arch, layer, attend, dispatch): returns a module like trainer/model/transformer.py's TransformerBlock, usually
      a subclass. norms: the names of its norms of the residual stream, which the planner counts.
    one_input: attention and the feed-forward or experts get the same tensor, which is kept once for the backward.
    """

    make: Reference
    norms: Sequence[str] = ("attention_norm", "mlp_norm")
    one_input: bool = False


_MODEL = "ingot.trainer.model"
_PAIR = {"up.weight": "column", "down.weight": "row"}
FEED_FORWARDS = Registry[FeedForwardPart](
    "feed-forward",
    "model.feed_forward",
    (
        FeedForwardPart(
            name="swiglu",
            make=f"{_MODEL}.layers:swiglu",
            sharding={"gate.weight": "column", **_PAIR},
            matrices=3,
            saved=4,
        ),
        FeedForwardPart(name="gelu", make=f"{_MODEL}.layers:gelu", sharding=_PAIR, matrices=2, saved=2),
    ),
)
NORMS = Registry[NormPart]("norm", "model.norm", (NormPart(name="rms", make=f"{_MODEL}.layers:rms_norm"),))
ATTENTIONS = Registry[AttentionPart](
    "attention", "model.attention", (AttentionPart(name="grouped_query", make=f"{_MODEL}.attention:grouped_query"),)
)
BLOCKS = Registry[BlockPart](
    "block", "model.block", (BlockPart(name="pre_norm", make=f"{_MODEL}.transformer:TransformerBlock"),)
)
LAYERS = {"feed_forward": FEED_FORWARDS, "norm": NORMS, "attention": ATTENTIONS, "block": BLOCKS}


def feed_forward_of(arch: Arch) -> FeedForwardPart:
    return FEED_FORWARDS[arch.feed_forward]


def stream_norms(arch: Arch) -> int:
    """Return the number of norms of the residual stream in one block."""
    return len(BLOCKS[arch.block].norms)


def has_one_input(arch: Arch) -> bool:
    """Check whether the attention and the feed-forward of a block have the same input."""
    return BLOCKS[arch.block].one_input


def norm_saved(arch: Arch) -> int | None:
    """Return the number of tensors of width d_model that a norm keeps per token; None: what RMSNorm keeps."""
    return NORMS[arch.norm].saved


def norm_vectors(arch: Arch) -> int:
    """Return the number of parameter vectors of one norm of the residual stream."""
    return NORMS[arch.norm].vectors


def extra_attention_matrices(arch: Arch) -> Sequence[tuple[int, int]]:
    """Return the shapes of the matrices that the attention has beyond grouped-query or latent attention."""
    part = ATTENTIONS[arch.attention]
    return part.matrices(arch, layer_options(part, arch))


def extra_attention_saved(arch: Arch) -> int:
    """Return the numbers per token that the attention keeps beyond grouped-query or latent attention."""
    part = ATTENTIONS[arch.attention]
    return part.saved(arch, layer_options(part, arch))


def layer_options(part: Part, arch: Arch) -> Any:
    """Return the settings of a layer: model.options.NAME of the run file."""
    return options_of(part, arch.options.get(part.name, {}))
