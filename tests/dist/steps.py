"""Training steps on a rank by the code that trains, build_parts and train_step, on tokens made up here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.schema.arch import Arch, Mla
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, Optim, RunConfig, Train
from ingot.theory.layout import layout_problems
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parts import StepParts
from ingot.trainer.step import train_step

ARCH = Arch(vocab_size=48, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, d_ffn=32, qk_norm=True)
LATENT = replace(
    ARCH,
    qk_norm=False,
    num_kv_heads=4,
    head_dim=6,
    mla=Mla(q_rank=10, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=5),
)
CPU = torch.device("cpu")


def run_of(
    *,
    arch: Arch = ARCH,
    precision: Any = "fp64",
    global_batch: int = 8,
    micro_batch: int = 1,
    seq_len: int = 8,
    optim: Optim | None = None,
    **parallel,
) -> RunConfig:
    """A run with the layout `parallel`, which has to be legal. Every block is a unit, as in large models."""
    run = RunConfig(
        name="layouts",
        seed=3,
        model=arch,
        data=Data(tokens="made up"),
        train=Train(
            steps=1000, seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch, precision=precision
        ),
        optim=optim or Optim(lr=1e-2, weight_decay=0.1, clip_norm=0.5),
        parallel=Parallel(**{"unit_layers": 1} | parallel),
    )
    assert not list(layout_problems(run))
    return run


def batch_of(run: RunConfig, mesh: Mesh, step: int) -> SimpleNamespace:
    """Return this rank's part of the batch of `step`: samples r*n..(r+1)*n-1 of data rank r, in micro-batches."""
    train, generator = run.train, torch.Generator().manual_seed(step)
    ids = torch.randint(0, run.model.vocab_size, (train.global_batch, train.seq_len + 1), generator=generator)
    own = ids.chunk(mesh.data_ranks)[mesh.data_rank].unflatten(0, (-1, train.micro_batch))
    return SimpleNamespace(step=step, inputs=own[..., :-1], targets=own[..., 1:], document_ids=None)


@dataclass
class Trained:
    """losses: of this rank's part of the batch, None where the last stage is on another rank. norms: global ones."""

    parts: StepParts
    losses: list[float] | None
    norms: list[float]


def train(run: RunConfig, steps: Iterable[int], parts: StepParts | None = None, base: Path = Path()) -> Trained:
    """Do `steps` with `parts`, or with new ones."""
    parts = parts or build_parts(run, CPU, base)
    facts = [train_step(parts, batch_of(run, parts.mesh, step), run.optim.lr) for step in steps]
    has_loss = parts.mesh.index("pp") == parts.program.table.rank_of_stage[-1]
    return Trained(
        parts=parts,
        losses=[float(fact.loss) for fact in facts] if has_loss else None,
        norms=[float(fact.grad_norm) for fact in facts],
    )


def mean_losses(ranks: Iterable[list[float] | None]) -> list[float]:
    """Return the mean loss of each step over the whole batch. Ranks that share a part of it have the same loss."""
    return np.mean([losses for losses in ranks if losses is not None], axis=0).tolist()


Kept = list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]


def keep(blocks: Iterable[tuple[Any, Tensor]]) -> Kept:
    """Copies of tensors that are cut like pieces, with their places, as they can be sent to the test's process."""
    return [(piece.name, piece.shape, piece.offsets, tensor.numpy().copy()) for piece, tensor in blocks]


def join(ranks: Iterable[Kept]) -> dict[str, np.ndarray]:
    """Whole tensors. Each element has to be there, and where several ranks hold it, with the same bits."""
    whole: dict[str, np.ndarray] = {}
    for name, shape, offsets, values in (block for rank in ranks for block in rank):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        target = whole.setdefault(name, np.full(shape, np.nan, values.dtype))[place]
        assert (np.isnan(target) | (target == values)).all(), f"{name} differs between ranks"
        target[:] = values
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def state_of(parts: StepParts) -> Iterator[tuple[Any, Tensor]]:
    """Master weights and moments, as blocks of tensors with names of their own."""
    moments = parts.optimizer.moments()
    for piece in parts.model.shards:
        yield piece, piece.value
        for kind in ("exp_avg", "exp_avg_sq"):
            if piece.name in moments:
                own = SimpleNamespace(name=f"{kind} of {piece.name}", shape=piece.shape, offsets=piece.offsets)
                yield own, moments[piece.name][kind]
