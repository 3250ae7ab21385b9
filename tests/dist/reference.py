"""Layouts beside `transformers`, a reference that nobody here wrote: logits, gradients, and whom routers choose."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from ingot.trainer.build import build_parts
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

from .steps import CPU, Kept, batch_of, join, keep, run_of

ONE_DATA_RANK = SimpleNamespace(data_rank=0, data_ranks=1)
TOLERANCE = 1e-10


@dataclass
class Found:
    """The results of one rank. logits: of its first micro-batch, None on ranks without the last stage. choices: of
    the same micro-batch, (layer, positions of the tokens, experts [B, T, K]) of each router of the rank."""

    data_rank: int
    logits: np.ndarray | None
    gradients: Kept
    choices: list[tuple[int, np.ndarray, np.ndarray]]


@dataclass
class Expected:
    """The results for the whole batch. gradients: of the mean loss, by our names. choices: layer -> experts
    [B, T, K]."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    choices: dict[int, np.ndarray]


def spread_model(arch) -> Transformer:
    """Weights so far from their first values that norms, rotary angles, residuals and biases all matter."""
    model = Transformer(arch).double()
    initialize(model, arch, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
        for bias in model.buffers():
            bias.normal_(0, 0.2, generator=generator)
    return model


def compare(fork_ranks, transformers_twin, arch, layouts) -> None:
    """Every layout has the logits, gradients and choices of the reference."""
    model = spread_model(arch)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    expected = _reference(*transformers_twin(arch, model), run_of(arch=arch))
    assert expected.choices.keys() == set(arch.expert_layers)
    for name, layout in layouts.items():
        run = run_of(arch=arch, **layout)
        ranks = fork_ranks(_computed, run.parallel.world_size, run, tensors)
        _check_gradients(name, ranks, expected.gradients)
        _check_logits(name, ranks, expected.logits, run)
        _check_choices(name, ranks, expected.choices, run)


def _computed(rank, world, run, tensors) -> Found:
    parts = build_parts(run, CPU, Path())
    with torch.no_grad():
        for piece in [*parts.model.shards, *(parts.balance.shards if parts.balance else ())]:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            piece.value.copy_(tensors[piece.name][place])
    parts.model.publish()
    batch = batch_of(run, parts.mesh, 1)
    parts.program.train(batch)
    parts.model.reduce()
    gradients = keep((piece, piece.grad) for piece in parts.model.shards)
    choices = []
    for stage in parts.model.stages.values():
        for module in stage.modules():
            if hasattr(module, "seen"):
                module.register_forward_hook(partial(_note, choices))
    logits = parts.program.forward_only(batch.inputs[0], None, None, per_token=False)
    return Found(parts.mesh.data_rank, None if logits is None else logits.numpy(), gradients, choices)


def _note(choices, router, inputs, routing) -> None:
    x_BTD, positions_T, *_ = inputs
    experts_BTK = routing.experts_MK.unflatten(0, x_BTD.shape[:2])
    choices.append((router.layer, positions_T.numpy(), experts_BTK.numpy()))


def _reference(theirs, ours, run) -> Expected:
    whole = batch_of(run, ONE_DATA_RANK, 1)
    inputs_BT, choices = whole.inputs.flatten(0, 1), {}

    def note(layer, _module, _inputs, outputs):
        choices[layer] = outputs[2].unflatten(0, inputs_BT.shape).numpy()

    for name, module in theirs.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(partial(note, int(name.split(".")[2])))
    logits = theirs(inputs_BT).logits
    F.cross_entropy(logits.flatten(0, 1), whole.targets.flatten()).backward()
    gradients = ours({name: p.grad for name, p in theirs.named_parameters()})
    return Expected(logits.detach().numpy(), {name: g.numpy() for name, g in gradients.items()}, choices)


def _deviation(found, expected) -> float:
    return np.abs(found - expected).max() / np.abs(expected).max()


def _check_gradients(layout: str, ranks: list[Found], expected: dict[str, np.ndarray]) -> None:
    gradients = join(rank.gradients for rank in ranks)
    assert gradients.keys() == expected.keys(), layout
    for parameter, gradient in gradients.items():
        assert _deviation(gradient, expected[parameter]) < TOLERANCE, (layout, parameter)


def _first(rank: Found, run) -> int:
    """The number of its first sequence in the whole batch."""
    return rank.data_rank * run.train.global_batch // run.parallel.data_ranks


def _check_logits(layout: str, ranks: list[Found], expected: np.ndarray, run) -> None:
    found = [rank for rank in ranks if rank.logits is not None]
    assert {rank.data_rank for rank in found} == set(range(run.parallel.data_ranks)), layout
    for rank in found:
        first = _first(rank, run)
        assert _deviation(rank.logits, expected[first : first + len(rank.logits)]) < TOLERANCE, layout


def _check_choices(layout: str, ranks: list[Found], expected: dict[int, np.ndarray], run) -> None:
    """Experts of a token as a set: some routers of `transformers` leave them in any order."""
    seen = set()
    for rank in ranks:
        for layer, positions, experts_BTK in rank.choices:
            first = _first(rank, run)
            wanted = expected[layer][first : first + len(experts_BTK)][:, positions]
            assert np.array_equal(np.sort(experts_BTK), np.sort(wanted)), (layout, layer)
            seen |= {(layer, rank.data_rank, int(position)) for position in positions}
    assert len(seen) == len(expected) * run.parallel.data_ranks * run.train.seq_len, layout
