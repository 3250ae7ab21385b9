"""Kinds of personal data: how they are found in a text, and what replaces them."""

from dataclasses import dataclass

from ingot.plugins.registry import Part, Reference, Registry


@dataclass(frozen=True, kw_only=True)
class PiiKind(Part):
    """A kind of personal data, searched for if `pii.kinds` names it.

    find(text, settings): yields spans (start, end) of the text, 0 <= start < end <= len(text). The spans of one kind do
      not overlap. Where two kinds overlap, ids are kept first, then kinds of plug-ins, e-mail, IP, card, phone.
      It takes time linear in the text. settings: an instance of `settings`, from [pii_kind.NAME] of the recipe; None
      without settings.
    placeholder: the text that replaces a span, like "<BADGE>". The number of spans is in the note pii_badge.
    """

    find: Reference
    placeholder: str


PII_KINDS = Registry(
    "kind of personal data",
    "pii.kinds",
    (
        PiiKind(name="email", find="ingot.data.pii:find_email", placeholder="<EMAIL>"),
        PiiKind(name="phone", find="ingot.data.pii:find_phone", placeholder="<PHONE>"),
        PiiKind(name="card", find="ingot.data.pii:find_card", placeholder="<CARD>"),
        PiiKind(name="ip", find="ingot.data.pii:find_ip", placeholder="<IP>"),
    ),
)
