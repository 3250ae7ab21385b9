"""Named random streams: one seed, and every consumer draws from its own stream.

A stream depends on the seed and its names alone, so no consumer shifts the numbers of another, on any number of ranks.
"""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream `names` under `seed`; equal arguments give equal seeds everywhere."""
    text = "\0".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
