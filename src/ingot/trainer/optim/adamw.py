"""AdamW (Loshchilov & Hutter 2019, algorithm 2) over the pieces of a rank, with weight decay on matrices only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ingot.schema.run import Optim

# Kept gradients of another dtype than the masters are converted this much at a time, not all at once.
CONVERT_BYTES = 256 * 2**20


class Piece(Protocol):
    """What an optimizer needs to know of a block of a parameter (parallel/piece.py). `grad` is the optimizer's to free.

    value: the master copy, contiguous float32 or float64. grad: same shape and device, possibly of a lower dtype.
    """

    name: str
    value: Tensor
    grad: Tensor | None
    owner: bool

    @property
    def decays(self) -> bool: ...


State = dict[str, Tensor]  # of one piece: "exp_avg" and "exp_avg_sq", blocks like its value; "step", a float32 scalar


class Optimizer:
    """Updates pieces where they are; state lives beside them, as zeros from the start, so that memory is known at once
    and a checkpoint can be loaded into it. offload.py has one whose state lives elsewhere.

    Embeddings decay as in GPT-3 and Llama; with tied embeddings they are the output matrix as well. The update is
    torch's fused kernel, one launch per dtype. Empty pieces are left out.
    """

    def __init__(self, pieces: Iterable[Piece], optim: Optim):
        self.pieces, self.optim = [p for p in pieces if p.value.numel()], optim
        assert len({p.name for p in self.pieces}) == len(self.pieces), "state is kept and saved by name"
        self.states: dict[str, State] = self._zero_states()

    def _zero_states(self) -> dict[str, State]:
        return {p.name: zero_state(torch.zeros_like(p.value), torch.zeros_like(p.value)) for p in self.pieces}

    @torch.no_grad()
    def step(self, lr: float, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update every piece by its gradient times `scale`, then free the gradients. Waits for nothing.

        scale: a scalar such as the clip factor, applied in the dtype of the masters. found_inf: a scalar of any dtype;
        where it is 1 (on the device) values, moments and steps stay as they are.
        """
        flag = None if found_inf is None else found_inf.to(torch.float32).reshape(())
        for batch in _batches(self.pieces):
            self._update([p for p in batch if p.decays], lr, scale, flag)
            self._update([p for p in batch if not p.decays], lr, scale, flag)

    def _update(self, pieces: list[Piece], lr: float, scale: Tensor | None, found_inf: Tensor | None) -> None:
        gradients = [gradient_of(p).to(p.value.dtype) for p in pieces]
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)
        states = [self.states[p.name] for p in pieces]
        decays = bool(pieces) and pieces[0].decays
        update([p.value for p in pieces], gradients, states, lr, self.optim, decays=decays, found_inf=found_inf)
        for piece in pieces:
            piece.grad = None

    def moments(self) -> dict[str, State]:
        """State by piece name: the live tensors, which may be read and written between steps."""
        return self.states

    @torch.no_grad()
    def put_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the state of the pieces named in `moments`, of any device and dtype; live tensors stay in place."""
        for name, kinds in moments.items():
            for kind, tensor in kinds.items():
                live = self.states[name][kind]
                if tensor is not live:
                    live.copy_(tensor.reshape(live.shape))

    def close(self) -> None:
        """Give back what the state occupies outside of memory."""


def zero_state(exp_avg: Tensor, exp_avg_sq: Tensor) -> State:
    step = torch.zeros((), dtype=torch.float32, device=exp_avg.device)
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step}


def update(
    values: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[State],
    lr: float,
    optim: Optim,
    *,
    decays: bool,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW update in place, `step` included; values, gradients and moments of one dtype.

    The CPU kernel rounds the last elements of a tensor (its length modulo 64 bytes) differently from the rest: a tensor
    that is updated part by part has the same bits as in one call if the parts start at multiples of 64 bytes.
    """
    adamw(
        values,
        gradients,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        maximize=False,
        lr=lr,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay if decays else 0.0,
    )


def gradient_of(piece: Piece) -> Tensor:
    assert piece.grad is not None, f"{piece.name} has no gradient"
    return piece.grad


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """All pieces at once, or parts whose gradients take about CONVERT_BYTES once converted."""
    batch, converted = [], 0
    for piece in pieces:
        batch.append(piece)
        if piece.grad is not None and piece.grad.dtype != piece.value.dtype:
            converted += piece.value.nbytes
        if converted >= CONVERT_BYTES:
            yield batch
            batch, converted = [], 0
    if batch:
        yield batch
