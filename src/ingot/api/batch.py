"""The batch of a step, as arrays or as tensors."""

from typing import Any, NamedTuple


class TokenBatch(NamedTuple):
    """The batch of one step: B sequences of T tokens, int64. inputs, targets: [B, T]; a target is the token after its
    input, in memory of its own. window_ids: [B], the samples, which are numbered windows of the token folder.

    The three are numpy arrays; from `TokenDataset.torch()` they are tensors.
    """

    step: int
    inputs: Any
    targets: Any
    window_ids: Any
