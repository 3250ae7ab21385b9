"""Updates that look at whole matrices, while every rank holds pieces of them.

The ranks of one copy of a pipeline stage share the work: each matrix has one worker. In rounds, every rank sends the
directions of its pieces to the workers; a worker computes the updates of its whole matrices and sends each rank the
parts that it holds, also to ranks that hold the same block. A matrix is computed once per copy of the model, and with
the same operations in every layout. The traffic is that of two all-to-alls over the matrices in the dtype of the
masters; the memory is that of a round (theory/update.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.plugins.optimizer import MatrixRule, RuleOf, keep, keep_state, require_like
from ingot.plugins.piece import ParameterShard, PlacedParameter
from ingot.theory.update import ROUND_ELEMENTS
from ingot.trainer.mesh.collectives import finish, start_all_to_all


@dataclass(frozen=True)
class MatrixBlock:
    """A block of a matrix in the piece of one rank. rank: its position in the group. start: the block's first row in
    the piece. row, column, rows, columns: its place in the matrix. sends: the rank sends this block to the worker;
    other ranks may hold it too."""

    rank: int
    start: int
    row: int
    column: int
    rows: int
    columns: int
    sends: bool

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of_piece(self, piece: Tensor) -> Tensor:
        return piece[self.start : self.start + self.rows]

    def of_matrix(self, matrix: Tensor) -> Tensor:
        return matrix[self.row : self.row + self.rows, self.column : self.column + self.columns]


@dataclass(frozen=True)
class WholeMatrix:
    """One matrix of the parameter `name`: the whole parameter, or one expert of a stack. blocks: by rank."""

    name: str
    rows: int
    columns: int
    blocks: tuple[MatrixBlock, ...]

    @property
    def cost(self) -> int:
        """Multiplications of a product of the matrix with its transpose, the work of most updates."""
        return self.rows * self.columns * min(self.rows, self.columns)


# (the matrices of which this rank is the worker; by worker: this rank's blocks, with their parameter; by rank: the
# blocks that it holds of the matrices of this worker, with the index of the matrix)
MatrixRound = tuple[list[WholeMatrix], list[list[tuple[str, MatrixBlock]]], list[list[tuple[int, MatrixBlock]]]]


class Matrices:
    """The matrices that the ranks of `group` hold together, and their workers.

    placed: parameter name -> its blocks on all ranks of the group; the same on every rank. ranks: the global ranks of
    the group, in its order. group: None for one process. like: any master, for dtype and device.
    """

    def __init__(
        self,
        placed: Mapping[str, PlacedParameter],
        rule_of: RuleOf,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        like: Tensor,
    ):
        self.group, self.like = group, like
        self.own = ranks.index(dist.get_rank()) if group is not None else 0
        rules = {name: rule_of(name, parameter.shape) for name, parameter in placed.items()}
        self.rules = {name: rule for name, rule in rules.items() if isinstance(rule, MatrixRule)}
        matrices = [matrix for name in sorted(self.rules) for matrix in _matrices(name, placed[name], ranks)]
        self.rounds = _rounds(_shared_out(matrices, len(ranks)))
        self._seen_here = [self._round(by_worker) for by_worker in self.rounds]

    @torch.no_grad()
    def update(
        self,
        shards: Sequence[ParameterShard],
        states: Mapping[str, dict[str, Tensor]],
        lr: float,
        *,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update `shards`, this rank's pieces of the matrices, and free their gradients. Collective over the group."""
        pieces = _Pieces(self.rules, {shard.name: shard for shard in shards}, states, lr, scale, found_inf)
        for seen_here in self._seen_here:
            self._update_round(pieces, *seen_here, found_inf)
        for shard in shards:
            shard.grad = None

    def _update_round(
        self,
        pieces: "_Pieces",
        matrices: list[WholeMatrix],
        own: list[list[tuple[str, MatrixBlock]]],
        mine: list[list[tuple[int, MatrixBlock]]],
        found_inf: Tensor | None,
    ) -> None:
        """Update the matrices of a round. At most three copies of a round exist at a time, or two and what `of_matrix`
        makes of one matrix (theory/update.py counts them); none is left for the next round."""
        # Every rank updates the state of all its blocks, also of those that another rank sends.
        directions = [[(b, pieces.direction(name, b)) for name, b in blocks] for blocks in own]
        sent = [[direction for b, direction in blocks if b.sends] for blocks in directions]
        del directions
        arrived = self._exchange(sent, [[b for _, b in blocks if b.sends] for blocks in mine])
        del sent
        wholes = [self.like.new_empty(matrix.rows, matrix.columns) for matrix in matrices]
        parts = (part for of_rank in arrived for part in of_rank)
        for i, block in ((i, b) for blocks in mine for i, b in blocks if b.sends):
            block.of_matrix(wholes[i]).copy_(next(parts))
        del arrived, parts
        updates = [self._of_matrix(m.name, w, found_inf) for m, w in zip(matrices, wholes, strict=True)]
        del wholes
        back = [[block.of_matrix(updates[i]) for i, block in blocks] for blocks in mine]
        returned = self._exchange(back, [[b for _, b in blocks] for blocks in own])
        for blocks, returned_parts in zip(own, returned, strict=True):
            for (name, block), part in zip(blocks, returned_parts, strict=True):
                pieces.apply(name, block, part)

    def _round(self, by_worker: Sequence[Sequence[WholeMatrix]]) -> "MatrixRound":
        """Return a round as this rank sees it."""
        own = [[(m.name, b) for m in ms for b in m.blocks if b.rank == self.own] for ms in by_worker]
        mine: list[list[tuple[int, MatrixBlock]]] = [[] for _ in range(len(by_worker))]
        for i, matrix in enumerate(by_worker[self.own]):
            for block in matrix.blocks:
                mine[block.rank].append((i, block))
        return list(by_worker[self.own]), own, mine

    def _of_matrix(self, name: str, whole: Tensor, found_inf: Tensor | None) -> Tensor:
        """Return the update of a whole matrix, in its dtype. A step that is vetoed has zeros: decompositions may raise
        for a direction that is not finite."""
        if found_inf is not None:
            whole.masked_fill_(found_inf.bool(), 0.0)
        update = self.rules[name].of_matrix(whole)
        require_like("update of a whole matrix", name, update, whole)
        return update.to(whole.dtype)  # a worker and a rank without matrices must agree about what is sent

    def _exchange(self, sent: list[list[Tensor]], arriving: list[list[MatrixBlock]]) -> list[list[Tensor]]:
        """Send sent[r] to each rank r of the group; return the blocks arriving[r] from each, [rows, columns]."""
        if self.group is None:
            return sent
        flat = [tensor for tensors in sent for tensor in tensors]
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        expected = [sum(block.elements for block in blocks) for blocks in arriving]
        rows = self.like.new_empty(sum(counts))
        # Not torch.cat: blocks of columns would have to be copied once more before it.
        for tensor, place in zip(flat, rows.split([tensor.numel() for tensor in flat]), strict=True):
            place.view(tensor.shape).copy_(tensor)
        arrived = finish(start_all_to_all(rows, expected, counts, self.group))
        parts = iter(arrived.split([block.elements for blocks in arriving for block in blocks]))
        return [[next(parts).view(block.rows, block.columns) for block in blocks] for blocks in arriving]


class _Pieces:
    """This rank's pieces during one step. Everything elementwise happens here, block by block."""

    def __init__(
        self,
        rules: Mapping[str, MatrixRule],
        shards: Mapping[str, ParameterShard],
        states: Mapping[str, dict[str, Tensor]],
        lr: float,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ):
        self.rules, self.shards, self.states = rules, shards, states
        self.lr, self.scale, self.found_inf = lr, scale, found_inf
        for name in shards:
            states[name]["step"].add_(1 if found_inf is None else 1 - found_inf)

    def direction(self, name: str, block: MatrixBlock) -> Tensor:
        """Return the direction of a block; its state is updated."""
        shard, state = self.shards[name], self.states[name]
        own = {k: t if k == "step" else block.of_piece(t) for k, t in state.items()}
        assert shard.grad is not None, f"{name} has no gradient"
        gradient = block.of_piece(shard.grad).to(shard.value.dtype)
        gradient = gradient if self.scale is None else gradient * self.scale
        direction, new_state = self.rules[name].direction(gradient, own)
        require_like("direction", name, direction, gradient)
        keep_state(name, own, new_state, self.found_inf)
        return direction.to(gradient.dtype)

    def apply(self, name: str, block: MatrixBlock, update: Tensor) -> None:
        """Update the value of a block."""
        shard = self.shards[name]
        value = block.of_piece(shard.value)
        keep(value, self.rules[name].apply(value, update, self.lr, decays=shard.decays), self.found_inf)


def _matrices(name: str, parameter: PlacedParameter, ranks: Sequence[int]) -> Iterator[WholeMatrix]:
    """Yield the matrices of a parameter, each with its blocks."""
    rows = parameter.shape[0] // parameter.stack
    position = {rank: place for place, rank in enumerate(ranks)}
    for first in range(0, parameter.shape[0], rows):
        blocks, seen = [], set()
        for place in sorted(parameter.blocks, key=lambda p: position[p.rank]):
            begin, end = max(place.offsets[0], first), min(place.offsets[0] + place.sizes[0], first + rows)
            if begin >= end or not place.sizes[1]:
                continue
            where = (begin - first, place.offsets[1], end - begin, place.sizes[1])
            block = MatrixBlock(position[place.rank], begin - place.offsets[0], *where, sends=where not in seen)
            seen.add(where)
            blocks.append(block)
        yield WholeMatrix(name, rows, parameter.shape[1], tuple(blocks))


def _shared_out(matrices: Sequence[WholeMatrix], workers: int) -> list[list[WholeMatrix]]:
    """Return the matrices of each worker: the most expensive first, each to the worker that has least to do."""
    work, lists = [0] * workers, [[] for _ in range(workers)]
    for matrix in sorted(matrices, key=lambda m: -m.cost):  # stable: equal costs stay in the order of names
        worker = work.index(min(work))
        work[worker] += matrix.cost
        lists[worker].append(matrix)
    return lists


def _rounds(lists: Sequence[Sequence[WholeMatrix]]) -> list[list[list[WholeMatrix]]]:
    """Return rounds of matrices by worker, each with at most ROUND_ELEMENTS, or one matrix, of every worker."""
    by_worker = []
    for matrices in lists:
        parts: list[list[WholeMatrix]] = []
        size = ROUND_ELEMENTS
        for matrix in matrices:
            elements = matrix.rows * matrix.columns
            if size + elements > ROUND_ELEMENTS:
                parts.append([])
                size = 0
            parts[-1].append(matrix)
            size += elements
        by_worker.append(parts)
    return [[list(part) for part in parts] for parts in zip_longest(*by_worker, fillvalue=())]
