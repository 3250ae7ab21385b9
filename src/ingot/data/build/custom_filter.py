"""The stage of a filter of a plug-in: every call is checked, and a document on which it raises is dropped."""

from typing import cast

from ingot.data.guard import PluginCalls, broken_contract, wrong_notes
from ingot.data.parts import Table, created, in_words, settings_of
from ingot.plugins.filters import DocumentStage, Filter
from ingot.schema.corpus import Document, Drop


def checked_stage(part: Filter, table: Table | None) -> "CheckedStage":
    """Create the stage of `part` with the settings in `table`. Raises ConfigError if that fails."""
    words = in_words("filter", part.name)
    stage = created("filter", part.name, part.make, settings_of("filter", part.name, table))
    ran = getattr(stage, "ran", None)
    if not (callable(stage) and getattr(stage, "name", None) == part.name and isinstance(ran, str)):
        found = f"creates {type(stage).__name__} {getattr(stage, 'name', '')!r} with ran = {ran!r}"
        rule = f"`make` returns an object with name = {part.name!r}, a text `ran`, and __call__(document)"
        raise broken_contract(words, found, rule)
    return CheckedStage(part, cast(DocumentStage, stage), ran, words)


class CheckedStage:
    """A stage of a plug-in. Rules: those of the plug-in, and NAME.plugin for a document on which it raised."""

    def __init__(self, part: Filter, stage: DocumentStage, ran: str, words: str):
        self.name, self.ran = part.name, ran
        self._rules, self._stage, self._calls = frozenset(part.rules), stage, PluginCalls(words, part.name)

    def __call__(self, document: Document) -> Drop | None:
        before = document.text, document.language, dict(document.notes)
        try:
            drop = self._stage(document)
        except Exception as error:
            document.text, document.language, document.notes = before  # the dropped document is recorded with them
            return self._calls.raised(error)
        self._calls.returned()
        if drop is not None and not self._is_own(drop):
            rules = ", ".join(self._rules) or "none"
            rule = (
                f"the result is None or Drop({self.name!r}, RULE, value); the rules are {rules} (`rules` of the part)"
            )
            raise broken_contract(self._calls.part, f"returned {drop!r}"[:300], rule)
        if wrong := self._wrong(document):
            raise broken_contract(
                self._calls.part, f"left {wrong}", "text and language are str; notes are text and numbers"
            )
        return drop

    def _is_own(self, drop: object) -> bool:
        return (
            isinstance(drop, Drop)
            and drop.stage == self.name
            and drop.rule in self._rules
            and isinstance(drop.value, str)
        )

    @staticmethod
    def _wrong(document: Document) -> str:
        for field in ("text", "language"):
            if not isinstance(getattr(document, field), str):
                return f"{type(getattr(document, field)).__name__} as `{field}`"
        return wrong_notes(document)
