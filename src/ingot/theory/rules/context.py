"""The forms of context parallelism that a model and its sequences allow.

    every form   a sequence is divided into cp equal parts; in the zigzag layout of a ring of n, into 2n parts first.
                 Sequence parallelism divides each of the cp parts into tp parts.
    ulysses      distributes heads: its degree (cp, or `ulysses` in a grid) divides the query heads of a tensor-parallel
                 rank. Key/value heads are repeated until the degree divides them too.
    usp          a grid needs rows and columns: 1 < ulysses < cp, and ulysses divides cp.

"auto" needs at least one possible form, and takes only possible forms (theory/context.py chooses among them). Only a
ring has a layout to choose. `context_layout` would have no effect with "ulysses", where each rank has neighboring
tokens, nor with "auto", which may choose Ulysses; both are refused.
"""

import math
from collections.abc import Iterator

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig, Train
from ingot.theory.rules.nearest import divisors, multiples, nearest

Problems = Iterator[tuple[str, str]]


def context_rules(run: RunConfig) -> Problems:
    """Yield (dotted key of the run file, problem and fix) for each broken rule. Degrees must be at least 1."""
    arch, train, parallel = run.model, run.train, run.parallel
    idle = list(_idle_settings(parallel))
    yield from idle
    if idle or parallel.cp == 1:
        return
    if parallel.context == "auto":
        if not legal_forms(arch, train, parallel):
            yield "parallel.cp", _no_form(arch, train, parallel)
        return
    if parallel.context == "usp":
        grid = list(_grid_rules(arch, parallel))
        yield from grid
        if grid:
            return
    elif parallel.context == "ulysses" and not deals_heads(arch, parallel.tp, parallel.cp):
        yield "parallel.cp", _too_few_heads(arch, parallel)
    pieces = token_pieces(parallel)
    if train.seq_len % pieces:
        yield "train.seq_len", _uneven(train, parallel, pieces)


def legal_forms(arch: Arch, train: Train, parallel: Parallel) -> list[tuple[str, int]]:
    """Return (context, ulysses) for every form that model and sequences allow with this cp, even if the run sets
    another form.
    """
    cp, found = parallel.cp, []
    for degree in divisors(cp):
        form = "ring" if degree == 1 else "ulysses" if degree == cp else "usp"
        if deals_heads(arch, parallel.tp, degree) and train.seq_len % _pieces(parallel, degree) == 0:
            found.append((form, degree))
    return found


def deals_heads(arch: Arch, tp: int, degree: int) -> bool:
    """Return True if `degree` ranks of Ulysses can share the heads of a tensor-parallel rank."""
    if arch.num_heads % tp:
        return True  # this tp is reported as a problem elsewhere, and gives no whole number of heads per rank
    return arch.num_heads // tp % degree == 0


def token_pieces(parallel: Parallel) -> int:
    """Return the number that must divide the sequence length for context parallelism. "auto", and a grid without a
    degree, count as a ring of all ranks.
    """
    degree = {"ulysses": parallel.cp, "usp": max(parallel.ulysses, 1)}.get(parallel.context, 1)
    return _pieces(parallel, degree)


def cut_of_sequences(parallel: Parallel) -> int:
    """Return the number that must divide the sequence length for context and sequence parallelism together."""
    return math.lcm(token_pieces(parallel), parallel.cp * (parallel.tp if parallel.sequence else 1))


def _pieces(parallel: Parallel, ulysses: int) -> int:
    ring = parallel.cp // ulysses
    halves = 2 * ring if ring > 1 and parallel.context_layout == "zigzag" else 1
    return math.lcm(halves, parallel.cp)


def _idle_settings(parallel: Parallel) -> Problems:
    """Yield settings that would silently have no effect."""
    if parallel.cp == 1:
        for name, idle in (("context", "auto"), ("ulysses", 0), ("context_layout", "zigzag")):
            if (value := getattr(parallel, name)) != idle:
                found = f"{value!r} without context parallelism (cp = 1)"
                yield f"parallel.{name}", f"{found}; set parallel.cp to 2 or more, or remove it"
        return
    resolved = {"ring": 1, "ulysses": parallel.cp}.get(parallel.context)  # the value that plans write
    if parallel.ulysses not in (0, resolved) and parallel.context != "usp":
        found = f"{parallel.ulysses} with context = {parallel.context!r}, which has no grid"
        yield "parallel.ulysses", f'{found}; set parallel.context = "usp", or remove it'
    if parallel.context_layout != "zigzag" and parallel.context in ("ulysses", "auto"):
        why = "deals out heads and has no ring" if parallel.context == "ulysses" else "may choose a form without a ring"
        found = f"{parallel.context_layout!r} with context = {parallel.context!r}, which {why}"
        yield "parallel.context_layout", f'{found}; set parallel.context to "ring" or "usp", or remove it'


def _grid_rules(arch: Arch, parallel: Parallel) -> Problems:
    """Yield the problems of a grid; ulysses = 0 leaves the lengths of its sides open."""
    cp, ulysses = parallel.cp, parallel.ulysses
    sides = [d for d in divisors(cp) if 1 < d < cp]
    legal = [d for d in sides if deals_heads(arch, parallel.tp, d)]
    if ulysses in legal or (legal and not ulysses):
        return
    found = f"is {ulysses}" if ulysses else "is open"
    if ulysses in sides or (sides and not ulysses):
        rule = f"a row of a grid deals out the {_heads(arch, parallel)}, so it divides them"
    else:
        rule = f"a grid of cp = {cp} ranks has rows of 1 < ulysses < {cp} that divide it"
    use = f"nearest: {nearest(ulysses, legal)}" if legal else 'none fits; use context = "ring", or another cp'
    yield "parallel.ulysses", f'{found} with context = "usp": {rule}; {use}'


def _heads(arch: Arch, parallel: Parallel) -> str:
    of_rank = f" of a rank of tp = {parallel.tp}" if parallel.tp > 1 else ""
    return f"{arch.num_heads // parallel.tp} query heads{of_rank}"


def _too_few_heads(arch: Arch, parallel: Parallel) -> str:
    legal = divisors(arch.num_heads // parallel.tp)
    use = f'nearest: {nearest(parallel.cp, legal)}, or context = "ring"'
    return f'{parallel.cp} with context = "ulysses" does not divide the {_heads(arch, parallel)}; {use}'


def _uneven(train: Train, parallel: Parallel, pieces: int) -> str:
    zigzag = pieces > parallel.cp
    why = f"equal parts for the {parallel.cp} ranks of cp" + (", in a ring two each (zigzag)" if zigzag else "")
    use = f"nearest: {multiples(train.seq_len, cut_of_sequences(parallel))}"
    if zigzag and train.seq_len % parallel.cp == 0:
        use += ', or context_layout = "contiguous" or "striped"'
    return f"{train.seq_len} is not a multiple of {pieces}: {why}; {use}"


def _no_form(arch: Arch, train: Train, parallel: Parallel) -> str:
    why = f"train.seq_len = {train.seq_len} is not a multiple of {2 * parallel.cp}, as a ring (zigzag) needs"
    if train.seq_len % parallel.cp == 0:
        why += f", and no other form can deal out the {_heads(arch, parallel)}"
    longer = f"a seq_len of {multiples(train.seq_len, cut_of_sequences(parallel))}"
    return f"{parallel.cp} is not possible: {why}; nearest: {longer}, or another cp"
