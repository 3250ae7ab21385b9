"""A mutant: one planted fault in the source, as data."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one file that runs on in silence, and the tests that have to see it.

    what: the fault, in words. file: the changed file, below the package. before: a text that occurs in it exactly once.
    after: the text in its place. tests: files or node ids of pytest, few and fast, some of them red with the change.
    survives: the reason why no test can see the change; a mutant with a reason has to survive.
    """

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    survives: str = ""


class DoesNotApplyError(Exception):
    """The text that a mutant replaces does not occur exactly once."""


def changed_text(package: Path, mutant: Mutant) -> str:
    """Return the text of the mutant's file with the change. Raises DoesNotApplyError."""
    path = package / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (count := text.count(mutant.before)) != 1:
        found = f"occurs {count} times" if text else "has no file"
        raise DoesNotApplyError(f"its text {found} in {mutant.file}")
    if mutant.before == mutant.after:
        raise DoesNotApplyError("the change is empty")
    return text.replace(mutant.before, mutant.after)
