"""One case on one rank, by the code that trains: build_parts, then three times train_step."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ingot.trainer.build import build_parts
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.step import train_step

from .cases import MICRO_BATCH, STEPS, Case
from .planting import planted
from .reference import LEARNING_RATES, global_batch


@dataclass
class Batch:
    """The batch of one data rank: [micro-batches, MICRO_BATCH, tokens]."""

    step: int
    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None


@dataclass
class Block:
    """A piece of a parameter on this rank. gradient: of the first step, reduced and not clipped; None if there was
    none. value: after the last step."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owner: bool
    gradient: np.ndarray | None
    value: np.ndarray


@dataclass
class Played:
    """The results of a rank. losses: of its part of the batch, None on ranks without the last stage. routing,
    buffers: as in reference.py, buffers of its own layers."""

    losses: list[float] | None
    norms: list[float]
    blocks: list[Block]
    routing: list[np.ndarray]
    buffers: dict[str, np.ndarray]


def play(folder: Path, case: Case, fault: str = "") -> Played:
    """fault: the name of an error to plant (faults.py)."""
    with planted(fault) if fault else nullcontext():
        return _train(case, folder)


def _train(case: Case, folder: Path) -> Played:
    parts = build_parts(case.config(), torch.device("cpu"), folder)
    pieces, gradients, reduce = parts.model.shards, [], parts.model.reduce

    def reduce_and_look() -> None:
        reduce()
        if not gradients:
            gradients.extend(None if p.grad is None else p.grad.double().numpy().copy() for p in pieces)

    parts.model.reduce = reduce_and_look
    facts = [
        train_step(parts, _own_batch(case, step, parts.mesh), LEARNING_RATES[step - 1]) for step in range(1, STEPS + 1)
    ]
    parts.optimizer.close()
    assert all(piece.value.dtype == torch.float64 for piece in pieces)
    has_loss = parts.mesh.index("pp") == parts.program.table.rank_of_stage[-1]
    return Played(
        losses=[float(fact.loss) for fact in facts] if has_loss else None,
        norms=[float(fact.grad_norm) for fact in facts],
        blocks=[
            Block(p.name, p.shape, p.offsets, p.owner, gradient, p.value.numpy().copy())
            for p, gradient in zip(pieces, gradients, strict=True)
        ],
        routing=[fact.experts.numpy() for fact in facts if fact.experts is not None],
        buffers={n: b.numpy().copy() for stage in parts.model.stages.values() for n, b in stage.named_buffers()},
    )


def _own_batch(case: Case, step: int, mesh: Mesh) -> Batch:
    """Data rank r has samples r*n..(r+1)*n-1, cut into micro-batches, as the loader deals them."""

    def own(whole: Tensor) -> Tensor:
        return whole.chunk(mesh.data_ranks)[mesh.data_rank].reshape(-1, MICRO_BATCH, case.tokens)

    inputs, targets, documents = global_batch(case, step)
    return Batch(step, own(inputs), own(targets), None if documents is None else own(documents))
