"""Ulysses: tokens are cut among ranks, and for attention, which needs all of them, an all-to-all cuts heads instead.

All of a transformer but attention works on each token separately, so a rank needs only its own T/R tokens. Attention
works on each head separately. So every rank sends to every other one: of its tokens, the queries, keys and values of
that rank's heads. Then it has all tokens of N/R heads, attention is the usual one, and the outputs go back the same way
(Jacobs et al. 2023, arXiv 2309.14509).

A rank sends (R - 1)/R of its queries, keys, values and outputs, T/R tokens of each: with as many times more ranks as
tokens, that stays the same. (Ring attention sends the keys and values of nearly all T tokens, but while it computes.)
There cannot be more ranks than heads. Here keys and values have fewer heads than there are ranks (Ainslie et al. 2023,
arXiv 2305.13245): each is repeated for the ranks that need it, and autograd adds up what comes back.

`python examples/ulysses.py` trains a tiny transformer on 4 ranks, beside the same one in one process, in float64, and
fails unless the loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, B, T, D, V = 4, 3, 2, 32, 32, 64  # sequences, tokens, d_model, vocabulary; t: a rank's tokens
N, G = 8, 2  # heads of queries, and of keys and values; n: a rank's heads, H = D / N


class AllToAll(torch.autograd.Function):
    """[RANKS, ..]: what is for each rank -> what is from each rank. Backward, gradients take the same way back."""

    @staticmethod
    def forward(ctx, x_R):
        dist.all_to_all_single(y_R := torch.empty_like(x_R), x_R)
        return y_R

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient.contiguous())


def heads_of_all_tokens(x_BNtH: Tensor) -> Tensor:
    for_ranks = x_BNtH.unflatten(1, (RANKS, -1)).movedim(1, 0).contiguous()  # [R, B, n, t, H], R: whose heads
    return (
        AllToAll.apply(for_ranks).movedim(0, 2).flatten(2, 3)
    )  # from [R, B, n, t, H], R: whose tokens, to [B, n, T, H]


def tokens_of_all_heads(x_BnTH: Tensor) -> Tensor:
    for_ranks = x_BnTH.unflatten(2, (RANKS, -1)).movedim(2, 0).contiguous()  # [R, B, n, t, H], R: whose tokens
    return AllToAll.apply(for_ranks).movedim(0, 1).flatten(1, 2)


def attend(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=True)


def attend_by_heads(q_BNtH: Tensor, k_BGtH: Tensor, v_BGtH: Tensor) -> Tensor:
    k_BRtH, v_BRtH = (x.repeat_interleave(RANKS // G, dim=1) for x in (k_BGtH, v_BGtH))  # one for each rank's queries
    return tokens_of_all_heads(attend(*(heads_of_all_tokens(x) for x in (q_BNtH, k_BRtH, v_BRtH))))


class Transformer(nn.Module):  # of one block
    def __init__(self, attend):
        super().__init__()
        self.attend, self.embed, self.place = attend, nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm_1, self.norm_2, self.norm_3 = (nn.RMSNorm(D) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(D, heads * D // N, bias=False) for heads in (N, G, G))
        self.out, self.up, self.head = (nn.Linear(D, d, bias=False) for d in (D, 4 * D, V))
        self.down = nn.Linear(4 * D, D, bias=False)

    def forward(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Return the part of the mean loss that comes from the tokens at `positions`."""
        x = self.embed(tokens_BT[:, positions]) + self.place(positions)
        y = self.norm_1(x)
        q, k, v = (w(y).unflatten(-1, (-1, D // N)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        logits = self.head(self.norm_3(x))
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
    alone, ours = Transformer(attend), Transformer(attend_by_heads)
    ours.load_state_dict(alone.state_dict())
    optimizer = torch.optim.AdamW([*alone.parameters(), *ours.parameters()], lr=1e-3)
    for tokens_BT in torch.randint(V, (STEPS, B, T + 1)):
        optimizer.zero_grad()
        losses = ours(tokens_BT, torch.arange(T).chunk(RANKS)[rank]), alone(tokens_BT, torch.arange(T))
        (losses[0] + losses[1]).backward()
        for part in (losses[0].detach(), *(p.grad for p in ours.parameters())):
            dist.all_reduce(part)  # each rank's is that of its tokens
        optimizer.step()
        pairs = list(zip(ours.parameters(), alone.parameters(), strict=True))
        compare("ulysses:", loss=[losses], gradients=[(a.grad, b.grad) for a, b in pairs], parameters=pairs)


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
