"""Named random streams: one seed, and every consumer draws from its own stream.

A stream depends only on the seed and its names, so no consumer changes the numbers of another, on any number of ranks.
"""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream `names` under `seed`; equal arguments give equal seeds everywhere."""
    text = "\0".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
