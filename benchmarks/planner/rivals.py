"""The planner beside others on the published runs that it ships: error of the step time by family.

    python benchmarks/planner/rivals.py --llm-analysis VENV/bin/python --calculon FOLDER

  ingot          constants of the time model fitted without the family that is predicted
  constant       one share of the 16-bit peak for each precision (16, 8, 4 bits), recomputed FLOPs counted, and the
                 textbook bubble of the pipeline; the shares are fitted without the family that is predicted
  constant, all  the same with shares fitted to all rows
  llm-analysis   in its own environment (pip install llm-analysis==0.2.2), efficiency 0.5 as its README advises
  calculon       from a folder with its sources, with its own descriptions of A100 and H100; rows it has no notion of
                 are left out, with the reason on standard error

Writes benchmarks/results/planner_rivals.json and prints a table.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path

import numpy as np

from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.published.fit import Fit, timed
from ingot.planner.published.run import PublishedRun, published_runs, shipped_rows
from ingot.theory.flops import TRAIN_TO_FORWARD, forward_attention_flops_per_token, train_flops_per_token

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "planner_rivals.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm-analysis", metavar="PYTHON", help="python of an environment that has llm-analysis")
    parser.add_argument("--calculon", metavar="FOLDER", help="folder with calculon's package and systems")
    args = parser.parse_args()
    everyone = timed(published_runs(shipped_rows()))
    predictors = {
        "ingot": ingot(everyone),
        "constant": constant(everyone, unseen=True),
        "constant, all": constant(everyone, unseen=False),
    }
    memory = {"ingot": {s.id: _memory(s) for s in everyone if s.measured.memory_bytes}}
    if args.llm_analysis:
        answers = rival(everyone, [args.llm_analysis, str(HERE / "rival_llm_analysis.py")])
        predictors["llm-analysis"] = {name: found["step_seconds"] for name, found in answers.items()}
        memory["llm-analysis"] = {name: found["memory_bytes"] for name, found in answers.items()}
    if args.calculon:
        answers = rival(everyone, [sys.executable, str(HERE / "rival_calculon.py"), args.calculon])
        predictors["calculon"] = {name: found["step_seconds"] for name, found in answers.items()}
        memory["calculon"] = {name: found["memory_bytes"] for name, found in answers.items()}
    given = (" --llm-analysis PYTHON" if args.llm_analysis else "") + (" --calculon FOLDER" if args.calculon else "")
    result = {
        "date": date.today().isoformat(),
        "command": f"python benchmarks/planner/rivals.py{given}",
        "step_time": {name: errors(everyone, found, "step_seconds") for name, found in predictors.items()},
        "memory": {name: errors(everyone, found, "memory_bytes") for name, found in memory.items()},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for figure in ("step_time", "memory"):
        print(f"\n{figure}\n" + table(result[figure]))


def errors(everyone: list[PublishedRun], predicted: dict[str, float], what: str) -> dict[str, dict[str, float]]:
    """Return n, mape and median error of each family, in percent, and their mean over families."""
    by_family = defaultdict(list)
    for s in everyone:
        measured = getattr(s.measured, what)
        if s.id in predicted and measured:
            by_family[s.family].append(predicted[s.id] / measured - 1)
    found = {
        family: {
            "n": len(off),
            "mape": round(100 * float(np.mean(np.abs(off))), 1),
            "median": round(100 * float(np.median(off)), 1),
        }
        for family, off in by_family.items()
    }
    means = {key: round(float(np.mean([f[key] for f in found.values()])), 1) for key in ("mape", "median")}
    return found | {"mean over families": {"n": sum(f["n"] for f in found.values())} | means}


def table(columns: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown."""
    families = list(dict.fromkeys(family for found in columns.values() for family in found))
    families.sort(key=lambda family: family == "mean over families")
    lines = ["| family | rows | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
    for family in families:
        cells = [columns[name].get(family) for name in columns]
        rows = max(cell["n"] for cell in cells if cell)
        shown = [
            "-" if not cell else f"{cell['mape']}%" + (f" ({cell['n']} rows)" if cell["n"] != rows else "")
            for cell in cells
        ]
        lines.append(f"| {family} | {rows} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def ingot(everyone: list[PublishedRun]) -> dict[str, float]:
    left_out = Fit(tuple(everyone)).left_out()
    found = {s.id: (estimate(s.run, s.cluster, s.software, left_out[s.family]), s) for s in everyone}
    return {name: time.seconds * s.scale for name, (time, s) in found.items() if time}


def _memory(subject: PublishedRun) -> float:
    bill = memory_bill(subject.run, subject.cluster, subject.software)
    return sum(term.value for kind, term in bill.items() if kind not in subject.measured.memory_without)


def constant(everyone: list[PublishedRun], *, unseen: bool) -> dict[str, float]:
    """A share is the median over families of their medians. unseen: without the family that is predicted."""
    ideal = {s.id: _ideal_seconds(s) for s in everyone}
    bits = {s.id: {"": 16, "nvfp4": 4}.get(s.software.recipe, 8) for s in everyone}

    def share(wanted: int, family: str) -> float:
        own = defaultdict(list)
        for s in everyone:
            if bits[s.id] == wanted and not (unseen and s.family == family):
                own[s.family].append(ideal[s.id] / _measured_seconds(s))
        return float(np.median([np.median(shares) for shares in own.values()])) if own else share(2 * wanted, family)

    return {s.id: ideal[s.id] / share(bits[s.id], s.family) for s in everyone}


def _measured_seconds(subject: PublishedRun) -> float:
    assert subject.measured.step_seconds is not None  # as of all that are `timed`
    return subject.measured.step_seconds


def _ideal_seconds(subject: PublishedRun) -> float:
    """At the 16-bit peak."""
    run, arch = subject.run, subject.run.model
    seq_len, parallel = run.train.seq_len, run.parallel
    flops = train_flops_per_token(arch, seq_len)
    if parallel.recompute == "full":
        flops *= 1 + 1 / TRAIN_TO_FORWARD
    elif parallel.recompute == "selective":
        flops += forward_attention_flops_per_token(arch, seq_len)
    bubble = (parallel.pp - 1) / (parallel.stages_on_each_rank * run.accumulation)
    peak = subject.cluster.peak_flops[run.train.precision] * subject.devices
    return subject.tokens * flops / peak * (1 + bubble)


def rival(everyone: list[PublishedRun], command: list[str]) -> dict[str, dict[str, float]]:
    """Rows that it refuses are left out; its reasons go to standard error."""
    rows = json.dumps([_described(s) for s in everyone])
    done = subprocess.run(command, input=rows, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    print(done.stderr, end="", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _described(s: PublishedRun) -> dict:
    """Return plain numbers of everything that a rival may need."""
    arch, train, parallel, cluster = s.run.model, s.run.train, s.run.parallel, s.cluster
    return {
        "id": s.id,
        "layers": arch.num_layers,
        "heads": arch.num_heads,
        "kv_heads": arch.num_kv_heads,
        "width": arch.d_model,
        "ffn": (arch.moe.d_expert if arch.is_moe else arch.d_ffn) * arch.ffn_matrices / 2,
        "vocabulary": arch.vocab_size,
        "experts": max(arch.moe.num_experts, 1),
        "top_k": arch.moe.top_k if arch.is_moe else 1,
        "seq_len": train.seq_len,
        "micro_batch": train.micro_batch,
        "accumulation": s.run.accumulation,
        "global_batch": train.global_batch,
        "scale": s.scale,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.data_ranks,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "sequence": parallel.sequence,
        "zero": parallel.zero if parallel.dp_shard > 1 and parallel.zero != "auto" else 0,
        "recompute": parallel.recompute,
        "flash": s.software.attention != "unfused",
        "gated": arch.ffn_matrices > 2,
        "device": cluster.name,
        "schedule": parallel.schedule,
        "interleaving": parallel.stages_on_each_rank,
        "overlap_data": s.software.overlap_data,
        "overlap_tensor": s.software.overlap_tensor,
        "low": bool(s.software.recipe),
        "memory_bytes": cluster.memory_bytes,
        "memory_bandwidth": cluster.memory_bandwidth,
        "link": cluster.link_bandwidth,
        "network": cluster.network_bandwidth,
        "peak": cluster.peak_flops[train.precision],
        "per_node": cluster.devices_per_node,
    }


if __name__ == "__main__":
    main()
