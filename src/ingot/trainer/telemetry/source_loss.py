"""The loss by data source. A sequence is a window of one shard, so it has one source.

The device adds up the nats of each sequence, and the host reads the sums at log lines and adds them up by source: no
step waits. Ranks that share the tokens of sequences (context parallelism) each add their own tokens.

Shape letters: A micro-batches, B sequences of one, S sources.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.schema.tokens import TokenManifest
from ingot.value_names import metric_part

MOST_SOURCES = 64


def recorded_sources(manifest: TokenManifest) -> tuple[list[str], np.ndarray]:
    """Return the names under which losses are recorded, and for each shard the position of its name: int64 [shards].

    At most MOST_SOURCES, the largest ones; shards of others have the position after the last name. One source alone is
    not recorded: its loss is that of the step.
    """
    tokens: dict[str, int] = {}
    for shard in manifest.shards:
        name = metric_part(shard.source)
        tokens[name] = tokens.get(name, 0) + shard.tokens
    largest = sorted(tokens, key=lambda name: (-tokens[name], name))[:MOST_SOURCES]
    names = sorted(largest) if len(tokens) > 1 else []
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place.get(metric_part(shard.source), len(names)) for shard in manifest.shards], np.int64)


class SourceLoss:
    """The loss of this rank's tokens by source, since the last `take`.

    names: of the sources. shards: the position of each shard's source among `names`, as `recorded_sources` returns it.
    shard_of: returns the shards of windows. rows: B. tokens: of a sequence on this rank. readout: of the last stage of
    the model; None on a rank whose tokens another one counts, or that has another stage.
    """

    def __init__(
        self,
        names: Sequence[str],
        shards: np.ndarray,
        shard_of: Callable[[np.ndarray], np.ndarray],
        *,
        rows: int,
        tokens: int,
        readout: Any | None,
    ):
        self.names, self._shards, self._shard_of = list(names), shards, shard_of
        self._rows, self._tokens, self._readout = rows, tokens, readout
        self._of_step: dict[int, Tensor] = {}  # float64 [B] for each micro-batch of the step in progress
        self._nats: dict[int, Tensor] = {}  # step -> float64 [A, B]
        self._windows: dict[int, np.ndarray] = {}

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Return the context in which the forwards of this rank's part of a batch run."""
        if self._readout is None:
            yield
            return
        self._of_step = {}
        self._readout.keeps_nats = True
        try:
            yield
        finally:
            self._readout.keeps_nats, self._readout.kept_nats = False, None
        self._nats[step] = torch.stack([self._of_step[number] for number in sorted(self._of_step)])

    @torch.no_grad()
    def computed(self, micro_batch: int) -> None:
        """Take the nats of a micro-batch whose loss was computed. The host does not wait."""
        if self._readout is not None:
            nats_M, self._readout.kept_nats = self._readout.kept_nats, None
            self._of_step[micro_batch] = nats_M.view(self._rows, -1).sum(1, dtype=torch.float64)

    def add(self, step: int, windows: np.ndarray) -> None:
        """Take the window ids of a completed step, int64 [A x B]."""
        if step in self._nats:
            self._windows[step] = windows

    def take(self) -> np.ndarray:
        """Return nats and tokens since the last call, by source and of all other sources, float64 [2 x (S + 1)]: to be
        summed over ranks. The host waits for the device."""
        found = np.zeros((2, len(self.names) + 1))
        if self._windows:
            nats = torch.cat([self._nats[step].flatten() for step in self._windows]).cpu().numpy()
            sources = self._shards[self._shard_of(np.concatenate(list(self._windows.values())))]
            found[0] = np.bincount(sources, nats, len(self.names) + 1)
            found[1] = np.bincount(sources, minlength=len(self.names) + 1) * self._tokens
        self._nats.clear()
        self._windows.clear()
        return found.flatten()

    def means(self, sums: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
        """Return the mean loss of each source, and its share of all tokens; of sources that had any. sums: those of
        `take`, added up over ranks."""
        nats, tokens = sums.reshape(2, -1).tolist()
        there = [(name, at) for at, name in enumerate(self.names) if tokens[at]]
        total = sum(tokens)
        return {name: nats[at] / tokens[at] for name, at in there}, {name: tokens[at] / total for name, at in there}
