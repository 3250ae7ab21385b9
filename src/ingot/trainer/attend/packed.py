"""Attention of packed documents by one call of a kernel for sequences of different lengths, on CUDA.

This is the kernel of torch.nn.attention.varlen (Dao 2023), with its window and its grouped heads; the function there
takes grouped heads from PyTorch 2.12 on, the operator in all versions that ingot supports. FlashAttention 3 and 4 are
other implementations of the same operator.

Shape letters: B batch, T tokens, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ingot.trainer.attend.documents import on_device
from ingot.trainer.torch_private import attention_kernels

_kernels = attention_kernels()
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_WIDTH, _WIDTH_STEP = 256, 8
# Other implementations: the module that has them, the name by which PyTorch activates them, the compute capability of
# the devices for which they are made, and the widest heads that they take.
_NEWER = (("flash_attn.cute", "FA4", 10, 128), ("flash_attn_interface", "FA3", 9, 256))


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """The documents of a batch, all sequences after each other.

    starts: of each document, and the number of all tokens: int32 [documents + 1] on the device. longest: the most
    tokens of a document. window: the number of tokens that a query attends to, itself included; 0: no limit.
    """

    starts: Tensor
    longest: int
    window: int


def has_packed_kernel(is_cuda: bool, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a device has the kernel for such queries: CUDA does in 16 bits, up to heads of 256."""
    return is_cuda and dtype in _DTYPES and head_dim <= _MOST_WIDTH and head_dim % _WIDTH_STEP == 0


def pack(
    ends: Sequence[Sequence[int]] | None, *, batch: int, tokens: int, window: int, device: torch.device
) -> PackedDocuments:
    """Return the documents of `batch` sequences. ends: where those of each sequence end; None: each is one document."""
    ends = [[tokens]] * batch if ends is None else ends
    lengths = [end - start for row in ends for start, end in pairwise((0, *row))]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    # A window that is longer than all documents stays, so that compiled blocks have one graph for all batches.
    return PackedDocuments(on_device(starts, device), max(lengths), window)


def attend_packed(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, documents: PackedDocuments) -> Tensor:
    """Return the attention of all tokens, each to its document: [B, N, T, H]."""
    batch, _, tokens, _ = q_BNTH.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BGTH, v_BGTH))
    starts, longest, window = documents.starts, documents.longest, documents.window
    limits = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    out, *_ = _kernels.packed(q, k, v, starts, starts, longest, longest, 0.0, not window, False, **limits)
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


def activate_newest_kernels(capability: int, head_dim: int) -> str | None:
    """Let PyTorch call FlashAttention 4 or 3 where it is installed and made for such heads on such a device.

    capability: the major one of the device. Returns the name, or None: PyTorch's own FlashAttention 2 is used.
    """
    for module, name, major, widest in _NEWER:
        if capability == major and head_dim <= widest and _is_installed(module):
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(name)
            return name
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
