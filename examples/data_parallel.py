"""Data parallelism: every rank holds the whole model and computes a part of the batch; gradients are summed.

The loss is a mean over tokens, so a batch's gradient is the sum of what equal parts of the batch contribute. Ranks that
start from the same parameters and apply the same sum stay equal without sending parameters again. What PyTorch's
DistributedDataParallel adds is speed (Li et al. 2020, arXiv 2006.15704, section 3.2), and all of it is below:

- Buckets: a few large all-reduces instead of one per parameter, because each one costs a fixed latency.
- Overlap: backward finishes the last layers first, so their bucket travels while earlier layers are still computed.
- Accumulation: of several micro-batches in a step, only the last one communicates.

`python examples/data_parallel.py` trains a tiny language model on 4 ranks, beside the same one in one process, in
float64, and fails unless the loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import functools
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, MICRO_BATCHES = 4, 3, 2
M, D, V, LAYERS = 192, 64, 64, 4  # tokens of all ranks in a step, d_model, vocabulary, hidden layers


def build_model(seed: int) -> nn.Sequential:  # what a layer computes does not matter to data parallelism
    torch.manual_seed(seed)
    hidden = [nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D, bias=False), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(V, D), *hidden, nn.Linear(D, V, bias=False))


def forward_backward(model: nn.Module, batch_2M: Tensor, parts: int = 1) -> Tensor:
    """Return the part of the mean loss that comes from one of `parts` equal parts of a batch; add its gradients."""
    loss = nn.functional.cross_entropy(model(batch_2M[0]), batch_2M[1]) / parts
    loss.backward()
    return loss.detach()


class DataParallel:
    def __init__(self, model: nn.Sequential):
        self.model = model
        for layer in model:
            bucket = list(layer.parameters())  # DDP fills buckets of 25 MB without regard to layers
            for parameter in bucket:
                dist.broadcast(parameter.data, src=0)  # every rank starts where rank 0 does
                parameter.register_post_accumulate_grad_hook(functools.partial(self.gradient_is_ready, bucket))

    def forward_backward(self, batch_2M: Tensor) -> Tensor:
        """The mean loss of the whole batch; leaves its gradients on every rank."""
        loss, self.traveling = torch.zeros(()), []
        micro_batches = batch_2M.chunk(RANKS, dim=1)[dist.get_rank()].chunk(MICRO_BATCHES, dim=1)
        for index, micro_batch in enumerate(micro_batches):
            self.last, self.missing = index == MICRO_BATCHES - 1, set(self.model.parameters())
            loss += forward_backward(self.model, micro_batch, RANKS * MICRO_BATCHES)  # calls gradient_is_ready
        for work, flat, bucket, _ in self.traveling:
            work.wait()
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view_as(parameter)
        dist.all_reduce(loss)
        return loss

    def gradient_is_ready(self, bucket: list, parameter: nn.Parameter) -> None:
        self.missing.remove(parameter)
        if self.last and self.missing.isdisjoint(bucket):
            # All ranks run the same graph, so that their buckets depart in the same order.
            flat = torch.cat([p.grad.flatten() for p in bucket])
            work = dist.all_reduce(flat, async_op=True)
            self.traveling.append((work, flat, bucket, len(self.missing)))


def compare(name: str, **pairs) -> None:
    """Prints the largest difference in a tensor on any rank, relative to its largest entry. Exits if above 1e-12."""
    worst = [torch.stack([(a - b).abs().max() / b.abs().max() for a, b in kind]).max() for kind in pairs.values()]
    dist.all_reduce(worst := torch.stack(worst).nan_to_num(nan=torch.inf), dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(name, *(f"{kind} {value:.1e}" for kind, value in zip(pairs, worst, strict=True)), flush=True)
    if worst.max() > 1e-12:
        sys.exit(f"{name} not equal to one process")


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    alone, parallel = build_model(seed=0), DataParallel(build_model(seed=rank))
    optimizer = torch.optim.AdamW([*alone.parameters(), *parallel.model.parameters()], lr=1e-3)
    for batch_2M in torch.randint(V, (STEPS, 2, M), generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        losses = parallel.forward_backward(batch_2M), forward_backward(alone, batch_2M)
        optimizer.step()
        pairs = list(zip(parallel.model.parameters(), alone.parameters(), strict=True))
        compare("data parallel:", loss=[losses], gradients=[(p.grad, q.grad) for p, q in pairs], parameters=pairs)
    if rank == 0:
        print("gradients still to come when each bucket departed:", [missing for *_, missing in parallel.traveling])


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
