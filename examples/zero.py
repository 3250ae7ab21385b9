"""ZeRO: data parallelism in which no rank keeps what another rank keeps already.

Data parallel ranks hold the same parameters, gradients and optimizer state N times. ZeRO leaves each rank an N-th of
them and fetches the rest when it is needed (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). A stage says how
soon a rank lets go of the rest. With P parameters and A micro-batches, a step sends this (data parallelism: 2 P):

  stage 1  optimizer state is split    P to sum gradients                     P to gather parameters
  stage 2  and gradients               A P to sum them in every backward      P
  stage 3  and parameters (FSDP)       A P                                    2 A P, in every forward and backward

`python examples/zero.py` trains a tiny language model on 4 ranks, beside the same one in one process, in float64, and
fails unless the loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, MICRO_BATCHES = 4, 3, 2
M, D, V, LAYERS = 192, 64, 64, 4  # tokens of all ranks in a step, d_model, vocabulary, hidden layers


def build_model() -> nn.Sequential:  # what a layer computes does not matter to ZeRO
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D, bias=False), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(V, D), *hidden, nn.Linear(D, V, bias=False))


def forward_backward(model: nn.Module, batch_2M: Tensor, parts: int = 1) -> Tensor:
    """Return the part of the mean loss that comes from one of `parts` equal parts of a batch; add its gradients."""
    loss = nn.functional.cross_entropy(model(batch_2M[0]), batch_2M[1]) / parts
    loss.backward()
    return loss.detach()


def my_part(whole) -> Tensor:  # the one that this rank owns, of equal parts cut without regard to shapes
    return whole.detach().flatten().chunk(RANKS)[dist.get_rank()].clone()


class Zero:
    def __init__(self, model: nn.Sequential, stage: int):
        self.model, self.stage, self.peak = model, stage, torch.zeros(2)
        self.shards = {parameter: my_part(parameter) for parameter in model.parameters()}  # AdamW updates these
        for layer in model:
            layer.register_forward_pre_hook(self.gather)
            if stage == 3:
                layer.register_forward_hook(self.free)
        for layer in list(model)[1:] if stage == 3 else ():  # backward of an embedding needs no parameters
            layer.register_full_backward_pre_hook(self.gather)
        for parameter in self.shards if stage >= 2 else ():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def gather(self, layer: nn.Module, *_) -> None:
        for parameter in layer.parameters():  # FSDP sends those of a layer together
            if parameter.untyped_storage().nbytes() == 0:
                parameter.untyped_storage().resize_(parameter.nbytes)
                dist.all_gather(list(parameter.data.view(-1).chunk(RANKS)), self.shards[parameter])

    def free(self, layer: nn.Module, *_) -> None:
        for parameter in layer.parameters():  # autograd goes on referring to it; gather() fills it again
            parameter.untyped_storage().resize_(0)

    def reduce(self, parameter) -> None:
        held = [(p.untyped_storage().nbytes(), 0 if p.grad is None else p.grad.nbytes) for p in self.shards]
        self.peak = self.peak.maximum(torch.tensor(held).sum(0) / sum(p.nbytes for p in self.shards))
        shard, total = self.shards[parameter], torch.zeros_like(self.shards[parameter])
        dist.reduce_scatter(total, list(parameter.grad.flatten().chunk(RANKS)))
        shard.grad = total if shard.grad is None else shard.grad + total
        parameter.grad = None
        if self.stage == 3:
            parameter.untyped_storage().resize_(0)

    def forward_backward(self, batch_2M: Tensor) -> Tensor:
        self.free(self.model)  # AdamW has updated the shards since
        micro_batches = batch_2M.chunk(RANKS, dim=1)[dist.get_rank()].chunk(MICRO_BATCHES, dim=1)
        loss = torch.stack([forward_backward(self.model, each, RANKS * MICRO_BATCHES) for each in micro_batches]).sum()
        for parameter in self.shards if self.stage == 1 else ():
            self.reduce(parameter)
        dist.all_reduce(loss)
        return loss


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
    for stage in (1, 2, 3):
        alone, zero = build_model(), Zero(build_model(), stage)
        optimizer = torch.optim.AdamW([*alone.parameters(), *zero.shards.values()], lr=1e-3)
        for batch_2M in torch.randint(V, (STEPS, 2, M)):
            optimizer.zero_grad()
            losses = zero.forward_backward(batch_2M), forward_backward(alone, batch_2M)
            optimizer.step()
            pairs = list(zip(zero.shards.values(), alone.parameters(), strict=True))
            gradients, parameters = [(s.grad, my_part(p.grad)) for s, p in pairs], [(s, my_part(p)) for s, p in pairs]
            compare(f"stage {stage}:", loss=[losses], gradients=gradients, parameters=parameters)
        if rank == 0:
            print("         held at most {:.0%} of the parameters, {:.0%} of the gradients".format(*zero.peak.tolist()))


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
