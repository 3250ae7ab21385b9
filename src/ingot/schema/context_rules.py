"""Which forms of context parallelism a model and its sequences allow.

    every form   the sequence is cut into cp equal parts; into 2 x cp for the zigzag layout of a ring. Sequence
                 parallelism cuts each of them once more, into tp parts.
    ulysses      deals out heads: its degree (cp, or `ulysses` in a grid) divides the query heads of a tensor-parallel
                 rank, and divides its key/value heads or is a multiple of them (each is then on several ranks).
    usp          a grid has two sides: 1 < ulysses < cp, and ulysses divides cp.

"auto" needs one form that is possible, and takes only such (theory/context.py chooses among them). A ring alone has a
layout to choose: without one, `context_layout` would do nothing, so it is refused with "ulysses", where each rank has
neighbouring tokens, and with "auto", which may choose that.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ingot.schema.nearest import divisors, multiples, nearest

if TYPE_CHECKING:
    from ingot.schema.arch import Arch
    from ingot.schema.parallel import Parallel
    from ingot.schema.run import RunConfig, Train

Problems = Iterator[tuple[str, str]]


def context_rules(run: "RunConfig") -> Problems:
    """(dotted key of the run file, what is wrong and the way out). The degrees are at least 1."""
    arch, train, parallel = run.model, run.train, run.parallel
    idle = list(_idle_settings(parallel))
    yield from idle
    if idle or parallel.cp == 1:
        return
    if parallel.context == "usp":
        grid = list(_grid_rules(arch, parallel))
        yield from grid
        if grid:
            return
    if parallel.context == "auto":
        if not legal_forms(arch, train, parallel):
            yield "parallel.cp", _no_form(arch, train, parallel)
        return
    degree = parallel.cp if parallel.context == "ulysses" else parallel.ulysses or 1
    if not deals_heads(arch, parallel.tp, degree):
        yield from _too_few_heads(arch, parallel, degree)
    pieces = _pieces(parallel, degree)
    if train.seq_len % pieces:
        yield "train.seq_len", _uneven(train, parallel, pieces)


def legal_forms(arch: "Arch", train: "Train", parallel: "Parallel") -> list[tuple[str, int]]:
    """(context, ulysses) for every form that model and sequences allow with this cp, whatever was asked for."""
    cp = parallel.cp
    degrees = [d for d in divisors(cp) if deals_heads(arch, parallel.tp, d)]
    fitting = [d for d in degrees if train.seq_len % _pieces(parallel, d) == 0]
    return [("ring" if d == 1 else "ulysses" if d == cp else "usp", d) for d in fitting]


def deals_heads(arch: "Arch", tp: int, degree: int) -> bool:
    """Whether `degree` ranks of Ulysses can share the heads of a tensor-parallel rank."""
    if degree == 1 or arch.num_heads % tp:
        return True  # with a tp that is refused, heads per rank mean nothing
    heads, kv_heads = arch.num_heads // tp, max(arch.num_kv_heads // tp, 1)
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def cut_of_sequences(parallel: "Parallel") -> int:
    """The length of sequences must be a multiple of this, for context and sequence parallelism together."""
    degree = {"ulysses": parallel.cp, "usp": max(parallel.ulysses, 1)}.get(parallel.context, 1)
    sequence = parallel.cp * (parallel.tp if parallel.sequence else 1)
    return math.lcm(_pieces(parallel, degree) if parallel.cp > 1 else 1, sequence)


def _pieces(parallel: "Parallel", ulysses: int) -> int:
    halves = 2 if ulysses < parallel.cp and parallel.context_layout == "zigzag" else 1
    return halves * parallel.cp


def _idle_settings(parallel: "Parallel") -> Problems:
    """No setting may silently do nothing."""
    if parallel.cp == 1:
        for name, idle in (("context", "auto"), ("ulysses", 0), ("context_layout", "zigzag")):
            if (value := getattr(parallel, name)) != idle:
                found = f"{value!r} without context parallelism (cp = 1)"
                yield f"parallel.{name}", f"{found}; set parallel.cp to 2 or more, or remove it"
        return
    if parallel.ulysses and parallel.context != "usp":
        found = f"{parallel.ulysses} with context = {parallel.context!r}, which has no grid"
        yield "parallel.ulysses", f'{found}; set parallel.context = "usp", or remove it'
    if parallel.context_layout != "zigzag" and parallel.context in ("ulysses", "auto"):
        why = "deals out heads and has no ring" if parallel.context == "ulysses" else "may choose a form without a ring"
        found = f"{parallel.context_layout!r} with context = {parallel.context!r}, which {why}"
        yield "parallel.context_layout", f'{found}; set parallel.context to "ring" or "usp", or remove it'


def _grid_rules(arch: "Arch", parallel: "Parallel") -> Problems:
    cp, ulysses = parallel.cp, parallel.ulysses
    sides = [d for d in divisors(cp) if 1 < d < cp]
    if ulysses in sides:
        return
    rule = f"a grid of cp = {cp} ranks has rows of 1 < ulysses < {cp} that divide it"
    use = f"nearest: {nearest(ulysses, [d for d in sides if deals_heads(arch, parallel.tp, d)] or sides)}"
    if not sides:
        use = 'there is none; use context = "ring" or "ulysses", or another cp'
    yield "parallel.ulysses", f'is {ulysses} with context = "usp": {rule}; {use}'


def _too_few_heads(arch: "Arch", parallel: "Parallel", degree: int) -> Problems:
    heads, kv_heads = arch.num_heads // parallel.tp, max(arch.num_kv_heads // parallel.tp, 1)
    of = f"{heads} query and {kv_heads} key/value heads" + (f" of a rank of tp = {parallel.tp}" * (parallel.tp > 1))
    rule = "it must divide the former, and divide the latter or be a multiple of them"
    legal = [d for d in divisors(heads) if deals_heads(arch, parallel.tp, d)]
    if parallel.context == "usp":
        sides = [d for d in legal if 1 < d < parallel.cp and parallel.cp % d == 0]
        use = f"nearest: {nearest(degree, sides)}" if sides else 'use context = "ring"'
        yield "parallel.ulysses", f"{degree} ranks cannot deal out {of}: {rule}; {use}"
        return
    use = f'nearest: {nearest(degree, legal)}, or context = "ring"'
    yield "parallel.cp", f'{degree} ranks with context = "ulysses" cannot deal out {of}: {rule}; {use}'


def _uneven(train: "Train", parallel: "Parallel", pieces: int) -> str:
    what = "two parts for each of" if pieces > parallel.cp else "one part for each of"
    why = f"{what} the {parallel.cp} ranks of cp" + (" (zigzag)" if pieces > parallel.cp else "")
    use = f"nearest: {multiples(train.seq_len, cut_of_sequences(parallel))}"
    if pieces > parallel.cp and train.seq_len % parallel.cp == 0:
        use += ', or context_layout = "contiguous" or "striped"'
    return f"{train.seq_len} is no multiple of {pieces}, {why}; {use}"


def _no_form(arch: "Arch", train: "Train", parallel: "Parallel") -> str:
    lengths = f"train.seq_len = {train.seq_len} is no multiple of {2 * parallel.cp}, as a ring (zigzag) needs"
    if train.seq_len % parallel.cp == 0:
        lengths += f"; and {parallel.cp} ranks of Ulysses cannot deal out {arch.num_heads // parallel.tp} heads"
    legal = [cp for cp in divisors(train.seq_len) if train.seq_len % (2 * cp) == 0]
    lengthen = f"a seq_len of {multiples(train.seq_len, cut_of_sequences(parallel))}"
    near = nearest(parallel.cp, legal)
    return f"{parallel.cp} is not possible: {lengths}; use " + (f"cp = {near}, or {lengthen}" if near else lengthen)
