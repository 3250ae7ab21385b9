"""Activations of one block as their authors give them: Korthikanti et al. 2022, table 2.

Of blocks with LayerNorm, a GELU feed-forward of four times the width, dropout and 16-bit numbers. theory/saved.py
counts what ingot's own blocks keep, tensor by tensor.
"""


def published_block_bytes(
    seq_len: int,
    micro_batch: int,
    width: int,
    heads: int,
    *,
    tp: int = 1,
    sequence: bool = False,
    scores: bool = True,
    full: bool = False,
) -> float:
    """Of one rank and micro-batch. sequence: parallelism along the sequence between the regions of tp. scores: they are
    kept; neither flash attention nor selective recomputation keeps them. full: recomputation of whole blocks.

        none            s b h (34 + 5 a s / h)
        tp              s b h (10 + 24/t + 5 a s / (h t))
        tp, sequence    s b h (34/t + 5 a s / (h t))
        no scores       the same without 5 a s / (h t)
        full            2 s b h
    """
    unit = float(seq_len * micro_batch * width)
    if full:
        return 2 * unit
    kept = 34 / tp if sequence else 10 + 24 / tp
    return unit * (kept + (5 * heads * seq_len / (width * tp) if scores else 0.0))
