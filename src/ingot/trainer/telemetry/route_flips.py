"""The share of routes that flip between two checks: experts that a token of the fixed batch of held-out text goes to
now, and did not at the check before. Late in training few routes change; a jump shows that routers are unstable.

Each rank compares its own tokens in its own layers. The first check of an attempt, and the first after a roll-back,
have none to compare with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ingot.trainer.mesh.collectives import sum_over_ranks


class RouteFlips:
    """The routes of the last check, on this rank. stages: of this rank, of a model with experts."""

    def __init__(self, stages: Mapping[int, nn.Module]):
        modules = [module for stage in stages.values() for module in stage.modules()]
        self._routers: list[Any] = [module for module in modules if hasattr(module, "seen")]
        self._now: list[torch.Tensor] = []
        self._before: list[np.ndarray] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return the context in which the batch is scored."""
        self._now = []
        hooks = [router.register_forward_hook(self._look) for router in self._routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, router: nn.Module, arguments: Any, routing: Any) -> None:
        self._now.append(routing.experts_MK.to(torch.int32))

    def went_back(self) -> None:
        """Forget the last check: it may be of steps that are void now. On all ranks."""
        self._before = []

    def share(self) -> float | None:
        """Return the share of routes, over all ranks, that the check before did not have; None without it.
        Collective; the host waits for the device."""
        now, self._now = [experts.cpu().numpy() for experts in self._now], []
        flipped, routes = 0, 0
        for one, other in zip(now, self._before, strict=False):
            if one.shape == other.shape:
                flipped += int((one[:, :, None] != other[:, None, :]).all(-1).sum())
                routes += one.size
        self._before = now
        flipped, routes = sum_over_ranks(np.array([flipped, routes])).tolist()
        return flipped / routes if routes else None
