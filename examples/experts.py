"""Experts: a feed-forward many times as large, of which each token uses a little, and which is spread over the ranks.

A router gives each token its two best experts and their weights (Shazeer et al. 2017, arXiv 1701.06538; Lepikhin et al.
2020, GShard, arXiv 2006.16668). Ranks share the batch as in data parallelism, but each holds other experts. So an
all-to-all brings tokens to their experts, and another one brings the results home.

  capacity  an expert takes at most 1.25 times its fair share of a sequence's choices: first choices before second ones,
            early tokens before late ones. The rest is dropped: those tokens go on without it. In return every expert
            has a fixed number of places, filled or not, and all messages have the same size
  balance   routers left alone prefer few experts. The sum of E f_e p_e is a loss against that: f_e is expert e's share
            of all ranks' choices, p_e its mean probability (Fedus et al. 2021, arXiv 2101.03961, eq. 4)

`python examples/experts.py` trains a tiny language model on 4 ranks, beside the same one in one process, where every
expert computes every token, mostly for nothing. In float64, it fails unless the loss, every gradient and all parameters
are equal in each of 3 AdamW steps.
"""

import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, one_hot, rms_norm

RANKS, STEPS, B, T, D, F, V = 4, 3, 8, 32, 32, 48, 64  # sequences, tokens, d_model, an expert's width, vocabulary
E, K, BALANCE = 8, 2, 0.01  # experts, a token's choices, weight of the loss; s, e: a rank's sequences, experts
C = math.ceil(1.25 * K * T / E)  # capacity: places that an expert has for a sequence
SHAPES = {"embed": (V, D), "router": (D, E), "up": (E, D, F), "down": (E, F, D), "head": (D, V)}


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R):  # what is for each rank -> what is from each rank
        dist.all_to_all_single(y_R := torch.empty_like(x_R), x_R)
        return y_R

    @staticmethod
    def backward(ctx, gradient):  # back along the same way
        return AllToAll.apply(gradient.contiguous())


def compute(model: nn.ParameterDict, x_eMD: Tensor) -> Tensor:
    return gelu(x_eMD @ model["up"]) @ model["down"]


def mix_alone(model: nn.ParameterDict, y_BTD: Tensor, experts_BKT: Tensor, weights_BKT: Tensor, _) -> Tensor:
    weights_BTE = (one_hot(experts_BKT, E) * weights_BKT[..., None]).sum(1)
    return torch.einsum("EMD,ME->MD", compute(model, y_BTD.flatten(0, 1)), weights_BTE.flatten(0, 1)).view_as(y_BTD)


def mix(model: nn.ParameterDict, y_sTD: Tensor, experts_sKT: Tensor, weights_sKT: Tensor, places_sKT: Tensor) -> Tensor:
    s, k, t = (places_sKT < C).nonzero(as_tuple=True)  # of every choice that was not dropped
    place = experts_sKT[s, k, t], s, places_sKT[s, k, t]
    there_EsCD = y_sTD.new_zeros(E, len(y_sTD), C, D).index_put(place, y_sTD[s, t])
    x_ReMD = AllToAll.apply(there_EsCD.view(RANKS, E // RANKS, -1, D))  # R: whose tokens; M: s x C
    y_eMD = compute(model, x_ReMD.transpose(0, 1).flatten(1, 2))
    back_ReMD = AllToAll.apply(y_eMD.unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous())  # R: whose experts
    weighted = back_ReMD.view_as(there_EsCD)[place] * weights_sKT[s, k, t, None]
    return torch.zeros_like(y_sTD).index_put((s, t), weighted, accumulate=True)


def loss_of(model: nn.ParameterDict, tokens_sT: Tensor, mixer) -> tuple[Tensor, Tensor]:
    """Return the part of the loss that comes from some sequences of the batch, and the share of dropped choices."""
    x_sTD = model["embed"][tokens_sT[:, :-1]]
    y_sTD = rms_norm(x_sTD, (D,))
    probs_sTE = (y_sTD @ model["router"]).softmax(-1)
    weights_sKT, experts_sKT = (x.transpose(1, 2) for x in probs_sTE.topk(K))
    asked = one_hot(experts_sKT.flatten(1), E)  # in the order in which places are given away
    places_sKT = ((asked.cumsum(1) * asked).sum(-1) - 1).view_as(experts_sKT)
    weights_sKT = weights_sKT / weights_sKT.sum(1, keepdim=True) * (places_sKT < C)
    x_sTD = x_sTD + mixer(model, y_sTD, experts_sKT, weights_sKT, places_sKT)
    loss = cross_entropy((x_sTD @ model["head"]).mT, tokens_sT[:, 1:], reduction="sum") / (B * T)
    choices_E = asked.sum((0, 1))
    if len(tokens_sT) < B:
        dist.all_reduce(choices_E)
    balance = E * (choices_E / (B * T * K) * probs_sTE.sum((0, 1)) / (B * T)).sum()
    return loss + BALANCE * balance, (places_sKT >= C).double().mean()


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
    alone = nn.ParameterDict({name: torch.randn(shape) / D**0.5 for name, shape in SHAPES.items()})
    experts = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    own = {name: experts if name in ("up", "down") else slice(None) for name in SHAPES}
    ours = nn.ParameterDict({name: whole.detach()[own[name]].clone() for name, whole in alone.items()})
    optimizer = torch.optim.AdamW([*ours.parameters(), *alone.parameters()], lr=1e-3)
    for tokens_BT in torch.randint(V, (STEPS, B, T + 1)):
        optimizer.zero_grad()
        loss, _ = loss_of(ours, tokens_BT.chunk(RANKS)[rank], mix)
        loss_alone, dropped = loss_of(alone, tokens_BT, mix_alone)
        (loss + loss_alone).backward()
        for part in (loss.detach(), *(ours[name].grad for name in ("embed", "router", "head"))):
            dist.all_reduce(part)  # an expert's gradient has come with the tokens of all ranks already
        optimizer.step()
        gradients = [(ours[name].grad, alone[name].grad[own[name]]) for name in SHAPES]
        parameters = [(ours[name], alone[name][own[name]]) for name in SHAPES]
        compare(f"{dropped:.1%} dropped:", loss=[(loss, loss_alone)], gradients=gradients, parameters=parameters)


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
