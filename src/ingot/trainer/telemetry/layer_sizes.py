"""The norm of the gradient and the size of the activations of each layer, in few steps: those that
metrics.layers_every chooses, and one for each file RUN/measure-layers.

Nothing waits for the device before the next log line, which reads the sums. Activations are the hidden states that a
block returns: hooks on the blocks measure them, and are there in these steps alone. Ranks that have the same hidden
states all count them, which changes no mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.plugins.piece import ParameterShard
from ingot.trainer.guard.gradient_range import NEAR
from ingot.trainer.mesh.collectives import sum_over_ranks

OTHER = "other"  # parameters outside of blocks
SATURATED = "activation_saturation"
_Hidden = tuple[int, Tensor, Tensor | None, int]  # layer, sum of squares, number that is nearly too large, elements


class LayerSizes:
    """The measurement. All ranks measure in the same steps.

    shards, stages: of this rank. layers: of the model. every: steps; 0: only when asked. request: the file that asks,
    on rank 0; None elsewhere. dtype: the training precision, if its range is narrow: then the share of the activations
    that it can hardly hold is measured, too, and all of it in one of `range_every` steps; None: it is not.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        stages: Mapping[int, nn.Module],
        layers: int,
        every: int,
        request: Path | None,
        dtype: torch.dtype | None = None,
        range_every: int = 0,
    ):
        self._most = None if dtype is None else torch.finfo(dtype).max * NEAR
        self._intervals = [one for one in (every, range_every if dtype else 0) if one > 0]
        names = {f"blocks.{layer}": layer for layer in range(layers)}
        self._shards = [
            (shard, names.get(".".join(shard.name.split(".")[:2]), layers))
            for shard in shards
            if shard.owner and shard.value.numel()
        ]
        named = (stage.get_submodule("blocks").named_children() for stage in stages.values())
        self._blocks = [(int(name), block) for children in named for name, block in children]
        self._layers, self._request, self._is_asked = layers, request, False
        self._activations: list[_Hidden] = []
        self._measured: list[tuple[int, list[tuple[int, Tensor]], list[_Hidden]]] = []

    # -- in a step: nothing waits --

    def is_due(self, step: int) -> bool:
        """Return whether `step` is measured."""
        return self._is_asked or any(step % every == 0 for every in self._intervals)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Return the context in which the forwards of this rank's part of a batch run."""
        self._activations = []
        if not self.is_due(step):
            yield
            return
        hooks = [block.register_forward_hook(partial(self._look, layer)) for layer, block in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def computed(self, micro_batch: int) -> None:
        """Take in that the loss of a micro-batch was computed: nothing follows from it."""

    @torch.no_grad()
    def _look(self, layer: int, block: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        norm = torch.linalg.vector_norm(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        large = None if self._most is None else (~(hidden.abs() < self._most)).sum().double()  # NaN counts, too
        self._activations.append((layer, norm.double().square(), large, hidden.numel()))

    @torch.no_grad()
    def before_update(self, step: int, scale: Tensor | None) -> None:
        """Measure the gradients, if `step` is due. scale: the loss scale by which they are multiplied."""
        if not self.is_due(step):
            return
        norms = []
        for shard, row in self._shards:
            if shard.grad is not None:
                norm = torch.linalg.vector_norm(shard.grad, dtype=torch.promote_types(shard.grad.dtype, torch.float32))
                norm = norm.double()
                norms.append((row, (norm if scale is None else norm / scale.to(norm.device)).square()))
        self._measured.append((step, norms, self._activations))
        self._activations, self._is_asked = [], False

    # -- at a log line --

    def take_request(self) -> bool:
        """Return whether somebody asks for a measurement; the request is removed. False on all ranks but the first."""
        if self._request is None:
            return False
        try:
            self._request.unlink()
        except OSError:  # there is none; or a folder that is gone, which others report
            return False
        return True

    def ask(self) -> None:
        """Measure the next step. On all ranks."""
        self._is_asked = True

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, its numbers by name) of all that was measured since the last call. Collective if anything was;
        then the host waits for the device."""
        measured, self._measured = self._measured, []
        if not measured:
            return []
        # Squares of gradients; of activations; how many of them are nearly too large; their elements.
        table = np.zeros((len(measured), 4, self._layers + 1))
        numbers = [
            one
            for _, norms, activations in measured
            for one in (*(norm for _, norm in norms), *(n for _, *own, _ in activations for n in own if n is not None))
        ]
        found = iter(_on_host(numbers))
        for own, (_, norms, activations) in zip(table, measured, strict=True):
            for row, _ in norms:
                own[0, row] += next(found)
            for layer, _, large, elements in activations:
                own[1:, layer] += next(found), 0.0 if large is None else next(found), elements
        total = sum_over_ranks(table)
        return [(step, self._values(own)) for (step, _, _), own in zip(measured, total, strict=True)]

    def _values(self, sums: np.ndarray) -> dict[str, float]:
        names = [*map(str, range(self._layers)), OTHER]
        values = {f"layers/{name}/grad_norm": float(root) for name, root in zip(names, np.sqrt(sums[0]), strict=True)}
        for name, square, large, elements in zip(names, *sums[1:].tolist(), strict=True):
            if elements:
                values[f"layers/{name}/activation_rms"] = float(np.sqrt(square / elements))
            if elements and self._most is not None:
                values[f"layers/{name}/{SATURATED}"] = large / elements
        return values


def _on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Return the values of float64 scalars. The host waits once for each device, not for each number."""
    found = np.zeros(len(numbers))
    for device in {number.device for number in numbers}:
        places = [at for at, number in enumerate(numbers) if number.device == device]
        found[places] = torch.stack([numbers[at] for at in places]).cpu().numpy()
    return found.tolist()
