"""Groups have the names of the axes that their members differ on: those of the mesh that the trainer builds."""

import pytest

from ingot.rehearse.dryrun.mesh_world import Grid
from ingot.schema.parallel import Parallel
from ingot.theory.traffic import spanned

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@pytest.mark.parametrize(
    ("settings", "view", "expected"),
    [
        ({"dp_shard": 4}, "shard", "dp_shard"),
        ({"cp": 4}, "shard", "cp"),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, "shard", "dp_shard+cp"),
        ({"dp_replicate": 2, "cp": 2, "reduce": "canonical"}, "shard", ""),
        ({"cp": 2, "tp": 2}, "sequence", "cp+tp"),
        ({"dp_shard": 2, "tp": 2}, "sequence", "tp"),
        ({"dp_shard": 4, "ep": 2}, "ep", "dp_shard"),
        ({"dp_shard": 4, "ep": 2}, "expert_shard", "dp_shard"),
        ({"dp_shard": 4, "ep": 4}, "expert_shard", ""),
        ({"dp_shard": 2, "tp": 4, "ep": 2}, "ep", "tp"),
        ({"dp_shard": 2, "tp": 4, "ep": 2}, "expert_shard", "dp_shard+tp"),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, "ep", "cp+tp"),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, "expert_shard", "dp_shard"),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 8}, "ep", "dp_shard+cp+tp"),
    ],
)
def test_views_are_named_by_the_axes_they_span(settings, view, expected):
    assert spanned(Parallel(**settings), view) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2},
        {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2, "reduce": "canonical", "virtual_ranks": 2},
    ],
    ids=str,
)
def test_names_are_those_of_the_meshs_views(fork_ranks, settings):
    pytest.importorskip("torch")
    parallel = Parallel(ulysses=1, **settings)
    views = ("shard", "sequence", "ep", "expert_shard")
    grid = Grid({axis: getattr(parallel, axis) for axis in AXES})

    def lines(rank, world):
        from ingot.trainer.mesh.mesh import build_mesh

        mesh = build_mesh(parallel, "cpu", experts=True)
        return [mesh.ranks(view) for view in views]

    for of_rank in fork_ranks(lines, parallel.world_size):
        assert ["+".join(grid.axes(line)) for line in of_rank] == [spanned(parallel, view) for view in views]
