"""Units: parameters that are gathered and reduced together, and the rows of a matrix that each rank owns.

Both forms of data parallelism (zero.py, fsdp.py) divide a stage into the same units and rows. The experts of a unit are
exchanged separately, because the ranks that share them differ from those that share the rest of the unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ingot.plugins.piece import PlacedBlock, PlacedParameter
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.tensor import TensorCut


@dataclass(frozen=True)
class ShardingUnit:
    """Parameters of a stage that are gathered and reduced together.

    modules: the modules with these parameters, in the order in which they run. names: the unit's parameters without
    experts, as named in the stage. experts, expert_names: the same for the experts, which run inside `modules`.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    experts: tuple[nn.Module, ...] = ()
    expert_names: tuple[str, ...] = ()


def cut_units(stage: nn.Module, unit_layers: int, cuts: Mapping[str, TensorCut]) -> list[ShardingUnit]:
    """Divide a stage into units, in the order of the forward: embedding, last norm and head; then groups of blocks.

    unit_layers: the number of blocks in a group; 0 makes the whole stage one unit.
    """
    blocks = dict(stage.get_submodule("blocks").named_children())
    names = [name for name, _ in stage.named_parameters()]
    if unit_layers == 0:
        return [_unit(stage, (stage,), names, cuts)]
    outside = [name for name in names if not name.startswith("blocks.")]
    keys = list(blocks)
    groups = [keys[i : i + unit_layers] for i in range(0, len(keys), unit_layers)]
    units = [_unit(stage, (stage,), outside, cuts)] if outside else []
    for group in groups:
        inside = [n for n in names if n.startswith(tuple(f"blocks.{key}." for key in group))]
        units.append(_unit(stage, tuple(blocks[key] for key in group), inside, cuts))
    return units


def _unit(
    stage: nn.Module, modules: tuple[nn.Module, ...], names: list[str], cuts: Mapping[str, TensorCut]
) -> ShardingUnit:
    of_experts = tuple(name for name in names if cuts[name].view == "expert_shard")
    # blocks.3.moe.experts.gate.weight: a matrix of a stack of experts.
    experts = dict.fromkeys(name.rsplit(".", 2)[0] for name in of_experts)
    dense = tuple(name for name in names if name not in of_experts)
    return ShardingUnit(modules, dense, tuple(stage.get_submodule(name) for name in experts), of_experts)


def own_rows(rows: int, ranks: int, index: int) -> range:
    """Return the rows that rank `index` of `ranks` owns: equal parts, rounded up; the last ranks may have fewer."""
    part = -(-rows // ranks)
    return range(min(index * part, rows), min((index + 1) * part, rows))


def placement(cuts: Mapping[str, TensorCut], mesh: Mesh) -> dict[str, PlacedParameter]:
    """Return, for each parameter, its blocks on all ranks of this copy of the stage.

    mesh: with the view "copy". Every rank computes the same, without communication.
    """
    ranks = mesh.ranks("copy")
    index = {view: {rank: i for line in lines for i, rank in enumerate(line)} for view, lines in mesh.lines.items()}
    index["tp"] = {rank: place % mesh.size("tp") for place, rank in enumerate(ranks)}  # tp is the innermost axis
    return {
        name: PlacedParameter(cut.shape, cut.stack, tuple(_placed(cut, rank, index, mesh) for rank in ranks))
        for name, cut in cuts.items()
    }


def _placed(cut: TensorCut, rank: int, index: Mapping[str, Mapping[int, int]], mesh: Mesh) -> PlacedBlock:
    offsets, sizes = [0] * len(cut.shape), list(cut.shape)
    if cut.dim is not None:
        sizes[cut.dim] //= mesh.size(cut.axis)
        offsets[cut.dim] = sizes[cut.dim] * index[cut.axis][rank]
    rows = own_rows(sizes[0], mesh.size(cut.view), index[cut.view][rank])
    return PlacedBlock(rank, (offsets[0] + rows.start, *offsets[1:]), (len(rows), *sizes[1:]))


def is_owner(cut: TensorCut, parameter: Tensor, mesh: Mesh) -> bool:
    """Return whether this rank is the first of the ranks that hold the same block.

    cut: the TensorCut of the parameter. parameter: its local tensor before its rows are divided. Ranks that divide the
    rows hold different blocks.
    """
    if mesh.index("dp_replicate") > 0:
        return False
    if cut.view == "expert_shard":
        return True
    whole_on_tp, whole_on_cp = tuple(parameter.shape) == cut.shape, mesh.parallel.reduce == "canonical"
    return not (whole_on_tp and mesh.index("tp") > 0) and not (whole_on_cp and mesh.index("cp") > 0)
