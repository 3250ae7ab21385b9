"""Measure training on the GPUs of this machine, in parts of at most nine minutes each that one command plays in turn.

    python benchmarks/train_gpu.py                     # all parts that this machine can play and that have no line yet
    python benchmarks/train_gpu.py --minutes 9         # the same, for at most nine minutes; again to go on
    python benchmarks/train_gpu.py --part 1.3b moe     # some of them; --again: also those that have a line
    python benchmarks/train_gpu.py --list              # the parts, their state here, and what the planner expects
    python benchmarks/train_gpu.py --write             # docs/performance.md from the lines, without a GPU
    python benchmarks/train_gpu.py --smoke             # every part's program with tiny sizes on a CPU; writes no line

There are three kinds of parts:
- A model's name (0.5b, 1.3b, ..): steps of one GPU in bf16. ingot, `transformers` with torch.compile and torchtitan
  take turns, each in a process of its own, with float32 masters, fused AdamW and clipping, on the same random batch:
  tokens/s, MFU (matmul parameters x 6 plus the causal half of attention, over the dense bf16 peak) and peak memory as
  the allocator counts it. A contestant that is not installed has its error in the line.
- tests-NAME: tests/gpu/test_NAME.py.
- stress-N: every legal layout of N GPUs (schedules x tp x cp x ep), three steps each, against one GPU.

Results are lines of results/train_gpu.json, one per part, device, version of torch and state of the source: a hash of
src/ingot, tests/gpu and the programs of the benchmark, since a copy on another machine may have no git. A part that
fails has a line with its error, and the others go on. A stress that runs out of time keeps its layouts, and goes on
with the rest. Exit code 1: a part failed, or there is no GPU.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts.page import PAGE, Lines, page_text
from gpu_parts.runs import CASES, WORLDS
from record import RESULTS

from ingot.machine.facts import read_machine
from ingot.storage import write_atomic, write_json
from ingot.theory.devices import cluster_of, find_device, peak_flops
from ingot.theory.flops import model_flops_utilization, train_flops_per_token
from ingot.theory.params import count_parameters
from ingot.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 530.0  # of a part, so that its end and its line fit into nine minutes
SMOKE_DEVICE = "CPU, smoke"
MEASURED, FAILED, UNFINISHED = "measured", "failed", "unfinished"


class OutOfTime(Exception):
    """A process did not end before its deadline. printed: the lines that it had written."""

    def __init__(self, printed: list[str]):
        super().__init__("ran out of time")
        self.printed = printed


@dataclass(frozen=True)
class Session:
    """One call of this program. device: the name of the GPU. deadline: time.monotonic() at which a part must end.

    before: the results of an unfinished line of the part. cut: the call ends before the part's own limit.
    """

    device: str
    smoke: bool
    rounds: int
    deadline: float
    before: dict[str, Any]
    cut: bool = False

    def play(self, *arguments: str, program: tuple[str, ...] = (), text: str = "") -> list[str]:
        """Run this program in a role, or `program`, and return the lines of its output.

        Its group of processes is killed at the deadline, and when this process is interrupted. Raises OutOfTime, and
        RuntimeError with the last line of its errors.
        """
        command = [sys.executable, *(program or (__file__, *arguments, *(["--smoke"] if self.smoke else [])))]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                text=True,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            try:
                process.communicate(text, timeout=max(self.deadline - time.monotonic(), 0.1))
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                kill_group(process)
            output.seek(0)
            errors.seek(0)
            lines, last = output.read().splitlines(), (errors.read().strip().splitlines() or ["no message"])[-1]
        if late:
            raise OutOfTime(lines)
        if process.returncode and not program:
            raise RuntimeError(f"{last} (exit code {process.returncode})")
        return lines


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Part:
    """A part of the measurement. play: returns its results; it raises OutOfTime if there was too little time for any.
    gpus: how many it needs. about: a line for --list."""

    name: str
    gpus: int
    about: str
    play: Callable[[Session], dict[str, Any]]


# -- steps of one GPU ------------------------------------------------------------------------------------------------


def contestants_of(case: str) -> tuple[tuple[str, int], ...]:
    """Return (contestant, mean tokens of documents) of a case, by turns."""
    if tokens := CASES[case].document_tokens:
        return ("ingot", tokens), ("ingot", 0)  # the same step without borders is the comparison
    others = ("transformers",) if CASES[case].run("cpu").model.is_moe else ("transformers", "torchtitan")
    return ("ingot", 0), *((name, 0) for name in others)


def play_steps(session: Session, case: str) -> dict[str, Any]:
    """Let the contestants take turns, as many rounds as there is time for. A contestant that fails has an error."""
    found: dict[str, list[dict]] = {}
    errors: dict[str, str] = {}
    for number in range(session.rounds):
        began = time.monotonic()
        for name, tokens in contestants_of(case):
            title = f"{name}, no borders" if CASES[case].document_tokens and not tokens else name
            if title in errors:
                continue
            try:
                lines = session.play("--role", "steps", case, name, str(tokens))
                found.setdefault(title, []).append(json.loads(lines[-1]))
            except RuntimeError as error:
                errors[title] = str(error)
            except OutOfTime:
                if session.cut or not found:
                    raise
                errors[title] = str(OutOfTime([]))
        if number + 1 < session.rounds and time.monotonic() + 1.2 * (time.monotonic() - began) > session.deadline:
            break
    if not found.get("ingot"):
        raise RuntimeError(errors["ingot"])
    return errors_and(found, errors, session, case)


def errors_and(found: dict[str, list[dict]], errors: dict[str, str], session: Session, case: str) -> dict[str, Any]:
    run, peak = CASES[case].run("cpu", smoke=session.smoke), peak_flops(session.device, "bf16")
    flops = train_flops_per_token(run.model, run.train.seq_len)
    results: dict[str, Any] = {"parameters": count_parameters(run.model), "contestants": {}}
    for name, turns in found.items():
        seconds = statistics.median(turn["step_seconds"] for turn in turns)
        rate = run.tokens_per_step / seconds
        results["contestants"][name] = {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu_norm": peak and model_flops_utilization(rate, flops, peak),
            "peak_memory_bytes": max(turn["peak_memory_bytes"] or 0 for turn in turns) or None,
            "warm_up_seconds": turns[0]["warm_up_seconds"],
            "last_loss": turns[-1]["last_loss"],
            "turns": len(turns),
        }
    results["contestants"] |= {name: {"error": error} for name, error in errors.items() if name not in found}
    return results


# -- tests and the stress --------------------------------------------------------------------------------------------


def play_tests(session: Session, file: Path) -> dict[str, Any]:
    """Run a file of tests/gpu. Raises RuntimeError with the names of tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ("-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}")
        session.play(program=("-m", "pytest", *options, str(file.relative_to(ROOT))))
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report of {file.name}; run it by hand")
        return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Return the numbers of tests by outcome. Raises RuntimeError if one failed, or if there are none."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcome = {
        case.get("name", ""): next((child.tag for child in case if child.tag != "properties"), "") for case in cases
    }
    failed = [name for name, tag in outcome.items() if tag in ("failure", "error")]
    if failed or not cases:
        raise RuntimeError(f"{len(failed)} of {len(cases)} tests failed: {', '.join(failed)[:600]}")
    skipped = sum(tag == "skipped" for tag in outcome.values())
    return {"passed": len(outcome) - skipped, "skipped": skipped}


def play_stress(session: Session, world: int) -> dict[str, Any]:
    """Play the layouts that have no result yet, until all have one or time is out: then `left` is not 0."""
    done: dict[str, Any] = dict(session.before.get("layouts", {}))
    try:
        lines = session.play("--role", "stress", str(world), text=json.dumps(list(done)))
    except OutOfTime as late:
        lines = [line for line in late.printed if line.endswith("}")]  # the last one may be half written
        if len(lines) < 2:
            raise
    first, *answers = map(json.loads, lines)
    for answer in answers:
        done |= answer
    left = first["left"] - len(answers)
    return {"layouts": done, "left": left, "failed": sum("error" in result for result in done.values())}


def parts() -> dict[str, Part]:
    """Return all parts by name, in the order in which they are played."""
    found = []
    for name, case in CASES.items():
        about = f"{case.micro_batch} x {case.seq_len} tokens"
        found.append(Part(name, 1, about, functools.partial(play_steps, case=name)))
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        name = f"tests-{file.stem.removeprefix('test_').replace('_', '-')}"
        found.append(Part(name, 1, str(file.relative_to(ROOT)), functools.partial(play_tests, file=file)))
    for world in WORLDS:
        about = f"every layout of {world} GPUs"
        found.append(Part(f"stress-{world}", world, about, functools.partial(play_stress, world=world)))
    return {part.name: part for part in found}


# -- lines -----------------------------------------------------------------------------------------------------------


@functools.cache
def source_hash() -> str:
    """Return a hash of all that a measurement depends on: src/ingot, tests/gpu and the programs of this benchmark."""
    folders = ROOT / "src" / "ingot", ROOT / "tests" / "gpu", ROOT / "benchmarks" / "gpu_parts"
    files = sorted(file for folder in folders for file in folder.rglob("*.py") if file.name != "page.py")
    whole = hashlib.sha256()
    for file in files:
        whole.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def commit() -> str:
    """Return the commit of the checkout, "" where there is no git."""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def read_lines(path: Path) -> Lines:
    """Return the lines of a file, none if it does not exist. Ends the program if it is damaged."""
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["lines"]
        assert isinstance(lines, list) and all({"part", "status", "device", "source"} <= set(line) for line in lines)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise SystemExit(f"{path} is not a file of this benchmark ({error!r}); move it away, or repair it") from error
    return lines


def key_of(line: dict[str, Any]) -> tuple:
    return line["part"], line["device"], line["torch"], line["source"]


def line_of(part: Part, session: Session) -> dict[str, Any]:
    """Play a part and return its line, with the error if it failed. Raises OutOfTime if the call cuts it off."""
    began = time.monotonic()
    line: dict[str, Any] = {
        "part": part.name,
        "device": session.device,
        "torch": importlib.metadata.version("torch"),
        "source": source_hash(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": read_machine().cpu,
        "command": f"python benchmarks/train_gpu.py --part {part.name}",
    }
    try:
        results = part.play(session)
        status = UNFINISHED if results.get("left") else FAILED if results.get("failed") else MEASURED
        line |= {"status": status, "results": results}
    except OutOfTime as late:
        if session.cut:
            raise
        line |= {"status": FAILED, "error": str(late)}
    except Exception as error:
        line |= {"status": FAILED, "error": f"{type(error).__name__}: {error}"[:1000]}
    return line | {"seconds": round(time.monotonic() - began, 1)}


def play_all(chosen: list[Part], args: argparse.Namespace, device: str, gpus: int) -> int:
    """Play the chosen parts that are due, and write the line of each when it has ended. Returns 1 if one failed."""
    failed = 0
    end = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    for part in chosen:
        lines, version = read_lines(args.results), importlib.metadata.version("torch")
        own = {key_of(line): line for line in lines}.get((part.name, device, version, source_hash()))
        if own and own["status"] != UNFINISHED and not args.again:
            print(f"{part.name:16} has a line of {own['date']} ({own['status']}); --again measures it again")
            continue
        if gpus < part.gpus and not args.smoke:
            print(f"{part.name:16} needs {part.gpus} GPUs, and this machine has {gpus}")
            continue
        if (left := min(LIMIT_SECONDS, end - time.monotonic())) < 5:
            print(f"{part.name:16} is left for the next call: the {args.minutes:g} minutes are over")
            continue
        before = own["results"] if own and own["status"] == UNFINISHED and not args.again else {}
        deadline = time.monotonic() + left
        session = Session(device, args.smoke, args.rounds, deadline, before, cut=left < LIMIT_SECONDS)
        try:
            line = line_of(part, session)
        except OutOfTime:
            print(f"{part.name:16} is left for the next call: {left:.0f} s were too little")
            continue
        write_json(args.results, {"lines": [*(o for o in lines if key_of(o) != key_of(line)), line]})
        print(f"{part.name:16} {line['status']} in {line['seconds']:.0f} s: {summary(line)}", flush=True)
        failed |= line["status"] == FAILED
    return int(failed)


def summary(line: dict[str, Any]) -> str:
    """Return the result of a line as text."""
    results = line.get("results", {})
    if "contestants" in results:
        shown = {name: found.get("error") or f"{found['tokens_per_second']:,.0f} tokens/s"
                 for name, found in results["contestants"].items()}  # fmt: skip
        return "; ".join(f"{name} {text}" for name, text in shown.items())
    if "layouts" in results:
        wrong = [f"{name}: {found['error']}" for name, found in results["layouts"].items() if "error" in found]
        return f"{len(results['layouts'])} layouts, {results['failed']} failed, {results['left']} left" + "".join(
            f"\n{'':17}{text}" for text in wrong
        )
    return line.get("error") or f"{results['passed']} passed, {results['skipped']} skipped"


def show_list(args: argparse.Namespace, device: str, gpus: int) -> None:
    card = find_device(device) or find_device("NVIDIA H200")
    assert card is not None
    cluster, lines = cluster_of(card, 1, name=card.key), read_lines(args.results)
    print(f"here: {gpus} x {device or 'no GPU'}; expected: the planner's prediction for one {card.device_name}")
    for name, part in parts().items():
        own = [o for o in lines if o["part"] == name and o["device"] == device and o["source"] == source_hash()]
        state = own[-1]["status"] if own else "not measured" if gpus >= part.gpus else f"needs {part.gpus} GPU"
        expected = ""
        if name in CASES:
            plan = CASES[name].expected(cluster)
            memory = format_bytes(plan.total_memory_bytes)
            expected = f"expected {format_seconds(plan.step_seconds)} per step, {plan.mfu or 0:.0%} MFU, {memory}"
        print(f"{name:16} {state:13} {part.about:34} {expected}")


def play_role(words: list[str], smoke: bool) -> None:
    """Be a process of a part: measure a contestant, or play the layouts of the stress."""
    if words[0] == "steps":
        from gpu_parts.contestants import measure

        _, case, name, tokens = words
        run = CASES[case].run("cpu" if smoke else "cuda", smoke=smoke)
        print(json.dumps(measure(name, run, int(tokens), smoke=smoke)))
        return
    from gpu_parts.stress import due, stress

    left = due(int(words[1]), frozenset(json.loads(sys.stdin.read())), smoke=smoke)
    print(json.dumps({"left": len(left)}), flush=True)
    for name, found in stress(left, "cpu" if smoke else "cuda", smoke=smoke):
        print(json.dumps({name: found}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", metavar="NAME", help="play these parts only")
    parser.add_argument("--list", action="store_true", help="list the parts and what is expected of them")
    parser.add_argument("--again", action="store_true", help="also play parts that have a line")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after this time (default: when all are played)")
    parser.add_argument("--rounds", type=int, default=2, help="most turns of each contestant (default: 2)")
    parser.add_argument("--results", type=Path, default=RESULTS / "train_gpu.json", help="the file of the lines")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md from the lines")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU, to test this program")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        play_role(args.role, args.smoke)
        return 0
    known = parts()
    if unknown := [name for name in args.part or () if name not in known]:
        parser.error(f"no part is called {', '.join(unknown)}; the parts are: {', '.join(known)}")
    if args.minutes < 0 or args.rounds < 1:
        parser.error("--minutes must not be negative, and --rounds at least 1")
    if args.write:
        write_atomic(PAGE, page_text(read_lines(args.results), list(known)))
        print(PAGE.relative_to(ROOT))
        return 0
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = SMOKE_DEVICE if args.smoke else torch.cuda.get_device_name() if gpus else ""
    if args.list:
        show_list(args, device, gpus)
        return 0
    if not gpus and not args.smoke:
        raise SystemExit("train_gpu.py measures a CUDA GPU, and torch sees none here; nothing was measured")
    chosen = [known[name] for name in args.part or known]
    if not args.smoke:
        return play_all(chosen, args, device, gpus)
    with tempfile.TemporaryDirectory() as folder:  # what a CPU does with tiny sizes is no result
        args.results, args.rounds = Path(folder, "lines.json"), 1
        return play_all(chosen, args, device, gpus)


if __name__ == "__main__":
    sys.exit(main())
