"""From hidden states to the loss or to logits, without holding all logits at once in training.

The logits of a batch are its largest tensor: 8,192 tokens x 128,256 ids in float32 take 4.2 GB, and the plain form
holds them three times (logits, their float32 copy, their gradient). Here the tokens pass in chunks, and the gradient of
a chunk is computed while its logits exist, as in Liger Kernel's fused linear cross entropy (Hsu et al. 2024, sec. 3.2).
On a CPU a chunk stays in the cache, which makes this form faster than the plain form as well.

That gradient of the head has V x D numbers. Where several micro-batches of the last stage wait for their backward
(GPipe, breadth first), one for each of them would fill the memory: `Readout.late` computes the loss at the start of the
backward instead, with the same operations.

Shape letters: B batch, T tokens, M tokens (batch and sequence flattened), D d_model, V vocab_size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.errors import RunFailed
from ingot.plugins.loss import VocabularyPart
from ingot.schema.arch import Arch
from ingot.theory.memory import chunk_tokens

SCALED_ELEMENTS = 1 << 24

# (logits [M, V], targets [M]) -> nats [M], and their gradient with respect to the logits, [M, V] in the logits' dtype.
NatsAndSlope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def nats_and_slope(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p(target) per token, in float32 or wider, and its gradient for the logits (softmax minus one-hot)."""
    log_p_MV = F.log_softmax(logits_MV, dim=-1, dtype=torch.promote_types(logits_MV.dtype, torch.float32))
    nats = -log_p_MV.gather(-1, targets_M[:, None])
    slope = log_p_MV.exp_()
    slope.scatter_add_(-1, targets_M[:, None], -torch.ones_like(nats))
    return nats.squeeze(-1), slope.type_as(logits_MV)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), a new tensor in float32 or wider (Gemma Team 2024, Gemma 2, section 2)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits / cap if logits.dtype == wide else logits.to(wide).div_(cap)
    return scaled.tanh_().mul_(cap)


def with_softcap(measure: NatsAndSlope, cap: float) -> NatsAndSlope:
    """Return a function that applies `measure` to softcapped logits; its gradient is for the logits before the cap."""

    def measure_softcapped(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        capped_MV = softcapped(logits_MV, cap)
        nats_M, slope_MV = measure(capped_MV, targets_M)
        # The derivative of the cap is 1 - tanh^2. In place, so that no third tensor of this size is needed.
        slope_MV.mul_(capped_MV.div_(cap).square_().neg_().add_(1))
        del capped_MV
        return nats_M, slope_MV.type_as(logits_MV)

    return measure_softcapped


@dataclass
class LossTerm:
    """A loss term of a plug-in (plugins/loss.py). measure: term(logits, targets, vocabulary) -> (values, slope).

    sums: of its values and of tokens since `take`, float64 [2].
    """

    name: str
    weight: float
    measure: Callable[[Tensor, Tensor, VocabularyPart], tuple[Tensor, Tensor]]
    sums: Tensor | None = None

    def add_slope(self, slope_MV: Tensor, logits_MV: Tensor, targets_M: Tensor, readout: "Readout") -> None:
        """Add the weighted derivative of the term to `slope_MV`, float32 or wider, and its values to the sums."""

        def measure(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            values, slope = self.measure(logits, targets, readout.vocabulary)
            self._require_shapes(values, slope, logits)
            # The derivative of the softcap changes the slope in place, and a term may return its logits or a view.
            return values, slope.clone() if readout.softcap else slope

        values, own = (with_softcap(measure, readout.softcap) if readout.softcap else measure)(logits_MV, targets_M)
        slope_MV.add_(own.to(slope_MV.dtype), alpha=self.weight)
        if self.sums is None:
            self.sums = torch.zeros(2, dtype=torch.float64, device=logits_MV.device)
        self.sums += torch.stack((values.double().sum(), self.sums.new_tensor(float(len(values)))))

    def _require_shapes(self, values_M: Tensor, slope_MV: Tensor, logits_MV: Tensor) -> None:
        if slope_MV.shape != logits_MV.shape or values_M.shape != logits_MV.shape[:1]:
            raise RunFailed(
                "E-LOSS-TERM",
                f"loss term {self.name!r} returned values {list(values_M.shape)} and a slope {list(slope_MV.shape)} "
                f"for logits {list(logits_MV.shape)}",
                rule="a loss term returns a value for each token, and a slope of the shape of the logits",
                fix="correct the plug-in (plugins/loss.py)",
                term=self.name,
            )

    def take(self) -> Tensor:
        """Return the sums, and begin again; on the CPU."""
        taken, self.sums = self.sums, None
        return torch.zeros(2, dtype=torch.float64) if taken is None else taken.cpu()


def _total_and_gradients(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, readout: "Readout"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of nats, and its gradients for the hidden states and for the weight, in their dtypes.

    Sums over chunks are in float32 or wider: bf16 would lose the small contributions of late chunks.
    """
    accurate = torch.promote_types(weight_VD.dtype, torch.float32)
    total = torch.zeros((), dtype=accurate, device=hidden_MD.device)
    hidden_grad, weight_grad = torch.empty_like(hidden_MD), torch.zeros_like(weight_VD, dtype=accurate)
    kept = []
    chunk = chunk_tokens(len(weight_VD), hidden_MD.device.type)
    for start in range(0, len(hidden_MD), chunk):
        part = slice(start, start + chunk)
        logits = hidden_MD[part] @ weight_VD.T
        if readout.terms:
            # The sum of all slopes is rounded once: a small term would vanish in an already rounded bf16 slope.
            logits = logits.to(accurate)
        nats, slope = readout.nats_and_slope(logits, targets_M[part])
        for term in readout.terms:
            term.add_slope(slope, logits, targets_M[part], readout)
        del logits
        slope = slope.type_as(hidden_MD)
        total += nats.sum()
        if readout.keeps_nats:
            kept.append(nats)
        hidden_grad[part] = slope @ weight_VD
        _add_product(weight_grad, slope.T, hidden_MD[part])
        del slope  # before the next chunk's logits exist
    readout.kept_nats = torch.cat(kept) if kept else None
    return total, hidden_grad, weight_grad.type_as(weight_VD)


def _add_product(total_VD: Tensor, slope_VM: Tensor, hidden_MD: Tensor) -> None:
    """Add slope @ hidden to `total_VD` in place. A product in the dtype of the total never exists as a tensor of its
    own: that would be written and read once more for each chunk. Narrow products are rounded before they are added."""
    if total_VD.dtype == slope_VM.dtype:
        torch.addmm(total_VD, slope_VM, hidden_MD, out=total_VD)
    else:
        total_VD += slope_VM @ hidden_MD


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum of nats over tokens. The forward computes both gradients; the backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, readout) -> Tensor:
        total, hidden_grad, weight_grad = _total_and_gradients(hidden_MD, weight_VD, targets_M, readout)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx, *grads):
        hidden_grad, weight_grad = ctx.saved_tensors
        (scale,) = grads
        return _scale_in_place(hidden_grad, scale), _scale_in_place(weight_grad, scale), None, None


class _LateCrossEntropy(torch.autograd.Function):
    """The same sum and the same gradients, bit for bit, but the backward computes all of it.

    From forward to backward only the hidden states and targets of a micro-batch are kept, and no gradient of the head.
    The forward returns zero; the backward overwrites that with the sum.
    """

    @staticmethod
    def forward(ctx, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, readout) -> Tensor:
        accurate = torch.promote_types(weight_VD.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=hidden_MD.device)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M)
        ctx.readout, ctx.total = readout, total.detach()  # detached: an output in its own graph would never be freed
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        hidden_MD, weight_VD, targets_M = ctx.saved_tensors
        (scale,) = grads
        total, hidden_grad, weight_grad = _total_and_gradients(hidden_MD, weight_VD, targets_M, ctx.readout)
        ctx.total.copy_(total)
        return _scale_in_place(hidden_grad, scale), _scale_in_place(weight_grad, scale), None, None


def _scale_in_place(gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiply `gradient` by `scale` in place, in the dtype of the scale, some rows at a time to save memory.

    In bf16 the scale itself would be rounded, by up to 0.4%, with the same error in all gradients.
    """
    for rows in gradient.split(max(SCALED_ELEMENTS // gradient.shape[-1], 1)):
        rows.copy_(rows.to(scale.dtype) * scale)
    return gradient


class Readout(nn.Module):
    """The loss or the logits of the last hidden states, with the softcap of `arch.logit_softcap`.

    The module has no parameters: the head's weight is an argument, because it may be tied to the embedding.
    terms: the loss terms of the run; they act on gradients, not on the returned nats. keeps_nats: `kept_nats` has the
    nats of each token, [M], of the newest loss in training. late: a loss is computed in its backward, until which the
    returned scalar is zero; for schedules in which several micro-batches wait for their backward.
    """

    def __init__(self, arch: Arch):
        super().__init__()
        self.softcap = arch.logit_softcap
        self.terms: list[LossTerm] = []
        self.keeps_nats = self.late = False
        self.kept_nats: Tensor | None = None
        self.use(nats_and_slope, _unchanged, VocabularyPart(0, _unchanged, _unchanged))

    def use(self, measure: NatsAndSlope, whole: Callable[[Tensor], Tensor], vocabulary: VocabularyPart) -> None:
        """Set the functions that compute the loss and that complete the logits.

        measure: computes nats and their gradient from softcapped logits. whole: logits of this rank's part of the
        vocabulary -> all logits. vocabulary: this rank's part, for loss terms.
        """
        self.vocabulary = vocabulary
        self.nats_and_slope = with_softcap(measure, self.softcap) if self.softcap else measure
        self.whole = whole

    def forward(self, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
        """Return the sum over M of -log p(target): a scalar, float32 (float64 for float64 input). Differentiable."""
        form = _LateCrossEntropy if self.late and torch.is_grad_enabled() else _SummedCrossEntropy
        return form.apply(hidden_MD, weight_VD, targets_M, self)

    @torch.no_grad()
    def nats(self, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
        """Return -log p(target) of every token, [M], float32 (float64 for float64 input), for evaluation."""
        chunk = chunk_tokens(len(weight_VD), hidden_MD.device.type)
        parts = zip(hidden_MD.split(chunk), targets_M.split(chunk), strict=True)
        return torch.cat([self.nats_and_slope(hidden @ weight_VD.T, targets)[0] for hidden, targets in parts])

    def logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return logits [B, T, V] in the compute dtype."""
        logits = F.linear(hidden_BTD, weight_VD)
        return self.whole(softcapped(logits, self.softcap).type_as(logits) if self.softcap else logits)


def _unchanged(logits: Tensor) -> Tensor:
    return logits
