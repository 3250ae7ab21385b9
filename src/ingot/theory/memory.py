"""Memory of one rank of ingot's trainer except activations: the bytes of each kind, with the formula.

Most functions take one Position (theory/layout.py): a pipeline rank, and the parts of its stages that the rank has
under tensor and expert parallelism. In formulas, e is the bytes of one number in the compute precision, g those of a
gradient, s those of a master parameter.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.schema.arch import Arch
from ingot.theory.layout import Position
from ingot.theory.params import (
    ADAMW_MOMENTS,
    COMPUTE_BYTES,
    STORED_BYTES,
    StateBytes,
    count_parameters,
    kept_gradient_bytes,
    state_per_parameter,
)
from ingot.theory.update import matrix_update


@dataclass(frozen=True)
class Term:
    """A derived number and its formula with the values filled in, so that a reader can check each printed number."""

    value: float
    formula: str


# Bytes of the float32 logits that exist at a time. A CPU chunk should fit the cache; on a GPU it should be long enough
# for an efficient matmul. The trainer reads this constant too.
LOGITS_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30, "tpu": 1 << 30}
# Gradients whose dtype differs from the masters' are converted in pieces of this size (optim/adamw.py).
CONVERT_BYTES = 256 << 20


@dataclass(frozen=True)
class Share:
    """A part of this rank's parameters: those that one group of `ranks` ranks holds. These ranks divide the optimizer
    state of the parameters. moments: state tensors per parameter.
    """

    parameters: int
    ranks: int
    what: str
    moments: float = ADAMW_MOMENTS

    @property
    def divided(self) -> str:
        return f" / {self.ranks} ranks" if self.ranks > 1 else ""


def shares(position: Position) -> list[Share]:
    """Return the rank's parameters as one Share per group of ranks that hold them: the group of routed experts differs
    from that of all other parameters.
    """
    parallel = position.parallel
    experts = Share(position.routed, parallel.expert_ranks, "parameters of experts", position.expert_moments)
    common = Share(position.common, parallel.shard_ranks, "parameters", position.common_moments)
    return [common, *([experts] if experts.parameters else [])]


def _state(position: Position, share: Share) -> StateBytes:
    return state_per_parameter(position.parallel, position.train.precision, share.ranks, share.moments)


def _total(terms: Iterable[Term]) -> Term:
    known = list(terms)
    return Term(sum(term.value for term in known), " + ".join(term.formula for term in known))


def weights(position: Position) -> Term:
    """Return the bytes of the master parameters on this rank: its shard; in fp32 and fp64 without ZeRO-3 the whole
    parameters, because the masters themselves are used in computation.
    """
    return _total(_kept(share, _state(position, share).master, "master") for share in shares(position))


def optimizer(position: Position) -> Term:
    """Return the bytes of the optimizer state, such as the two moments of AdamW, of what this rank updates."""
    where = "" if position.parallel.offload == "none" else f"; in {position.parallel.offload} instead"
    known = shares(position)
    return _total(_kept(s, _state(position, s).moments, f"{s.moments:.3g} moments", where) for s in known)


def _kept(share: Share, per: float, what: str, where: str = "") -> Term:
    n = share.parameters
    return Term(n * per, f"{n:,} {share.what} x {per:.4g} B ({what}{share.divided}{where})")


def gathered(position: Position) -> Term:
    """Return the bytes of whole (not sharded) parameters in the compute precision.

    Without ZeRO-3: all parameters, or none in fp32 and fp64, where the masters are used. With ZeRO-3: the outermost
      unit (embedding, last norm, head), the unit in use and the units gathered ahead; all parameters if a forward does
      not free them.
    """
    parallel, e = position.parallel, COMPUTE_BYTES[position.train.precision]
    n, unit, outside = position.parameters, _unit(position), sum(stage.outside for stage in position.stages)
    if parallel.zero != 3:
        per = _state(position, shares(position)[0]).copy
        return Term(n * per, f"{n:,} parameters x {per:.4g} B, whole" if per else "the masters themselves")
    alive = outside + unit * (1 + parallel.prefetch)
    if not parallel.reshard or parallel.unit_blocks == 0 or alive >= n:
        return Term(n * e, f"{n:,} parameters x {e} B, whole")
    return Term(alive * e, f"(outer unit {outside:,} + {1 + parallel.prefetch} units x {unit:,}) x {e} B")


def _unit(position: Position) -> int:
    """Return the number of parameters of the largest unit of blocks."""
    return max(
        stage.block_parameters(group) for stage in position.stages for group in position.groups(stage) or [range(0)]
    )


def gradients_kept(position: Position) -> Term:
    """Return the bytes of gradients that are kept between two micro-batches. If no other rank shares the parameters,
    the buffers also stay between steps.
    """
    return _total(_gradients_kept(position, share) for share in shares(position))


def _gradients_kept(position: Position, share: Share) -> Term:
    n, per = share.parameters, _state(position, share).gradient
    if position.accumulation == 1 and position.parallel.pp == 1 and not _buffers_stay(position, share):
        return Term(0.0, "none yet: one micro-batch per step")
    return Term(n * per, f"{n:,} {share.what} x {per:.4g} B{'' if position.parallel.zero == 1 else share.divided}")


def _buffers_stay(position: Position, share: Share) -> bool:
    """Return whether gradient buffers are never freed: always in Megatron; in ingot if one rank has the state (DDP)."""
    return position.parallel.zero != 3 and (share.ranks == 1 or position.software.megatron_state)


def buffers_that_stay(position: Position) -> Term:
    """Return the bytes of the gradient buffers that are kept from step to step (`_buffers_stay`)."""
    stay = [share for share in shares(position) if _buffers_stay(position, share)]
    return _total(_gradients_kept(position, share) for share in stay) if stay else Term(0.0, "no gradients")


def first_units(position: Position) -> Term:
    """Return the bytes of the new buffers into which ZeRO-1 or 2 gathers the first units right after an update
    (parallel/zero.py). The next forward begins with these units.
    """
    parallel, e = position.parallel, COMPUTE_BYTES[position.train.precision]
    apart = [share.ranks > 1 for share in shares(position)]
    if parallel.zero == 3 or not any(apart):
        return Term(0.0, "no unit on its way")
    stage = position.stages[0]
    sizes = [stage.block_parameters(group) for group in position.groups(stage)]
    sizes = ([stage.outside] if stage.outside and parallel.unit_blocks else []) + sizes
    coming = sum(sizes[: 1 + parallel.prefetch])
    return Term(float(coming * e), f"{1 + parallel.prefetch} units of {coming:,} parameters x {e} B, coming")


def gradients_at_update(position: Position) -> Term:
    """Return the bytes of gradients during the update, with what it makes of them, at the larger of two peaks.

    Elementwise rules convert a piece of the gradients to the masters' dtype. Rules for whole matrices follow; gradients
    that were used are then free, unless their buffers stay, and those of the matrices exist beside a round of them.
    """
    precision = position.train.precision
    s, g = STORED_BYTES[precision], kept_gradient_bytes(position.parallel, precision)
    own = [Term(p.parameters * g / p.ranks, f"{p.parameters:,} {p.what} x {g} B{p.divided}") for p in shares(position)]
    updated = sum(share.parameters / share.ranks for share in shares(position))
    matrices = matrix_update(position)
    of_matrices = matrices.elements if matrices else 0.0
    converted = min((updated - of_matrices) * s, CONVERT_BYTES) if g != s else 0.0
    elementwise = _total([*own, Term(converted, f"{converted:,.0f} B converted")])
    if matrices is None:
        return elementwise
    staying = sum(p.parameters for p in shares(position) if _buffers_stay(position, p))
    left = max(of_matrices, staying) * g
    formula = (
        f"{left:,.0f} B of gradients + {matrices.round_elements:,.0f} numbers x {s} B in a round of whole matrices"
    )
    whole = Term(left + matrices.round_elements * s, formula)
    return max(elementwise, whole, key=lambda term: term.value)


def chunk_tokens(vocab_size: int, device: str) -> int:
    """Return the number of tokens in a chunk of the loss: the most whose float32 logits fit in LOGITS_CHUNK_BYTES, but
    at least 16.
    """
    return max(LOGITS_CHUNK_BYTES[device] // (4 * vocab_size), 16)


def chunks(vocab_size: int, tokens: int, device: str) -> int:
    """Return the number of chunks of the loss. vocab_size: number of ids in this rank's part of the head."""
    return math.ceil(tokens / chunk_tokens(vocab_size, device))


def logits(position: Position, device: str = "cpu") -> Term:
    """Return the peak bytes of the loss, without the tensors that the loss leaves for the backward.

    The parts are the hidden states that the loss reads (or, if it is computed in the backward, their gradient), the
    head's gradient summed in float32, and the larger of two peaks: a chunk of logits (two float32 tensors, one in
    compute precision, or two with tensor parallelism), or with the tensors of a loss term; or a chunk's gradient with
    its contribution to the head's gradient, which in float32 and float64 is added without a tensor of its own.
    """
    if not any(stage.last for stage in position.stages):
        return Term(0.0, "the last stage is on another rank")
    if position.software.loss != "chunked":
        return _whole_logits(position)
    e, tokens, width = COMPUTE_BYTES[position.train.precision], position.tokens, position.arch.d_model
    wide, vocabulary = max(e, 4), position.arch.vocab_size // position.parallel.tp
    chunk, head = min(chunk_tokens(vocabulary, device), tokens), vocabulary * width
    each = (2 * wide if wide != e else wide) + e * (1 if position.parallel.tp == 1 else 2)
    if position.arch.logit_softcap and wide == e and position.parallel.tp == 1:
        each += wide  # the capped logits; in other cases they replace the wide copy, which is counted already
    alive = chunk * each
    if position.term_tensors:  # beside logits, slope and, under a cap, capped logits
        alive = max(alive, chunk * wide * (2 + (position.arch.logit_softcap > 0) + max(position.term_tensors)))
    larger = max(alive * vocabulary, chunk * vocabulary * e + (head * e if wide != e else 0))
    value = larger + head * wide + tokens * width * e
    formula = f"{chunk:,} of {tokens:,} tokens x {vocabulary:,} ids: {larger:,.0f} B, head gradient {head:,} x {wide} B"
    return Term(float(value), f"{formula}, hidden states {tokens:,} x {width:,} x {e} B")


def _whole_logits(position: Position) -> Term:
    """Return the bytes of a loss on all logits at once, at the time when their gradient is computed.

    "fused": logits and their gradient in compute precision. Megatron: also a float32 copy, changed in place. Eager
    PyTorch: logits in compute precision; in float32 a copy, log-probabilities and their gradient, and with tensor
    parallelism also exponentials.
    """
    e, tokens, tp = COMPUTE_BYTES[position.train.precision], position.tokens, position.parallel.tp
    vocabulary, wide = position.arch.vocab_size // tp, max(e, 4)
    if position.software.loss == "fused":
        each = 2 * e
    elif position.software.megatron_state:
        each = 2 * e + wide
    else:
        each = e + 3 * wide + (wide if tp > 1 else 0)
    return Term(float(tokens * vocabulary * each), f"{tokens:,} tokens x {vocabulary:,} ids x {each} B")


def saved(position: Position) -> Term:
    """Return the bytes that this rank saves in a checkpoint: its part of the masters and of the optimizer state. Ranks
    of further copies of the model (dp_replicate) save nothing.
    """
    s = STORED_BYTES[position.train.precision]
    return _total(
        _kept(p, (1 + p.moments) * s / p.ranks, f"master and {p.moments:.3g} moments") for p in shares(position)
    )


def saved_weights(position: Position) -> Term:
    """Return the bytes that this rank saves of the weights alone: its part of the masters."""
    s = STORED_BYTES[position.train.precision]
    return _total(_kept(p, s / p.ranks, "master") for p in shares(position))


def snapshots(position: Position, *, weights_apart: bool) -> Term:
    """Return the bytes of memory that this rank keeps for saves in the background: a copy of what it saves.

    weights_apart: saves of the weights alone have a copy of their own.
    """
    whole = saved(position)
    if not weights_apart:
        return whole
    weights = saved_weights(position)
    return Term(whole.value + weights.value, f"{whole.formula}; {weights.formula} for saves of the weights alone")


def checkpoint_bytes(arch: Arch, precision: str, moments: float = ADAMW_MOMENTS) -> Term:
    """Return the bytes of a checkpoint: master parameters and optimizer state of the whole model, without gradients.

    moments: state tensors per parameter (theory/update.py).
    """
    n, s = count_parameters(arch), STORED_BYTES[precision]
    each = (1 + moments) * s
    return Term(n * each, f"{n:,} parameters x {each:.4g} B (master and {moments:.3g} moments)")
