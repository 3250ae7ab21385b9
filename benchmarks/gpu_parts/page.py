"""The text of docs/performance.md: measured lines, "not measured" where there is none, predictions, and pictures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_parts.runs import CASES, SCHEDULES, WORLDS
from ingot.theory.devices import cluster_of, devices, find_device
from ingot.theory.params import count_parameters
from ingot.units import format_bytes, format_count, format_flops, format_seconds

Lines = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
CARD = "h200"  # predictions are for this card while nothing is measured
EMPTY = "not measured"
CONTESTANTS = ("ingot", "transformers", "torchtitan")


def page_text(lines: Lines, parts: list[str], pictures: dict[str, list[str]] | None = None) -> str:
    """Return the page. parts: names of all parts, in order. pictures: None: they are traced now, in a minute or two."""
    newest = {line["part"]: line for line in lines}  # lines are appended, so the last one of a part counts
    drawn = traced_pictures() if pictures is None else pictures
    return "\n\n".join([_HEAD, *_steps(newest), *_documents(newest), *_tests(newest, parts), *_stress(newest),
                        *_streams(drawn), *_commands()]) + "\n"  # fmt: skip


def traced_pictures() -> dict[str, list[str]]:
    folder = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-W", "ignore", "-m", "gpu_parts.streams"]
    return json.loads(subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _card(newest: dict[str, dict]):
    """Return the card that was measured last, CARD if none was."""
    measured = [card for line in newest.values() if (card := find_device(line["device"]))]
    return measured[-1] if measured else devices()[CARD]


def _figures(found: dict[str, Any] | None) -> str:
    """Return the result of a contestant as text: tokens/s, MFU, peak memory."""
    if found is None:
        return EMPTY
    if "error" in found:
        return f"no result: {found['error']}"
    mfu = "" if found["mfu_norm"] is None else f", {found['mfu_norm']:.1%}"
    memory = "" if found["peak_memory_bytes"] is None else f", {format_bytes(found['peak_memory_bytes'])}"
    return f"{found['tokens_per_second']:,.0f}{mfu}{memory}"


def _origin(line: dict[str, Any] | None) -> str:
    if line is None:
        return EMPTY
    return f"{line['device']}, torch {line['torch']}, {line['commit'] or line['source']}, {line['date']}"


def _found(line: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    if line is not None and "error" in line:
        return {"error": line["error"]} if name == "ingot" else None
    return None if line is None else line["results"]["contestants"].get(name)


def _steps(newest: dict[str, dict]) -> list[str]:
    card = _card(newest)
    cluster, rows = cluster_of(card, 1, name=card.key), []
    for name, case in CASES.items():
        if case.document_tokens:
            continue
        line, run, plan = newest.get(name), case.run("cuda"), case.expected(cluster)
        tried = ["-" if contestant == "torchtitan" and run.model.is_moe else _figures(_found(line, contestant))
                 for contestant in CONTESTANTS]  # fmt: skip
        predicted = (
            f"{plan.tokens_per_step / plan.step_seconds:,.0f} "
            f"({plan.tokens_per_step / plan.step_seconds_high:,.0f} to "
            f"{plan.tokens_per_step / plan.step_seconds_low:,.0f}), "
            f"{plan.mfu or 0:.1%}, {format_bytes(plan.total_memory_bytes)}"
        )
        size = format_count(count_parameters(run.model))
        batch = f"{case.micro_batch} x {case.seq_len}"
        rows.append([f"`{name}`", size, batch, *tried, predicted, _origin(line)])
    head = ["part", "parameters", "tokens of a step", *CONTESTANTS, f"expected on one {card.device_name}", "measured"]
    return ["## One GPU", _ONE_GPU, _table(head, rows)]


def _documents(newest: dict[str, dict]) -> list[str]:
    rows = []
    for name, case in CASES.items():
        if case.document_tokens:
            line = newest.get(name)
            masked, plain = (_figures(_found(line, title)) for title in ("ingot", "ingot, no borders"))
            row = [f"`{name}`", f"{case.micro_batch} x {case.seq_len}", f"{case.document_tokens}", masked, plain]
            rows.append([*row, _origin(line)])
    head = ["part", "tokens of a step", "mean document", "attention within documents", "across borders", "measured"]
    return ["## Documents", _DOCUMENTS, _table(head, rows)]


def _tests(newest: dict[str, dict], parts: list[str]) -> list[str]:
    rows = []
    for name in parts:
        if name.startswith("tests-"):
            line = newest.get(name)
            file = f"tests/gpu/test_{name.removeprefix('tests-').replace('-', '_')}.py"
            found = EMPTY
            if line is not None:
                results = line.get("results")
                found = f"{results['passed']} passed, {results['skipped']} skipped" if results else line["error"]
            rows.append([f"`{name}`", f"`{file}`", found, _origin(line)])
    return ["## Tests that need a GPU", _table(["part", "file", "result", "measured"], rows)]


def _stress(newest: dict[str, dict]) -> list[str]:
    rows = []
    for world in WORLDS:
        line, found = newest.get(f"stress-{world}"), EMPTY
        if line is not None:
            results = line.get("results")
            found = line.get("error") or (
                f"{len(results['layouts'])} layouts, {results['failed']} failed, {results['left']} left"
            )
        rows.append([f"`stress-{world}`", found, _origin(line)])
    text = _STRESS.format(schedules=", ".join(f"`{name}`" for name in SCHEDULES))
    return ["## Every layout of 2, 4 and 8 GPUs", text, _table(["part", "result", "measured"], rows)]


def _streams(pictures: dict[str, list[str]]) -> list[str]:
    found = ["## The step as streams", _LEGEND]
    for name, (title, text) in _KINDS.items():
        several = len(pictures[name]) > 1
        blocks = [f"rank {rank}\n{picture}" if several else picture for rank, picture in enumerate(pictures[name])]
        found += [f"### {title}", "```\n" + "\n\n".join(blocks) + "\n```", text]
    return found


def _commands() -> list[str]:
    card = devices()[CARD]
    cluster = cluster_of(card, 1, name=card.key)
    rows = []
    for name, case in CASES.items():
        plan = case.expected(cluster)
        borders = "; without borders, and at most this with them" if case.document_tokens else ""
        expected = f"{format_seconds(plan.step_seconds)} per step, {plan.mfu or 0:.0%} MFU{borders}"
        rows.append([f"`python benchmarks/train_gpu.py --part {name}`", expected])
    products = format_flops(card.bf16 * 1e12 * card.matmul_efficiency)
    rows += [["`ingot doctor --bench`", f"matrix products of {products}/s per rank in bf16 (devices.toml)"]]
    rows += [[f"`{command}`", expected] for command, expected in _OTHERS]
    return [
        "## Commands for a machine with GPUs",
        _COMMANDS,
        _table(["command", f"expected ({card.device_name})"], rows),
    ]


_HEAD = """\
# Performance on GPUs

For readers who want to know what a GPU does with ingot, and who have one to measure with. This page is written by
`python benchmarks/train_gpu.py --write` from `benchmarks/results/train_gpu.json`; do not edit it. A place without a
line in that file is "not measured". Figures under "expected" are predictions of the planner from the published
rates of a card; nobody measured them. What a CPU measures is in [measurements.md](measurements.md)."""

_ONE_GPU = """\
Tokens per second, MFU and peak memory of the allocator, median of two turns of 20 steps after 5. All compute in
bf16 over float32 masters with fused AdamW and clipping, on the same random batch; `transformers` compiles the whole
model, torchtitan and ingot each block. MFU counts matmul parameters x 6 and the causal half of attention over the
dense bf16 peak. `8b-width` has 8 of the 32 blocks of Llama 3 8B, `moe` 4 of the 48 of Qwen3 30B-A3B. The range of a
prediction is the planner's error band."""

_DOCUMENTS = """\
Documents end at random places. Tokens per second, MFU (which counts attention across borders in both columns) and
peak memory."""

_STRESS = """\
Pipelines of 2 and 4 ranks with every schedule ({schedules}), tp and cp (ring and Ulysses) of 1, 2 and 4, a dense
model and one with experts (ep of 1, 2 and 4), and dp_shard for the rest: each layout that the rules of the run file
allow. Three steps in fp32 and in bf16; losses and gradient norms against one GPU, within 0.1% in fp32, and in bf16
within 1% (losses) and 5% (norms)."""

_LEGEND = """\
Who computes and who communicates, in the order of the program. Each picture is one rank of the real program, traced
on fake tensors with two or three blocks (`benchmarks/gpu_parts/streams.py`), in its steady step. Columns are parts
of the step and have no length in time: which exchange is hidden by the computation above it is a question of speed,
that only a GPU answers.

- The row `computes` is the stream of the kernels: F0 and B0 are forward and backward of block 0, L is the last norm
  and the loss, U the update. Parts without matrix products, such as the embedding, have no column. Dots: it waits.
- The other rows are axes of the mesh, whose exchanges run on streams of their own. G: all-gather, S:
  reduce-scatter, R: all-reduce, A: all-to-all, > and <: a message to and from a neighbor. An exchange covers the
  columns from its start to the place where the computation waits for it. In a column of dots, nothing covers it."""

_KINDS = {
    "dp": ("dp: ZeRO-1", """\
A unit's gradients are scattered while the backward of the unit before it computes; updated parameters are gathered
while the next forward begins. Only the last scatter, the sum of the norm and the first gathers have nothing to hide
them."""),
    "fsdp": ("dp: ZeRO-3 (FSDP2)", """\
Parameters are gathered one unit ahead, in the forward and again in the backward, and freed after their use.
Gradients are scattered while the backward of the unit before it computes. The first gathers and the last scatter
have nothing to hide them."""),
    "tp": ("tp, with sequences", """\
Each block gathers tokens before its matrices that are split by columns, and scatters sums after those split by
rows: two of each in a forward, two of each in a backward. The next product needs the result, so the computation
waits for every one (`async_tp` divides product and exchange into parts that overlap, on GPUs with symmetric
memory). Keep tp inside the domain of fast links."""),
    "pp": ("pp, 1F1B", """\
A rank sends and goes on. It posts the receive of a gradient before the forward that precedes its use. The columns of
the two ranks are not aligned: in time, rank 1 begins one forward later and rank 0 waits for its first gradient, and
that is the bubble."""),
    "cp": ("cp, a ring", """\
Keys and values travel around the ring while attention computes with those that are here; in the backward their
gradients travel too. Gradients of parameters are divided as in dp."""),
    "ep": ("ep", """\
Each forward of a block first exchanges how many tokens go where, which the host waits for. Then tokens travel to
their experts and back by all-to-all. The shared expert computes while they travel there, in the backward too; nothing
covers the way back, because the next block needs it."""),
}  # fmt: skip

_COMMANDS = """\
Without arguments, the script plays every part that has no line for this device, version of torch and state of the
source; `--minutes 9` ends in time, and the next call goes on. `--list` shows what is left. The figures are
predictions for one card, except where the text says otherwise. `--smoke` plays the programs of all parts on a CPU."""

_OTHERS = (
    ("python benchmarks/train_gpu.py --minutes 9", "the next parts; again until `--list` shows a line for each"),
    ("pytest tests/gpu", "all pass"),
    ("python benchmarks/train_gpu.py --part stress-2 stress-4 stress-8", "0 failed (on a machine with so many GPUs)"),
    ("python benchmarks/train_gpu.py --write", "this page with the new lines"),
)
