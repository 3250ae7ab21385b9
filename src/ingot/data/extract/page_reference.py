"""The tolerant HTML parser in plain Python. It returns the same rows as native/page.c.

This parser is the readable reference, the expected result in tests, and the fallback if the C module is not built.

The parser follows the tokenizer and the tree construction of the HTML standard (sections 13.2.5 and 13.2.6) as far as
they decide which element encloses which text. Deliberate differences: no element is inserted, moved or reopened, so
`<b><p>` stays as written; attributes and text stay as they are in the source, including character references; text is
one row per run between two tags. Time is linear in the input and memory is bounded by `max_nodes`: every open element
stores the stack positions of the enclosing elements that its content can close, so the stack is never searched.
"""

import re
from dataclasses import dataclass
from functools import cache

from ingot.data.extract.tags import BARRIERS, BREAK, GROUPS, OTHER, TEXT, TagRule, tag_rules
from ingot.data.extract.vocabulary import EQUALS, HYPHEN, NAMED, TARGET, ElementMark, name_tables, symbol, word_tables

FINE, TOO_DEEP, TOO_MANY = range(3)
_SPACE = frozenset(b" \n\t\r\f")
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOWER, _UPPER = frozenset(range(ord("a"), ord("z") + 1)), frozenset(range(ord("A"), ord("Z") + 1))
_REFERENCE = _LETTERS | frozenset(b"0123456789")
_NAME_END = _SPACE | frozenset(b"/>")
_MARKS = frozenset(b".,!?;:")
_WIDE_MARKS = tuple(map(str.encode, "、。，！？،؟।"))
_COMMENT_END = re.compile(rb"--!?>")
_NO_BREAK_SPACE = "\xa0".encode()
_LINK = int(ElementMark.LINK)  # on text rows, this flag means that white space precedes the text
_SAME_NAME_STEPS = 16  # an end tag with an unknown name is compared with this many open elements


@cache
def _symbols() -> tuple[list[int], list[int]]:
    """Return two tables from byte to automaton symbol (0: none): for names, and for values (only letters have one)."""
    names, values = [0] * 256, [0] * 256
    for character in "abcdefghijklmnopqrstuvwxyz":
        for byte in (character + character.upper()).encode():
            names[byte] = values[byte] = symbol(character)
    for character in "-0123456789":
        names[ord(character)] = symbol(character)
    return names, values


@cache
def _tables() -> tuple[list[list[int]], list[int], list[list[int]], list[list[int]], list[int]]:
    names, ids = name_tables()
    words, flags = word_tables()
    return names.tolist(), ids.tolist(), tag_rules().tolist(), words.tolist(), flags.tolist()


@dataclass(slots=True)
class _OpenElement:
    """An open element, with the stack positions ("places") of the enclosing elements that its content can close."""

    tag: int
    node: int
    name: bytes
    same: int  # place on the stack of the next outer open element with the same tag, or -1
    nearest: list[int]  # by group: place of the innermost open element of the group that no barrier hides, or -1
    barriers: list[int]  # by barrier: place of the innermost open element that is this barrier, or -1
    pre: bool
    foreign: bool


class _PageParser:
    def __init__(self, html: bytes, max_depth: int, max_nodes: int):
        self.html, self.max_depth, self.max_nodes = html, max_depth, max_nodes
        self.names, self.ids, self.tags, self.words, self.word_flags = _tables()
        self.stack: list[_OpenElement] = []
        self.last = [-1] * 256  # by tag: place of the innermost open element
        self.unclosed: set[int] = set()  # tags of raw elements without an end tag from here on
        self.space = False  # white space was passed over since the last text row
        self.status = FINE
        self.tag, self.flags, self.parent, self.end, self.depth = [], [], [], [], []
        self.start, self.stop, self.chars, self.marks = [], [], [], []

    def parse(self) -> None:
        html, length = self.html, len(self.html)
        at = text = 0
        while self.status == FINE:
            at = html.find(b"<", at)
            if at < 0 or at + 1 >= length:
                break
            following = html[at + 1]
            if following not in _LETTERS and following not in b"/!?":
                at += 1
                continue
            self.add_text(text, at)
            if self.status != FINE:
                break
            if following in _LETTERS:
                at = self.start_tag(at + 1)
            elif following == ord("/") and at + 2 < length and html[at + 2] in _LETTERS:
                at = self.end_tag(at + 2)
            elif html.startswith(b"!--", at + 1):
                at = self.comment(at + 4)
            elif html.startswith(b"![CDATA[", at + 1) and self.stack and self.stack[-1].foreign:
                at = self.after(b"]]>", at + 9)
            else:
                at = self.after(b">", at + 1)
            at = text = length if at < 0 else at  # at < 0: the input ends inside a tag or a script
        if self.status == FINE:
            self.add_text(text, length)
        self.pop_to(0)

    # rows and the stack

    def add_row(self, tag: int, flags: int, start: int, stop: int, chars: int = 0, marks: int = 0) -> bool:
        row = len(self.tag)
        if row >= self.max_nodes:
            self.status = TOO_MANY
            return False
        values = (tag, flags, self.stack[-1].node if self.stack else -1, row + 1, len(self.stack), start, stop)
        columns = (self.tag, self.flags, self.parent, self.end, self.depth, self.start, self.stop)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        self.chars.append(chars)
        self.marks.append(marks)
        return True

    def add_text(self, start: int, stop: int) -> None:
        chars, marks = _count(self.html[start:stop])
        if chars or (self.stack and self.stack[-1].pre):
            if self.add_row(TEXT, _LINK if self.space else 0, start, stop, chars, marks):
                self.space = False
        elif stop > start:
            self.space = True

    def push(self, tag: int, name: bytes) -> None:
        rules, member, _, stops, barrier_of, _ = self.tags[tag]
        place, top = len(self.stack), self.stack[-1] if self.stack else None
        nearest = top.nearest[:] if top else [-1] * len(GROUPS)
        barriers = top.barriers[:] if top else [-1] * len(BARRIERS)
        for group in range(len(GROUPS)):
            if stops >> group & 1:
                nearest[group] = -1
            if member >> group & 1:
                nearest[group] = place
        for barrier in range(len(BARRIERS)):
            if barrier_of >> barrier & 1:
                barriers[barrier] = place
        pre = bool(rules & TagRule.PRE) or (top is not None and top.pre)
        foreign = bool(rules & TagRule.FOREIGN) or (top is not None and top.foreign)
        self.stack.append(_OpenElement(tag, len(self.tag) - 1, name, self.last[tag], nearest, barriers, pre, foreign))
        self.last[tag] = place

    def pop_to(self, height: int) -> None:
        while len(self.stack) > height:
            closed = self.stack.pop()
            self.end[closed.node] = len(self.tag)
            self.last[closed.tag] = closed.same

    # Tags: each method takes the position of the name and returns the position after the tag, or -1 at the input's end

    def start_tag(self, at: int) -> int:
        tag, name_stop = self.name(at)
        name = self.html[at:name_stop].lower()
        after, flags, self_closing = self.attributes(name_stop)
        if after < 0:
            return -1
        rules, _, closes, _, _, _ = self.tags[tag]
        if rules & TagRule.ONCE and self.last[tag] >= 0:
            return after
        if self.stack:
            nearest = self.stack[-1].nearest
            closed = [n for group, n in enumerate(nearest) if closes >> group & 1 and n >= 0]
            self.pop_to(min(closed, default=len(self.stack)))
        foreign = bool(self.stack) and self.stack[-1].foreign
        to_end = bool(rules & TagRule.RAW_TO_END)
        if rules & TagRule.RAW and tag not in self.unclosed and (to_end or not foreign):
            stop, name_end = self.raw_end(after, name)
            if stop < 0:
                self.unclosed.add(tag)
                if to_end:
                    self.add_row(tag, flags, after, len(self.html))
                    return -1
            else:
                return self.attributes(name_end)[0] if self.add_row(tag, flags, after, stop) else -1
        if not self.add_row(tag, flags, name_stop, after - 1):
            return -1
        if rules & TagRule.VOID or (self_closing and (foreign or tag == OTHER or rules & TagRule.FOREIGN)):
            return after
        if len(self.stack) >= self.max_depth:
            self.status = TOO_DEEP
            return -1
        self.push(tag, name)
        return after

    def end_tag(self, at: int) -> int:
        tag, name_stop = self.name(at)
        after = self.attributes(name_stop)[0]
        rules, member, _, _, _, barrier = self.tags[tag]
        if after < 0:
            return -1
        if tag == BREAK:  # browsers treat </br> as a line break
            self.add_row(BREAK, 0, name_stop, after - 1)
            return after
        if not self.stack or rules & TagRule.NO_END:
            return after
        place, top = self.last[tag], self.stack[-1]
        if rules & TagRule.HEADING:
            place = max(n for group, n in enumerate(top.nearest) if member >> group & 1)
        elif tag == OTHER:
            name, steps = self.html[at:name_stop].lower(), _SAME_NAME_STEPS
            while place >= 0 and self.stack[place].name != name:
                steps -= 1
                place = self.stack[place].same if steps else -1
        if place >= 0 and place >= top.barriers[barrier]:
            self.pop_to(place)
        return after

    def name(self, at: int) -> tuple[int, int]:
        """Return (tag id, position after the name) of the tag name at `at`."""
        symbols, state = _symbols()[0], 0
        while True:
            state = self.names[state][symbols[self.html[at]]]
            at += 1
            if at >= len(self.html) or self.html[at] in _NAME_END:
                return self.ids[state] or OTHER, at

    def attributes(self, at: int) -> tuple[int, int, bool]:
        """Return (position after '>' or -1, ElementMark flags of all values, True if the tag ends in '/>')."""
        html, length, symbols = self.html, len(self.html), _symbols()[0]
        flags, self_closing = 0, False
        while True:
            while at < length and (html[at] in _SPACE or html[at] == ord("/")):
                self_closing = html[at] == ord("/")
                at += 1
            if at >= length:
                return -1, flags, False
            if html[at] == ord(">"):
                return at + 1, flags, self_closing
            self_closing = False
            name_start, state = at, self.names[0][EQUALS]
            while True:
                state = self.names[state][symbols[html[at]]]
                at += 1
                if at >= length or html[at] in _NAME_END or html[at] == ord("="):
                    break
            name, value = html[name_start:at], b""
            at = self.skip_space(at)
            if at < length and html[at] == ord("="):
                at = self.skip_space(at + 1)
                if at >= length:
                    return -1, flags, False
                if html[at] in b"\"'":
                    quote = html.find(html[at : at + 1], at + 1)
                    if quote < 0:
                        return -1, flags, False
                    value, at = html[at + 1 : quote], quote + 1
                else:
                    start = at
                    while at < length and html[at] not in _SPACE and html[at] != ord(">"):
                        at += 1
                    value = html[start:at]
            kind = self.ids[state]
            if kind == TARGET:
                flags |= _LINK
            elif kind:
                flags |= self.value_flags(name if kind == NAMED else None, value)

    def value_flags(self, name: bytes | None, value: bytes) -> int:
        """Return the ElementMark flags of a value, which is matched as "-name=value=", or "-value-" if name is None."""
        found, joint = 0, HYPHEN if name is None else EQUALS
        symbols = [HYPHEN]
        for run in (value, b" ") if name is None else (name, b" ", value, b" "):
            symbols += _word_symbols(run, joint, symbols[-1])
        state = 0
        for number in symbols:
            state = self.words[state][number]
            found |= self.word_flags[state]
        return found

    def raw_end(self, at: int, name: bytes) -> tuple[int, int]:
        """Return (end of the raw text, position after the name in its end tag), or (-1, -1) without an end tag."""
        html, length = self.html, len(self.html)
        while (at := html.find(b"</", at)) >= 0:
            after = at + 2 + len(name)
            if after < length and html[at + 2 : after].lower() == name and html[after] in _NAME_END:
                return at, after
            at += 1
        return -1, -1

    def comment(self, at: int) -> int:
        """Return the position after the comment whose text starts at `at`."""
        for empty in (b">", b"->"):
            if self.html.startswith(empty, at):
                return at + len(empty)
        end = _COMMENT_END.search(self.html, at)
        return end.end() if end else len(self.html)

    def after(self, pattern: bytes, at: int) -> int:
        found = self.html.find(pattern, at)
        return found + len(pattern) if found >= 0 else len(self.html)

    def skip_space(self, at: int) -> int:
        while at < len(self.html) and self.html[at] in _SPACE:
            at += 1
        return at


def _word_symbols(run: bytes, joint: int, last: int) -> list[int]:
    """Return the symbols of the bytes in `run`: a letter gives the symbol of its lower case, other bytes give `joint`.

    A `joint` is also inserted between a lower-case and an upper-case letter ("aB"). Successive joints become one.
    last: the symbol before the run.
    """
    symbols, result, previous = _symbols()[1], [], 0
    for byte in run:
        if byte in _UPPER and previous in _LOWER:
            result.append(joint)
        previous = byte
        number = symbols[byte] or joint
        if number == joint and last == joint:
            continue
        last = number
        result.append(last)
    return result


def _count(text: bytes) -> tuple[int, int]:
    """Return (characters, punctuation marks) as ParsedPage.chars and ParsedPage.marks count them."""
    chars = marks = at = 0
    while at < len(text):
        byte = text[at]
        if byte < 0x80:
            if byte not in _SPACE:
                chars += 1
                marks += byte in _MARKS
                if byte == ord("&"):
                    at = _after_reference(text, at) - 1
        elif byte >= 0xC0 and not text.startswith(_NO_BREAK_SPACE, at):
            chars += 2 if 0xE3 <= byte <= 0xED or byte == 0xF0 else 1  # ideographs, kana, hangul; emoji
            marks += text.startswith(_WIDE_MARKS, at)
        at += 1
    return chars, marks


def _after_reference(text: bytes, at: int) -> int:
    """Return the position after the character reference at `at`, or after the `&` there if it is not a reference."""
    limit = min(at + 34, len(text))
    start = stop = at + 2 if text.startswith(b"#", at + 1) and at + 1 < limit else at + 1
    while stop < limit and text[stop] in _REFERENCE:
        stop += 1
    return stop + 1 if stop > start and stop < limit and text[stop] == ord(";") else at + 1


def parse(html: bytes, max_depth: int, max_nodes: int) -> tuple:
    """Return (status, tag, flags, parent, end, depth, start, stop, chars, marks): an int and lists, see ParsedPage."""
    parser = _PageParser(html, max_depth, max_nodes)
    parser.parse()
    p = parser
    return p.status, p.tag, p.flags, p.parent, p.end, p.depth, p.start, p.stop, p.chars, p.marks
