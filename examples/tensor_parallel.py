"""Tensor parallelism: every matrix is cut, and every rank computes a part of every layer for the whole batch.

Of two matrices in a row, the first is cut by columns and the second by rows: columns of x A need no sum, and
[y_1 y_2 ..] B = y_1 B_1 + y_2 B_2 + .. is one sum over ranks. So attention and MLP each have a way in and a way out,
and what the one does forward the other does backward:

  tensor parallel    (Shoeybi et al. 2019, arXiv 1909.08053)      way in: nothing    way out: all-reduce
  sequence parallel  (Korthikanti et al. 2022, arXiv 2205.05198)  way in: gather     way out: reduce-scatter

The second cuts norms and residuals too, along the sequence. Embedding, head and loss are cut along the vocabulary.

`python examples/tensor_parallel.py` trains a tiny transformer on 4 ranks, beside the same one in one process, in
float64, and fails unless the loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, B, T, D, N, V = 4, 3, 2, 16, 32, 4, 64  # sequences, tokens, d_model, heads, vocabulary; t, v: a rank's
CUT = {"embed": 0, "q": 0, "k": 0, "v": 0, "out": 1, "up": 0, "down": 1, "head": 0}  # dim of a weight [out, in]


def all_reduce(x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x := x.detach().clone(), op)
    return x


def gather(x_tBD: Tensor) -> Tensor:
    dist.all_gather(parts := [torch.empty_like(x_tBD) for _ in range(RANKS)], x_tBD)
    return torch.cat(parts)


def reduce_scatter(x_TBD: Tensor) -> Tensor:
    dist.reduce_scatter(x_tBD := torch.zeros_like(x_TBD[: T // RANKS]), list(x_TBD.chunk(RANKS)))
    return x_tBD


class Way(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.way_back(gradient), None, None


class Transformer(nn.Module):  # of one block
    def __init__(self, ranks: int, there, back):
        super().__init__()
        self.ranks = ranks
        self.way_in, self.way_out = lambda x: Way.apply(x, there, back), lambda x: Way.apply(x, back, there)
        self.embed, self.head = nn.Embedding(V // ranks, D), nn.Linear(D, V // ranks, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = (nn.RMSNorm(D) for _ in range(3))
        self.q, self.k, self.v, self.up = (nn.Linear(D, d // ranks, bias=False) for d in (D, D, D, 4 * D))
        self.out, self.down = (nn.Linear(d // ranks, D, bias=False) for d in (D, 4 * D))

    def forward(self, tokens_TB: Tensor) -> Tensor:
        one_hot_TBv = nn.functional.one_hot(tokens_TB, V).chunk(RANKS, dim=-1)[dist.get_rank()].double()
        x = self.embed(tokens_TB[:-1]) if self.ranks == 1 else self.way_out(one_hot_TBv[:-1] @ self.embed.weight)
        y_TBD = self.way_in(self.norm_1(x))  # x is [T, B, D], or [t, B, D] with sequence parallelism
        q, k, v = (w(y_TBD).unflatten(-1, (-1, D // N)).permute(1, 2, 0, 3) for w in (self.q, self.k, self.v))
        mixed_TBD = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.way_out(self.out(mixed_TBD))
        x = x + self.way_out(self.down(nn.functional.gelu(self.up(self.way_in(self.norm_2(x))))))
        logits_TBv = self.head(self.way_in(self.norm_3(x)))
        if self.ranks == 1:
            return nn.functional.cross_entropy(logits_TBv.flatten(0, 1), tokens_TB[1:].flatten())
        top_TB = all_reduce(logits_TBv.amax(-1), dist.ReduceOp.MAX)
        sum_TB = Way.apply((logits_TBv - top_TB[..., None]).exp().sum(-1), all_reduce, torch.clone)
        target_TB = Way.apply((logits_TBv * one_hot_TBv[1:]).sum(-1), all_reduce, torch.clone)
        return (sum_TB.log() + top_TB - target_TB).mean()


def cut(name: str, whole) -> Tensor:
    return whole.chunk(RANKS, CUT[name[:-7]])[dist.get_rank()] if name[:-7] in CUT else whole  # without ".weight"


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
    torch.manual_seed(0)
    for form, there, back in (("tensor", torch.clone, all_reduce), ("sequence", gather, reduce_scatter)):
        alone, ours = Transformer(1, torch.clone, torch.clone), Transformer(RANKS, there, back)
        ours.load_state_dict({name: cut(name, whole) for name, whole in alone.state_dict().items()})
        optimizer = torch.optim.AdamW([*alone.parameters(), *ours.parameters()], lr=1e-3)
        for tokens_TB in torch.randint(V, (STEPS, T + 1, B)):
            optimizer.zero_grad()
            losses = ours(tokens_TB), alone(tokens_TB)
            (losses[0] + losses[1]).backward()
            for norm in (ours.norm_1, ours.norm_2, ours.norm_3) if form == "sequence" else ():
                dist.all_reduce(norm.weight.grad)  # a rank's gradient is that of its tokens
            optimizer.step()
            gradients = [(p.grad, cut(name, alone.get_parameter(name).grad)) for name, p in ours.named_parameters()]
            parameters = [(p, cut(name, alone.get_parameter(name))) for name, p in ours.named_parameters()]
            compare(f"{form} parallel:", loss=[losses], gradients=gradients, parameters=parameters)


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
