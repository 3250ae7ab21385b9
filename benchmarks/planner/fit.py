"""Fit the constants of the time model to the published runs that ship: src/ingot/planner/predict/time/fitted.json.

    python benchmarks/planner/fit.py

The file also has the error of each family when it was left out, and the error band that follows.
"""

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path

import numpy as np

from ingot.planner.published.fit import ERROR_BAND, FAMILY_ROWS, NOISE, Fit, residuals, timed
from ingot.planner.published.run import published_runs, shipped_rows

TARGET = Path(__file__).parents[2] / "src/ingot/planner/predict/time/fitted.json"


def main() -> None:
    fit = Fit(tuple(timed(published_runs(shipped_rows()))))
    constants, left_out = fit.all(), fit.left_out()
    families = {}
    for family, own in left_out.items():
        rows = [subject for subject in fit.subjects if subject.family == family]
        off = np.exp(-residuals(rows, own)) - 1
        families[family] = {
            "rows": len(rows),
            "mape": _percent(np.mean(np.abs(off))),
            "median": _percent(np.median(off)),
        }
        print(f"{family:24} {len(rows):4} rows  {families[family]['mape']:6.2f}%  {families[family]['median']:+7.2f}%")
    mean = round(float(np.mean([found["mape"] for found in families.values()])), 2)
    print(f"{'mean over families':24} {len(fit.subjects):4} rows  {mean:6.2f}%")
    result = {
        "fitted": date.today().isoformat(),
        "command": "python benchmarks/planner/fit.py",
        "constants": {name: round(value, 4) for name, value in asdict(constants).items()},
        "band": [round(share, 4) for share in fit.error_band(left_out)],
        "band_quantiles": ERROR_BAND,
        "noise": NOISE,
        "family_rows": FAMILY_ROWS,
        "left_out": families,
        "left_out_mean": mean,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _percent(share) -> float:
    return round(100 * float(share), 2)


if __name__ == "__main__":
    main()
