"""Context parallelism in numbers: a rank's tokens, its causal work and its traffic, and the fastest form for a run.

Shape letters: B micro-batch, T tokens of a sequence, N query heads and G key/value heads of one tensor-parallel rank, H
  head_dim. cp ranks are a grid of `ring` x `ulysses` (Fang & Zhao 2024): index on cp = ring index x ulysses + ulysses
  index. e: bytes of a number in the compute precision, w: bytes of a number in a sum, at least 4.

The traffic of one rank in one layer for one micro-batch (parallel/ring.py, parallel/context.py):

    Ulysses  forward: two all-to-alls, one for queries, keys and values, one for the results; backward: the same for
             their gradients. Each has B·T/cp·H·e bytes per head, (ulysses-1)/ulysses of them for other ranks. Keys
             and values are repeated until the degree divides their heads.
    ring     forward: `ring`-1 messages, keys and values together. Backward: keys and values are sent around again,
             and their gradients (w bytes per number) one rank later: 2·(ring-1) messages. After the all-to-all a rank
             has G/ulysses heads of T/ring tokens. A sliding window ends the ring earlier (`ring_steps`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.errors import ConfigError
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Train
from ingot.theory.params import COMPUTE_BYTES
from ingot.units import format_bytes, format_seconds

# The forward has two matrix products; the backward has five of the same size: scores again, and the gradients of
# scores, queries, keys and values.
BACKWARD_TO_FORWARD = 2.5

Segments = tuple[range, ...]  # ranges of positions in a sequence, ascending


def token_multiple(parallel: Parallel) -> int:
    """Return the number that must divide the sequence length so that all ranks have equal parts.

    The ranks are those of cp, and with `sequence` also those of tp. `parallel` must have no "auto".
    """
    halves = 2 * parallel.ring if parallel.context_layout == "zigzag" and parallel.ring > 1 else 1
    return math.lcm(halves, parallel.cp * (parallel.tp if parallel.sequence else 1))


def ring_positions(parallel: Parallel, ring_index: int, tokens: int) -> Segments:
    """Return the positions of the tokens at index `ring_index` of the ring, which the `ulysses` ranks there share.

    For index r of n: zigzag: the r-th and the r-th last of 2n equal parts; striped: every n-th token; contiguous: the
      r-th of n parts. tokens: length of the sequence. Raises ConfigError if it cannot be divided.
    """
    ring, layout = parallel.ring, parallel.context_layout
    if tokens % token_multiple(replace(parallel, tp=1)):
        raise ConfigError(
            "E-SEQUENCE-UNEVEN",
            f"sequences of {tokens} tokens cannot be divided among {parallel.cp} ranks of cp in {layout} layout",
            rule="every rank has the same number of tokens of a sequence, with zigzag in two equal parts",
            fix=f"use a multiple of {token_multiple(replace(parallel, tp=1))} tokens",
            tokens=tokens,
            cp=parallel.cp,
            multiple=token_multiple(replace(parallel, tp=1)),
        )
    part = tokens // ring
    if layout == "striped":
        return (range(ring_index, tokens, ring),)
    if layout == "contiguous" or ring == 1:
        return (range(part * ring_index, part * (ring_index + 1)),)
    half, last = part // 2, 2 * ring - 1 - ring_index
    return range(half * ring_index, half * (ring_index + 1)), range(half * last, half * (last + 1))


def rank_positions(parallel: Parallel, index: int, tokens: int) -> Segments:
    """Return the positions of the tokens of the rank with index `index` on cp: a contiguous part of the tokens at its
    ring index.
    """
    ulysses = parallel.cp // parallel.ring
    place, part = divmod(index, ulysses)
    own, start = tokens // parallel.cp, part * (tokens // parallel.cp)
    found = []
    for segment in ring_positions(parallel, place, tokens):
        cut = segment[max(start, 0) : max(start + own, 0)]
        start -= len(segment)
        found += [cut] if len(cut) else []
    return tuple(found)


def seen_pairs(positions: Segments, window: int = 0) -> int:
    """Return the number of query-key pairs of the queries at `positions` under a causal mask.

    The keys of a query are its own token and all tokens before it, or only the last `window` of these.
    """
    total = 0
    for segment in positions:
        free = len(segment) if window == 0 else sum(p < window for p in segment)
        seen = (segment[0] + segment[free - 1]) * free // 2 if free else 0  # an arithmetic series
        total += seen + free + (len(segment) - free) * window
    return total


def imbalance(parallel: Parallel, tokens: int, window: int = 0) -> float:
    """Return the query-key pairs of the ring index that has the most, divided by the mean: 1 is perfect balance."""
    pairs = [seen_pairs(ring_positions(parallel, r, tokens), window) for r in range(parallel.ring)]
    return max(pairs) * len(pairs) / sum(pairs)


def ring_steps(parallel: Parallel, tokens: int, window: int = 0) -> int:
    """Return the number of ring steps in which at least one rank has unmasked keys, including the first step (own
    keys).

    A window ends the ring early only in the contiguous layout. In other layouts the keys of the last step are close to
    a rank's own tokens: next to them (zigzag), or within as many positions as the ring has ranks (striped).
    """
    if window == 0 or parallel.context_layout != "contiguous":
        return parallel.ring
    part = tokens // parallel.ring
    return min(1 + -(-(window - 1) // part), parallel.ring)  # a part's first token has window - 1 keys before it


@dataclass(frozen=True)
class Volume:
    """The number and total bytes of the messages or all-to-alls of one rank in one layer for one micro-batch.

    All bytes of messages are sent. The bytes of all-to-alls include the part that a rank keeps.
    """

    forward_calls: int
    forward: float
    backward_calls: int
    backward: float


def local_heads(arch: Arch, parallel: Parallel) -> tuple[int, int]:
    """Return the number of query heads and of key/value heads (at least 1) of a tensor-parallel rank."""
    return arch.num_heads // parallel.tp, max(arch.num_kv_heads // parallel.tp, 1)


def ulysses_bytes(arch: Arch, train: Train, parallel: Parallel) -> Volume:
    """Return the number and bytes of Ulysses' all-to-alls, including the part that a rank keeps."""
    degree = parallel.cp // parallel.ring
    if degree == 1:
        return Volume(0, 0.0, 0, 0.0)
    queries, keys = local_heads(arch, parallel)
    head = train.micro_batch * train.seq_len // parallel.cp * arch.head_dim * COMPUTE_BYTES[train.precision]
    once = head * (2 * queries + 2 * math.lcm(keys, degree))
    return Volume(2, once, 2, once)


def ring_bytes(arch: Arch, train: Train, parallel: Parallel) -> Volume:
    """Return the number and bytes of messages to the next rank of the ring."""
    ring, degree = parallel.ring, parallel.cp // parallel.ring
    heads = math.lcm(local_heads(arch, parallel)[1], degree) // degree
    numbers = 2 * train.micro_batch * heads * (train.seq_len // ring) * arch.head_dim
    narrow = COMPUTE_BYTES[train.precision]
    times = ring_steps(parallel, train.seq_len, arch.sliding_window) - 1
    return Volume(times, times * numbers * narrow, 2 * times, times * numbers * (narrow + max(narrow, 4)))


@dataclass(frozen=True)
class Links:
    """The rates that "auto" assumes. inside, across: bytes/s that a rank sends inside a node and between nodes. flops:
    FLOP/s of attention. memory: bytes/s of the device's memory.

    The defaults are those of a node of eight H100: per GPU 450 GB/s of NVLink in one direction, 400 Gbit/s of network,
      half of the dense bf16 peak of 989 TFLOP/s, which attention kernels reach, and 3.35 TB/s of memory. They are fixed
      so that all ranks choose the same form.
    """

    ranks_per_node: int = 8
    inside: float = 450e9
    across: float = 50e9
    flops: float = 500e12
    memory: float = 3.35e12

    def rate(self, span: int) -> float:
        """Return the bytes/s that a rank sends in a group that spans `span` neighboring ranks."""
        return self.inside if span <= self.ranks_per_node else self.across


H100_NODES = Links()


@dataclass(frozen=True)
class ContextCost:
    """The seconds that context parallelism takes in one layer for one micro-batch, forward and backward.

    all_to_all: time of all-to-alls, which nothing overlaps. sending, computing: time of the ring's messages, and of the
      attention that overlaps them. waiting: the part of `sending` that attention does not hide. merging: time in which
      ring steps read and write sums of results and gradients, which attention without a ring does not need.
    """

    ulysses: int
    all_to_all: float
    sending: float
    computing: float
    waiting: float
    merging: float

    @property
    def added(self) -> float:
        """The seconds that context parallelism adds to the layer's attention."""
        return self.all_to_all + self.waiting + self.merging


def context_cost(arch: Arch, train: Train, parallel: Parallel, ulysses: int, links: Links = H100_NODES) -> ContextCost:
    """Return the cost of context parallelism in a grid with `ulysses` ranks per row."""
    grid = replace(parallel, ulysses=ulysses)
    ring, dealt = ring_bytes(arch, train, grid), ulysses_bytes(arch, train, grid)
    moved = (dealt.forward + dealt.backward) * (ulysses - 1) / ulysses
    rate = links.rate(parallel.cp * parallel.tp)
    # The mean number of pairs per ring index: the imbalance depends only on the layout, which is equal for all grids.
    pairs = seen_pairs((range(train.seq_len),), arch.sliding_window) / grid.ring
    queries, keys = (heads / ulysses for heads in local_heads(arch, parallel))
    product = 4 * train.micro_batch * queries * arch.head_dim * pairs
    sent = ring_steps(grid, train.seq_len, arch.sliding_window) - 1  # the last step sends nothing
    forward = product / links.flops * sent / (sent + 1)
    backward = BACKWARD_TO_FORWARD * forward
    waiting = max(ring.forward / rate - forward, 0.0) + max(ring.backward / rate - backward, 0.0)
    # For results and gradients of queries, keys and values, a sum is read and written, and its new term is read.
    narrow = COMPUTE_BYTES[train.precision]
    rows = train.micro_batch * train.seq_len / grid.ring * arch.head_dim
    touched = sent * 2 * (queries + max(keys, 1)) * rows * (2 * max(narrow, 4) + narrow)
    return ContextCost(
        ulysses=ulysses,
        all_to_all=moved / links.rate(ulysses * parallel.tp),
        sending=(ring.forward + ring.backward) / rate,
        computing=forward + backward,
        waiting=waiting,
        merging=touched / links.memory,
    )


def legal_ulysses(arch: Arch, parallel: Parallel) -> list[int]:
    """Return the possible degrees of Ulysses: those that divide cp and the query heads of a tensor-parallel rank."""
    heads = local_heads(arch, parallel)[0]
    return [u for u in range(1, parallel.cp + 1) if parallel.cp % u == 0 and heads % u == 0]


def resolve_context(arch: Arch, train: Train, parallel: Parallel, links: Links = H100_NODES) -> Parallel:
    """Return `parallel` with `context` and `ulysses` decided.

    If the run leaves them open, this chooses the form that adds the least to a layer's time; of equal forms, the one
    with the larger `ulysses`, because its matrix products are larger. For "usp" without a degree it chooses a grid with
    1 < ulysses < cp if there is a legal one.
    """
    if parallel.context == "ring":
        return replace(parallel, ulysses=1)
    if parallel.context == "ulysses":
        return replace(parallel, ulysses=parallel.cp)
    if parallel.context == "usp" and parallel.ulysses:
        return parallel
    degrees = legal_ulysses(arch, parallel)
    cuts = [u for u in degrees if train.seq_len % token_multiple(replace(parallel, ulysses=u)) == 0]
    degrees = cuts or degrees
    if parallel.context == "usp":
        degrees = [u for u in degrees if 1 < u < parallel.cp] or degrees
    costs = [context_cost(arch, train, parallel, u, links) for u in degrees]
    best = min(costs, key=lambda cost: (cost.added, -cost.ulysses)).ulysses
    if parallel.context == "usp" or 1 < best < parallel.cp:
        return replace(parallel, context="usp", ulysses=best)
    return replace(parallel, context="ring" if best == 1 else "ulysses", ulysses=best)


def explain_context(arch: Arch, train: Train, parallel: Parallel, links: Links = H100_NODES) -> str:
    """Return one sentence with the form of context parallelism that `parallel` has (or that "auto" chooses), its cost
    and the cost of other forms.
    """
    chosen = resolve_context(arch, train, parallel, links)
    cost = context_cost(arch, train, parallel, chosen.ulysses, links)
    others = [
        context_cost(arch, train, parallel, u, links) for u in legal_ulysses(arch, parallel) if u != chosen.ulysses
    ]
    where = "inside a node" if parallel.cp * parallel.tp <= links.ranks_per_node else "across nodes"
    text = f"{_form(chosen.ulysses, parallel.cp)} {where}: {_spent(arch, train, chosen, cost)}"
    text = f"{text}, which adds {_ms(cost.added)} to a layer and micro-batch"
    if not others:
        return f"{text}; {local_heads(arch, parallel)[0]} query heads on a rank cannot be dealt to {parallel.cp} ranks"
    return f"{text} ({', '.join(f'{_form(o.ulysses, parallel.cp)} {_ms(o.added)}' for o in _best(others))})"


def _best(costs: Sequence[ContextCost]) -> list[ContextCost]:
    return sorted(costs, key=lambda cost: cost.added)[:2]


def _form(ulysses: int, cp: int) -> str:
    if ulysses == 1:
        return f"a ring of {cp}"
    return f"Ulysses over {cp}" if ulysses == cp else f"Ulysses over {ulysses} in rings of {cp // ulysses}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else format_seconds(seconds)


def _spent(arch: Arch, train: Train, parallel: Parallel, cost: ContextCost) -> str:
    """Return the bytes that a rank sends and the time that they take, as text."""
    parts, ring, dealt = [], ring_bytes(arch, train, parallel), ulysses_bytes(arch, train, parallel)
    if dealt.forward:
        sent = (dealt.forward + dealt.backward) * (cost.ulysses - 1) / cost.ulysses
        parts.append(f"all-to-alls send {format_bytes(sent)} in {_ms(cost.all_to_all)}")
    if ring.forward:
        sent = format_bytes(ring.forward + ring.backward)
        beside = f"beside {_ms(cost.computing)} of attention"
        parts.append(f"messages send {sent} in {_ms(cost.sending)} {beside} and sums take {_ms(cost.merging)}")
    return ", ".join(parts)
