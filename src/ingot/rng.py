"""Named random streams: one seed, and every consumer draws from its own stream.

No consumer can shift another's numbers, on any number of ranks: a stream depends on the seed and its names alone.
"""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names` under `seed`: the same arguments give the same value everywhere."""
    text = "\0".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
