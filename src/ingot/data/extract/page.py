"""A page as flat arrays: one row per element and per piece of text, in document order.

The rows of everything inside element `i` are `i + 1 .. end[i]`, so a sum over any part of the page is two look-ups in
a running sum.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from ingot.data.extract import page_reference
from ingot.data.extract.tags import tag_rules
from ingot.data.extract.vocabulary import name_tables, word_tables
from ingot.data.native import compiled

FINE, TOO_DEEP, TOO_MANY = range(3)
COLUMNS = {
    "tag": np.uint8, "flags": np.uint64, "parent": np.int32, "end": np.int32, "depth": np.int32,
    "start": np.int32, "stop": np.int32, "chars": np.int32, "marks": np.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """Arrays [rows]; see the module.

    html: UTF-8. status: FINE, or TOO_DEEP or TOO_MANY, where the rows stop. tag: index into tags.NAMES, 0 for text.
    flags: vocabulary.Mark. parent: row, or -1. end: the row behind the last one inside. depth: number of elements
    around. start, stop: bytes of the text, of a raw element's content, or of an element's attributes. chars: of text,
    without white space; an ideograph counts as two, a character reference as one. marks: punctuation that sentences
    have (.,!?;: and their counterparts in other scripts).
    """

    html: bytes
    status: int
    tag: np.ndarray
    flags: np.ndarray
    parent: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    chars: np.ndarray
    marks: np.ndarray


def parse_page(html: bytes, max_depth: int = 1000, max_nodes: int = 1_000_000) -> Page:
    """The rows of `html` (UTF-8, or nearly: bytes that are not count as characters), in linear time."""
    native = compiled("_page")
    if native is None:
        status, *columns = page_reference.parse(html, max_depth, max_nodes)
        arrays = [np.array(column, kind) for column, kind in zip(columns, COLUMNS.values(), strict=True)]
    else:
        status, *columns = native.parse(html, _tables(), max_depth, max_nodes)
        arrays = [np.frombuffer(column, kind) for column, kind in zip(columns, COLUMNS.values(), strict=True)]
    return Page(html, status, *arrays)


@cache
def _tables() -> object:
    """The compiled parser's own copy of the tables."""
    native = compiled("_page")
    assert native is not None
    arrays = (*name_tables(), tag_rules(), *word_tables())
    return native.tables(*(np.ascontiguousarray(array).tobytes() for array in arrays))
