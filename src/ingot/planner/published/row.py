"""One published run as a dictionary in which anything may be missing or of an unexpected type."""

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
        """Return values[path[0]][path[1]].., or None if it is missing."""
        found: Any = self.values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, *path: str) -> float | None:
        """Return a positive finite number, else None: no figure of a run is zero or negative."""
        found = self.value(*path)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if math.isfinite(found) and found > 0 else None

    def count(self, *path: str) -> int | None:
        """Return a positive whole number, else None."""
        found = self.number(*path)
        return round(found) if found is not None and round(found) > 0 else None

    def flag(self, *path: str) -> bool | None:
        found = self.value(*path)
        return found if isinstance(found, bool) else None

    def text(self, *path: str) -> str:
        """Return the text in lower case, or ""."""
        found = self.value(*path)
        return found.lower() if isinstance(found, str) else ""

    @property
    def words(self) -> str:
        """All prose of the row, lower case.

        Quotations in a note explain the source's own words and are left out, because they do not describe this row.
        """
        note = re.sub(r"'[^']*'", " ", self.text("note"))
        parts = (self.id.lower(), self.family.lower(), self.text("source"), self.text("table"), note)
        return " | ".join((*parts, self.text("inter"), self.text("url")))

    @property
    def year(self) -> int:
        """The year of the software: as its source states, or when its hardware was new."""
        named = re.search(r"\b(?:container|summary|nemo)[- ]?(\d\d)\.\d\d", self.words)
        if named:
            return 2000 + int(named[1])
        dated = [int(found) for found in re.findall(r"20[12]\d", self.words)]
        return dated[0] if dated else _FIRST_YEARS.get(re.sub(r"[^a-z0-9].*", "", self.text("cluster", "gpu")), 2024)


def read_rows(path: str | Path) -> list[PublishedRow]:
    """Read a file of published runs. Rows without an id get a number.

    Raises DataMissing for a file that cannot be read, DataError for one with other content.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataMissing(
            "E-ROWS-MISSING",
            f"cannot read {path}: {error.strerror}",
            rule=_RULE,
            fix="give the path of a file",
            path=str(path),
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError("E-ROWS-SYNTAX", f"{path} is no JSON: {error}", rule=_RULE, fix=_FIX, path=str(path)) from None
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
