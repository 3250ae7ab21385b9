"""Write the calibration rows that ship with the planner, from a file of published runs in its full form.

    python benchmarks/planner/calibration_rows.py published_runs.json

What a source leaves open is left out, and so is what the planner never reads.
"""

import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[2] / "src/ingot/planner/published/published_runs.json"
_UNREAD = ("has", "full_plan", "confidence", "older_containers", "memory_breakdown_gib", "layer_ms")


def stated(value):
    """Without what is null, all the way down."""
    if not isinstance(value, dict):
        return value
    return {key: stated(inner) for key, inner in value.items() if inner is not None and key != "bw_unit"}


def main(source: str) -> None:
    data = json.loads(Path(source).read_text(encoding="utf-8"))
    rows = [stated({key: value for key, value in row.items() if key not in _UNREAD}) for row in data["rows"]]
    meta = {"units": data["meta"]["units"] | {"bandwidth": "GB/s of one device, one direction"}, "rows": len(rows)}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    TARGET.write_text(f'{{"meta": {json.dumps(meta)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(rows)} rows, {TARGET.stat().st_size:,} bytes: {TARGET}")


if __name__ == "__main__":
    main(sys.argv[1])
