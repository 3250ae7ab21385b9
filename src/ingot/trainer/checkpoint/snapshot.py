"""A copy of everything that a rank saves, in memory that its writer process reads while training goes on."""

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# torch divides the copies of smaller tensors among its threads, too, and on a busy machine waits for the last of them.
_THREADS_PAY_BYTES = 8 << 20


def _runtime() -> Any:
    """Return the functions of the CUDA runtime."""
    return torch.cuda.cudart()


class Snapshot:
    """The bytes of the tensors of one rank's checkpoint file, one after the other.

    The memory is a file without a name in any folder, so that nothing is left when the processes end; the writer maps
    it by the descriptor `fd`. It is made at the first snapshot, kept for later ones, and replaced by a larger one only
    if the tensors grew. On a GPU it is page-locked, which lets the device copy at the full rate of its link.

    refusal: the error code with which the CUDA runtime refused to page-lock the memory; 0: it did not. Copies are then
    slower, and nothing else changes.
    """

    def __init__(self, device: torch.device):
        self.fd = os.memfd_create("ingot-snapshot")
        self._device, self._on_gpu = device, device.type == "cuda"
        self._is_locked, self.refusal = False, 0
        self._map: mmap.mmap | None = None
        self._image = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[Tensor], header: bytes = b"") -> int:
        """Copy `header`, a multiple of 8 bytes, and `tensors`, on any device, of which those with larger elements come
        first. Returns the number of bytes.

        When this returns, the tensors may change.
        """
        total = len(header) + sum(tensor.nbytes for tensor in tensors)
        if total > self._image.numel():
            self._allocate(total)
        begin = len(header)
        self._image[:begin].numpy()[:] = np.frombuffer(header, np.uint8)
        for tensor in tensors:
            end = begin + tensor.nbytes
            self._copy(tensor.detach(), self._image[begin:end])
            begin = end
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return total

    def _copy(self, tensor: Tensor, place: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes < _THREADS_PAY_BYTES:
            np.copyto(place.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._on_gpu)

    def _allocate(self, total: int) -> None:
        self._release()
        os.ftruncate(self.fd, total)
        self._map = mmap.mmap(self.fd, total)
        self._image = torch.frombuffer(self._map, dtype=torch.uint8)
        if self._on_gpu:
            self._lock(total)

    def _lock(self, total: int) -> None:
        self.refusal = int(_runtime().cudaHostRegister(self._image.data_ptr(), total, 0))
        self._is_locked = not self.refusal
        if self.refusal:
            # The runtime keeps the error until a kernel is launched, which then fails with it, whatever kernel it is.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)

    def _release(self) -> None:
        if self._is_locked:
            _runtime().cudaHostUnregister(self._image.data_ptr())
            self._is_locked = False
        self._image, self._map = torch.empty(0, dtype=torch.uint8), None

    def close(self) -> None:
        """Free the memory, once the writer has ended as well."""
        if self.fd >= 0:
            self._release()
            os.close(self.fd)
            self.fd = -1
