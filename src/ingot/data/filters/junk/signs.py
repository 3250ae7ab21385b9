"""Which of a few short byte strings a text holds, found in one pass: the rules look further only where one is."""

from array import array
from collections.abc import Iterable

from ingot.data.native import compiled

_MOST, _PLACES = 64, 3


class Signs:
    """signs: at most 64, each of at least two bytes."""

    def __init__(self, signs: Iterable[bytes]):
        self.signs = tuple(sorted(set(signs)))
        if len(self.signs) > _MOST or min(map(len, self.signs)) < 2:
            raise ValueError(f"{len(self.signs)} signs, must be at most {_MOST} of two bytes or more")
        # For each of the first three bytes, and each value of it: a bit for every sign that allows it there.
        masks = array("Q", bytes(8 * 256 * _PLACES))
        for number, sign in enumerate(self.signs):
            for place in range(_PLACES):
                for byte in sign[place : place + 1] or range(256):
                    masks[256 * place + byte] |= 1 << number
        self._masks = masks.tobytes()

    def found_in(self, data: bytes) -> list[bytes]:
        """The signs in `data`."""
        module = compiled("_quality")
        return module.signs(data, self.signs, self._masks) if module else self.plain_found_in(data)

    def plain_found_in(self, data: bytes) -> list[bytes]:
        """The reference of `found_in`."""
        return [sign for sign in self.signs if sign in data]
