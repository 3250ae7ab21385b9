"""Windows of tokens out of memory-mapped shards; every block is checked against its hash when it is first touched.

Opening a folder reads its manifest and nothing else. A shard is mapped when a window needs it; the least recently used
ones are unmapped again, so ten thousand shards need no ten thousand open files.
"""

import hashlib
import mmap
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import DataError
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.trainer.loader.windows import Windows

_FIX = "copy the shard again from its origin, or build the tokens again; ingot data verify DIR finds all damage"


def document_numbers(inputs: np.ndarray, eot_id: int) -> np.ndarray:
    """Which document of its window each token belongs to, counted from 0: int32, the shape of `inputs` [..., T].

    The end of text belongs to the document that it ends; plain text cannot contain it (data/tokenizer/encoder.py).
    """
    ends = inputs == eot_id
    return np.cumsum(ends, axis=-1, dtype=np.int32) - ends


@dataclass
class _Open:
    """A mapped shard. verified: one byte per block, 1 once its hash was found right."""

    tokens: np.ndarray
    digests: bytes
    verified: bytearray


class TokenReader:
    """Reads windows of `seq_len` + 1 tokens. Not for several threads.

    manifest: of `folder`, when the caller has read it already.
    """

    def __init__(self, folder: Path, seq_len: int, *, manifest: TokenManifest | None = None, open_shards: int = 64):
        self.folder, self.manifest = folder, manifest or read_token_manifest(folder)
        self.windows, self.seq_len, self.open_shards = Windows(self.manifest, seq_len), seq_len, open_shards
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._block_tokens = self.manifest.block_bytes // self._dtype.itemsize
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._verified: dict[
            int, bytearray
        ] = {}  # of shards seen so far: a block is checked once, not once per opening

    def read(self, window_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Tokens of the windows, int64 [n, seq_len + 1], into `out` if given.

        Raises DataError naming shard, block and byte offset when what is on disk is not what was built.
        """
        if out is None:
            out = np.empty((len(window_ids), self.seq_len + 1), np.int64)
        shards, starts = self.windows.locate(window_ids)
        length, block_tokens = self.seq_len + 1, self._block_tokens
        for row, (number, start) in enumerate(zip(shards.tolist(), starts.tolist(), strict=True)):
            shard = self._open.get(number) or self._open_shard(number)
            self._open.move_to_end(number)
            stop = start + length
            for block in range(start // block_tokens, (stop - 1) // block_tokens + 1):
                if not shard.verified[block]:
                    self._verify(number, shard, block)
            out[row] = shard.tokens[start:stop]
        return out

    def _open_shard(self, number: int) -> _Open:
        shard = self.manifest.shards[number]
        path = self.folder / f"{shard.name}.tokens"
        expected = shard.tokens * self._dtype.itemsize
        blocks = -(-expected // self.manifest.block_bytes)
        try:
            digests = (self.folder / f"{shard.name}.blocks").read_bytes()
            with path.open("rb") as file:
                size = file.seek(0, 2)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise DataError(
                f"shard {shard.name}: {error.filename} cannot be read ({error.strerror})",
                rule="every shard in the manifest lies in its folder",
                fix=_FIX,
            ) from None
        if size != expected:
            raise DataError(
                f"shard {shard.name}: {path} has {size:,} bytes, not {expected:,}",
                rule=f"the manifest says {shard.tokens:,} tokens of {self.manifest.dtype}: cut short, or another dtype",
                fix=_FIX,
            )
        if hashlib.sha256(digests).hexdigest() != shard.blocks_sha256 or len(digests) != 32 * blocks:
            raise DataError(
                f"shard {shard.name}: the block hashes in {shard.name}.blocks are not those that were built",
                rule="the manifest holds the SHA-256 of .blocks",
                fix=_FIX,
            )
        verified = self._verified.setdefault(number, bytearray(blocks))
        opened = _Open(np.frombuffer(mapped, self._dtype), digests, verified)
        self._open[number] = opened
        if len(self._open) > self.open_shards:
            self._open.popitem(last=False)
        return opened

    def _verify(self, number: int, shard: _Open, block: int) -> None:
        first = block * self._block_tokens
        data = shard.tokens[first : first + self._block_tokens]
        if hashlib.sha256(data.data).digest() != shard.digests[32 * block : 32 * block + 32]:
            name, at = self.manifest.shards[number].name, first * self._dtype.itemsize
            raise DataError(
                f"shard {name}: block {block} (bytes {at:,} to {at + data.nbytes:,} of {self.folder / name}.tokens) "
                "has another SHA-256 than at build",
                rule="training never sees a token that was not built",
                fix=_FIX,
            )
        shard.verified[block] = 1
