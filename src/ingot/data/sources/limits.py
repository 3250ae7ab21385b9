"""Caps that make every input cost bounded memory: what is larger is one dropped document with a reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """block_bytes: one record, line or row as stored, after the compression of the file is undone. body_bytes: the
    body of a page after its own decoding, or one file of text. header_bytes: headers of WARC, HTTP or tar.
    file_bytes: one file of source code (longer ones are data).

    ratio: how many times its packed size something may inflate to; it counts above `ratio_floor_bytes`, because short
    repetitive pages honestly reach several hundred.
    """

    block_bytes: int = 32 << 20
    body_bytes: int = 64 << 20
    header_bytes: int = 64 << 10
    file_bytes: int = 1 << 20
    ratio: int = 200
    ratio_floor_bytes: int = 4 << 20
