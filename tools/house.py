"""Count packages, files and lines of ingot, and the source files that a build, a plan and four training steps execute.

    python tools/house.py            # sizes and the three paths
    python tools/house.py --sizes    # sizes alone, in a second

A file counts as touched when at least one of its functions is called, in the command itself or in a process that it
starts (workers and ranks); module bodies, which run at import, do not count. The commands run in a temporary folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "ingot"
# Loaded by every Python process of a counted command, because its folder is on PYTHONPATH.
COUNTER = """
import os, sys, threading
seen = set()
def count(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        if SOURCE in code.co_filename and code.co_name != "<module>":  # written at once: a rank may end by a signal
            file = os.open(os.path.join(OUT, str(os.getpid())), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(file, f"{code.co_filename} {code.co_qualname}\\n".encode())
            os.close(file)
os.register_at_fork(after_in_child=lambda: (seen.clear(), threading.setprofile(count), sys.setprofile(count)))
threading.setprofile(count)
sys.setprofile(count)
"""
RUN_FILE = """name = "counted"
[model]
vocab_size = 512
d_model = 64
num_layers = 2
num_heads = 2
num_kv_heads = 2
head_dim = 32
d_ffn = 128
max_seq_len = 64
[data]
tokens = "data/tokens/train"
[train]
steps = 4
seq_len = 64
global_batch = 4
micro_batch = 2
device = "cpu"
[parallel]
dp_shard = 2
"""


def sizes() -> dict[str, int]:
    files = sorted(SOURCE.rglob("*.py"))
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    packages = [folder for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()]
    return {
        "packages": len(packages),
        "files": len(files),
        "lines": sum(lines.values()),
        "longest file": max(lines.values()),
        "files over 400 lines": sum(count > 400 for count in lines.values()),
    }


def touched(command: list[str], folder: Path) -> tuple[set, set]:
    """Run `ingot COMMAND` in `folder` and return the (file, function) pairs that it calls, and those its ranks call."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        (Path(scratch) / "sitecustomize.py").write_text(f"SOURCE, OUT = {str(SOURCE)!r}, {str(out)!r}\n{COUNTER}")
        environment = os.environ | {"PYTHONPATH": scratch, "OMP_NUM_THREADS": "1"}
        code = "import sys; from ingot.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"ingot {' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        processes = [
            {tuple(line.split(" ", 1)) for line in file.read_text(encoding="utf-8").splitlines()}
            for file in out.iterdir()
        ]
    ranks = [calls for calls in processes if any(file.endswith("/loop.py") for file, _ in calls)]
    return set().union(*processes), set().union(*ranks)


def paths() -> dict[str, set]:
    """Return the calls of a data build, of a plan, and of four training steps with and without their launcher."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = "the house that was built near the river has many rooms and a garden where people read and write"
        words = text.split(" ")
        rows = [" ".join(words[(i * j) % len(words)] for j in range(1, 200)) + f" Number {i}." for i in range(300)]
        (folder / "pages.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "run.toml").write_text(RUN_FILE)
        build = "data build pages.jsonl --out data --preset none --vocab-size 512 --quiet"
        found["a data build"], _ = touched(build.split(" "), folder)
        plan = "plan --model llama3-8b --cluster 8x8xh100 --tokens 1T --quiet"
        found["a plan"], _ = touched(plan.split(" "), folder)
        everything, found["four training steps"] = touched(["train", "run.toml", "--quiet"], folder)
        found["... with launcher"] = everything
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the packages, files and lines of ingot.")
    parser.add_argument("--sizes", action="store_true", help="print sizes alone; run no command")
    args = parser.parse_args()
    for name, count in sizes().items():
        print(f"{name:22} {count:6,}")
    for name, calls in ({} if args.sizes else paths()).items():
        print(f"{name:22} {len({file for file, _ in calls}):6,} files, {len(calls):,} functions")


if __name__ == "__main__":
    main()
