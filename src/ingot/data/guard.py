"""Calls of code of plug-ins: what it raises drops one document, and what breaks its contract ends the build."""

from pathlib import Path

from ingot.errors import ConfigError, DataError, IngotError
from ingot.plugins.load import last_line, place_of
from ingot.schema.corpus import Document, Drop

FIRST_DOCUMENTS = 20  # if a part of a plug-in raises on each of the first ones of an input, the build ends
RULE = "plugin"  # the last part of the rule's name in drops of documents on which a plug-in raised
_VALUE_CHARACTERS = 300


class PluginCalls:
    """The calls of one part of a plug-in in the documents of one input.

    part: the part in words, "filter 'domain' of plug-in domain_filter". stage: the stage that drops the documents.
    """

    def __init__(self, part: str, stage: str):
        self.part, self.stage = part, stage
        self._raised_at_start = 0

    def returned(self) -> None:
        """Note that a call did not raise."""
        self._raised_at_start = -1

    def raised(self, error: Exception) -> Drop:
        """Return the Drop of a document on which the part raised `error`.

        Raises DataError if it raised on each of the first documents; MemoryError and E-DATA-PLUGIN-RESULT as they are.
        """
        if isinstance(error, MemoryError) or is_broken_contract(error):
            raise error
        if self._raised_at_start >= 0:
            self._raised_at_start += 1
        if self._raised_at_start >= FIRST_DOCUMENTS:
            file, line = place_of(error)
            raise DataError(
                "E-DATA-PLUGIN-RAISED",
                f"{self.part} raised on each of the first {FIRST_DOCUMENTS} documents: {failure(error)}",
                rule="a document on which a plug-in raises is dropped; a plug-in that raises on all of them is broken",
                fix=f"correct {file or 'the plug-in'}; the same command continues",
                part=self.part,
                file=file,
                line=line,
            ) from None
        return Drop(self.stage, f"{self.stage}.{RULE}", failure(error)[:_VALUE_CHARACTERS])


def failure(error: BaseException) -> str:
    """Return type, message, file and line of an error of a plug-in. The file has no folder: corpora do not name it."""
    file, line = place_of(error)
    text = error.found if isinstance(error, IngotError) else last_line(error)
    return f"{text} ({Path(file).name}:{line})" if file else text


def broken_contract(part: str, found: str, rule: str) -> ConfigError:
    """Return the error for a part that returned something other than its contract allows."""
    return ConfigError(
        "E-DATA-PLUGIN-RESULT",
        f"{part} {found}",
        rule=rule,
        fix="correct the plug-in; the same command continues",
        part=part,
    )


def wrong_notes(document: Document) -> str:
    """Return a description of the first note that corpora cannot hold, "" if there is none."""
    if not isinstance(document.notes, dict):
        return f"{type(document.notes).__name__} as `notes` instead of a dict"
    for name, value in document.notes.items():
        if not (isinstance(name, str) and isinstance(value, str | int | float)):
            return f"the note {name!r} = {value!r}, which is neither text nor a number"[:200]
    return ""


def is_broken_contract(error: Exception) -> bool:
    return isinstance(error, IngotError) and error.code == "E-DATA-PLUGIN-RESULT"
