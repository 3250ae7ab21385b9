"""AdamW (Loshchilov & Hutter 2019, algorithm 2) over a rank's parameter shards, with weight decay on matrices only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ingot.schema.run import Optim
from ingot.trainer.shard import ParameterShard

# Gradients whose dtype differs from that of the masters are converted in batches of about this many bytes.
CONVERT_BYTES = 256 * 2**20


# The state of one shard: "exp_avg" and "exp_avg_sq", each with the shape of its value, and "step", a float32 scalar.
State = dict[str, Tensor]


class AdamW:
    """The optimizer of a rank's shards, with its state on the device of the shards (offload.py keeps state elsewhere).

    The constructor allocates the state as zeros: the memory is known at once, and a checkpoint can be loaded into it.
    Weight decay includes embeddings, as in GPT-3 and Llama; tied embeddings are also the output matrix. The update is
    torch's fused kernel, one launch per dtype. Empty shards have no state.
    """

    def __init__(self, shards: Iterable[ParameterShard], optim: Optim):
        self.shards, self.optim = [p for p in shards if p.value.numel()], optim
        assert len({p.name for p in self.shards}) == len(self.shards), "state is kept and saved by name"
        self.states: dict[str, State] = self._zero_states()

    def _zero_states(self) -> dict[str, State]:
        return {p.name: zero_state(torch.zeros_like(p.value), torch.zeros_like(p.value)) for p in self.shards}

    @torch.no_grad()
    def step(self, lr: float, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update every shard with its gradient times `scale`, then free the gradients. Does not wait for the device.

        scale: a scalar such as the clip factor, applied in the dtype of the masters. found_inf: a scalar of any dtype
        on the device; if it is 1, values, moments and steps do not change.
        """
        flag = None if found_inf is None else found_inf.to(torch.float32).reshape(())
        for batch in _batches(self.shards):
            self._update([p for p in batch if p.decays], lr, scale, flag)
            self._update([p for p in batch if not p.decays], lr, scale, flag)

    def _update(self, shards: list[ParameterShard], lr: float, scale: Tensor | None, found_inf: Tensor | None) -> None:
        gradients = [gradient_of(p).to(p.value.dtype) for p in shards]
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)
        states = [self.states[p.name] for p in shards]
        decays = bool(shards) and shards[0].decays
        update([p.value for p in shards], gradients, states, lr, self.optim, decays=decays, found_inf=found_inf)
        for shard in shards:
            shard.grad = None

    def moments(self) -> dict[str, State]:
        """Return the state by parameter name: the live tensors, which may be read and written between steps."""
        return self.states

    @torch.no_grad()
    def put_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `moments` (shard name -> kind -> tensor, on any device and of any dtype) into the state."""
        for name, kinds in moments.items():
            for kind, tensor in kinds.items():
                live = self.states[name][kind]
                if tensor is not live:
                    live.copy_(tensor.reshape(live.shape))

    def close(self) -> None:
        """Free the disk space of the state. Does nothing for state in memory."""


def zero_state(exp_avg: Tensor, exp_avg_sq: Tensor) -> State:
    """Return the state of a shard before its first step: the given zero tensors as moments, and step 0."""
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
    """Apply one AdamW update in place to values, moments and `step`. Values, gradients and moments have one dtype.

    The CPU kernel rounds the last elements of a tensor (its length modulo 64 bytes) differently from the rest. An
    update in parts has the same bits as one call if the parts start at multiples of 64 bytes.
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


def gradient_of(shard: ParameterShard) -> Tensor:
    assert shard.grad is not None, f"{shard.name} has no gradient"
    return shard.grad


def _batches(shards: Iterable[ParameterShard]) -> Iterator[list[ParameterShard]]:
    """Yield batches of shards whose gradients take about CONVERT_BYTES once converted; unconverted ones count 0."""
    batch, converted = [], 0
    for shard in shards:
        batch.append(shard)
        if shard.grad is not None and shard.grad.dtype != shard.value.dtype:
            converted += shard.value.nbytes
        if converted >= CONVERT_BYTES:
            yield batch
            batch, converted = [], 0
    if batch:
        yield batch
