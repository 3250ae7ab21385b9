"""Pipeline parallelism: every rank holds some of the layers, and micro-batches pass through one rank after another.

Only activations and their gradients travel, between neighbors. With P ranks and M micro-batches, a rank idles for
(P - 1) / (M + P - 1) of the time, while the pipeline fills and drains. Two schedules differ in what they keep:

- GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards. Activations of M are kept.
- 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): a backward as soon as there is one. P - rank are kept.

`python examples/pipeline.py` prints both as tables and trains a tiny language model on 4 ranks, beside the same one in
one process, in float64, and fails unless loss, every gradient and all parameters are equal in each of 3 AdamW steps.
"""

import itertools
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, MICRO_BATCHES = 4, 3, 8
M, D, V, LAYERS = 192, 64, 64, 6  # tokens in a step, d_model, vocabulary, hidden layers


def build_model() -> nn.Sequential:  # what a layer computes does not matter to the pipeline
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D, bias=False), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(V, D), *hidden, nn.Linear(D, V, bias=False))


def gpipe(rank: int) -> list[tuple[str, int]]:  # F forward or B backward, and the micro-batch
    return [(kind, index) for kind in "FB" for index in range(MICRO_BATCHES)]


def one_f_one_b(rank: int) -> list[tuple[str, int]]:
    delay = {"F": 0, "B": RANKS - 1 - rank}  # micro-batches on their way to the last rank and back
    return sorted(gpipe(rank), key=lambda action: (action[1] + delay[action[0]], action[0] == "B"))


def print_table(name: str, schedule) -> None:  # a forward takes one tick, a backward two
    rows, left = [[] for _ in range(RANKS)], [schedule(rank) for rank in range(RANKS)]
    ends = {source: 0 for index in range(MICRO_BATCHES) for source in (("F", -1, index), ("B", RANKS, index))}
    while any(left):
        for rank, row in enumerate(rows):
            kind, index = left[rank][0] if left[rank] else ("", 0)
            source = kind, rank - 1 if kind == "F" else rank + 1, index
            if source in ends:  # what the action needs has been computed
                row += ["  ."] * (ends[source] - len(row)) + [f" {kind}{index}"] * (1 if kind == "F" else 2)
                ends[kind, rank, index] = len(row)
                left[rank].pop(0)
    print(f"{name}: {1 - 3 * MICRO_BATCHES / len(rows[0]):.0%} of the time idle")  # rank 0 ends last
    for rank, row in enumerate(rows):
        kept = max(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in schedule(rank)))
        print(f"rank {rank}", *row, *["  ."] * (len(rows[0]) - len(row)), f"  keeps {kept}", sep="")


def play(stage: nn.Module, actions: list, batch_2M: Tensor) -> Tensor:  # leaves gradients, returns the mean loss
    rank, loss, kept, sends = dist.get_rank(), torch.zeros(()), {}, []
    for kind, index in actions:
        if kind == "F":
            x, targets_m = batch_2M.chunk(MICRO_BATCHES, dim=1)[index]
            if rank > 0:
                dist.recv(x := torch.empty(len(targets_m), D), rank - 1)
            y = stage(x.requires_grad_(rank > 0))
            if rank < RANKS - 1:
                sends.append(dist.isend(y.detach(), rank + 1))  # does not wait: neighbors may send to each other
            else:
                y = nn.functional.cross_entropy(y, targets_m) / MICRO_BATCHES
                loss += y.detach()
            kept[index] = x, y
        else:
            x, y = kept.pop(index)
            gradient = torch.ones_like(y)
            if rank < RANKS - 1:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
    dist.broadcast(loss, src=RANKS - 1)
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
    cut = slice(rank * (LAYERS + 2) // RANKS, (rank + 1) * (LAYERS + 2) // RANKS)  # of embedding, hidden layers, head
    for name, schedule in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        if rank == 0:
            print_table(name, schedule)
        alone, stage = build_model(), build_model()[cut]
        optimizer = torch.optim.AdamW([*alone.parameters(), *stage.parameters()], lr=1e-3)
        for batch_2M in torch.randint(V, (STEPS, 2, M)):
            optimizer.zero_grad()
            loss = play(stage, schedule(rank), batch_2M)
            loss_alone = nn.functional.cross_entropy(alone(batch_2M[0]), batch_2M[1])
            loss_alone.backward()
            optimizer.step()
            pairs = list(zip(stage.parameters(), alone[cut].parameters(), strict=True))
            compare(name, loss=[(loss, loss_alone)], gradients=[(p.grad, q.grad) for p, q in pairs], parameters=pairs)


if __name__ == "__main__":
    torch.optim.AdamW([torch.empty(0)])  # imports here, once, what every forked rank would import for a second
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS) as ranks:
        list(ranks.map(main, range(RANKS), [f"file://{folder}/store"] * RANKS))
