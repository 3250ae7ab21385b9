"""One published run as a dictionary in which any value can be missing or of an unexpected type."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import DataError, DataMissing

_FIRST_YEARS = {"v100": 2020, "a100": 2021, "b200": 2025, "gb200": 2025, "b300": 2025, "gb300": 2025}
_FIX = "correct the file, or leave it out to score the rows that the package ships"
_RULE = 'a file of published runs is JSON: {"rows": [{"id", "family", "model", "cluster", "plan", "measured"}, ...]}'


@dataclass(frozen=True)
class PublishedRow:
    """A row of a file of published runs."""

    id: str
    family: str
    values: Mapping[str, Any]

    def value(self, *path: str) -> Any:
        """Return the value at `path`, values[path[0]][path[1]]..., or None if it is missing."""
        found: Any = self.values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, *path: str) -> float | None:
        """Return the number at `path`, or None unless it is positive and finite, as all figures of a run are."""
        found = self.value(*path)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if math.isfinite(found) and found > 0 else None

    def count(self, *path: str) -> int | None:
        """Return the number at `path` rounded to a whole number, or None unless it is positive."""
        found = self.number(*path)
        return round(found) if found is not None and round(found) > 0 else None

    def flag(self, *path: str) -> bool | None:
        found = self.value(*path)
        return found if isinstance(found, bool) else None

    def text(self, *path: str) -> str:
        """Return the string at `path` in lower case, or "" if it is missing or not a string."""
        found = self.value(*path)
        return found.lower() if isinstance(found, str) else ""

    @property
    def words(self) -> str:
        """All prose of the row, in lower case: id, family, source, table, note, network and address.

        Quotations in the note are left out: they explain terms of the source and do not describe this row.
        """
        note = re.sub(r"'[^']*'", " ", self.text("note"))
        parts = (self.id.lower(), self.family.lower(), self.text("source"), self.text("table"), note)
        return " | ".join((*parts, self.text("inter"), self.text("url")))

    @property
    def year(self) -> int:
        """The year of the software: the one that the source states, otherwise the year when the hardware was new."""
        named = re.search(r"\b(?:container|summary|nemo)[- ]?(\d\d)\.\d\d", self.words)
        if named:
            return 2000 + int(named[1])
        dated = [int(found) for found in re.findall(r"20[12]\d", self.words)]
        return dated[0] if dated else _FIRST_YEARS.get(re.sub(r"[^a-z0-9].*", "", self.text("cluster", "gpu")), 2024)


def read_rows(path: str | Path) -> list[PublishedRow]:
    """Read a file of published runs. Rows without an id are named row-N.

    Raises DataMissing if the file cannot be read, DataError if it is not JSON with a list of rows.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataMissing(
            "E-ROWS-MISSING",
            f"cannot read {path}: {error.strerror}",
            rule=_RULE,
            fix="give the path of a readable file",
            path=str(path),
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError("E-ROWS-SYNTAX", f"{path} is not JSON: {error}", rule=_RULE, fix=_FIX, path=str(path)) from None
    rows = data.get("rows") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not all(isinstance(values, Mapping) for values in rows):
        raise DataError("E-ROWS-SHAPE", f"{path} has no list of rows", rule=_RULE, fix=_FIX, path=str(path))
    if not rows:
        raise DataError("E-ROWS-SHAPE", f"{path} has no rows", rule=_RULE, fix=_FIX, path=str(path))
    return [_row(values, number) for number, values in enumerate(rows)]


def _row(values: Mapping[str, Any], number: int) -> PublishedRow:
    name, family = values.get("id"), values.get("family")
    return PublishedRow(
        id=name if isinstance(name, str) and name else f"row-{number}",
        family=family if isinstance(family, str) and family else "unnamed",
        values=values,
    )
