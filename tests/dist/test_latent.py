"""Latent attention in every kind of layout against one undivided process."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.trainer.build import build_parts
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

from .steps import CPU, LATENT, batch_of, join, keep, mean_losses, run_of

ONE_DATA_RANK = SimpleNamespace(data_rank=0, data_ranks=1)
TOLERANCE = 1e-12
LAYOUTS = {
    "tp": {"tp": 2},
    "tp without sequence": {"tp": 4, "sequence": False},
    "tp, recomputed": {"tp": 2, "recompute": "selective"},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp x zb_v": {"tp": 2, "pp": 2, "schedule": "zb_v"},
    "ring x tp": {"cp": 2, "tp": 2, "context": "ring"},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "usp": {"cp": 4, "context": "usp", "ulysses": 2},
}


def computed(rank, world, run, weights):
    """The loss of this rank's part of the batch (None where the last stage is elsewhere), and the gradients it has."""
    parts = build_parts(run, CPU, Path())
    with torch.no_grad():
        for piece in parts.model.shards:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            piece.value.copy_(weights[piece.name][place])
    parts.model.publish()
    loss = float(parts.program.train(batch_of(run, parts.mesh, 1)))
    parts.model.reduce()
    has_loss = parts.mesh.index("pp") == parts.program.table.rank_of_stage[-1]
    return loss if has_loss else None, keep((piece, piece.grad) for piece in parts.model.shards)


@pytest.mark.parametrize(
    ("q_rank", "layouts"),
    [(10, ["ring x tp"]), pytest.param(10, LAYOUTS, marks=pytest.mark.nightly), (0, ["tp", "tp without sequence"])],
    ids=["query latent", "query latent, all", "no query latent"],
)
def test_layouts_equal_one_process(fork_ranks, q_rank, layouts):
    arch = replace(LATENT, mla=replace(LATENT.mla, q_rank=q_rank))
    model = Transformer(arch).double()
    initialize(model, arch, 1)
    # Spread the weights, so that norms, rotary angles and residuals all matter to the result.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    batch = batch_of(run_of(arch=arch), ONE_DATA_RANK, 1)
    expected = model(batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)) / batch.targets.numel()
    expected.backward()
    for name in layouts:
        run = run_of(arch=arch, **LAYOUTS[name])
        ranks = fork_ranks(computed, run.parallel.world_size, run, weights)
        assert mean_losses([None if loss is None else [loss] for loss, _ in ranks]) == pytest.approx(
            [expected.item()], rel=TOLERANCE
        ), name
        gradients = join(kept for _, kept in ranks)
        assert gradients.keys() == weights.keys(), name
        for parameter, p in model.named_parameters():
            wanted = p.grad.numpy()
            assert np.abs(gradients[parameter] - wanted).max() / np.abs(wanted).max() < TOLERANCE, (name, parameter)
