"""Ring attention: a sequence too long for one rank is cut along its tokens, and keys and values travel in a ring.

All of a transformer but attention works on each token separately, so a rank needs only its own T/R tokens. For
attention a rank keeps its queries and receives the keys and values of all other ranks, in R - 1 messages between
neighbors that travel while it computes (Liu et al. 2023, arXiv 2310.01889). Three ideas make this exact and fast:

  merge     a part of the keys gives an output and a log-sum-exp; the outputs' weights are exp(lse of it - lse of all)
  backward  lse of all and the output say what each part's gradients are. Those of keys and values travel with them
  zigzag    a token looks only at those before it, so the rank with the last R-th of them would do the most. Of 2 R
            parts of the sequence, rank r takes the r-th from the front and the r-th from the back: equal work, always

`python examples/ring_attention.py` trains a tiny model on 4 ranks, beside the same one in one process, in float64, and
fails unless the loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, B, T, D, N, V = 4, 3, 2, 32, 32, 4, 64  # sequences, tokens, d_model, heads, vocabulary
OWN, HALF, SCALE = T // RANKS, T // RANKS // 2, (D // N) ** -0.5  # a rank's tokens; letters t, s: queries, keys it uses


def send_on(mine: Tensor):
    """Begins to send to the next rank of the ring. Returns what waits for the tensor of the rank before."""
    theirs, rank = torch.empty_like(mine), dist.get_rank()
    works = dist.isend(mine, (rank + 1) % RANKS), dist.irecv(theirs, (rank - 1) % RANKS)
    return lambda: [work.wait() for work in works] and theirs


def come_by(kv: Tensor):
    """Keys and values of every rank, own ones first, which of my queries look at which of them, and a mask."""
    rank, everything, first, second = dist.get_rank(), slice(None), slice(HALF), slice(HALF, None)
    for hop in range(RANKS):
        wait = send_on(kv) if hop < RANKS - 1 else None
        if hop == 0:  # my tokens are in ascending order
            yield *kv, everything, everything, torch.full((OWN, OWN), -torch.inf).triu(1)
        elif hop <= rank:  # keys of an earlier rank: their first half comes before all of mine, their second half after
            yield *kv, everything, first, 0
        else:  # keys of a later rank: all of them come between my first half and my second
            yield *kv, second, everything, 0
        kv = wait() if wait else kv


class Ring(torch.autograd.Function):  # q, k, v and the result: [B, N, OWN, D / N], of this rank's tokens
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        for k_hop, v_hop, t, s, mask in come_by(torch.stack((k, v))):
            scores_BNts = q[:, :, t] @ k_hop[:, :, s].mT * SCALE + mask
            part_lse = scores_BNts.logsumexp(-1, keepdim=True)
            part_out = (scores_BNts - part_lse).exp() @ v_hop[:, :, s]
            both = torch.logaddexp(lse[:, :, t], part_lse)
            out[:, :, t] = out[:, :, t] * (lse[:, :, t] - both).exp() + part_out * (part_lse - both).exp()
            lse[:, :, t] = both
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        d_q, d_kv = torch.zeros_like(q), torch.zeros_like(torch.stack((k, v)))
        mean = (d_out * out).sum(-1, keepdim=True)  # what softmax takes from each d_probs: their mean under probs
        for k_hop, v_hop, t, s, mask in come_by(torch.stack((k, v))):
            probs_BNts = (q[:, :, t] @ k_hop[:, :, s].mT * SCALE + mask - lse[:, :, t]).exp()
            d_scores = probs_BNts * (d_out[:, :, t] @ v_hop[:, :, s].mT - mean[:, :, t]) * SCALE
            d_q[:, :, t] += d_scores @ k_hop[:, :, s]
            d_kv[:, :, :, s] += torch.stack((d_scores.mT @ q[:, :, t], probs_BNts.mT @ d_out[:, :, t]))
            d_kv = send_on(d_kv)()  # after R hops they are home
        return d_q, *d_kv


def loss_of(model: nn.ParameterDict, tokens_BT: Tensor, positions: Tensor, attend=None) -> Tensor:
    x = model["embed"][tokens_BT[:, positions]] + model["place"][positions]
    q, k, v = (x @ model["qkv"]).unflatten(-1, (3, N, -1)).permute(2, 0, 3, 1, 4)
    y = attend(q, k, v) if attend else nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    logits = (x + y.transpose(1, 2).flatten(2) @ model["out"]) @ model["head"]
    return nn.functional.cross_entropy(logits.mT, tokens_BT[:, positions + 1], reduction="sum") / (B * T)


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
    shapes = {"embed": (V, D), "place": (T, D), "qkv": (D, 3 * D), "out": (D, D), "head": (D, V)}
    first = {name: torch.randn(shape) / D**0.5 for name, shape in shapes.items()}
    ours, alone = (nn.ParameterDict({name: value.clone() for name, value in first.items()}) for _ in range(2))
    own = torch.cat([torch.arange(T).chunk(2 * RANKS)[part] for part in (rank, -1 - rank)])  # zigzag
    optimizer = torch.optim.AdamW([*ours.parameters(), *alone.parameters()], lr=1e-3)
    for tokens_BT in torch.randint(V, (STEPS, B, T + 1)):
        optimizer.zero_grad()
        losses = loss_of(ours, tokens_BT, own, Ring.apply), loss_of(alone, tokens_BT, torch.arange(T))
        (losses[0] + losses[1]).backward()
        for part in (losses[0].detach(), *(p.grad for p in ours.parameters())):
            dist.all_reduce(part)
        optimizer.step()
        pairs = list(zip(ours.parameters(), alone.parameters(), strict=True))
        compare("zigzag ring:", loss=[losses], gradients=[(a.grad, b.grad) for a, b in pairs], parameters=pairs)


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
