"""The combined results of a case's ranks against one process. Every deviation is max|difference| / max|reference|."""

import time
from dataclasses import dataclass, field

import numpy as np

from .cases import Case
from .play import Block, Played, play
from .ranks import Ranks, RanksFailed
from .reference import Reference, canonical_gradients, reference_of

TOLERANCE = 1e-12  # of losses, norms and gradients
AFTER_STEPS = 1e-10  # of parameters after the last step, and of losses and norms after the first: updates amplify


@dataclass
class Outcome:
    """The largest deviations (of loss and norm: in the first step), and what is wrong: check -> the first finding.

    coverage: an element that no rank holds. owners: an element of which not exactly one copy counts. replicas: copies
    that differ. missing: no gradient. loss, norm, gradient, parameters: a deviation above tolerance. routing: other
    loads, drops or entropies. balance: other biases. bits: canonical sums that depend on the layout. error: a rank
    failed.
    """

    case: Case
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    parameters: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def finds(self, check: str, what: str) -> None:
        self.wrong.setdefault(check, what)

    def judges(self, check: str, what: str, found: float, tolerance: float, *, first_step: bool = True) -> None:
        if first_step:
            setattr(self, check, max(getattr(self, check), found))
        if not found <= tolerance:
            self.finds(check, f"{what}: {found:.1e}")


def prove(ranks: Ranks, case: Case, fault: str = "", timeout: float = 120.0) -> Outcome:
    """Play a case and compare it. fault: the name of an error to plant (planting.py)."""
    started = time.perf_counter()
    try:
        played = ranks.run(play, case.ranks, case, fault, timeout=timeout)
        outcome = compare(case, played)
        if case.parallel.reduce == "canonical":
            expected = _canonical(ranks, case, fault, timeout)
            for name in _different(_gradients(case, played), expected):
                outcome.finds("bits", name)
    except RanksFailed as failure:
        outcome = Outcome(case, *[float("nan")] * 4, wrong={"error": str(failure)})
    outcome.seconds = time.perf_counter() - started
    return outcome


def compare(case: Case, played: list[Played]) -> Outcome:
    outcome, reference = Outcome(case), reference_of(case)
    _compare_scalars(outcome, reference, played)
    _compare_routing(outcome, reference, played)
    blocks = _by_name(played)
    for name in blocks.keys() - reference.parameters.keys():
        outcome.finds("coverage", f"{name} is no parameter of the model")
    for name, expected in reference.parameters.items():
        own = blocks.get(name, [])
        value = assemble(outcome, name, expected.shape, [(block, block.value) for block in own])
        outcome.judges("parameters", name, deviation(value, expected), AFTER_STEPS)
        gradients = [(block, block.gradient) for block in own if block.gradient is not None]
        if len(gradients) < len(own) or not own:
            outcome.finds("missing", name)
        gradient = assemble(outcome, name, expected.shape, gradients)
        outcome.judges("gradient", name, deviation(gradient, reference.gradients[name]), TOLERANCE)
    return outcome


def _compare_scalars(outcome: Outcome, reference: Reference, played: list[Played]) -> None:
    """Ranks that share a part of the batch, by tp, have the same loss, so the mean over all of them is the loss."""
    losses = np.mean([rank.losses for rank in played if rank.losses is not None], axis=0)
    for step, (loss, norm) in enumerate(zip(reference.losses, reference.norms, strict=True)):
        what, tolerance, first = f"step {step + 1}", AFTER_STEPS if step else TOLERANCE, step == 0
        outcome.judges("loss", what, deviation(losses[step], loss), tolerance, first_step=first)
        for rank in played:
            outcome.judges("norm", what, deviation(rank.norms[step], norm), tolerance, first_step=first)


def _compare_routing(outcome: Outcome, reference: Reference, played: list[Played]) -> None:
    """Loads and drops are whole numbers and have to be the same; every rank knows those of all layers."""
    if not outcome.case.arch.is_moe:
        return
    for rank in played:
        for step, expected in enumerate(reference.routing):
            found = rank.routing[step] if step < len(rank.routing) else np.zeros(0)
            whole = [i for i in range(expected.shape[1]) if i != expected.shape[1] - 2]  # all but the entropy
            if found.shape != expected.shape or not np.array_equal(found[:, whole], expected[:, whole]):
                outcome.finds("routing", f"step {step + 1}: {found.tolist()} instead of {expected.tolist()}")
            elif deviation(found, expected) > (AFTER_STEPS if step else TOLERANCE):
                outcome.finds("routing", f"entropies of step {step + 1}")
        for name, value in rank.buffers.items():
            if deviation(value, reference.buffers[name]) > TOLERANCE:
                outcome.finds("balance", name)


def _canonical(ranks: Ranks, case: Case, fault: str, timeout: float) -> dict[str, np.ndarray]:
    """The gradients of the promised tree. tp, pp and cp add in an order of their own: there, all copies together have
    to give the bits of one copy alone."""
    if case.parallel.tp == case.parallel.pp == case.parallel.cp == 1:
        return canonical_gradients(case)
    alone = case.one_copy()
    return _gradients(alone, ranks.run(play, alone.ranks, alone, fault, timeout=timeout))


def _gradients(case: Case, played: list[Played]) -> dict[str, np.ndarray]:
    whole = {}
    for name, blocks in _by_name(played).items():
        parts = [(block, block.gradient) for block in blocks if block.gradient is not None]
        whole[name] = assemble(Outcome(case), name, blocks[0].shape, parts)
    return whole


def _different(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    return [name for name in expected if not np.array_equal(found[name], expected[name])]


def _by_name(played: list[Played]) -> dict[str, list[Block]]:
    blocks: dict[str, list[Block]] = {}
    for block in (block for rank in played for block in rank.blocks):
        blocks.setdefault(block.name, []).append(block)
    return blocks


def assemble(outcome: Outcome, name: str, shape: tuple[int, ...], parts: list[tuple[Block, np.ndarray]]) -> np.ndarray:
    """The whole tensor from its blocks. Where they overlap they have to have the same bits, and one owner."""
    whole = np.full(shape, np.nan)
    owners = np.zeros(shape, dtype=int)
    for block, values in parts:
        place = tuple(slice(o, o + n) for o, n in zip(block.offsets, values.shape, strict=True))
        if block.shape != shape or whole[place].shape != values.shape:
            outcome.finds("coverage", f"{name} {block.shape}: {values.shape} at {block.offsets}")
            continue
        known = ~np.isnan(whole[place])
        if not np.array_equal(whole[place][known], values[known]):
            outcome.finds("replicas", name)
        whole[place] = values
        owners[place] += block.owner
    if np.isnan(whole).any():
        outcome.finds("coverage", name)
    if (owners != 1).any():
        outcome.finds("owners", f"{name} has {sorted(map(int, set(owners.flat)))}")
    return whole


def deviation(found, expected) -> float:
    """NaN, which compares with nothing, comes out as infinite. What should be zero has to be."""
    found, expected = np.asarray(found), np.asarray(expected)
    scale = np.abs(expected).max()
    worst = float(np.abs(found - expected).max() / (scale if scale > 0 else 1e-300))
    return worst if worst == worst else float("inf")
