"""The documents of packed sequences, read on the host.

A document's tokens are adjacent, and its number differs from that of the document before it. The loader leaves the
numbers on the host, where plans of attention are made, so no step waits for the device to know where documents end.
"""

import numpy as np
import torch
from torch import Tensor


def ends_of(document_ids_BS: Tensor) -> list[list[int]]:
    """Return the positions at which the documents of each sequence end, ascending; the last is S.

    document_ids_BS: document numbers on the host, integers [B, S].
    """
    ids = document_ids_BS.numpy()
    changed = ids[:, 1:] != ids[:, :-1]
    return [[*(np.flatnonzero(row) + 1).tolist(), ids.shape[1]] for row in changed]


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return host numbers on `device`. The host does not wait for the copy."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
