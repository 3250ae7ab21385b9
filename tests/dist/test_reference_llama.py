"""Logits and gradients of every kind of layout against `transformers`' Llama, a reference that nobody here wrote."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ingot.model.init import initialize
from ingot.model.transformer import Transformer
from ingot.train.build import build_parts

from . import steps
from .steps import CPU, batch_of, join, keep, run_of

ARCH = replace(steps.ARCH, qk_norm=False)  # Llama has no norms of queries and keys
ONE_DATA_RANK = SimpleNamespace(data_rank=0, data_ranks=1)
LAYOUTS = {
    "one process": {},
    "tp": {"tp": 2},
    "tp without sequence": {"tp": 4, "sequence": False},
    "pp": {"pp": 2},
    "zb_v": {"pp": 2, "schedule": "zb_v"},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp x zero 3": {"tp": 2, "dp_shard": 2, "zero": 3},
    "pp x tp x zero 3": {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3},
}
TOLERANCE = 1e-10


def computed(rank, world, run, weights):
    """This rank's logits of the first micro-batch (None where the last stage is elsewhere) and gradients."""
    parts = build_parts(run, CPU, Path())
    with torch.no_grad():
        for piece in parts.model.pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            piece.value.copy_(weights[piece.name][place])
    parts.model.publish()
    batch = batch_of(run, parts.mesh, 1)
    parts.program.train(batch)
    parts.model.reduce()
    gradients = keep((piece, piece.grad) for piece in parts.model.pieces)
    logits = parts.program.forward_only(batch.inputs[0], None, None, per_token=False)
    return None if logits is None else (parts.mesh.data_rank, logits.numpy()), gradients


def reference(theirs, ours, run):
    """Logits of the whole batch of step 1, and the gradients of its mean loss, by our names."""
    whole = batch_of(run, ONE_DATA_RANK, 1)
    logits = theirs(whole.inputs.flatten(0, 1)).logits
    theirs.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), whole.targets.flatten()).backward()
    gradients = ours({name: p.grad for name, p in theirs.named_parameters()})
    return logits.detach().numpy(), {name: gradient.numpy() for name, gradient in gradients.items()}


def deviation(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_layouts_equal_the_llama_of_transformers(fork_ranks, transformers_twin, tied):
    arch = replace(ARCH, tied_embeddings=tied)
    model = Transformer(arch).double()
    initialize(model, arch, 1)
    # Spread the weights, so that norms, rotary angles and residuals all matter to the result.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected_logits, expected = reference(*transformers_twin(arch, model), run_of(arch=arch))
    for name, layout in LAYOUTS.items():
        run = run_of(arch=arch, **layout)
        ranks = fork_ranks(computed, run.parallel.world_size, run, weights)
        gradients = join(kept for _, kept in ranks)
        assert gradients.keys() == weights.keys(), name
        for parameter, gradient in gradients.items():
            assert deviation(gradient, expected[parameter]) < TOLERANCE, (name, parameter)
        found = [logits for logits, _ in ranks if logits is not None]
        assert {data_rank for data_rank, _ in found} == set(range(run.parallel.data_ranks)), name
        for data_rank, logits in found:
            first = data_rank * run.train.global_batch // run.parallel.data_ranks
            assert deviation(logits, expected_logits[first : first + len(logits)]) < TOLERANCE, name
