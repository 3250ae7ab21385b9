"""The matrix products of a stage, one by one with their shapes: what decides how near to its peak a device comes.

Their operations sum to those of theory/work.py. A product [m, k] x [k, n] of the forward has two of the same size in
the backward: for its inputs [m, n] x [n, k], for its weights [n, m] x [m, k]. Projections with the same input are one
product, as all tuned systems run them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ingot.schema.arch import Arch
from ingot.theory.layout import Position, Stage
from ingot.theory.params import value_width


@dataclass(frozen=True, slots=True)
class Product:
    """`groups` products of [m, k] and [k, n] that are started together.

    what: "q, k, v". weights: the product has a matrix of parameters, so that a backward has two of its size, and it may
    run in low precision if `low`.
    """

    what: str
    m: float
    n: float
    k: float
    groups: int = 1
    low: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups

    @property
    def for_inputs(self) -> "Product":
        return replace(self, n=self.k, k=self.n)

    @property
    def for_weights(self) -> "Product":
        return replace(self, m=self.n, n=self.k, k=self.m)


def total_flops(products: Iterable[Product]) -> float:
    return sum(product.flops for product in products)


def block_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Forward of one block, with or without experts. Ranks of tensor parallelism share heads and widths; latents are
    computed on all of them, and each routes its own tokens."""
    return (*_attention(position), *(_experts(position) if experts else _feed_forward(position)))


def _attention(position: Position) -> Iterator[Product]:
    arch, tp, m = position.arch, position.parallel.tp, position.tokens
    heads, d = arch.num_heads / tp, arch.d_model
    if arch.is_mla:
        yield from _latent(arch, heads, m)
    else:
        pairs = arch.num_kv_heads if arch.num_kv_heads % tp else arch.num_kv_heads / tp
        yield Product("q, k, v", m, (heads + 2 * pairs) * arch.head_dim, d)
    yield Product("o", m, d, heads * value_width(arch))


def _latent(arch: Arch, heads: float, m: float) -> Iterator[Product]:
    mla = arch.mla
    yield Product("latents", m, mla.q_rank + mla.kv_rank + mla.rope_dim, arch.d_model)
    yield Product("q up", m, heads * arch.head_dim, mla.q_rank or arch.d_model)
    yield Product("k, v up", m, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)


def _pair(arch: Arch, what: str, rows: float, width: float, groups: int = 1) -> Iterator[Product]:
    """A feed-forward: gate and up, or up alone; down."""
    yield Product(f"gate, up{what}", rows, (arch.ffn_matrices - 1) * width, arch.d_model, groups)
    yield Product(f"down{what}", rows, arch.d_model, width, groups)


def _feed_forward(position: Position) -> Iterator[Product]:
    arch = position.arch
    return _pair(arch, "", position.tokens, arch.d_ffn / position.parallel.tp)


def _experts(position: Position) -> Iterator[Product]:
    arch, moe, parallel = position.arch, position.arch.moe, position.parallel
    routed = position.tokens / position.sequence_ranks
    yield Product("router", routed, moe.num_experts, arch.d_model, low=False)
    local = moe.num_experts // parallel.ep
    yield from _pair(arch, " of experts", position.assignments / local, moe.d_expert, local)
    overflow = routed * moe.top_k - position.assignments
    if moe.has_fallback and overflow > 0:
        yield from _pair(arch, " of overflow", overflow, moe.d_expert)
    if moe.shared_experts:
        yield from _pair(arch, " shared", position.tokens, moe.shared_experts * moe.d_expert / parallel.tp)


def repeated_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Those that the backward of a recomputed block runs again, as theory/work.py counts them: all but the last one, or
    with "selective" what tensor parallelism sums over ranks; none where that means the attention core. A share of each
    where software says so."""
    parallel, forward = position.parallel, block_products(position, experts)
    last_too = experts or parallel.splits_backward
    if parallel.recompute == "full":
        return forward if last_too else forward[:-1]
    if parallel.recompute == "none":
        return ()
    if share := position.software.products_recomputed:
        return tuple(replace(p, m=share * p.m) for p in forward)
    if position.software.core_recompute or parallel.tp == 1:
        return ()
    return tuple(p for p in forward if p.what == "o" or (last_too and p.what in ("down", "down shared")))


def head_product(position: Position) -> Product:
    """Logits of one micro-batch. It stays in 16 bits where the rest does not."""
    arch = position.arch
    return Product("head", position.tokens, arch.vocab_size / position.parallel.tp, arch.d_model, low=False)


@dataclass(frozen=True)
class StageProducts:
    """Of one micro-batch on one stage, each with how often it runs."""

    forward: tuple[tuple[Product, int], ...]
    inputs: tuple[tuple[Product, int], ...]
    weights: tuple[tuple[Product, int], ...]

    @property
    def flops(self) -> tuple[float, float, float]:
        parts = (self.forward, self.inputs, self.weights)
        forward, inputs, weights = (sum(p.flops * count for p, count in part) for part in parts)
        return forward, inputs, weights


def stage_products(position: Position, stage: Stage) -> StageProducts:
    """The loss computes its gradients in the forward; what is recomputed counts with the backward for the inputs."""
    sparse, again = len(stage.expert_layers), position.recomputed_with_experts(stage)
    kinds = ((False, len(stage.layers) - sparse, position.recomputed(stage) - again), (True, sparse, again))
    forward, inputs, weights = [], [], []
    if stage.last:
        head, passes = head_product(position), position.arch.head_passes
        forward += [(product, passes) for product in (head, head.for_inputs, head.for_weights)]
    for experts, blocks, recomputed in kinds:
        products = block_products(position, experts) if blocks else ()
        forward += [(p, blocks) for p in products]
        inputs += [(p.for_inputs, blocks) for p in products]
        if recomputed:
            inputs += [(p, recomputed) for p in repeated_products(position, experts)]
        weights += [(p.for_weights, blocks) for p in products]
    return StageProducts(tuple(forward), tuple(inputs), tuple(weights))
