"""The optimizer of a rank: the update rules of a registered optimizer over the rank's parameter shards."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ingot.plugins.optimizer import MatrixRule, RuleOf, UpdateRule
from ingot.plugins.piece import ParameterShard
from ingot.trainer.optim.matrices import Matrices

# Gradients whose dtype differs from that of the masters are converted in batches of about this many bytes.
CONVERT_BYTES = 256 * 2**20
STEP = "step"

# The state of one shard: the rule's tensors, each with the shape of the value, and "step", a float32 scalar.
State = dict[str, Tensor]


class Optimizer:
    """The optimizer of a rank's shards, with its state on the device of the shards (offload.py keeps state elsewhere).

    The constructor allocates the state as zeros: the memory is known at once, and a checkpoint can be loaded into it.
    Empty shards have no state.
    rule_of: parameter name and whole shape -> its rule. matrices: brings whole matrices together for rules that look
    at them; needed if some rule is a MatrixRule.
    """

    def __init__(self, shards: Iterable[ParameterShard], rule_of: RuleOf, matrices: Matrices | None = None):
        self.shards = [p for p in shards if p.value.numel()]
        assert len({p.name for p in self.shards}) == len(self.shards), "state is kept and saved by name"
        self.rules = {p.name: rule_of(p.name, p.shape) for p in self.shards}
        self.matrices = matrices
        self.elementwise = [p for p in self.shards if not isinstance(self.rules[p.name], MatrixRule)]
        self.whole = [p for p in self.shards if isinstance(self.rules[p.name], MatrixRule)]
        assert matrices is not None or not self.whole, "rules for whole matrices need them"
        self.states: dict[str, State] = self._zero_states()

    def _zero_states(self) -> dict[str, State]:
        return {p.name: zero_state(p, {k: torch.zeros_like(p.value) for k in self.kinds(p)}) for p in self.shards}

    def kinds(self, shard: ParameterShard) -> tuple[str, ...]:
        """Return the names of the tensors that the rule of a shard keeps for it."""
        return self.rules[shard.name].state

    @torch.no_grad()
    def step(self, lr: float, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update every shard with its gradient times `scale`, then free the gradients. Does not wait for the device.

        scale: a scalar such as the clip factor, applied in the dtype of the masters. found_inf: a scalar of any dtype
        on the device; if it is 1, values, moments and steps do not change. Collective if there are whole matrices.
        """
        flag = None if found_inf is None else found_inf.to(torch.float32).reshape(())
        for batch in _batches(self.elementwise):
            for rule, decays, shards in _by_rule(batch, self.rules):
                gradients = [converted(p, scale) for p in shards]
                states = [self.states[p.name] for p in shards]
                rule.update([p.value for p in shards], gradients, states, lr, decays=decays, found_inf=flag)
                for shard in shards:
                    shard.grad = None
        if self.matrices is not None:
            self.matrices.update(self.whole, self.states, lr, scale=scale, found_inf=flag)

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


def zero_state(shard: ParameterShard, tensors: State) -> State:
    """Return the state of a shard before its first step: the given zero tensors, and step 0."""
    device = next(iter(tensors.values())).device if tensors else shard.value.device
    return {**tensors, STEP: torch.zeros((), dtype=torch.float32, device=device)}


def converted(shard: ParameterShard, scale: Tensor | None) -> Tensor:
    """Return the gradient of a shard in the dtype of its master, times `scale`. May reuse its memory."""
    gradient = gradient_of(shard).to(shard.value.dtype)
    return gradient if scale is None else gradient.mul_(scale)


def gradient_of(shard: ParameterShard) -> Tensor:
    assert shard.grad is not None, f"{shard.name} has no gradient"
    return shard.grad


def _by_rule(
    shards: Iterable[ParameterShard], rules: Mapping[str, UpdateRule]
) -> Iterator[tuple[UpdateRule, bool, list[ParameterShard]]]:
    """Yield (rule, whether weight decay acts, shards): the shards that one call of the rule updates."""
    groups: dict[tuple[int, bool], list[ParameterShard]] = {}
    for shard in shards:
        groups.setdefault((id(rules[shard.name]), not shard.decays), []).append(shard)
    for (_, kept), group in groups.items():
        yield rules[group[0].name], not kept, group


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
