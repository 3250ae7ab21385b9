"""The way of batches from the thread that reads them to the device of the rank."""

import numpy as np
import torch


class HostTransport:
    """The transport of batches to a CPU: they stay where they were read, without a copy."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape

    def buffer(self) -> np.ndarray:
        self.tokens = np.empty(self.shape, np.int64)
        return self.tokens

    def send(self) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(self.tokens), None


class DeviceTransport:
    """The transport of batches to a GPU: two alternating pinned buffers, and copies on a separate CUDA stream."""

    def __init__(self, shape: tuple[int, int], device: torch.device):
        torch.cuda.set_device(device)  # for this thread; otherwise pinning would open the first GPU on every rank
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def buffer(self) -> np.ndarray:
        self.turn = 1 - self.turn
        if (event := self.copied[self.turn]) is not None:
            event.synchronize()  # the copy out of this buffer, two batches ago
        return self.buffers[self.turn].numpy()

    def send(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            tokens = self.buffers[self.turn].to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.copied[self.turn] = event
        return tokens, event
