"""The teaching programs run alone, stay short, and notice when their communication is broken."""

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
# own_loop.py is a program for a run: test_own_loop.py.
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "own_loop.py")
# What each program cannot do without, and the same without its communication: still a program that runs to the end.
FAULTS = {
    "data_parallel.py": ("dist.all_reduce(flat, async_op=True)", "dist.barrier(async_op=True)"),
    "experts.py": ("dist.all_to_all_single(y_R := torch.empty_like(x_R), x_R)", "y_R = x_R.clone()"),
    "pipeline.py": ("dist.recv(gradient, rank + 1)", "dist.recv(torch.empty_like(y), rank + 1)"),
    "ring_attention.py": ("[work.wait() for work in works] and theirs", "[work.wait() for work in works] and mine"),
    "tensor_parallel.py": ("    dist.all_reduce(x := x.detach().clone(), op)\n", ""),
    "ulysses.py": ("dist.all_to_all_single(y_R := torch.empty_like(x_R), x_R)", "y_R = x_R.clone()"),
    "zero.py": ("        dist.reduce_scatter(total, list(parameter.grad.flatten().chunk(RANKS)))\n", ""),
}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import everything that every forked program would import for a second."""
    import torch.distributed

    torch.optim.AdamW([torch.empty(0)])


def run(program: Path, folder: Path) -> tuple[int, str, str]:
    """Run a program in a process forked from this one, which has imported torch; exit code, output, errors."""
    out, errors = folder / "out", folder / "errors"

    def program_as_main() -> None:
        sys.stdout, sys.stderr = out.open("w"), errors.open("w")
        for file, number in ((sys.stdout, 1), (sys.stderr, 2)):
            os.dup2(file.fileno(), number)
        runpy.run_path(str(program), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=program_as_main)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"{program.name} runs for more than two minutes")
    return process.exitcode, out.read_text(), errors.read_text()


def test_every_program_has_its_fault():
    assert sorted(FAULTS) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_one_process(name, tmp_path):
    code, output, errors = run(EXAMPLES / name, tmp_path)
    assert code == 0, errors
    compared = [line for line in output.splitlines() if {"loss", "gradients", "parameters"} <= set(line.split())]
    assert len(compared) >= 3, output


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_its_communication_fails(name, tmp_path):
    text, (present, absent) = (EXAMPLES / name).read_text(), FAULTS[name]
    assert text.count(present) == 1
    (tmp_path / name).write_text(text.replace(present, absent))
    code, output, errors = run(tmp_path / name, tmp_path)
    assert code != 0, output
    assert "not equal to one process" in errors, errors


@pytest.mark.slow
def test_a_program_starts_from_the_command_line():
    command = [sys.executable, str(EXAMPLES / "ulysses.py")]
    assert "loss" in subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_fits_a_lesson(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 120
    assert "ingot" not in text
