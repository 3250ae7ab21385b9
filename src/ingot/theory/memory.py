"""Memory of one rank of ingot's trainer besides its activations (theory/activations.py), term by term, in bytes.

Everything here is of one Position (theory/layout.py): a pipeline rank, its stages, and its part of them under tensor
parallelism. N is dp_shard; e the bytes of one element in the compute precision, g of a kept gradient, s of a master.
"""

import math

from ingot.schema.arch import Arch
from ingot.theory.layout import Position
from ingot.theory.params import count_parameters
from ingot.theory.state import (
    COMPUTE_BYTES,
    STORED_BYTES,
    kept_gradient_bytes,
    sent_gradient_bytes,
    state_per_parameter,
)
from ingot.theory.term import Term

# Float32 logits held at once. A CPU chunk should fit the cache; on a GPU it should be long enough for a full matmul.
# The trainer takes it from here.
LOGITS_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
# Gradients kept in another dtype than the masters are converted so much at a time (optim/adamw.py).
CONVERT_BYTES = 256 << 20


def weights(position: Position) -> Term:
    """The master parameters that this rank updates. In fp32 and fp64 without ZeRO-3 they are the whole parameters."""
    n, per = position.parameters, state_per_parameter(position.parallel, position.train.precision).master
    return Term(n * per, f"{n:,} parameters x {per:.4g} B (master{_shared(position)})")


def optimizer(position: Position) -> Term:
    """AdamW's two moments of the parameters that this rank updates."""
    n, per = position.parameters, state_per_parameter(position.parallel, position.train.precision).moments
    where = "" if position.parallel.offload == "none" else f"; in {position.parallel.offload} instead"
    return Term(n * per, f"{n:,} parameters x {per:.4g} B (2 moments{_shared(position)}{where})")


def _shared(position: Position) -> str:
    return f" / {position.parallel.dp_shard} ranks" if position.parallel.dp_shard > 1 else ""


def gathered(position: Position) -> Term:
    """Whole parameters in the compute precision.

    Without ZeRO-3, all of them (none beside the master in fp32 and fp64). With it, the outermost unit (embedding, last
    norm, head), the unit in use and those gathered ahead; all of them where forwards do not free them.
    """
    parallel, e = position.parallel, COMPUTE_BYTES[position.train.precision]
    n, unit, outside = position.parameters, _unit(position), sum(stage.outside for stage in position.stages)
    if parallel.zero != 3:
        per = state_per_parameter(parallel, position.train.precision).copy
        return Term(n * per, f"{n:,} parameters x {per:.4g} B, whole" if per else "the masters themselves")
    alive = outside + unit * (1 + parallel.prefetch)
    if not parallel.reshard or parallel.unit_blocks == 0 or alive >= n:
        return Term(n * e, f"{n:,} parameters x {e} B, whole")
    return Term(alive * e, f"(outer unit {outside:,} + {1 + parallel.prefetch} units x {unit:,}) x {e} B")


def _unit(position: Position) -> int:
    """Parameters of the largest unit of blocks."""
    blocks = max(len(stage.layers) for stage in position.stages)
    return max(stage.block for stage in position.stages) * min(position.parallel.unit_blocks or blocks, blocks)


def gradients_kept(position: Position) -> Term:
    """From one micro-batch to the next. The buffers of DDP (dp_shard = 1) stay from step to step."""
    parallel, n = position.parallel, position.parameters
    per = state_per_parameter(parallel, position.train.precision).gradient
    buffers_stay = parallel.dp_shard == 1 and parallel.zero != 3
    if position.accumulation == 1 and parallel.pp == 1 and not buffers_stay:
        return Term(0.0, "none yet: one micro-batch per step")
    return Term(n * per, f"{n:,} parameters x {per:.4g} B{'' if parallel.zero == 1 else _shared(position)}")


def gradients(position: Position) -> Term:
    """At the end of a step's last backward: those kept, and what is on its way between ranks.

    ZeRO-1 frees its whole gradients unit by unit as they are scattered, and with one micro-batch it never has them all.
    Two units are whole at once, in the dtype they are computed in and in the one they are sent in.
    """
    parallel, precision, n = position.parallel, position.train.precision, position.parameters
    per, g = state_per_parameter(parallel, precision).gradient, kept_gradient_bytes(parallel, precision)
    e, sent, unit = COMPUTE_BYTES[precision], sent_gradient_bytes(parallel, precision), _unit(position)
    if parallel.dp_shard == 1 and parallel.zero != 3:
        return Term(n * per, f"{n:,} parameters x {per:.4g} B, whole")
    if parallel.zero == 1 and gradients_kept(position).value:
        return Term(n * per + unit * e, f"{n:,} parameters x {per:.4g} B, whole + 1 unit x {unit:,} x {e} B")
    shard = n * g / parallel.dp_shard
    formula = f"{n:,} parameters x {g} B{_shared(position)} + 2 units x {unit:,} x ({e} + {sent}) B in flight"
    return Term(shard + 2 * unit * (e + sent), formula)


def gradients_at_update(position: Position) -> Term:
    """Of the parameters that this rank updates, and as many as are converted to the dtype of the masters at once."""
    parallel, precision = position.parallel, position.train.precision
    s, g, own = STORED_BYTES[precision], kept_gradient_bytes(parallel, precision), 1 / parallel.dp_shard
    converted = min(position.parameters * s * own, CONVERT_BYTES) if g != s else 0.0
    value = position.parameters * g * own + converted
    return Term(value, f"{position.parameters:,} parameters x {g} B{_shared(position)} + {converted:,.0f} B converted")


def chunk_tokens(vocab_size: int, device: str) -> int:
    """Tokens whose float32 logits fill LOGITS_CHUNK_BYTES, at least 16."""
    return max(LOGITS_CHUNK_BYTES[device] // (4 * vocab_size), 16)


def chunks(vocab_size: int, tokens: int, device: str) -> int:
    """vocab_size: of this rank's part of the head."""
    return math.ceil(tokens / chunk_tokens(vocab_size, device))


def logits(position: Position, device: str = "cpu") -> Term:
    """One chunk of logits in compute precision, in float32 and with its gradient, and the head's gradient.

    The loss sums the head's gradient in float32 over chunks and keeps it in the compute precision.
    """
    if not any(stage.last for stage in position.stages):
        return Term(0.0, "the last stage is on another rank")
    e, tokens = COMPUTE_BYTES[position.train.precision], position.tokens
    wide, vocabulary = max(e, 4), position.arch.vocab_size // position.parallel.tp
    chunk, head = min(chunk_tokens(vocabulary, device), tokens), vocabulary * position.arch.d_model
    part = f"{chunk:,} of {tokens:,} tokens x {vocabulary:,} x {2 * e + 3 * wide} B"
    value = chunk * vocabulary * (2 * e + 3 * wide) + head * (wide + e)
    return Term(value, f"{part} + head gradient {head:,} x {wide + e} B")


def checkpoint_bytes(arch: Arch, precision: str) -> Term:
    """Master parameters and both moments of the whole model; gradients are not saved."""
    n, s = count_parameters(arch), STORED_BYTES[precision]
    return Term(3 * n * s, f"{n:,} parameters x {3 * s} B (master and two moments)")
