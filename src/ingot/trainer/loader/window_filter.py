"""The filter of windows when they are read: repeated n-grams and broken encoding, before a batch is used. No torch.

It sees the tokens of a window alone, so its findings are the same on any rank and at any time. A window that fails is
left out as damaged ones are (loader/quarantine.py).
"""

from collections.abc import Callable

import numpy as np

from ingot.errors import DataError
from ingot.schema.load_filter import LoadFilter
from ingot.trainer.loader.order import mix
from ingot.trainer.loader.reader import DamagedTokens, TokenReader

_BROKEN = "\ufffd"  # the replacement character, also of bytes that are no UTF-8
REPEATS, BROKEN = "E-WINDOW-REPEATS", "E-WINDOW-BROKEN"


class WindowFilter:
    """The rules of `data.filter`. decode: ids -> text, with a replacement character for what is no text; needed for
    `max_broken` alone."""

    def __init__(self, rules: LoadFilter, decode: Callable[[np.ndarray], str] | None):
        self._rules, self._decode = rules, decode

    def findings(self, reader: TokenReader, ids: np.ndarray, tokens: np.ndarray) -> list[DamagedTokens]:
        """Return those of the windows `ids` that fail. tokens: of the windows, int64 [n, seq_len + 1]."""
        rules, decode, found = self._rules, self._decode, []
        for at, share in enumerate(repeated_share(tokens, rules.ngram)) if rules.max_repeated < 1 else ():
            if share > rules.max_repeated:
                what = f"{share:.0%} of its {rules.ngram}-grams come again, more than {rules.max_repeated:.0%}"
                found.append(_finding(reader, int(ids[at]), REPEATS, what))
        for at, row in enumerate(tokens) if rules.max_broken < 1 else ():
            text = decode(row) if decode else ""
            if (share := text.count(_BROKEN) / max(len(text), 1)) > rules.max_broken:
                what = f"{share:.0%} of its characters are broken, more than {rules.max_broken:.0%}"
                found.append(_finding(reader, int(ids[at]), BROKEN, what))
        return found


def repeated_share(tokens: np.ndarray, n: int) -> np.ndarray:
    """Return, for each row of `tokens`, the share of its n-grams that occurred in the row before: float64, [rows]."""
    width = tokens.shape[1] - n + 1
    if width < 2:
        return np.zeros(len(tokens))
    hashes = np.zeros((len(tokens), width), np.uint64)
    for at in range(n):
        hashes = mix(hashes ^ (tokens[:, at : at + width].astype(np.uint64) + np.uint64(1)))
    hashes.sort(axis=1)
    return (hashes[:, 1:] == hashes[:, :-1]).sum(axis=1) / width


def _finding(reader: TokenReader, window: int, code: str, what: str) -> DamagedTokens:
    (number,), (start,) = (one.tolist() for one in reader.windows.locate(np.array([window])))
    shard, length = reader.manifest.shards[number].name, reader.seq_len
    error = DataError(
        code,
        f"shard {shard}, tokens {start:,} to {start + length:,}: {what}",
        rule="windows that fail a rule of data.filter are replaced by others of their source",
        fix="filter such documents when the data are built, or change data.filter",
        shard=shard,
        window=window,
    )
    # Both borders belong to the windows beside it, too.
    return DamagedTokens(number, start + 1, start + length, error)
