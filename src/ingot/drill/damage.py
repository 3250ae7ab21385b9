"""Damage to files, as disks do it: a wrong bit, a file that ends too early. No torch."""

from pathlib import Path
from random import Random


def flip(file: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file. offset: of its byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def flip_in_place(file: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file that others may read now. offset: of its byte."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))


def flip_any(file: Path, random: Random) -> str:
    """Flip a random bit of a file. Returns its place, for people."""
    offset, bit = random.randrange(file.stat().st_size), random.randrange(8)
    flip(file, offset, bit)
    return f"bit {bit} of byte {offset:,} of {file.name}"


def cut(file: Path, random: Random) -> str:
    """Cut a file at a random place. Returns what is left, for people."""
    size = file.stat().st_size
    left = random.randrange(1, size)
    file.write_bytes(file.read_bytes()[:left])
    return f"{file.name} cut after {left:,} of {size:,} bytes"
