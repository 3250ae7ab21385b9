"""A run that cannot name slow ranks, or drain their machines, shows why."""

from types import SimpleNamespace

import pytest
import torch

from ingot.schema.launch import Launch
from ingot.trainer import slow_ranks
from ingot.trainer.mesh.start import RankInfo


def made(*, device="cpu", rank=0, ep=1, groups=((0, 1, 2, 3),), **launch):
    """Return the watch and the judge of machines of four ranks on two machines, and the lines that were shown."""
    settings = Launch(**{"nodes": 2, "on_straggler": "drain"} | launch)
    config, mesh = SimpleNamespace(launch=settings), SimpleNamespace(equal_work=lambda: groups)
    mesh.parallel = SimpleNamespace(ep=ep)
    place = RankInfo(rank=rank, world_size=4, local_rank=0, local_world_size=2, attempt=0, device=torch.device(device))
    lines = []
    watch = slow_ranks.straggler_watch(config, mesh, place, lines.append)
    return watch, watch and slow_ranks.slow_machines(config, mesh, place, lines.append), lines


@pytest.mark.parametrize("off", [{"straggler_factor": 0.0}, {"on_bad_health": "warn"}])
def test_a_drain_that_would_have_no_effect_is_refused(off):
    assert [key for key, _ in Launch(on_straggler="drain", **off).problems()] == ["on_straggler"]
    assert not list(Launch(**off).problems()) and not list(Launch(on_straggler="drain").problems())


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv(slow_ranks.SUPERVISOR_VARIABLE, "1")


def test_a_run_that_can_drain_machines_shows_nothing(launched):
    watch, machines, lines = made()
    assert watch and machines and not lines
    assert made(rank=1) == (None, None, [])
    watch, machines, lines = made(on_straggler="report")
    assert watch and machines is None and not lines


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nodes": 1}, "the only one"),
        ({"ep": 2}, "experts"),
        ({"groups": ((0,), (1,))}, "no two ranks"),
    ],
)
def test_ranks_are_named_where_no_machine_can_be_drained(launched, settings, why):
    watch, machines, (line,) = made(**settings)
    assert watch and machines is None and why in line


def test_ranks_without_a_launcher_cannot_lose_a_machine(monkeypatch):
    monkeypatch.delenv(slow_ranks.SUPERVISOR_VARIABLE, raising=False)
    _, machines, (line,) = made()
    assert machines is None and "no launcher" in line


def test_ranks_on_gpus_are_not_named(launched):
    watch, machines, (line,) = made(device="cuda")
    assert watch is None and machines is None and "none is drained" in line
    assert "drained" not in made(device="cuda", on_straggler="report")[2][0]
    assert made(device="cuda", on_straggler="report", straggler_factor=0.0)[2] == []
