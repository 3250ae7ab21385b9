"""Samples, which are numbered windows of token shards, read from files with checked hashes.

A sample is a window of seq_len + 1 tokens of one shard: the first seq_len tokens are inputs, the last seq_len targets.
Windows of a shard begin seq_len apart, so every token but a shard's first is a target exactly once (less than a window
remains at a shard's end). Window ids count over the shards in the manifest's order.

Opening a folder reads only its manifest. A shard is opened when a window needs it; the least recently used shards are
closed, so ten thousand shards do not need ten thousand open files. A block is checked against its hash when it is first
read, and again if its file was written to since then.
"""

import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.trainer.loader.retry import Retries

_FIX = (
    "copy the shard again from its origin, or build the tokens again; ingot data verify DIR finds all damage. With "
    'data.on_damage = "quarantine" a run trains without it'
)
# The errors of tokens that are not those that were built, or cannot be trained on. A disk that does not answer has
# another one: its tokens may be whole.
DAMAGE = frozenset({"E-SHARD-MISSING", "E-SHARD-SIZE", "E-SHARD-HASH", "E-SHARD-TOKEN-ID"})


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


@dataclass(frozen=True)
class DamagedTokens:
    """The tokens begin..end-1 of a shard, by its index in the manifest, which may not be used. error: the reason."""

    shard: int
    begin: int
    end: int
    error: DataError


@dataclass
class _Checked:
    """The blocks of a shard that were checked. blocks: a byte each, 1 if it was. stamp: of the file at that time."""

    blocks: bytearray
    stamp: tuple[int, int] = (0, 0)


@dataclass
class _OpenShard:
    """An open shard. digests: the SHA-256 of each block, concatenated. file: without a buffer; not mapped, because a
    mapped page that cannot be read, or that the file lost, ends the process."""

    file: BinaryIO
    digests: bytes
    checked: _Checked = field(default_factory=lambda: _Checked(bytearray()))


class TokenReader:
    """A reader of windows of `seq_len` + 1 tokens from `folder`. Not thread-safe.

    manifest: the manifest of `folder`, if the caller has it. open_shards: the maximum number of shards open at once.
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
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        # By shard, kept after a shard is closed: a block is checked once, not once per opening.
        self._checked: dict[int, _Checked] = {}

    def read(self, window_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Read windows as int64 [n, seq_len + 1], into `out` if given.

        Raises DataError with shard, block and byte offset if the data on disk differs from the data that was built, or
        has a token beyond the vocabulary.
        """
        if out is None:
            out = np.empty((len(window_ids), self.seq_len + 1), np.int64)
        shards, starts = self.windows.locate(window_ids)
        length, block_tokens, width = self.seq_len + 1, self._block_tokens, self._dtype.itemsize
        for row, (number, start) in enumerate(zip(shards.tolist(), starts.tolist(), strict=True)):
            shard = self._opened(number)
            for block in range(start // block_tokens, (start + length - 1) // block_tokens + 1):
                if not shard.checked.blocks[block]:
                    self._check(number, shard, block)
            data = self._bytes_at(number, shard, start * width, length * width)
            if len(data) < length * width:
                raise self._wrong_size(number, os.fstat(shard.file.fileno()).st_size)
            out[row] = np.frombuffer(data, self._dtype)
        return out

    def check_shard(self, number: int, *, blocks: bool) -> None:
        """Check size and block hashes of a shard, and with `blocks` every byte of it. Raises DataError."""
        shard = self._opened(number)
        for block in range(len(shard.checked.blocks) if blocks else 0):
            if not shard.checked.blocks[block]:
                self._check(number, shard, block)

    def survey(self, number: int) -> list[DamagedTokens]:
        """Return all damage of a shard: runs of damaged blocks; the whole shard if it cannot be read, or if no block is
        sound, as in a shard of another build. Raises the DataError of a disk that does not answer."""
        tokens, found = self.manifest.shards[number].tokens, []
        try:
            shard = self._opened(number)
        except DataError as error:
            return [DamagedTokens(number, 0, tokens, of_damage(error))]
        for block in range(len(shard.checked.blocks)):
            try:
                self._check(number, shard, block)
            except DataError as error:
                begin = block * self._block_tokens
                end = min(begin + self._block_tokens, tokens)
                last = found[-1] if found else None
                if last and (last.end, last.error.code) == (begin, of_damage(error).code):
                    found[-1] = DamagedTokens(number, last.begin, end, last.error)
                else:
                    found.append(DamagedTokens(number, begin, end, of_damage(error)))
        return found

    def _opened(self, number: int) -> _OpenShard:
        """Return the open shard. If its file was written to since it was checked, nothing of it counts as checked."""
        shard = self._open.get(number) or self._open_shard(number)
        self._open.move_to_end(number)
        status = os.fstat(shard.file.fileno())
        if (stamp := (status.st_mtime_ns, status.st_size)) != shard.checked.stamp:
            if status.st_size != (expected := self.manifest.shards[number].tokens * self._dtype.itemsize):
                raise self._wrong_size(number, status.st_size)
            shard.checked.blocks[:] = bytes(-(-expected // self.manifest.block_bytes))
            shard.checked.stamp = stamp
        return shard

    def _open_shard(self, number: int) -> _OpenShard:
        shard = self.manifest.shards[number]
        path = self.folder / f"{shard.name}.tokens"
        blocks = -(-shard.tokens * self._dtype.itemsize // self.manifest.block_bytes)
        try:
            digests = self.retries.read((self.folder / f"{shard.name}.blocks").read_bytes)
            file = self.retries.read(lambda: path.open("rb", buffering=0))
        except OSError as error:
            raise self._unreadable(number, error) from None
        if (size := os.fstat(file.fileno()).st_size) != shard.tokens * self._dtype.itemsize:
            raise self._wrong_size(number, size)
        if hashlib.sha256(digests).hexdigest() != shard.blocks_sha256 or len(digests) != 32 * blocks:
            raise DataError(
                "E-SHARD-HASH",
                f"shard {shard.name}: the block hashes in {shard.name}.blocks differ from those that were built",
                rule="the manifest holds the SHA-256 of .blocks",
                fix=_FIX,
                shard=shard.name,
                path=str(path.with_suffix(".blocks")),
            )
        opened = _OpenShard(file, digests, self._checked.setdefault(number, _Checked(bytearray(blocks))))
        self._open[number] = opened
        if len(self._open) > self.open_shards:
            self._open.popitem(last=False)
        return opened

    def _wrong_size(self, number: int, size: int) -> DataError:
        shard, width = self.manifest.shards[number], self._dtype.itemsize
        path, expected = self.folder / f"{shard.name}.tokens", shard.tokens * width
        other = {2: "uint32", 4: "uint16"}[width]
        known = f": as many tokens of {other}" if size * width == expected * np.dtype(other).itemsize else ""
        return DataError(
            "E-SHARD-SIZE",
            f"shard {shard.name}: {path} has {size:,} bytes, not {expected:,}{known}",
            rule=f"the manifest lists {shard.tokens:,} tokens of {self.manifest.dtype}",
            fix=_FIX,
            shard=shard.name,
            path=str(path),
            bytes=size,
            expected=expected,
        )

    def _unreadable(self, number: int, error: OSError) -> DataError:
        shard = self.manifest.shards[number]
        path = self.folder / f"{shard.name}.tokens"
        missing = isinstance(error, FileNotFoundError)
        return DataError(
            "E-SHARD-MISSING" if missing else "E-SHARD-READ",
            f"shard {shard.name}: {error.filename or path} cannot be read ({error.strerror})",
            rule="every shard in the manifest is in its folder, on storage that answers",
            fix=_FIX if missing else f"check the storage; {_FIX}",
            shard=shard.name,
            path=str(path),
        )

    def _check(self, number: int, shard: _OpenShard, block: int) -> None:
        """Compare a block with its hash, and its tokens with the vocabulary."""
        shard.checked.blocks[block] = 0
        first, tokens = block * self._block_tokens, self.manifest.shards[number].tokens
        at, size = first * self._dtype.itemsize, min(self._block_tokens, tokens - first) * self._dtype.itemsize
        read, name = self._bytes_at(number, shard, at, size), self.manifest.shards[number].name
        path = f"{self.folder / name}.tokens"
        if hashlib.sha256(read).digest() != shard.digests[32 * block : 32 * block + 32]:
            raise DataError(
                "E-SHARD-HASH",
                f"shard {name}: block {block} (bytes {at:,} to {at + size:,} of {path}) has a different SHA-256 than "
                "when it was built",
                rule="training reads only tokens that are unchanged since they were built",
                fix=_FIX,
                shard=name,
                path=path,
                block=block,
            )
        ids = np.frombuffer(read, self._dtype)
        if int(ids.max()) >= self.manifest.vocab_size:
            where = int(np.argmax(ids >= self.manifest.vocab_size))
            raise DataError(
                "E-SHARD-TOKEN-ID",
                f"shard {name}: token {first + where:,} in block {block} of {path} is {ids[where]:,}, but the "
                f"vocabulary has {self.manifest.vocab_size:,} tokens",
                rule="a token is below vocab_size of the manifest; the block has the hash with which it was built, so "
                "it was built with another tokenizer or dtype",
                fix=_FIX,
                shard=name,
                path=path,
                block=block,
                token=int(ids[where]),
                vocab_size=self.manifest.vocab_size,
            )
        shard.checked.blocks[block] = 1

    def _bytes_at(self, number: int, shard: _OpenShard, offset: int, size: int) -> bytearray:
        try:
            return self.retries.read(lambda: _read_at(shard.file, offset, size))
        except OSError as error:
            raise self._unreadable(number, error) from None


def of_damage(error: DataError) -> DataError:
    """Return `error` if it names damaged tokens. Raises it if it does not."""
    if error.code not in DAMAGE:
        raise error
    return error


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
