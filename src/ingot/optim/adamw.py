"""AdamW with weight decay on matrices only."""

import torch
from torch import nn

from ingot.schema.run import Optim


def build_adamw(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """Two groups: tensors of two or more dims (embeddings included) decay, norm weights do not.

    Embeddings decay as in GPT-3 and Llama; with tied embeddings they are the output matrix as well. The state is
    float32 for float32 parameters: with FSDP these are the master shards, whatever the compute precision. `fused`
    updates all tensors in one kernel per dtype, on CPU and on GPU.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
