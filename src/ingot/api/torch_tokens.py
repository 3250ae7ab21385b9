"""The batches of a TokenDataset for torch's DataLoader. The only module of ingot.api that imports torch at its top."""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ingot.api.batch import TokenBatch


class TorchTokens(IterableDataset):
    """The steps after `after_step` up to `last_step`, as TokenBatch of int64 tensors. read: gives a step's arrays.

    Worker w of N has every N-th step from the w-th on; a DataLoader takes from its workers in turn, so the steps
    arrive in order. Use it with `batch_size=None`: a step is a batch already.
    """

    def __init__(self, read: Callable[[int], TokenBatch], after_step: int, last_step: int):
        self.read, self.after_step, self.last_step = read, after_step, last_step

    def __len__(self) -> int:
        return max(self.last_step - self.after_step, 0)

    def __iter__(self) -> Iterator[TokenBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for step in range(self.after_step + 1 + worker, self.last_step + 1, workers):
            batch = self.read(step)
            inputs, targets, ids = map(torch.from_numpy, (batch.inputs, batch.targets, batch.window_ids))
            yield TokenBatch(step, inputs, targets, ids)
