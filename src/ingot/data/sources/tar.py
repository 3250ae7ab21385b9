"""The members of a tar stream in order: names, sizes, contents up to a limit. Nothing is written anywhere.

Not the standard library's tarfile: that keeps every member in memory, reads extended headers of any size, and gives
up at the first bad header. Known are ustar, the long names of GNU and the paths and sizes of pax (POSIX.1-2001);
checksums are verified, and behind a bad header the search goes on for the next good one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.data.sources.limits import Limits
from ingot.data.sources.unpack import BadStream, Unpacked

BLOCK_BYTES = 512
_FILES = b"0\x007"
_FOLDER = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_LINKS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


@dataclass(frozen=True, slots=True)
class Entry:
    """name: as written in the archive; a label, never a path to write to. content: of a regular file, at most one byte
    more than asked for. other: what it is instead of a file, or what is wrong at `offset`."""

    offset: int
    name: str
    content: bytes = b""
    size: int = 0
    other: str = ""
    damage: bool = False


def read_tar(stream: Unpacked, max_bytes: int, limits: Limits) -> Iterator[Entry]:
    """Every member but folders; damage as an Entry of its own. Raises BadStream for a stream that ends too early."""
    offset, lost = 0, -1
    name, size = "", None  # from an extended header, for the next member
    while block := stream.exactly(BLOCK_BYTES):
        start, offset = offset, offset + len(block)
        if not block.strip(b"\0"):
            continue  # the end of an archive; another one may follow
        header = _header(block)
        if header is None:
            if lost < 0:
                lost = start
                yield Entry(start, "", other="no tar header", damage=True)
            continue
        lost = -1
        kind, own_name, own_size = header
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            text = stream.exactly(own_size) if own_size <= limits.header_bytes else b""
            missing = own_size - len(text) - stream.skip(own_size - len(text))
            offset += _padded(own_size)
            stream.skip(_padded(own_size) - own_size)
            if missing:
                raise BadStream("truncated_file", f"offset {start}: the archive is cut in a header")
            if own_size > limits.header_bytes:
                yield Entry(start, "", other=f"an extended header of {own_size} bytes", damage=True)
            elif kind == _LONG_NAME:
                name = text.rstrip(b"\0").decode("utf-8", "replace")
            elif kind == _PAX:
                values = _pax(text)
                name = values.get("path", name)
                size = int(values["size"]) if values.get("size", "").isdigit() else size
            continue
        label, count = name or own_name, own_size if size is None else size
        name, size = "", None
        if kind in _FILES and not label.endswith("/"):  # such a name was a folder before POSIX had a type for it
            content = stream.exactly(min(count, max_bytes + 1))
            if len(content) + stream.skip(count - len(content)) < count:
                raise BadStream("truncated_file", f"offset {start}: the archive is cut inside of {label[:80]}")
            yield Entry(start, label, content, count)
        elif kind != _FOLDER and kind not in _FILES:
            count = 0 if kind in _LINKS else count
            stream.skip(count)
            yield Entry(start, label, other=_LINKS.get(kind, f"a member of type {kind!r}"))
        else:
            count = 0
        offset += _padded(count)
        stream.skip(_padded(count) - count)


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _header(block: bytes) -> tuple[bytes, str, int] | None:
    """(type, name, bytes of content), or None for what is no header."""
    if len(block) < BLOCK_BYTES:
        return None
    checksum = _number(block[148:156])
    if checksum != sum(block[:148]) + 8 * ord(" ") + sum(block[156:]):
        return None
    size = _number(block[124:136])
    if size is None:
        return None
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return block[156:157], (prefix + b"/" + name if prefix else name).decode("utf-8", "replace"), size


def _number(field: bytes) -> int | None:
    """Octal digits, or GNU's binary form of large numbers; None for neither, and for negative ones."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
        return value if value < 1 << 62 else None
    digits = field.strip(b"\0 ")
    return int(digits or b"0", 8) if all(digit in b"01234567" for digit in digits) else None


def _pax(text: bytes) -> dict[str, str]:
    """The records "LENGTH key=value" of an extended header, as far as they are well-formed."""
    values = {}
    while text:
        digits, space, _ = text.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 6 or not 0 < int(digits) <= len(text):
            break
        key, equals, value = text[len(digits) + 1 : int(digits)].rstrip(b"\n").partition(b"=")
        if equals:
            values[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        text = text[int(digits) :]
    return values
