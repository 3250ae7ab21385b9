"""One published run: a dictionary in which anything may be missing, or be something else than expected."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import DataError, DataMissing

_FIRST_YEARS = {"v100": 2020, "a100": 2021, "b200": 2025, "gb200": 2025, "b300": 2025, "gb300": 2025}
_RULE = 'a file of published runs is JSON: {"rows": [{"id", "family", "model", "cluster", "plan", "measured"}, ...]}'


@dataclass(frozen=True)
class Row:
    id: str
    family: str
    values: Mapping[str, Any]

    def value(self, *path: str) -> Any:
        """What stands at values[path[0]][path[1]].., None where there is nothing."""
        found: Any = self.values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, *path: str) -> float | None:
        """A positive finite number, else None: no figure of a run is zero or negative."""
        found = self.value(*path)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if math.isfinite(found) and found > 0 else None

    def count(self, *path: str) -> int | None:
        """A positive whole number, else None."""
        found = self.number(*path)
        return round(found) if found is not None and round(found) > 0 else None

    def flag(self, *path: str) -> bool | None:
        found = self.value(*path)
        return found if isinstance(found, bool) else None

    def text(self, *path: str) -> str:
        """Lower case, "" where there is none."""
        found = self.value(*path)
        return found.lower() if isinstance(found, str) else ""

    @property
    def words(self) -> str:
        """All that the row says in prose, lower case. What a note quotes is an explanation of the source's own words,
        and says nothing of this row."""
        note = re.sub(r"'[^']*'", " ", self.text("note"))
        parts = (self.id.lower(), self.family.lower(), self.text("source"), self.text("table"), note)
        return " | ".join((*parts, self.text("inter"), self.text("url")))

    @property
    def year(self) -> int:
        """Of the software: as its source says, or when its hardware was new."""
        named = re.search(r"\b(?:container|summary|nemo)[- ]?(\d\d)\.\d\d", self.words)
        if named:
            return 2000 + int(named[1])
        dated = [int(found) for found in re.findall(r"20[12]\d", self.words)]
        return dated[0] if dated else _FIRST_YEARS.get(re.sub(r"[^a-z0-9].*", "", self.text("cluster", "gpu")), 2024)


def read_rows(path: str | Path) -> list[Row]:
    """Raises DataMissing and DataError for files that are no such thing. Rows without an id get a number."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror}", rule=_RULE, fix="give the path of a file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}", rule=_RULE) from None
    rows = data.get("rows") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not all(isinstance(values, Mapping) for values in rows):
        raise DataError(f"{path} has no list of rows", rule=_RULE)
    if not rows:
        raise DataError(f"{path} has no rows", rule=_RULE)
    return [_row(values, number) for number, values in enumerate(rows)]


def _row(values: Mapping[str, Any], number: int) -> Row:
    name, family = values.get("id"), values.get("family")
    return Row(
        id=name if isinstance(name, str) and name else f"row-{number}",
        family=family if isinstance(family, str) and family else "unnamed",
        values=values,
    )
