"""Junk that fluent-text rules let through: encoded data, broken encodings, text written to machines or by bad ones.

Each rule is a measure with a threshold, and is meant to be right when it drops rather than to find everything:

    junk.encoded             base64, hex, escapes, minified code: share of the characters
    junk.mojibake            UTF-8 read as something else, replacement characters: share of the characters
    junk.mixed_script        words of Latin and Cyrillic or Greek letters: share of the words
    junk.injection           text that gives orders to language models: a score, see injection.py
    junk.machine_translated  phrases and remains that only bad translation or article spinning leaves: how many
    junk.keyword_stuffing    lists in which most entries repeat one word: share of the entries
    junk.placeholder         template fields and lorem ipsum: share of the characters

A normal page costs a few searches for what each rule cannot do without. What was measured, and what is not caught,
stands in docs/design/junk.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from ingot.data.filters.junk.encoded import MOJIBAKE_SIGNS, encoded, mixed_script, mojibake
from ingot.data.filters.junk.injection import INJECTION_SIGNS, injection
from ingot.data.filters.junk.residue import RESIDUE_SIGNS, keyword_stuffing, machine_translated, placeholder
from ingot.data.filters.junk.signs import Signs
from ingot.schema.document import Document, Drop

__all__ = ["Junk", "JunkRules"]

# Name -> measure of the text, which also gets it as UTF-8 in lower case (of ASCII letters), and which of SIGNS are in
# that: searching bytes costs the same whatever the script, and `str.lower` of a page that is not ASCII alone would cost
# more than all rules.
MEASURES: dict[str, Callable[[str, bytes, list[bytes]], float]] = {
    "encoded": encoded,
    "mojibake": mojibake,
    "mixed_script": mixed_script,
    "injection": injection,
    "machine_translated": machine_translated,
    "keyword_stuffing": keyword_stuffing,
    "placeholder": placeholder,
}
SIGNS = Signs((*MOJIBAKE_SIGNS, *INJECTION_SIGNS, *RESIDUE_SIGNS))


@dataclass(frozen=True, kw_only=True)
class JunkRules:
    """A document whose measure reaches a threshold is dropped; 0 switches a rule off."""

    enabled: bool = True
    encoded: float = 0.2
    mojibake: float = 0.01
    mixed_script: float = 0.02
    injection: float = 3.0
    machine_translated: int = 2
    keyword_stuffing: float = 0.3
    placeholder: float = 0.1

    def problems(self):
        for name in MEASURES:
            value = getattr(self, name)
            most = 1 if name not in ("injection", "machine_translated") else 100
            if not 0 <= value <= most:
                yield name, f"is {value}, must be in [0, {most}]"


class Junk:
    """Stage with the rules junk.encoded ... junk.placeholder; the first that applies is named."""

    name = "junk"

    def __init__(self, rules: JunkRules | None = None):
        self.rules = rules or JunkRules()
        self._measures = [(name, measure, getattr(self.rules, name)) for name, measure in MEASURES.items()]
        self._measures = [(name, measure, most) for name, measure, most in self._measures if most]

    @property
    def ran(self) -> str:
        on = [f"{name} < {most:g}" for name, _, most in self._measures]
        off = [
            field.name for field in fields(self.rules) if field.name in MEASURES and not getattr(self.rules, field.name)
        ]
        return ", ".join(on) + (f"; off: {', '.join(off)}" if off else "")

    def __call__(self, document: Document) -> Drop | None:
        text = document.text
        data = text.encode("utf-8", "surrogatepass").lower()
        signs = SIGNS.found_in(data)
        for name, measure, most in self._measures:
            value = measure(text, data, signs)
            if value >= most:
                return Drop(self.name, f"junk.{name}", f"{value:.3g} >= {most:g}")
        return None
