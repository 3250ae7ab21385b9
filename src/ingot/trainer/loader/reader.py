"""Samples, which are numbered windows of token shards, read from memory-mapped files with checked hashes.

A sample is a window of seq_len + 1 tokens of one shard: the first seq_len tokens are inputs, the last seq_len targets.
Windows of a shard begin seq_len apart, so every token but a shard's first is a target exactly once (less than a window
remains at a shard's end). Window ids count over the shards in the manifest's order.

Opening a folder reads only its manifest. A shard is mapped when a window needs it; the least recently used shards are
unmapped, so ten thousand shards do not need ten thousand open files. A block is checked against its hash when it is
first read.
"""

import hashlib
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.trainer.loader.retry import Retries

_FIX = "copy the shard again from its origin, or build the tokens again; ingot data verify DIR finds all damage"


def document_numbers(inputs: np.ndarray, eot_id: int) -> np.ndarray:
    """Return the number of each token's document within its window, from 0: int32 [..., T], the shape of `inputs`.

    An end-of-text token belongs to the document that it ends; plain text cannot contain one (tokenizer/encoder.py).
    """
    ends = inputs == eot_id
    return np.cumsum(ends, axis=-1, dtype=np.int32) - ends


class Windows:
    """The windows of `seq_len` + 1 tokens in a token folder. Memory is O(shards).

    counts: the number of windows per shard, int64. ends: their running sum. Raises DataError if there is no window.
    """

    def __init__(self, manifest: TokenManifest, seq_len: int):
        if seq_len < 1:
            raise ConfigError(
                "E-SEQ-LEN",
                f"seq_len is {seq_len}",
                rule="a sample has at least one input token",
                fix="set train.seq_len to 1 or more",
                seq_len=seq_len,
            )
        self.seq_len = seq_len
        tokens = np.array([shard.tokens for shard in manifest.shards], np.int64)
        self.counts = np.maximum((tokens - 1) // seq_len, 0)
        self.ends = np.cumsum(self.counts)
        self.count = int(self.counts.sum())
        if not self.count:
            raise DataError(
                "E-TOKENS-TOO-FEW",
                f"no shard has {seq_len + 1:,} tokens (the longest has {max(tokens.tolist(), default=0):,})",
                rule="a sample is seq_len + 1 consecutive tokens of one shard",
                fix="use a shorter train.seq_len, or more data",
                seq_len=seq_len,
                longest=max(tokens.tolist(), default=0),
            )

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, per window id, the index of its shard in the manifest and its first token in the shard, as int64."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.count:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise DataError(
                "E-WINDOW-UNKNOWN",
                f"window {wrong} does not exist",
                rule=f"the tokens have {self.count:,} windows of {self.seq_len + 1} tokens",
                fix="use the tokens and train.seq_len that the ids were made for",
                window=wrong,
                windows=self.count,
            )
        shards = np.searchsorted(self.ends, ids, side="right")
        return shards, (ids - self.ends[shards] + self.counts[shards]) * self.seq_len


@dataclass
class _MappedShard:
    """A mapped shard. digests: the SHA-256 of each block, concatenated. verified: a byte per block, 1 if checked. file:
    the open file, from which a block is read before it is used: a mapped page that cannot be read ends the process."""

    tokens: np.ndarray
    file: BinaryIO
    digests: bytes
    verified: bytearray


class TokenReader:
    """A reader of windows of `seq_len` + 1 tokens from `folder`. Not thread-safe.

    manifest: the manifest of `folder`, if the caller has it. open_shards: the maximum number of shards mapped at once.
    retries: for reads that fail; default: none is tried again.
    """

    def __init__(
        self,
        folder: Path,
        seq_len: int,
        *,
        manifest: TokenManifest | None = None,
        open_shards: int = 64,
        retries: Retries | None = None,
    ):
        self.retries = retries or Retries()
        self.folder, self.manifest = folder, manifest or read_token_manifest(folder)
        self.windows, self.seq_len, self.open_shards = Windows(self.manifest, seq_len), seq_len, open_shards
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._block_tokens = self.manifest.block_bytes // self._dtype.itemsize
        self._open: OrderedDict[int, _MappedShard] = OrderedDict()
        # `verified` by shard, kept after a shard is unmapped: a block is checked once, not once per mapping.
        self._verified: dict[int, bytearray] = {}

    def read(self, window_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Read windows as int64 [n, seq_len + 1], into `out` if given.

        Raises DataError with shard, block and byte offset if the data on disk differs from the data that was built.
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

    def check_shard(self, number: int, *, blocks: bool) -> None:
        """Check size and block hashes of a shard, and with `blocks` every byte of it. Raises DataError."""
        shard = self._open.get(number) or self._open_shard(number)
        for block in range(len(shard.verified) if blocks else 0):
            if not shard.verified[block]:
                self._verify(number, shard, block)

    def _open_shard(self, number: int) -> _MappedShard:
        shard = self.manifest.shards[number]
        path = self.folder / f"{shard.name}.tokens"
        expected = shard.tokens * self._dtype.itemsize
        blocks = -(-expected // self.manifest.block_bytes)
        try:
            digests = self.retries.read((self.folder / f"{shard.name}.blocks").read_bytes)
            file = self.retries.read(lambda: path.open("rb"))
            size = file.seek(0, 2)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise self._unreadable(number, error) from None
        if size != expected:
            raise DataError(
                "E-SHARD-SIZE",
                f"shard {shard.name}: {path} has {size:,} bytes, not {expected:,}",
                rule=f"the manifest lists {shard.tokens:,} tokens of {self.manifest.dtype}",
                fix=_FIX,
                shard=shard.name,
                path=str(path),
                bytes=size,
                expected=expected,
            )
        if hashlib.sha256(digests).hexdigest() != shard.blocks_sha256 or len(digests) != 32 * blocks:
            raise DataError(
                "E-SHARD-HASH",
                f"shard {shard.name}: the block hashes in {shard.name}.blocks differ from those that were built",
                rule="the manifest holds the SHA-256 of .blocks",
                fix=_FIX,
                shard=shard.name,
                path=str(path.with_suffix(".blocks")),
            )
        verified = self._verified.setdefault(number, bytearray(blocks))
        opened = _MappedShard(np.frombuffer(mapped, self._dtype), file, digests, verified)
        self._open[number] = opened
        if len(self._open) > self.open_shards:
            self._open.popitem(last=False)
        return opened

    def _unreadable(self, number: int, error: OSError) -> DataError:
        shard = self.manifest.shards[number]
        path = self.folder / f"{shard.name}.tokens"
        return DataError(
            "E-SHARD-READ",
            f"shard {shard.name}: {error.filename or path} cannot be read ({error.strerror})",
            rule="every shard in the manifest is in its folder, on storage that answers",
            fix=f"check the storage; {_FIX}",
            shard=shard.name,
            path=str(path),
        )

    def _verify(self, number: int, shard: _MappedShard, block: int) -> None:
        first = block * self._block_tokens
        data = shard.tokens[first : first + self._block_tokens]
        try:
            read = self.retries.read(lambda: _read_at(shard.file, first * self._dtype.itemsize, data.nbytes))
        except OSError as error:
            raise self._unreadable(number, error) from None
        if hashlib.sha256(read).digest() != shard.digests[32 * block : 32 * block + 32]:
            name, at = self.manifest.shards[number].name, first * self._dtype.itemsize
            raise DataError(
                "E-SHARD-HASH",
                f"shard {name}: block {block} (bytes {at:,} to {at + data.nbytes:,} of {self.folder / name}.tokens) "
                "has a different SHA-256 than when it was built",
                rule="training reads only tokens that are unchanged since they were built",
                fix=_FIX,
                shard=name,
                path=f"{self.folder / name}.tokens",
                block=block,
            )
        shard.verified[block] = 1


def _read_at(file: BinaryIO, offset: int, size: int) -> bytearray:
    """Read up to `size` bytes of a file, less only at its end. Raises OSError with the name of the file."""
    read = bytearray()
    try:
        while part := os.pread(file.fileno(), size - len(read), offset + len(read)):
            read += part
    except OSError as error:
        error.filename = file.name
        raise
    return read
