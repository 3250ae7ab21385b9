"""The teaching programs run by themselves, stay short, and notice when their communication is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
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


def run(program: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_every_program_has_its_fault():
    assert sorted(FAULTS) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_one_process(name):
    result = run(EXAMPLES / name)
    assert result.returncode == 0, result.stderr
    compared = [line for line in result.stdout.splitlines() if {"loss", "gradients", "parameters"} <= set(line.split())]
    assert len(compared) >= 3, result.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_its_communication_fails(name, tmp_path):
    text, (present, absent) = (EXAMPLES / name).read_text(), FAULTS[name]
    assert text.count(present) == 1
    (tmp_path / name).write_text(text.replace(present, absent))
    result = run(tmp_path / name)
    assert result.returncode != 0, result.stdout
    assert "not equal to one process" in result.stderr, result.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_fits_a_lesson(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 120
    assert "ingot" not in text
