"""The waiting times of the planner's page: from the command to the first plan, and for each kind of question.

In wall-clock time, and in CPU time of the server, which other work on the machine does not lengthen.

python benchmarks/planner/page_time.py [REPEATS]     (Linux)
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

_LARGE = "zero=1&schedule=interleaved"
_PLANS = {
    "8B on 8 GPUs, FSDP": "model=llama3-8b&cluster=8xh100&batch=1024",
    "70B on 1,024 GPUs, interleaved": (
        f"model=llama3-70b&cluster=128x8xh100&batch=2048&tp=8&pp=4&stages_per_rank=5&{_LARGE}"
    ),
    "405B on 16,384 GPUs, interleaved": f"model=llama3-405b&cluster=2048x8xh100&tp=8&pp=16&stages_per_rank=7&{_LARGE}",
    "MoE 671B on 2,048 GPUs": "model=moe-671b&cluster=256x8xh100&pp=16&ep=64&zero=1&recompute=full",
}


def main(repeats: int) -> None:
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-c", "from ingot.cli.main import main; main()", "plan", "--web", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"].partition("?")[0].rstrip("/")
        _ask(f"{address}/api/options")
        _ask(f"{address}/api/plan?{_PLANS['8B on 8 GPUs, FSDP']}")
        took = f"{time.perf_counter() - begun:.2f} s | {_cpu_seconds(server.pid):.2f} s"
        print(f"| | wall clock | CPU |\n|---|---|---|\n| from the command to the first plan | {took} |")
        for name, query in _PLANS.items():
            print(f"| plan, {name} | {_median(address, server.pid, 'plan', query, repeats)} |")
        query = _PLANS["70B on 1,024 GPUs, interleaved"]
        for kind in ("timeline", "fixes"):
            print(f"| {kind}, 70B on 1,024 GPUs | {_median(address, server.pid, kind, query, repeats)} |")
    finally:
        server.terminate()
        server.wait()


def _median(address: str, server: int, kind: str, query: str, repeats: int) -> str:
    """Return the median time; each request has another number of tokens, so that no answer is cached."""
    clock, cpu = [], []
    for i in range(repeats + 1):
        before = _cpu_seconds(server)
        clock.append(_ask(f"{address}/api/{kind}?{query}&tokens={1000 + i}B"))
        cpu.append(_cpu_seconds(server) - before)
    return f"{1e3 * statistics.median(clock[1:]):.0f} ms | {1e3 * statistics.fmean(cpu[1:]):.0f} ms"


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process: fields 14 and 15 of /proc/PID/stat, counted after the parenthesized name."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(url: str) -> float:
    begun = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        assert re.match("application/json", answer.headers["content-type"])
        answer.read()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
