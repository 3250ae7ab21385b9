"""One process: the undivided model in float64, the whole batch at once, and nothing but PyTorch around it."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ingot.schema.arch import Arch
from ingot.trainer.model.init import initialize
from ingot.trainer.model.routing import Router, RouterLoss
from ingot.trainer.model.transformer import Transformer

from .cases import MICRO_BATCH, OPTIM, SEED, STEPS, Case

LEARNING_RATES = (OPTIM.lr, OPTIM.lr / 2, OPTIM.lr / 4)
assert len(LEARNING_RATES) == STEPS


@dataclass(frozen=True)
class Reference:
    """losses, norms: of every step, norms before clipping. gradients: of the first step, before clipping. parameters:
    after the last step. routing: of every step and layer with experts, what routers counted. buffers: what is learned
    of balance, after the last step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    routing: list[np.ndarray]
    buffers: dict[str, np.ndarray]


Tokens = tuple[Tensor, Tensor, Tensor | None]


def global_batch(case: Case, step: int) -> Tokens:
    """inputs, targets, document ids or None of step 1..STEPS, [global batch, tokens]."""
    return _draw(case.global_batch, case.tokens, case.arch.vocab_size, case.mask_documents, step)


def _draw(samples: int, tokens: int, vocab_size: int, masked: bool, step: int) -> Tokens:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocab_size, (samples, tokens + 1), generator=generator)
    borders = torch.rand(samples, tokens, generator=generator) < 0.3
    return ids[:, :-1], ids[:, 1:], borders.cumsum(1, dtype=torch.int32) if masked else None


def reference_of(case: Case) -> Reference:
    """Layouts do not matter to it: cases with the same model and batch share one."""
    return _train(case.arch, case.global_batch, case.tokens, case.mask_documents)


@cache
def _train(arch: Arch, samples: int, tokens: int, masked: bool) -> Reference:
    model = Transformer(arch).double()
    initialize(model, arch, SEED)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, foreach=False)
    losses, norms, gradients, routing = [], [], {}, []
    for step, lr in enumerate(LEARNING_RATES, start=1):
        inputs, targets, documents = _draw(samples, tokens, arch.vocab_size, masked, step)
        loss = model(inputs, targets, documents, router_loss=_router_loss(arch, inputs, step)) / inputs.numel()
        adamw.zero_grad()
        loss.backward()
        if step == 1:
            gradients = {name: _gradient(p).numpy().copy() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        assert norm > OPTIM.clip_norm, "clipping has to act, or it is not tested"
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        losses.append(loss.item())
        norms.append(norm.item())
        routing.append(_balance(model))
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    buffers = {name: b.numpy() for name, b in model.named_buffers()}
    return Reference(losses, norms, gradients, parameters, routing, buffers)


def _router_loss(
    arch: Arch, inputs: Tensor, step: int, first: int = 0, whole: Tensor | None = None
) -> RouterLoss | None:
    """first: where `inputs` begin in the batch `whole`."""
    batch = inputs if whole is None else whole
    keys = step * len(batch) + first + torch.arange(len(inputs))
    return RouterLoss(keys, torch.tensor(1 / batch.numel(), dtype=torch.float64)) if arch.is_moe else None


@torch.no_grad()
def _balance(model: Transformer) -> np.ndarray:
    """Return the counts of the routers in this step, one row for each, and update biases and loads."""
    rows = []
    for router in (module for module in model.modules() if isinstance(module, Router)):
        assert router.seen is not None
        rows.append(router.seen)
        loads, router.seen = router.seen[: router.moe.num_experts], None
        if router.bias is not None:
            router.bias += router.moe.bias_rate * torch.sign(loads.mean() - loads)
        if router.load is not None:
            router.load.copy_(loads / loads.mean())
    return torch.stack(rows).numpy() if rows else np.zeros((0, 0))


def canonical_gradients(case: Case) -> dict[str, np.ndarray]:
    """The first step's gradients, summed in the order that `reduce = "canonical"` promises: the micro-batches of a
    virtual rank in turn, then a binary tree, neighbors first. All divisors are powers of two, so exact."""
    model = Transformer(case.arch).double()
    initialize(model, case.arch, SEED)
    inputs, targets, documents = global_batch(case, 1)
    parts = []
    samples = case.global_batch // case.parallel.virtual_ranks
    for part in range(case.parallel.virtual_ranks):
        total: dict[str, Tensor] = {}
        for start in range(part * samples, (part + 1) * samples, MICRO_BATCH):
            rows = slice(start, start + MICRO_BATCH)
            model.zero_grad()
            router_loss = _router_loss(case.arch, inputs[rows], 1, start, inputs)
            if router_loss is not None:  # divided below
                router_loss = replace(router_loss, weight=torch.ones((), dtype=torch.float64))
            model(
                inputs[rows], targets[rows], documents[rows] if documents is not None else None, router_loss=router_loss
            ).backward()
            for name, parameter in model.named_parameters():
                total[name] = total[name] + _gradient(parameter) if name in total else _gradient(parameter).clone()
        parts.append(total)
    while len(parts) > 1:
        parts = [{n: a[n] + b[n] for n in a} for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return {name: (gradient / inputs.numel()).numpy() for name, gradient in parts[0].items()}


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
