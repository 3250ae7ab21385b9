"""python -m proof: every case, the table in docs/parallelism.md, and an exit code.

python -m proof                 all cases, and the table
python -m proof zero-3 tp       only cases whose name contains one of these; no table
"""

import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch

from .cases import KINDS, all_cases, settings_text
from .compare import AFTER_STEPS, TOLERANCE, Outcome, prove
from .ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- begin: written by make proof -->", "<!-- end: written by make proof -->"


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)
    every, _ = all_cases()
    cases = [case for case in every if not wanted or any(part in case.name for part in wanted)]
    outcomes, started = [], time.perf_counter()
    with Ranks() as ranks:
        for number, case in enumerate(cases, start=1):
            outcome = prove(ranks, case)
            outcomes.append(outcome)
            print(f"{number:4d}/{len(cases)}  {_line(outcome)}", flush=True)
    seconds = time.perf_counter() - started
    red = [outcome for outcome in outcomes if outcome.wrong]
    print(f"{len(cases)} cases, {len(red)} red, {seconds / 60:.1f} minutes")
    for outcome in red:
        print(f"\n{outcome.case.name}: {settings_text(outcome.case)}")
        for check, finding in outcome.wrong.items():
            print(f"  {check}: {finding}")
    if not wanted and not red:
        _write(_table(outcomes, seconds))
        print(f"the table is in {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    return 1 if red or not cases else 0


def _line(outcome: Outcome) -> str:
    verdict = "RED " + ", ".join(outcome.wrong) if outcome.wrong else "equal"
    numbers = f"loss {outcome.loss:.0e}  gradient {outcome.gradient:.0e}  parameters {outcome.parameters:.0e}"
    return f"{outcome.case.ranks:2d} ranks  {outcome.seconds:5.1f} s  {numbers}  {verdict}  {outcome.case.name}"


def _table(outcomes: list[Outcome], seconds: float) -> str:
    kinds = Counter(outcome.case.kind for outcome in outcomes)
    _, refused = all_cases()
    lines = [
        f"`make proof` on {date.today()}, torch {torch.__version__}: {len(outcomes)} cases ("
        + ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
        + f") in {seconds / 60:.0f} minutes, all equal to one process. Largest deviations: loss "
        f"{max(o.loss for o in outcomes):.0e}, gradient {max(o.gradient for o in outcomes):.0e}, norm "
        f"{max(o.norm for o in outcomes):.0e} (allowed: {TOLERANCE:.0e}), parameters after three steps "
        f"{max(o.parameters for o in outcomes):.0e} (allowed: {AFTER_STEPS:.0e}).",
        "",
        "| case | ranks | model | micro-batches | loss | worst gradient | norm | parameters | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        numbers = " | ".join(f"{x:.0e}" for x in (o.loss, o.gradient, o.norm, o.parameters))
        case = o.case
        lines.append(
            f"| {case.name} | {case.ranks} | {case.model} | {case.accumulation} | {numbers} | {o.seconds:.1f} |"
        )
    lines += ["", "Pairs that are refused before anything starts, and the rule:", ""]
    lines += [f"- {refusal.name}: `{refusal.rules[0]}`" for refusal in refused]
    return "\n".join(lines)


def _write(table: str) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
