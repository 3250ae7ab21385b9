"""Forwards without gradients through the stages of a run: scores of held-out text, and the next token's logits."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.build import Training
from ingot.trainer.model.generate import NextLogits, cached


def run_nats(run: Training) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Nats of every target on the ranks with the last stage, zeros elsewhere. Collective over pp, cp and tp."""

    def nats_of(inputs_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        found = run.program.forward_only(inputs_BT, targets_BT, documents_BT, per_token=True)
        return torch.zeros(inputs_BT.shape, device=inputs_BT.device) if found is None else found.view(inputs_BT.shape)

    return nats_of


def run_logits(run: Training, capacity: int) -> NextLogits:
    """For one text of at most `capacity` tokens. All ranks get the same logits. Collective.

    A rank with all stages, heads and tokens keeps keys and values. Others run the whole text through the pipeline for
    every token, filled up to a length that they can divide; what fills it comes later and is not looked at.
    """
    mesh, arch, device = run.mesh, run.config.model, run.place.device
    if mesh.size("pp") == mesh.size("cp") == mesh.size("tp") == 1:
        return cached(run.model.stages[0], arch, capacity)
    last = run.program.table.rank_of_stage[-1]
    source, multiple = mesh.ranks("pp")[last], run.program.token_multiple

    def next_logits(ids: Sequence[int]) -> Tensor:
        filled = [*ids, *[ids[-1]] * (-len(ids) % multiple)]
        logits_BTV = run.program.forward_only(torch.tensor([filled], device=device), None, None, per_token=False)
        if logits_BTV is None:
            logits_V = torch.empty(arch.vocab_size, dtype=run.model.hidden, device=device)
        else:
            logits_V = logits_BTV[0, len(ids) - 1].contiguous()
        if mesh.size("pp") > 1:
            dist.broadcast(logits_V, source, group=mesh.group("pp"))
        return logits_V

    return next_logits
