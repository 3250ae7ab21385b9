"""The wall-clock time of `--help` of every verb, a bare interpreter and `import torch`. The goal: at most 60 ms each.

python benchmarks/help.py [--rounds 7]
"""

import argparse
import subprocess
import sys

from record import alternate, medians, record

from ingot.cli.main import VERBS

GOAL_SECONDS = 0.3


def command(*arguments: str):
    return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="alternating runs of each command (default: 7)")
    args = parser.parse_args()
    helps = {f"ingot {verb} --help": command("-m", "ingot.cli.main", verb, "--help") for verb in VERBS}
    others = {
        "ingot --help": command("-m", "ingot.cli.main", "--help"),
        "bare interpreter": command("-c", "pass"),
        "import torch": command("-c", "import torch"),
    }
    seconds = alternate(helps | others, args.rounds)
    median = medians(seconds)
    for name, value in sorted(median.items(), key=lambda item: item[1]):
        print(f"{value * 1e3:8.0f} ms  {name}")
    slowest = max(median[name] for name in [*helps, "ingot --help"])
    print(f"slowest help: {slowest * 1e3:.0f} ms (goal: under {GOAL_SECONDS * 1e3:.0f} ms)")
    results = {"median_seconds": {k: round(v, 4) for k, v in median.items()}, "slowest_help_seconds": round(slowest, 4)}
    print(record("help", results, ["ingot", "torch"]))


if __name__ == "__main__":
    main()
