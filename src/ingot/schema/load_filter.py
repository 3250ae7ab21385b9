"""The settings of the filter of windows when they are read, [data.filter] (docs/damaged_data.md)."""

from dataclasses import dataclass

from ingot.ranges import Share, Tokens


@dataclass(frozen=True, kw_only=True)
class LoadFilter:
    """The filter of windows in training. A window that fails is replaced as damaged ones are.

    ngram: the number of tokens in an n-gram. max_repeated: the largest share of a window's n-grams that may have
      occurred in it before; 1: any.
    max_broken: the largest share of a window's characters that may be replacement characters (U+FFFD); 1: any.
    """

    ngram: Tokens = 8
    max_repeated: Share = 1.0
    max_broken: Share = 1.0

    @property
    def is_on(self) -> bool:
        return self.max_repeated < 1 or self.max_broken < 1
